"""The experiments' runner and reports, on the toy target: two variants trained by child processes, the rest made up."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import training_speed
from benchmarks.paper import d_readout, everything, one, probe, runner
from benchmarks.paper.one import train_settings
from benchmarks.paper.options import Options, add_arguments, options_of
from benchmarks.paper.report import build, draw, gain, text_of, verdict
from benchmarks.paper.runner import run_variants
from benchmarks.paper.variants import VARIANTS
from dspine.common.errors import DSpineError
from dspine_cuda.training.eval_sets import summary
from dspine_cuda.training.recipe import Recipe, RecipeSettings
from dspine_cuda.training.simulate import Rounds
from tests.training.test_recipe import prompt_file
from tests.training.toys import VOCAB, write_target, write_tokenizer

OVERRIDES = [
    f"model.mask_token_id={VOCAB - 1}", "model.num_layers=2", "model.taps=[1,3]", "model.transfer_rank=12",
    "model.message_size=8", "model.top_k=4", "data.sequence_length=48", "data.rows_per_step=4", "data.num_anchors=8",
    "data.holdout=8", "loss.chunk_rows=64", "schedule.max_steps=4", "run.eval_every=0", "run.eval_stride=4",
    "run.checkpoint_every=2",
]  # fmt: skip


def options_for(out: Path, *extra: str) -> Options:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return options_of(parser.parse_args(["--out", str(out), *extra]))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("paper")
    write_tokenizer(write_target(place / "target"))
    settings = RecipeSettings(
        model=str(place / "target"), prompts=(str(prompt_file(place / "train.jsonl", 40)),), max_prompt_tokens=24, max_tokens=24
    )
    Recipe(settings, place / "data", device="cpu", dtype="float32", batch=40, progress=False).run()
    prompt_file(place / "a.jsonl", 4, seed=9)
    return place


def flags(place: Path) -> list[str]:
    arguments = ["--data", str(place / "data"), "--prompts", str(place / "a.jsonl"), "--device", "cpu", "--dtype", "float32"]
    arguments += ["--max-tokens", "12", "--temperature", "0"]
    for text in [f"model.target={place / 'target'}", *OVERRIDES]:
        arguments += ["--set", text]
    return arguments


def test_variants_are_trained_scored_and_probed(place: Path, monkeypatch) -> None:
    """The child's work in this process, with exactly the arguments that the runner gives it."""
    options = options_for(place / "out", *flags(place))
    (place / "out").mkdir()

    class Here:
        def __init__(self, *arguments: Any) -> None:
            self.code = one.main(runner.command_of(*arguments[:3])[3:])

        def poll(self) -> int:
            return self.code

    monkeypatch.setattr(runner, "_start", Here)
    results = run_variants(["dflash"], options)
    assert set(results) == {"dflash"} and results["dflash"]["train"]["steps"] == 4
    block = results["dflash"]["scores"]["walk"]["temperatures"]["0"]
    assert block["sets"]["a"]["prompts"] == 4 and block["mean"]["tau"] >= 1
    assert results["dflash"]["scores"]["walk"]["draft_ms"] > 0
    assert not (place / "out/dflash/checkpoints").exists() and (place / "out/texts/texts_0.npz").is_file()
    monkeypatch.setattr(runner, "_start", None)
    assert run_variants(["dflash"], options) == results  # nothing runs again
    found = probe.probe_variant("dflash", options, epochs=1)
    assert len(found["accuracy"]) == 2 and len(found["accuracy"][0]) == 3 and found["rows"]["test"] > 20
    assert all(0 <= value <= 1 for row in found["accuracy"] for value in row)
    content = d_readout.report({"dflash": found})
    assert len(content["sentences"]) == 3


