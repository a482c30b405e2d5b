"""A product of a few rows with the RMS norm in front of it: `linear_rows` with the norm's factors, no launch of its own.

Inputs are multiplied by the norm's weight and rounded as they are read, and squared on the way; the row's factor comes behind
the product. A row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dspine.common import linear_rows as core
from dspine.kernels_triton import _launch, add_rms_norm, linear_rows
from dspine.kernels_triton._launch import contiguous


def supports(x: Tensor, norm: Any, weight: Tensor) -> bool:
    """What `linear_rows` takes, and a norm whose weight and eps can be read."""
    return linear_rows.supports(x, weight) and add_rms_norm.supports(x, None, norm)


def normed_rows(x: Tensor, norm: Any, weight: Tensor) -> Tensor:
    """`common.linear_rows.normed_rows`: the same arguments, results and errors; the weight must be contiguous."""
    core.check_normed_rows(x, norm, weight)
    contiguous("normed_rows", weight=weight)
    out = linear_rows.room(x, weight)
    linear_rows.launch(x.contiguous(), weight, out, norm=norm)
    return out


def register() -> None:
    """Tell the core about `normed_rows` on CUDA."""
    _launch.register(normed_rows, supports)
