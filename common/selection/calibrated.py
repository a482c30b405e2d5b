"""Length policies that read a calibration: D-Cut, EVICT, DSpark's schedule, HybridSpec nominal and corrected (`algorithms` 4).

All choose on the host from one small read a round (confidence and entropy of the drafts, NumPy float [1, M]), in a few tens
of microseconds. `LengthModel.survival` is the lean form of `lengths.conditional_acceptance`; a test holds both equal.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from dspine.common.errors import DSpineError
from dspine.common.protocols import Proposal, StageZero
from dspine.common.selection.calibration import AcceptanceModel, Calibration
from dspine.common.selection.lengths import ENTROPY_EPS

Row = np.ndarray


class LengthModel:
    """The acceptance model with everything precomputed; float64, one row of M drafts."""

    def __init__(self, acceptance: AcceptanceModel) -> None:
        c, grid = acceptance.coefficients, np.array(acceptance.isotonic)
        self.drafts = grid.shape[0]
        position = np.arange(1.0, self.drafts + 1)
        self._grid, self._steps = grid, grid.shape[1] - 1
        self._rows = np.arange(self.drafts)
        self._base, self._slope = c[0] + c[2] * position, c[1] + c[3] * position
        self._entropy, self._change = c[4], c[5]
        self._mean = _running_mean(self.drafts)

    def calibrated(self, confidence: Row) -> Row:
        """The isotonic maps: confidence [M] -> [M], linear between the grid's points."""
        place = np.clip(confidence, 0.0, 1.0) * self._steps
        left = np.minimum(place.astype(np.intp), self._steps - 1)
        low = self._grid[self._rows, left]
        return low + (place - left) * (self._grid[self._rows, left + 1] - low)

    def conditional(self, confidence: Row, entropy: Row) -> Row:
        """c_i ~ P(accepted >= i | accepted >= i - 1), [M]."""
        change = np.log((entropy + ENTROPY_EPS) / (self._mean @ entropy + ENTROPY_EPS))
        logit = self._base + self._slope * self.calibrated(confidence)
        logit += self._entropy * np.log1p(entropy) + self._change * change
        return 0.5 + 0.5 * np.tanh(0.5 * logit)  # the sigmoid, without overflow

    def survival(self, confidence: Row, entropy: Row) -> Row:
        """p_i: probability that drafts 1..i are all accepted, [M]."""
        return np.cumprod(self.conditional(confidence, entropy))

    def signals(self, proposal: Proposal, policy: str) -> tuple[Row, Row]:
        """Confidence and entropy of the one row as float64 [M]. Raises DSpineError where they are absent or of another size."""
        if proposal.confidence is None or proposal.entropy is None:
            raise DSpineError(f"policy {policy!r} reads the drafts' confidence and entropy, and this drafter gave none")
        confidence, entropy = np.asarray(proposal.confidence, np.float64), np.asarray(proposal.entropy, np.float64)
        if confidence.shape != (1, self.drafts) or entropy.shape != (1, self.drafts):
            raise DSpineError(
                f"policy {policy!r} was calibrated for one row of {self.drafts} drafts, got {confidence.shape}, {entropy.shape}"
            )
        return confidence[0], entropy[0]


def _running_mean(drafts: int) -> np.ndarray:
    """[M, M]: row i holds the weights of h_1..h_M in h_bar_{i-1}, where h_bar_i = (h_i + h_bar_{i-1}) / 2, h_bar_0 = h_1."""
    rows = np.zeros((drafts, drafts))
    rows[0, 0] = 1.0
    for i in range(1, drafts):
        rows[i] = rows[i - 1] / 2
        rows[i, i - 1] += 0.5
    return rows


class _Calibrated:
    """Reads signals, fixes the length before the target runs: such a choice keeps every acceptance rule lossless."""

    name = ""
    needs_signals = True
    reads_draft_tokens = False

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.model = LengthModel(calibration.acceptance)
        self._seconds = np.array(calibration.cost.measured)  # round time at lengths 2..W

    def nominal(self, proposal: Proposal, limit: int) -> int:
        """Tokens to verify: 2..limit (limit is at least 2)."""
        return min(self._length(*self.model.signals(proposal, self.name)), limit)

    def _length(self, confidence: Row, entropy: Row) -> int:
        raise NotImplementedError

    def stage_zero_length(self, nominal: int, limit: int) -> int:
        return nominal

    def correct(self, stage: StageZero, nominal: int, limit: int) -> int:
        return min(nominal, limit)


class EvictPolicy(_Calibrated):
    """EVICT: of every prefix the one with most expected tokens per profiled round time; raw confidences."""

    name = "evict"

    def _ratio(self, confidence: Row) -> Row:
        return (1.0 + np.cumsum(np.cumprod(confidence))) / self._seconds

    def _length(self, confidence: Row, entropy: Row) -> int:
        return 2 + int(np.argmax(self._ratio(confidence)))


