"""Golden rounds of the `dflash` package from PyPI (0.1.0), its torch and its MLX model on the same random weights.

    PYTHONPATH=UNPACKED_WHEEL python -m tests.goldens.make.make_dflash tests/goldens

Each case is a folder like the other goldens: config.json, model.safetensors, target.npz, io.npz. The MLX model does not limit
the distance inside a block, so it stands beside the torch model only where no window is shorter than a block. After a round
that adds ONE context row its rotating cache holds keys in ring order, while its mask counts them as if in order: that round
(number 1 here) differs in sliding layers, and its array is left out by the tests.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import DynamicCache, Qwen3Config

FULL, SLIDING = "full_attention", "sliding_attention"
V, H, MASK = 64, 24, 63
ACCEPTED = (0, 3, 1)  # drafts accepted after rounds 0..2
PROMPT = 9
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 4}


def card(
    layer_types: list[str], block: int, window: int | None, rope: dict[str, Any], taps: list[int], **more: Any
) -> dict[str, Any]:
    nested = {"mask_token_id": MASK, "target_layer_ids": taps, "block_size": block, **more.pop("nested", {})}
    name = "DFlash2DraftModel" if "selector_rank" in nested else "DFlashDraftModel"
    return {
        "architectures": [name], "model_type": "qwen3", "hidden_size": H, "intermediate_size": 40,
        "num_hidden_layers": len(layer_types), "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-6, "vocab_size": V, "max_position_embeddings": 256, "attention_bias": False,
        "attention_dropout": 0.0, "hidden_act": "silu", "rope_parameters": rope, "num_target_layers": 8,
        "layer_types": layer_types, "sliding_window": window, "use_sliding_window": window is not None,
        "dflash_config": nested, **more,
    }  # fmt: skip


CASES = {
    "pypi_yarn": card([FULL] * 3, 6, None, YARN, [0, 7]),
    "pypi_mixed": card([SLIDING, FULL], 5, 7, PLAIN, [1, 4, 6]),
    "pypi_narrow2": card([SLIDING, FULL], 6, 3, PLAIN, [2, 5], nested=DFLASH2),
    "pypi_open2": card(
        [SLIDING, SLIDING], 6, 8, PLAIN, [2, 5], is_causal=False,
        nested=DFLASH2 | {"output_multiplier": 0.5, "final_logit_softcapping": 6.0},
    ),
}  # fmt: skip


def torch_model(config: dict[str, Any], seed: int) -> Any:
    """The authors' model; every parameter random, norms around one."""
    from dflash.model import DFlash2DraftModel, DFlashDraftModel

    kind = DFlash2DraftModel if "DFlash2" in config["architectures"][0] else DFlashDraftModel
    flat = {key: value for key, value in config.items() if key != "architectures"}
    model = kind(Qwen3Config(**flat, attn_implementation="sdpa")).eval().to(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            around = 1.0 if "norm" in name else 0.0
            parameter.copy_(around + noise * (0.3 if parameter.dim() == 1 else 1.3 / parameter.shape[-1] ** 0.5))
    return model


def torch_rounds(
    model: Any, embed: torch.Tensor, head: torch.Tensor, features: torch.Tensor, starts: list[int], anchors: Any
) -> dict[str, Any]:
    """hidden of every round, context in the draft cache, the block's own rows cropped away after each."""
    block, cache, done = model.block_size, DynamicCache(config=model.config), 0
    cache.activate_past_recording()
    output = torch.nn.Linear(H, V, bias=False)
    output.weight.data = head
    out: dict[str, list[Any]] = {"hidden": [], "logits": []}
    for start, anchor in zip(starts, anchors, strict=True):
        ids = torch.full((1, block), MASK)
        ids[0, 0] = int(anchor)
        hidden = model(
            target_hidden=features[:, done:start], noise_embedding=embed[ids],
            position_ids=torch.arange(done, start + block)[None], past_key_values=cache, use_cache=True,
        )  # fmt: skip
        cache.crop(start - cache.get_seq_length())
        done = start
        rows = hidden[:, 1:]
        out["hidden"].append(hidden[0])
        out["logits"].append(model.compute_logits(rows, output)[0])
        if hasattr(model, "candidate_selector"):
            first = torch.tensor([int(anchor)])
            out.setdefault("greedy_path", []).append(model.propose(rows, first, output, 0.0)[0][0].int())
            torch.manual_seed(int(anchor))
            path, candidates, q = model.propose(rows, first, output, 0.8)
            for name, value in (("sampled_path", path), ("sampled_candidates", candidates), ("sampled_q", q)):
                out.setdefault(name, []).append(value[0].int() if value.dtype is torch.int64 else value[0])
    return {name: torch.stack(values).numpy() for name, values in out.items()}


def mlx_rounds(
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    embed: np.ndarray,
    head: np.ndarray,
    features: np.ndarray,
    starts: list[int],
    anchors: Any,
) -> dict[str, Any]:
    """The same rounds by the package's MLX model."""
    import mlx.core as mx
    from dflash import model_mlx
    from mlx import nn

    nested = config["dflash_config"]
    copied = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
              "vocab_size", "rms_norm_eps", "max_position_embeddings", "num_target_layers", "sliding_window")  # fmt: skip
    settings = {key: config[key] for key in copied} | {key: value for key, value in nested.items() if key != "target_layer_ids"}
    kind = model_mlx.DFlash2DraftModel if "selector_rank" in nested else model_mlx.DFlashDraftModel
    model = kind(
        model_mlx.DFlashConfig(
            **settings,
            target_layer_ids=tuple(nested["target_layer_ids"]),
            layer_types=tuple(config["layer_types"]),
            rope_theta=config["rope_parameters"]["rope_theta"],
            rope_scaling=config["rope_parameters"],
            is_causal=config.get("is_causal"),
        )  # fmt: skip
    )
    renamed = {f"{n}.weight" if n.endswith("codebook") else n: mx.array(w) for n, w in weights.items()}
    model.load_weights(list(renamed.items()), strict=True)
    table, output = nn.Embedding(V, H), nn.Linear(H, V, bias=False)
    table.weight, output.weight = mx.array(embed), mx.array(head)
    target = type("Target", (), {"embed_tokens": table, "lm_head": output})()
    model.bind(target)
    cache, done, rows = model.make_cache(), 0, []
    for start, anchor in zip(starts, anchors, strict=True):
        ids = mx.array([[int(anchor)] + [MASK] * (nested["block_size"] - 1)])
        rows.append(np.array(model.hidden_states(ids, mx.array(features[:, done:start]), cache)[0]))
        done = start
    return {"hidden_mlx": np.stack(rows)}


