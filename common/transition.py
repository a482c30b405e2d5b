"""Predecessor-conditioned decoding: the transition cache and the walk over it (`algorithms` 1; article "transition cache").

Refinement redoes the LAST layer's injection with the predecessor's token known. All K x K pairs are scored in one
parallel step; the walk then only looks up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dspine.common.arrays import array_namespace, astype, at_least_float32, softmax, take_along
from dspine.common.injection import InjectionWeights, injection_gate, injection_write
from dspine.common.norms import RMSNorm, fused_norm, rms_norm
from dspine.common.registry import operation
from dspine.common.sampling import sample_index
from dspine.common.transfer_space import read_prediction

Array = Any
__all__ = ["RMSNorm", "path_walk", "path_walk_sampled", "refine", "rms_norm", "transition_scores"]


def refine(hidden: Array, predecessor_code: Array, weights: InjectionWeights, norm: Callable[[Array], Array]) -> Array:
    """norm(write(u_L; receiver f_L(u_L), predecessor sqrt(r) C_s)): `hidden` u_L [..., H], code [..., r] -> [..., H]."""
    code = astype(predecessor_code, hidden.dtype)
    receiver = read_prediction(hidden, weights.readout)
    return norm(injection_write(hidden, injection_gate(receiver, code, weights), weights.write))


@operation
def transition_scores(
    hidden: Array,
    predecessor_codes: Array,
    candidate_rows: Array,
    weights: InjectionWeights,
    norm: Callable[[Array], Array],
) -> Array:
    """T[t, i, j] = S_t(predecessor candidate i, successor candidate j), float32.

    hidden: pre-injection u_L of rows 1..M [..., M, H]; predecessor_codes: sqrt(r) C of the K candidates of the row
    before (row 1: the anchor, K times) [..., M, K, r]; candidate_rows: LM-head rows of each row's own candidates
    [..., M, K, H]; norm: the final norm, any callable (kernels need its `weight` [H] and `eps`, see `RMSNorm`; torch's and
    MLX's own modules have both). Returns [..., M, K, K].
    """
    xp = array_namespace(hidden, predecessor_codes, candidate_rows)
    wide = at_least_float32(hidden)  # nothing is rounded before the scores
    receiver = read_prediction(wide, at_least_float32(weights.readout))
    receiver = xp.expand_dims(receiver, axis=-2)  # once a row; broadcasts over its K pairs
    gated = injection_gate.reference(receiver, astype(predecessor_codes, wide.dtype), weights)
    written = injection_write.reference(xp.expand_dims(wide, axis=-2), gated, weights.write)
    refined = fused_norm(norm, written, hidden.dtype, wide.dtype)
    rows = xp.matrix_transpose(candidate_rows) if hasattr(xp, "matrix_transpose") else xp.swapaxes(candidate_rows, -1, -2)
    return xp.matmul(at_least_float32(refined), at_least_float32(rows))


@operation
def path_walk(scores: Array, candidates: Array) -> Array:
    """Greedy walk: i_1 = argmax T_1[0, :], i_t = argmax T_t[i_{t-1}, :]. Returns tokens [..., M] of `candidates`.

    scores [..., M, K, K], candidates int [..., M, K].
    """
    xp = array_namespace(scores, candidates)
    picks = []
    row = scores[..., 0, 0, :]
    for t in range(scores.shape[-3]):
        if t:
            row = _row_of(scores[..., t, :, :], picks[-1])
        picks.append(xp.argmax(row, axis=-1))
    return _picked(candidates, xp.stack(picks, axis=-1))


@operation
def path_walk_sampled(scores: Array, candidates: Array, uniforms: Array, temperature: float) -> tuple[Array, Array]:
    """Sampled walk: token t is drawn from q_t = softmax(T_t[i_{t-1}, :] / temperature) with `uniforms` [..., M].

    Returns (tokens [..., M], q [..., M, K]): q is exactly the distribution each token was drawn from.
    """
    xp = array_namespace(scores, candidates)
    picks, rows = [], []
    row = scores[..., 0, 0, :]
    for t in range(scores.shape[-3]):
        if t:
            row = _row_of(scores[..., t, :, :], picks[-1])
        q = softmax(row / temperature)
        picks.append(sample_index(q, uniforms[..., t]))
        rows.append(q)
    return _picked(candidates, xp.stack(picks, axis=-1)), xp.stack(rows, axis=-2)


def _row_of(matrix: Array, index: Array) -> Array:
    """matrix [..., K, K], index int [...] -> [..., K]."""
    xp = array_namespace(matrix, index)
    wide = xp.broadcast_to(xp.reshape(index, (*index.shape, 1, 1)), (*index.shape, 1, matrix.shape[-1]))
    return xp.squeeze(take_along(matrix, wide, axis=-2), axis=-2)


def _picked(candidates: Array, picks: Array) -> Array:
    xp = array_namespace(candidates, picks)
    return xp.squeeze(take_along(candidates, xp.expand_dims(picks, axis=-1), axis=-1), axis=-1)
