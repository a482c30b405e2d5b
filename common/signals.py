"""What a length policy and the transition cache read off the draft's logits, in one pass over the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import array_namespace, at_least_float32, long_sum, take_along, top_k
from dspine.common.errors import DSpineError
from dspine.common.registry import operation

Array = Any


@dataclass(frozen=True)
class DraftSignals:
    """Of each row of logits: values [..., K] and ids int [..., K] of its K largest (descending, of equal ones the lower id
    first), confidence [...] = probability of the first, entropy [...] in nats; all float32 but the ids. finite bool [...]:
    whether every logit of the row is."""

    values: Array
    ids: Array
    confidence: Array
    entropy: Array
    finite: Array


@dataclass(frozen=True)
class DraftCandidates:
    """`values`, `ids` and `finite` of `DraftSignals`."""

    values: Array
    ids: Array
    finite: Array


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
    return DraftSignals(values, ids, 1 / total, entropy, rows_finite(wide))


@operation
def draft_candidates(logits: Array, k: int) -> DraftCandidates:
    """`draft_signals` without the two signals, where no policy reads them: logits [..., V] of any float dtype."""
    xp = array_namespace(logits)
    if not 1 <= k <= logits.shape[-1]:
        raise DSpineError(f"draft_candidates: k must be 1..{logits.shape[-1]} (the vocabulary), got {k}")
    if k == 1:
        ids = xp.expand_dims(xp.argmax(logits, axis=-1), axis=-1)
        values = take_along(logits, ids)
    else:
        values, ids = top_k(logits, k)
    return DraftCandidates(at_least_float32(values), ids, rows_finite(at_least_float32(logits)))


def rows_finite(wide: Array) -> Array:
    """Whether all of a row is finite, bool [...] of float32 or float64 [..., V]: one pass, for a sum of finite logits cannot
    overflow float32."""
    xp = array_namespace(wide)
    return xp.isfinite(xp.sum(wide, axis=-1))
