"""Calibrations made by hand, and toys that carry what calibrated policies read: draft signals and a router."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from dspine.common.protocols import DraftRequest, Proposal, StageZero, Verification
from dspine.common.selection.calibration import AcceptanceModel, Calibration, CostTable, Identity, RoutingTables
from tests.helpers.toys import ToyDrafter, ToyTarget, oracle_drafter

EXPERTS, PICKS, LAYERS = 16, 4, 3


def calibration(width: int = 16, *, routed: bool = True, seed: int = 0, random: bool = False, **changes: Any) -> Calibration:
    """A valid calibration: smooth by default, arbitrary numbers (non-monotone cost included) where `random`."""
    rng = np.random.default_rng(seed)
    lengths = np.arange(2, width + 1)
    cost = 0.004 * lengths + 0.0002 * lengths**2
    coefficients = [-2.0, 5.0, -0.02, 0.01, -0.2, -0.1]
    pairs = np.linspace(9, 4, width + 1)
    given = np.add.outer(np.zeros(width + 1), np.linspace(2, 14, PICKS + 1))
    grid = np.tile(np.linspace(0, 1, 11), (width - 1, 1))
    rate, expert, stage = 60.0, 0.0004, 0.001
    if random:
        cost = rng.uniform(0, 0.1, len(lengths))
        coefficients = list(rng.normal(size=6) * [1, 2, 0.1, 0.1, 0.5, 0.5])
        pairs, given = rng.uniform(0, 12, width + 1), rng.uniform(0, 12, (width + 1, PICKS + 1))
        grid = np.sort(rng.random((width - 1, 11)), axis=1)
        rate, expert, stage = rng.uniform(1, 80), rng.uniform(0, 0.002), rng.uniform(0, 0.02)
    routing = RoutingTables(experts_per_token=PICKS, moe_layers=LAYERS, pairs=list(pairs), pairs_given=given.tolist())
    identity = Identity(
        target_name="toy",
        model_type="toy",
        target="t" * 16,
        drafter_name="draft",
        drafter="d" * 16,
        runtime="toy",
        device="cpu",
        dtype="float64",
        block_size=width,
    )
    made = Calibration(
        identity=identity,
        acceptance=AcceptanceModel(isotonic=grid.tolist(), coefficients=coefficients),
        cost=CostTable(
            lengths=lengths.tolist(),
            measured=(cost + 0.02).tolist(),
            rounds=[10] * len(lengths),
            quadratic=[0.02, 0.004, 0.0002],
            target=cost.tolist(),
            fixed=0.02,
            stage_zero=stage,
            expert=expert,
        ),
        routing=routing if routed else None,
        rate=rate,
    )
    return made.model_copy(update=changes)


def router_picks(context: list[int], layer: int, experts: int = EXPERTS, k: int = PICKS) -> list[int]:
    """The experts of one token: its own and its predecessor's id decide, so that neighbours share some."""
    rng = np.random.default_rng((context[-1], context[-2] if len(context) > 1 and layer else 0, layer))
    return rng.permutation(experts)[:k].tolist()


class RoutedTarget(ToyTarget):
    """A toy with a router in each of `LAYERS` layers; counts how many tokens each stage was given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stages: list[tuple[int, int]] = []

    def _picks(self, cache: Any, block: list[int], layers: int) -> np.ndarray:
        rows = [[router_picks(cache.tokens + block[: i + 1], layer) for layer in range(layers)] for i in range(len(block))]
        return np.array(rows)[None]

    def begin(self, cache: Any, tokens: np.ndarray) -> StageZero:
        picks = self._picks(cache, [int(t) for t in tokens[0]], 1)[:, :, 0]
        return StageZero(tokens, None, picks)

    def finish(self, cache: Any, stage: StageZero, w: int) -> Verification:
        self.stages.append((stage.tokens.shape[1], w))
        found = super().finish(cache, stage, w)
        if not self.record_routing:
            return found
        return dataclasses.replace(found, router_picks=self._picks(cache, [int(t) for t in stage.tokens[0, :w]], LAYERS))


class SignalDrafter(ToyDrafter):
    """Adds confidence and entropy that depend on the position in the text only, when asked for."""

    def propose(self, cache: dict[str, int], anchor: np.ndarray, request: DraftRequest) -> Proposal:
        made = super().propose(cache, anchor, request)
        if not request.signals:
            return made
        confidence, entropy = signals(cache["length"], made.tokens.shape[1])
        return dataclasses.replace(made, confidence=confidence[None], entropy=entropy[None])


def signals(at: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Confidence and entropy float32 [count] of the block that starts at text position `at`."""
    rng = np.random.default_rng((at, 77))
    return rng.uniform(0.3, 1.0, count).astype(np.float32), rng.exponential(0.7, count).astype(np.float32)


def signal_oracle(
    logits_of: Callable[[list[int]], np.ndarray], prompt: list[int], block: int, wrong_every: int = 0
) -> SignalDrafter:
    """`toys.oracle_drafter` with signals."""
    plain = oracle_drafter(logits_of, prompt, block, wrong_every)
    drafter = SignalDrafter(None, block)
    drafter.contexts = plain.contexts
    drafter.draft = plain.draft
    return drafter
