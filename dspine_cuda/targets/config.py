"""A target's config.json: which decoder runs it, and the facts of the lean one."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.configs import RopeConfig, read_config
from dspine.common.errors import CheckpointError
from dspine.common.rope import rope_frequencies

LEAN_FAMILIES = ("llama", "qwen3")
_DEFAULT_THETA = 10000.0  # what these families use where the card names no base (Llama 2 cards do not)


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's frequency scaling: long waves divided by `factor`, short ones kept, a linear blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class DecoderConfig:
    """One dense decoder of the lean families."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    context_length: int
    rope: RopeConfig
    llama3: Llama3Rope | None
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool

    def frequencies(self) -> tuple[np.ndarray, float]:
        """Inverse frequencies float64 [head_dim / 2] (radians a position) and the factor on cos and sin."""
        frequencies, factor = rope_frequencies(self.rope, self.head_dim)
        if self.llama3 is None:
            return frequencies, factor
        rope = self.llama3
        turns = rope.original_max_position * frequencies / (2 * math.pi)  # full turns over the original context
        blend = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
        return frequencies * (blend + (1.0 - blend) / rope.factor), factor

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of the checkpoint, by Hugging Face's names."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (queries, hidden, self.attention_bias),
            "self_attn.k_proj": (keys, hidden, self.attention_bias),
            "self_attn.v_proj": (keys, hidden, self.attention_bias),
            "self_attn.o_proj": (hidden, queries, self.attention_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for index in range(self.num_layers):
            layer = f"model.layers.{index}."
            shapes |= {layer + "input_layernorm.weight": (hidden,), layer + "post_attention_layernorm.weight": (hidden,)}
            for name, (rows, columns, bias) in linears.items():
                shapes[f"{layer}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{layer}{name}.bias"] = (rows,)
            if self.qk_norm:
                shapes |= {layer + f"self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        return shapes


class Card:
    """config.json of a target with the folder it came from, for errors."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {text}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        value = default if value is None else value
        if value is None:
            raise self.error(f"{key} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} must be an integer of at least 1, got {value!r}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}")
        return value

    def rope(self) -> dict[str, Any]:
        """Both spellings merged: transformers 5's `rope_parameters`, and `rope_theta` with `rope_scaling`."""
        spellings = {}
        for key in ("rope_parameters", "rope_scaling"):
            value = self.data.get(key) or {}
            if not isinstance(value, dict):
                raise self.error(f"{key} must be an object or null, got {value!r}")
            spellings[key] = {("rope_type" if name == "type" else name): item for name, item in value.items()}
        merged = {"rope_theta": self.data["rope_theta"]} if self.data.get("rope_theta") is not None else {}
        for key, values in spellings.items():
            for name, item in values.items():
                if name in merged and merged[name] != item:
                    raise self.error(
                        f"contradictory rope settings: {name} is {merged[name]!r} and, in {key}, {item!r}; drop one"
                    )
                merged[name] = item
        return {"rope_theta": _DEFAULT_THETA, "rope_type": "default"} | merged


def lean_obstacle(data: dict[str, Any], where: str) -> str | None:
    """Why the lean decoder cannot run this config; None where it can. The answer is shown in `TargetInfo.adapter`."""
    if data.get("model_type") not in LEAN_FAMILIES:
        return f"family {data.get('model_type')!r} has no lean decoder"
    rope = Card(data, where).rope()
    checks = {
        f"activation {data.get('hidden_act')!r}": data.get("hidden_act", "silu") == "silu",
        f"rope type {rope['rope_type']!r}": rope["rope_type"] in ("default", "linear", "llama3", "yarn"),
        "partial rotary embedding": rope.get("partial_rotary_factor", data.get("partial_rotary_factor", 1.0)) in (None, 1.0),
        "layers of several kinds": set(data.get("layer_types") or ["full_attention"]) == {"full_attention"},
        "a sliding window": not data.get("use_sliding_window"),
    }
    return next((f"{name} is not in the lean decoder" for name, ok in checks.items() if not ok), None)


def parse_decoder_config(data: dict[str, Any], where: str) -> DecoderConfig:
    """A config that `lean_obstacle` lets through -> `DecoderConfig`; gaps and contradictions name the field."""
    card = Card(data, where)
    heads, hidden = card.integer("num_attention_heads"), card.integer("hidden_size")
    kv_heads = card.integer("num_key_value_heads", heads)
    head_dim = card.integer("head_dim", hidden // heads or None)
    if heads % kv_heads or head_dim % 2:
        raise card.error(
            f"{heads} heads over {kv_heads} K/V heads with head_dim {head_dim}: must divide, head_dim must be even"
        )
    rope, llama3 = read_rope(card)
    family = data["model_type"]
    return DecoderConfig(
        model_type=family,
        hidden_size=hidden,
        intermediate_size=card.integer("intermediate_size"),
        num_layers=card.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=card.integer("vocab_size"),
        rms_norm_eps=number(card, data, "rms_norm_eps", 1e-6),
        context_length=card.integer("max_position_embeddings"),
        rope=rope,
        llama3=llama3,
        tied=card.flag("tie_word_embeddings"),
        attention_bias=card.flag("attention_bias"),
        mlp_bias=family == "llama" and card.flag("mlp_bias"),
        qk_norm=family == "qwen3",
    )


def number(card: Card, values: dict[str, Any], key: str, default: float | None = None) -> float:
    """A positive number of `values`, an object of the card; `default` where it is missing or null."""
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise card.error(f"{key} must be a positive number, got {value!r}")
    return float(value)


def read_rope(card: Card) -> tuple[RopeConfig, Llama3Rope | None]:
    """The rope of a card: default, linear, llama3 or yarn (any other kind is read as yarn: refuse it first)."""
    values = card.rope()
    theta, kind = number(card, values, "rope_theta"), values["rope_type"]
    if kind == "default":
        return RopeConfig(theta), None
    factor = number(card, values, "factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor), None
    original = values.get("original_max_position_embeddings") or card.integer("max_position_embeddings")
    if kind == "llama3":
        low, high = (number(card, values, f"{name}_freq_factor") for name in ("low", "high"))
        if high <= low:
            raise card.error(f"high_freq_factor {high} must be above low_freq_factor {low}")
        return RopeConfig(theta), Llama3Rope(factor, low, high, original)
    rope = RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        beta_fast=number(card, values, "beta_fast", 32.0),
        beta_slow=number(card, values, "beta_slow", 1.0),
        attention_factor=values.get("attention_factor"),
        mscale=values.get("mscale"),
        mscale_all_dim=values.get("mscale_all_dim"),
        truncate=bool(values.get("truncate", True)),
    )
    return rope, None


def eos_token_ids(folder: Path, config: dict[str, Any]) -> frozenset[int]:
    """End tokens of config.json and generation_config.json together (an int, a list, or none in each)."""
    path = Path(folder) / "generation_config.json"
    holders = [(config, "config.json")]
    if path.is_file():
        try:
            generation = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{path}: not valid JSON ({error})") from error
        holders.append((generation if isinstance(generation, dict) else {}, path.name))
    found: set[int] = set()
    for holder, name in holders:
        ids = holder.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise CheckpointError(f"{Path(folder) / name}: eos_token_id must be an integer or a list of them, got {ids!r}")
        found.update(ids)
    return frozenset(found)


def read_target_config(folder: Path, *, fp8_families: tuple[str, ...] = ()) -> dict[str, Any]:
    """config.json of a target; a quantised checkpoint is refused here, since nothing below could read it. Only the loaders of
    `fp8_families` multiply FP8 blocks out."""
    data = read_config(folder)
    if not isinstance(data.get("model_type"), str):
        raise CheckpointError(f"{Path(folder) / 'config.json'}: model_type is missing; expected a Hugging Face model folder")
    method = data.get("quantization_config") or data.get("quantization")
    if method:
        name = method.get("quant_method", "affine") if isinstance(method, dict) else method
        if name == "fp8" and data["model_type"] in fp8_families:
            return data
        raise CheckpointError(
            f"{folder}: quantised weights ({name}) are not read by the torch runtime; use the unquantised "
            "checkpoint, or the MLX runtime for MLX's form"
        )
    return data