def test_a_cut_child_goes_on_where_it_was(place: Path, monkeypatch) -> None:
    """Out of time in training, then in scoring; what is finished is not made again, and more scores are added later."""
    options = options_for(place / "cut", *flags(place), "--few-scores")
    variant, folder = VARIANTS["full"], place / "cut/full"
    cut = options_for(place / "cut", *flags(place), "--few-scores", "--set", "run.stop_after=2")
    assert one.run_variant(variant, cut, None) == one.UNFINISHED and not (folder / "train.json").is_file()
    one.run_variant(variant, options, None)
    assert one.is_finished("full", options) and not (folder / "checkpoints").exists()
    few = one.read_result(folder)
    assert few is not None and list(few["scores"]) == ["walk", "independent"] and few["config"]["schedule"]["max_steps"] == 4
    whole = options_for(place / "cut", *flags(place))
    assert not one.is_finished("full", whole)
    monkeypatch.setattr("dspine_cuda.training.loop.Trainer", None)  # nothing is trained again
    monkeypatch.setattr(one, "BEGUN", -1e9)
    assert one.run_variant(variant, whole, 1.0) == one.UNFINISHED
    asked = []

    def score_of(drafter: Any, target: Any, score: Any, *rest: Any) -> None:
        asked.append((score.name, drafter.config.dspine.top_k))

    monkeypatch.setattr(one, "_score", score_of)
    assert one.run_variant(variant, whole, None) == 0 and one.is_finished("full", whole)
    assert len(asked) == len(variant.scores) - 2 and dict(asked)["top_24"] == 24 and dict(asked)["heat_0.8"] == 4
    with pytest.raises(DSpineError, match="full: not scored as heat_0.6 at temperature 1"):
        build(everything.EXPERIMENTS["h"], {"full": made_up(1.0, ["walk"])}, ["0", "1"])


def test_children_that_fail_or_run_out_of_time(place: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    started, gpus = [], []

    def start(name: str, options: Options, minutes: float, gpu: int) -> subprocess.Popen:
        started.append(name)
        gpus.append(gpu)
        code = {"texts": 0, "dflash": one.UNFINISHED, "full": 2}.get(name, 0)
        return subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({code})"])

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.05)
    options = options_for(tmp_path / "out", *flags(place), "--jobs", "2", "--gpus", "2")
    with pytest.raises(DSpineError, match="failed: full; see .*full.log"):
        run_variants(["dflash", "full", "align_none"], options)
    assert started == ["texts", "dflash", "full", "align_none"]
    assert gpus[0] == 0 and sorted(gpus[1:3]) == [0, 1]  # two at a time, each on its own
    err = capsys.readouterr().err
    assert "dflash: out of time, to be continued" in err and "full: failed with code 2" in err and "align_none: done" in err
    late = options_for(tmp_path / "late", *flags(place), "--minutes", "0.1")
    assert run_variants(["dflash"], late) == {} and "out of time: texts, dflash not begun" in capsys.readouterr().err
    with pytest.raises(DSpineError, match="--data and --prompts are needed to train dflash"):
        run_variants(["dflash"], options_for(tmp_path / "late"))
    assert run_variants(["dflash"], options_for(tmp_path / "late", "--report-only")) == {}
    assert (
        one.main(["--out", str(tmp_path), "--variant", "dflash", "--data", "/nowhere", "--set", "model.target=/nowhere"]) == 2
    )


def test_a_probe_finds_what_is_there() -> None:
    """Layer 0 is noise, layer 1 holds the answer: only a fitted probe tells, and only there."""
    generator = torch.Generator().manual_seed(0)
    head, turn = torch.randn(20, 16, generator=generator), torch.randn(16, 16, generator=generator) / 4
    labels = torch.randint(20, (600,), generator=generator)
    noise = torch.randn(600, 16, generator=generator)
    states = probe.States(torch.stack([noise, head[labels] @ turn]), labels, torch.randint(1, 5, (600,), generator=generator))
    part = probe.States(states.hidden[:, :100], labels[:100], states.position[:100])
    before = probe.accuracy(probe.Probe(2, 16, 4, head.device), part, head, [(1, 4)])
    fitted = probe.accuracy(probe.fit_probe(states, part, head, 0, epochs=150), part, head, [(1, 4)])
    assert fitted[1][0] > 0.9 > before[1][0] + 0.3 and fitted[0][0] < 0.6
    assert probe.position_groups(15) == [(1, 4), (5, 8), (9, 15)] and probe.position_groups(7) == [(1, 2), (3, 4), (5, 7)]


