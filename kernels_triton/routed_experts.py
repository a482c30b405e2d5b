"""The routed experts of 1..16 tokens: only experts that are hit are read, each once.

One program a (token, pick) pair and slice of the outputs. It works only where its pair is the first that names the expert,
and then for every token that does: 16 rows whatever N is, so a token's numbers do not depend on the tokens beside it.
Which rows those are is read off the picks themselves; there is no sorting and no host read. The sums over a token's
experts run in the order of its picks: the result is deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import experts
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, contiguous, multiply, multiply_terms, narrow, overlaps, power_of_2, sigmoid

MAX_TOKENS = 16


@dataclass(frozen=True)
class Launch:
    """columns: outputs of a program; step: inputs it reads at a time; stages: of the pipeline."""

    columns: int
    step: int
    num_warps: int
    stages: int


INNER, OUTER = Launch(32, 128, 4, 4), Launch(64, 128, 4, 4)


@triton.jit
def _rows_of(picks, pair, tokens, k, K_PAD: tl.constexpr):
    """Of the pair's expert: (expert, whether this pair is the first with it, tokens [16] that picked it, at which place)."""
    expert = tl.load(picks + pair)
    token, place = tl.arange(0, 16), tl.arange(0, K_PAD)
    at = token[:, None] * k + place[None, :]
    inside = (token < tokens)[:, None] & (place < k)[None, :]
    same = inside & (tl.load(picks + at, mask=inside, other=-1) == expert)
    first = tl.min(tl.min(tl.where(same, at, 16 * K_PAD), 1), 0)
    return expert, first == pair, tl.max(same.to(tl.int32), 1) > 0, tl.sum(tl.where(same, place[None, :], 0), 1)


