"""RMS norm, and how an operation applies a norm that it was handed to a sum that it has not rounded yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import array_namespace, astype, at_least_float32

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
