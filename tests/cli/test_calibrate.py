"""`dspine calibrate`, and what `generate --policy` and `info` make of its file, on a routed toy pair."""

from __future__ import annotations

import json

import pytest

from dspine.common import runtimes
from dspine.common.models import ShippedPair
from dspine.common.selection.calibration import load_calibration
from dspine.common.tokenizer import encode_prompt, load_tokenizer
from tests.cli.conftest import CONTEXT, PROMPT, Point, ToyRuntime, logits_of
from tests.helpers.calibrations import RoutedTarget, signal_oracle

pytest.importorskip("sklearn", reason="the calibrate extra is not installed")


class RoutedRuntime(ToyRuntime):
    """The toy runtime with a router in its target and signals in its drafter."""

    def load_target(self, folder, *, device, dtype):
        vocab = len(load_tokenizer(folder).backend)
        return RoutedTarget(logits_of(vocab), vocab, context=512)

    def load_drafter(self, folder, target):
        ids = encode_prompt(load_tokenizer(folder.parent / "model"), PROMPT, limit=CONTEXT)
        return signal_oracle(target.logits_of, ids, 6, wrong_every=5)


@pytest.fixture
def pair(toy, monkeypatch):
    """Folder of a routed pair and two prompt files; returns the options that name them."""
    monkeypatch.setattr(runtimes, "_registered", lambda: {"toy": Point("toy", RoutedRuntime())})
    (toy / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (PROMPT, "cd ab", "hello")))
    (toy / "test.txt").write_text("other\nwords\n")
    return toy


def calibrate(dspine, folder, *more):
    named = ("--model", folder / "model", "--draft-model", folder / "draft", "--prompts", folder / "prompts.jsonl")
    return dspine("calibrate", *named, "--max-tokens", "48", "--repetitions", "2", *more)


def generate(dspine, folder, *more):
    named = ("--model", folder / "model", "--draft-model", folder / "draft", "--prompt", PROMPT, "--raw", "--max-tokens", "24")
    return dspine("generate", *named, *more)


def test_calibrate_then_generate(pair, dspine, tmp_path):
    pytest.importorskip("matplotlib", reason="the calibrate extra is not installed")
    report = tmp_path / "report"
    run = calibrate(dspine, pair, "--test-prompts", pair / "test.txt", "--report", report, "--json")
    assert run.code == 0, run.err
    path = pair / "draft" / "calibration.toy-cpu.json"
    line = json.loads(run.out)
    assert line["path"] == str(path) and line["rate"] > 0 and "ece_prefix" in line["figures"]["test"]
    made = load_calibration(path)
    assert made.identity.runtime == "toy" and made.routing is not None and made.provenance["prompt_count"] == 3
    page = (report / "index.html").read_text()
    for name in ("reliability", "cost", "lengths", "choices", "experts", "usage"):
        assert (report / f"{name}.png").read_bytes()[:4] == b"\x89PNG" and f"{name}.png" in page
    plain = json.loads(generate(dspine, pair, "--json", "--no-draft").out)
    for policy in ("auto", "full", "static:3", "dcut", "evict", "dspark", "nominal", "hybridspec"):
        got = json.loads(generate(dspine, pair, "--json", "--policy", policy).out)
        assert got["token_ids"] == plain["token_ids"] and got["drafted_tokens"] > 0
        assert got["policy"] == ("hybridspec" if policy == "auto" else policy)
        assert got["mean_verified_length"] >= 1 and got["policy_reason"]
    assert plain["policy"] is None
    shown = generate(dspine, pair, "--compare")
    assert "hybridspec" in shown.err and "auto: calibration.toy-cpu.json fits" in " ".join(shown.err.split())


def test_policy_without_and_with_a_wrong_file(pair, dspine, tmp_path):
    auto = json.loads(generate(dspine, pair, "--json").out)
    assert auto["policy"] == "full" and "no calibration.toy-cpu.json" in auto["policy_reason"]
    named = generate(dspine, pair, "--policy", "hybridspec")
    assert named.code == 2 and "dspine calibrate" in named.err and named.err.count("\n") == 1
    out = tmp_path / "deep" / "c.json"
    assert calibrate(dspine, pair, "--out", out).code == 0 and out.is_file()
    given = json.loads(generate(dspine, pair, "--json", "--calibration", out, "--policy", "evict").out)
    assert given["policy"] == "evict"
    out.write_text(out.read_text().replace('"runtime": "toy"', '"runtime": "mlx"'))
    wrong = generate(dspine, pair, "--calibration", out)
    assert wrong.code == 2 and "calibrated for 'mlx', here 'toy'" in wrong.err
    assert generate(dspine, pair, "--no-draft", "--calibration", out).code == 2
    assert generate(dspine, pair, "--policy", "hybridspec", "--acceptance", "rejection", "--temp", "1").code == 2


