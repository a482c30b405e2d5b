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

import numpy as np

from dspine.common.decoding import DecodingLoop
from dspine.common.protocols import Proposal
from dspine.common.selection.calibrated import NominalPolicy
from dspine.common.serving.lengths import BatchLengths, CostTable

SHARED = (2, 4, 8, 12, 16)
_POOL_MEMORY = 0.98


class SharedLengths(BatchLengths):
    """`BatchLengths` with one length for every sequence that is not pinned."""

    def __init__(self, costs: CostTable) -> None:
        super().__init__(costs)
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

    def plan(self, loops: Sequence[DecodingLoop], limits: Sequence[int], pinned: Sequence[bool] = ()) -> list[int]:
        """The planned lengths, before drafting: 1 everywhere where drafting is not expected to pay; a pinned sequence always
        takes its limit."""
        fixed = _flags(pinned, len(loops))
        survival = [self.rate(loop) ** np.arange(1, max(limit, 1)) for loop, limit in zip(loops, limits, strict=True)]
        options = [[limit if f else 1 for limit, f in zip(limits, fixed, strict=True)]]
        options += [_lengths(w, limits, fixed) for w in _candidates(limits, fixed)]
        seconds = self._verify(options)
        seconds += [self._draft(lengths) for lengths in options]
        rates = np.array([_tokens(survival, lengths) for lengths in options]) / seconds
        best = int(np.argmax(rates))
        self._expected = float(rates[best])
        return options[best]

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
        options = [_lengths(w, caps, fixed) for w in _candidates(caps, fixed)]
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


def _flags(pinned: Sequence[bool], count: int) -> list[bool]:
    return list(pinned) or [False] * count


def _candidates(limits: Sequence[int], fixed: Sequence[bool]) -> list[int]:
    """Shared lengths up to the first that covers the sequence with most room; none where no free sequence can draft."""
    longest = max((limit for limit, is_fixed in zip(limits, fixed, strict=True) if not is_fixed), default=1)
    return [w for w in SHARED if w < longest] + [w for w in SHARED if w >= longest][:1] if longest > 1 else []


def _lengths(w: int, limits: Sequence[int], fixed: Sequence[bool]) -> list[int]:
    return [limit if is_fixed else min(w, limit) for limit, is_fixed in zip(limits, fixed, strict=True)]


def _tokens(survival: Sequence[np.ndarray], lengths: Sequence[int]) -> float:
    """Expected tokens of a round."""
    return sum(1.0 + float(row[: length - 1].sum()) for row, length in zip(survival, lengths, strict=True))
