"""On a CUDA device: the fast paths (flex_attention, compiled losses) against the plain ones, and a short run in bfloat16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dspine_cuda.training.config import parse_train_config
from dspine_cuda.training.generator import BatchGenerator, Job
from dspine_cuda.training.loop import Prefetcher, Trainer, train
from dspine_cuda.training.losses import combine
from dspine_cuda.training.target import load_frozen_target
from tests.training.toys import train_settings, write_shards, write_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch.compile warns about the machine
]


def one_gradient(place: Path, name: str, **run: object) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients and sums of the first step; head size 16, because flex_attention has no smaller one."""
    settings = train_settings(
        place,
        model=train_settings(place)["model"] | {"head_dim": 16, "init": "random"},
        data=train_settings(place)["data"] | {"sequence_length": 128, "num_anchors": 64},
        run=train_settings(place)["run"] | {"device": "cuda", "output_dir": str(place / name)} | run,
    )
    trainer = Trainer(parse_train_config(settings))
    prefetch = Prefetcher(trainer.config, trainer.stream, 0, pin=True)
    for _ in range(2):  # the second batch runs the kernels compiled for the first
        trainer.model.zero_grad()
        sums = trainer.forward(prefetch.next()[0].to(trainer.device))
        combine(sums, sums.totals(), trainer.config.loss, 0.5).backward()
    prefetch.close()
    return [p.grad for p in trainer.model.parameters()], sums.totals()


def test_fast_paths_give_the_plain_gradients(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_shards(tmp_path / "data")
    plain, totals = one_gradient(tmp_path, "plain", attention="sdpa", compile=False)
    for name, run in {
        "flex": {"attention": "flex", "compile": False},
        "compiled": {"attention": "sdpa", "compile": True},
        "both": {"attention": "flex", "compile": True},
    }.items():
        gradients, sums = one_gradient(tmp_path, name, **run)
        torch.testing.assert_close(sums, totals, rtol=5e-3, atol=1e-2)
        for got, want in zip(gradients, plain, strict=True):
            assert float((got - want).norm()) <= 0.02 * float(want.norm()) + 1e-5, name


def test_a_run_in_bfloat16(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_shards(tmp_path / "data")
    settings = train_settings(
        tmp_path,
        model=train_settings(tmp_path)["model"] | {"head_dim": 16, "init": "random"},
        run=train_settings(tmp_path)["run"] | {"device": "cuda", "dtype": "bfloat16", "eval_every": 10},
    )
    summary = train(parse_train_config(settings))
    assert summary["steps"] == 30 and summary["skipped_steps"] == 0 and summary["peak_memory_bytes"] > 0


def test_minutes_become_steps_on_the_device(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_shards(tmp_path / "data")
    settings = train_settings(
        tmp_path,
        model=train_settings(tmp_path)["model"] | {"head_dim": 16, "init": "random"},
        schedule={"max_steps": 12, "max_minutes": 9.0, "replacement_layers": 1},
        run=train_settings(tmp_path)["run"] | {"device": "cuda", "dtype": "bfloat16"},
    )
    summary = train(parse_train_config(settings))
    assert summary["steps"] == summary["max_steps"] == 12 and summary["skipped_steps"] == 0


def test_generation_under_a_graph_equals_plain_steps(tmp_path: Path) -> None:
    """Slots at their own positions, drawn and greedy, against the CPU; float32, so that rounding decides nothing."""
    folder = write_target(tmp_path)
    rng = np.random.default_rng(0)
    jobs = [Job(i, rng.integers(3, 90, int(rng.integers(1, 9))), int(rng.integers(20, 90)), 0.8 * (i % 2)) for i in range(40)]
    answers = []
    for device, graphs in (("cpu", False), ("cuda", False), ("cuda", True)):
        target = load_frozen_target(folder, torch.device(device), torch.float32)
        generator = BatchGenerator(target, capacity=120, batch=16, stop_ids={2, 30}, seed=1, graphs=graphs, cut_loops=False)
        answers.append({a.job.number: a.tokens.tolist() for a in generator.run(jobs)})
    assert answers[1] == answers[2]
    same = sum(answers[0][i] == answers[2][i] for i in range(40))
    assert same >= 36  # near-ties of random weights may fall differently between devices


@pytest.mark.parametrize("method", ["dspine", "beyond", "dflash2", "domino", "dspark"])
def test_every_kind_gives_the_plain_gradient(tmp_path: Path, method: str) -> None:
    write_target(tmp_path / "target")
    write_shards(tmp_path / "data")
    changes = {"dspine": {}, "beyond": {"hops": 2, "refined_layers": 2}}.get(method, {"method": method})
    loss = train_settings(tmp_path)["loss"] | ({"alignment": "none"} if "method" in changes else {})
    results = []
    for name, run in {
        "plain": {"attention": "sdpa", "compile": False},
        "fast": {"attention": "flex", "compile": True},
        "lean": {"attention": "flex", "compile": True, "recompute": "mlp"},
    }.items():
        settings = train_settings(
            tmp_path,
            model=train_settings(tmp_path)["model"] | {"head_dim": 16, "init": "random"} | changes,
            heads={"conv_group_size": 8, "selector_rank": 16, "gru_hidden_dim": 16, "emb_dim": 16, "markov_rank": 16},
            data=train_settings(tmp_path)["data"] | {"sequence_length": 128, "num_anchors": 64},
            loss=loss,
            run=train_settings(tmp_path)["run"] | {"device": "cuda", "output_dir": str(tmp_path / name)} | run,
        )
        trainer = Trainer(parse_train_config(settings))
        prefetch = Prefetcher(trainer.config, trainer.stream, 0, True, None, trainer.shape.query_rows)
        trainer.forward.base_share = 0.5
        sums = trainer.forward(prefetch.next()[0].to(trainer.device))
        prefetch.close()
        combine(sums, sums.totals(), trainer.config.loss, 0.5).backward()
        results.append({n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None})
    for fast in results[1:]:
        assert fast.keys() == results[0].keys()
        for name, want in results[0].items():
            assert float((fast[name] - want).norm()) <= 0.02 * float(want.norm()) + 1e-5, name
