"""A product of a few rows and the residual sum behind it: `linear_rows` that adds before it rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from dspine.common import linear_rows as core
from dspine.kernels_triton import _launch, linear_rows
from dspine.kernels_triton._launch import contiguous


def supports(x: Tensor, weight: Tensor, residual: Tensor) -> bool:
    """What `linear_rows` takes."""
    return linear_rows.supports(x, weight) and residual.dtype == x.dtype


def residual_rows(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """`common.linear_rows.residual_rows`: the same arguments, results and errors; the weight must be contiguous."""
    core.check_residual_rows(x, weight, residual)
    contiguous("residual_rows", weight=weight)
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    linear_rows.launch(x.contiguous(), weight, out, residual=residual.contiguous())
    return out


def register() -> None:
    """Tell the core about `residual_rows` on CUDA."""
    _launch.register(residual_rows, supports)
