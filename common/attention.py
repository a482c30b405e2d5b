"""Attention of a short block over a long cache, lengths on the device (`architecture`, one round).

Letters: B batch, w tokens of the block, Hq query heads, Hk key/value heads (Hq a multiple of Hk; query head h reads key
head h // (Hq / Hk)), D head size, C rows of the cache, S sections of a projection, R rotated dimensions of a head.
"""

from __future__ import annotations

from typing import Any

from dspine.common.arrays import arange, array_namespace, astype, at_least_float32, take_along, take_rows
from dspine.common.errors import DSpineError
from dspine.common.norms import RMSNorm, row_norm
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


@operation
def attention_inputs(
    projected: Array, cos: Array, sin: Array, lengths: Array, live: Array, keys: Array, values: Array, heads: int,
    norm: Any | None = None,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """From a layer's projection to `block_attention`: norm of q and k, rotation, K and V of the block into the cache.

    projected [B, w, S, D]: `heads` = Hq query heads, Hk key heads, Hk value heads, and whatever follows (a gate), which is not
    read; Hq may be 0. norm: None, or `weight` [Hq + Hk, D] and `eps`, applied to every head of q and k (`norms.row_norm`).
    cos, sin [P, R] by position, R even and at most D: the first R dimensions of q and k become
    x cos + roll(x, R / 2) sin, the sign of the first half folded into sin; x cos is rounded to the dtype before the sum.
    lengths int [B] committed tokens, live int [B]: row i of sequence b stands at position lengths[b] + i, and at C - 1 where
    i >= live[b]. keys, values [B, Hk, C, D] take the live rows at their positions; the last row, C - 1, is scrap: what it
    holds afterwards is left open. Positions behind the tables take their last row.
    Returns (query [B, w, Hq, D], keys, values): a kernel writes into the arrays it was given and returns them, the core's own
    code returns new ones. Raises `DSpineError` on shapes or dtypes that do not fit.
    """
    xp = array_namespace(projected, cos, sin, keys, values)
    check_attention_inputs(projected, cos, sin, lengths, live, keys, values, heads, norm)
    batch, count = projected.shape[:2]
    key_heads, capacity, turned = keys.shape[1], keys.shape[2], heads + keys.shape[1]
    first = xp.expand_dims(astype(lengths, xp.int32), axis=-1)
    offset = xp.expand_dims(arange(projected, count, xp.int32), axis=0)
    ends = xp.expand_dims(astype(live, xp.int32), axis=-1)
    place = xp.where(offset < ends, first + offset, xp.full_like(first + offset, capacity - 1))
    place = xp.clip(place, 0, cos.shape[0] - 1)
    both = projected[:, :, :turned]
    both = both if norm is None else row_norm(both, norm)
    both = rotate_heads(both, *(xp.expand_dims(take_rows(table, place), axis=2) for table in (cos, sin)))
    column = xp.expand_dims(arange(projected, capacity, xp.int32), axis=0)
    source = column - first  # [B, C]: the row of the block that belongs there
    taken = xp.reshape((source >= 0) & (source < ends) & (source < count), (batch, 1, capacity, 1))
    source = xp.reshape(xp.clip(source, 0, count - 1), (batch, 1, capacity, 1))
    found = []
    for cache, rows in ((keys, both[:, :, heads:]), (values, projected[:, :, turned : turned + key_heads])):
        rows = xp.permute_dims(rows, (0, 2, 1, 3))
        spread = take_along(rows, xp.broadcast_to(source, tuple(cache.shape)), axis=2)
        found.append(xp.where(taken, spread, cache))
    return both[:, :, :heads], found[0], found[1]


@operation
def context_inputs(
    projected: Array, cos: Array, sin: Array, lengths: Array, live: Array, store: Array, weight: Array, eps: float
) -> Array:
    """`attention_inputs` of all layers at once, keys and values only: context K/V behind `lengths`.

    projected [B, w, L, 2 Hk, D], of every layer its keys, then its values; store [L, 2, B, Hk, C, D]; weight [L, Hk, D] of the
    keys' norms. Returns the store: a kernel writes into the one it was given, the core's own code returns a new one.
    """
    xp = array_namespace(projected, store)
    check_context_inputs(projected, store, weight)
    layers = []
    for i in range(store.shape[0]):
        norm = RMSNorm(weight[i], eps)
        given = projected[:, :, i], cos, sin, lengths, live, store[i, 0], store[i, 1], 0, norm
        layers.append(xp.stack(attention_inputs.reference(*given)[1:]))  # type: ignore[attr-defined]
    return xp.stack(layers)


def check_context_inputs(projected: Array, store: Array, weight: Array) -> None:
    """Raise `DSpineError` where the layers do not fit together; `check_attention_inputs` looks at each."""
    layers, heads = store.shape[0], store.shape[3] if len(store.shape) == 6 else 0
    if len(store.shape) != 6 or len(projected.shape) != 5 or tuple(projected.shape[2:4]) != (layers, 2 * heads):
        raise DSpineError(
            "context_inputs: projected must have shape [B, w, L, 2 Hk, D] and store [L, 2, B, Hk, C, D], got "
            f"{tuple(projected.shape)} and {tuple(store.shape)}"
        )
    if tuple(weight.shape) != (layers, heads, store.shape[5]):
        raise DSpineError(
            f"context_inputs: weight must have shape {(layers, heads, store.shape[5])}, got {tuple(weight.shape)}"
        )


def rotate_heads(x: Array, cos: Array, sin: Array) -> Array:
    """Half-split rotation of the first R dimensions of x [..., D]; tables [..., R] of the dtype of x, signs folded into sin."""
    xp = array_namespace(x, cos, sin)
    size = cos.shape[-1]
    part = x[..., :size]
    rolled = xp.concat([part[..., size // 2 :], part[..., : size // 2]], axis=-1)
    wide = at_least_float32(part * cos) + at_least_float32(rolled) * at_least_float32(sin)
    turned = astype(wide, x.dtype)
    return turned if size == x.shape[-1] else xp.concat([turned, x[..., size:]], axis=-1)


def check_attention_inputs(
    projected: Array, cos: Array, sin: Array, lengths: Array, live: Array, keys: Array, values: Array, heads: int, norm: Any
) -> None:
    """Raise `DSpineError` where shapes or dtypes do not fit together."""
    where = "attention_inputs"
    if len(projected.shape) != 4:
        raise DSpineError(f"{where}: projected must have shape [B, w, S, D], got {tuple(projected.shape)}")
    batch, count, sections, size = projected.shape
    if len(keys.shape) != 4 or tuple(keys.shape) != (batch, keys.shape[1], keys.shape[2], size):
        raise DSpineError(f"{where}: keys must have shape [{batch}, Hk, C, {size}], got {tuple(keys.shape)}")
    if tuple(values.shape) != tuple(keys.shape):
        raise DSpineError(f"{where}: values must have the shape of keys {tuple(keys.shape)}, got {tuple(values.shape)}")
    least = heads + 2 * keys.shape[1]
    if heads < 0 or sections < least:
        raise DSpineError(
            f"{where}: {heads} query heads and {keys.shape[1]} key heads need {least} sections of projected, got {sections}"
        )
    if count < 1 or count >= keys.shape[2]:
        raise DSpineError(f"{where}: {count} rows and a scrap row do not fit a cache of {keys.shape[2]} rows")
    if len(cos.shape) != 2 or cos.shape[0] < 1 or tuple(sin.shape) != tuple(cos.shape):
        raise DSpineError(f"{where}: cos and sin must have one shape [P, R], got {tuple(cos.shape)} and {tuple(sin.shape)}")
    if cos.shape[1] % 2 or not 2 <= cos.shape[1] <= size:
        raise DSpineError(f"{where}: tables must be of an even number of dimensions, 2..{size}, got {cos.shape[1]}")
    for name, x in (("lengths", lengths), ("live", live)):
        if tuple(x.shape) != (batch,) or "int" not in str(x.dtype):
            raise DSpineError(f"{where}: {name} must be an integer array of shape ({batch},), got {x.dtype} {tuple(x.shape)}")
    for name, x in (("cos", cos), ("sin", sin), ("keys", keys), ("values", values)):
        if x.dtype != projected.dtype:
            raise DSpineError(f"{where}: {name} must have the dtype of projected, {projected.dtype}, got {x.dtype}")
    turned = heads + keys.shape[1]
    if norm is not None and tuple(norm.weight.shape) != (turned, size):
        raise DSpineError(f"{where}: norm.weight must have shape ({turned}, {size}), got {tuple(norm.weight.shape)}")
