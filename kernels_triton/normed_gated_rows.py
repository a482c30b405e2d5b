"""The first half of a feed-forward layer with the RMS norm in front of it, in one launch: `gated_rows` with the norm's factors
(`normed_rows`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dspine.common import gating
from dspine.common.norms import check_add_rms_norm
from dspine.kernels_triton import _launch, gated_rows
from dspine.kernels_triton._launch import contiguous
from dspine.kernels_triton.normed_rows import supports


def normed_gated_rows(x: Tensor, norm: Any, weight: Tensor) -> Tensor:
    """`common.gating.normed_gated_rows`: the same arguments, results and errors; the weight must be contiguous."""
    gating.check_gated_rows(x, weight)
    check_add_rms_norm(x, None, norm)
    contiguous("normed_gated_rows", weight=weight)
    return gated_rows.launch(x.contiguous(), weight, norm)


def register() -> None:
    """Tell the core about `normed_gated_rows` on CUDA."""
    _launch.register(normed_gated_rows, supports)
