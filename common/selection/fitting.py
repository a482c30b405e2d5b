"""From captured rounds and timings to the numbers of a calibration file (`algorithms` 4). NumPy, and scikit-learn where a fit
is asked for; nothing here runs a model, and everything is deterministic.

Letters: R rounds, M drafts a block, W = M + 1, k experts a token. A: accepted drafts of a fully verified round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspine.common.errors import BackendError, DSpineError
from dspine.common.selection.calibration import AcceptanceModel, CostTable, RoutingTables
from dspine.common.selection.lengths import ENTROPY_EPS, FEATURES

GRID = 101  # points of an isotonic map
SPARSE_ROUNDS = 50  # a position with fewer rounds takes the map fitted on all positions
SPARSE_CELL = 30  # tokens; a cell of an expert table with fewer takes the position's linear fit
ECE_BINS = 15


@dataclass(frozen=True)
class Rounds:
    """Fully verified rounds: confidence, entropy float [R, M]; accepted int [R]: A; new_pairs int [R, W, MoE layers]: experts
    that a token adds to those of the tokens before it, per layer (None on dense targets). Rounds cut by a stop token or the
    limit are left out already."""

    confidence: np.ndarray
    entropy: np.ndarray
    accepted: np.ndarray
    new_pairs: np.ndarray | None = None
    experts_per_token: int = 0

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def drafts(self) -> int:
        """M."""
        return self.confidence.shape[1]

    def labels(self) -> tuple[np.ndarray, np.ndarray]:
        """(1[A >= i], whether that is a label: A >= i - 1), bool [R, M] each."""
        i = np.arange(1, self.drafts + 1)
        return self.accepted[:, None] >= i, self.accepted[:, None] >= i - 1


def scikit_learn() -> Any:
    """The package, or a BackendError that says how to install it."""
    try:
        import sklearn.isotonic
        import sklearn.linear_model
    except ModuleNotFoundError as error:
        raise BackendError(
            "calibration needs scikit-learn, which is not installed: python -m pip install 'dspine[calibrate]'"
        ) from error
    return sklearn


def fit_acceptance(rounds: Rounds) -> AcceptanceModel:
    """Isotonic regression of 1[A >= i] on the confidence per position, then the logistic model on `FEATURES`.

    Positions with few rounds left take the map of all positions together. Raises DSpineError without rounds.
    """
    if not len(rounds):
        raise DSpineError("no whole round was captured: more prompts, or a larger --max-tokens")
    label, known = rounds.labels()
    grid = np.linspace(0, 1, GRID)
    pooled = _isotonic(rounds.confidence[known], label[known], grid)
    maps = []
    for i in range(rounds.drafts):
        rows = known[:, i]
        enough = rows.sum() >= SPARSE_ROUNDS
        maps.append(_isotonic(rounds.confidence[rows, i], label[rows, i], grid) if enough else pooled)
    x = features(rounds.confidence, rounds.entropy, np.array(maps))
    coefficients = _logistic(x[known], label[known])
    return AcceptanceModel(isotonic=[row.tolist() for row in maps], coefficients=coefficients.tolist())


def features(confidence: np.ndarray, entropy: np.ndarray, maps: np.ndarray) -> np.ndarray:
    """[R, M, 6] in the order of `FEATURES`; the same arithmetic as `lengths.conditional_acceptance`."""
    grid = np.linspace(0, 1, maps.shape[1])
    drafts = confidence.shape[1]
    calibrated = np.stack([np.interp(confidence[:, i], grid, maps[i]) for i in range(drafts)], axis=1)
    changes, mean = [], entropy[:, 0]
    for i in range(drafts):
        changes.append(np.log((entropy[:, i] + ENTROPY_EPS) / (mean + ENTROPY_EPS)))
        mean = (entropy[:, i] + mean) / 2
    position = np.broadcast_to(np.arange(1.0, drafts + 1), calibrated.shape)
    parts = [
        np.ones_like(calibrated),
        calibrated,
        position,
        calibrated * position,
        np.log1p(entropy),
        np.stack(changes, axis=1),
    ]
    assert len(parts) == len(FEATURES)
    return np.stack(parts, axis=-1)


def _isotonic(confidence: np.ndarray, label: np.ndarray, grid: np.ndarray) -> np.ndarray:
    model = scikit_learn().isotonic.IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    model.fit(confidence.astype(np.float64), label.astype(np.float64))
    return np.clip(np.maximum.accumulate(model.predict(grid)), 0, 1)


def _logistic(x: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Coefficients [6]; columns are standardised for the solver and scaled back. One class only: the intercept alone."""
    hits, count = int(label.sum()), len(label)
    if hits in (0, count):
        share = (hits + 0.5) / (count + 1)
        return np.array([np.log(share / (1 - share)), 0, 0, 0, 0, 0])
    mean, spread = x[:, 1:].mean(axis=0), x[:, 1:].std(axis=0)
    spread = np.where(spread > 1e-12, spread, 1.0)
    model = scikit_learn().linear_model.LogisticRegression(C=100.0, max_iter=5000, tol=1e-8)
    model.fit((x[:, 1:] - mean) / spread, label)
    slopes = model.coef_[0] / spread
    return np.array([model.intercept_[0] - slopes @ mean, *slopes])


