"""Tiny models of `transformers` with random weights, saved as Hugging Face folders. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB = 97  # a prime, so that nothing is aligned by accident


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """A config of 5 layers, hidden size 48, 4 heads over 2 K/V heads; `changes` win."""
    from transformers import AutoConfig

    facts: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.25,
    }
    if family in ("llama", "qwen3"):
        facts["head_dim"] = 16
    return AutoConfig.for_model(family, **(facts | changes))


def tiny_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Random float32 weights; norms and biases are random too, so that leaving one out shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model.requires_grad_(False)


def save_tiny(folder: Path, family: str, *, seed: int = 0, shards: bool = False, **changes: Any) -> PreTrainedModel:
    """Save a tiny model into `folder` and return it; `shards` splits it into several files with an index."""
    model = tiny_model(tiny_config(family, **changes), seed)
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "1GB")
    return model


def edit_config(folder: Path, *drop: str, **changes: Any) -> None:
    """Change keys of a saved config.json, and drop some."""
    path = folder / "config.json"
    data = json.loads(path.read_text())
    for key in drop:
        data.pop(key, None)
    path.write_text(json.dumps(data | changes))


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread for a while."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


def prompt(length: int, seed: int = 1, batch: int = 1) -> torch.Tensor:
    """Random token ids int64 [batch, length]."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy_reference(model: PreTrainedModel, ids: torch.Tensor, count: int) -> list[int]:
    """`count` greedy tokens of `transformers`, end tokens ignored."""
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=0, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, ids.shape[1] :].tolist()


def greedy_target(target: Any, ids: torch.Tensor, count: int, chunk: int = 64) -> list[int]:
    """`count` greedy tokens of a `Target`, one a step."""
    cache = target.make_cache(ids.shape[1] + count)
    logits = target.prefill(cache, ids, chunk=chunk).logits
    tokens = [int(logits[0].argmax())]
    while len(tokens) < count:
        verification = target.finish(cache, target.begin(cache, torch.tensor([[tokens[-1]]])), 1)
        target.commit(cache, verification, 1)
        tokens.append(int(verification.logits[0, 0].argmax()))
    cache.check_integrity()
    return tokens
