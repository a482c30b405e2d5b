"""Pretraining: resumption, rounding equal to what is stored, losses against plain formulas, what is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dspine.common.errors import DSpineError
from dspine.common.quantization import GroupForm, dequantize_affine, quantize_affine
from dspine.common.stored import expand_stored, read_stored, write_stored
from dspine_cuda.training import hybrid_pretrain
from dspine_cuda.training.data import PackedRows
from dspine_cuda.training.hybrid_config import load_pretrain_config
from dspine_cuda.training.hybrid_model import Routing, load_model
from dspine_cuda.training.hybrid_pretrain import Pretrainer, balance_terms, losses, next_token_labels
from dspine_cuda.training.hybrid_quant import as_stored, group_of, rounded, storage_forms
from dspine_cuda.training.hybrid_shape import PREFIX, write_cards
from tests.training.hybrid_toys import pretrain_settings, restarting, toy_hybrid, toy_tokens
from tests.training.toys import write_shards


def metrics(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


def test_resumed_run_has_the_same_losses_and_learns(tmp_path) -> None:
    write_shards(tmp_path / "data")
    Pretrainer(pretrain_settings(tmp_path)).run()
    whole = metrics(tmp_path / "run")
    cut = pretrain_settings(tmp_path, output_dir=str(tmp_path / "cut"), stop_after=5, checkpoint_every=100)
    Pretrainer(cut).run()
    with pytest.raises(DSpineError, match="continue with --resume"):
        Pretrainer(cut)
    Pretrainer(cut.model_copy(update={"stop_after": None}), resume=True).run()
    parts = metrics(tmp_path / "cut")
    names = ("step", "loss", "balance", "router_z", "gradient_norm", "learning_rate", "rounded")
    assert [[row[n] for n in names] for row in parts] == [[row[n] for n in names] for row in whole]
    assert [row["rounded"] for row in whole] == [False] * 6 + [True] * 6
    assert whole[-1]["loss"] < whole[0]["loss"] - 0.3
    with pytest.raises(DSpineError, match="learning_rate: 0.01 there, 0.02 now"):
        Pretrainer(cut.model_copy(update={"learning_rate": 0.02}), resume=True)


def test_rounded_training_is_training_of_the_stored_model(tmp_path) -> None:
    """After the last step: model's copies == stored and read again == expanded and loaded again, in bfloat16."""
    write_shards(tmp_path / "data")
    config = pretrain_settings(tmp_path, dtype="bfloat16", max_steps=4, round_from=0.25)
    run = Pretrainer(config)
    run.run()
    forms = {PREFIX + name: form for name, form in run.masters.forms.items()}
    write_stored(tmp_path / "stored", run.masters.tensors_to_store(PREFIX), forms)
    write_cards(run.model.shape, tmp_path / "stored")
    stored = dict(read_stored(tmp_path / "stored"))
    (tmp_path / "hf").mkdir()
    expand_stored(tmp_path / "stored", tmp_path / "hf")
    loaded = dict(load_model(tmp_path / "hf", torch.device("cpu"), torch.bfloat16).named_parameters())
    assert any(form.bits == 4 for form in forms.values()) and any(form.bits == 8 for form in forms.values())
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, torch.from_numpy(stored[PREFIX + name]).bfloat16()), name
        assert torch.equal(parameter, loaded[name]), name
    summary = run.evaluate()
    run.masters.rounding = False
    run.masters.refresh()
    assert run.evaluate() != summary, "rounding changed nothing: the test shows nothing"


@pytest.mark.parametrize("bits", [2, 4, 5, 6, 8])
def test_rounding_in_torch_is_storage_in_numpy(bits: int) -> None:
    weight = torch.randn(3, 8, 96, generator=torch.Generator().manual_seed(bits))
    weight[0, 0], weight[0, 1, :48], weight[0, 2, :48] = 0.0, 2.5, -1e-9
    words = quantize_affine(weight.numpy(), bits, 48)
    np.testing.assert_array_equal(dequantize_affine(*words, bits, 48), rounded(weight, GroupForm(bits, 48)))


def test_norms_read_the_same_wherever_the_one_is_added() -> None:
    weight = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 2
    stored = as_stored("layers.0.input_layernorm.weight", weight, {})
    assert torch.equal(stored.bfloat16().float(), stored), "not a bfloat16 value"
    assert torch.equal((1 + stored.bfloat16()).float(), 1 + stored)
    assert float((stored - weight).abs().max()) <= 2**-5
    assert torch.equal(as_stored("layers.0.linear_attn.norm.weight", weight, {}), weight)


