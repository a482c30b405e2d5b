"""A tiny Qwen3.5-MoE hybrid with random weights, for the tests of its training code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dspine_cuda.training.hybrid_config import PretrainConfig
from dspine_cuda.training.hybrid_model import HybridModel, new_model, save_folder
from dspine_cuda.training.hybrid_quant import as_stored
from dspine_cuda.training.hybrid_shape import HybridShape

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "partial_rotary_factor": 0.5, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "max_position_embeddings": 256,
}  # fmt: skip


def toy_hybrid(seed: int = 0, scale: float = 6.0) -> HybridModel:
    """Float32, values that bfloat16 holds; large enough that routing, gates and decays differ from token to token."""
    model = new_model(HybridShape(**SIZES), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-2, 1, generator=generator)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
                parameter.copy_(as_stored(name, parameter, {}))
            elif "conv1d" not in name:
                parameter.mul_(scale)
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def write_hybrid(folder: Path, seed: int = 0) -> tuple[HybridModel, Path]:
    """The model and its Hugging Face folder."""
    model = toy_hybrid(seed)
    return model, save_folder(model, folder)


def toy_tokens(rows: int, length: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(4, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def restarting(*lengths: int) -> torch.Tensor:
    """Positions of documents end to end, int [1, sum]."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def pretrain_settings(tmp_path: Path, **changes: object) -> PretrainConfig:
    """A run of a few steps over the toy shards."""
    settings: dict[str, object] = {
        "data": (str(tmp_path / "data"),), "tokenizer": str(tmp_path), "output_dir": str(tmp_path / "run"), "shape": SIZES,
        "holdout": 8, "sequence_length": 48, "rows_per_step": 4, "max_steps": 12, "warmup_steps": 3, "learning_rate": 1e-2,
        "log_every": 1, "eval_every": 0, "eval_rows": 4, "checkpoint_every": 4, "device": "cpu", "dtype": "float32",
        "round_from": 0.5, "dropout": 0.1,
    }  # fmt: skip
    return PretrainConfig.model_validate(settings | changes)


def naive_novelty(picks: np.ndarray) -> np.ndarray:
    """New distinct experts of each token of one block, int [tokens, layers], by Python sets."""
    seen: list[set[int]] = [set() for _ in range(picks.shape[1])]
    new = np.zeros(picks.shape[:2], dtype=int)
    for token in range(picks.shape[0]):
        for layer in range(picks.shape[1]):
            fresh = set(picks[token, layer].tolist()) - seen[layer]
            new[token, layer] = len(fresh)
            seen[layer] |= fresh
    return new
