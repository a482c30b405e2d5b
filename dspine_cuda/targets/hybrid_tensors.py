"""Tensors of hybrid and mixture-of-experts checkpoints: prefixes, towers to skip, both layouts of the experts, FP8 blocks."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from dspine.common.errors import CheckpointError
from dspine_cuda.targets.checkpoint import TargetTensors
from dspine_cuda.targets.hybrid_config import FULL, HybridConfig

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")  # the longest that fits wins
_SKIPPED = re.compile(r"(model\.)?(visual|mtp|vision_tower)\.")
_HEAD = re.compile(r"(language_model\.|model\.language_model\.)?lm_head\.")
_SCALE = "_scale_inv"  # of FP8 weights, one a block


def canonical(name: str) -> str | None:
    """The name without its model prefix: `model.…` or `lm_head.…`; None for the vision tower and the MTP head."""
    if _SKIPPED.match(name):
        return None
    head = _HEAD.match(name)
    if head:
        return name.removeprefix("model.").removeprefix("language_model.")
    prefix = next((p for p in _PREFIXES if name.startswith(p)), None)
    return name if prefix is None else "model." + name[len(prefix) :]


class HybridTensors(TargetTensors):
    """Tensors under canonical names (`model.layers.0.…`), whatever prefix the file has.

    FP8 weights (`weight` float8 beside `weight_scale_inv` float32, one scale a block) are multiplied out as they are read;
    `block` is the block's shape in config.json.
    """

    def __init__(self, folder: Path, block: tuple[int, int] | None = None) -> None:
        super().__init__(folder)
        self.block = block
        self._stored: dict[str, str] = {}
        for name in self.shapes:
            known = canonical(name)
            if known is None:
                continue
            if known in self._stored:
                raise CheckpointError(f"{folder}: {self._stored[known]} and {name} are the same tensor twice; drop one")
            self._stored[known] = name
        self.shapes = {known: self.shapes[name] for known, name in self._stored.items()}

    def read(self, name: str) -> Tensor:
        """One tensor on the CPU: as stored, FP8 multiplied out to float32."""
        tensor = super().read(self._stored[name])
        scale = _scale_name(name)
        if scale not in self.shapes:
            if tensor.dtype.itemsize == 1:
                raise CheckpointError(f"{self.folder}: {name} is {tensor.dtype}, and {scale} is missing")
            return tensor
        assert self.block is not None  # `check_hybrid` lets scales through only with one
        return _multiplied_out(tensor, super().read(self._stored[scale]), self.block, name)

    def check_hybrid(self, config: HybridConfig, tied: bool) -> None:
        """Names and shapes must be exactly what `config` asks for; block scales are counted with their weights."""
        expected = expected_tensors(config, self.fused_layers(config)) | (
            {} if tied else {"lm_head.weight": (config.vocab_size, config.hidden_size)}
        )
        scales = {_scale_name(name) for name in expected} if self.block is not None else set()
        self.check(expected, optional=frozenset(scales | {"lm_head.weight"}))

    def fused_layers(self, config: HybridConfig) -> frozenset[int]:
        """MoE layers whose experts are stored as one tensor a projection."""
        return frozenset(i for i in config.moe_layers if f"model.layers.{i}.mlp.experts.gate_up_proj" in self.shapes)

    def experts(self, layer: int, config: HybridConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2 I, H] and down [E, H, I] of one layer, from either layout."""
        prefix, moe = f"model.layers.{layer}.mlp.experts.", config.moe
        if prefix + "gate_up_proj" in self.shapes:
            return self.read(prefix + "gate_up_proj").to(dtype), self.read(prefix + "down_proj").to(dtype)

        def read(expert: int, name: str) -> Tensor:
            return self.read(f"{prefix}{expert}.{name}_proj.weight").to(dtype)

        experts = range(moe.experts)  # type: ignore[union-attr]
        gate_up = torch.stack([torch.cat([read(i, "gate"), read(i, "up")]) for i in experts])
        return gate_up, torch.stack([read(i, "down") for i in experts])


