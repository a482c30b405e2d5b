"""Predecessor-conditioned decoding: the transition cache and the walk over it (`algorithms` 1; article "transition cache").

Refinement redoes the LAST layer's injection with the predecessor's token known. All K x K pairs are scored in one
parallel step; the walk then only looks up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dspine.common.arrays import array_namespace, astype, at_least_float32, sigmoid, softmax, take_along
from dspine.common.errors import DSpineError
from dspine.common.injection import InjectionWeights, injection_gate, injection_write
from dspine.common.norms import RMSNorm, fused_norm, rms_norm
from dspine.common.registry import operation
from dspine.common.sampling import sample_index
from dspine.common.transfer_space import read_prediction

Array = Any
__all__ = ["RMSNorm", "candidate_scores", "path_walk", "path_walk_sampled", "refine", "rms_norm", "transition_scores"]


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
    return _scored(hidden, gated, candidate_rows, weights, norm)


def _scored(hidden: Array, gated: Array, candidate_rows: Array, weights: InjectionWeights, norm: Any) -> Array:
    """Scores of wide messages [..., M, K, a]."""
    xp = array_namespace(hidden, gated, candidate_rows)
    wide = at_least_float32(hidden)
    written = injection_write.reference(xp.expand_dims(wide, axis=-2), gated, weights.write)
    refined = fused_norm(norm, written, hidden.dtype, wide.dtype)
    rows = xp.matrix_transpose(candidate_rows) if hasattr(xp, "matrix_transpose") else xp.swapaxes(candidate_rows, -1, -2)
    return xp.matmul(at_least_float32(refined), at_least_float32(rows))


@operation
def candidate_scores(
    hidden: Array,
    heard: Array,
    anchor_code: Array,
    candidates: Array,
    codes: Array,
    head: Array,
    weights: InjectionWeights,
    norm: Callable[[Array], Array],
) -> Array:
    """`transition_scores` straight from the tables, behind a last layer whose messages are known: no row is gathered and no
    readout multiplied again.

    hidden: u_L of rows 1..M [B, M, H]; heard: G_q z of the same rows, float32 [B, M, a] (`injection_messages`); anchor_code
    sqrt(r) C_x0 [B, r]; candidates int [B, M, K]; codes: C [V, r], unit rows; head: LM head [V, H]. sqrt(r) C_s is not rounded.
    Returns float32 [B, M, K, K].
    """
    xp = array_namespace(hidden, candidates)
    check_candidate_scores(hidden, heard, anchor_code, candidates, codes, head, weights)
    k, size = candidates.shape[-1], codes.shape[-1]
    known = at_least_float32(codes[candidates[:, :-1]]) * size**0.5
    first = xp.broadcast_to(at_least_float32(anchor_code)[:, None, None, :], (hidden.shape[0], 1, k, size))
    before = xp.concat([first, known], axis=1)
    gate = xp.expand_dims(heard + at_least_float32(weights.bias), axis=-2)
    gate = sigmoid(gate + xp.matmul(before, at_least_float32(weights.predecessor_gate).T))
    gated = gate * xp.matmul(before, at_least_float32(weights.message).T)
    return _scored(hidden, gated, head[candidates], weights, norm)


def check_candidate_scores(
    hidden: Array, heard: Array, anchor_code: Array, candidates: Array, codes: Array, head: Array, weights: InjectionWeights
) -> None:
    """Raise `DSpineError` where shapes do not fit together."""
    if len(hidden.shape) != 3 or len(candidates.shape) != 3:
        raise DSpineError(
            "candidate_scores: hidden must have shape [B, M, H] and candidates [B, M, K], got "
            f"{tuple(hidden.shape)} and {tuple(candidates.shape)}"
        )
    (batch, count, width), (size, rank) = hidden.shape, weights.message.shape
    for name, array, shape in (
        ("heard", heard, (batch, count, size)),
        ("anchor_code", anchor_code, (batch, rank)),
        ("candidates", candidates, (batch, count, candidates.shape[-1])),
        ("codes", codes, (codes.shape[0], rank)),
        ("head", head, (head.shape[0], width)),
    ):
        if tuple(array.shape) != tuple(shape):
            raise DSpineError(f"candidate_scores: {name} must have shape {tuple(shape)}, got {tuple(array.shape)}")


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
