"""How many tokens to verify: the acceptance model, Eq. 5 over all lengths, and the routing correction of Eq. 6.

Letters: M drafts a block, W = M + 1 the longest length, N points of a calibration table, k experts a token. Positions
and lengths count from 1 as in the paper: draft i is token i + 1 of the block; length w holds the anchor and w - 1 drafts.
Everything is float32 on the device and free of host reads, so both operations can sit in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import arange, array_namespace, astype, sigmoid, take_along
from dspine.common.errors import DSpineError
from dspine.common.registry import operation

Array = Any
FEATURES = ("intercept", "confidence", "position", "confidence x position", "log(1 + entropy)", "log entropy change")
ENTROPY_EPS = 1e-6  # a certain draft has entropy 0; its change is measured against this


@dataclass(frozen=True)
class LengthTables:
    """Calibrated on a target-drafter pair and a runtime; arrays float32.

    calibration [M, N]: per position the isotonic map at confidences j / (N - 1), linear between; coefficients [6] of the
    logistic model in the order of `FEATURES`; cost [W + 1]: C_tgt(w) at index w (index 0 unused); rate: rho; stage_zero
    s: Stage-0 time of one more token; expert eta: time of one more distinct (layer, expert); pairs [W + 1]:
    mean new pairs n_all(w) of the token that extends length w; pairs_given [W + 1, k + 1]: the same given n new layer-0
    experts. Times in one unit, rho in tokens per that unit.
    """

    calibration: Array
    coefficients: Array
    cost: Array
    rate: float
    stage_zero: float = 0.0
    expert: float = 0.0
    pairs: Array | None = None
    pairs_given: Array | None = None


@dataclass(frozen=True)
class LengthChoice:
    """length int32 [B]: w0; stage_zero int32 [B]: u = min(w0 + 1, W, limit); survival float32 [B, M]: p_i, the
    probability that drafts 1..i are all accepted."""

    length: Array
    stage_zero: Array
    survival: Array


@dataclass(frozen=True)
class RoundLengths:
    """A round's lengths, int32 [B]: nominal w0, upper u (Stage 0's), chosen w (without a correction); survival as before."""

    nominal: Array
    upper: Array
    chosen: Array
    survival: Array


@operation
def select_length(confidence: Array, entropy: Array, limit: Array, tables: LengthTables) -> LengthChoice:
    """Eq. 5: w0 = argmax over w in 2..W of 1 + sum_{i < w} p_i - rho C_tgt(w); of equal scores the shorter.

    confidence, entropy float32 [B, M] of the top-1 drafts; limit int [B]: w_rem, the output budget's cap, at least 2.
    w0 itself is not capped by it (`correct_length` caps the result), u is.
    """
    xp = array_namespace(confidence, entropy)
    drafts = confidence.shape[1]
    _check_tables(confidence, entropy, tables)
    survival = xp.cumulative_prod(conditional_acceptance(confidence, entropy, tables), axis=-1)
    score = xp.cumulative_sum(survival, axis=-1) + 1 - tables.rate * tables.cost[2:]  # [B, M]: lengths 2..W
    length = astype(xp.argmax(score, axis=-1), xp.int32) + 2
    limit = astype(limit, xp.int32)
    return LengthChoice(length, _minimum(_minimum(length + 1, length * 0 + drafts + 1), limit), survival)


@operation
def bound_lengths(
    length: Array, stage_zero: Array, survival: Array, finite: Array, remaining: Array, room: RoundLengths, rows: int,
    corrected: bool,
) -> RoundLengths:  # fmt: skip
    """What `select_length` chose within a round's bounds: no more than the budget `remaining` int32 [B] and `rows`, and of a
    draft that is not `finite` bool [B] its anchor alone; at least 1. corrected: Stage 0 covers u, not w0.

    A kernel writes `room` and returns it, the core's own code returns new arrays.
    """
    check_bound_lengths(length, stage_zero, survival, finite, remaining, room, rows)
    xp = array_namespace(length, survival)
    found, one = astype(length, xp.int32), xp.ones_like(astype(length, xp.int32))
    most = xp.clip(xp.where(finite, xp.clip(astype(remaining, xp.int32), None, rows), one), 1, None)
    reach = astype(stage_zero, xp.int32) if corrected else found
    return RoundLengths(found, _minimum(reach, most), _minimum(found, most), survival)


def check_bound_lengths(
    length: Array, stage_zero: Array, survival: Array, finite: Array, remaining: Array, room: RoundLengths, rows: int
) -> None:
    """Raise `DSpineError` where shapes do not fit together."""
    each = {"stage_zero": stage_zero, "finite": finite, "remaining": remaining}
    each |= {name: x for name, x in vars(room).items() if name != "survival"}
    if len(room.survival.shape) != 2 or room.survival.shape[1] < survival.shape[1]:
        raise DSpineError(
            f"bound_lengths: room.survival must have shape [B, {survival.shape[1]} or more], got {tuple(room.survival.shape)}"
        )
    for name, x in each.items():
        if tuple(x.shape) != (survival.shape[0],) or len(length.shape) != 1 or rows < 1:
            raise DSpineError(
                f"bound_lengths: length and {name} must have shape ({survival.shape[0]},) and rows be 1 or more, got "
                f"{tuple(length.shape)}, {tuple(x.shape)} and {rows}"
            )


def conditional_acceptance(confidence: Array, entropy: Array, tables: LengthTables) -> Array:
    """c_i ~ P(accepted >= i | accepted >= i - 1): the logistic model on calibrated confidence, [B, M] -> [B, M]."""
    xp = array_namespace(confidence, entropy)
    calibrated = _calibrate(confidence, tables.calibration)
    changes, mean = [], entropy[:, 0]  # mean: h_bar_{i-1}, with h_bar_0 = h_1
    for i in range(entropy.shape[1]):
        changes.append(xp.log((entropy[:, i] + ENTROPY_EPS) / (mean + ENTROPY_EPS)))
        mean = (entropy[:, i] + mean) / 2
    position = astype(arange(confidence, confidence.shape[1]), confidence.dtype) + 1
    c = tables.coefficients
    logit = c[0] + c[1] * calibrated + c[2] * position + c[3] * calibrated * position
    logit = logit + c[4] * xp.log1p(entropy) + c[5] * xp.stack(changes, axis=1)
    return sigmoid(logit)


@operation
def correct_length(picks: Array, length: Array, survival: Array, limit: Array, tables: LengthTables) -> Array:
    """Eq. 6: one token more where Stage 0 covers it and it pays, then the output budget's cap. Returns w int32 [B].

    picks int [B, u, k]: layer-0 experts of the Stage-0 tokens (rows a length does not reach are not read, so a fixed u
    serves every length); length, survival: as `select_length` gave them; limit int [B]: w_rem.

        n_new = distinct experts of the first w0 + 1 tokens - those of the first w0
        dL    = C(w0 + 1) - C(w0) - s + eta (n_all(w0 | n_new) - n_all(w0));   extend if p_{w0} > rho dL
    """
    xp = array_namespace(picks, length, survival)
    _check_correction(picks, survival, tables)
    longest, covered = survival.shape[1] + 1, picks.shape[1]
    limit = astype(limit, xp.int32)
    may = (length < longest) & (length < covered)  # a length at the limit is cut back below
    at = xp.where(may, length, xp.ones_like(length))  # a length whose lookups below all exist
    added = new_experts(picks, at)
    wide = xp.expand_dims(at, axis=-1)
    given = _rows(tables.pairs_given, at)
    change = _lookup(tables.cost, at + 1) - _lookup(tables.cost, at) - tables.stage_zero
    expected = xp.squeeze(take_along(given, xp.expand_dims(added, axis=-1)), axis=-1)
    change = change + tables.expert * (expected - _lookup(tables.pairs, at))
    gain = xp.squeeze(take_along(survival, wide - 1), axis=-1)
    return _minimum(astype(xp.where(may & (gain > tables.rate * change), length + 1, length), xp.int32), limit)


def new_experts(picks: Array, length: Array) -> Array:
    """U(w + 1) - U(w): experts of token w + 1 that the first w tokens did not pick. picks int [B, u, k], length int [B] < u."""
    xp = array_namespace(picks, length)
    count = picks.shape[1]
    index = xp.broadcast_to(xp.reshape(length, (-1, 1, 1)), (picks.shape[0], 1, picks.shape[2]))
    newest = xp.squeeze(take_along(picks, index, axis=1), axis=1)  # [B, k]
    before = arange(picks, count) < xp.expand_dims(length, axis=-1)  # [B, u]
    same = xp.expand_dims(picks, axis=-1) == xp.reshape(newest, (newest.shape[0], 1, 1, -1))  # [B, u, k, k]
    seen = xp.any(same & xp.reshape(before, (*before.shape, 1, 1)), axis=(1, 2))
    return astype(xp.sum(astype(~seen, xp.int32), axis=-1), xp.int32)


def _calibrate(confidence: Array, table: Array) -> Array:
    """Piecewise linear lookup of confidence [B, M] in each position's row of `table` [M, N]; clamped to [0, 1]."""
    xp = array_namespace(confidence, table)
    steps = table.shape[1] - 1
    place = xp.where(confidence > 0, confidence, xp.zeros_like(confidence)) * steps
    place = xp.where(place < steps, place, xp.full_like(place, steps))
    left = xp.floor(place)
    left = xp.where(left < steps - 1, left, xp.full_like(left, steps - 1))
    index = xp.expand_dims(astype(left, xp.int32), axis=-1)
    rows = xp.broadcast_to(xp.expand_dims(table, axis=0), (confidence.shape[0], *table.shape))
    low, high = (xp.squeeze(take_along(rows, index + step), axis=-1) for step in (0, 1))
    return low + (place - left) * (high - low)


