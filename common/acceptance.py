"""Which drafts stay (`algorithms` 2): greedy, point-mass, rejection. All three keep the target's distribution for a
length fixed before the draws; the rejection rule does not survive a length rule that reads the drafted tokens.

Everything is [B, ...], sync-free. `limit` int [B]: at most this many drafts are looked at in each row (a plain step is
limit 0), so rows of one batch may be cut differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import arange, array_namespace, astype, row_at, take_along
from dspine.common.errors import DSpineError
from dspine.common.registry import operation
from dspine.common.sampling import SamplingParams, sample_index, token_probabilities

Array = Any
RULES = ("greedy", "point-mass", "rejection")


@dataclass(frozen=True)
class Verdict:
    """accepted int [B]: drafts that stay; next_token int [B]: the target's own token after them."""

    accepted: Array
    next_token: Array


def check_rule(rule: str, *, temperature: float, reads_draft_tokens: bool, policy: str) -> None:
    """Refuse combinations that would change the output distribution or mean nothing."""
    if rule not in RULES:
        raise DSpineError(f"acceptance must be one of {', '.join(RULES)}, got {rule!r}")
    if rule == "rejection" and temperature == 0.0:
        raise DSpineError("acceptance 'rejection' needs a temperature above 0, got 0; use 'greedy'")
    if rule == "greedy" and temperature > 0.0:
        raise DSpineError(f"acceptance 'greedy' needs temperature 0, got {temperature}; use 'point-mass' or 'rejection'")
    if rule == "rejection" and reads_draft_tokens:
        raise DSpineError(
            f"acceptance 'rejection' with length policy '{policy}' is not lossless: the policy reads the drafted tokens. "
            "Use acceptance 'point-mass', or a policy that fixes the length before the draws ('full', 'static')"
        )


def _leading(accepted: Array, limit: Array) -> Array:
    """Count of leading True in `accepted` bool [B, M] below `limit` [B]."""
    xp = array_namespace(accepted)
    count = accepted.shape[1]
    if count == 0:
        return astype(xp.zeros_like(limit), xp.int32)
    within = arange(accepted, count) < xp.expand_dims(limit, axis=-1)
    return astype(xp.sum(xp.cumulative_prod(astype(accepted & within, xp.int32), axis=-1), axis=-1), xp.int32)


@operation
def accept_greedy(logits: Array, draft: Array, limit: Array) -> Verdict:
    """Accept while the draft equals the target's argmax. logits [B, w, V], draft int [B, w-1], limit int [B]."""
    xp = array_namespace(logits)
    choice = xp.argmax(logits, axis=-1)
    accepted = _leading(choice[:, :-1] == draft, limit)
    return Verdict(accepted, row_at(choice, accepted))


@operation
def accept_point_mass(p: Array, draft: Array, limit: Array, u_accept: Array, u_draw: Array) -> Verdict:
    """Accept d_i with probability p_i(d_i); at the first rejection draw from p_i without d_i, renormalised.

    p float32 [B, w, V]; draft int [B, w-1]; u_accept [B, w-1], u_draw [B, w]: uniforms of those output positions.
    Right for any draft, however it was made.
    """
    xp = array_namespace(p)
    of_draft = _gather(p[:, :-1, :], draft)
    accepted = _leading(u_accept < of_draft, limit)
    row = row_at(p, accepted)
    rejected = accepted < limit
    token = row_at(_padded(draft), accepted)
    is_draft = arange(p, p.shape[-1]) == xp.expand_dims(token, axis=-1)
    residual = xp.where(is_draft & xp.expand_dims(rejected, axis=-1), xp.zeros_like(row), row)
    return Verdict(accepted, sample_index(_unless_empty(residual, row), row_at(u_draw, accepted)))