def made_up(level: float, scores: list[str], seed: int = 0) -> dict[str, Any]:
    """A result whose tau is about 2 + level, with the same prompts for every variant."""
    rng = np.random.default_rng(seed)
    blocks = {}
    for heat in ("0", "1"):
        rows = []
        for name in ("a", "b"):
            for prompt in range(12):
                accepted = np.minimum(rng.poisson(1 + level, 40), 7)
                rows.append((name, prompt, Rounds(accepted, int(accepted.sum() + len(accepted))), False))
        blocks[heat] = summary(rows, 7)
    entry = {"temperatures": blocks, "draft_ms": 1.0, "draft_ms_batch_32": 2.0}
    config = {"schedule": {"max_steps": 4}, "model": {"target": "toy"}}
    return {"scores": {score: entry for score in scores}, "config": config, "provenance": {"commit": "none"}}


def test_every_experiment_reports_and_plots(tmp_path: Path, capsys) -> None:
    levels = {"full": 1.0, "no_refinement": 0.7, "no_injection": 0.4, "dflash": 0.3, "backbone_token": 0.1}
    results = {
        name: made_up(levels.get(name, 0.5), [score.name for score in variant.scores]) for name, variant in VARIANTS.items()
    }
    for letter, experiment in everything.EXPERIMENTS.items():
        report = build(experiment, results, ["0", "1"])
        json.dumps(report)
        assert report["experiment"] == letter and report["temperatures"]["0"]["sentences"]
        assert "the article: " in text_of(report)
        pytest.importorskip("matplotlib")
        if letter not in "acf":
            continue
        draw(experiment, report, tmp_path / f"{letter}.png")
        assert (tmp_path / f"{letter}.png").stat().st_size > 5000
    assert build(everything.EXPERIMENTS["b"], results, ["0"])["temperatures"]["0"]["holds"] is True
    with pytest.raises(DSpineError, match="experiment b: not trained yet: no_injection"):
        build(everything.EXPERIMENTS["b"], {k: v for k, v in results.items() if k != "no_injection"}, ["0"])
    assert everything.main(["--out", str(tmp_path / "empty"), "--report-only", "--no-plot"]) == 0
    assert "(d) not trained yet" in capsys.readouterr().out
    with pytest.raises(DSpineError, match="--only takes letters"):
        everything.main(["--out", str(tmp_path), "--only", "z"])


def test_gains_are_paired_by_prompt() -> None:
    ours, theirs = (made_up(level, ["walk"])["scores"]["walk"]["temperatures"]["0"] for level in (1.0, 0.5))
    found = gain(ours, theirs)
    assert found["low"] < found["gain"] < found["high"] and verdict(found) == "yes" and verdict(gain(theirs, ours)) == "no"
    assert verdict(gain(ours, ours)) == "within noise" and gain(ours, ours)["gain"] == 0.0
    short = json.loads(json.dumps(theirs))
    for entry in short["sets"].values():
        entry["prompt_ids"], entry["counts"] = entry["prompt_ids"][3:], entry["counts"][3:]
    assert gain(ours, short)["gain"] != found["gain"]


def test_every_variant_has_a_valid_config(tmp_path: Path) -> None:
    options = options_for(tmp_path, "--data", str(tmp_path))
    for variant in VARIANTS.values():
        settings = train_settings(variant, options, 3.0)
        assert settings.run.output_dir.endswith(variant.name) and settings.run.time_limit_minutes == 3.0
    blocks = {settings.model.block_size: settings.data.num_anchors * settings.model.block_size
              for settings in (train_settings(VARIANTS[f"block_{b}"], options, None) for b in (4, 16, 32))}  # fmt: skip
    assert blocks == {4: 1024, 16: 1024, 32: 1024}


def test_training_speed_runs(tmp_path: Path, capsys) -> None:
    arguments = ["--shape", "tiny", "--layers", "2", "--device", "cpu", "--steps", "1", "--warmup", "1", "--with-target"]
    assert training_speed.main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result == json.loads(capsys.readouterr().out) and result["drafter_flops_per_step"] > 0
