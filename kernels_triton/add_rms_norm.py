"""Residual sum and the RMS norm behind it, in one launch: one program a row."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import norms
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, early, narrow, overlaps, power_of_2

LARGEST_ROW = 16384


@triton.jit
def _add_rms_norm_kernel(
    x, y, weight, total, normed, columns, eps, BH: tl.constexpr, ADDS: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
    first = tl.program_id(0).to(tl.int64) * columns
    lane = tl.arange(0, BH)
    inside = lane < columns
    w = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    h = tl.load(x + first + lane, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        rounded = narrow(h + tl.load(y + first + lane, mask=inside, other=0.0).to(tl.float32), total.dtype.element_ty)
        tl.store(total + first + lane, rounded, mask=inside)
        h = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, 0) / columns + eps)
    tl.store(normed + first + lane, narrow(w * (h * scale), normed.dtype.element_ty), mask=inside)


def supports(x: Tensor, y: Tensor | None, norm: Any) -> bool:
    """bfloat16 and float32, rows of up to 16,384; a norm whose weight and eps can be read."""
    readable = isinstance(getattr(norm, "weight", None), Tensor) and isinstance(getattr(norm, "eps", None), float)
    return readable and x.dtype in FLOATS and 1 <= x.shape[-1] <= LARGEST_ROW


def launch(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, total: Tensor, normed: Tensor) -> None:
    """Launch into `total` (not written where y is None) and `normed`, [N, H]; all contiguous, none checked. The weight is
    read before the launch in front has ended."""
    rows, columns = x.shape
    _add_rms_norm_kernel[(rows,)](
        x, x if y is None else y, weight, total, normed, columns, eps, BH=power_of_2(columns), ADDS=y is not None,
        num_warps=8, **early(overlaps(x)),
    )  # fmt: skip


def add_rms_norm(x: Tensor, y: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """`common.norms.add_rms_norm`: the same arguments, results and errors."""
    norms.check_add_rms_norm(x, y, norm)
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    left = x.reshape(rows, columns).contiguous()
    right = None if y is None else y.reshape(rows, columns).contiguous()
    total, normed = left if right is None else torch.empty_like(left), torch.empty_like(left)
    if rows:
        launch(left, right, norm.weight.detach().contiguous(), norm.eps, total, normed)
    return x if right is None else total.view(x.shape), normed.view(x.shape)


def register() -> None:
    """Tell the core about `add_rms_norm` on CUDA."""
    _launch.register(add_rms_norm, supports)
