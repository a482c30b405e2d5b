"""Linear layers, norms and rotation of the lean decoders, in the form that is fastest where they run.

Measured on a 2-core CPU with AMX (bfloat16, SmolLM2's shapes): weights reordered once into oneDNN's blocked layout take
30 % less time a call than `F.linear`, at one row as at eight, and give the same bits for a row whatever rows are beside
it. So verification and plain steps agree exactly in their products. Fusing SiLU, products or the residual into the
product was slower than separate small operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Map = Callable[[Tensor], Tensor]


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether bfloat16 weights may be kept in oneDNN's own layout: CPU only, and only where it has the operations."""
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return all(hasattr(torch.ops.mkldnn, name) for name in names) and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Linear:
    """y = x W^T + b as a function of x [N, in], with the `weight` [out, in] that fused operations read (None where there is a
    bias, or a library keeps the weight in a layout of its own)."""

    __slots__ = ("run", "weight")

    def __init__(self, run: Map, weight: Tensor | None) -> None:
        self.run, self.weight = run, weight

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x)


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The product of a weight [out, in]; packs it where that is possible."""
    if not can_pack(weight.dtype, weight.device):
        return Linear(lambda x: F.linear(x, weight, bias), weight if bias is None else None)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    run = torch.ops.mkldnn._linear_pointwise.default
    return Linear(lambda x: run(x, packed, bias, "none", [], ""), None)


class Norm:
    """A norm as a function of its input, with the `weight` and `eps` that fused operations read."""

    __slots__ = ("eps", "run", "weight")

    def __init__(self, run: Map, weight: Tensor, eps: float) -> None:
        self.run, self.weight, self.eps = run, weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return self.run(x)


def make_norm(weight: Tensor, eps: float) -> Norm:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, statistics in float32; weight [size] or [heads, size].

    On the CPU in half precision the composite `F.rms_norm` costs 14 us a call; the same in five float32 operations 9 us:
    sqrt(mean + eps) = hypot(|x|, sqrt(size * eps)) / sqrt(size), the last factor folded into the weight.
    """
    size = weight.shape[-1]
    if weight.device.type != "cpu" or weight.dtype == torch.float32:
        if weight.dim() == 1:
            return Norm(lambda x: F.rms_norm(x, (size,), weight, eps), weight, eps)
        return Norm(lambda x: F.rms_norm(x, (size,), None, eps) * weight, weight, eps)
    floor = torch.tensor(math.sqrt(size * eps))
    scaled = weight.to(torch.float32) * math.sqrt(size)
    dtype = weight.dtype

    def norm(x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        length = torch.linalg.vector_norm(wide, 2, -1, True).hypot_(floor)
        return wide.div_(length).mul_(scaled).to(dtype)

    return Norm(norm, weight, eps)


class RotaryTables:
    """cos and sin by position, [length, 1, head_dim] each, grown on demand.

    Half-split form: rotate(x) = x * cos + roll(x, head_dim / 2) * sin, with the sign of the first half folded into sin.
    Angles are float32 products of the position and the float32 frequency, as `transformers` makes them.
    """

    def __init__(self, frequencies: Tensor, factor: float, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies, self._factor, self._dtype, self._device = frequencies, factor, dtype, device
        self.length = 0
        self.cos = self.sin = torch.empty(0)

    def grow(self, length: int) -> None:
        """Make the tables cover positions [0, length)."""
        if length <= self.length:
            return
        length = max(length, 2 * self.length)
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._frequencies.to(torch.float32)
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        self.cos = torch.cat([cos, cos], dim=-1).unsqueeze(1).to(self._device, self._dtype)
        self.sin = torch.cat([-sin, sin], dim=-1).unsqueeze(1).to(self._device, self._dtype)
        self.length = length

    def rows(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [start, start + count): [count, 1, head_dim]."""
        return self.cos.narrow(0, start, count), self.sin.narrow(0, start, count)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [B, T, heads, head_dim] in place."""
    rolled = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(rolled, sin)
