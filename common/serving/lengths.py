"""How many tokens each sequence of a batch verifies: as many drafts as pay, given what a round costs here.

Drafts are nearly free while a round is bound by reading weights; with many sequences the products take over and every
further row costs. So the marginal drafts of all sequences compete: sequence r's i-th draft is worth a_r^i tokens (a_r: its
running acceptance), the best k are taken, and k maximises tokens over time. k = 0 decodes plainly without drafting. The
choice reads past rounds and the clock, never the drafts at hand, so every acceptance rule stays lossless. It does make the
round boundaries of a sampled answer depend on the clock, and with them the answer: sequences that must be repeatable (a
seed was given) are pinned to the policy's own length.

What plain rounds and what drafted ones take is followed apart: a start-up measurement that favoured one of them must not decide
for good. So a batch that drafts takes a plain round now and then, and one that does not takes a short drafted one.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from dspine.common.decoding import DecodingLoop
from dspine.common.protocols import Proposal

PRIOR, MEMORY, DRIFT = 0.75, 0.9, 0.02
_SEEN = 7  # rounds of which a scale is the median
PLAIN_EVERY, DRAFT_EVERY, _FIRST = 128, 256, 8  # rounds of one kind after which the other is looked at again, first after 8
_TRIED = 4  # tokens of such a drafted round


class Scale:
    """What rounds take over what was measured: a median of the newest ones, so one hiccup of the machine moves nothing."""

    def __init__(self) -> None:
        self._ratios = deque([1.0], maxlen=_SEEN)
        self.value = 1.0

    def follow(self, ratio: float) -> None:
        """One more round."""
        self._ratios.append(ratio)
        self.value = float(np.median(self._ratios))


class Turns:
    """When the kind of round that is not chosen is looked at again: after 8 of the other in a row, 16, 32, .. up to `most`."""

    def __init__(self, most: int) -> None:
        self._most, self._wait, self._row = most, _FIRST, 0

    def due(self, chosen: bool) -> bool:
        """One more round; `chosen`: it is of the other kind."""
        self._row = self._row + 1 if chosen else 0
        if self._row < self._wait:
            return False
        self._row, self._wait = 0, min(2 * self._wait, self._most)
        return True


@dataclass
class CostTable:
    """Seconds of a round, measured at start-up and corrected while running.

    verify[(B, w)]: B sequences of w tokens each; draft[B]. The scales follow what rounds really take: `plain_scale` corrects
    the points of one token a sequence, `verify_scale` all others.
    """

    verify: dict[tuple[int, int], float]
    draft: dict[int, float]
    plain_scale: Scale = field(default_factory=Scale)
    verify_scale: Scale = field(default_factory=Scale)
    draft_scale: Scale = field(default_factory=Scale)
    _sizes: list[int] = field(default_factory=list)
    _curves: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # widths and seconds, a batch size each

    def __post_init__(self) -> None:
        self._sizes = sorted({batch for batch, _ in self.verify})
        for size in self._sizes:
            points = np.array(sorted((width, seconds) for (b, width), seconds in self.verify.items() if b == size))
            self._curves.append((points[:, 0], points[:, 1]))

    def verify_seconds(self, batch: int, rows: np.ndarray) -> np.ndarray:
        """Time to verify `rows` tokens in all, for `batch` sequences: [n] -> [n]."""
        per_sequence = np.asarray(rows, dtype=np.float64) / batch
        plain, drafted = self.plain_scale.value, self.verify_scale.value
        curves = [
            np.interp(per_sequence, widths, seconds * np.where(widths > 1, drafted, plain)) for widths, seconds in self._curves
        ]
        return _between(self._sizes, np.stack(curves), batch)

    def draft_seconds(self, batch: int) -> float:
        """Time to draft for `batch` sequences."""
        if not self.draft:
            return 0.0
        sizes = sorted(self.draft)
        return self.draft_scale.value * float(_between(sizes, np.array([[self.draft[size]] for size in sizes]), batch)[0])

    def observe(self, batch: int, rows: int, verify: float, drafts: int, draft: float) -> None:
        """A round took this long."""
        scale = self.verify_scale if rows > batch else self.plain_scale
        scale.follow(scale.value * verify / max(float(self.verify_seconds(batch, np.array([rows]))[0]), 1e-9))
        if drafts and self.draft:
            self.draft_scale.follow(self.draft_scale.value * draft / max(self.draft_seconds(drafts), 1e-9))


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
        self._try_plain, self._try_drafts = Turns(PLAIN_EVERY), Turns(DRAFT_EVERY)

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

    def observe_round(self, batch: int, tokens: int, seconds: float) -> None:
        """A round of `batch` sequences gave so many tokens: of no use here."""

    def refine(
        self,
        loops: Sequence[DecodingLoop],
        lengths: Sequence[int],
        limits: Sequence[int],
        proposals: Sequence[Proposal | None],
        pinned: Sequence[bool] = (),
    ) -> list[int]:
        """Lengths once the drafts are there (None: this sequence decodes plainly): no longer than each policy wants."""
        return [
            1 if proposal is None else min(length, loop.policy.nominal(proposal, limit))
            for loop, length, limit, proposal in zip(loops, lengths, limits, proposals, strict=True)
        ]

    def choose(self, loops: Sequence[DecodingLoop], limits: Sequence[int], pinned: Sequence[bool] = ()) -> list[int]:
        """Tokens to verify for each sequence, the anchor included: 1..limit; a pinned sequence always takes its limit."""
        lengths = self.plan(loops, limits, pinned)
        if any(pinned) or max(limits) < 2:
            return lengths
        drafts = max(lengths) > 1
        plain_due, drafts_due = self._try_plain.due(drafts), self._try_drafts.due(not drafts)
        if plain_due:
            return [1] * len(loops)
        return [min(limit, _TRIED) for limit in limits] if drafts_due else lengths

    def plan(self, loops: Sequence[DecodingLoop], limits: Sequence[int], pinned: Sequence[bool] = ()) -> list[int]:
        """The choice by what is known."""
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
