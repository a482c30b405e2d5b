"""`benchmarks.mlx_cuda` on a toy pair: what it calls right and wrong; every part gives whole rows, as they are measured; it
stops between figures. No times are judged."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import mlx_cuda, mlx_operations
from benchmarks.mlx_cuda import Journal, Pair
from benchmarks.mlx_operations import ROWS
from dspine.common.registry import registered_kernel
from dspine_mlx import ops
from dspine_mlx.arrays import device_name
from dspine_mlx.drafter import load_drafter
from tests.mlx.hybrids import hybrid_target
from tests.mlx.toys import drafter_folder, toy_target

PARTS = "texts:float32,speed:float32,blocks:float32,operations:float32,growing:float32,compiled:float32,products"


@pytest.fixture(params=["dense", "experts"])
def pair(request, tmp_path, monkeypatch):
    target = toy_target("qwen3") if request.param == "dense" else hybrid_target("qwen3_5_moe")
    drafter = load_drafter(drafter_folder(tmp_path / "d", "dspine", 5, target.head_weight()), target)
    made = Pair("toy", "float32", target.model, target, drafter, None)
    monkeypatch.setattr(mlx_cuda, "prompt_ids", lambda pair, text: [3 + len(text) % 7, 5, 7, 11])
    monkeypatch.setattr(mlx_cuda, "load_pair", lambda name, form: made)
    for name, value in (("REPEATS", 1), ("CHAIN", 2), ("PATIENCE", 0.0)):
        monkeypatch.setattr(mlx_operations, name, value)
    monkeypatch.setattr(mlx_cuda, "PATIENCE", 0.0)
    return made


@pytest.fixture
def run(monkeypatch, tmp_path):
    def run(*arguments):
        report = tmp_path / "report.json"
        words = ["mlx_cuda", "--models", "toy", "--json", str(report), "--max-tokens", "6", "--context", "20", *arguments]
        monkeypatch.setattr(sys, "argv", words)
        code = mlx_cuda.main()
        return code, json.loads(report.read_text())

    return run


def test_every_part(pair, run):
    code, report = run("--parts", PARTS, "--repeats", "2", "--shapes", "64x64")
    assert code == 0 and report["device"] == device_name() and report["provenance"]["versions"]["mlx"]
    assert "failed" not in report and [name[:16] for name in report["left_out"]] == ["compiled:float32"]  # CUDA's alone
    texts = report["texts"]
    assert len(texts) == 4 and all(row["equal"] == 6 and row["right"] for row in texts)
    assert [row["way"] for row in report["speed"]] == ["mlx_lm", "plain", "drafts"], "a turn takes the row of the one before"
    assert all(row["ratio"] > 0 and row["equal"] == 6 and len(row["all"]) == 4 for row in report["speed"])
    for part, grows in (("blocks", False), ("growing", True)):
        assert {row["what"] for row in report[part]} == {*(f"verify {w} rows" for w in ROWS), "draft"}
        assert all(row["ms"] > 0 and row["grows"] is grows for row in report[part])
    names = [row["what"] for row in report["operations"]]
    hybrid = bool(getattr(pair.target, "moe_ids", ()))
    assert {"64 to 64"} < {*names} and any("attention" in name for name in names) and any("RMSNorm" in name for name in names)
    assert {"gdn_inputs", "gdn_verify", "gdn_commit, all layers"} <= {*names} or not hybrid
    assert any("SwitchLinear" in name for name in names) == hybrid
    for row in report["operations"]:
        assert {*row["us"]} == {*row["ms_a_block"]} == {str(w) for w in ROWS} and row["count"] > 0
    assert [row["rows"] for row in report["summary"]] == [*ROWS]
    assert all(len(row["slowest"]) == 4 and "gdn_commit" not in str(row["slowest"]) for row in report["summary"])


def test_operations_are_counted_as_the_model_runs_them(pair):
    """Products by hand: four layers of attention and MLP, or two of each mixer and experts in all."""
    cache = pair.target.make_cache(32)
    pair.target.prefill(cache, mlx_cuda.mx.array([[3, 5, 7]]), chunk=8)
    counts = {one.name: one.count for one in mlx_operations.operations(pair.model, pair.target, cache)}
    if "gdn_verify" in counts:
        assert counts["gdn_verify"] == counts["attention, 3 keys"] == 2
        assert counts["SwitchLinear up_proj 64 to 32"] + counts.get("SwitchLinear gate_proj 64 to 32", 0) == 8
    else:
        products = {name: count for name, count in counts.items() if name.startswith("Linear")}
        assert sum(products.values()) == 4 * 7 and counts["attention, 3 keys"] == 4
        assert counts["head 32 to 96"] == 1 and counts["RMSNorm 32"] == 9


def test_a_wrong_text_is_told_from_a_near_tie(pair, run, monkeypatch):
    real = mlx_cuda.ours

    def wrong(pair, ids, count, drafts):
        for i, (token, stats) in enumerate(real(pair, ids, count, drafts)):
            yield (token + 1 if i == 3 and drafts else token), stats

    monkeypatch.setattr(mlx_cuda, "ours", wrong)
    monkeypatch.setattr(mlx_cuda, "NEAR_TIE", 0.0)
    code, report = run("--parts", "texts:float32")
    assert code == 1 and {row["equal"] for row in report["texts"] if row["drafts"]} == {3}
    assert all(row["right"] is not row["drafts"] for row in report["texts"])
    monkeypatch.setattr(mlx_cuda, "NEAR_TIE", 1e9)
    assert run("--parts", "texts:float32")[0] == 0


def test_it_stops_between_figures_and_writes_each(pair, run, monkeypatch, tmp_path):
    """The clock jumps behind the first text: what was measured is in the file, the rest is named."""
    real = mlx_cuda.compare_texts

    def slow(pair, number, count, journal):
        real(pair, number, count, journal)
        assert len(json.loads(journal.path.read_text())["texts"]) == 2
        journal.started -= 1e6

    monkeypatch.setattr(mlx_cuda, "compare_texts", slow)
    code, report = run("--parts", "texts:float32,speed:float32", "--seconds", "1e5")
    assert code == 0 and len(report["texts"]) == 2 and "speed" not in report
    assert report["left_out"] == ["texts:float32 toy, prompt 1", "speed:float32 toy"]


def test_what_mlx_refuses_does_not_end_the_run(tmp_path, capsys):
    journal = Journal(tmp_path / "report.json", 60.0)

    def refused():
        raise RuntimeError("no kernel\n for this")

    journal.run("one", refused)
    journal.run("two", lambda: journal.add("texts", {"right": True}, "fine"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failed"] == [{"figure": "one", "error": "no kernel for this"}] and report["texts"]
    assert "no kernel for this" in capsys.readouterr().out


def test_our_parts_are_uncompiled_on_cuda_only(pair, monkeypatch):
    kernel = lambda: registered_kernel("gdn_verify", "mlx", "cuda").name  # noqa: E731
    try:
        mlx_cuda.use_compiled(pair, False)
        assert kernel() == "mlx-compiled", "elsewhere nothing changes"
        monkeypatch.setattr(mlx_cuda, "device_name", lambda: "cuda")
        for on, name in ((True, "mlx-compiled"), (False, "mlx-lean")):
            mlx_cuda.use_compiled(pair, on)
            assert pair.drafter.parts.active is on and kernel() == name
    finally:
        ops.register()


@pytest.mark.parametrize("parts", ["texts", "texts:16", "poems:8", "products:8"])
def test_unknown_parts_are_refused(parts, run, capsys):
    with pytest.raises(SystemExit):
        run("--parts", parts)
    assert "is no part:form of texts, speed" in capsys.readouterr().err