def expected_calibration_error(probability: np.ndarray, label: np.ndarray, bins: int = ECE_BINS) -> float:
    """Mean |observed share - mean probability| over equal-width bins, weighted by their counts. Arrays of one shape."""
    p, y = np.ravel(probability).astype(np.float64), np.ravel(label).astype(np.float64)
    index = np.minimum((p * bins).astype(int), bins - 1)
    sums = (np.bincount(index, w, bins) for w in (p, y))
    return float(np.abs(np.subtract(*sums)).sum() / len(p)) if len(p) else 0.0


def fit_cost(seconds: Mapping[int, Sequence[float]], width: int) -> dict[str, Any]:
    """Round times at each length 2..W -> measured medians, the quadratic fit, and C_tgt: the fit without its constant term.

    The constant term is the length-independent part: it moves no choice, and rho adds it back.
    """
    lengths = np.arange(2, width + 1)
    missing = [int(w) for w in lengths if not len(seconds.get(int(w), ()))]
    if missing:
        raise DSpineError(f"no round was timed at lengths {missing}: more prompts, or a larger --max-tokens")
    measured = np.array([np.median(seconds[int(w)]) for w in lengths])
    degree = min(2, len(lengths) - 1)
    c = np.zeros(3)
    c[: degree + 1] = np.polynomial.polynomial.polyfit(lengths, measured, degree)
    return {
        "lengths": lengths.tolist(),
        "measured": measured.tolist(),
        "rounds": [len(seconds[int(w)]) for w in lengths],
        "quadratic": c.tolist(),
        "target": (c[1] * lengths + c[2] * lengths**2).tolist(),
        "fixed": float(c[0]),
    }


def round_seconds(cost: CostTable) -> np.ndarray:
    """Round time at lengths 2..W by the fit, [M]. Never under half the fastest measured one: a quadratic through noisy medians
    may dip below zero, and a rate per second needs positive times."""
    return np.maximum(np.array(cost.target) + cost.fixed, min(cost.measured) / 2)


