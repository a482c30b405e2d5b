"""How many tokens each sequence of a batch verifies: as many drafts as pay, given what a round costs here.

Drafts are nearly free while a round is bound by reading weights; with many sequences the products take over and every
further row costs. So the marginal drafts of all sequences compete: sequence r's i-th draft is worth a_r^i tokens (a_r: its
running acceptance), the best k are taken, and k maximises tokens over time. k = 0 decodes plainly without drafting. The
choice reads past rounds and the clock, never the drafts at hand, so every acceptance rule stays lossless. It does make the
round boundaries of a sampled answer depend on the clock, and with them the answer: sequences that must be repeatable (a
seed was given) are pinned to the policy's own length.

What plain rounds and what drafted ones take is followed apart: a start-up measurement that favoured one of them must not decide
for good. So the kind that is not chosen is looked at now and then, as often as a look costs little (`LOOK_SHARE`), and hardly
where it could not win even if the table were wrong by a plausible factor. A round also takes the host some time, whatever
its length; where the device runs a round meanwhile (`CostTable.overlaps`) the slower of both counts.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from dspine.common.decoding import DecodingLoop
from dspine.common.protocols import Proposal

PRIOR, MEMORY, DRIFT = 0.75, 0.95, 0.02
_SEEN, _HOST_SEEN = 7, 15  # rounds of which a scale is the median, and the host's part
PLAIN_EVERY, DRAFT_EVERY, _FIRST = 128, 256, 8  # rounds of one kind after which the other is looked at again, first after 8
LOOK_SHARE, HOPELESS_EVERY = 0.005, 1024  # what looks may cost; rounds between looks at plain rounds that cannot win
UNSEEN_ERROR, SEEN_ERROR, _ENOUGH = 3.0, 1.5, 3  # by which factor the table may be wrong: before so many rounds, and after
_TRIED = 4  # tokens of a drafted round that is looked at, at least


class Scale:
    """What rounds take over what was measured: a median of the newest ones, so one hiccup of the machine moves nothing."""

    def __init__(self) -> None:
        self._ratios = deque([1.0], maxlen=_SEEN)
        self.value, self.seen = 1.0, 0

    def follow(self, ratio: float) -> None:
        """One more round."""
        self._ratios.append(ratio)
        self.value = median(self._ratios)
        self.seen += 1

    @property
    def error(self) -> float:
        """The factor by which rounds may be cheaper than it says."""
        return SEEN_ERROR if self.seen >= _ENOUGH else UNSEEN_ERROR


class Turns:
    """When the kind of round that is not chosen is looked at again: after 8 of the other in a row, 16, 32, .. up to `most`."""

    def __init__(self, most: int) -> None:
        self._most, self._wait, self._row = most, _FIRST, 0

    def due(self, chosen: bool, least: int = 1) -> bool:
        """One more round; `chosen`: it is of the other kind; least: rounds that must lie between two looks now."""
        self._row = self._row + 1 if chosen else 0
        if self._row < max(self._wait, least):
            return False
        self._row, self._wait = 0, min(2 * self._wait, self._most)
        return True


@dataclass
class CostTable:
    """Seconds of a round, measured at start-up and corrected while running.

    verify[(B, w)]: B sequences of w tokens each; draft[B]. The scales follow what rounds really take: `plain_scale` corrects
    the points of one token a sequence, `verify_scale` all others. host: what a round takes besides, whatever its length;
    overlaps: the device runs a round during it, so that a round takes the longer of both.
    """

    verify: dict[tuple[int, int], float]
    draft: dict[int, float]
    overlaps: bool = False
    host: float = 0.0
    plain_scale: Scale = field(default_factory=Scale)
    verify_scale: Scale = field(default_factory=Scale)
    draft_scale: Scale = field(default_factory=Scale)
    _hosts: deque[float] = field(default_factory=lambda: deque(maxlen=_HOST_SEEN))
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

    def seconds(self, batch: int, width: int) -> float:
        """Time to verify `width` tokens for each of `batch` sequences: `verify_seconds` of one point, in a microsecond where it
        was measured (this is asked several times a round, and rounds of small models are short)."""
        found = self.verify.get((batch, width))
        if found is None:
            return float(self.verify_seconds(batch, np.array([batch * width]))[0])
        return found * (self.verify_scale if width > 1 else self.plain_scale).value

    def draft_seconds(self, batch: int) -> float:
        """Time to draft for `batch` sequences."""
        if not self.draft:
            return 0.0
        if batch in self.draft:
            return self.draft_scale.value * self.draft[batch]
        sizes = sorted(self.draft)
        return self.draft_scale.value * float(_between(sizes, np.array([[self.draft[size]] for size in sizes]), batch)[0])

    def observe(self, batch: int, rows: int, verify: float, drafts: int, draft: float) -> None:
        """A round took this long."""
        scale = self.verify_scale if rows > batch else self.plain_scale
        whole = rows % batch == 0
        expected = self.seconds(batch, rows // batch) if whole else float(self.verify_seconds(batch, np.array([rows]))[0])
        scale.follow(scale.value * verify / max(expected, 1e-9))
        if drafts and self.draft:
            self.draft_scale.follow(self.draft_scale.value * draft / max(self.draft_seconds(drafts), 1e-9))

    def observe_host(self, seconds: float) -> None:
        """A round took this long besides verifying and drafting."""
        self._hosts.append(seconds)
        self.host = median(self._hosts)

    def round_seconds(self, device: Any) -> Any:
        """A whole round whose verifying and drafting take `device` seconds, a number or an array of them."""
        if isinstance(device, float):
            return max(device, self.host) if self.overlaps else device + self.host
        return np.maximum(device, self.host) if self.overlaps else np.asarray(device) + self.host


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


class Option(NamedTuple):
    """A round that could be run: tokens each sequence verifies, tokens expected, seconds of verifying and drafting."""

    lengths: list[int]
    tokens: float
    device: float


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
        plain, drafted = self.weigh(loops, limits, pinned)
        if drafted is None:
            return plain.lengths
        drafts = self._rate(drafted) > self._rate(plain)
        if any(pinned) or max(limits) < 2:
            return (drafted if drafts else plain).lengths
        plain_due = self._try_plain.due(drafts, self._spacing(plain, drafted) if drafts else 1)
        if self._try_drafts.due(not drafts, 1 if drafts else self._spacing(drafted, plain)):
            return [max(length, min(limit, _TRIED)) for length, limit in zip(drafted.lengths, limits, strict=True)]
        return (drafted if drafts and not plain_due else plain).lengths

    def plan(self, loops: Sequence[DecodingLoop], limits: Sequence[int], pinned: Sequence[bool] = ()) -> list[int]:
        """The choice by what is known."""
        plain, drafted = self.weigh(loops, limits, pinned)
        return (drafted if drafted is not None and self._rate(drafted) > self._rate(plain) else plain).lengths

    def _rate(self, option: Option, cheaper: float = 1.0) -> float:
        """Tokens a second; cheaper: if the table were wrong by this factor."""
        return option.tokens / max(self.costs.round_seconds(option.device / cheaper), 1e-9)

    def _spacing(self, other: Option, chosen: Option) -> int:
        """Rounds between two looks at `other`: one in vain loses at most `LOOK_SHARE` of them. Until `other` has been seen a
        few times it may come sooner, and plain rounds that could not win within the table's error are hardly looked at:
        unlike drafted ones they tell nothing about the drafts."""
        is_plain = max(other.lengths) < 2
        scale = self.costs.plain_scale if is_plain else self.costs.verify_scale
        hopeless = self._rate(other, scale.error) < self._rate(chosen)
        if scale.seen < _ENOUGH and not hopeless:
            return 1
        lost = 1.0 - self._rate(other) / max(self._rate(chosen), 1e-9)
        took = self.costs.round_seconds(other.device) / max(self.costs.round_seconds(chosen.device), 1e-9)
        least = ceil(max(lost, 0.0) * took / LOOK_SHARE)
        return max(least, HOPELESS_EVERY) if hopeless and is_plain else least

    def weigh(
        self, loops: Sequence[DecodingLoop], limits: Sequence[int], pinned: Sequence[bool] = ()
    ) -> tuple[Option, Option | None]:
        """The plain round (pinned sequences take their limits all the same) and the best one in which others draft."""
        batch = len(loops)
        rates = [self.rate(loop) for loop in loops]
        fixed = {r for r, is_pinned in enumerate(pinned) if is_pinned}
        gains = [(rates[r] ** i, r) for r, limit in enumerate(limits) if r not in fixed for i in range(1, limit)]
        gains.sort(reverse=True)  # a_r^i falls with i, so a sequence's drafts come in order
        lengths = [limits[r] if r in fixed else 1 for r in range(batch)]
        value = batch + sum(rates[r] ** i for r in fixed for i in range(1, limits[r]))
        value = value + np.concatenate([[0.0], np.cumsum([gain for gain, _ in gains])])
        device = self.costs.verify_seconds(batch, sum(lengths) + np.arange(len(gains) + 1))
        drafting = sum(limit > 1 for limit in limits)
        device[1:] += self.costs.draft_seconds(drafting)
        if any(lengths[r] > 1 for r in fixed):
            device[0] += self.costs.draft_seconds(len(fixed))
        plain = Option(list(lengths), float(value[0]), float(device[0]))
        if not gains:
            return plain, None
        best = 1 + int(np.argmax(value[1:] / self.costs.round_seconds(device[1:])))
        for _, r in gains[:best]:
            lengths[r] += 1
        return plain, Option(lengths, float(value[best]), float(device[best]))
