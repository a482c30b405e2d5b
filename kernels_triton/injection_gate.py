"""Gate x message of the injection (`algorithms` 1, equations a), in one launch: the receiver's product, and the predecessor's
two as one."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common.errors import DSpineError
from dspine.common.injection import InjectionWeights
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import (
    FLOATS,
    contiguous,
    early,
    expect_dtype,
    expect_shape,
    fetch,
    multiply,
    narrow,
    overlaps,
    power_of_2,
    sigmoid,
)

ROWS, COLUMNS, WARPS = 16, 16, 2  # warps: each has 8 columns of its own; more would do the same work again


@triton.jit
def fetch_part(matrix, column, begin, size, rank, FETCH: tl.constexpr):
    """Ask the cache for inputs [begin, begin + FETCH) of rows `column` of [size, rank]."""
    line = tl.minimum(begin + tl.arange(0, FETCH // 64) * 64, rank - 1)
    fetch(matrix + tl.minimum(column, size - 1).to(tl.int64)[:, None] * rank + line[None, :])


@triton.jit
def pair_of(one, other, first, BA: tl.constexpr, rank):
    """Where rows first, first + 1, … of two matrices [size, rank] begin, in turn: pointers [2 BA], and which row each is.

    Two products that share an operand keep the compiler from dealing their columns out to the warps; as one they do not.
    """
    lane = tl.arange(0, 2 * BA)
    column = first + lane // 2
    at = column.to(tl.int64) * rank
    return tl.where(lane % 2 == 0, one + at, other + at), column


@triton.jit
def _injection_gate_kernel(
    receiver, predecessor, of_receiver, of_predecessor, message, bias, out, rows, size, rank,
    REPEAT: tl.constexpr, BN: tl.constexpr, BA: tl.constexpr, RANK_PAD: tl.constexpr, BR: tl.constexpr,
    FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BN + tl.arange(0, BN)
    column = tl.program_id(0) * BA + tl.arange(0, BA)
    if OVERLAP:
        gdc_launch_dependents()
        if tl.program_id(1) == 0:
            fetch_part(of_receiver, column, 0, size, rank, FETCH)
            fetch_part(of_predecessor, column, 0, size, rank, FETCH)
            fetch_part(message, column, 0, size, rank, FETCH)
        gdc_wait()
    receivers = of_receiver + column.to(tl.int64) * rank
    others, of_pair = pair_of(of_predecessor, message, tl.program_id(0) * BA, BA, rank)
    gate = tl.zeros([BN, BA], dtype=tl.float32)
    both = tl.zeros([BN, 2 * BA], dtype=tl.float32)
    for start in range(0, RANK_PAD, BR):
        lane = start + tl.arange(0, BR)
        of_row = (row < rows)[:, None] & (lane < rank)[None, :]
        real = (lane < rank)[:, None]
        hears = tl.load(receiver + (row // REPEAT).to(tl.int64)[:, None] * rank + lane[None, :], mask=of_row, other=0.0)
        of_own = tl.load(receivers[None, :] + lane[:, None], mask=real & (column < size)[None, :], other=0.0)
        gate += multiply(hears, of_own)
        before = tl.load(predecessor + row.to(tl.int64)[:, None] * rank + lane[None, :], mask=of_row, other=0.0)
        of_both = tl.load(others[None, :] + lane[:, None], mask=real & (of_pair < size)[None, :], other=0.0)
        both += multiply(before, of_both)
    sending, sent = tl.split(both.reshape(BN, BA, 2))
    gate += sending
    gate += tl.load(bias + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    gated = sent * sigmoid(gate)
    inside = (row < rows)[:, None] & (column < size)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * size + column[None, :], narrow(gated, out.dtype.element_ty), mask=inside)


def supports(receiver: Tensor, predecessor: Tensor, weights: InjectionWeights) -> bool:
    """One dtype out of bfloat16 and float32; a receiver that is shared by several predecessors has size 1 there."""
    dtypes = {x.dtype for x in (receiver, predecessor, weights.message, weights.receiver_gate, weights.predecessor_gate)}
    same = receiver.shape == predecessor.shape
    return len(dtypes) == 1 and receiver.dtype in FLOATS and (same or _shared(receiver, predecessor))


def _shared(receiver: Tensor, predecessor: Tensor) -> bool:
    """receiver [..., 1, r] for predecessor [..., K, r]."""
    ranks = receiver.dim() == predecessor.dim() >= 2
    return ranks and receiver.shape[-2] == 1 and receiver.shape[:-2] == predecessor.shape[:-2]


def launch(receiver: Tensor, predecessor: Tensor, weights: InjectionWeights, out: Tensor, repeat: int) -> None:
    """receiver [N / repeat, r], predecessor [N, r] -> out [N, a]; all contiguous, none checked."""
    rows, rank = predecessor.shape
    size = weights.message.shape[0]
    step, stages = (128, 5) if predecessor.dtype == torch.bfloat16 else (64, 2)
    _injection_gate_kernel[(triton.cdiv(size, COLUMNS), triton.cdiv(rows, ROWS))](
        receiver, predecessor, weights.receiver_gate, weights.predecessor_gate, weights.message, weights.bias, out,
        rows, size, rank, REPEAT=repeat, BN=ROWS, BA=COLUMNS, RANK_PAD=triton.cdiv(rank, step) * step, BR=step,
        FETCH=power_of_2(rank, 64), num_warps=WARPS, num_stages=stages, **early(overlaps(predecessor)),
    )  # fmt: skip


def check_weights(where: str, weights: InjectionWeights, rank: int, dtype: torch.dtype) -> None:
    """Raise unless the gate's weights are [a, r] of `dtype`, contiguous."""
    size = weights.message.shape[0]
    for name in ("message", "receiver_gate", "predecessor_gate"):
        expect_shape(where, f"weights.{name}", getattr(weights, name), (size, rank))
        expect_dtype(where, f"weights.{name}", getattr(weights, name), dtype)
        contiguous(where, **{f"weights.{name}": getattr(weights, name)})
    expect_shape(where, "weights.bias", weights.bias, (size,))


def injection_gate(receiver: Tensor, predecessor: Tensor, weights: InjectionWeights) -> Tensor:
    """`common.injection.injection_gate`: receiver and predecessor [..., r] (or receiver [..., 1, r]) -> [..., a]."""
    where = "injection_gate"
    expect_dtype(where, "receiver", receiver, *FLOATS)
    expect_dtype(where, "predecessor", predecessor, receiver.dtype)
    if receiver.shape != predecessor.shape and not _shared(receiver, predecessor):
        raise DSpineError(
            f"{where}: receiver and predecessor must have one shape, or receiver [..., 1, r], got {tuple(receiver.shape)} "
            f"and {tuple(predecessor.shape)}"
        )
    rank, size = predecessor.shape[-1], weights.message.shape[0]
    check_weights(where, weights, rank, receiver.dtype)
    rows = math.prod(predecessor.shape[:-1])
    repeat = 1 if receiver.shape == predecessor.shape else predecessor.shape[-2]
    out = torch.empty((*predecessor.shape[:-1], size), dtype=receiver.dtype, device=receiver.device)
    if rows:
        flat = (receiver.reshape(-1, rank).contiguous(), predecessor.reshape(rows, rank).contiguous())
        launch(*flat, weights, out.view(rows, size), repeat)
    return out


def register() -> None:
    """Tell the core about `injection_gate` on CUDA."""
    _launch.register(injection_gate, supports)
