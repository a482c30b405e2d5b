"""A product of a few rows with a large matrix: what a decoding step spends most of its bytes on."""

from __future__ import annotations

from typing import Any

from dspine.common.arrays import array_namespace, astype, at_least_float32
from dspine.common.errors import DSpineError
from dspine.common.norms import add_rms_norm, check_add_rms_norm
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


@operation
def normed_rows(x: Array, norm: Any, weight: Array) -> Array:
    """`linear_rows` of the RMS norm of x [N, K]: norm (`weight` [K] and `eps`) -> [N, O].

    The norm is a factor of a row and one of a column: a kernel may round weight * x before the product and multiply by the
    row's factor behind it, so no launch stands between a residual sum and the product. Raises `DSpineError` on shapes or
    dtypes that do not fit.
    """
    check_normed_rows(x, norm, weight)
    return linear_rows(add_rms_norm(x, None, norm)[1], weight)


@operation
def residual_rows(x: Array, weight: Array, residual: Array) -> Array:
    """residual [N, O] + x [N, K] times weight [O, K] transposed -> [N, O], rounded once: a product and the sum behind it.

    Raises `DSpineError` on shapes or dtypes that do not fit.
    """
    check_residual_rows(x, weight, residual)
    xp = array_namespace(x, weight)
    product = xp.matmul(at_least_float32(x), at_least_float32(weight).T)
    return astype(at_least_float32(residual) + product, x.dtype)


def check_normed_rows(x: Array, norm: Any, weight: Array) -> None:
    """Raise `DSpineError` where shapes or dtypes do not fit together."""
    check_linear_rows(x, weight)
    check_add_rms_norm(x, None, norm)


def check_residual_rows(x: Array, weight: Array, residual: Array) -> None:
    """Raise `DSpineError` where shapes or dtypes do not fit together."""
    check_linear_rows(x, weight)
    expected = (x.shape[0], weight.shape[0])
    if tuple(residual.shape) != expected or residual.dtype != x.dtype:
        raise DSpineError(
            f"residual_rows: residual must have shape {expected} and dtype {x.dtype}, got {tuple(residual.shape)} and "
            f"{residual.dtype}"
        )


def check_linear_rows(x: Array, weight: Array) -> None:
    """Raise `DSpineError` where shapes or dtypes do not fit together."""
    if len(x.shape) != 2 or len(weight.shape) != 2 or x.shape[1] != weight.shape[1]:
        raise DSpineError(
            f"linear_rows: x [N, K] and weight [O, K] must share K, got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if x.dtype != weight.dtype:
        raise DSpineError(f"linear_rows: weight must have the dtype of x, {x.dtype}, got {weight.dtype}")