class DCutPolicy(EvictPolicy):
    """D-Cut: the same ratio at four fractions of the full block only (4, 8, 12, 16 of 16)."""

    name = "dcut"

    def __init__(self, calibration: Calibration) -> None:
        super().__init__(calibration)
        width = calibration.identity.block_size
        self.lengths = np.array(sorted({max(2, round(width * quarter / 4)) for quarter in (1, 2, 3, 4)}))

    def _length(self, confidence: Row, entropy: Row) -> int:
        return int(self.lengths[np.argmax(self._ratio(confidence)[self.lengths - 2])])


class DSparkPolicy(_Calibrated):
    """DSpark's schedule: drafts join one after another while expected tokens x rounds a second (the engine's profile) grows,
    and the first one that does not help ends it. Reads per-position calibrated confidences, no entropy."""

    name = "dspark"

    def _length(self, confidence: Row, entropy: Row) -> int:
        rate = (1.0 + np.cumsum(np.cumprod(self.model.calibrated(confidence)))) / self._seconds
        falls = rate[1:] <= rate[:-1]
        return 2 + (int(np.argmax(falls)) if falls.any() else len(falls))


class NominalPolicy(_Calibrated):
    """HybridSpec without the routing correction: Eq. 5 over every length, of equal scores the shorter."""

    name = "nominal"

    def __init__(self, calibration: Calibration) -> None:
        super().__init__(calibration)
        self._price = calibration.rate * np.array(calibration.cost.target)

    def _length(self, confidence: Row, entropy: Row) -> int:
        return self.choose(self.model.survival(confidence, entropy))

    def choose(self, survival: Row) -> int:
        """Eq. 5: w0 from the prefix probabilities [M]."""
        return 2 + int(np.argmax(np.cumsum(survival) + 1 - self._price))


class HybridSpecPolicy(NominalPolicy):
    """Eq. 5, then one token more where the experts that layer 0's router picked for it make it worth its time (Eq. 6).

    Stage 0 covers the extra token only where some outcome of the router could keep it: the choice is the paper's, rounds
    without a decision to make do not pay for one. Reads drafted tokens, so the rejection rule is out. The survival of the
    round at hand is kept between `nominal` and `correct`, per thread; a round is not interrupted.
    """

    name = "hybridspec"
    reads_draft_tokens = True

    def __init__(self, calibration: Calibration) -> None:
        super().__init__(calibration)
        if calibration.routing is None:
            raise DSpineError(
                "policy 'hybridspec' corrects by the router of layer 0, and this calibration holds no expert counts "
                "(a target without experts?): use --policy nominal"
            )
        self._price_of = correction_prices(calibration)
        self._least = self._price_of.min(axis=1).tolist()
        self._round = threading.local()

    def _length(self, confidence: Row, entropy: Row) -> int:
        survival = self.model.survival(confidence, entropy)
        self._round.survival = survival
        return self.choose(survival)

    def stage_zero_length(self, nominal: int, limit: int) -> int:
        if nominal >= limit or self._round.survival[nominal - 1] <= self._least[nominal]:
            return nominal
        return nominal + 1

    def correct(self, stage: StageZero, nominal: int, limit: int) -> int:
        if nominal >= limit:
            return limit
        if stage.router_picks is None:
            raise DSpineError("policy 'hybridspec' needs the picks of layer 0's router, and this target has none: use nominal")
        picks = np.asarray(stage.router_picks)
        if picks.shape[2] != self._price_of.shape[1] - 1:
            raise DSpineError(
                f"calibrated for {self._price_of.shape[1] - 1} experts a token, the router picked {picks.shape[2]}"
            )
        rows = picks[0].tolist()
        new = len(set(rows[nominal]).difference(*rows[:nominal]))
        return nominal + int(self._round.survival[nominal - 1] > self._price_of[nominal, new])


def uncorrected(policy: Any) -> Any:
    """The policy without the routing correction: lengths that do not depend on whether layer 0 ran first."""
    return NominalPolicy(policy.calibration) if isinstance(policy, HybridSpecPolicy) else policy


def correction_prices(calibration: Calibration) -> np.ndarray:
    """rho dL_c of Eq. 6, in tokens: [W, k + 1] at (w0, n_new), w0 = 2..W-1 (infinite elsewhere)."""
    t = calibration.tables()
    width = calibration.identity.block_size
    assert t.pairs is not None and t.pairs_given is not None
    prices: Any = np.full((width + 1, t.pairs_given.shape[1]), np.inf)
    for w in range(2, width):
        change = t.cost[w + 1] - t.cost[w] - t.stage_zero
        prices[w] = t.rate * (change + t.expert * (t.pairs_given[w] - t.pairs[w]))
    return prices


CALIBRATED = {kind.name: kind for kind in (DCutPolicy, EvictPolicy, DSparkPolicy, NominalPolicy, HybridSpecPolicy)}
