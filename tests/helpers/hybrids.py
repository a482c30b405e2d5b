"""Tiny hybrid and mixture-of-experts models of `transformers` with random weights, saved as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dspine.common.protocols import Proposal
from tests.helpers.models import VOCAB

MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
DENSE = {"intermediate_size": 80}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": GDN | DENSE,
    "qwen3_5_moe_text": GDN | MOE,
    "qwen3_next": GDN | MOE | DENSE,
    "qwen3_moe": {key: MOE[key] for key in MOE if "shared" not in key} | DENSE,
}


def hybrid_config(family: str, **changes: Any) -> Any:
    """5 layers (GDN, GDN, GDN, attention, GDN by default), hidden 32, 4 heads of 16 over 2 K/V heads; `changes` win."""
    facts: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 0, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    }  # fmt: skip
    if family == "qwen3_moe":
        facts["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000.0}
    return AutoConfig.for_model(family, **(facts | FAMILIES[family] | changes))


def hybrid_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Random float32 weights of every kind: norms, decays and biases too, so that leaving one out shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(hybrid_config(family, **changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3.0, 1.5)
            elif name.endswith("dt_bias"):
                parameter.normal_(0.0, 1.0)
            elif name.endswith("linear_attn.norm.weight") or (family == "qwen3_moe" and "norm" in name):
                parameter.uniform_(0.5, 1.5)
            elif "norm" in name:
                parameter.normal_(0.0, 0.3)
            elif "conv1d" in name:
                parameter.normal_(0.0, 0.6)
            elif name.endswith("mlp.gate.weight"):
                parameter.normal_(0.0, 0.5)
    return model.requires_grad_(False)


def save_hybrid(folder: Path, family: str, *, seed: int = 0, shards: bool = False, **changes: Any) -> PreTrainedModel:
    """Save a tiny model into `folder` and return it."""
    model = hybrid_model(family, seed, **changes)
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "1GB")
    return model


def rename_tensors(source: Path, folder: Path, rename: Any, extra: dict[str, torch.Tensor] | None = None) -> Path:
    """A copy of a one-file checkpoint with its tensors renamed (None drops one) and more of them added."""
    folder.mkdir()
    tensors = {rename(name): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    tensors.pop(None, None)
    save_file(tensors | (extra or {}), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


def nest_config(folder: Path, model_type: str) -> None:
    """Put a flat config.json under `text_config`, as the official multimodal cards have it."""
    path = folder / "config.json"
    text = json.loads(path.read_text())
    outer = {"model_type": model_type, "architectures": ["Any"], "vision_config": {"depth": 1}, "text_config": text}
    path.write_text(json.dumps(outer))


def per_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fused experts as one matrix an expert and projection."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for i, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                prefix = name.removesuffix("gate_up_proj")
                out |= {f"{prefix}{i}.gate_proj.weight": gate.clone(), f"{prefix}{i}.up_proj.weight": up.clone()}
        elif name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            out |= {f"{prefix}{i}.down_proj.weight": t.clone() for i, t in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


def fused_experts(tensors: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """The reverse of `per_expert`."""
    out = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name or "_proj.weight" not in name}
    layers = {name.split("experts.")[0] for name in tensors if ".mlp.experts.0." in name}
    for prefix in layers:

        def part(name: str, prefix: str = prefix) -> torch.Tensor:
            return torch.stack([tensors[f"{prefix}experts.{i}.{name}_proj.weight"] for i in range(experts)])

        out[prefix + "experts.gate_up_proj"] = torch.cat([part("gate"), part("up")], dim=1)
        out[prefix + "experts.down_proj"] = part("down")
    return out


def reference(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits [B, T, V] and every layer's output, of `transformers` in float64: in float32 it is no closer to the truth than
    the decoder under test. (Its grouped product has no float64: experts run one by one.)"""
    outputs: list[torch.Tensor] = []
    model.set_experts_implementation("eager")
    hooks = [layer.register_forward_hook(lambda module, inputs, output: outputs.append(output)) for layer in model.model.layers]
    model.double()
    with torch.no_grad():
        logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    model.float()
    return logits.float(), [output.float() for output in outputs]


class ForcedDrafter:
    """Drafts the right text `text` after `prompt`, put wrong at the places that `wrong(position)` names."""

    def __init__(self, prompt: list[int], text: list[int], block: int, wrong: Any) -> None:
        self.prompt, self.text, self.wrong = prompt, text, wrong
        self.config = SimpleNamespace(block_size=block, num_proposals=block - 1, method="dflash")
        self.info: dict[str, Any] = {}
        self.rounds = 0

    def make_cache(self, capacity: int) -> dict[str, int]:
        return {"length": 0}

    def commit(self, cache: dict[str, int], features: torch.Tensor) -> None:
        cache["length"] += features.shape[1]

    def propose(self, cache: dict[str, int], anchor: torch.Tensor, request: Any) -> Proposal:
        self.rounds += 1
        start = cache["length"] - len(self.prompt) + 1
        rows = [self.text[i] if i < len(self.text) else 0 for i in range(start, start + self.config.num_proposals)]
        rows = [(token + bool(self.wrong(i))) % VOCAB for i, token in enumerate(rows, start=start)]
        device = anchor.device
        return Proposal(torch.tensor([rows], dtype=torch.int32, device=device), torch.ones(1, dtype=torch.bool, device=device))
