"""Equation 6 in one launch: distinct layer-0 experts of the first tokens, and one token more where it pays (`algorithms` 4)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspine.common.selection import lengths
from dspine.common.selection.lengths import LengthTables
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import expect_dtype, expect_shape, power_of_2

MOST_EXPERTS = 64  # picks of one token


@triton.jit
def _correct_length_kernel(
    picks, length, survival, limit, cost, pairs, pairs_given, out, covered, rate, stage_zero, expert,
    M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, UP: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    cap = tl.load(limit + batch).to(tl.int32)
    chosen = tl.load(length + batch).to(tl.int32)
    may = (chosen < M + 1) & (chosen < cap) & (chosen < covered)
    at = tl.where(may, chosen, 1)  # a length whose lookups below all exist
    token, slot = tl.arange(0, UP * KP) // KP, tl.arange(0, UP * KP) % KP
    earlier = (token < at) & (token < covered) & (slot < K)
    seen = tl.load(picks + (batch * covered + token) * K + slot, mask=earlier, other=-1).to(tl.int32)
    lane = tl.arange(0, KP)
    newest = tl.load(picks + (batch * covered + at) * K + lane, mask=(lane < K) & (at < covered), other=-2).to(tl.int32)
    known = tl.max(tl.where((seen[:, None] == newest[None, :]) & earlier[:, None], 1, 0), 0)
    added = tl.sum(tl.where(lane < K, 1 - known, 0), 0)
    change = tl.load(cost + at + 1) - tl.load(cost + at) - stage_zero
    change += expert * (tl.load(pairs_given + at * (K + 1) + added) - tl.load(pairs + at))
    gain = tl.load(survival + batch * M + at - 1)
    longer = tl.where(may & (gain > rate * change), chosen + 1, chosen)
    tl.store(out + batch, tl.minimum(longer, cap))


def supports(picks: Tensor, length: Tensor, survival: Tensor, limit: Tensor, tables: LengthTables) -> bool:
    """int32 or int64 picks of up to 64 experts a token, float32 tables."""
    floats = (survival, tables.cost, tables.pairs, tables.pairs_given)
    held = power_of_2(picks.shape[1]) * power_of_2(picks.shape[2]) if picks.dim() == 3 else 0
    return (
        all(x is not None and x.dtype == torch.float32 for x in floats) and 0 < held <= 2048 and picks.shape[2] <= MOST_EXPERTS
    )


def correct_length(picks: Tensor, length: Tensor, survival: Tensor, limit: Tensor, tables: LengthTables) -> Tensor:
    """`common.selection.lengths.correct_length`: the same arguments, results and errors."""
    lengths._check_correction(picks, survival, tables)
    where = "correct_length"
    for name, x in (("picks", picks), ("length", length), ("limit", limit)):
        expect_dtype(where, name, x, torch.int32, torch.int64)
    for name, x in (("survival", survival), ("tables.cost", tables.cost), ("tables.pairs", tables.pairs),
                    ("tables.pairs_given", tables.pairs_given)):  # fmt: skip
        expect_dtype(where, name, x, torch.float32)
    batch, covered, experts = picks.shape
    for name, x in (("length", length), ("limit", limit)):
        expect_shape(where, name, x, (batch,))
    out = torch.empty(batch, dtype=torch.int32, device=picks.device)
    if batch:
        _correct_length_kernel[(batch,)](
            picks.contiguous(), length.contiguous(), survival.contiguous(), limit.contiguous(), tables.cost.contiguous(),
            tables.pairs.contiguous(), tables.pairs_given.contiguous(), out, covered,
            float(tables.rate), float(tables.stage_zero), float(tables.expert),
            M=survival.shape[1], K=experts, KP=power_of_2(experts), UP=power_of_2(covered), num_warps=4,
        )  # fmt: skip
    return out


def register() -> None:
    """Tell the core about `correct_length` on CUDA."""
    _launch.register(correct_length, supports)
