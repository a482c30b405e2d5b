"""The frozen target during training: a plain packed forward that returns features and the final-normed hidden states.

Reads Llama and Qwen3 checkpoints by their Hugging Face names; Qwen3.5-MoE hybrids are in `hybrid_target`. Inference-shaped
decoders (caches, graphs) live in `dspine_cuda/targets/`; here all that matters is throughput over packed rows with a document
mask.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.checkpoints import read_header
from dspine.common.configs import RopeConfig, read_config
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.protocols import TargetInfo
from dspine.common.rope import rope_tables
from dspine_cuda.drafter import rotate
from dspine_cuda.training.hybrid_shape import read_shape
from dspine_cuda.training.hybrid_target import HYBRID_FAMILIES, HybridFrozenTarget, hybrid_facts, load_hybrid_target

if TYPE_CHECKING:
    from dspine_cuda.training.generic_target import GenericFrozenTarget

DENSE_FAMILIES = ("llama", "qwen3")
FAMILIES = (*DENSE_FAMILIES, *HYBRID_FAMILIES)


@dataclass(frozen=True)
class TargetShape:
    """What the trainer needs to know of a target's config.json."""

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    attention_bias: bool


def target_shape(folder: Path) -> TargetShape:
    """Read a target's config.json; a family or rotary embedding the trainer does not know is an error."""
    data = read_config(folder)
    family = data.get("model_type")
    if family not in FAMILIES:
        raise DSpineError(f"{folder}: cannot train for a target of type {family!r}; known: {', '.join(FAMILIES)}")
    if family in HYBRID_FAMILIES:
        return TargetShape(**hybrid_facts(read_shape(folder)))
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise DSpineError(f"{folder}: the trainer knows the default rotary embedding only, the target has {kind!r}")
    theta = data.get("rope_theta") or rope.get("rope_theta")
    if theta is None:
        raise CheckpointError(f"{folder}: config.json has no rope_theta")
    heads, hidden = data["num_attention_heads"], data["hidden_size"]
    return TargetShape(
        model_type=family,
        num_layers=data["num_hidden_layers"],
        hidden_size=hidden,
        intermediate_size=data["intermediate_size"],
        num_heads=heads,
        num_kv_heads=data.get("num_key_value_heads") or heads,
        head_dim=data.get("head_dim") or hidden // heads,
        vocab_size=data["vocab_size"],
        rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(data.get("max_position_embeddings", 2048)),
        rope=RopeConfig(theta=float(theta)),
        attention_bias=bool(data.get("attention_bias", False)),
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face folder by name (without `model.`), as stored."""
    from safetensors.torch import load_file

    index = Path(folder) / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    weights: dict[str, Tensor] = {}
    for name in names:
        read_header(Path(folder) / name)  # a damaged or missing file is one clear error
        weights |= {key.removeprefix("model."): tensor for key, tensor in load_file(Path(folder) / name).items()}
    return weights


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Attention under a boolean mask. K/V heads are repeated first: with grouped heads AND a mask torch has no fused
    kernel on CUDA and falls back to holding all scores."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class FrozenTarget:
    """Embedding, decoder layers and LM head in one dtype on one device; also what `TorchDrafter` asks of a target."""

    def __init__(
        self, shape: TargetShape, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype, name: str
    ) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.weights = {name: tensor.to(device, dtype) for name, tensor in weights.items()}
        self.embedding = self._weight("embed_tokens.weight")
        self.head_matrix = self.weights.get("lm_head.weight", self.embedding)
        cos, sin = rope_tables(shape.rope, shape.head_dim, min(shape.max_position_embeddings, 32_768))
        self._cos, self._sin = (torch.from_numpy(t).to(device, dtype) for t in (cos, sin))
        self._fast_layer = self._layer  # replaced by `compile`
        self.info = TargetInfo(
            name, shape.model_type, shape.num_layers, shape.hidden_size, shape.vocab_size, shape.max_position_embeddings,
            frozenset(), str(dtype).removeprefix("torch."), str(device), "training: packed forward without a cache",
        )  # fmt: skip
        self._block_linears = [self._layer_weights(index) for index in range(shape.num_layers)]

    def _weight(self, name: str) -> Tensor:
        if name not in self.weights:
            raise CheckpointError(
                f"the target has no tensor {name}; its checkpoint does not fit model type {self.shape.model_type}"
            )
        return self.weights[name]

    def _layer_weights(self, index: int) -> dict[str, Tensor | None]:
        """Tensors of one layer; biases and q/k norms only where the family has them."""
        required = [f"self_attn.{n}_proj.weight" for n in "qkvo"] + [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
        required += ["input_layernorm.weight", "post_attention_layernorm.weight"]
        optional = [f"self_attn.{n}_proj.bias" for n in "qkvo"] + ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        layer: dict[str, Tensor | None] = {name: self._weight(f"layers.{index}.{name}") for name in required}
        return layer | {name: self.weights.get(f"layers.{index}.{name}") for name in optional}

    def compile(self) -> None:
        """Run `features` under torch.compile from now on: one graph, shared by all layers."""
        self._fast_layer = torch.compile(self._layer, dynamic=False)

    @torch.no_grad()
    def features(self, tokens: Tensor, positions: Tensor, mask: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Packed forward: tokens and positions int [B, S], mask bool [B, 1, S, S] -> the outputs of layers `taps`
        concatenated [B, S, taps*H], and the final-normed hidden states [B, S, H]."""
        return self._layers(self._fast_layer, tokens, positions, mask, taps)

    @torch.no_grad()
    def eager_features(self, tokens: Tensor, positions: Tensor, mask: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """`features` for shapes that change from call to call."""
        return self._layers(self._layer, tokens, positions, mask, taps)

    def _layers(
        self, run_layer: Callable[..., Tensor], tokens: Tensor, positions: Tensor, mask: Tensor, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        x, cos, sin = self.embedding[tokens], self._cos[positions], self._sin[positions]
        outputs: dict[int, Tensor] = {}
        for index, layer in enumerate(self._block_linears):
            x = run_layer(x, cos, sin, mask, layer)
            if index in taps:
                outputs[index] = x
        return torch.cat([outputs[tap] for tap in taps], dim=-1), self._norm(x, self.weights["norm.weight"])

    @torch.no_grad()
    def decode(self, tokens: Tensor, positions: Tensor, attends: list[Callable[[Tensor, Tensor, Tensor], Tensor]]) -> Tensor:
        """One token a row over caches that `attends` (one a layer: q, k, v -> mixed, [B, heads, T, hd]) holds: tokens and
        positions int [B, T] -> final-normed hidden [B, T, H]."""
        x, cos, sin = self.embedding[tokens], self._cos[positions], self._sin[positions]
        for attend, layer in zip(attends, self._block_linears, strict=True):
            x = self._layer(x, cos, sin, attend, layer)
        return self._norm(x, self.weights["norm.weight"])

    def _layer(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any, layer: dict[str, Any]) -> Tensor:
        x = x + self._attention(self._norm(x, layer["input_layernorm.weight"]), layer, cos, sin, mask)
        normed = self._norm(x, layer["post_attention_layernorm.weight"])
        gate = F.silu(F.linear(normed, layer["mlp.gate_proj.weight"]))
        return x + F.linear(gate * F.linear(normed, layer["mlp.up_proj.weight"]), layer["mlp.down_proj.weight"])

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.rms_norm_eps)

    def _attention(self, x: Tensor, layer: dict[str, Any], cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        heads = []
        for name, count in (("q", self.shape.num_heads), ("k", self.shape.num_kv_heads), ("v", self.shape.num_kv_heads)):
            part = F.linear(x, layer[f"self_attn.{name}_proj.weight"], layer[f"self_attn.{name}_proj.bias"])
            part = part.unflatten(-1, (count, self.shape.head_dim))
            norm = layer.get(f"self_attn.{name}_norm.weight")
            part = part if norm is None else self._norm(part, norm)
            heads.append(part.transpose(1, 2))
        query, key, value = rotate(heads[0], cos, sin), rotate(heads[1], cos, sin), heads[2]
        mixed = mask(query, key, value) if callable(mask) else masked_attention(query, key, value, mask)
        return F.linear(mixed.transpose(1, 2).flatten(-2), layer["self_attn.o_proj.weight"], layer["self_attn.o_proj.bias"])

    def bind_features(self, layer_ids: Any) -> None:
        """Taps are arguments of `features` here; nothing to remember."""

    def embed(self, tokens: Tensor) -> Tensor:
        """int [...] -> [..., H]."""
        return self.embedding[tokens]

    def head(self, hidden: Tensor) -> Tensor:
        """Final-normed [..., H] -> logits float32 [..., V]."""
        return F.linear(hidden, self.head_matrix).float()

    def head_rows(self, ids: Tensor) -> Tensor:
        """LM-head rows of `ids` int [...] -> [..., H]."""
        return self.head_matrix[ids]

    def head_weight(self) -> np.ndarray:
        """LM head as float32 NumPy [V, H]."""
        return self.head_matrix.float().cpu().numpy()


def load_frozen_target(
    folder: Path, device: torch.device, dtype: torch.dtype
) -> FrozenTarget | HybridFrozenTarget | GenericFrozenTarget:
    """Load a target folder for training: by the trainer's own forward where it knows the family, else by `transformers`."""
    data = read_config(folder)
    family, rope = data.get("model_type"), data.get("rope_parameters") or data.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if family not in FAMILIES or (family not in HYBRID_FAMILIES and kind != "default"):
        from dspine_cuda.training.generic_target import GenericFrozenTarget

        reason = f"model type {family!r}" if family not in FAMILIES else f"rotary embedding {kind!r}"
        return GenericFrozenTarget(folder, device, dtype, reason)
    shape = target_shape(folder)
    if shape.model_type in HYBRID_FAMILIES:
        return load_hybrid_target(folder, shape, device, dtype)
    return FrozenTarget(shape, read_weights(folder), device, dtype, str(folder))


def load_tokenizer(folder: Path) -> Any:
    """The target's Hugging Face tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
