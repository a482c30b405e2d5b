"""From the rows that a drafter's forward leaves to a `Proposal`, for every kind of drafter and both runtimes.

A runtime runs the backbone, hands over the final-normed hidden of the proposal rows and their logits, and its loaded heads
as callables (`DraftParts`). What a kind draws from, and which distribution it says it drew from, is decided here only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dspine.common.arrays import array_namespace, astype, at_least_float32, sigmoid
from dspine.common.configs import DrafterConfig
from dspine.common.draft_heads import (
    DominoWeights,
    Draws,
    MarkovWeights,
    SelectorWeights,
    Walk,
    confidence_logits,
    domino_walk,
    markov_walk,
    selector_lattice,
)
from dspine.common.errors import CheckpointError
from dspine.common.protocols import DraftRequest, Proposal
from dspine.common.sampling import sample_candidates
from dspine.common.signals import draft_candidates, draft_signals, rows_finite
from dspine.common.transition import path_walk, path_walk_sampled

Array = Any
INDEPENDENT_CANDIDATES = 16  # DFlash at temperature > 0 draws each position within its own top 16
_STRUCK = -1e30  # finite, so that a sum over a vocabulary of them still is
_PROBE_LOGIT = 60.0  # beyond any softcap in use, so that a cap shows


@dataclass(frozen=True)
class DraftParts:
    """The loaded heads of one drafter as callables; None where the kind has none. `transition`: candidates int [B, M, K] ->
    scores float32 [B, M, K, K] (DSpine: bound to this round's states). `allowed` bool [V]: the tokens that may be proposed
    (None: all)."""

    selector: SelectorWeights | None = None
    domino: DominoWeights | None = None
    markov: MarkovWeights | None = None
    confidence: Callable[[Array], Array] | None = None
    transition: Callable[[Array], Array] | None = None
    allowed: Array | None = None


def restricted(parts: DraftParts, tokens: Any, vocab: int, place: Callable[[Any], Array]) -> DraftParts:
    """`parts` of a drafter over a part of the vocabulary. tokens: ascending target ids, NumPy int [n] (None: all); `place` puts
    a NumPy array on the device. Its LM head is the target's rows of those ids, so the other logits are struck out, and what a
    Markov head says of draft id i is moved to tokens[i]."""
    if tokens is None:
        return parts
    allowed, inverse = np.zeros(vocab, dtype=np.bool_), np.zeros(vocab, dtype=np.int64)
    allowed[tokens], inverse[tokens] = True, np.arange(len(tokens))
    markov, positions = parts.markov, place(inverse)
    if markov is not None:
        narrow = markov.bias
        markov = replace(markov, bias=lambda latent: array_namespace(latent).take(narrow(latent), positions, axis=-1))
    return replace(parts, allowed=place(allowed), markov=markov)


def scale_logits(logits: Array, config: DrafterConfig) -> Array:
    """The card's own multiplier, then its tanh softcap: [..., V] -> [..., V]."""
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    cap = config.final_logit_softcapping
    return logits if cap is None else array_namespace(logits).tanh(logits / cap) * cap


def own_scale(config: DrafterConfig, target: Any, ids: Array) -> bool:
    """Whether `scale_logits` must be applied to what `target.head` returns.

    A target may scale its logits itself. On a probe (the LM-head row of ids[0], made long) the head's output for tokens `ids`
    int [n], which must be 0..n-1, is compared with the plain product: plain -> the drafter's scale goes on top; the drafter's
    own transform already -> nothing to do; anything else would be scaled twice, and is refused.
    """
    if not config.scales_logits:
        return False
    xp = array_namespace(ids)
    stored = target.head_rows(ids)
    rows = at_least_float32(stored)
    hidden = rows[:1, :] * (_PROBE_LOGIT / xp.sum(rows[0, :] * rows[0, :]))
    plain = xp.matmul(hidden, rows.T)[0, :]
    got = target.head(astype(hidden, stored.dtype))[0, : ids.shape[0]]
    limit = 0.05 * float(xp.max(xp.abs(plain))) + 1e-6
    if float(xp.max(xp.abs(got - plain))) <= limit:
        return True
    if float(xp.max(xp.abs(got - scale_logits(plain, config)))) <= limit:
        return False
    raise CheckpointError(
        f"the drafter scales its logits (multiplier {config.output_multiplier}, softcap {config.final_logit_softcapping}), and "
        f"{target.info.name} scales its own in another way: the two cannot be told apart behind one LM head"
    )


def make_proposal(
    config: DrafterConfig, parts: DraftParts, hidden: Array, logits: Array, anchor: Array, request: DraftRequest
) -> Proposal:
    """hidden [B, M, H] final-normed and logits [B, M, V] (scaled) of the proposal rows, anchor int [B] -> Proposal. Logits are
    float32; in the model's dtype only for kinds that draw rows on their own (not Domino, not DSpark).

    Greedy drafts are point masses: no q. At temperature > 0: DFlash draws within its top 16 (q over them); DFlash2 and DSpine
    walk over their K candidates (q over them); Domino and DSpark draw from the whole vocabulary (candidates None, q [B, M, V]).
    """
    xp = array_namespace(logits)
    if parts.allowed is not None:
        logits = xp.where(parts.allowed, logits, xp.zeros_like(logits) + _STRUCK)
    sampled = request.temperature > 0.0
    if parts.domino is not None or config.dspark is not None:
        return _sequential(config, parts, hidden, logits, anchor, request, xp.all(rows_finite(logits), axis=-1))
    count = min(INDEPENDENT_CANDIDATES, logits.shape[-1]) if sampled else 1
    if parts.selector is not None or parts.transition is not None:
        count = config.selector.top_k if parts.selector is not None else config.dspine.top_k  # type: ignore[union-attr]
    signals = draft_signals(logits, count) if request.signals else None
    found = draft_candidates(logits, count) if signals is None else signals
    confidence, entropy = (None, None) if signals is None else (signals.confidence, signals.entropy)
    candidates, finite = found.ids, xp.all(found.finite, axis=-1)
    if parts.selector is not None:
        scores = selector_lattice(hidden, found.values, candidates, anchor, parts.selector)
    elif parts.transition is not None:
        scores = parts.transition(candidates)
    elif sampled:
        tokens, q = sample_candidates(found.values, candidates, request.uniforms, request.temperature)
        return Proposal(tokens, finite, candidates, q, confidence, entropy)
    else:
        return Proposal(candidates[:, :, 0], finite, None, None, confidence, entropy)
    if not sampled:
        return Proposal(path_walk(scores, candidates), finite, None, None, confidence, entropy)
    tokens, q = path_walk_sampled(scores, candidates, request.uniforms, request.temperature)
    return Proposal(tokens, finite, candidates, q, confidence, entropy)


def _sequential(
    config: DrafterConfig, parts: DraftParts, hidden: Array, logits: Array, anchor: Array, request: DraftRequest, finite: Array
) -> Proposal:
    """Kinds whose logits depend on the tokens drawn before: Domino, DSpark."""
    draws = Draws(request.temperature, request.uniforms)
    result: Walk
    if parts.domino is not None:
        result = domino_walk(logits, hidden, anchor, parts.domino, draws)
    else:
        result = markov_walk(logits, hidden, anchor, parts.markov, draws)
    if parts.domino is not None or parts.markov is not None:
        xp = array_namespace(logits)
        finite = finite & xp.isfinite(xp.sum(result.logits, axis=(1, 2)))
    confidence = entropy = None
    if request.signals:
        signals = draft_signals(result.logits, 1)
        confidence, entropy = signals.confidence, signals.entropy
        if parts.confidence is not None:
            embed = parts.markov.embed if config.dspark.confidence_with_markov else None  # type: ignore[union-attr]
            confidence = sigmoid(confidence_logits(hidden, anchor, result.tokens, parts.confidence, embed))
    return Proposal(result.tokens, finite, None, result.q, confidence, entropy)
