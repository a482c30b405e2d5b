"""A Qwen3.5-MoE hybrid as the frozen target of the drafter's training: what `FrozenTarget` is for dense families.

Documents packed in one row never meet: positions restart at 0 in each, and attention, convolution and the recurrent state are
cut there (`training.hybrid_model`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspine.common.configs import RopeConfig
from dspine.common.protocols import TargetInfo
from dspine_cuda.training.hybrid_model import HybridModel, load_model
from dspine_cuda.training.hybrid_shape import MODEL_TYPE, HybridShape

HYBRID_FAMILIES = (MODEL_TYPE, f"{MODEL_TYPE}_text")


def hybrid_facts(shape: HybridShape) -> dict[str, Any]:
    """Fields of `TargetShape`. intermediate_size: the inner size that one token uses."""
    active = shape.num_experts_per_tok * shape.moe_intermediate_size + shape.shared_expert_intermediate_size
    return {
        "model_type": MODEL_TYPE,
        "num_layers": shape.num_hidden_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": active,
        "num_heads": shape.num_attention_heads,
        "num_kv_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope": RopeConfig(theta=shape.rope_theta),
        "attention_bias": False,
    }


class HybridFrozenTarget:
    """Same methods and attributes as `FrozenTarget`."""

    def __init__(self, model: HybridModel, shape: Any, device: torch.device, dtype: torch.dtype, name: str) -> None:
        self.model, self.shape, self.device, self.dtype = model, shape, device, dtype
        self.embedding = self.head_matrix = model.embed_tokens.weight
        self.weights = dict(model.named_parameters())
        self.info = TargetInfo(
            name, shape.model_type, shape.num_layers, shape.hidden_size, shape.vocab_size, shape.max_position_embeddings,
            frozenset({model.shape.eos_token_id}), str(dtype).removeprefix("torch."), str(device),
            "training: packed forward without a cache",
        )  # fmt: skip

    def compile(self) -> None:
        """Stays eager: about 600 kernels a pass, and the shapes of evaluation change from call to call."""

    @torch.no_grad()
    def features(self, tokens: Tensor, positions: Tensor, mask: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Packed forward: tokens and positions int [B, S] -> the outputs of layers `taps` concatenated [B, S, taps*H], and the
        final-normed hidden states [B, S, H]. `mask` is not read: positions say where documents start."""
        hidden, outputs, _ = self.model(tokens, positions, taps)
        return torch.cat(outputs, dim=-1), hidden

    eager_features = features

    def bind_features(self, layer_ids: Any) -> None:
        """Taps are arguments of `features` here; nothing to remember."""

    def embed(self, tokens: Tensor) -> Tensor:
        """int [...] -> [..., H]."""
        return self.embedding[tokens]

    def head(self, hidden: Tensor) -> Tensor:
        """Final-normed [..., H] -> logits float32 [..., V]."""
        return self.model.logits(hidden)

    def head_rows(self, ids: Tensor) -> Tensor:
        """LM-head rows of `ids` int [...] -> [..., H]."""
        return self.head_matrix[ids]

    def head_weight(self) -> np.ndarray:
        """LM head as float32 NumPy [V, H]."""
        return self.head_matrix.float().cpu().numpy()


def load_hybrid_target(folder: Path, shape: Any, device: torch.device, dtype: torch.dtype) -> HybridFrozenTarget:
    """Load a hybrid folder for training; `shape` is its `TargetShape`."""
    return HybridFrozenTarget(load_model(folder, device, dtype), shape, device, dtype, str(folder))