def main() -> None:
    torch.set_num_threads(1)
    for seed, (name, config) in enumerate(CASES.items()):
        folder = Path(sys.argv[1]) / name
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(seed)
        model = torch_model(config, seed)
        embed, head = (rng.normal(size=(V, H)).astype(np.float32) for _ in range(2))
        starts = [PROMPT]
        for accepted in ACCEPTED:
            starts.append(starts[-1] + accepted + 1)
        features = rng.normal(size=(1, starts[-1], len(config["dflash_config"]["target_layer_ids"]) * H)).astype(np.float32)
        anchors = rng.integers(0, V - 1, size=len(starts)).astype(np.int32)
        weights = {n.replace("codebook.weight", "codebook"): t.detach().clone() for n, t in model.state_dict().items()}
        with torch.no_grad():
            out = torch_rounds(
                model, torch.from_numpy(embed), torch.from_numpy(head), torch.from_numpy(features), starts, anchors
            )
        block, window = config["dflash_config"]["block_size"], config["sliding_window"]
        if window is None or window >= block:
            as_numpy = {n: t.numpy() for n, t in weights.items()}
            out |= mlx_rounds(config, as_numpy, embed, head, features, starts, anchors)
            print(f"{name}: torch against MLX {np.abs(out['hidden'] - out['hidden_mlx']).max():.1e}")
        out |= {"features": features[0], "anchors": anchors, "starts": np.array(starts, dtype=np.int32)}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_file(weights, folder / "model.safetensors")
        np.savez_compressed(folder / "target.npz", embed_tokens=embed, lm_head=head)
        np.savez_compressed(folder / "io.npz", **out)


if __name__ == "__main__":
    main()
