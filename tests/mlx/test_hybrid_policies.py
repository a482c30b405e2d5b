"""Every length policy on tiny hybrids of mlx-lm's classes: greedy text is mlx-lm's own, and the router really decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from dspine.common.decoding import DecodingParams, decode
from dspine.common.protocols import Proposal
from dspine.common.selection.calibrated import CALIBRATED
from dspine.common.selection.policies import parse_policy
from tests.helpers.calibrations import calibration, signals
from tests.mlx.hybrids import MOE, PICKS, PROMPT, VOCAB, hybrid_target, third_party_greedy

COUNT, WIDTH = 40, 8


class SignalForced:
    """Drafts the right text, put wrong at every `every`-th place; confidence and entropy by text position."""

    info: dict[str, Any] = {}

    def __init__(self, text: list[int], every: int) -> None:
        self.text, self.every = text, every
        self.config = SimpleNamespace(block_size=WIDTH, num_proposals=WIDTH - 1, method="dflash")

    def make_cache(self, capacity: int) -> dict[str, int]:
        return {"length": 0}

    def commit(self, cache: dict[str, int], features: Any) -> None:
        cache["length"] += features.shape[1]

    def propose(self, cache: dict[str, int], anchor: Any, request: Any) -> Proposal:
        start = cache["length"] - len(PROMPT) + 1
        row = [(self.text[i] + (i % self.every == 0)) % VOCAB for i in range(start, start + WIDTH - 1)]
        confidence = entropy = None
        if request.signals:
            confidence, entropy = (mx.array(x)[None] for x in signals(cache["length"], WIDTH - 1))
        tokens = mx.array([row], dtype=mx.int32)
        return Proposal(tokens, mx.ones((1,), dtype=mx.bool_), confidence=confidence, entropy=entropy)


@pytest.fixture(scope="module", params=MOE)
def pair(request):
    """A target, and mlx-lm's own greedy text after PROMPT."""
    target = hybrid_target(request.param)
    target.bind_features([0])
    return target, third_party_greedy(target.model, PROMPT, COUNT + WIDTH)


def made_calibration():
    """Prices between 0 and 1 token, so that the router of layer 0 really decides."""
    made = calibration(WIDTH)
    given = [[1.0, 6.0, 12.0]] * (WIDTH + 1)
    routing = made.routing.model_copy(update={"experts_per_token": PICKS, "pairs": [6.0] * (WIDTH + 1), "pairs_given": given})
    cost = made.cost.model_copy(update={"expert": 0.003, "stage_zero": 0.003})
    return made.model_copy(update={"routing": routing, "cost": cost})


@pytest.mark.parametrize("name", ["full", "static:2", "static:7", *CALIBRATED])
def test_greedy_text_is_mlx_lms(pair, name):
    target, text = pair
    params = DecodingParams(max_tokens=COUNT, break_even=0)
    events = list(decode(target, SignalForced(text, 4), PROMPT, params, parse_policy(name, made_calibration())))
    assert [event.token for event in events] == text[:COUNT]
    assert events[-1].stats.accepted_tokens > 10


def test_the_router_decides(pair):
    target, text = pair
    policy, extra = parse_policy("hybridspec", made_calibration()), []
    correct = policy.correct

    def spy(stage, nominal, limit):
        length = correct(stage, nominal, limit)
        if limit > nominal:
            assert isinstance(stage.router_picks, np.ndarray) and stage.router_picks.shape[2] == PICKS
            extra.append(length - nominal)
        return length

    policy.correct = spy
    params = DecodingParams(max_tokens=COUNT, break_even=0)
    list(decode(target, SignalForced(text, 4), PROMPT, params, policy))
    assert set(extra) == {0, 1}
