"""Top-K, top-1 probability and entropy of every row of logits in one pass over the vocabulary.

The vocabulary is split over programs; each leaves its K largest and the sums of its part (relative to its own maximum).
A second, small launch joins them. Ties go to the lower id: a candidate is one int64, the monotone bits of its value above
its inverted id, so no two are equal and K rounds of `max` find them.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine.common.signals import DraftSignals
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, expect_dtype, power_of_2, programs_of

SLICE, MOST = 4096, 64  # entries of the vocabulary a program reads; largest K
_LOWEST = tl.constexpr(-(2**63))
_ID_MASK = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _keys(x, ids):
    """float32 and int32 ids -> int64 that sorts by value, then by lower id."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (_ID_MASK - ids.to(tl.int64))


@triton.jit
def _signals_part_kernel(
    logits, keys, sums, vocabulary, parts, K: tl.constexpr, KP: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    ids = part * SIZE + tl.arange(0, SIZE)
    inside = ids < vocabulary
    x = tl.load(logits + row * vocabulary + ids, mask=inside, other=float("-inf")).to(tl.float32)
    most = tl.max(x, 0)
    possible = x > float("-inf")  # a part may hold nothing else
    shifted = tl.where(possible, x - tl.where(most > float("-inf"), most, 0.0), 0.0)
    weights = tl.where(possible, tl.exp(shifted), 0.0)
    place = sums + (row * parts + part) * 3
    tl.store(place, most)
    tl.store(place + 1, tl.sum(weights, 0))
    tl.store(place + 2, tl.sum(weights * shifted, 0))
    left = tl.where(inside, _keys(x, ids), _LOWEST)
    best = tl.full([KP], _LOWEST, dtype=tl.int64)
    slot = tl.arange(0, KP)
    for i in tl.static_range(K):
        top = tl.max(left, 0)
        best = tl.where(slot == i, top, best)
        left = tl.where(left == top, _LOWEST, left)
    tl.store(keys + (row * parts + part) * KP + slot, best)


@triton.jit
def _signals_join_kernel(
    keys, sums, values, ids, confidence, entropy, parts,
    K: tl.constexpr, KP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    inside = part < parts
    place = sums + (row * parts + part) * 3
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
    entry = tl.arange(0, PARTS * KP)
    left = tl.load(keys + row * parts * KP + entry, mask=entry < parts * KP, other=_LOWEST)
    best = tl.full([KP], _LOWEST, dtype=tl.int64)
    slot = tl.arange(0, KP)
    for i in tl.static_range(K):
        top = tl.max(left, 0)
        best = tl.where(slot == i, top, best)
        left = tl.where(left == top, _LOWEST, left)
    ordered = (best >> 32).to(tl.int32)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    tl.store(values + row * K + slot, bits.to(tl.float32, bitcast=True), mask=slot < K)
    tl.store(ids + row * K + slot, _ID_MASK - (best & _ID_MASK), mask=slot < K)


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
    size = min(programs_of(vocabulary, SLICE), power_of_2(vocabulary))
    parts, padded = triton.cdiv(vocabulary, size), power_of_2(k)
    keys = torch.empty((rows, parts, padded), dtype=torch.int64, device=device)
    sums = torch.empty((rows, parts, 3), dtype=torch.float32, device=device)
    values = torch.empty((rows, k), dtype=torch.float32, device=device)
    ids = torch.empty((rows, k), dtype=torch.int64, device=device)
    confidence, entropy = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    if rows:
        flat = logits.reshape(rows, vocabulary).contiguous()
        _signals_part_kernel[(parts, rows)](flat, keys, sums, vocabulary, parts, K=k, KP=padded, SIZE=size, num_warps=4)
        _signals_join_kernel[(rows,)](
            keys, sums, values, ids, confidence, entropy, parts, K=k, KP=padded, PARTS=power_of_2(parts), num_warps=4
        )
    return DraftSignals(values.view(*shape, k), ids.view(*shape, k), confidence.view(shape), entropy.view(shape))


def register() -> None:
    """Tell the core about `draft_signals` on CUDA."""
    _launch.register(draft_signals, supports)