def test_info_shows_files_and_whether_they_fit(pair, dspine, monkeypatch):
    from dspine.common.cli import calibrations

    monkeypatch.setattr(calibrations, "checkpoints_folder", lambda: pair)
    monkeypatch.setattr(calibrations, "SHIPPED_PAIRS", (ShippedPair("model", "draft"),))
    shown = " ".join(dspine("info").out.split())
    assert "Calibrations none" in shown and "toy-cpu" in shown
    assert calibrate(dspine, pair).code == 0
    (pair / "draft" / "calibration.mlx-cpu.json").write_text("{")
    rows = dict(calibrations.calibration_rows())
    assert "matches: `auto` takes hybridspec on toy, cpu" in rows["model: calibration.toy-cpu.json"]
    assert "damaged" in rows["model: calibration.mlx-cpu.json"]
    path = pair / "draft" / "calibration.toy-cpu.json"
    path.write_text(path.read_text().replace('"device": "cpu"', '"device": "cuda-nvidia-h200"'))
    assert "for toy on cuda-nvidia-h200; here: toy on cpu" in calibrations.verdict(path, [("toy", "cpu")])
    (pair / "draft" / "config.json").write_text('{"changed": 1}')
    assert "does not match: made for drafter weights" in calibrations.verdict(path, [("toy", "cpu")])


def test_repeats_and_overlaps_are_refused_by_line(pair, dspine):
    (pair / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": " A "}\n')
    run = calibrate(dspine, pair)
    assert run.code == 2 and "lines 1 = 3" in run.err and run.err.count("\n") == 1
    (pair / "prompts.jsonl").write_text('{"prompt": "words"}\n')
    run = calibrate(dspine, pair, "--test-prompts", pair / "test.txt")
    assert run.code == 2 and "disjoint" in run.err and "1 = 2" in run.err


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--max-prompts", "0"), "--max-prompts"),
        (("--max-tokens", "0"), "max tokens"),
        (("--split", "calibration"), "leaves no prompt"),
        (("--draft-model", "auto"), "needs a drafter"),
    ],
)
def test_bad_options(pair, dspine, flags, words):
    run = calibrate(dspine, pair, *flags)
    assert run.code == 2 and words in run.err and run.err.count("\n") == 1


def test_absent_packages_are_named_before_anything_runs(pair, dspine, monkeypatch):
    import sys

    for package, extra in (("sklearn", ()), ("matplotlib", ("--report", pair / "r"))):
        with monkeypatch.context() as patch:
            for name in [n for n in sys.modules if n == package or n.startswith(package + ".")]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, package, None)
            run = calibrate(dspine, pair, *extra)
        assert run.code == 2 and "dspine[calibrate]" in run.err, package


def test_benchmark_table_on_the_toys(pair, tmp_path):
    """Every contender runs; calibration and test prompts are disjoint whatever the file says; greedy text is the plain one."""
    from benchmarks.hybridspec import markdown, parse, run, split_prompts
    from dspine.common.selection.prompts import PromptRow

    rows = [{"prompt": f"{word} {i}", "category": word} for word in ("ab", "cd") for i in range(4)]
    (pair / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = ["--model", str(pair / "model"), "--draft-model", str(pair / "draft"), "--prompts", str(pair / "rows.jsonl")]
    few = ["--per-category", "1", "--calibration-per-category", "2", "--max-tokens", "24", "--repetitions", "2"]
    first, result = (json.loads(json.dumps(part)) for part in run(parse([*named, *few, "--temperatures", "0"])))
    assert {row["repetition"] for row in first["rows"]["0"]} == {0} and {row["repetition"] for row in result["rows"]["0"]} == {
        0,
        1,
    }
    table = {row["policy"]: row for row in result["tables"]["0"]}
    assert set(table) == {"autoregressive", "full", "static:2", "static:4", "dcut", "evict", "dspark", "nominal", "hybridspec"}
    assert all(row["same_text"] == 1 for row in table.values()) and sum(row["best_static"] for row in table.values()) == 1
    assert table["autoregressive"]["acceptance_length"] == 1 and table["full"]["verified_length"] > 4
    assert "| hybridspec" in markdown(result) and result["commit"] and result["setup"]["prompts"] == 2
    mixed = [PromptRow(i, str(i), "a", ("calibration", "test", "")[i % 3]) for i in range(9)]
    sides = split_prompts(mixed, 9, 9, 0)
    assert len(sides[0]) + len(sides[1]) == 9 and not {r.line for r in sides[0]} & {r.line for r in sides[1]}
