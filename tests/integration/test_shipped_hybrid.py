"""The shipped hybrid pair as a user starts it: HybridSpec by default on both backends, with the shipped calibrations."""

from __future__ import annotations

import json
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("mlx.core", reason="mlx is not installed")

from dspine.common.cli.main import main
from dspine.common.errors import DSpineError
from dspine.common.models import SHIPPED_PAIRS, checkpoints_folder, resolve_model
from dspine.common.selection.calibration import load_calibration

COUNT = 24


@pytest.fixture(scope="module")
def pair():
    try:
        resolve_model("hybrid-tiny")
    except DSpineError as error:
        pytest.skip(str(error))
    return next(pair for pair in SHIPPED_PAIRS if pair.model == "hybrid-tiny")


def test_hybridspec_is_the_default_on_both_backends(pair, capsys, monkeypatch):
    """`generate --compare`, nothing else asked for: the policy, its calibration, plain decoding's text."""
    texts = {}
    for backend in ("torch", "mlx"):
        options = ("--model", pair.model, "--backend", backend, "--device", "cpu", "--compare", "--ignore-eos", "--json")
        prompt = ("--prompt", "Name three fruits.", "--max-tokens", str(COUNT))
        monkeypatch.setattr(sys, "argv", ["dspine", "generate", *options, *prompt])
        with pytest.raises(SystemExit) as leaving:
            main()
        shown = capsys.readouterr()
        assert not leaving.value.code, shown.err
        got = json.loads(shown.out.splitlines()[-1])
        assert got["policy"] == "hybridspec" and f"calibration.{backend}-cpu.json fits" in got["policy_reason"]
        assert got["same_tokens_as_plain"] is True and got["rounds"] < COUNT and got["drafted_tokens"] > 0
        texts[backend] = got["token_ids"]
    assert texts["torch"] == texts["mlx"] and len(texts["mlx"]) == COUNT


@pytest.mark.parametrize("runtime", ["torch", "mlx"])
def test_shipped_calibrations_meet_the_goals_that_are_no_timings(pair, runtime):
    """Whole tables, ECE on test prompts below 0.03, the nominal rule within 3 % of the best one in hindsight."""
    made = load_calibration(checkpoints_folder() / pair.draft / f"calibration.{runtime}-cpu.json")
    assert made.identity.runtime == runtime and made.routing is not None and len(made.cost.measured) == 15
    assert made.routing.experts_per_token == 4 and made.routing.moe_layers == 8
    test = made.figures["test"]
    assert test["rounds"] > 200 and test["ece_prefix"] < 0.03 and test["throughput"]["oracle_regret"] < 0.03
