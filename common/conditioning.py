"""Conditioning beyond the article, for drafters whose card asks for it: a message from two tokens back, and refinement of
the last two layers. Both leave an ordinary drafter as it is.

Two hops (`hops` 2): every row hears, through the very gate and message of the layer, what its predecessor heard,

    h_t = u_t + RMS(u_t) W_l (g(z_t, p_t) * m(p_t) + s * g(z_t, p_{t-1}) * m(p_{t-1})),   p_1 = anchor, p_t = z_{t-1}

with s [a] one trained vector for all layers (0: one hop). Row 1 has no second predecessor. In refinement the first hop is the
known token; the second stays the prediction, so that pairs of candidates remain enough.

Two refined layers (`refined_layers` 2): with the predecessor known, the last layer but one is written anew as well; what that
changes reaches the last layer along the residual stream, u_L + RMS(u_{L-1}) W_{L-1} (refined - ordinary message), not through
its attention and MLP, which are not run again.
"""

from __future__ import annotations

from typing import Any

from dspine.common.arrays import array_namespace, astype, at_least_float32
from dspine.common.injection import InjectionWeights, inject, injection_gate, injection_write
from dspine.common.norms import fused_norm
from dspine.common.transfer_space import read_prediction

Array = Any


def heard(z: Array, anchor_code: Array) -> Array:
    """What rows 1..M hear: [anchor, z_1, ..., z_{M-1}]; z [..., M, r], anchor_code [..., r]."""
    xp = array_namespace(z, anchor_code)
    return xp.concat([astype(xp.expand_dims(anchor_code, axis=-2), z.dtype), z[..., :-1, :]], axis=-2)


def second_hop(z: Array, predecessor: Array, weights: InjectionWeights, scale: Array) -> Array:
    """s * g * m of the second predecessor: z and predecessor (p_t) [..., M, r], scale [a] -> [..., M, a], row 1 zero."""
    xp = array_namespace(z, predecessor)
    before = xp.concat([xp.zeros_like(predecessor[..., :1, :]), predecessor[..., :-1, :]], axis=-2)
    return injection_gate.reference(z, before, weights) * astype(scale, z.dtype)  # the message of a zero is zero


def inject_hops(
    hidden: Array,
    anchor_code: Array,
    weights: InjectionWeights,
    replacement: tuple[Array, Array] | None = None,
    second: Array | None = None,
) -> Array:
    """`injection.inject`, with two hops where `second` (s [a]) is given."""
    if second is None:
        return inject(hidden, anchor_code, weights, replacement)
    xp = array_namespace(hidden, anchor_code)
    z = read_prediction(hidden[..., 1:, :], weights.readout)
    predecessor = heard(z, anchor_code)
    if replacement is not None:
        mask, codes = replacement
        predecessor = xp.where(mask, astype(codes, hidden.dtype), predecessor)
    gated = injection_gate.reference(z, predecessor, weights) + second_hop(z, predecessor, weights, second)
    written = injection_write.reference(hidden[..., 1:, :], gated, weights.write)
    return xp.concat([hidden[..., :1, :], written], axis=-2)


def refined_rows(
    states: Array,
    anchor_code: Array,
    codes: Array,
    weights: InjectionWeights,
    second: Array | None = None,
    earlier: InjectionWeights | None = None,
) -> Array:
    """h_L before the final norm, with the predecessor known, in at least float32: [..., M, K, H].

    states: u_L of rows 1..M [..., M, H]; with `earlier`, the weights of layer L-1, [u_L, u_{L-1}] side by side [..., M, 2H].
    anchor_code [..., r]; codes: sqrt(r) C of K predecessors of every row [..., M, K, r] (row 1: the anchor).
    """
    xp = array_namespace(states, codes)
    size = weights.write.shape[0]
    hidden, codes = at_least_float32(states[..., :size]), at_least_float32(codes)
    z = read_prediction(hidden, at_least_float32(weights.readout))
    target = xp.expand_dims(hidden, axis=-2)
    if earlier is not None:
        before = at_least_float32(states[..., size:])
        own = read_prediction(before, at_least_float32(earlier.readout))
        ordinary = injection_gate.reference(own, heard(own, anchor_code), earlier)
        change = injection_gate.reference(xp.expand_dims(own, axis=-2), codes, earlier) - xp.expand_dims(ordinary, axis=-2)
        rms = xp.expand_dims(xp.sqrt(xp.mean(before * before, axis=-1, keepdims=True)), axis=-2)
        target = target + rms * xp.matmul(change, at_least_float32(earlier.write).T)
    gated = injection_gate.reference(xp.expand_dims(z, axis=-2), codes, weights)
    if second is not None:
        gated = gated + xp.expand_dims(second_hop(z, heard(z, anchor_code), weights, second), axis=-2)
    return injection_write.reference(target, gated, weights.write)


def conditioned_scores(
    states: Array,
    anchor_code: Array,
    codes: Array,
    candidate_rows: Array,
    weights: InjectionWeights,
    norm: Any,
    second: Array | None = None,
    earlier: InjectionWeights | None = None,
) -> Array:
    """`transition.transition_scores` for drafters with two hops or two refined layers: [..., M, K, K] float32. Arguments as of
    `refined_rows`; candidate_rows [..., M, K, H]. No kernel of the accelerators has this form: it runs as array operations."""
    xp = array_namespace(states, codes, candidate_rows)
    written = refined_rows(states, anchor_code, codes, weights, second, earlier)
    refined = fused_norm(norm, written, states.dtype, written.dtype)
    rows = xp.matrix_transpose(candidate_rows) if hasattr(xp, "matrix_transpose") else xp.swapaxes(candidate_rows, -1, -2)
    return xp.matmul(refined, at_least_float32(rows))
