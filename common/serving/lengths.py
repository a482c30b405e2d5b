"""How many tokens each sequence of a batch verifies: as many drafts as pay, given what a round costs here.

Drafts are nearly free while a round is bound by reading weights; with many sequences the products take over and every
further row costs. So the marginal drafts of all sequences compete: sequence r's i-th draft is worth a_r^i tokens (a_r: its
running acceptance), the best k are taken, and k maximises tokens over time. k = 0 decodes plainly without drafting. The
choice reads past rounds and the clock, never the drafts at hand, so every acceptance rule stays lossless. It does make the
round boundaries of a sampled answer depend on the clock, and with them the answer: sequences that must be repeatable (a
seed was given) are pinned to the policy's own length.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from dspine.common.decoding import DecodingLoop

PRIOR, MEMORY, DRIFT = 0.75, 0.9, 0.02
_SCALE_MEMORY = 0.9


@dataclass
class CostTable:
    """Seconds of a round, measured at start-up and corrected while running.

    verify[(B, w)]: B sequences of w tokens each; draft[B]. `verify_scale` and `draft_scale` follow what rounds really take.
    """

    verify: dict[tuple[int, int], float]
    draft: dict[int, float]
    verify_scale: float = 1.0
    draft_scale: float = 1.0
    _sizes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sizes = sorted({batch for batch, _ in self.verify})

    def verify_seconds(self, batch: int, rows: np.ndarray) -> np.ndarray:
        """Time to verify `rows` tokens in all, for `batch` sequences: [n] -> [n]."""
        per_sequence = np.asarray(rows, dtype=np.float64) / batch
        curves = []
        for size in self._sizes:
            points = sorted((width, seconds) for (b, width), seconds in self.verify.items() if b == size)
            curves.append(np.interp(per_sequence, [p[0] for p in points], [p[1] for p in points]))
        return self.verify_scale * _between(self._sizes, np.stack(curves), batch)

    def draft_seconds(self, batch: int) -> float:
        """Time to draft for `batch` sequences."""
        if not self.draft:
            return 0.0
        sizes = sorted(self.draft)
        return self.draft_scale * float(_between(sizes, np.array([[self.draft[size]] for size in sizes]), batch)[0])

    def observe(self, batch: int, rows: int, verify: float, drafts: int, draft: float) -> None:
        """A round took this long."""
        predicted = float(self.verify_seconds(batch, np.array([rows]))[0]) / self.verify_scale
        self.verify_scale = _follow(self.verify_scale, verify / max(predicted, 1e-9))
        if drafts and self.draft:
            self.draft_scale = _follow(self.draft_scale, draft / max(self.draft_seconds(drafts) / self.draft_scale, 1e-9))


def _follow(old: float, new: float) -> float:
    return _SCALE_MEMORY * old + (1 - _SCALE_MEMORY) * min(max(new, 0.1), 10.0)


def _between(sizes: Sequence[int], curves: np.ndarray, batch: int) -> np.ndarray:
    """Linear between the measured batch sizes, and beyond the last one in proportion."""
    if batch >= sizes[-1]:
        return curves[-1] * (batch / sizes[-1])
    upper = next(i for i, size in enumerate(sizes) if size >= batch)
    lower = max(upper - 1, 0)
    span = sizes[upper] - sizes[lower]
    share = (batch - sizes[lower]) / span if span else 0.0
    return (1 - share) * curves[lower] + share * curves[upper]


def time_best(run: Callable[[], None], times: int = 2) -> float:
    """Seconds of the quickest of some runs."""
    best = float("inf")
    for _ in range(times):
        started = perf_counter()
        run()
        best = min(best, perf_counter() - started)
    return best


class BatchLengths:
    """Running acceptance of every sequence, and the choice."""

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        self._rates: weakref.WeakKeyDictionary[DecodingLoop, float] = weakref.WeakKeyDictionary()
        self._typical = PRIOR  # of all sequences: where a new one starts

    def rate(self, loop: DecodingLoop) -> float:
        """Estimated probability that the next draft of this sequence is accepted, given the ones before it."""
        return self._rates.get(loop, self._typical)

    def observe(self, loop: DecodingLoop, drafts: int, accepted: int) -> None:
        """Outcome of one sequence's round."""
        rate = self.rate(loop)
        if drafts:
            looked_at = min(accepted + 1, drafts)
            weight = MEMORY**looked_at
            rate = weight * rate + (1 - weight) * (accepted / looked_at)
            self._typical = 0.99 * self._typical + 0.01 * rate
        else:  # not drafted: nothing is learnt, and slowly hoped again
            rate += DRIFT * (self._typical - rate)
        self._rates[loop] = min(max(rate, 0.02), 0.98)

    def choose(self, loops: Sequence[DecodingLoop], limits: Sequence[int], pinned: Sequence[bool] = ()) -> list[int]:
        """Tokens to verify for each sequence, the anchor included: 1..limit; a pinned sequence always takes its limit."""
        batch = len(loops)
        rates = [self.rate(loop) for loop in loops]
        fixed = {r for r, is_pinned in enumerate(pinned) if is_pinned}
        gains = [(rates[r] ** i, r) for r, limit in enumerate(limits) if r not in fixed for i in range(1, limit)]
        gains.sort(reverse=True)  # a_r^i falls with i, so a sequence's drafts come in order
        lengths = [limits[r] if r in fixed else 1 for r in range(batch)]
        if not gains:
            return lengths
        value = batch + sum(rates[r] ** i for r in fixed for i in range(1, limits[r]))
        value = value + np.concatenate([[0.0], np.cumsum([gain for gain, _ in gains])])
        rows = sum(lengths) + np.arange(len(gains) + 1)
        seconds = self.costs.verify_seconds(batch, rows)
        drafting = sum(limit > 1 for limit in limits)
        seconds[1:] += self.costs.draft_seconds(drafting)
        if any(lengths[r] > 1 for r in fixed):
            seconds[0] += self.costs.draft_seconds(len(fixed))
        for _, r in gains[: int(np.argmax(value / seconds))]:
            lengths[r] += 1
        return lengths
