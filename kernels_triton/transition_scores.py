"""All K x K transition scores of every position (`algorithms` 1): last-layer write for every predecessor candidate, final
norm, and the K candidates' rows of the LM head only.

The norm divides by a number of the whole row, so it can come last: the hidden size is split over programs, each leaves its
part of (w o h) E^T and of sum h^2, and a last small launch adds and divides. h is never rounded nor written out.

Every launch may start under the one in front of it; those with weights ask the cache for them before they wait.
Up to 16 candidates: two rows share a program, so the write matrix is read half as often (`transition_pairs=0` in
`DSPINE_KERNELS_TRY`: one).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common.injection import InjectionWeights
from dspine.kernels_triton import _launch, injection_gate
from dspine.kernels_triton._launch import (
    FLOATS,
    contiguous,
    expect_dtype,
    expect_shape,
    fetch,
    multiply,
    multiply_wide,
    narrow,
    overlaps,
    power_of_2,
    variant,
)  # fmt: skip
from dspine.kernels_triton.injection_write import product, readable_norm

COLUMNS, STEP = 128, 64


@triton.jit
def _readout_kernel(
    raw, hidden, z, rms, rank, columns, scale, BR: tl.constexpr, BH: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """z = sqrt(r) normalize(raw) and RMS(u) of one row."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BR)
    x = tl.load(raw + row * rank + lane, mask=lane < rank, other=0.0)
    norm = tl.sqrt(tl.sum(x * x, 0))
    unit = x / tl.where(norm > 0.0, norm, 1.0) * scale
    tl.store(z + row * rank + lane, narrow(unit, z.dtype.element_ty), mask=lane < rank)
    lane = tl.arange(0, BH)
    u = tl.load(hidden + row * columns + lane, mask=lane < columns, other=0.0).to(tl.float32)
    tl.store(rms + row, tl.sqrt(tl.sum(u * u, 0) / columns))


