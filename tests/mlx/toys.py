"""Tiny targets from mlx-lm's own model classes, and tiny drafter folders, with random weights."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from dspine_mlx.targets import PlainTarget, wrap_model
from tests.helpers import drafters

VOCAB, HIDDEN, LAYERS = 96, 32, 4
TIED = ("gemma",)


def toy_config(kind: str, **changes: Any) -> dict[str, Any]:
    config = {
        "model_type": kind, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "vocab_size": VOCAB,
        "max_position_embeddings": 1024, "rope_theta": 10000.0, "tie_word_embeddings": kind in TIED, "eos_token_id": 2,
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    if kind == "granite":
        config |= {"logits_scaling": 3.0, "attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}
    return config | changes


def toy_model(kind: str, seed: int = 0, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Random float32 weights of unit gain, so that greedy text wanders instead of settling on one token."""
    config = toy_config(kind, **changes)
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = module.Model(module.ModelArgs.from_dict(config))
    rng = np.random.default_rng(seed)
    weights = []
    for name, value in tree_flatten(model.parameters()):
        scale = 1.5 / value.shape[-1] ** 0.5 if value.ndim > 1 else 0.1
        weights.append((name, mx.array(rng.normal(0.0 if value.ndim > 1 else 1.0, scale, value.shape).astype(np.float32))))
    model.update(tree_unflatten(weights))
    model.eval()
    mx.eval(model.parameters())
    return model, config


def toy_target(kind: str = "llama", seed: int = 0, **changes: Any) -> PlainTarget:
    return wrap_model(*toy_model(kind, seed, **changes), name=f"toy-{kind}")


def save_model(folder: Path, model: nn.Module, config: dict[str, Any], dtype: mx.Dtype = mx.float32) -> Path:
    folder.mkdir(exist_ok=True)
    weights = {
        name: v.astype(dtype) if mx.issubdtype(v.dtype, mx.floating) else v for name, v in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def drafter_card(method: str, block: int, **changes: Any) -> dict[str, Any]:
    """config.json of a drafter for a toy target."""
    return drafters.drafter_card(method, block, np.zeros((VOCAB, HIDDEN)), LAYERS, **changes)


def drafter_folder(folder: Path, method: str, block: int, head: np.ndarray, seed: int = 0, **changes: Any) -> Path:
    """A drafter of random weights for a toy target whose LM head is `head` [V, H]."""
    return drafters.drafter_folder(folder, method, block, head, LAYERS, seed, **changes)
