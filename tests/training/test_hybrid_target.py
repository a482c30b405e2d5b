"""A hybrid as the frozen target of the drafter's trainer."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dspine.common.errors import DSpineError
from dspine_cuda.training.config import parse_train_config
from dspine_cuda.training.loop import Trainer
from dspine_cuda.training.target import load_frozen_target
from tests.training.hybrid_toys import restarting, toy_tokens, write_hybrid
from tests.training.toys import VOCAB, train_settings, write_shards


@torch.no_grad()
def test_packed_features_equal_transformers_document_by_document(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    write_hybrid(tmp_path)
    target = load_frozen_target(tmp_path, torch.device("cpu"), torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens, lengths, start = toy_tokens(1, 100), (30, 70), 0
    features, hidden = target.features(tokens, restarting(*lengths), torch.ones(0), (1, 3))
    for length in lengths:
        part = slice(start, start + length)
        states = theirs.model(tokens[:, part], output_hidden_states=True)
        np.testing.assert_allclose(hidden[:, part], states.last_hidden_state, atol=3e-4)
        np.testing.assert_allclose(features[:, part, :32], states.hidden_states[2], atol=3e-4)
        np.testing.assert_allclose(target.head(hidden[:, part]), theirs.lm_head(states.last_hidden_state), atol=3e-4)
        start += length
    assert features.shape == (1, 100, 64) and target.shape.vocab_size == VOCAB and target.info.model_type == "qwen3_5_moe"


def settings(tmp_path, **model: object) -> dict:
    sizes = {"init": "random", "intermediate_size": 48, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, **model}
    return train_settings(tmp_path, model=sizes, schedule={"max_steps": 12}, optimizer={"learning_rate": 5e-3})


def test_drafter_trains_on_a_hybrid(tmp_path) -> None:
    write_hybrid(tmp_path / "target")
    write_shards(tmp_path / "data")
    trainer = Trainer(parse_train_config(settings(tmp_path)))
    before = {name: master.clone() for name, master in trainer.optimizer.named_masters().items()}
    weights = {name: tensor.clone() for name, tensor in trainer.target.weights.items()}
    summary = trainer.run()
    after = trainer.optimizer.named_masters()
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert not still, still
    assert all(torch.equal(weights[name], tensor) for name, tensor in trainer.target.weights.items())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row["kind"] == "train"]
    assert losses[-1] < losses[0] and summary["acceptance"]["rounds"] > 0
    card = json.loads((tmp_path / "run" / "drafter" / "config.json").read_text())
    assert card["num_target_layers"] == 4 and card["rope_theta"] == 10000.0


def test_copying_the_target_s_layers_is_refused(tmp_path) -> None:
    write_hybrid(tmp_path / "target")
    write_shards(tmp_path / "data")
    with pytest.raises(DSpineError, match="init=target copies dense decoder layers"):
        Trainer(parse_train_config(settings(tmp_path, init="target")))
