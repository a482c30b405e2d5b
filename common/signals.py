"""What a length policy and the transition cache read off the draft's logits, in one pass over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import array_namespace, at_least_float32, long_sum, top_k
from dspine.common.errors import DSpineError
from dspine.common.registry import operation

Array = Any


@dataclass(frozen=True)
class DraftSignals:
    """Of each row of logits: values [..., K] and ids int [..., K] of its K largest (descending, of equal ones the lower id
    first), confidence [...] = probability of the first, entropy [...] in nats; all float32 but the ids."""

    values: Array
    ids: Array
    confidence: Array
    entropy: Array


@operation
def draft_signals(logits: Array, k: int) -> DraftSignals:
    """Top-K values and ids, top-1 probability and entropy of `logits` [..., V] (any float dtype), computed in float32.

    A logit of -inf counts as probability 0. entropy = log Z - sum_v p_v (x_v - max), which is at least 0.
    """
    xp = array_namespace(logits)
    if not 1 <= k <= logits.shape[-1]:
        raise DSpineError(f"draft_signals: k must be 1..{logits.shape[-1]} (the vocabulary), got {k}")
    values, ids = top_k(logits, k)
    wide, values = at_least_float32(logits), at_least_float32(values)
    shifted = wide - xp.max(wide, axis=-1, keepdims=True)
    weights = xp.exp(shifted)
    total = long_sum(weights)
    products = weights * xp.where(weights > 0, shifted, xp.zeros_like(shifted))  # 0 * -inf would be NaN
    entropy = xp.log(total) - long_sum(products) / total
    return DraftSignals(values, ids, 1 / total, entropy)
