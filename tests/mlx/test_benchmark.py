"""`benchmarks.mlx_cuda` on a toy pair: what it calls right and wrong; every part gives whole rows. No times are judged."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import mlx_cuda
from benchmarks.mlx_cuda import ROWS, Pair
from dspine_mlx.drafter import load_drafter
from tests.mlx.hybrids import hybrid_target
from tests.mlx.toys import drafter_folder, toy_target


@pytest.fixture(params=["dense", "experts"])
def pair(request, tmp_path, monkeypatch):
    target = toy_target("qwen3") if request.param == "dense" else hybrid_target("qwen3_5_moe")
    drafter = load_drafter(drafter_folder(tmp_path / "d", "dspine", 5, target.head_weight()), target)
    made = Pair("toy", "float32", target.model, target, drafter, None)
    monkeypatch.setattr(mlx_cuda, "prompt_ids", lambda pair, text: [3 + len(text) % 7, 5, 7, 11])
    monkeypatch.setattr(mlx_cuda, "load_pair", lambda name, form: made)
    monkeypatch.setattr(mlx_cuda, "REPEATS", 1)
    monkeypatch.setattr(mlx_cuda, "CHAIN", 2)
    return made


def run(monkeypatch, tmp_path, *arguments):
    report = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["mlx_cuda", "--models", "toy", "--forms", "float32", "--json", str(report), *arguments])
    code = mlx_cuda.main()
    return code, json.loads(report.read_text())


def test_every_part(pair, monkeypatch, tmp_path):
    code, report = run(monkeypatch, tmp_path, "--max-tokens", "6", "--repeats", "1", "--context", "20", "--shapes", "64x64")
    assert code == 0 and report["device"] == "cpu" and report["provenance"]["versions"]["mlx"]
    texts = report["texts"]
    assert len(texts) == 2 * len(mlx_cuda.PROMPTS) and all(row["equal"] == 6 and row["right"] for row in texts)
    assert {row["way"]: row["ratio"] > 0 for row in report["speed"]} == {"mlx_lm": True, "plain": True, "drafts": True}
    blocks = {(row["what"], row["grows"]) for row in report["blocks"]}
    assert blocks == {(what, g) for what in (*(f"verify {w} rows" for w in ROWS), "draft") for g in (True, False)}
    shapes = [row["what"] for row in report["products"]]
    assert "64 to 64" in shapes and any("switch_mlp" in what for what in shapes) == bool(getattr(pair.target, "moe_ids", ()))
    assert all(set(row["us"]) == {str(w) for w in ROWS} for row in report["products"])


def test_a_wrong_text_is_told_from_a_near_tie(pair, monkeypatch, tmp_path):
    real = mlx_cuda.ours

    def wrong(pair, ids, count, drafts):
        for i, (token, stats) in enumerate(real(pair, ids, count, drafts)):
            yield (token + 1 if i == 3 and drafts else token), stats

    monkeypatch.setattr(mlx_cuda, "ours", wrong)
    monkeypatch.setattr(mlx_cuda, "NEAR_TIE", 0.0)
    code, report = run(monkeypatch, tmp_path, "--parts", "texts", "--max-tokens", "6")
    assert code == 1 and {row["equal"] for row in report["texts"] if row["drafts"]} == {3}
    assert all(row["right"] is not row["drafts"] for row in report["texts"])
    monkeypatch.setattr(mlx_cuda, "NEAR_TIE", 1e9)
    assert run(monkeypatch, tmp_path, "--parts", "texts", "--max-tokens", "6")[0] == 0
