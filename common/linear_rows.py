"""A product of a few rows with a large matrix: what a decoding step spends most of its bytes on."""

from __future__ import annotations

from typing import Any

from dspine.common.arrays import array_namespace, astype, at_least_float32
from dspine.common.errors import DSpineError
from dspine.common.registry import operation

Array = Any


@operation
def linear_rows(x: Array, weight: Array) -> Array:
    """x [N, K] times weight [O, K] transposed -> [N, O]: sums are float32 at least, rounded once to the dtype of x.

    A kernel gives a row the same bits whatever rows are beside it, and reads the weight once; its result's rows may lie
    further apart than O. Raises `DSpineError` on shapes or dtypes that do not fit.
    """
    check_linear_rows(x, weight)
    xp = array_namespace(x, weight)
    return astype(xp.matmul(at_least_float32(x), at_least_float32(weight).T), x.dtype)


def check_linear_rows(x: Array, weight: Array) -> None:
    """Raise `DSpineError` where shapes or dtypes do not fit together."""
    if len(x.shape) != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise DSpineError(
            f"linear_rows: x [N, K] and weight [O, K] must share K, got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype:
        raise DSpineError(f"linear_rows: weight must have the dtype of x, {x.dtype}, got {weight.dtype}")
