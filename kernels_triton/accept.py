"""Which drafts stay (`algorithms` 2): greedy, the point-mass rule and rejection, with per-row limits.

All split the vocabulary over programs and join in a second, small launch. The draw is the two-level inverse CDF of
`common.sampling.sample_index`: sums of 256 entries, then inside one of them.

From logits, no probability is written: the first launch leaves the sums of 256 weights of every row, relative to the largest
of its part. The second scales those of the one row that is drawn from, and makes again the few sums whose entries the rule
takes mass from (a difference of sums would lose it). Point mass is rejection from a distribution of one token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common.acceptance import Verdict
from dspine.common.errors import DSpineError
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, early, expect_dtype, expect_shape, overlaps, power_of_2, programs_of

SLICE = 8192  # logits that a program of the greedy rule reads
BLOCK, BLOCKS = 256, 16  # the draw: entries of a sum, sums of a program


@triton.jit
def _leading(yes, limit, i):
    """How many of `yes` [WP] hold from the start, looking at the first `limit` only."""
    size: tl.constexpr = yes.shape[0]
    return tl.min(tl.where(yes & (i < limit), size, i), 0)


@triton.jit
def _argmax_part_kernel(logits, values, ids, vocabulary, parts, SIZE: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = part * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * vocabulary + lane, mask=lane < vocabulary, other=float("-inf")).to(tl.float32)
    tl.store(values + row * parts + part, tl.max(x, 0))
    # of entries that are not numbers the maximum may be any lane, also one behind the vocabulary
    tl.store(ids + row * parts + part, tl.minimum(part * SIZE + tl.argmax(x, 0).to(tl.int32), vocabulary - 1))


@triton.jit
def _accept_greedy_kernel(
    values, ids, draft, limit, accepted, next_token, parts, draft_step,
    W: tl.constexpr, WP: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    batch = tl.program_id(0).to(tl.int64)
    i, part = tl.arange(0, WP), tl.arange(0, PARTS)
    at = (batch * W + i)[:, None] * parts + part[None, :]
    x = tl.load(values + at, mask=(i < W)[:, None] & (part < parts)[None, :], other=float("-inf"))
    best = tl.minimum(tl.argmax(x, 1), parts - 1)  # as above
    choice = tl.load(ids + (batch * W + i) * parts + best, mask=i < W, other=-1)
    drafted = tl.load(draft + batch * draft_step + i, mask=i < W - 1, other=-2).to(tl.int32)
    count = _leading((choice == drafted) & (i < W - 1), tl.load(limit + batch), i)
    tl.store(accepted + batch, count.to(tl.int32))
    tl.store(next_token + batch, tl.sum(tl.where(i == count, choice, 0), 0).to(tl.int64))


@triton.jit
def _accepted(p, draft, limit, u_accept, batch, vocabulary, W: tl.constexpr, WP: tl.constexpr):
    """(accepted, the draft rejected after them or -1)."""
    i = tl.arange(0, WP)
    inside = i < W - 1
    drafted = tl.load(draft + batch * (W - 1) + i, mask=inside, other=0).to(tl.int32)
    chance = tl.load(p + (batch * W + i) * vocabulary + drafted, mask=inside, other=0.0)
    u = tl.load(u_accept + batch * (W - 1) + i, mask=inside, other=1.0)
    cap = tl.load(limit + batch)
    count = _leading((u < chance) & inside, cap, i)
    rejected = tl.sum(tl.where(i == count, drafted, 0), 0)
    return count, tl.where((count < cap) & (count < W - 1), rejected, -1)


@triton.jit
def _mass_kernel(
    p, draft, limit, u_accept, sums, vocabulary, blocks,
    W: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    count, rejected = _accepted(p, draft, limit, u_accept, batch, vocabulary, W, WP)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    lane = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(p + (batch * W + count) * vocabulary + lane, mask=lane < vocabulary, other=0.0)
    tl.store(sums + batch * blocks + block, tl.sum(tl.where(lane == rejected, 0.0, x), 1), mask=block < blocks)


@triton.jit
def _draw(weights, threshold, lane):
    """First index whose running sum exceeds `threshold`, and the sum before it; clamped to positive weights."""
    running = tl.cumsum(weights, 0)
    positive = weights > 0.0
    last = tl.max(tl.where(positive, lane, 0), 0)
    index = tl.min(tl.where(positive & (running > threshold), lane, last), 0)
    return index, tl.sum(tl.where(lane == index, running - weights, 0.0), 0)


@triton.jit
def _draw_kernel(
    p, draft, limit, u_accept, u_draw, sums, accepted, next_token, vocabulary, blocks,
    W: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    count, rejected = _accepted(p, draft, limit, u_accept, batch, vocabulary, W, WP)
    u = tl.load(u_draw + batch * W + count)
    block = tl.arange(0, BLOCKS_PAD)
    mass = tl.load(sums + batch * blocks + block, mask=block < blocks, other=0.0)
    total = tl.sum(mass, 0)
    at, before = _draw(mass, u * total, block)
    lane = tl.arange(0, BLOCK)
    ids = at * BLOCK + lane
    x = tl.load(p + (batch * W + count) * vocabulary + ids, mask=ids < vocabulary, other=0.0)
    inside, _ = _draw(tl.where(ids == rejected, 0.0, x), u * total - before, lane)
    # without mass outside the rejected draft (only rounding can do that) it is the draft itself
    token = tl.where((total > 0.0) | (rejected < 0), at * BLOCK + inside, rejected)
    tl.store(accepted + batch, count.to(tl.int32))
    tl.store(next_token + batch, token.to(tl.int64))


@triton.jit
def _weights_part_kernel(
    logits, sums, peaks, totals, vocabulary, parts, temperature,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Of one row and part: its largest entry, the sums of BLOCK weights relative to it, and their sum."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    block = part * BLOCKS + tl.arange(0, BLOCKS)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * vocabulary + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
    peak = tl.max(tl.max(x, 1), 0)
    weights = tl.exp((x - tl.where(peak > float("-inf"), peak, 0.0)) / temperature)
    found = tl.sum(weights, 1)
    tl.store(sums + row * parts * BLOCKS + block, found)
    tl.store(peaks + row * parts + part, peak)
    tl.store(totals + row * parts + part, tl.sum(found, 0))


@triton.jit
def _taken(ids, candidates, q, here, rejected, K: tl.constexpr):
    """What the rule takes from p of `ids` at drafted row `here`: q of a candidate; all of the one draft where K is 0."""
    taken = tl.zeros_like(ids).to(tl.float32)
    if K == 0:
        taken = tl.where(ids == tl.load(candidates + here, mask=rejected, other=-1).to(tl.int32), 2.0, taken)
    for k in tl.static_range(K):
        token = tl.load(candidates + here * K + k, mask=rejected, other=-1).to(tl.int32)
        taken += tl.where(ids == token, tl.load(q + here * K + k, mask=rejected, other=0.0), 0.0)
    return taken


@triton.jit
def _judge_kernel(
    logits, sums, peaks, totals, draft, limit, candidates, q, u_accept, u_draw, accepted, next_token, vocabulary, parts,
    temperature, draft_step, candidates_step, q_step, accept_step, draw_step,
    W: tl.constexpr, WP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKS_PAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One sequence. K: candidates of a draft, 0 for the point-mass rule (`candidates` is then the drafts)."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    batch = tl.program_id(0).to(tl.int64)
    i, part = tl.arange(0, WP), tl.arange(0, PARTS)
    at = (batch * W + i)[:, None] * parts + part[None, :]
    held = (i < W)[:, None] & (part < parts)[None, :]
    peak = tl.load(peaks + at, mask=held, other=float("-inf"))
    most = tl.max(peak, 1)
    most = tl.where(most > float("-inf"), most, 0.0)
    scale = tl.exp((peak - most[:, None]) / temperature)
    total = tl.sum(scale * tl.load(totals + at, mask=held, other=0.0), 1)
    count = tl.zeros([], tl.int32)
    rejected = tl.zeros([], tl.int32) > 0
    if W > 1:
        inside = i < W - 1
        drafted = tl.load(draft + batch * draft_step + i, mask=inside, other=0).to(tl.int32)
        x = tl.load(logits + (batch * W + i) * vocabulary + drafted, mask=inside, other=float("-inf")).to(tl.float32)
        chance = tl.exp((x - most) / temperature) / tl.where(inside, total, 1.0)
        u = tl.load(u_accept + batch * accept_step + i, mask=inside, other=1.0)
        if K > 0:
            slot = tl.arange(0, KP)
            known = inside[:, None] & (slot < K)[None, :]
            ids = tl.load(candidates + batch * candidates_step + i[:, None] * K + slot[None, :], mask=known, other=-1)
            mass = tl.load(q + batch * q_step + i[:, None] * K + slot[None, :], mask=known, other=0.0)
            u *= tl.sum(tl.where(ids.to(tl.int32) == drafted[:, None], mass, 0.0), 1)
        cap = tl.load(limit + batch).to(tl.int32)
        count = _leading((u < chance) & inside, cap, i).to(tl.int32)
        rejected = (count < cap) & (count < W - 1)
    # the row that is drawn from
    row = batch * W + count
    top, whole = tl.sum(tl.where(i == count, most, 0.0), 0), tl.sum(tl.where(i == count, total, 0.0), 0)
    block = tl.arange(0, BLOCKS_PAD)
    there = block < parts * BLOCKS
    lift = tl.load(peaks + row * parts + block // BLOCKS, mask=there, other=float("-inf"))
    mass = tl.load(sums + row * parts * BLOCKS + block, mask=there, other=0.0)
    mass = mass * tl.exp((lift - top) / temperature) / whole
    lane = tl.arange(0, BLOCK)
    line = logits + row * vocabulary
    if W > 1:
        slot = tl.arange(0, KP)
        here = count.to(tl.int64)
        owners = candidates + batch * candidates_step
        shares = q + batch * q_step
        each: tl.constexpr = K if K > 0 else 1
        token = tl.load(owners + here * each + slot, mask=rejected & (slot < each), other=-1).to(tl.int32)
        group = tl.where(token >= 0, token // BLOCK, -1)
        ids = group[:, None] * BLOCK + lane[None, :]
        x = tl.load(line + ids, mask=(ids >= 0) & (ids < vocabulary), other=float("-inf")).to(tl.float32)
        p = tl.exp((x - top) / temperature) / whole
        left = tl.sum(tl.maximum(p - _taken(ids, owners, shares, here, rejected, K), 0.0), 1)
        again = tl.max(tl.where(block[None, :] == group[:, None], left[:, None], -1.0), 0)
        changed = tl.where(again >= 0.0, again, mass)
        rejected = rejected & (tl.sum(changed, 0) > 0.0)  # only rounding can leave nothing: then the row as it is
        mass = tl.where(rejected, changed, mass)
    amount = tl.load(u_draw + batch * draw_step + count) * tl.sum(mass, 0)
    where, before = _draw(mass, amount, block)
    ids = where * BLOCK + lane
    x = tl.load(line + ids, mask=ids < vocabulary, other=float("-inf")).to(tl.float32)
    p = tl.exp((x - top) / temperature) / whole
    if W > 1:
        p = tl.maximum(p - _taken(ids, owners, shares, here, rejected, K), 0.0)
    found, _ = _draw(p, amount - before, lane)
    tl.store(accepted + batch, count)
    tl.store(next_token + batch, tl.where(whole > 0.0, where * BLOCK + found, 0).to(tl.int64))


def supports_greedy(logits: Tensor, *_: object, **__: object) -> bool:
    """bfloat16 and float32 logits."""
    return logits.dtype in FLOATS


def supports_point_mass(p: Tensor, *_: object, **__: object) -> bool:
    """float32 probabilities over a vocabulary of up to 2 million."""
    return p.dtype == torch.float32 and p.shape[-1] <= 2**21


def _holds(logits: Tensor, temperature: float) -> bool:
    """What a program of the second launch can hold: half a million tokens, 16 rows."""
    fits = logits.dim() == 3 and logits.shape[1] <= 16 and logits.shape[-1] <= 2**19
    return logits.dtype in FLOATS and fits and temperature > 0


def supports_point_mass_logits(
    logits: Tensor, draft: Tensor, limit: Tensor, u_accept: Tensor, u_draw: Tensor, temperature: float
) -> bool:
    """bfloat16 and float32 logits over a vocabulary of up to 2^19, up to 16 rows."""
    return _holds(logits, temperature)


def supports_rejection_logits(
    logits: Tensor, draft: Tensor, limit: Tensor, candidates: Tensor, q: Tensor, u_accept: Tensor, u_draw: Tensor,
    temperature: float,
) -> bool:  # fmt: skip
    """The same, with up to 16 candidates of float32 q."""
    return _holds(logits, temperature) and 0 < candidates.shape[-1] <= 16 and q.dtype == torch.float32


def _check(where: str, name: str, p: Tensor, draft: Tensor, limit: Tensor) -> tuple[int, int, int]:
    if p.dim() != 3 or not p.shape[1]:
        raise DSpineError(f"{where}: {name} must have shape [B, w, V] with w of at least 1, got {tuple(p.shape)}")
    batch, count, vocabulary = p.shape
    expect_shape(where, "draft", draft, (batch, count - 1))
    expect_shape(where, "limit", limit, (batch,))
    for what, x in (("draft", draft), ("limit", limit)):
        expect_dtype(where, what, x, torch.int32, torch.int64)
    return batch, count, vocabulary


def _verdict(like: Tensor) -> Verdict:
    accepted = torch.empty(like.shape[0], dtype=torch.int32, device=like.device)
    return Verdict(accepted, torch.empty(like.shape[0], dtype=torch.int64, device=like.device))


def accept_greedy(logits: Tensor, draft: Tensor, limit: Tensor) -> Verdict:
    """`common.acceptance.accept_greedy`: logits [B, w, V], draft int [B, w-1], limit int [B]."""
    where = "accept_greedy"
    batch, count, vocabulary = _check(where, "logits", logits, draft, limit)
    expect_dtype(where, "logits", logits, *FLOATS)
    verdict = _verdict(logits)
    size = min(SLICE, power_of_2(vocabulary))
    parts = triton.cdiv(vocabulary, size)
    values = torch.empty((batch, count, parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((batch, count, parts), dtype=torch.int32, device=logits.device)
    if batch:
        draft, later = _rows(draft), early(overlaps(logits))
        _argmax_part_kernel[(parts, batch * count)](
            logits.contiguous(), values, ids, vocabulary, parts, SIZE=size, num_warps=8, **later
        )
        _accept_greedy_kernel[(batch,)](
            values, ids, draft, limit.contiguous(), verdict.accepted, verdict.next_token, parts, draft.stride(0),
            W=count, WP=power_of_2(count), PARTS=power_of_2(parts), num_warps=4, **later,
        )  # fmt: skip
    return verdict


def accept_point_mass(p: Tensor, draft: Tensor, limit: Tensor, u_accept: Tensor, u_draw: Tensor) -> Verdict:
    """`common.acceptance.accept_point_mass`: p float32 [B, w, V], u_accept [B, w-1], u_draw [B, w]."""
    where = "accept_point_mass"
    batch, count, vocabulary = _check(where, "p", p, draft, limit)
    for name, x, shape in (("u_accept", u_accept, (batch, count - 1)), ("u_draw", u_draw, (batch, count))):
        expect_shape(where, name, x, shape)
        expect_dtype(where, name, x, torch.float32)
    expect_dtype(where, "p", p, torch.float32)
    verdict = _verdict(p)
    blocks = triton.cdiv(vocabulary, BLOCK)
    sums = torch.empty((batch, blocks), dtype=torch.float32, device=p.device)
    if batch:
        inputs = [x.contiguous() for x in (p, draft, limit, u_accept)]
        padded = power_of_2(count)
        _mass_kernel[(triton.cdiv(blocks, BLOCKS), batch)](
            *inputs, sums, vocabulary, blocks, W=count, WP=padded, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=4
        )
        _draw_kernel[(batch,)](
            *inputs, u_draw.contiguous(), sums, verdict.accepted, verdict.next_token, vocabulary, blocks,
            W=count, WP=padded, BLOCK=BLOCK, BLOCKS_PAD=power_of_2(blocks), num_warps=4,
        )  # fmt: skip
    return verdict


def accept_point_mass_logits(
    logits: Tensor, draft: Tensor, limit: Tensor, u_accept: Tensor, u_draw: Tensor, temperature: float
) -> Verdict:
    """`common.acceptance.accept_point_mass_logits`: logits [B, w, V], u_accept [B, w-1], u_draw [B, w]."""
    return _judged("accept_point_mass_logits", logits, draft, limit, None, None, u_accept, u_draw, temperature)


def accept_rejection_logits(
    logits: Tensor, draft: Tensor, limit: Tensor, candidates: Tensor, q: Tensor, u_accept: Tensor, u_draw: Tensor,
    temperature: float,
) -> Verdict:  # fmt: skip
    """`common.acceptance.accept_rejection_logits`: candidates int and q float32 [B, w-1, K] besides."""
    return _judged("accept_rejection_logits", logits, draft, limit, candidates, q, u_accept, u_draw, temperature)


def _judged(
    where: str, logits: Tensor, draft: Tensor, limit: Tensor, candidates: Tensor | None, q: Tensor | None, u_accept: Tensor,
    u_draw: Tensor, temperature: float,
) -> Verdict:  # fmt: skip
    batch, count, vocabulary = _check(where, "logits", logits, draft, limit)
    expect_dtype(where, "logits", logits, *FLOATS)
    if not temperature > 0:
        raise DSpineError(f"{where}: temperature must be above 0, got {temperature}; greedy is accept_greedy")
    for name, x, shape in (("u_accept", u_accept, (batch, count - 1)), ("u_draw", u_draw, (batch, count))):
        expect_shape(where, name, x, shape)
        expect_dtype(where, name, x, torch.float32)
    kinds = 0 if candidates is None else candidates.shape[-1]
    if candidates is not None and q is not None:
        expect_shape(where, "candidates", candidates, (batch, count - 1, kinds))
        expect_shape(where, "q", q, (batch, count - 1, kinds))
        expect_dtype(where, "candidates", candidates, torch.int32, torch.int64)
        expect_dtype(where, "q", q, torch.float32)
    verdict = _verdict(logits)
    if batch:
        _launch_judge(logits.contiguous(), draft, limit, candidates, q, u_accept, u_draw, temperature, verdict)
    return verdict


def _launch_judge(
    logits: Tensor, draft: Tensor, limit: Tensor, candidates: Tensor | None, q: Tensor | None, u_accept: Tensor, u_draw: Tensor,
    temperature: float, verdict: Verdict,
) -> None:  # fmt: skip
    batch, count, vocabulary = logits.shape
    each = min(programs_of(triton.cdiv(vocabulary, BLOCK), BLOCKS), power_of_2(triton.cdiv(vocabulary, BLOCK)))
    parts = triton.cdiv(vocabulary, each * BLOCK)
    sums = torch.empty((batch, count, parts * each), dtype=torch.float32, device=logits.device)
    peaks, totals = (torch.empty((batch, count, parts), dtype=torch.float32, device=logits.device) for _ in range(2))
    draft, u_accept, u_draw = _rows(draft), _rows(u_accept), _rows(u_draw)
    owners, shares = (draft, u_accept) if candidates is None or q is None else (_rows(candidates), _rows(q))
    kinds = 0 if candidates is None else candidates.shape[-1]
    later = early(overlaps(logits))
    _weights_part_kernel[(parts, batch * count)](
        logits, sums, peaks, totals, vocabulary, parts, float(temperature), BLOCK=BLOCK, BLOCKS=each, num_warps=4, **later
    )
    _judge_kernel[(batch,)](
        logits, sums, peaks, totals, draft, limit.contiguous(), owners, shares, u_accept, u_draw, verdict.accepted,
        verdict.next_token, vocabulary, parts, float(temperature), draft.stride(0), owners.stride(0), shares.stride(0),
        u_accept.stride(0), u_draw.stride(0), W=count, WP=power_of_2(count), K=kinds, KP=power_of_2(max(kinds, 1)),
        PARTS=power_of_2(parts), BLOCK=BLOCK, BLOCKS=each, BLOCKS_PAD=power_of_2(parts * each), num_warps=8, **later,
    )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """`x` itself where every batch entry is contiguous (a slice of longer rows is), else a copy."""
    return x if x[:1].is_contiguous() else x.contiguous()


def register() -> None:
    """Tell the core about the acceptance rules on CUDA."""
    _launch.register(accept_greedy, supports_greedy)
    _launch.register(accept_point_mass, supports_point_mass)
    _launch.register(accept_point_mass_logits, supports_point_mass_logits)
    _launch.register(accept_rejection_logits, supports_rejection_logits)
