"""The end of a round in one launch: emitted tokens, counters and the report; one program a sequence."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from dspine.common import settling
from dspine.common.settling import Counters, Settled
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import contiguous, early, overlaps, power_of_2

LONGEST, MOST_STOPS = 64, 256
_HEAD = tl.constexpr(settling.REPORT_HEAD)


@triton.jit
def _settle_round_kernel(
    accepted, next_token, block, finite, lengths, anchor, remaining, generated, stops, report, m_out, before_out, w, ends,
    ROWS: tl.constexpr, PAD: tl.constexpr, STOPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()  # and no gdc_launch_dependents: what follows may read lengths and m before its own wait (`_launch.early`)
    batch = tl.program_id(0)
    i, j = tl.arange(0, PAD), tl.arange(0, STOPS)
    count = tl.load(accepted + batch).to(tl.int32)
    token = tl.load(next_token + batch).to(tl.int32)
    length, left = tl.load(lengths + batch), tl.load(remaining + batch)
    live = tl.minimum(left, w)
    held = tl.load(block + batch * ROWS + i, mask=i < ROWS, other=0)
    drafted = tl.load(block + batch * ROWS + i + 1, mask=i < w - 1, other=0)
    emitted = tl.where(i < tl.minimum(count, w - 1), drafted, token)
    stop = tl.load(stops + j, mask=j < ends, other=-1)
    hit = (emitted[:, None] == stop[None, :]) & (j < ends)[None, :]
    is_end = (tl.max(hit.to(tl.int32), 1) > 0) & (i <= count) & (i < w)
    first = tl.min(tl.where(is_end, i, w), 0)
    m = tl.minimum(tl.minimum(count + 1, first + 1), live)
    last = tl.sum(tl.where(i == m - 1, emitted, 0), 0)
    place = report + batch * (_HEAD + 2 * ROWS)
    tl.store(place, m)
    tl.store(place + 1, count)
    tl.store(place + 2, live)
    tl.store(place + 3, tl.load(finite + batch).to(tl.int32))
    tl.store(place + _HEAD + i, held, mask=i < ROWS)
    tl.store(place + _HEAD + ROWS + i, emitted, mask=i < w)
    tl.store(m_out + batch, m)
    tl.store(before_out + batch, length)
    tl.store(lengths + batch, length + m)
    tl.store(generated + batch, tl.load(generated + batch) + m)
    tl.store(anchor + batch, tl.where(m > 0, last, tl.load(anchor + batch)))
    tl.store(remaining + batch, tl.where((first < m) & (live > 0), 0, left - m))


def supports(
    accepted: Tensor,
    next_token: Tensor,
    block: Tensor,
    finite: Tensor,
    counters: Counters,
    stops: Tensor,
    report: Tensor,
    w: int,
) -> bool:
    """Blocks of up to 64 tokens, up to 256 stop tokens, everything contiguous."""
    held = (*vars(counters).values(), block, report)
    return block.shape[1] <= LONGEST and stops.shape[0] <= MOST_STOPS and all(x.is_contiguous() for x in held)


def settle_round(
    accepted: Tensor,
    next_token: Tensor,
    block: Tensor,
    finite: Tensor,
    counters: Counters,
    stops: Tensor,
    report: Tensor,
    w: int,
) -> Settled:
    """`common.settling.settle_round`: the same arguments, results and errors; writes `counters` and `report`, which must be
    contiguous."""
    settling.check_settle_round(accepted, next_token, block, finite, counters, stops, report, w)
    contiguous("settle_round", block=block, report=report, **vars(counters))
    m, before = torch.empty_like(counters.lengths), torch.empty_like(counters.lengths)
    batch, rows = block.shape
    if batch:
        _settle_round_kernel[(batch,)](
            accepted.contiguous(), next_token.contiguous(), block, finite.contiguous(), counters.lengths, counters.anchor,
            counters.remaining, counters.generated, stops.contiguous(), report, m, before, w, stops.shape[0],
            ROWS=rows, PAD=power_of_2(rows), STOPS=power_of_2(stops.shape[0]), num_warps=1, **early(overlaps(block)),
        )  # fmt: skip
    return Settled(m, before, counters, report)


def register() -> None:
    """Tell the core about `settle_round` on CUDA."""
    _launch.register(settle_round, supports)
