"""Gated DeltaNet over a long prompt, in chunks: equations 1-3, 7 and 10 of `algorithms` 3 for any number of tokens.

Inside a chunk nothing depends on the state but linearly: with T = H^{-1}, Z = T diag(beta) V - (T diag(beta e^g) K) S_0^T. Both
products are made for all chunks at once; then the state walks from chunk to chunk. Letters as in `common/gdn.py`; only
differences g_i - g_j <= 0 are exponentiated.
"""

from __future__ import annotations

from typing import Any

from dspine.common.arrays import array_namespace, astype
from dspine.common.errors import DSpineError
from dspine.common.gdn import _decay_between, _repeat_heads, _substitute

Array = Any
_BLOCK = 16  # rows that are substituted one after another; larger inverses are put together from these
CHUNKS = (16, 32, 64, 128)


def gdn_prefill(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, chunk: int = 64
) -> tuple[Array, Array]:
    """Outputs of T tokens and the state after them.

    q, k [B, T, Hk, Dk], v [B, T, Hv, Dv] of one dtype; log_decay (at most 0), beta float32 [B, T, Hv]; state float32
    [B, Hv, Dv, Dk]; T at least 1, free. chunk: 16, 32, 64 or 128 tokens. Returns o [B, T, Hv, Dv] in the dtype of v and the
    new state. All sums in the state's dtype. Raises `DSpineError` on another chunk.
    """
    if chunk not in CHUNKS:
        raise DSpineError(f"gdn_prefill: chunk must be one of {CHUNKS}, got {chunk}")
    xp = array_namespace(q, k, v, state)
    count, value_heads = v.shape[1], v.shape[2]
    keys, queries = (_chunked(_repeat_heads(astype(x, state.dtype), value_heads, axis=2), chunk) for x in (k, q))
    values = _chunked(astype(v, state.dtype), chunk)  # [B, n, Hv, c, Dv]
    strength = _chunked(xp.expand_dims(beta, axis=-1), chunk)  # [B, n, Hv, c, 1]
    g = xp.cumulative_sum(_chunked(xp.expand_dims(log_decay, axis=-1), chunk)[..., 0], axis=-1)  # [B, n, Hv, c]
    decay, between = xp.expand_dims(xp.exp(g), axis=-1), _decay_between(g)
    lower = xp.permute_dims(keys, (0, 1, 2, 4, 3))
    inverse = _inverse(strength * (between * xp.matmul(keys, lower)))
    own = xp.matmul(inverse, strength * values)  # Z where the state is 0
    reads = xp.matmul(inverse, strength * decay * keys)  # what meets the state
    mixed = between * xp.matmul(queries, lower)
    asked = decay * queries
    kept = xp.exp(g[..., -1:] - g)  # decay from a token to the end of its chunk
    last, outs = xp.exp(g[..., -1]), []
    for i in range(keys.shape[1]):
        transposed = xp.permute_dims(state, (0, 1, 3, 2))
        z = own[:, i] - xp.matmul(reads[:, i], transposed)  # [B, Hv, c, Dv]
        outs.append(xp.matmul(asked[:, i], transposed) + xp.matmul(mixed[:, i], z))
        written = xp.permute_dims(z * xp.expand_dims(kept[:, i], axis=-1), (0, 1, 3, 2))
        state = last[:, i][..., None, None] * state + xp.matmul(written, keys[:, i])
    out = xp.permute_dims(xp.stack(outs, axis=1), (0, 1, 3, 2, 4))  # [B, n, c, Hv, Dv]
    out = xp.reshape(out, (out.shape[0], -1, *out.shape[3:]))
    return astype(out[:, :count], v.dtype), state


def _chunked(x: Array, chunk: int) -> Array:
    """[B, T, H, D] -> [B, n, H, chunk, D]; rows of zeros behind the last token (no decay, no write: they change nothing)."""
    xp = array_namespace(x)
    batch, count, heads, size = x.shape
    short = -count % chunk
    if short:
        x = xp.concat([x, xp.zeros_like(xp.broadcast_to(x[:, :1], (batch, short, heads, size)))], axis=1)
    return xp.permute_dims(xp.reshape(x, (batch, -1, chunk, heads, size)), (0, 1, 3, 2, 4))


def _inverse(matrix: Array) -> Array:
    """(I + strict lower part of `matrix` [..., c, c])^{-1}: substitution in blocks of 16, then pairs of blocks joined."""
    xp = array_namespace(matrix)
    size = matrix.shape[-1]
    stacked = xp.stack([matrix[..., i : i + _BLOCK, i : i + _BLOCK] for i in range(0, size, _BLOCK)], axis=0)
    solved = _substitute(stacked, xp.zeros_like(stacked) + xp.eye(_BLOCK, dtype=matrix.dtype, **_place(matrix)))
    blocks = [solved[i] for i in range(size // _BLOCK)]
    width = _BLOCK
    while width < size:
        joined = []
        for j in range(0, len(blocks), 2):
            top, bottom, row = blocks[j], blocks[j + 1], (j + 1) * width
            corner = matrix[..., row : row + width, row - width : row]
            corner = -xp.matmul(bottom, xp.matmul(corner, top))
            upper = xp.concat([top, xp.zeros_like(top)], axis=-1)
            joined.append(xp.concat([upper, xp.concat([corner, bottom], axis=-1)], axis=-2))
        blocks, width = joined, 2 * width
    return blocks[0]


def _place(x: Array) -> dict[str, Any]:
    return {"device": x.device} if hasattr(x, "device") and not isinstance(x.device, str) else {}
