"""Top-K, top-1 probability and entropy of every row of logits in one pass over the vocabulary, and whether it is finite.

The vocabulary is split over programs; each leaves the sums of its part (relative to its own maximum) and the largest entry of
every group of 128. The K largest entries of a row lie in the K groups whose largest entries are largest: a second, small
launch finds those, reads them again and picks. Entries are compared as int32 with the order of their values; ties go to the
lower id.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common.errors import DSpineError
from dspine.common.signals import DraftCandidates, DraftSignals
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, early, expect_dtype, overlaps, power_of_2, programs_of

SLICE, MOST = 4096, 64  # entries of the vocabulary a program reads; largest K
GROUP, MOST_GROUPS = 128, 8192  # entries of a group; groups of a row, at most
_GONE, _LEAST = tl.constexpr(-(2**31)), tl.constexpr(-(2**63))


@triton.jit
def _ordered(x):
    """float32 -> int32 in the same order, above `_GONE`."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _GONE + 1)


@triton.jit
def _keyed(value, index):
    """int64 in the order of `value` int32, of equal ones the lower `index` (0 or more) first: one maximum finds both."""
    return (value.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _of_key(key):
    return (key >> 32).to(tl.int32)


@triton.jit
def _id_of_key(key):
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _signals_part_kernel(
    logits, tops, sums, vocabulary, parts, SIZE: tl.constexpr, GROUP: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    GROUPS: tl.constexpr = SIZE // GROUP
    group = tl.arange(0, GROUPS)
    ids = part * SIZE + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = ids < vocabulary
    x = tl.load(logits + row * vocabulary + ids, mask=inside, other=float("-inf")).to(tl.float32)
    tl.store(tops + (row * parts + part) * GROUPS + group, tl.max(tl.where(inside, _ordered(x), _GONE), 1))
    most = tl.max(tl.max(x, 1), 0)
    possible = x > float("-inf")  # a part may hold nothing else
    shifted = tl.where(possible, x - tl.where(most > float("-inf"), most, 0.0), 0.0)
    weights = tl.where(possible, tl.exp(shifted), 0.0)
    finite = tl.where(inside & (tl.abs(x) < float("inf")), 1.0, tl.where(inside, 0.0, 1.0))
    place = sums + (row * parts + part) * 4
    tl.store(place, most)
    tl.store(place + 3, tl.min(tl.min(finite, 1), 0))
    tl.store(place + 1, tl.sum(tl.sum(weights, 1), 0))
    tl.store(place + 2, tl.sum(tl.sum(weights * shifted, 1), 0))


@triton.jit
def _signals_join_kernel(
    logits, tops, sums, values, ids, confidence, entropy, finite, vocabulary, parts, groups,
    K: tl.constexpr, KP: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row. groups: of a row; GROUPS: the power of two above."""
    row = tl.program_id(0).to(tl.int64)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    part = tl.arange(0, PARTS)
    inside = part < parts
    place = sums + (row * parts + part) * 4
    most = tl.load(place, mask=inside, other=float("-inf"))
    peak = tl.max(most, 0)
    possible = most > float("-inf")
    shift = tl.where(possible, most - peak, 0.0)
    scale = tl.where(possible, tl.exp(shift), 0.0)
    part_total = tl.load(place + 1, mask=inside, other=0.0)
    total = tl.sum(scale * part_total, 0)
    moment = tl.sum(scale * (tl.load(place + 2, mask=inside, other=0.0) + shift * part_total), 0)
    tl.store(confidence + row, 1.0 / total)
    tl.store(entropy + row, tl.log(total) - moment / total)
    tl.store(finite + row, tl.min(tl.load(place + 3, mask=inside, other=1.0), 0) > 0.0)
    group, slot = tl.arange(0, GROUPS), tl.arange(0, KP)
    top = tl.load(tops + row * groups + group, mask=group < groups, other=_GONE)
    keys = _keyed(top, group)
    chosen = tl.full([KP], -1, tl.int32)
    for i in tl.static_range(K):
        best = tl.max(keys, 0)
        chosen = tl.where((slot == i) & (_of_key(best) > _GONE), _id_of_key(best), chosen)
        keys = tl.where(keys == best, _LEAST, keys)
    entry = tl.arange(0, KP * GROUP)
    owner = tl.reshape(tl.broadcast_to(chosen[:, None], [KP, GROUP]), [KP * GROUP])
    token = owner * GROUP + entry % GROUP
    known = (owner >= 0) & (token < vocabulary)
    left = _ordered(tl.load(logits + row * vocabulary + token, mask=known, other=0.0).to(tl.float32))
    keys = tl.where(known, _keyed(left, token), _LEAST)
    picked, bits = tl.zeros([KP], tl.int32), tl.zeros([KP], tl.int32)
    for i in tl.static_range(K):
        best = tl.max(keys, 0)
        picked, bits = tl.where(slot == i, _id_of_key(best), picked), tl.where(slot == i, _of_key(best), bits)
        keys = tl.where(keys == best, _LEAST, keys)
    value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(values + row * K + slot, value, mask=slot < K)
    tl.store(ids + row * K + slot, picked.to(tl.int64), mask=slot < K)


def supports(logits: Tensor, k: int) -> bool:
    """bfloat16 and float32 logits, K up to 64."""
    return logits.dtype in FLOATS and k <= MOST


def draft_signals(logits: Tensor, k: int) -> DraftSignals:
    """`common.signals.draft_signals`: logits [..., V] -> values, ids int64 [..., K], confidence, entropy [...]."""
    where = "draft_signals"
    vocabulary = logits.shape[-1]
    if not 1 <= k <= min(vocabulary, MOST):
        raise DSpineError(f"{where}: k must be 1..{min(vocabulary, MOST)} (vocabulary {vocabulary}), got {k}")
    expect_dtype(where, "logits", logits, *FLOATS)
    shape, rows, device = logits.shape[:-1], math.prod(logits.shape[:-1]), logits.device
    size = min(programs_of(vocabulary, SLICE), power_of_2(vocabulary, GROUP))
    each = max(GROUP, power_of_2(triton.cdiv(vocabulary, MOST_GROUPS)))
    size, parts, padded = max(size, each), triton.cdiv(vocabulary, max(size, each)), power_of_2(k)
    groups = parts * (size // each)
    tops = torch.empty((rows, groups), dtype=torch.int32, device=device)
    sums = torch.empty((rows, parts, 4), dtype=torch.float32, device=device)
    values = torch.empty((rows, k), dtype=torch.float32, device=device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=device)
    confidence, entropy = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    if rows:
        flat, later = logits.reshape(rows, vocabulary).contiguous(), early(overlaps(logits))
        _signals_part_kernel[(parts, rows)](flat, tops, sums, vocabulary, parts, SIZE=size, GROUP=each, num_warps=4, **later)
        _signals_join_kernel[(rows,)](
            flat, tops, sums, values, ids, confidence, entropy, finite, vocabulary, parts, groups, K=k, KP=padded,
            PARTS=power_of_2(parts), GROUPS=power_of_2(groups), GROUP=each, num_warps=4, **later,
        )  # fmt: skip
    each_row = (confidence.view(shape), entropy.view(shape), finite.view(shape))
    return DraftSignals(values.view(*shape, k), ids.view(*shape, k), *each_row)


def draft_candidates(logits: Tensor, k: int) -> DraftCandidates:
    """`common.signals.draft_candidates`: the same two launches."""
    found = draft_signals(logits, k)
    return DraftCandidates(found.values, found.ids, found.finite)


def register() -> None:
    """Tell the core about `draft_signals` and `draft_candidates` on CUDA."""
    _launch.register(draft_signals, supports)
    _launch.register(draft_candidates, supports)