def _lookup(table: Array, index: Array) -> Array:
    """table [n], index int [B] -> [B]."""
    xp = array_namespace(table, index)
    return take_along(xp.broadcast_to(table, (index.shape[0], table.shape[0])), xp.expand_dims(index, axis=-1))[:, 0]


def _rows(table: Array, index: Array) -> Array:
    """table [n, m], index int [B] -> [B, m]."""
    xp = array_namespace(table, index)
    wide = xp.broadcast_to(xp.expand_dims(index, axis=-1), (index.shape[0], table.shape[1]))
    return take_along(table, wide, axis=0)


def _minimum(left: Array, right: Array) -> Array:
    xp = array_namespace(left, right)
    return xp.where(left < right, left, right)


def _check_tables(confidence: Array, entropy: Array, tables: LengthTables) -> None:
    drafts = confidence.shape[-1]
    if len(confidence.shape) != 2 or tuple(entropy.shape) != tuple(confidence.shape):
        raise DSpineError(
            f"select_length: confidence and entropy must have one shape [B, M], got {tuple(confidence.shape)} "
            f"and {tuple(entropy.shape)}"
        )
    for name, x, shape in (("calibration", tables.calibration, drafts), ("cost", tables.cost, drafts + 2)):
        if x.shape[0] != shape:
            raise DSpineError(f"select_length: tables.{name} must have {shape} entries for {drafts} drafts, got {x.shape[0]}")
    if tables.calibration.shape[1] < 2 or tuple(tables.coefficients.shape) != (len(FEATURES),):
        raise DSpineError(
            f"select_length: tables.calibration needs 2 points or more and tables.coefficients {len(FEATURES)} entries, got "
            f"{tuple(tables.calibration.shape)} and {tuple(tables.coefficients.shape)}"
        )


def _check_correction(picks: Array, survival: Array, tables: LengthTables) -> None:
    if len(picks.shape) != 3:
        raise DSpineError(f"correct_length: picks must have shape [B, u, k], got {tuple(picks.shape)}")
    if tables.pairs is None or tables.pairs_given is None:
        raise DSpineError("correct_length: the tables hold no expert counts (pairs, pairs_given); calibrate on a MoE target")
    want = (survival.shape[1] + 2, picks.shape[2] + 1)
    if tuple(tables.pairs_given.shape) != want or tables.pairs.shape[0] != want[0]:
        raise DSpineError(
            f"correct_length: tables.pairs_given must have shape {want} and tables.pairs {want[:1]}, got "
            f"{tuple(tables.pairs_given.shape)} and {tuple(tables.pairs.shape)}"
        )
