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
from safetensors.numpy import save_file

from dspine.common.checkpoints import CODES, expected_tensors
from dspine.common.configs import parse_drafter_config
from dspine.common.transfer_space import transfer_basis, transfer_codes
from dspine_mlx.targets import PlainTarget, wrap_model

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
    card: dict[str, Any] = {
        "architectures": ["DSpineDraftModel" if method == "dspine" else "DFlashDraftModel"],
        "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "vocab_size": VOCAB, "max_position_embeddings": 1024,
        "rope_theta": 10000.0, "num_target_layers": LAYERS, "block_size": block,
        "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [1, 2]},
    }  # fmt: skip
    if method == "dspine":
        card["dspine_config"] = {"transfer_rank": 8, "message_size": 6, "top_k": 4}
    return card | changes


def drafter_folder(folder: Path, method: str, block: int, head: np.ndarray, seed: int = 0, **changes: Any) -> Path:
    """A drafter of random weights for a toy target whose LM head is `head` [V, H]."""
    folder.mkdir(exist_ok=True)
    card = drafter_card(method, block, **changes)
    config = parse_drafter_config(card)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        scale = 1.0 / shape[-1] ** 0.5 if len(shape) > 1 else 0.1
        tensors[name] = rng.normal(1.0 if name.endswith("norm.weight") else 0.0, scale, shape).astype(np.float32)
    if config.dspine is not None:
        wide = head.astype(np.float64)
        tensors[CODES] = transfer_codes(wide, transfer_basis(wide, config.dspine.transfer_rank)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(card))
    return folder
