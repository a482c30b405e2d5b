"""Sizes of a Qwen3.5-MoE model (text) that this trainer can make, and its card."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine.common.configs import read_config
from dspine.common.errors import DSpineError

MODEL_TYPE = "qwen3_5_moe"
PREFIX = "model.language_model."


@dataclass(frozen=True)
class HybridShape:
    """Sizes of a Qwen3.5-MoE text model. The defaults are hybrid-tiny's."""

    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 8
    full_attention_interval: int = 4  # every fourth layer is attention, the others are Gated DeltaNet
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10000.0
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 8
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 80
    shared_expert_intermediate_size: int = 80
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    eos_token_id: int = 2
    pad_token_id: int = 0

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0

    def card(self) -> dict[str, Any]:
        """config.json as the family publishes it: sizes under `text_config`, embeddings tied."""
        kinds = ["full_attention" if self.is_attention(i) else "linear_attention" for i in range(self.num_hidden_layers)]
        half = self.rotary_dim // 2
        sections = [half - 2 * (half // 3), half // 3, half // 3]  # time, height, width: equal positions in text
        copied = {k: v for k, v in self.__dict__.items() if k not in ("partial_rotary_factor", "rope_theta", "pad_token_id")}
        text = copied | {
            "model_type": f"{MODEL_TYPE}_text",
            "layer_types": kinds,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "initializer_range": 0.02,
            "mamba_ssm_dtype": "float32",
            "router_aux_loss_coef": 0.001,
            "tie_word_embeddings": True,
            "use_cache": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
                "mrope_interleaved": True,
                "mrope_section": sections,
            },
        }
        return {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": MODEL_TYPE,
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": self.pad_token_id,
            "text_config": text,
        }


def read_shape(folder: Path) -> HybridShape:
    """`HybridShape` of a folder's config.json; a variant this trainer does not know is an error."""
    data = read_config(folder)
    text = data.get("text_config", data)
    if data.get("model_type") not in (MODEL_TYPE, f"{MODEL_TYPE}_text"):
        raise DSpineError(f"{folder}: expected a model of type {MODEL_TYPE!r}, got {data.get('model_type')!r}")
    rope = text.get("rope_parameters") or {}
    known = HybridShape.__dataclass_fields__
    values = {name: text[name] for name in known if name in text} | {
        n: data[n] for n in ("eos_token_id", "pad_token_id") if n in data
    }
    values |= {name: rope[name] for name in ("partial_rotary_factor", "rope_theta") if name in rope}
    shape = HybridShape(**values)
    kinds = ["full_attention" if shape.is_attention(i) else "linear_attention" for i in range(shape.num_hidden_layers)]
    if text.get("layer_types", kinds) != kinds or not (text.get("tie_word_embeddings") or data.get("tie_word_embeddings")):
        raise DSpineError(
            f"{folder}: the hybrid trainer knows tied embeddings and one attention layer at a fixed interval only"
        )
    return shape


def write_cards(shape: HybridShape, folder: Path) -> None:
    """config.json and generation_config.json."""
    generation = {"eos_token_id": shape.eos_token_id, "pad_token_id": shape.pad_token_id}
    for name, content in (("config.json", shape.card()), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