@triton.jit
def _inner_kernel(
    x, picks, gate_up, hidden, tokens, k, size, inner,
    K_PAD: tl.constexpr, SIZE_PAD: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """hidden[n, j, :] = silu(gate) * up of the pair (n, j)."""
    if OVERLAP:
        gdc_launch_dependents()
    pair = tl.program_id(1)
    expert, first, chosen, place = _rows_of(picks, pair, tokens, k, K_PAD)
    if first:
        token = tl.arange(0, 16)
        column = tl.program_id(0) * BI + tl.arange(0, BI)
        base = gate_up + expert.to(tl.int64) * (2 * inner) * size
        gate = tl.zeros([16, BI], tl.float32)
        up = tl.zeros([16, BI], tl.float32)
        for start in range(0, SIZE_PAD, BH):
            lane = start + tl.arange(0, BH)
            of_row = chosen[:, None] & (lane < size)[None, :]
            of_weight = (lane < size)[:, None] & (column < inner)[None, :]
            rows = tl.load(x + token[:, None] * size + lane[None, :], mask=of_row, other=0.0)
            weight = base + column[None, :].to(tl.int64) * size + lane[:, None]
            gate += multiply(rows, tl.load(weight, mask=of_weight, other=0.0))
            up += multiply(rows, tl.load(weight + inner.to(tl.int64) * size, mask=of_weight, other=0.0))
        at = (token * k + place)[:, None] * inner + column[None, :]
        tl.store(hidden + at, gate * sigmoid(gate) * up, mask=chosen[:, None] & (column < inner)[None, :])


@triton.jit
def _outer_kernel(
    hidden, picks, weights, down, each, tokens, k, size, inner,
    K_PAD: tl.constexpr, INNER_PAD: tl.constexpr, BH: tl.constexpr, BI: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """each[n, j, :] = weight of the pair * down(hidden[n, j])."""
    pair = tl.program_id(1)
    expert, first, chosen, place = _rows_of(picks, pair, tokens, k, K_PAD)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if first:
        token = tl.arange(0, 16)
        column = tl.program_id(0) * BH + tl.arange(0, BH)
        pairs = token * k + place
        base = down + expert.to(tl.int64) * size * inner
        total = tl.zeros([16, BH], tl.float32)
        for start in range(0, INNER_PAD, BI):
            lane = start + tl.arange(0, BI)
            of_row = chosen[:, None] & (lane < inner)[None, :]
            of_weight = (lane < inner)[:, None] & (column < size)[None, :]
            rows = tl.load(hidden + pairs[:, None] * inner + lane[None, :], mask=of_row, other=0.0)
            weight = tl.load(base + column[None, :].to(tl.int64) * inner + lane[:, None], mask=of_weight, other=0.0)
            total += multiply_terms(rows, weight)
        amount = tl.load(weights + pairs, mask=chosen, other=0.0)
        at = pairs[:, None] * size + column[None, :]
        tl.store(each + at, total * amount[:, None], mask=chosen[:, None] & (column < size)[None, :])


@triton.jit
def _sum_kernel(each, out, k, size, K_PAD: tl.constexpr, BH: tl.constexpr, OVERLAP: tl.constexpr):
    """out[n] = sum_j each[n, j]."""
    column, place = tl.program_id(0) * BH + tl.arange(0, BH), tl.arange(0, K_PAD)
    row = tl.program_id(1)
    inside = (place < k)[:, None] & (column < size)[None, :]
    if OVERLAP:
        gdc_wait()
    values = tl.load(each + (row * k + place)[:, None] * size + column[None, :], mask=inside, other=0.0)
    tl.store(out + row * size + column, narrow(tl.sum(values, 0), out.dtype.element_ty), mask=column < size)


def supports(x: Tensor, picks: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """At most 16 tokens; one dtype out of bfloat16 and float32; contiguous weights."""
    one = x.dtype == gate_up.dtype == down.dtype and x.dtype in FLOATS and weights.dtype == torch.float32
    return one and 1 <= x.shape[0] <= MAX_TOKENS and gate_up.is_contiguous() and down.is_contiguous()


def launch(
    x: Tensor, picks: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, hidden: Tensor, each: Tensor, out: Tensor,
    parameters: tuple[Launch, Launch] | None = None,
) -> None:  # fmt: skip
    """Launch into hidden float32 [N k, I], each float32 [N k, H] and out [N, H]; all contiguous, none checked."""
    (tokens, k), (size, inner) = picks.shape, down.shape[1:]
    first, second = parameters or (INNER, OUTER)
    overlap = overlaps(x)
    later = {"OVERLAP": overlap, **({"launch_pdl": True} if overlap else {})}
    k_pad = power_of_2(k)
    _inner_kernel[(triton.cdiv(inner, first.columns), tokens * k)](
        x, picks, gate_up, hidden, tokens, k, size, inner, K_PAD=k_pad, SIZE_PAD=triton.cdiv(size, first.step) * first.step,
        BI=first.columns, BH=first.step, OVERLAP=overlap, num_warps=first.num_warps, num_stages=first.stages,
    )  # fmt: skip
    _outer_kernel[(triton.cdiv(size, second.columns), tokens * k)](
        hidden, picks, weights, down, each, tokens, k, size, inner, K_PAD=k_pad,
        INNER_PAD=triton.cdiv(inner, second.step) * second.step, BH=second.columns, BI=second.step,
        num_warps=second.num_warps, num_stages=second.stages, **later,
    )  # fmt: skip
    _sum_kernel[(triton.cdiv(size, 512), tokens)](each, out, k, size, K_PAD=k_pad, BH=512, num_warps=4, **later)


def routed_experts(x: Tensor, picks: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`common.experts.routed_experts`: the same arguments, results and errors; the weights must be contiguous."""
    experts.check_experts(x, picks, weights, gate_up, down)
    contiguous("routed_experts", gate_up=gate_up, down=down)
    (count, k), (size, inner) = picks.shape, down.shape[1:]
    hidden = torch.empty((count * k, inner), dtype=torch.float32, device=x.device)
    each = torch.empty((count * k, size), dtype=torch.float32, device=x.device)
    out = torch.empty((count, size), dtype=x.dtype, device=x.device)
    launch(x.contiguous(), picks.contiguous(), weights.contiguous(), gate_up, down, hidden, each, out)
    return out


def register() -> None:
    """Tell the core about `routed_experts` on CUDA."""
    _launch.register(routed_experts, supports)
