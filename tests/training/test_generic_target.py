"""Targets that the trainer has no forward of its own for: models of `transformers`, and the hybrid's generation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dspine.common.errors import CheckpointError, DSpineError
from dspine_cuda.drafter import load_drafter
from dspine_cuda.training.cached_generator import CachedGenerator, generator_for
from dspine_cuda.training.config import parse_train_config
from dspine_cuda.training.eval_command import EvalSettings, evaluate
from dspine_cuda.training.generator import BatchGenerator, Job
from dspine_cuda.training.generic_target import GenericFrozenTarget
from dspine_cuda.training.loop import train
from dspine_cuda.training.masks import document_mask
from dspine_cuda.training.recipe import Recipe, RecipeSettings
from dspine_cuda.training.target import FrozenTarget, load_frozen_target
from tests.helpers.models import save_tiny
from tests.training.hybrid_toys import write_hybrid
from tests.training.test_recipe import prompt_file
from tests.training.toys import VOCAB, train_settings, write_shards, write_target, write_tokenizer

CPU = torch.device("cpu")


def jobs_of(count: int, vocab: int = 90) -> list[Job]:
    rng = np.random.default_rng(0)
    return [
        Job(i, rng.integers(3, vocab, int(rng.integers(2, 9))), int(rng.integers(2, 20)), 0.8 * (i % 2)) for i in range(count)
    ]


def answers_of(generator, jobs: list[Job]) -> list[list[int]]:
    return [a.tokens.tolist() for a in sorted(generator.run(jobs), key=lambda a: a.job.number)]


@pytest.mark.parametrize("family", ["qwen2", "mistral", "llama"])
def test_packed_documents_equal_each_alone(tmp_path: Path, family: str) -> None:
    changes = {"sliding_window": None} if family == "mistral" else {}
    model = save_tiny(tmp_path, family, **changes)
    target = GenericFrozenTarget(tmp_path, CPU, torch.float32, "test")
    documents = torch.tensor([[0] * 6 + [1] * 9])
    positions = torch.cat([torch.arange(6), torch.arange(9)])[None]
    ids = torch.randint(3, 90, (1, 15), generator=torch.Generator().manual_seed(0))
    features, last = target.features(ids, positions, document_mask(documents), (1, 3))
    start = 0
    for length in (6, 9):
        part = slice(start, start + length)
        with torch.no_grad():
            output = model(ids[:, part], output_hidden_states=True)
        torch.testing.assert_close(target.head(last[:, part]), output.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(features[:, part, 48:], output.hidden_states[4], rtol=1e-4, atol=1e-4)
        start += length
    torch.testing.assert_close(target.embed(ids), model.get_input_embeddings()(ids))
    if family == "llama":  # and the trainer's own forward agrees
        own = load_frozen_target(tmp_path, CPU, torch.float32)
        assert isinstance(own, FrozenTarget)
        for ours, theirs in zip(own.features(ids, positions, document_mask(documents), (1, 3)), (features, last), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_generation_through_transformers_equals_the_static_cache(tmp_path: Path) -> None:
    """Left-padded batches against slots at their own positions: the same tokens, drawn ones included."""
    folder = write_target(tmp_path)
    own, generic = load_frozen_target(folder, CPU, torch.float32), GenericFrozenTarget(folder, CPU, torch.float32, "test")
    jobs, settings = jobs_of(9), {"capacity": 40, "stop_ids": {2, 7, 30}, "seed": 3}
    first, second = generator_for(own, batch=4, **settings), generator_for(generic, batch=3, **settings)
    assert isinstance(first, BatchGenerator) and isinstance(second, CachedGenerator)
    assert answers_of(first, jobs) == answers_of(second, jobs)


def test_generation_of_a_hybrid_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    target = load_frozen_target(write_hybrid(tmp_path)[1], CPU, torch.float32)
    jobs = jobs_of(6, target.info.vocab_size)
    settings = {"capacity": 40, "stop_ids": {2}, "seed": 3, "cut_loops": False}
    alone = answers_of(generator_for(target, batch=1, **settings), jobs)
    assert answers_of(generator_for(target, batch=4, **settings), jobs) == alone
    for job, answer in zip(jobs[::2], alone[::2], strict=True):  # greedy ones, against the packed forward
        tokens = torch.tensor([[*job.tokens.tolist(), *answer]])
        mask = document_mask(torch.zeros_like(tokens))
        _, last = target.features(tokens, torch.arange(tokens.shape[1])[None], mask, (0,))
        predicted = target.head(last[0]).argmax(dim=-1)[len(job.tokens) - 1 : -1]
        assert float((predicted == torch.tensor(answer)).float().mean()) > 0.9


def test_a_drafter_for_any_folder(tmp_path: Path) -> None:
    """Data, training and evaluation for a family the trainer does not know, with the same commands."""
    folder = tmp_path / "target"
    save_tiny(folder, "qwen2", vocab_size=VOCAB)
    write_tokenizer(folder)
    settings = RecipeSettings(
        model=str(folder), prompts=(str(prompt_file(tmp_path / "p.jsonl", 24)),), max_prompt_tokens=24, max_tokens=24
    )
    Recipe(settings, tmp_path / "data", device="cpu", dtype="float32", batch=12, progress=False).run()
    sections = {
        "model": train_settings(tmp_path)["model"] | {"target": str(folder), "num_layers": 2, "taps": [1, 3]},
        "schedule": {"max_steps": 4, "replacement_layers": 1},
    }
    summary = train(parse_train_config(train_settings(tmp_path, **sections)))
    target = load_frozen_target(folder, CPU, torch.float32)
    assert "transformers; model type 'qwen2'" in target.info.adapter
    assert load_drafter(Path(summary["drafter"]), target).config.method == "dspine"
    prompt_file(tmp_path / "e.jsonl", 3, seed=5)
    result = {
        method: evaluate(
            EvalSettings(
                drafter=summary["drafter"], prompts=(tmp_path / "e.jsonl",), model=str(folder), max_tokens=12, device="cpu",
                dtype="float32", progress=False, temperatures=(0.0,), method=method,
            )
        )["temperatures"]["0"]["sets"]["e"]["counts"]
        for method in ("simulate", "generate")
    }  # fmt: skip
    assert result["simulate"] == result["generate"]


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path / "capped", "gemma2", vocab_size=VOCAB, head_dim=16)
    with pytest.raises(CheckpointError, match="gemma2"):
        load_frozen_target(tmp_path / "capped", CPU, torch.float32)
    save_tiny(tmp_path / "gpt2", "gpt2", n_layer=5, n_head=4, n_embd=48, n_positions=64)
    write_tokenizer(tmp_path / "gpt2")
    write_shards(tmp_path / "data")
    model = train_settings(tmp_path)["model"] | {"target": str(tmp_path / "gpt2"), "num_layers": 2, "taps": [1, 3]}
    with pytest.raises(DSpineError, match="use model.init=random"):
        train(parse_train_config(train_settings(tmp_path, model=model)))
