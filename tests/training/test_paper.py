"""The experiments' runner and reports, on the toy target: two variants trained by child processes, the rest made up."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import training_speed
from benchmarks.paper import cost, d_readout, everything, one, probe, runner
from benchmarks.paper.one import train_settings
from benchmarks.paper.options import Options, add_arguments, options_of
from benchmarks.paper.report import build, draw, gain, summary_of, text_of, together, verdict
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
    bounds = found["intervals"]["groups"]
    assert all(
        low <= value <= high
        for row, ends in zip(found["accuracy"], bounds, strict=True)
        for value, (low, high) in zip(row, ends, strict=True)
    )
    assert len(found["accuracy"]) == 2 and len(found["accuracy"][0]) == 3 and found["rows"]["test"] > 20
    assert all(0 <= value <= 1 for row in found["accuracy"] for value in row)
    with pytest.raises(DSpineError, match="experiment d: not probed yet: dflash, full"):
        d_readout.report({name: {} for name in ("dflash", "full")})
    content = d_readout.report({name: {"probes": found} for name in ("dflash", "full")})
    assert len(content["sentences"]) == 6 and content["holds"] in ("yes", "no", "within noise")


def test_a_cut_child_goes_on_where_it_was(place: Path, monkeypatch) -> None:
    """Out of time in training, then in scoring; what is finished is not made again, and more scores are added later."""
    options = options_for(place / "cut", *flags(place), "--few-scores")
    variant, folder = VARIANTS["full"], place / "cut/full"
    cut = options_for(place / "cut", *flags(place), "--few-scores", "--set", "run.stop_after=2")
    assert one.run_variant(variant, cut, None) == one.UNFINISHED and not (folder / "train.json").is_file()
    one.run_variant(variant, options, None)
    assert one.is_finished("full", options) and not (folder / "checkpoints").exists()
    few = json.loads((folder / "result.json").read_text())
    assert list(few["scores"]) == ["walk", "independent"] and few["config"]["schedule"]["max_steps"] == 4
    whole = options_for(place / "cut", *flags(place))
    assert not one.is_finished("full", whole)
    monkeypatch.setattr("dspine_cuda.training.loop.Trainer", None)  # nothing is trained again
    monkeypatch.setattr(one, "BEGUN", -1e9)
    assert one.run_variant(variant, whole, 1.0) == one.UNFINISHED
    asked = []

    def score_of(drafter: Any, target: Any, score: Any, *rest: Any) -> dict[str, Any]:
        asked.append((score.name, drafter.config.dspine.top_k))
        return {"temperatures": {"0": {}}}

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
    assert gpus[:2] == [0, 1]  # two at a time, each on its own
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
    places, owners = torch.randint(1, 5, (600,), generator=generator), torch.arange(600) // 20
    states = probe.States(torch.stack([noise, head[labels] @ turn]), labels, places, owners)
    part = probe.States(states.hidden[:, :100], labels[:100], places[:100], owners[:100])
    before = probe.accuracy(probe.Probe(2, 16, 4, head.device), part, head, [(1, 4)])
    fitted = probe.accuracy(probe.fit_probe(states, part, head, 0, epochs=150), part, head, [(1, 4)])
    assert fitted[1][0] > 0.9 > before[1][0] + 0.3 and fitted[0][0] < 0.6
    table = probe.interval_table(torch.stack([labels == 0, labels >= 0]), states, [(1, 2), (3, 4)])
    assert table["groups"][1] == [[1.0, 1.0], [1.0, 1.0]] and all(low > 0.5 for low, _ in table["depth"])
    low, high = table["early_over_late"][0]
    assert low < 0 < high and table["early_over_late"][1] == [0.0, 0.0]
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
    result = {"scores": {score: entry for score in scores}, "config": config, "provenance": {"commit": "none"}}
    bounds = {"groups": [[[0.1, 0.3]] * 3] * 2, "early_over_late": [[0.1, 0.2]] * 2, "depth": [[0.1, 0.2]] * 3}
    groups = [[1, 4], [5, 8], [9, 15]]
    return result | {"probes": {"groups": groups, "accuracy": [[0.2] * 3] * 2, "intervals": bounds}}


def swept_to(results: dict[str, Any], level: float, seed: int = 0) -> dict[str, Any]:
    """The same results with another outcome at K = 24 and 32."""
    full, other = json.loads(json.dumps(results["full"])), made_up(level, ["walk"], seed)
    full["scores"] |= {name: other["scores"]["walk"] for name in ("top_24", "top_32")}
    return results | {"full": full}


def test_every_experiment_reports_and_plots(tmp_path: Path, capsys) -> None:
    levels = {"full": 1.0, "no_refinement": 0.7, "no_injection": 0.4, "dflash": 0.3, "backbone_token": 0.1}
    results = {
        name: made_up(levels.get(name, 0.5), [score.name for score in variant.scores]) for name, variant in VARIANTS.items()
    }
    for letter, experiment in everything.EXPERIMENTS.items():
        report = build(experiment, results, ["0"] if letter == "d" else ["0", "1"])
        json.dumps(report)
        assert report["experiment"] == letter and report["temperatures"]["0"]["sentences"]
        assert "the article: " in text_of(report)
        contents = report["temperatures"].values()
        assert all(content["holds"] in ("yes", "no", "within noise", None) and "ours" in content for content in contents)
        assert all("%" in c["ours"] and "[" in c["ours"] for c in contents if c["holds"] is not None)  # with its interval
        assert f"({letter})" in summary_of([report]) and experiment.claim in summary_of([report])
        pytest.importorskip("matplotlib")
        if letter not in "acdefg":
            continue
        draw(experiment, report, tmp_path / f"{letter}.png")
        assert (tmp_path / f"{letter}.png").stat().st_size > 5000
    assert build(everything.EXPERIMENTS["b"], results, ["0"])["temperatures"]["0"]["holds"] == "yes"
    assert "does it hold here: yes" in text_of(build(everything.EXPERIMENTS["b"], results, ["0"]))
    for level, holds in ((1.0, "yes"), (0.5, "yes"), (1.6, "no")):
        report = build(everything.EXPERIMENTS["f"], swept_to(results, level), ["0"])
        assert report["temperatures"]["0"]["holds"] == holds
    noisy = build(everything.EXPERIMENTS["f"], swept_to(results, 1.0, seed=3), ["0"])["temperatures"]["0"]
    assert noisy["holds"] == "within noise"  # an interval around 1 % says nothing
    few = results | {"full": made_up(1.0, ["walk", "independent"])}
    swept = build(everything.EXPERIMENTS["f"], few, ["0"])["temperatures"]["0"]
    assert list(swept["top_k"]) == ["16"] and swept["holds"] is None and "K is not swept" in swept["sentences"][-1]
    cold = {name: json.loads(json.dumps(result)) for name, result in results.items()}
    for name in ("rank_64", "block_4"):
        del cold[name]["scores"]["walk"]["temperatures"]["1"]
        with pytest.raises(DSpineError, match=f"{name}: not scored as walk at temperature 1"):
            build(everything.EXPERIMENTS["f" if name == "rank_64" else "g"], cold, ["0", "1"])
    longer = json.loads(json.dumps(results["no_injection"]))
    longer["config"]["schedule"]["max_steps"] = 5
    with pytest.raises(DSpineError, match="experiment b: steps: full 4, no_injection 5: cannot be compared"):
        build(everything.EXPERIMENTS["b"], results | {"no_injection": longer}, ["0"])
    with pytest.raises(DSpineError, match="experiment b: not trained yet: no_injection"):
        build(everything.EXPERIMENTS["b"], {k: v for k, v in results.items() if k != "no_injection"}, ["0"])
    assert everything.main(["--out", str(tmp_path / "empty"), "--report-only", "--no-plot"]) == 0
    assert "(d) experiment d: not trained yet: dflash, full" in capsys.readouterr().out
    with pytest.raises(DSpineError, match="--only takes letters"):
        everything.main(["--out", str(tmp_path), "--only", "z"])


def finished(name: str, options: Options, scores: list[str]) -> dict[str, Any]:
    """A made-up result with the settings of a call."""
    config = train_settings(VARIANTS[name], options, None).model_dump(mode="json", exclude={"run"})
    return made_up(0.5, scores) | {"config": config, "seed": options.seed}


def test_results_from_elsewhere_are_used_where_their_settings_are_the_calls(place: Path, tmp_path: Path, monkeypatch) -> None:
    """result.json and results.json copied into OUT; others of another length are refused before anything is trained."""
    options = options_for(tmp_path / "out", *flags(place), "--few-scores")
    (tmp_path / "out/full").mkdir(parents=True)
    full, other = finished("full", options, ["walk", "independent"]), finished("no_refinement", options, ["independent"])
    full["config"]["data"]["path"] = "/elsewhere"  # where the data lay moves no figure
    del full["config"]["model"]["hops"]  # written before the setting existed
    (tmp_path / "out/full/result.json").write_text(json.dumps(full))
    (tmp_path / "out/results.json").write_text(json.dumps({"no_refinement": other}))
    assert runner.unfinished(["full", "no_refinement", "no_injection"], options) == ["no_injection"]
    probed = dataclasses.replace(options, probed=("full",))
    assert runner.unfinished(["full"], probed) == []
    monkeypatch.setattr(runner, "_start", None)
    assert set(run_variants(["full", "no_refinement"], options)) == {"full", "no_refinement"}
    heats = options_for(tmp_path / "out", *flags(place), "--few-scores", "--temperature", "0.5")
    assert runner.unfinished(["full"], heats) == ["full"]  # not scored there
    for change, words in (
        (("--set", "schedule.max_steps=6"), "schedule.max_steps: 4 there, 6 now"),
        (("--seed", "3"), "seed: 0 there, 3 now"),
    ):
        with pytest.raises(DSpineError, match=f"out/full: made with other settings .*{words}"):
            run_variants(["no_injection", "full"], options_for(tmp_path / "out", *flags(place), "--few-scores", *change))
    (tmp_path / "out/full/result.json").write_text("{cut")
    with pytest.raises(DSpineError, match="full/result.json: damaged"):
        run_variants(["full"], options)
    full["evaluation"] = options.evaluation | {"count": 3}
    (tmp_path / "out/full/result.json").write_text(json.dumps(full))
    with pytest.raises(DSpineError, match="count: 3 there, 64 now"):
        run_variants(["full"], options)


def test_reports_appear_while_variants_come_in(place: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Experiments are whole in their order; a run that ends early leaves the first ones."""
    arguments = ["--out", str(tmp_path), *flags(place), "--few-scores", "--only", "b,c", "--no-plot", "--jobs", "1"]
    options = options_for(tmp_path, *flags(place), "--few-scores")
    seen = []

    def start(name: str, options: Options, minutes: float, gpu: int) -> subprocess.Popen:
        seen.append((name, (tmp_path / "b.json").is_file()))
        if name == "align_none":
            return subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({one.UNFINISHED})"])
        if name != "texts":
            (tmp_path / name).mkdir()
            scores = [score.name for score in VARIANTS[name].wanted(True)]
            (tmp_path / name / "result.json").write_text(json.dumps(finished(name, options, scores)))
        return subprocess.Popen([sys.executable, "-S", "-c", ""])

    monkeypatch.setattr(runner, "_start", start)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.02)
    assert everything.main([*arguments, "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "align_none           to train: 4 steps" in plan and "(c) whole after" in plan and not seen
    assert everything.main(arguments) == 0
    before = ["texts", "full", "no_refinement", "no_injection"]
    assert [name for name, whole in seen if not whole] == before and len(seen) == 8
    output = capsys.readouterr().out
    assert "(b) ablation, 4 steps" in output and "(c) experiment c: not trained yet: align_none" in output
    assert "(b) ablation" in (tmp_path / "summary.md").read_text() and not (tmp_path / "c.json").is_file()
    assert runner.unfinished(list(VARIANTS)[:3], options) == ["dflash"]
    assert everything.main([*arguments, "--dry-run"]) == 0 and "finished: 4 steps" in capsys.readouterr().out
    environment = runner.environment_of(dataclasses.replace(options, jobs=2, gpus=2), 1)
    assert environment["CUDA_VISIBLE_DEVICES"] == "1" and "TORCHINDUCTOR_COMPILE_THREADS" in environment


def test_gains_are_paired_by_prompt() -> None:
    ours, theirs = (made_up(level, ["walk"])["scores"]["walk"]["temperatures"]["0"] for level in (1.0, 0.5))
    found = gain(ours, theirs)
    assert found["low"] < found["gain"] < found["high"] and verdict(found) == "yes" and verdict(gain(theirs, ours)) == "no"
    assert [together(v) for v in (["yes"] * 2, ["yes", "no"], ["yes", "within noise"])] == ["yes", "no", "within noise"]
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


def test_costs_are_of_the_variants_own_drafters(place: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Each label is timed with its own settings, in turns, and set against `full` of the same turn."""
    seen: list[tuple[int, int, int, int]] = []

    def milliseconds(drafter, batch, rounds):
        assert rounds == 50
        config = drafter.config
        seen.append((config.block_size, config.dspine.transfer_rank, config.dspine.top_k, batch))
        return float(config.dspine.top_k * batch)

    monkeypatch.setattr(cost, "draft_milliseconds", milliseconds)
    names = ["full", "block_4", "two_hop"]
    monkeypatch.setattr(cost, "TOP_K", (2,))
    assert cost.main(["--out", str(tmp_path), *flags(place), "--turns", "2", "--variants", *names]) == 0
    assert len(seen) == 3 * 4 * 2 and {row[0] for row in seen} == {8, 4} and {row[2] for row in seen} == {4, 2}
    rows = json.loads((tmp_path / "cost.json").read_text())["draft_ms"]
    assert list(rows) == [*names, "top_2"] and rows["top_2"]["32"] == {
        "median": 64,
        "least": 64,
        "greatest": 64,
        "over_full": 0.5,
    }
    assert "top_2" in capsys.readouterr().out


def test_training_speed_runs(tmp_path: Path, capsys) -> None:
    arguments = ["--shape", "tiny", "--layers", "2", "--device", "cpu", "--steps", "1", "--warmup", "1", "--with-target"]
    assert training_speed.main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result == json.loads(capsys.readouterr().out) and result["drafter_flops_per_step"] > 0
