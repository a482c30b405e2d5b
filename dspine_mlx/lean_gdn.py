"""The core's Gated DeltaNet operations in MLX's own, with fewer of them: where no Metal kernel runs, each is a launch.

`gdn_inputs` takes any number of tokens; `gdn_verify` and `gdn_commit` are of one token, as plain decoding has it, where nothing
has to be solved. Only calls that are well formed come here: the core's own code refuses the others, with its words.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dspine.common.gdn import NORM_EPS, GdnFactors, GdnInputWeights, GdnLayout, GdnTokens


def gdn_inputs(
    projected: mx.array, window: mx.array, a: mx.array, b: mx.array, weights: GdnInputWeights, layout: GdnLayout
) -> GdnTokens:
    """`common.gdn.gdn_inputs`: q and k are normed at once, by `mx.fast.rms_norm` (its mean of squares, not their sum)."""
    (batch, count, _), dtype = projected.shape, projected.dtype
    rows = mx.concatenate([window.astype(dtype), projected], axis=1).astype(mx.float32)
    taps = weights.conv.astype(mx.float32)
    if count == 1:
        mixed = mx.sum(rows * taps.T, axis=1, keepdims=True)
    else:
        mixed = sum(rows[:, j : j + count] * taps[:, j] for j in range(taps.shape[1]))
    if weights.conv_bias is not None:
        mixed = mixed + weights.conv_bias.astype(mx.float32)
    mixed = mixed * mx.sigmoid(mixed)
    heads, size = layout.key_heads, layout.key_dim
    both, v = mx.split(mixed, [2 * heads * size], axis=-1)
    both = mx.fast.rms_norm(mx.reshape(both, (batch, count, 2 * heads, size)), None, NORM_EPS / size)
    q, k = mx.split(both, 2, axis=2)
    v = mx.reshape(v, (batch, count, layout.value_heads, layout.value_dim))
    softplus = mx.logaddexp(a.astype(mx.float32) + weights.dt_bias.astype(mx.float32), 0.0)
    log_decay = -mx.exp(weights.decay_log.astype(mx.float32)) * softplus
    beta = mx.sigmoid(b.astype(mx.float32))
    return GdnTokens((q / size).astype(dtype), (k * size**-0.5).astype(dtype), v.astype(dtype), log_decay, beta)


def gdn_verify(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array, lengths: None = None
) -> tuple[mx.array, GdnFactors]:
    """`common.gdn.gdn_verify` of one token: z = beta (v - e^g S k), o = e^g S q + (k q) z. The products with S are sums: a
    little faster on CUDA than the library's batched product of two columns (docs/mac.md). lengths: always None here, since
    `one_token` leaves blocks with lengths to the core."""
    batch, _, key_heads, size = q.shape
    value_heads, value_dim = v.shape[2:]
    key, query = k[:, 0].astype(mx.float32), q[:, 0].astype(mx.float32)
    grouped, decay = mx.reshape(state, (batch, key_heads, -1, size)), mx.exp(log_decay[:, 0])[..., None]
    of_key, of_query = (
        decay * mx.reshape(mx.sum(grouped * x[:, :, None], axis=-1), (batch, value_heads, value_dim)) for x in (key, query)
    )
    z = beta[:, 0][..., None] * (v[:, 0].astype(mx.float32) - of_key)
    overlap = mx.repeat(mx.sum(key * query, axis=-1), value_heads // key_heads, axis=-1)
    out = of_query + overlap[..., None] * z
    return out.astype(v.dtype)[:, None], GdnFactors(z[:, None], k, log_decay)


def gdn_commit(
    states: mx.array, factors: GdnFactors, windows: mx.array, inputs: mx.array, m: mx.array
) -> tuple[mx.array, mx.array]:
    """`common.gdn.gdn_commit` of blocks of one token: S <- e^g S + z k^T where m is 1."""
    layers, batch, value_heads, value_dim, size = states.shape
    kept = mx.reshape(m > 0, (1, batch, 1, 1))
    key = factors.k[:, :, 0].astype(mx.float32)
    grouped = mx.reshape(factors.z[:, :, 0], (layers, batch, key.shape[2], -1, 1)) * key[..., None, :]
    written = mx.reshape(grouped, states.shape)
    moved = mx.exp(factors.g[:, :, 0])[..., None, None] * states + written
    window = mx.concatenate([windows[:, :, 1:], inputs.astype(windows.dtype)], axis=2)
    return mx.where(kept[..., None], moved, states), mx.where(kept, window, windows)


def inputs_fit(
    projected: mx.array, window: mx.array, a: mx.array, b: mx.array, weights: GdnInputWeights, layout: GdnLayout
) -> bool:
    """Whether these are the inputs that the core asks for."""
    if projected.ndim != 3 or projected.shape[1] == 0 or weights.conv.ndim != 2:
        return False
    batch, count, channels = projected.shape
    gates = (batch, count, layout.value_heads)
    shaped = window.shape == (batch, weights.conv.shape[1] - 1, channels) and a.shape == b.shape == gates
    small = weights.decay_log.shape == weights.dt_bias.shape == (layout.value_heads,)
    bias = weights.conv_bias is None or weights.conv_bias.shape == (channels,)
    return shaped and small and bias and weights.conv.shape[0] == channels == layout.channels and _floating(projected, a, b)


def one_token(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array, lengths: mx.array | None = None
) -> bool:
    """Whether this is a block of one live token that the core would take."""
    if lengths is not None or q.ndim != 4 or v.ndim != 4 or q.shape[1] != 1 or 0 in q.shape or 0 in v.shape:
        return False
    batch, _, key_heads, size = q.shape
    value_heads, value_dim = v.shape[2:]
    shaped = k.shape == q.shape and v.shape[:2] == (batch, 1) and state.shape == (batch, value_heads, value_dim, size)
    gates = log_decay.shape == beta.shape == (batch, 1, value_heads) and value_heads % key_heads == 0
    wide = state.dtype == log_decay.dtype == beta.dtype == mx.float32
    return shaped and gates and wide and q.dtype == k.dtype == v.dtype and _floating(q)


def one_token_each(states: mx.array, factors: GdnFactors, windows: mx.array, inputs: mx.array, m: mx.array) -> bool:
    """Whether these are factors of blocks of one token that the core would take."""
    ranks = [x.ndim for x in (states, factors.z, factors.k, factors.g, windows, inputs, m)]
    if ranks != [5, 5, 5, 4, 4, 4, 1] or factors.z.shape[2] != 1 or any(0 in x.shape for x in (states, factors.k, windows)):
        return False
    layers, batch, value_heads, value_dim, size = states.shape
    z = factors.z.shape == (layers, batch, 1, value_heads, value_dim) and factors.g.shape == (layers, batch, 1, value_heads)
    k = factors.k.shape == (layers, batch, 1, factors.k.shape[3], size) and value_heads % factors.k.shape[3] == 0
    rows = windows.shape[:2] == (layers, batch) and inputs.shape == (layers, batch, 1, windows.shape[3]) and m.shape == (batch,)
    wide = states.dtype == factors.z.dtype == factors.g.dtype == mx.float32
    return z and k and rows and wide and mx.issubdtype(m.dtype, mx.integer) and _floating(factors.k, windows, inputs)


def _floating(*arrays: mx.array) -> bool:
    return all(mx.issubdtype(array.dtype, mx.floating) for array in arrays)


KERNELS: tuple[tuple[Any, Any], ...] = ((gdn_inputs, inputs_fit), (gdn_verify, one_token), (gdn_commit, one_token_each))
