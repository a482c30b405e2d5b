"""Small MLX helpers over draft logits."""

from __future__ import annotations

import mlx.core as mx

from dspine.common.arrays import softmax, take_along, top_k
from dspine.common.sampling import sample_index


def draft_signals(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Top-1 probability and entropy (nats) of each row: logits [..., V] -> two float32 [...]."""
    logits = logits.astype(mx.float32)
    log_p = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    p = mx.exp(log_p)
    return mx.max(p, axis=-1), -mx.sum(p * log_p, axis=-1)


def sample_independent(
    logits: mx.array, uniforms: mx.array, temperature: float, count: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Each row draws on its own within its top `count`: tokens [B, M], candidates [B, M, K], q [B, M, K]."""
    values, candidates = top_k(logits, count)
    q = softmax(values / temperature)
    picks = sample_index(q, uniforms)
    return mx.squeeze(take_along(candidates, picks[..., None]), axis=-1), candidates, q
