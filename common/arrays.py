"""Small helpers over the array API standard: what it lacks, and where the libraries differ.

Every function takes NumPy arrays, torch tensors or MLX arrays and stays on the device: no host read, no shape that
depends on data, no in-place write.
"""

from __future__ import annotations

from typing import Any

import array_api_compat

from dspine.common.registry import namespace_name, operation

Array = Any


def array_namespace(*arrays: Array) -> Any:
    """The array API namespace of the arrays; mixed libraries raise `TypeError` naming them."""
    names = {namespace_name(array) for array in arrays}
    if len(names) > 1:
        raise TypeError(f"arrays of one library expected, got {', '.join(sorted(names))}")
    if names == {"mlx"}:
        return arrays[0].__array_namespace__()
    return array_api_compat.array_namespace(*arrays)


def astype(x: Array, dtype: Any) -> Array:
    """`x` as `dtype` (no copy where it already is)."""
    return x if x.dtype == dtype else array_namespace(x).astype(x, dtype)


def is_low_precision(x: Array) -> bool:
    """True for float16 and bfloat16 arrays of any library."""
    return "float16" in str(x.dtype)


def at_least_float32(x: Array) -> Array:
    """Half-precision arrays as float32; float32 and float64 as they are."""
    return astype(x, array_namespace(x).float32) if is_low_precision(x) else x


def arange(like: Array, stop: int, dtype: Any | None = None) -> Array:
    """0..stop-1 on the device of `like` (int32 unless told)."""
    xp = array_namespace(like)
    dtype = xp.int32 if dtype is None else dtype
    if namespace_name(like) == "mlx":
        return xp.arange(stop, dtype=dtype)
    return xp.arange(stop, dtype=dtype, device=array_api_compat.device(like))


def take_along(x: Array, indices: Array, axis: int = -1) -> Array:
    """`take_along_axis` of the standard; indices as int64 where torch wants them."""
    xp = array_namespace(x)
    if namespace_name(x) == "mlx":
        return xp.take_along_axis(x, indices, axis=axis)
    return xp.take_along_axis(x, astype(indices, xp.int64), axis=axis)


def take_rows(table: Array, ids: Array) -> Array:
    """Rows `table[ids]`: `table` [V, d], `ids` int [...] -> [..., d]."""
    xp = array_namespace(table)
    flat = xp.reshape(ids, (-1,))
    if namespace_name(table) == "torch":
        flat = astype(flat, xp.int64)
    return xp.reshape(xp.take(table, flat, axis=0), (*ids.shape, table.shape[-1]))


def row_at(x: Array, index: Array) -> Array:
    """Row `index[b]` of every batch entry: `x` [B, T, ...], `index` int [B] -> [B, ...]."""
    xp = array_namespace(x)
    shape = (x.shape[0], 1) + (1,) * (len(x.shape) - 2)
    index = xp.broadcast_to(xp.reshape(index, shape), (x.shape[0], 1, *x.shape[2:]))
    return xp.squeeze(take_along(x, index, axis=1), axis=1)


def sigmoid(x: Array) -> Array:
    """1 / (1 + e^-x) without overflow in either direction."""
    xp = array_namespace(x)
    small = xp.exp(-xp.abs(x))
    return xp.where(x >= 0, xp.ones_like(x), small) / (1 + small)


def long_sum(x: Array) -> Array:
    """Sum over a long last axis by blocks of 128: [..., n] -> [...].

    A library that adds one after another in float32 (MLX on the CPU) loses four digits over a vocabulary.
    """
    xp = array_namespace(x)
    pad = -x.shape[-1] % 128
    if pad:
        x = xp.concat([x, xp.zeros((*x.shape[:-1], pad), dtype=x.dtype, **_device(x))], axis=-1)
    return xp.sum(xp.sum(xp.reshape(x, (*x.shape[:-1], -1, 128)), axis=-1), axis=-1)


def _device(x: Array) -> dict[str, Any]:
    return {} if namespace_name(x) == "mlx" else {"device": array_api_compat.device(x)}


def softmax(x: Array) -> Array:
    """Softmax over the last axis, in at least float32."""
    xp = array_namespace(x)
    x = at_least_float32(x)
    weights = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
    return weights / xp.sum(weights, axis=-1, keepdims=True)


@operation
def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """The `k` largest of the last axis, descending: `x` [..., V] -> (values [..., k], ids int [..., k]).

    Of equal values the lower id comes first.
    """
    xp = array_namespace(x)
    ids = xp.argsort(-x, axis=-1)[..., :k] if namespace_name(x) == "mlx" else xp.argsort(-x, axis=-1, stable=True)[..., :k]
    return take_along(x, ids), ids
