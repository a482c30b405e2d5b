"""Texts that run in circles: small greedy models repeat themselves, and a drafter must not learn from that alone."""

from __future__ import annotations

import numpy as np

MAX_PERIOD = 40
MIN_SPAN = 24  # tokens: shorter repetitions (a row of dashes, "000") are ordinary text


def _span(period: int) -> int:
    """Tokens that must have one period to be called a loop: three copies, and at least MIN_SPAN."""
    return max(3 * period, MIN_SPAN)


def cut_loop(tokens: np.ndarray) -> int | None:
    """Tokens to keep of a text int [n] that falls into a loop (two copies, at least 16 tokens of it); None: no loop."""
    best = None
    for period in range(1, min(MAX_PERIOD, len(tokens) // 2) + 1):
        same = tokens[period:] == tokens[:-period]
        need = _span(period) - period  # `same` this many times in a row
        if len(same) < need or not same.any():
            continue
        breaks = np.concatenate([[-1], np.flatnonzero(~same), [len(same)]])
        runs = np.flatnonzero(np.diff(breaks) - 1 >= need)
        if len(runs):
            keep = int(breaks[runs[0]]) + 1 + max(2 * period, 16)
            best = keep if best is None else min(best, keep)
    return best


def looping_tails(rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Which sequences END in a loop: rows int [n, width], answers at [starts, ends) -> bool [n]."""
    longest = _span(MAX_PERIOD)
    index = ends[:, None] - longest + np.arange(longest)
    tails = np.where(index >= starts[:, None], np.take_along_axis(rows, np.maximum(index, 0), axis=1), -1 - np.arange(longest))
    result = np.zeros(len(rows), dtype=bool)
    for period in range(1, MAX_PERIOD + 1):
        tail = tails[:, -_span(period) :]
        result |= (tail[:, period:] == tail[:, :-period]).all(axis=1)
    return result
