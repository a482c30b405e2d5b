"""Products and norms whose rows do not depend on the rows beside them, on the CPU in float32.

Verification runs w rows where plain decoding runs one. If a row's bits change with w, a router's near tie may fall the
other way, and an expert is a jump, not a rounding. Measured with MKL (AVX-512): `x @ W` with W stored [in, out] gives a
row the same bits for any number of rows from 2 up; a single row takes another path, so it is doubled. It is also the
fastest form at these sizes (256 x 1100: 23 us for one row; `F.linear` the same, oneDNN's packed bfloat16 37 us).
In bfloat16 the packed products of `layers.make_linear` already have this property.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine_cuda.targets.layers import Linear, Norm, make_linear

_LARGEST_COPY = 1 << 26  # elements of a matrix of which a second, transposed copy is kept


def rows_exact(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products are made in the doubled-row form."""
    return device.type == "cpu" and dtype == torch.float32


def product(x: Tensor, transposed: Tensor) -> Tensor:
    """x [N, in] times `transposed` [in, out]; one row is doubled."""
    if x.shape[0] == 1:
        return torch.cat((x, x)).mm(transposed)[:1]
    return x.mm(transposed)


def make_exact_linear(weight: Tensor, *, keep: bool = False) -> Linear:
    """y = x W^T as a function of x [N, in] -> [N, out]; weight [out, in]. `keep`: the caller keeps `weight` too, so a large
    one is not copied."""
    if not rows_exact(weight.dtype, weight.device):
        return make_linear(weight)
    if keep and weight.numel() > _LARGEST_COPY:
        return Linear(lambda x: weight.mm((torch.cat((x, x)) if x.shape[0] == 1 else x).t()).t()[: x.shape[0]], weight)
    transposed = weight.t().contiguous()
    return Linear(lambda x: product(x, transposed), transposed.t())


def make_wide_norm(weight: Tensor, eps: float, dtype: torch.dtype, *, half: bool = False) -> Norm:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, in float32, result as `dtype`; weight float32 [..., size].
    `half`: x may be of lower precision than the result.

    On the CPU `F.rms_norm` takes 20 us for one row of 256; four small operations take 6 us.
    """
    size = weight.shape[-1]
    if weight.device.type != "cpu":
        if weight.dim() == 1:  # one fused kernel, which torch has only where x and the weight are of one dtype
            return Norm(lambda x: F.rms_norm(x.to(torch.float32), (size,), weight, eps).to(dtype), weight, eps)
        return Norm(lambda x: (F.rms_norm(x.to(torch.float32), (size,), None, eps) * weight).to(dtype), weight, eps)
    floor, scaled = torch.tensor(math.sqrt(size * eps)), weight * math.sqrt(size)

    def exact(x: Tensor) -> Tensor:
        return x.div(torch.linalg.vector_norm(x, 2, -1, True).hypot_(floor)).mul_(scaled)

    if dtype == torch.float32 and not half:
        return Norm(exact, weight, eps)

    def norm(x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        length = torch.linalg.vector_norm(wide, 2, -1, True).hypot_(floor)
        return wide.div(length).mul_(scaled).to(dtype)

    return Norm(norm, weight, eps)
