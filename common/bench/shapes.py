"""Tensors of a target's checkpoint by name, from its config.json alone: the families that presets come from.

Names and layouts are the published ones, so a folder of random weights loads like any other (`formats`).
"""

from __future__ import annotations

from typing import Any

from dspine.common.errors import DSpineError

Shapes = dict[str, tuple[int, ...]]
FAMILIES = ("llama", "qwen3", "qwen3_5_moe")


def target_tensors(config: dict[str, Any]) -> Shapes:
    """Name -> shape of every tensor of a checkpoint with this config.json. DSpineError for a family that is not known here."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise DSpineError(f"random weights: model_type {family!r} is not known; known: {', '.join(FAMILIES)}")
    text = config.get("text_config", config)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    stem = "model.language_model." if "text_config" in config else "model."
    shapes: Shapes = {f"{stem}embed_tokens.weight": (vocab, hidden), f"{stem}norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
    for index, kind in enumerate(kinds):
        layer = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        layer |= _gdn(text) if kind == "linear_attention" else _attention(text, family)
        layer |= _experts(text) if "num_experts" in text else _mlp(hidden, text["intermediate_size"], "mlp.")
        shapes |= {f"{stem}layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention(text: dict[str, Any], family: str) -> Shapes:
    hidden, size = text["hidden_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * size, text["num_key_value_heads"] * size
    gate = 2 if text.get("attn_output_gate") else 1  # each query head carries a gate behind it
    shapes: Shapes = {
        "self_attn.q_proj.weight": (queries * gate, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    if family != "llama":
        shapes |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
    return shapes


def _gdn(text: dict[str, Any]) -> Shapes:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    values = heads * text["linear_value_head_dim"]
    channels = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + values
    shapes: Shapes = {
        "conv1d.weight": (channels, 1, text["linear_conv_kernel_dim"]),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (text["linear_value_head_dim"],),
        "out_proj.weight": (hidden, values),
        "in_proj_qkv.weight": (channels, hidden),
        "in_proj_z.weight": (values, hidden),
        "in_proj_b.weight": (heads, hidden),
        "in_proj_a.weight": (heads, hidden),
    }
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _mlp(hidden: int, inner: int, prefix: str) -> Shapes:
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def _experts(text: dict[str, Any]) -> Shapes:
    hidden, count, inner = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    shapes: Shapes = {
        "mlp.gate.weight": (count, hidden),
        "mlp.experts.gate_up_proj": (count, 2 * inner, hidden),
        "mlp.experts.down_proj": (count, hidden, inner),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }
    return shapes | _mlp(hidden, text["shared_expert_intermediate_size"], "mlp.shared_expert.")


def spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """(mean, standard deviation) of a tensor's random numbers: rows keep their length through a layer, so that nothing
    overflows however deep the target is, and decays of linear attention look like trained ones."""
    last = name.rpartition("layers.")[2]
    if "norm" in last and len(shape) == 1:
        return (1.0, 0.02) if "linear_attn" in name or "language_model" not in name else (0.0, 0.02)  # those multiply by 1 + w
    if name.endswith("A_log"):
        return 1.5, 0.5
    if name.endswith("dt_bias"):
        return -4.0, 0.5
    if name.endswith("embed_tokens.weight"):
        return 0.0, 1.0
    if len(shape) == 1:
        return 0.0, 0.02
    return 0.0, float(shape[-1]) ** -0.5