def test_which_tensors_are_quantised() -> None:
    shapes = {name: tuple(p.shape) for name, p in toy_hybrid().named_parameters()}
    forms = storage_forms(shapes, experts=4, projections=6, embedding=8)
    assert forms["layers.0.mlp.experts.down_proj"] == GroupForm(4, 16)
    assert forms["layers.0.linear_attn.in_proj_qkv.weight"].bits == 6 and forms["embed_tokens.weight"].bits == 8
    assert not any(name.endswith(("gate.weight", "conv1d.weight", "norm.weight", "A_log")) for name in forms)
    assert group_of("x", 80) == 80 and group_of("x", 256) == 128 and group_of("x", 96) == 96
    with pytest.raises(DSpineError, match="no group of 16 to 128 values divides 13"):
        group_of("x", 13)


def test_balance_terms_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.5, 0.3], [0.9, 0.05, 0.05]])) + 1.5
    routing = Routing(logits, torch.tensor([[0, 1], [1, 2], [0, 1]]))
    balance, z, busiest = balance_terms(routing, torch.tensor([True, True, False]))
    share, probability = np.array([0.25, 0.5, 0.25]), np.array([0.45, 0.35, 0.2])
    np.testing.assert_allclose(balance, 3 * (share * probability).sum(), rtol=1e-6)
    np.testing.assert_allclose((z, busiest), (1.5**2, 0.5), rtol=1e-5)
    even = Routing(torch.zeros(4, 4), torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]]))
    assert float(balance_terms(even, torch.ones(4, dtype=torch.bool))[0]) == pytest.approx(1.0)


def test_loss_is_the_mean_over_labels_of_each_document() -> None:
    model, tokens = toy_hybrid(), toy_tokens(1, 20)
    documents = np.array([[0] * 8 + [1] * 9 + [-1] * 3])
    rows = PackedRows(tokens.numpy(), documents, np.zeros_like(documents), np.ones_like(documents, dtype=bool))
    labels = torch.from_numpy(next_token_labels(rows))
    assert (labels[0] == -100).nonzero().flatten().tolist() == [7, 16, 17, 18, 19]
    positions = torch.cat([restarting(8, 9), torch.zeros(1, 3, dtype=torch.int64)], dim=1)
    with torch.no_grad():
        total, terms = losses(model, tokens, positions, labels, 0.5, 0.25)
        want, count = 0.0, 0
        for start, length in ((0, 8), (8, 9)):
            part = tokens[:, start : start + length]
            logits = model.logits(model(part, restarting(length))[0])[0, :-1]
            want -= logits.log_softmax(dim=-1).gather(1, part[0, 1:, None]).sum().item()
            count += length - 1
    assert terms[0].item() == pytest.approx(want / count, rel=1e-5)
    assert total.item() == pytest.approx((terms[0] + 0.5 * terms[1] + 0.25 * terms[2]).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["minutes=1", "max_steps=2"], "exactly one of max_steps and minutes"),
        ([], "exactly one of max_steps and minutes"),
        (["minutes=1", "shape={layers: 3}"], "shape: unknown layers"),
        (["minutes=1", "speed=3"], "speed: Extra inputs"),
        (["minutes"], "expected key=value"),
        (["minutes=1", "dtype=float16"], "bfloat16 or float32"),
    ],
)
def test_bad_settings_are_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(DSpineError, match=message) as error:
        load_pretrain_config(None, ["data=[x]", "tokenizer=t", "output_dir=o", *overrides])
    assert "\n" not in str(error.value)


def test_time_limit_bends_the_schedule(tmp_path, monkeypatch) -> None:
    """By a clock of the test's own: a busy machine changes nothing."""
    ticks = itertools.count(step=0.01)
    monkeypatch.setattr(hybrid_pretrain, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    write_shards(tmp_path / "data")
    run = Pretrainer(pretrain_settings(tmp_path, max_steps=None, minutes=0.05))
    run.run()
    rows = metrics(tmp_path / "run")
    assert 3.0 <= run.total_seconds() and rows[-1]["learning_rate"] < 0.05 * max(row["learning_rate"] for row in rows)
    assert rows[-1]["progress"] == 1.0 and rows[-1]["rounded"]
