"""x * sigmoid(gate), in one launch; the gate may be a part of a wider projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import gating
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, early, narrow, overlaps, sigmoid

COLUMNS = 1024  # of one program


@triton.jit
def _sigmoid_mul_kernel(x, gate, out, size, stride, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, lane = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < size
    DTYPE: tl.constexpr = out.dtype.element_ty
    amount = sigmoid(tl.load(gate + row * stride + lane, mask=inside, other=0.0).to(tl.float32))
    value = tl.load(x + row * size + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + lane, narrow(value * narrow(amount, DTYPE).to(tl.float32), DTYPE), mask=inside)


def supports(x: Tensor, gate: Tensor) -> bool:
    """bfloat16 and float32 arrays of at least one dimension."""
    return x.dtype in FLOATS and x.dim() >= 1


def launch(x: Tensor, gate: Tensor, out: Tensor) -> None:
    """x and out [N, I] contiguous, gate [N, I] of rows that may lie apart; none checked."""
    rows, size = x.shape
    _sigmoid_mul_kernel[(triton.cdiv(size, COLUMNS), rows)](
        x, gate, out, size, gate.stride(0), BLOCK=COLUMNS, num_warps=4, **early(overlaps(x)),
    )  # fmt: skip


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """`common.gating.sigmoid_mul`: the same arguments, results and errors. x [B, w, heads, D] of which the gate is a slice of a
    wider [B, w, ...] is taken as it lies; anything else is made contiguous."""
    gating.check_sigmoid_mul(x, gate)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    lead = x.shape[:2] if x.dim() == 4 and _rows_apart(gate) else x.shape[:-1]
    rows = lead.numel()
    flat = gate.reshape(rows, -1)
    flat = flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
    launch(x.contiguous().view(rows, -1), flat, out.view(rows, -1))
    return out


def _rows_apart(gate: Tensor) -> bool:
    """Whether gate [B, w, heads, D] is rows of heads * D elements, all at one distance."""
    inner = gate.stride(3) == 1 and gate.stride(2) == gate.shape[3]
    return inner and (gate.shape[0] == 1 or gate.stride(0) == gate.shape[1] * gate.stride(1))


def register() -> None:
    """Tell the core about `sigmoid_mul` on CUDA."""
    _launch.register(sigmoid_mul, supports)
