"""Every length policy on a real (tiny, random) hybrid: greedy text is the plain one; calibration reads its routers."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dspine.common.decoding import DecodingParams, decode  # noqa: E402
from dspine.common.protocols import Engine  # noqa: E402
from dspine.common.selection import capture as capturing  # noqa: E402
from dspine.common.selection.calibrated import CALIBRATED  # noqa: E402
from dspine.common.selection.fitting import fit_routing, new_pairs  # noqa: E402
from dspine.common.selection.policies import parse_policy  # noqa: E402
from dspine_cuda.runtime import RUNTIME  # noqa: E402
from tests.helpers.calibrations import calibration, signals  # noqa: E402
from tests.helpers.hybrids import ForcedDrafter, save_hybrid  # noqa: E402

PROMPT, COUNT, WIDTH, PICKS, LAYERS = [5, 9, 11, 4], 64, 8, 3, 5


class SignalForced(ForcedDrafter):
    """Adds confidence and entropy by text position."""

    def propose(self, cache, anchor, request):
        made = super().propose(cache, anchor, request)
        if not request.signals:
            return made
        confidence, entropy = (torch.from_numpy(row)[None] for row in signals(cache["length"], WIDTH - 1))
        return dataclasses.replace(made, confidence=confidence, entropy=entropy)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    save_hybrid(folder, "qwen3_5_moe_text", seed=3)
    made = RUNTIME.load_target(folder, device="cpu", dtype="float32")
    made.bind_features([1, 3])
    return made


@pytest.fixture(scope="module")
def plain(target):
    return [e.token for e in decode(target, None, PROMPT, DecodingParams(max_tokens=COUNT))]


def drafter_of(plain, every):
    return SignalForced(PROMPT, plain, WIDTH, lambda position: position % every == 0)


def made_calibration():
    """Prices between 0 and 1 token, so that the router of layer 0 really decides."""
    made = calibration(WIDTH)
    routing = made.routing.model_copy(
        update={"experts_per_token": PICKS, "pairs": [6.0] * (WIDTH + 1), "pairs_given": [[1.0, 5, 8, 12]] * (WIDTH + 1)}
    )
    cost = made.cost.model_copy(update={"expert": 0.003, "stage_zero": 0.003})
    return made.model_copy(update={"routing": routing, "cost": cost})


@pytest.mark.parametrize("name", ["full", "static:2", "static:7", *CALIBRATED])
def test_greedy_text_is_the_plain_one(target, plain, name):
    events = list(
        decode(
            target,
            drafter_of(plain, 4),
            PROMPT,
            DecodingParams(max_tokens=COUNT, break_even=0),
            parse_policy(name, made_calibration()),
        )
    )
    assert [e.token for e in events] == plain
    assert events[-1].stats.accepted_tokens > 10


def test_the_router_decides_and_is_read_once_a_round(target, plain):
    policy = parse_policy("hybridspec", made_calibration())
    asked = []
    correct = policy.correct

    def spy(stage, nominal, limit):
        length = correct(stage, nominal, limit)
        if limit > nominal:
            assert isinstance(stage.router_picks, np.ndarray) and stage.router_picks.shape == (1, limit, PICKS)
            asked.append(length - nominal)
        return length

    policy.correct = spy
    list(decode(target, drafter_of(plain, 4), PROMPT, DecodingParams(max_tokens=COUNT, break_even=0), policy))
    assert asked and set(asked) <= {0, 1}


def test_capture_reads_the_routing_of_every_layer(target, plain, monkeypatch):
    monkeypatch.setattr(capturing, "stop_token_ids", lambda tokenizer, eos: frozenset())
    engine = Engine(target, drafter_of(plain, 5), SimpleNamespace(), "torch", "", "tiny", None)
    seen = []

    def spy(picks):
        seen.append(picks)
        return new_pairs(picks)

    monkeypatch.setattr(capturing, "new_pairs", spy)
    got = capturing.capture(engine, [PROMPT], COUNT, lambda done, of: None)
    assert target.record_routing is False and len(seen) == len(got.rounds) > 5
    assert all(picks.shape == (1, WIDTH, LAYERS, PICKS) for picks in seen)
    assert got.rounds.new_pairs[:, 0].tolist() == [[PICKS] * LAYERS] * len(got.rounds)
    tables = fit_routing(got.rounds)
    assert tables.moe_layers == LAYERS and all(0 <= value <= PICKS * LAYERS for value in tables.pairs)
    lengths, seconds = capturing.time_stage_zero(engine, [PROMPT], 1, 0, lambda done, of: None)
    assert sorted(lengths) == list(range(2, WIDTH + 1)) and min(seconds) > 0
    again = [e.token for e in decode(target, None, PROMPT, DecodingParams(max_tokens=COUNT))]
    assert again == plain, "Stage 0 on its own must leave no trace"