def fit_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope, at least 0: seconds a token."""
    if len(set(x)) < 2:
        return 0.0
    return max(0.0, float(np.polyfit(np.asarray(x, float), np.asarray(y, float), 1)[0]))


def fit_expert(seconds: np.ndarray, distinct: np.ndarray, others: np.ndarray) -> float:
    """eta: seconds of one more distinct (layer, expert) at one fixed length; at least 0.

    seconds, distinct float [R]; others [R, n]: what else may move a round's time (text position, committed tokens). Rounds
    further than 4 median deviations from the fit are dropped once: an interrupted round says nothing about experts.
    """
    if len(seconds) < 8 or distinct.std() < 1e-9:
        return 0.0
    x = np.column_stack([np.ones_like(seconds), distinct, others]).astype(np.float64)
    keep = np.ones(len(seconds), bool)
    for _ in range(2):
        scale = np.maximum(np.abs(x[keep]).max(axis=0), 1e-30)
        solution = np.linalg.lstsq(x[keep] / scale, seconds[keep], rcond=None)[0] / scale
        residual = np.abs(seconds - x @ solution)
        keep = residual <= 4 * 1.4826 * np.median(residual) + 1e-12
    return max(0.0, float(solution[1]))


def new_pairs(picks: np.ndarray) -> np.ndarray:
    """picks int [R, W, layers, k] -> int16 [R, W, layers]: experts of a token that no token before it picked."""
    rounds, width, layers, k = picks.shape
    out = np.full((rounds, width, layers), k, np.int16)
    for start in range(0, rounds, 128):
        part = picks[start : start + 128]
        for t in range(1, width):
            same = part[:, :t, :, :, None] == part[:, t, None, :, None, :]
            out[start : start + 128, t] = k - same.any(axis=(1, 3)).sum(axis=-1)
    return out


def fit_routing(rounds: Rounds) -> RoutingTables | None:
    """The expert tables of Eq. 6 from a fully verified run; None where no routing was recorded.

    n_all(w) = mean new layer-0 experts + mean new pairs of the later layers, of the token at position w + 1; n_all(w | n) = n +
    the later layers' mean among tokens that add n (cells under 30 tokens: the position's least-squares line in n).
    """
    if rounds.new_pairs is None:
        return None
    first = rounds.new_pairs[:, :, 0].astype(np.float64)
    later = rounds.new_pairs[:, :, 1:].sum(axis=-1).astype(np.float64)
    width, k = first.shape[1], rounds.experts_per_token
    pairs, given = np.zeros(width + 1), np.zeros((width + 1, k + 1))
    n = np.arange(k + 1)
    for w in range(1, width):  # the token at 0-based index w extends length w
        a, b = first[:, w], later[:, w]
        pairs[w] = a.mean() + b.mean()
        slope = float(np.cov(a, b, bias=True)[0, 1] / a.var()) if a.var() > 1e-12 else 0.0
        given[w] = n + np.maximum(b.mean() + slope * (n - a.mean()), 0.0)
        for count in n:
            cell = b[a == count]
            if len(cell) >= SPARSE_CELL:
                given[w, count] = count + cell.mean()
    centred = [(x[:, 1:] - x[:, 1:].mean(axis=0)).ravel() for x in (first, later)]
    spread = np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
    correlation = float(centred[0] @ centred[1] / spread) if spread > 0 else None
    return RoutingTables(
        experts_per_token=k,
        moe_layers=rounds.new_pairs.shape[2],
        pairs=pairs.tolist(),
        pairs_given=given.tolist(),
        correlation=correlation,
    )


def dinkelbach(gain: np.ndarray, cost: np.ndarray) -> tuple[float, np.ndarray]:
    """max over choices of sum gain / sum cost. gain [R, n], cost [n] or [R, n], all costs positive.

    Returns (rho, choice int [R]): at rho every round maximises gain - rho cost, of equal scores the first column.
    """
    cost = np.broadcast_to(np.asarray(cost, np.float64), gain.shape)
    if not (cost > 0).all():
        raise DSpineError("dinkelbach: every cost must be positive")
    rate = float(gain[:, -1].sum() / cost[:, -1].sum())
    rows = np.arange(len(gain))
    for _ in range(100):
        choice = np.argmax(gain - rate * cost, axis=1)
        better = float(gain[rows, choice].sum() / cost[rows, choice].sum())
        if better <= rate * (1 + 1e-13):
            break
        rate = better
    return rate, np.argmax(gain - rate * cost, axis=1)


def expected_gain(survival: np.ndarray) -> np.ndarray:
    """Prefix probabilities [R, M] -> expected emitted tokens at lengths 2..W, [R, M]."""
    return 1.0 + np.cumsum(survival, axis=1)


def realised_gain(accepted: np.ndarray, drafts: int) -> np.ndarray:
    """Accepted drafts [R] of fully verified rounds -> tokens that lengths 2..W would have emitted, [R, M]."""
    return 1.0 + np.minimum(accepted[:, None], np.arange(1, drafts + 1))


def hindsight(survival: np.ndarray, accepted: np.ndarray, cost: CostTable, rate: float) -> dict[str, float]:
    """Pooled throughput (tokens a second) on captured rounds under the cost table, of what the nominal policy chose and of
    choices made in hindsight.

    nominal; full; best_static (one length for all rounds); best_rate (Eq. 5 with the rho that realises most); clairvoyant
    (knows A, no policy can reach it). `oracle_regret`: what nominal lacks of the better of best_static and best_rate;
    `clairvoyant_regret`: of the last.
    """
    drafts = survival.shape[1]
    seconds = round_seconds(cost)
    gain, realised = expected_gain(survival), realised_gain(accepted, drafts)
    rows = np.arange(len(accepted))

    def pooled(choice: np.ndarray) -> float:
        return float(realised[rows, choice].sum() / seconds[choice].sum())

    def at(rho: float) -> float:
        return pooled(np.argmax(gain - rho * seconds, axis=1))

    nominal = at(rate)
    static = [pooled(np.full(len(rows), index)) for index in range(drafts)]
    best_rate = max(at(rate * factor) for factor in np.geomspace(0.25, 4, 81))
    clairvoyant = dinkelbach(realised, seconds)[0]
    best = max(best_rate, *static)
    return {
        "nominal": nominal,
        "full": static[-1],
        "best_static": max(static),
        "best_static_length": 2 + int(np.argmax(static)),
        "best_rate": best_rate,
        "clairvoyant": clairvoyant,
        "oracle_regret": 1 - nominal / best,
        "clairvoyant_regret": 1 - nominal / clairvoyant,
    }
