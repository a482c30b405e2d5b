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


TAIL = _span(MAX_PERIOD)  # tokens at the end of a text that tell whether it ends in a loop


def looping_tails(tails: np.ndarray, answered: np.ndarray) -> np.ndarray:
    """Which texts END in a loop: their last TAIL tokens int [n, TAIL] (anything before the text), tokens answered int [n] (what
    lies before the answer does not count) -> bool [n]."""
    outside = np.arange(TAIL) < TAIL - answered[:, None]
    tails = np.where(outside, -1 - np.arange(TAIL), tails)
    result = np.zeros(len(tails), dtype=bool)
    for period in range(1, MAX_PERIOD + 1):
        tail = tails[:, -_span(period) :]
        result |= (tail[:, period:] == tail[:, :-period]).all(axis=1)
    return result
