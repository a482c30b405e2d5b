"""Log-probabilities of emitted tokens, from the logits that verified them (case V6).

They are those of the target's own distribution, log_softmax of its logits: before temperature, penalties, bias and grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import array_namespace, at_least_float32, take_along, top_k
from dspine.common.protocols import ArrayOps


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms. `top`: (token, log-probability) of the most likely tokens, best first; empty if none were asked."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(arrays: ArrayOps, logits: Any, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """logits float [1, n, V], row i being the one that tokens[i] was taken from -> one entry a token. One host read."""
    xp = array_namespace(logits)
    rows = at_least_float32(logits)[0, : len(tokens)]
    highest = xp.max(rows, axis=-1, keepdims=True)
    total = highest + xp.log(xp.sum(xp.exp(rows - highest), axis=-1, keepdims=True))
    picks = arrays.to_device([[int(token)] for token in tokens])
    own = take_along(rows, picks, axis=-1) - total
    if not top:
        (values,) = arrays.to_host(own)
        return [TokenLogprobs(float(value[0])) for value in values]
    best, ids = top_k(rows, min(top, rows.shape[-1]))
    values, best, ids = arrays.to_host(own, best - total, ids)
    return [
        TokenLogprobs(float(value[0]), tuple((int(i), float(p)) for i, p in zip(row_ids, row, strict=True)))
        for value, row_ids, row in zip(values, ids, best, strict=True)
    ]
