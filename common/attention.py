"""Attention of a short block over a long cache, lengths on the device (`architecture`, one round).

Letters: B batch, w tokens of the block, Hq query heads, Hk key/value heads (Hq a multiple of Hk; query head h reads key
head h // (Hq / Hk)), D head size, C rows of the cache.
"""

from __future__ import annotations

from typing import Any

from dspine.common.arrays import arange, array_namespace, astype, at_least_float32
from dspine.common.errors import DSpineError
from dspine.common.registry import operation

Array = Any


@operation
def block_attention(
    query: Array, keys: Array, values: Array, lengths: Array, scale: float, causal: bool = True, window: int | None = None
) -> Array:
    """Softmax attention of w new tokens over a cache that already holds their own keys and values.

    query [B, w, Hq, D] (rotated); keys, values [B, Hk, C, D]: rows 0..length-1 are the committed tokens, rows
    length..length+w-1 the block's own, whatever lies behind may hold anything, NaN included; lengths int [B], at most
    C - w. Token i stands at position length + i. `causal`: it sees positions up to its own; else all length + w of them
    (a DFlash block). `window`: of those only the last `window` positions up to its own. Sums are float32 at least.
    Returns [B, w, Hq, D] in the dtype of the query. Raises `DSpineError` on shapes that do not fit.
    """
    xp = array_namespace(query, keys, values)
    check_block_attention(query, keys, values, lengths, window)
    batch, count, heads, size = query.shape
    key_heads, capacity = keys.shape[1], keys.shape[2]
    first = xp.expand_dims(astype(lengths, xp.int32), axis=-1)
    place = xp.expand_dims(first + xp.expand_dims(arange(query, count, xp.int32), axis=0), axis=-1)  # [B, w, 1]
    column = xp.reshape(arange(query, capacity, xp.int32), (1, 1, capacity))
    end = xp.expand_dims(first + count, axis=-1)
    seen = column <= place if causal else xp.broadcast_to(column < end, (batch, count, capacity))
    if window is not None:
        seen = seen & (column > place - window)
    live = xp.reshape(column < end, (batch, 1, capacity, 1))
    wide_keys, wide_values = (at_least_float32(xp.where(live, x, xp.zeros_like(x))) for x in (keys, values))
    grouped = xp.reshape(at_least_float32(query), (batch, count, key_heads, heads // key_heads, size))
    grouped = xp.permute_dims(grouped, (0, 2, 3, 1, 4))  # [B, Hk, G, w, D]
    score = xp.matmul(grouped, xp.permute_dims(xp.expand_dims(wide_keys, axis=2), (0, 1, 2, 4, 3))) * scale
    seen = xp.reshape(seen, (batch, 1, 1, count, capacity))
    score = xp.where(seen, score, xp.full_like(score, -float("inf")))
    weight = xp.exp(score - xp.max(score, axis=-1, keepdims=True))
    mixed = xp.matmul(weight, xp.expand_dims(wide_values, axis=2)) / xp.sum(weight, axis=-1, keepdims=True)
    return astype(xp.reshape(xp.permute_dims(mixed, (0, 3, 1, 2, 4)), (batch, count, heads, size)), query.dtype)


def check_block_attention(query: Array, keys: Array, values: Array, lengths: Array, window: int | None) -> None:
    """Raise `DSpineError` where shapes or dtypes do not fit together."""
    where = "block_attention"
    for name, x, letters in (("query", query, "B, w, Hq, D"), ("keys", keys, "B, Hk, C, D")):
        if len(x.shape) != 4:
            raise DSpineError(f"{where}: {name} must have shape [{letters}], got {tuple(x.shape)}")
    batch, count, heads, size = query.shape
    if tuple(keys.shape) != (batch, keys.shape[1], keys.shape[2], size):
        raise DSpineError(f"{where}: keys must have shape [{batch}, Hk, C, {size}], got {tuple(keys.shape)}")
    if tuple(values.shape) != tuple(keys.shape):
        raise DSpineError(f"{where}: values must have the shape of keys {tuple(keys.shape)}, got {tuple(values.shape)}")
    if keys.shape[1] < 1 or heads % keys.shape[1]:
        raise DSpineError(f"{where}: query heads must be a multiple of key heads, got {heads} and {keys.shape[1]}")
    if count < 1 or count > keys.shape[2]:
        raise DSpineError(f"{where}: a block of {count} tokens does not fit a cache of {keys.shape[2]} rows")
    if tuple(lengths.shape) != (batch,) or "int" not in str(lengths.dtype):
        raise DSpineError(f"{where}: lengths must be an integer array of shape ({batch},), got {lengths.dtype} {lengths.shape}")
    if not query.dtype == keys.dtype == values.dtype:
        raise DSpineError(
            f"{where}: query, keys and values must have one dtype, got {query.dtype}, {keys.dtype}, {values.dtype}"
        )
    if window is not None and window < 1:
        raise DSpineError(f"{where}: window must be at least 1, got {window}")
