"""RMS norm, and how an operation applies a norm that it was handed to a sum that it has not rounded yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import array_namespace, astype, at_least_float32
from dspine.common.errors import DSpineError
from dspine.common.registry import operation

Array = Any


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis, statistics in at least float32."""
    xp = array_namespace(x, weight)
    wide = at_least_float32(x)
    scaled = wide / xp.sqrt(xp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * astype(scaled, x.dtype)


@dataclass(frozen=True)
class RMSNorm:
    """A norm as the operations take it: callable, with the `weight` [H] and `eps` that a fused kernel reads."""

    weight: Array
    eps: float

    def __call__(self, x: Array) -> Array:
        return rms_norm(x, self.weight, self.eps)


def fused_norm(norm: Any, wide: Array, dtype: Any, out_dtype: Any) -> Array:
    """norm of the unrounded `wide` [..., H] (at least float32), rounded once to `out_dtype`.

    A norm without `weight` and `eps` is an opaque callable: it gets its input in `dtype`, the dtype that it was made for.
    """
    if hasattr(norm, "weight") and hasattr(norm, "eps"):
        return astype(rms_norm(wide, at_least_float32(norm.weight), norm.eps), out_dtype)
    return astype(norm(astype(wide, dtype)), out_dtype)


def row_norm(x: Array, norm: Any) -> Array:
    """norm (with `weight` and `eps`) of x [..., H], in the dtype of x: a weight of that dtype multiplies the rounded
    quotient, as `rms_norm` does it; a wider one the unrounded quotient, which is rounded once."""
    if norm.weight.dtype == x.dtype:
        return rms_norm(x, norm.weight, norm.eps)
    return astype(rms_norm(at_least_float32(x), at_least_float32(norm.weight), norm.eps), x.dtype)


@operation
def add_rms_norm(x: Array, y: Array | None, norm: Any) -> tuple[Array, Array]:
    """(s, normed) with s = x + y and normed = weight * s / sqrt(mean(s^2) + eps): a residual sum and the norm behind it.

    x [..., H]; y the same shape and dtype, or None: s is x. norm: `weight` [H] (a centred weight, 1 + w, is added up by the
    caller) in any dtype, and `eps`. s is rounded to the dtype of x before it is normed; statistics and products are float32
    at least, rounded once to that dtype. Returns new arrays (s is x where y is None). Raises `DSpineError` on shapes.
    """
    check_add_rms_norm(x, y, norm)
    total = x if y is None else astype(at_least_float32(x) + at_least_float32(y), x.dtype)
    return total, fused_norm(norm, at_least_float32(total), x.dtype, x.dtype)


def check_add_rms_norm(x: Array, y: Array | None, norm: Any) -> None:
    """Raise `DSpineError` where shapes or dtypes do not fit together."""
    if y is not None and (tuple(y.shape) != tuple(x.shape) or y.dtype != x.dtype):
        raise DSpineError(
            f"add_rms_norm: y must have shape {tuple(x.shape)} and dtype {x.dtype}, got {tuple(y.shape)} and {y.dtype}"
        )
    if tuple(norm.weight.shape) != tuple(x.shape[-1:]):
        raise DSpineError(f"add_rms_norm: norm.weight must have shape {tuple(x.shape[-1:])}, got {tuple(norm.weight.shape)}")
