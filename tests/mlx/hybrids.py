"""Tiny hybrids from mlx-lm's own classes: [GDN, attention] twice or more, dense or with experts, random float32 weights."""

from __future__ import annotations

import importlib
from copy import copy
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import generate_step

from dspine_mlx.targets import HybridTarget, wrap_model
from tests.mlx.goldens import ids

VOCAB, HIDDEN, LAYERS = 97, 64, 4
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_moe")
MOE = ("qwen3_5_moe", "qwen3_next", "qwen3_moe")
PROMPT = [3, 5, 7, 11, 13, 17, 19]
EXPERTS, PICKS = 8, 2


def hybrid_config(kind: str, **changes: Any) -> dict[str, Any]:
    """config.json as mlx-lm reads it; Qwen3.5 carries its facts in `text_config`."""
    facts: dict[str, Any] = {
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": 64, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": VOCAB, "max_position_embeddings": 1024,
        "tie_word_embeddings": False, "eos_token_id": 2, "attention_bias": False, "full_attention_interval": 2,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    if kind in MOE:
        facts |= {
            "num_experts": EXPERTS, "num_experts_per_tok": PICKS, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": [],
        }  # fmt: skip
    if kind.startswith("qwen3_5"):
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
        facts |= {"model_type": f"{kind}_text", "rope_parameters": rope} | changes
        return {"model_type": kind, "text_config": facts}
    return facts | {"model_type": kind, "rope_theta": 1e4, "partial_rotary_factor": 0.25} | changes


def hybrid_model(kind: str, seed: int = 0, bits: int | None = None, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Weights of a gain that makes greedy text wander and states matter; `bits` quantises every linear and the experts."""
    config = hybrid_config(kind, **changes)
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    model = module.Model(module.ModelArgs.from_dict(config))
    rng = np.random.default_rng(seed)
    weights = []
    for name, value in tree_flatten(model.parameters()):
        weights.append((name, mx.array(_random(rng, name, value.shape).astype(np.float32))))
    model.update(tree_unflatten(weights))
    if bits:
        config["quantization"] = {"group_size": 32, "bits": bits}
        nn.quantize(model, group_size=32, bits=bits)
    model.eval()
    mx.eval(model.parameters())
    return model, config


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.05, 2.0, shape))
    if name.endswith("dt_bias"):
        return rng.normal(-1.0, 1.0, shape)
    if "conv1d" in name:
        return rng.normal(0.0, 0.5, shape)
    if len(shape) == 1:
        return rng.uniform(0.5, 1.5, shape)
    return rng.normal(0.0, 1.5 / shape[-1] ** 0.5, shape)


def hybrid_target(kind: str, seed: int = 0, bits: int | None = None, **changes: Any) -> HybridTarget:
    target = wrap_model(*hybrid_model(kind, seed, bits, **changes), name=f"toy-{kind}")
    assert isinstance(target, HybridTarget)
    return target


def third_party_greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


def started(target: HybridTarget, prompt: list[int], capacity: int = 64, chunk: int = 64) -> Any:
    """A cache after `prompt`."""
    cache = target.make_cache(capacity)
    target.prefill(cache, ids([prompt]), chunk=chunk)
    return cache


def verify(target: HybridTarget, cache: Any, block: list[int], w: int | None = None) -> Any:
    return target.finish(cache, target.begin(cache, ids([block])), w or len(block))


def forked(cache: Any) -> Any:
    """An independent copy of a cache, pending tokens included (slice assignment writes into the array object itself)."""
    layers = [copy(layer) for layer in cache.layers]
    for layer in layers:
        layer.keys, layer.values = layer.keys[...], layer.values[...]
    return replace(cache, layers=layers)


def contents(cache: Any) -> list[np.ndarray]:
    """Everything a cache holds: states, windows, live K/V rows."""
    cache.check_integrity()
    arrays = [array for array in (cache.states, cache.windows) if array is not None]
    arrays += [array[..., : cache.length, :] for layer in cache.layers for array in (layer.keys, layer.values)]
    return [np.array(array) for array in arrays]


def assert_same(cache: Any, other: Any, tolerance: float = 1e-5) -> None:
    """Relative Frobenius error of everything two caches hold: one element near zero says nothing about a whole layer."""
    assert cache.length == other.length
    for got, want in zip(contents(cache), contents(other), strict=True):
        assert got.shape == want.shape
        assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)