@triton.jit
def _part_kernel(
    hidden, rms, gated, write, norm, head_rows, products, squares, rows, columns, size, parts,
    K: tl.constexpr, KP: tl.constexpr, EACH: tl.constexpr, BH: tl.constexpr, SIZE_PAD: tl.constexpr, BA: tl.constexpr,
    FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """This part's (w o h) E^T, transposed [successor, predecessor], and sum h^2 of every predecessor. EACH: rows of a program,
    which share its part of `write`. FETCH: the power of two above `size`."""
    part, entry = tl.program_id(0), tl.arange(0, EACH * KP)
    candidate = entry % KP
    row = (tl.program_id(1) * EACH + entry // KP).to(tl.int64)
    real = (row < rows) & (candidate < K)
    column = part * BH + tl.arange(0, BH)
    if OVERLAP:
        gdc_launch_dependents()
        if tl.program_id(1) == 0:
            line = tl.minimum(tl.arange(0, FETCH // 64) * 64, size - 1)
            fetch(write + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * size + line[None, :])
        gdc_wait()
    message = tl.zeros([EACH * KP, BH], dtype=tl.float32)
    for start in range(0, SIZE_PAD, BA):
        lane = start + tl.arange(0, BA)
        of_weight = (column < columns)[None, :] & (lane < size)[:, None]
        at = (row * K + candidate)[:, None] * size + lane[None, :]
        left = tl.load(gated + at, mask=real[:, None] & (lane < size)[None, :], other=0.0)
        right = tl.load(write + column.to(tl.int64)[None, :] * size + lane[:, None], mask=of_weight, other=0.0)
        message += multiply(left, right)
    known = (row < rows)[:, None] & (column < columns)[None, :]
    u = tl.load(hidden + row[:, None] * columns + column[None, :], mask=known, other=0.0).to(tl.float32)
    h = u + tl.load(rms + row, mask=row < rows, other=0.0)[:, None] * message
    place = row * parts + part
    tl.store(squares + place * KP + candidate, tl.sum(h * h, 1), mask=row < rows)
    weight = tl.load(norm + column, mask=column < columns, other=0.0).to(tl.float32)
    inside = real[:, None] & (column < columns)[None, :]
    of_head = tl.load(head_rows + (row * K + candidate)[:, None] * columns + column[None, :], mask=inside, other=0.0)
    at = (place * (KP * KP) + candidate * KP)[:, None] + candidate[None, :]
    paired = (row < rows)[:, None] & ((entry // KP)[:, None] == (entry // KP)[None, :])  # successors and predecessors of a row
    tl.store(products + at, multiply_wide(of_head, tl.trans(h * weight[None, :])), mask=paired)


@triton.jit
def _join_kernel(
    products, squares, scores, columns, eps, parts, K: tl.constexpr, KP: tl.constexpr, PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, successor = tl.program_id(1).to(tl.int64), tl.program_id(0)
    part, predecessor = tl.arange(0, PARTS)[:, None], tl.arange(0, KP)[None, :]
    inside = part < parts
    at = row * parts + part
    total = tl.sum(tl.load(products + (at * KP + successor) * KP + predecessor, mask=inside, other=0.0), 0)
    square = tl.sum(tl.load(squares + at * KP + predecessor, mask=inside, other=0.0), 0)
    score = total / tl.sqrt(square / columns + eps)
    lane = tl.arange(0, KP)
    tl.store(scores + (row * K + lane) * K + successor, score, mask=lane < K)


def supports(hidden: Tensor, predecessor_codes: Tensor, candidate_rows: Tensor, weights: InjectionWeights, norm: Any) -> bool:
    """bfloat16 or float32, one dtype for hidden, weights and LM-head rows; a norm whose weight and eps can be read."""
    dtypes = {hidden.dtype, candidate_rows.dtype, *(getattr(weights, name).dtype for name in _WEIGHTS)}
    return len(dtypes) == 1 and hidden.dtype in FLOATS and readable_norm(norm, hidden) and candidate_rows.shape[-2] <= 64


_WEIGHTS = ("readout", "write", "message", "receiver_gate", "predecessor_gate")


def _check(hidden: Tensor, codes: Tensor, rows: Tensor, weights: InjectionWeights) -> None:
    where = "transition_scores"
    expect_dtype(where, "hidden", hidden, *FLOATS)
    size, rank, k = weights.message.shape[0], weights.readout.shape[0], codes.shape[-2]
    expect_shape(where, "predecessor_codes", codes, (*hidden.shape[:-1], k, rank))
    expect_shape(where, "candidate_rows", rows, (*hidden.shape[:-1], k, hidden.shape[-1]))
    expect_dtype(where, "candidate_rows", rows, hidden.dtype)
    expect_shape(where, "weights.readout", weights.readout, (rank, hidden.shape[-1]))
    expect_shape(where, "weights.write", weights.write, (hidden.shape[-1], size))
    for name in ("readout", "write"):
        expect_dtype(where, f"weights.{name}", getattr(weights, name), hidden.dtype)
    contiguous(where, readout=weights.readout, write=weights.write)
    injection_gate.check_weights(where, weights, rank, hidden.dtype)


def transition_scores(
    hidden: Tensor, predecessor_codes: Tensor, candidate_rows: Tensor, weights: InjectionWeights, norm: Any
) -> Tensor:
    """`common.transition.transition_scores`: hidden [..., M, H], codes [..., M, K, r], rows [..., M, K, H] -> float32
    [..., M, K, K]. `norm` must have `weight` [H] and `eps`."""
    _check(hidden, predecessor_codes, candidate_rows, weights)
    columns, (k, rank), size = hidden.shape[-1], predecessor_codes.shape[-2:], weights.message.shape[0]
    u = hidden.reshape(-1, columns).contiguous()
    rows, device = u.shape[0], u.device
    scores = torch.empty((*hidden.shape[:-1], k, k), dtype=torch.float32, device=device)
    if not rows:
        return scores

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    raw, z, rms = floats(rows, rank), torch.empty((rows, rank), dtype=u.dtype, device=device), floats(rows)
    overlap = overlaps(u)
    early = {"OVERLAP": overlap, **({"launch_pdl": True} if overlap else {})}
    product(u, weights.readout, raw, overlap)
    _readout_kernel[(rows,)](
        raw, u, z, rms, rank, columns, rank**0.5, BR=power_of_2(rank), BH=power_of_2(columns), num_warps=8, **early
    )
    gated = torch.empty((rows * k, size), dtype=u.dtype, device=device)
    codes = predecessor_codes.reshape(rows * k, rank).to(u.dtype).contiguous()
    injection_gate.launch(z, codes, weights, gated, repeat=k, overlap=overlap)
    parts, padded = triton.cdiv(columns, COLUMNS), power_of_2(k, 16)
    products, squares = floats(rows, parts, padded, padded), floats(rows, parts, padded)
    each = 2 if padded == 16 and variant("transition_pairs", True) else 1
    _part_kernel[(parts, triton.cdiv(rows, each))](
        u, rms, gated, weights.write, norm.weight.detach().contiguous(), candidate_rows.reshape(rows * k, columns).contiguous(),
        products, squares, rows, columns, size, parts, K=k, KP=padded, EACH=each, BH=COLUMNS,
        SIZE_PAD=triton.cdiv(size, STEP) * STEP, BA=STEP, FETCH=power_of_2(size, 64), num_warps=4, **early,
    )  # fmt: skip
    _join_kernel[(k, rows)](
        products, squares, scores, columns, norm.eps, parts, K=k, KP=padded, PARTS=power_of_2(parts), num_warps=1, **early
    )
    return scores


def register() -> None:
    """Tell the core about `transition_scores` on CUDA."""
    _launch.register(transition_scores, supports)
