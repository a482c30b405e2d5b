"""silu(gate) * up of a feed-forward layer, in one launch."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import gating
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, early, narrow, overlaps, power_of_2, sigmoid

COLUMNS = 1024  # of one program


@triton.jit
def _silu_mul_kernel(gate_up, out, size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, lane = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    gate = tl.load(gate_up + row * 2 * size + lane, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + lane, mask=inside, other=0.0).to(tl.float32)
    DTYPE: tl.constexpr = out.dtype.element_ty
    active = narrow(gate * sigmoid(gate), DTYPE).to(tl.float32)
    tl.store(out + row * size + lane, narrow(active * up, DTYPE), mask=inside)


def supports(gate_up: Tensor) -> bool:
    """bfloat16 and float32."""
    return gate_up.dtype in FLOATS


def launch(gate_up: Tensor, out: Tensor) -> None:
    """gate_up [N, 2I] -> out [N, I]; both contiguous, none checked."""
    rows, size = out.shape
    block = min(COLUMNS, power_of_2(size, 128))
    grid = (triton.cdiv(size, block), rows)
    _silu_mul_kernel[grid](gate_up, out, size, BLOCK=block, num_warps=4, **early(overlaps(gate_up)))


def silu_mul(gate_up: Tensor) -> Tensor:
    """`common.gating.silu_mul`: the same arguments, results and errors."""
    gating.check_silu_mul(gate_up)
    rows, size = math.prod(gate_up.shape[:-1]), gate_up.shape[-1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        launch(gate_up.reshape(rows, 2 * size).contiguous(), out)
    return out.view(*gate_up.shape[:-1], size)


def register() -> None:
    """Tell the core about `silu_mul` on CUDA."""
    _launch.register(silu_mul, supports)