@operation
def accept_rejection(
    p: Array, draft: Array, limit: Array, candidates: Array, q: Array, u_accept: Array, u_draw: Array
) -> Verdict:
    """Accept d_i with min(1, p_i(d_i) / q_i(d_i)), else draw from normalize(max(p_i - q_i, 0)).

    candidates int [B, w-1, K] and q float32 [B, w-1, K]: the distribution each draft was DRAWN from (zero elsewhere).
    """
    xp = array_namespace(p)
    of_target = _gather(p[:, :-1, :], draft)
    of_draft = xp.sum(xp.where(candidates == xp.expand_dims(draft, axis=-1), q, xp.zeros_like(q)), axis=-1)
    accepted = _leading(u_accept * of_draft < of_target, limit)
    row = row_at(p, accepted)
    rejected = accepted < limit
    ids, mass = row_at(_padded(candidates), accepted), row_at(_padded(q), accepted)
    vocabulary = arange(p, p.shape[-1])
    proposal = xp.zeros_like(row)
    for k in range(ids.shape[-1]):  # K is small; no scatter, so nothing is written in place
        proposal = proposal + xp.where(vocabulary == ids[:, k : k + 1], mass[:, k : k + 1], xp.zeros_like(row))
    residual = xp.where(row > proposal, row - proposal, xp.zeros_like(row))
    residual = xp.where(xp.expand_dims(rejected, axis=-1), residual, row)
    return Verdict(accepted, sample_index(_unless_empty(residual, row), row_at(u_draw, accepted)))


@operation
def accept_point_mass_logits(
    logits: Array, draft: Array, limit: Array, u_accept: Array, u_draw: Array, temperature: float
) -> Verdict:
    """`accept_point_mass` of p = softmax(logits / temperature), temperature above 0: logits [B, w, V] of any float dtype.

    A plain sampled step is the case w = 1. Kernels write no probabilities: they need two sums a row and one row's CDF. A row
    that holds NaN or +inf accepts nothing and gives token 0.
    """
    return accept_point_mass(_plain(logits, temperature), draft, limit, u_accept, u_draw)


@operation
def accept_rejection_logits(
    logits: Array, draft: Array, limit: Array, candidates: Array, q: Array, u_accept: Array, u_draw: Array, temperature: float
) -> Verdict:
    """`accept_rejection` of p = softmax(logits / temperature), as `accept_point_mass_logits`."""
    return accept_rejection(_plain(logits, temperature), draft, limit, candidates, q, u_accept, u_draw)


def _plain(logits: Array, temperature: float) -> Array:
    return token_probabilities(logits, SamplingParams(temperature=temperature))


def accept_rejection_dense(p: Array, draft: Array, limit: Array, q: Array, u_accept: Array, u_draw: Array) -> Verdict:
    """`accept_rejection` for drafts that were drawn from the whole vocabulary: q float32 [B, w-1, V]."""
    xp = array_namespace(p)
    accepted = _leading(u_accept * _gather(q, draft) < _gather(p[:, :-1, :], draft), limit)
    row, proposal = row_at(p, accepted), row_at(_padded(q), accepted)
    residual = xp.where(row > proposal, row - proposal, xp.zeros_like(row))
    residual = xp.where(xp.expand_dims(accepted < limit, axis=-1), residual, row)
    return Verdict(accepted, sample_index(_unless_empty(residual, row), row_at(u_draw, accepted)))


def _gather(p: Array, tokens: Array) -> Array:
    xp = array_namespace(p)
    return xp.squeeze(take_along(p, xp.expand_dims(tokens, axis=-1), axis=-1), axis=-1)


def _padded(x: Array) -> Array:
    """One more row (of zeros), so that the row after the last draft can be indexed."""
    xp = array_namespace(x)
    return xp.concat([x, xp.zeros((x.shape[0], 1, *x.shape[2:]), dtype=x.dtype, **_device(x))], axis=1)


def _device(x: Array) -> dict[str, Any]:
    return {} if not hasattr(x, "device") else {"device": x.device}


def _unless_empty(weights: Array, fallback: Array) -> Array:
    """`weights`, or `fallback` in rows without mass (only rounding can empty a residual)."""
    xp = array_namespace(weights)
    return xp.where(xp.sum(weights, axis=-1, keepdims=True) > 0, weights, fallback)
