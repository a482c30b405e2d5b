"""Layouts of checkpoints that mlx-lm does not read by itself, put right through the arguments that `load_model` has for it."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3_5_moe

from dspine.common.errors import CheckpointError

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_FLAT_ROPE = ("qwen3_next", "qwen3_moe")  # mlx-lm wants their rotary facts outside `rope_parameters`


def load_options(card: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `mlx_lm.utils.load_model` for the folder with this config.json."""
    kind = str(card.get("model_type"))
    changes: dict[str, Any] = {}
    if kind in ("qwen3_5_text", "qwen3_5_moe_text"):  # one module for a family with and without its vision tower
        kind = changes["model_type"] = kind.removesuffix("_text")
    rope = card.get("rope_parameters")
    if kind in _FLAT_ROPE and isinstance(rope, dict):  # as transformers 5 saves it
        facts = {"rope_theta": rope.get("rope_theta"), "partial_rotary_factor": rope.get("partial_rotary_factor", 0.25)}
        if rope.get("rope_type", "default") != "default":
            facts["rope_scaling"] = rope
        changes |= {key: value for key, value in facts.items() if card.get(key) is None and value is not None}
    if kind == "qwen3_moe":
        _refuse_scaled_rope(card)
        if card.get("num_experts") is None and card.get("num_local_experts") is not None:  # transformers 5 again
            changes["num_experts"] = card["num_local_experts"]
    options: dict[str, Any] = {"model_config": changes} if changes else {}
    if kind == "qwen3_5_moe":
        options["get_model_classes"] = lambda config: (AnyExperts, qwen3_5_moe.ModelArgs)
    return options


def _refuse_scaled_rope(card: dict[str, Any]) -> None:
    rope = card.get("rope_parameters") or card.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointError(
            f"config.json: rotary scaling {kind!r} of a qwen3_moe model, which mlx-lm leaves out (other logits); "
            "expected none; remove it for the model's own context, or use --backend torch"
        )


class AnyExperts(qwen3_5_moe.Model):
    """Qwen3.5-MoE from the official layout (experts of a layer in one tensor), from mlx-lm's own, and from that of
    `transformers`' save_pretrained (a tensor an expert)."""

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Single experts joined, then as mlx-lm does it."""
        return super().sanitize(join_experts(weights))


def join_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """`experts.<i>.{gate,up,down}_proj.weight` -> `experts.gate_up_proj` [E, 2 I, H] and `experts.down_proj` [E, H, I]."""
    out: dict[str, mx.array] = {}
    found: dict[str, dict[str, dict[int, mx.array]]] = {}
    for name, value in weights.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            out[name] = value
        else:
            prefix, expert, part = match.groups()
            found.setdefault(prefix, {}).setdefault(part, {})[int(expert)] = value
    for prefix, parts in found.items():
        gate, up, down = (mx.stack([parts[part][i] for i in range(len(parts[part]))]) for part in ("gate", "up", "down"))
        out[f"{prefix}.gate_up_proj"] = mx.concatenate([gate, up], axis=1)
        out[f"{prefix}.down_proj"] = down
    return out
