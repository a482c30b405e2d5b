"""Confidence intervals by bootstrap over prompts: prompts are what was sampled, rounds of one prompt are not independent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
Counts = np.ndarray  # float [prompts, 2]: tokens emitted by rounds, rounds


def _resampled(counts: Counts, draws: np.ndarray) -> np.ndarray:
    """Tokens a round of each resample: draws int [resamples, prompts]."""
    sums = counts[draws].sum(axis=1)
    return sums[:, 0] / np.maximum(sums[:, 1], 1)


def _bounds(values: np.ndarray, level: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def tokens_a_round(counts: Counts) -> float:
    """The pooled mean: all tokens over all rounds."""
    total = np.asarray(counts, dtype=np.float64).sum(axis=0)
    return float(total[0] / max(total[1], 1))


def acceptance_interval(
    sets: Sequence[Counts], *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """(mean over sets of tokens a round, low, high); prompts are drawn anew within each set."""
    rng = np.random.default_rng(seed)
    arrays = [np.asarray(counts, dtype=np.float64) for counts in sets]
    drawn = [_resampled(c, rng.integers(0, len(c), (resamples, len(c)))) for c in arrays]
    return float(np.mean([tokens_a_round(c) for c in arrays])), *_bounds(np.mean(drawn, axis=0), level)


def ratio_interval(
    ours: Sequence[Counts], theirs: Sequence[Counts], *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """(ratio of the means over sets, low, high), paired: both sides see the same resampled prompts."""
    rng = np.random.default_rng(seed)
    left, right, means = [], [], []
    for a, b in zip(ours, theirs, strict=True):
        a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
        if a.shape != b.shape:
            raise ValueError(f"paired counts need the same prompts, got {a.shape} and {b.shape}")
        draws = rng.integers(0, len(a), (resamples, len(a)))
        left.append(_resampled(a, draws))
        right.append(_resampled(b, draws))
        means.append((tokens_a_round(a), tokens_a_round(b)))
    ratios = np.mean(left, axis=0) / np.mean(right, axis=0)
    top, bottom = np.mean(means, axis=0)
    return float(top / bottom), *_bounds(ratios, level)
