"""Residual write-back of the injection and the next layer's RMSNorm (`algorithms` 1).

Two launches: the product W (g * m) in float32, spread over the hidden size; then one program a row for everything that
needs the whole row (RMS of u, the sum, the norm of the sum). Where the device can, the second fetches u and the norm's
weight while the first still works.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.kernels_triton import _launch
from dspine.kernels_triton._choices import choice
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
)

ROWS = 16
MOST_FETCHED = 1024  # inputs of a column


@dataclass(frozen=True)
class Launch:
    """The product's: outputs of a program, inputs it reads at a time, warps, stages of the pipeline. row_warps: of the second
    launch's programs, one a row."""

    columns: int = 32
    step: int = 256
    num_warps: int = 4
    stages: int = 3
    row_warps: int = 16


def choose(dtype: torch.dtype) -> Launch:
    """Launch parameters; `injection_write=…` in DSPINE_KERNELS_TRY replaces those of bfloat16."""
    return choice("injection_write", Launch()) if dtype == torch.bfloat16 else Launch(step=128)


@triton.jit
def _product_kernel(
    x, weight, out, rows, columns, size,
    BN: tl.constexpr, BH: tl.constexpr, SIZE_PAD: tl.constexpr, BA: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[n, h] = sum_a x[n, a] weight[h, a], float32. FETCH: inputs of each column that are asked for before the wait."""
    row = tl.program_id(1) * BN + tl.arange(0, BN)
    column = tl.program_id(0) * BH + tl.arange(0, BH)
    if OVERLAP:
        if tl.program_id(1) == 0:
            line = tl.minimum(tl.arange(0, FETCH // 64) * 64, size - 1)
            fetch(weight + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * size + line[None, :])
        gdc_wait()  # first: what the next launch reads early was then written before the launch in front of this one ended
        gdc_launch_dependents()
    total = tl.zeros([BN, BH], dtype=tl.float32)
    for start in range(0, SIZE_PAD, BA):
        lane = start + tl.arange(0, BA)
        of_row = (row < rows)[:, None] & (lane < size)[None, :]
        of_weight = (column < columns)[None, :] & (lane < size)[:, None]
        left = tl.load(x + row.to(tl.int64)[:, None] * size + lane[None, :], mask=of_row, other=0.0)
        right = tl.load(weight + column.to(tl.int64)[None, :] * size + lane[:, None], mask=of_weight, other=0.0)
        total += multiply(left, right)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * columns + column[None, :], total, mask=inside)


@triton.jit
def _write_kernel(
    hidden, message, weight, out, normed, columns, eps, BH: tl.constexpr, HAS_NORM: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * columns
    lane = tl.arange(0, BH)
    inside = lane < columns
    u = tl.load(hidden + first + lane, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)  # as in `_launch.early`
    if HAS_NORM:
        w = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    rms = tl.sqrt(tl.sum(u * u, 0) / columns)
    if OVERLAP:
        gdc_wait()
    m = tl.load(message + first + lane, mask=inside, other=0.0)
    h = u + rms * m
    tl.store(out + first + lane, narrow(h, out.dtype.element_ty), mask=inside)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt(tl.sum(h * h, 0) / columns + eps)
        tl.store(normed + first + lane, narrow(w * (h * scale), normed.dtype.element_ty), mask=inside)


def product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """x [N, a] @ weight [H, a]^T -> out float32 [N, H]; all contiguous, none checked."""
    rows, size = x.shape
    columns, chosen = weight.shape[0], choose(x.dtype)
    step = min(chosen.step, power_of_2(triton.cdiv(size, 2), 16))  # a single step would not be pipelined
    _product_kernel[(triton.cdiv(columns, chosen.columns), triton.cdiv(rows, ROWS))](
        x, weight, out, rows, columns, size, BN=ROWS, BH=chosen.columns, SIZE_PAD=triton.cdiv(size, step) * step, BA=step,
        FETCH=power_of_2(min(size, MOST_FETCHED), 64), num_warps=chosen.num_warps, num_stages=chosen.stages,
        **early(overlaps(x)),
    )  # fmt: skip


def readable_norm(norm: Any, hidden: Tensor) -> bool:
    """A norm with `weight` [H] and a number `eps`: what a fused kernel can read."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "eps", None)
    return isinstance(weight, Tensor) and isinstance(eps, float) and tuple(weight.shape) == hidden.shape[-1:]


def supports(hidden: Tensor, gated: Tensor, write: Tensor, norm: Any | None = None) -> bool:
    """One dtype out of bfloat16 and float32; a norm whose weight and eps can be read."""
    same = hidden.dtype == gated.dtype == write.dtype and hidden.dtype in FLOATS
    return same and hidden.shape[:-1] == gated.shape[:-1] and (norm is None or readable_norm(norm, hidden))


def injection_write(hidden: Tensor, gated: Tensor, write: Tensor, norm: Any | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """`common.injection.injection_write`: hidden [..., H], gated [..., a], write [H, a] -> h, or (h, norm(h))."""
    where = "injection_write"
    expect_dtype(where, "hidden", hidden, *FLOATS)
    expect_dtype(where, "gated", gated, hidden.dtype)
    expect_dtype(where, "write", write, hidden.dtype)
    expect_shape(where, "gated", gated, (*hidden.shape[:-1], gated.shape[-1]))
    expect_shape(where, "write", write, (hidden.shape[-1], gated.shape[-1]))
    contiguous(where, write=write)
    columns, rows = hidden.shape[-1], math.prod(hidden.shape[:-1])
    u = hidden.reshape(rows, columns).contiguous()
    out, normed = torch.empty_like(u), torch.empty_like(u)
    if rows:
        message = torch.empty((rows, columns), dtype=torch.float32, device=u.device)
        product(gated.reshape(rows, -1).contiguous(), write, message)
        weight, eps = (u, 0.0) if norm is None else (norm.weight.detach().contiguous(), norm.eps)
        _write_kernel[(rows,)](
            u, message, weight, out, normed, columns, eps, BH=power_of_2(columns), HAS_NORM=norm is not None,
            num_warps=choose(u.dtype).row_warps, **early(overlaps(u)),
        )  # fmt: skip
    out = out.view(hidden.shape)
    return out if norm is None else (out, normed.view(hidden.shape))


def register() -> None:
    """Tell the core about `injection_write` on CUDA."""
    _launch.register(injection_write, supports)