def _scale_name(name: str) -> str:
    return name + _SCALE


def _multiplied_out(tensor: Tensor, scale: Tensor, block: tuple[int, int], name: str) -> Tensor:
    """[..., rows, columns] float8 times its block's scale [..., ceil(rows / block), ceil(columns / block)] -> float32."""
    rows, columns = tensor.shape[-2:]
    fits = (*tensor.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != fits:
        raise CheckpointError(
            f"{name}: its scales must have shape {list(fits)} for blocks of {list(block)}, got {list(scale.shape)}"
        )
    wide = scale.to(torch.float32).repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return tensor.to(torch.float32) * wide[..., :rows, :columns]


def expected_tensors(config: HybridConfig, fused: frozenset[int]) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor but the LM head; `fused`: the layers whose experts are stacked."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    for index, kind in enumerate(config.kinds):
        layer = f"model.layers.{index}."
        parts = {f"{name}.weight": (config.hidden_size,) for name in ("input_layernorm", "post_attention_layernorm")}
        parts |= _attention_shapes(config) if kind == FULL else _gdn_shapes(config)
        parts |= _moe_shapes(config, index in fused) if config.sparse[index] else _mlp_shapes(config)
        shapes |= {layer + name: shape for name, shape in parts.items()}
    return shapes


def _attention_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    hidden, size = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    return {
        "self_attn.q_proj.weight": (queries * (2 if config.gated_attention else 1), hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (size,),
        "self_attn.k_norm.weight": (size,),
    }


def _gdn_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    layout, hidden = config.gdn, config.hidden_size
    heads, values = layout.value_heads, layout.value_heads * layout.value_dim  # type: ignore[union-attr]
    shapes = {
        "conv1d.weight": (layout.channels, 1, config.conv_width),  # type: ignore[union-attr]
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (layout.value_dim,),  # type: ignore[union-attr]
        "out_proj.weight": (hidden, values),
    }
    if config.grouped_projections:
        shapes |= {"in_proj_qkvz.weight": (layout.channels + values, hidden), "in_proj_ba.weight": (2 * heads, hidden)}  # type: ignore[union-attr]
    else:
        rows = {"qkv": layout.channels, "z": values, "b": heads, "a": heads}  # type: ignore[union-attr]
        shapes |= {f"in_proj_{name}.weight": (count, hidden) for name, count in rows.items()}
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _mlp_shapes(config: HybridConfig, inner: int = 0, prefix: str = "mlp.") -> dict[str, tuple[int, ...]]:
    inner, hidden = inner or config.intermediate_size, config.hidden_size
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def _moe_shapes(config: HybridConfig, fused: bool) -> dict[str, tuple[int, ...]]:
    moe, hidden = config.moe, config.hidden_size
    experts, inner, shared = moe.experts, moe.inner, moe.shared_inner  # type: ignore[union-attr]
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts, hidden)}
    if fused:
        shapes |= {"mlp.experts.gate_up_proj": (experts, 2 * inner, hidden), "mlp.experts.down_proj": (experts, hidden, inner)}
    else:
        for i in range(experts):
            shapes |= _mlp_shapes(config, inner, f"mlp.experts.{i}.")
    if shared:
        shapes |= {"mlp.shared_expert_gate.weight": (1, hidden)} | _mlp_shapes(config, shared, "mlp.shared_expert.")
    return shapes


def refuse_surplus(tensors: HybridTensors, tied: bool) -> None:
    """A tied card beside an LM head that differs from the embedding is a contradiction."""
    if tied and "lm_head.weight" in tensors.shapes:
        if not torch.equal(tensors.read("lm_head.weight"), tensors.read("model.embed_tokens.weight")):
            raise CheckpointError(
                f"{tensors.folder}: config.json ties the LM head to the embedding, but lm_head.weight differs from it; "
                f"set tie_word_embeddings to false or drop the tensor"
            )
