"""One length for all sequences of a batch: the batched HybridSpec rule (`algorithms` 4).

    w = argmax over w in {2, 4, 8, 12, 16} of sum_b G_b(w) - rho_B C_B(w)

G_b(w) = 1 + p_b1 + .. + p_b(w-1) comes from the calibrated acceptance model where the policy has one, else from the running
acceptance of the sequence; C_B(w) is what verifying takes for B sequences (`CostTable`: measured at start-up, followed while
running); rho_B, tokens a second, is the fixed point of the objective: the pooled throughput of the rounds of B sequences so
far. A sequence with less room than w verifies what it has room for.

Whether to draft at all is decided before the drafts exist, from running acceptance and the same costs: a batch whose best
drafted round is expected to give fewer tokens a second than a plain one decodes plainly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dspine.common.decoding import DecodingLoop
from dspine.common.protocols import Proposal, Slots
from dspine.common.selection.calibrated import NominalPolicy
from dspine.common.serving.lengths import BatchLengths, CostTable, Option

SHARED = (2, 4, 8, 12, 16)
_POOL_MEMORY = 0.98


class SharedLengths(BatchLengths):
    """`BatchLengths` with one length for every sequence that is not pinned, one of `widths`."""

    def __init__(self, costs: CostTable, widths: Sequence[int] = SHARED) -> None:
        super().__init__(costs)
        self.widths = widths
        self._pools: dict[int, tuple[float, float]] = {}  # batch -> tokens and seconds of its rounds, old ones fading
        self._expected = 0.0  # tokens a second of the round planned last: where a batch size starts

    def throughput(self, batch: int) -> float:
        """rho_B, tokens a second."""
        tokens, seconds = self._pools.get(batch, (0.0, 0.0))
        return tokens / seconds if seconds > 0 else self._expected

    def observe_round(self, batch: int, tokens: int, seconds: float) -> None:
        """A round of `batch` sequences gave so many tokens."""
        old = self._pools.get(batch, (0.0, 0.0))
        self._pools[batch] = _POOL_MEMORY * old[0] + tokens, _POOL_MEMORY * old[1] + max(seconds, 1e-9)

    def weigh(
        self, loops: Sequence[DecodingLoop], limits: Sequence[int], pinned: Sequence[bool] = ()
    ) -> tuple[Option, Option | None]:
        """The planned lengths, before drafting: `BatchLengths.weigh`. Plain numbers: it is asked in the time of every round."""
        fixed = _flags(pinned, len(loops))
        rates = [self.rate(loop) for loop in loops]

        def option(lengths: list[int]) -> Option:
            tokens = sum(_geometric(rate, length) for rate, length in zip(rates, lengths, strict=True))
            return Option(lengths, tokens, self.device_seconds(loops, lengths))

        plain = option([limit if f else 1 for limit, f in zip(limits, fixed, strict=True)])
        drafted = [option(_lengths(w, limits, fixed)) for w in _candidates(limits, fixed, self.widths)]
        self._expected = max(self._rate(each) for each in (plain, *drafted))
        return plain, max(drafted, key=self._rate, default=None)

    def device_seconds(self, loops: Sequence[DecodingLoop], lengths: Sequence[int]) -> float:
        """Seconds of verifying and drafting in a round of these lengths."""
        return float(self._verify([lengths])[0]) + self._draft(lengths)

    def refine(
        self,
        loops: Sequence[DecodingLoop],
        lengths: Sequence[int],
        limits: Sequence[int],
        proposals: Sequence[Proposal | None],
        pinned: Sequence[bool] = (),
    ) -> list[int]:
        """The rule itself, with the signals at hand."""
        fixed = _flags(pinned, len(loops))
        caps, survival = [], []
        for loop, limit, proposal, is_fixed in zip(loops, limits, proposals, fixed, strict=True):
            cap = 1 if proposal is None else limit
            found = self.rate(loop) ** np.arange(1, max(limit, 1))
            if proposal is not None and isinstance(loop.policy, NominalPolicy) and not is_fixed:
                model = loop.policy.model
                found = model.survival(*model.signals(proposal, loop.policy.name))
            elif proposal is not None:
                cap = loop.policy.nominal(proposal, limit)
            caps.append(cap)
            survival.append(found)
        options = [_lengths(w, caps, fixed) for w in _candidates(caps, fixed, self.widths)]
        if not options:
            return [cap if is_fixed else 1 for cap, is_fixed in zip(caps, fixed, strict=True)]
        gains = np.array([_tokens(survival, tried) for tried in options])
        scores = gains - self.throughput(len(loops)) * self._verify(options)
        return options[int(np.argmax(scores))]  # of equal scores the shorter

    def _verify(self, options: Sequence[Sequence[int]]) -> np.ndarray:
        return self.costs.verify_seconds(len(options[0]), np.array([sum(lengths) for lengths in options]))

    def _draft(self, lengths: Sequence[int]) -> float:
        drafting = sum(length > 1 for length in lengths)
        return self.costs.draft_seconds(drafting) if drafting else 0.0


class GraphLengths(SharedLengths):
    """Where rounds are graphs: every sequence of a round pays for the graph that runs, one of the slots' widths over the slots
    that it reaches, so what lies within that width is free. The loops are `slots.SlotLoop`s."""

    def __init__(self, costs: CostTable, slots: Slots) -> None:
        super().__init__(costs, slots.widths)
        self.slots = slots

    def graph(self, loops: Sequence[Any], lengths: Sequence[int]) -> tuple[int, int]:
        """Slots and tokens of the graph that runs."""
        return self.slots.reach(1 + max(loop.slot for loop in loops)), self.width(lengths)

    def device_seconds(self, loops: Sequence[Any], lengths: Sequence[int]) -> float:
        """`SharedLengths.device_seconds`, of the graph that runs."""
        return self.graph_seconds(*self.graph(loops, lengths))

    def graph_seconds(self, size: int, width: int) -> float:
        """Seconds of a graph by the table."""
        return self.costs.seconds(size, width) + (self.costs.draft_seconds(size) if width > 1 else 0.0)

    def width(self, lengths: Sequence[int]) -> int:
        """Tokens of the graph for rounds of these lengths."""
        most = max(lengths)
        return next(w for w in self.widths if w >= most) if most > 1 else 1

    def observe_graph(self, size: int, width: int, seconds: float) -> None:
        """A graph took so long on the device."""
        drafting = self.costs.draft_seconds(size) if width > 1 else 0.0
        self.costs.observe(size, size * width, max(seconds - drafting, 1e-6), 0, 0.0)


def _flags(pinned: Sequence[bool], count: int) -> list[bool]:
    return list(pinned) or [False] * count


def _candidates(limits: Sequence[int], fixed: Sequence[bool], widths: Sequence[int]) -> list[int]:
    """Shared lengths up to the first that covers the sequence with most room; none where no free sequence can draft."""
    longest = max((limit for limit, is_fixed in zip(limits, fixed, strict=True) if not is_fixed), default=1)
    return [w for w in widths if w < longest] + [w for w in widths if w >= longest][:1] if longest > 1 else []


def _lengths(w: int, limits: Sequence[int], fixed: Sequence[bool]) -> list[int]:
    return [limit if is_fixed else min(w, limit) for limit, is_fixed in zip(limits, fixed, strict=True)]


def _geometric(rate: float, length: int) -> float:
    """1 + rate + .. + rate^(length - 1)."""
    return float(length) if rate == 1.0 else (1.0 - rate**length) / (1.0 - rate)


def _tokens(survival: Sequence[np.ndarray], lengths: Sequence[int]) -> float:
    """Expected tokens of a round."""
    return sum(1.0 + float(row[: length - 1].sum()) for row, length in zip(survival, lengths, strict=True))
