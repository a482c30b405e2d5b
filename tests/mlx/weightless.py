"""Pairs of real shapes without weights: every tensor is one number, broadcast. Graphs can be built and counted, not run."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from dspine.common import registry
from dspine.common.acceptance import accept_greedy
from dspine.common.configs import parse_drafter_config
from dspine.common.protocols import DraftRequest, TargetInfo
from dspine.kernels_metal._launch import built_by
from dspine_mlx import ops
from dspine_mlx.arrays import device_name
from dspine_mlx.drafter import DrafterModel, MlxDrafter
from dspine_mlx.targets.families import FAMILIES
from dspine_mlx.targets.plain import PlainTarget
from tests.mlx.graphs import nodes

CONTEXT = 400
SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 1e5, "tie_word_embeddings": True,
}  # fmt: skip


def hybrid(
    hidden: int, layers: int, vocab: int, heads: tuple[int, int, int], linear: tuple[int, int, int], experts: Any
) -> dict:
    """A Qwen3.5-MoE card: (heads, K/V heads, size), (key heads, value heads, size), (experts, picks, inner size)."""
    facts = {
        "model_type": "qwen3_5_moe_text", "hidden_size": hidden, "num_hidden_layers": layers, "vocab_size": vocab,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": heads[2], "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "full_attention_interval": 4, "tie_word_embeddings": False, "attention_bias": False,
        "linear_num_key_heads": linear[0], "linear_num_value_heads": linear[1], "linear_key_head_dim": linear[2],
        "linear_value_head_dim": linear[2], "linear_conv_kernel_dim": 4, "intermediate_size": hidden,
        "num_experts": experts[0], "num_experts_per_tok": experts[1], "moe_intermediate_size": experts[2],
        "shared_expert_intermediate_size": experts[2], "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        },
    }  # fmt: skip
    return {"model_type": "qwen3_5_moe", "text_config": facts}


PAIRS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {"target": SMOLLM2, "layers": 5, "block": 16, "rank": 128, "message": 64, "taps": 4},
    "hybrid-tiny": {
        "target": hybrid(256, 8, 8192, (4, 2, 64), (4, 8, 64), (32, 4, 80)),
        "layers": 3, "block": 16, "rank": 128, "message": 64, "taps": 4,
    },
    "Qwen3.6-35B-A3B, 4 bits": {
        "target": hybrid(2048, 40, 248_320, (16, 2, 256), (16, 32, 128), (256, 8, 512)),
        "bits": 4, "layers": 5, "block": 16, "rank": 512, "message": 256, "taps": 5,
    },
}  # fmt: skip


_compute = mx.eval


def one_number_of(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """An array that takes the memory of one number."""
    made = mx.broadcast_to(mx.zeros((), dtype=dtype), shape)
    _compute(made)
    return made


def one_number(array: mx.array) -> mx.array:
    """An array of this shape and dtype that takes the memory of one number."""
    return one_number_of(array.shape, array.dtype)


def weightless_target(card: dict[str, Any], bits: int | None = None) -> PlainTarget:
    ops.register()
    module = importlib.import_module(f"mlx_lm.models.{card['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(card))
    if bits is not None:
        own = getattr(model, "quant_predicate", None) or (lambda path, layer: True)
        nn.quantize(model, 64, bits, class_predicate=lambda path, layer: hasattr(layer, "to_quantized") and own(path, layer))
    model.update(tree_map(one_number, model.parameters()))
    facts = card.get("text_config", card)
    family = FAMILIES.get(facts["model_type"], PlainTarget)
    info = TargetInfo(
        "weightless", facts["model_type"], facts["num_hidden_layers"], facts["hidden_size"], facts["vocab_size"], 4096,
        frozenset(), "bfloat16", "cpu", "none",
    )  # fmt: skip
    return family(model, info)


def weightless_drafter(pair: dict[str, Any], target: PlainTarget, compiled: bool) -> MlxDrafter:
    facts = pair["target"].get("text_config", pair["target"])
    taps = [1 + i * (facts["num_hidden_layers"] - 2) // pair["taps"] for i in range(pair["taps"])]
    card = {
        "architectures": ["DSpineDraftModel"],
        "hidden_size": facts["hidden_size"], "intermediate_size": 3 * facts["hidden_size"],
        "num_hidden_layers": pair["layers"], "num_attention_heads": facts["num_attention_heads"],
        "num_key_value_heads": facts["num_key_value_heads"], "head_dim": facts["head_dim"], "rms_norm_eps": 1e-6,
        "vocab_size": facts["vocab_size"], "max_position_embeddings": 4096, "rope_theta": 1e5,
        "num_target_layers": facts["num_hidden_layers"], "block_size": pair["block"],
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": taps},
        "dspine_config": {"transfer_rank": pair["rank"], "message_size": pair["message"], "top_k": 16},
    }  # fmt: skip
    config = parse_drafter_config(card)
    model = DrafterModel(config)
    model.update(tree_map(one_number, model.parameters()))
    codes = mx.broadcast_to(mx.zeros(()), (facts["vocab_size"], pair["rank"]))
    model.bind_codes(codes)
    target.bind_features(config.target_layer_ids)
    return MlxDrafter(model, target, {}, compiled=compiled)


@dataclass(frozen=True)
class Cost:
    """Graph nodes of a round by phase; `single`: of a plain round, `plain`: of mlx-lm's own step for one token."""

    draft: int
    verify: int
    commit: int
    single: int
    plain: int

    @property
    def total(self) -> int:
        return self.draft + self.verify + self.commit


@contextmanager
def nothing_runs(patch: Any) -> Any:
    """`mx.eval` and `mx.async_eval` do nothing: graphs stay, to be counted."""
    with patch.context() as inner:
        inner.setattr(mx, "eval", lambda *arrays: None)
        inner.setattr(mx, "async_eval", lambda *arrays: None)
        yield


@contextmanager
def taken_for_metal() -> Any:
    """Operations of the core go to their Metal kernels. Each launch is one node that depends on its inputs."""

    def make(**text: Any) -> Any:
        def launch(**call: Any) -> list[mx.array]:
            shaped = zip(call["output_shapes"], call["output_dtypes"], strict=True)
            return mx.depends([one_number_of(shape, dtype) for shape, dtype in shaped], list(call["inputs"]))

        return launch

    registry.register_device("mlx", lambda array: "metal")
    try:
        with built_by(make):
            yield
    finally:
        registry.register_device("mlx", device_name)


def round_cost(name: str, patch: Any, *, compiled: bool = True) -> Cost:
    """Nodes of one steady-state greedy round at `CONTEXT` tokens, all phases cut apart by computed stand-ins. As the CPU
    back end counts `mx.fast` operations, wherever this runs: the budgets are of that."""
    with mx.stream(mx.Device(mx.cpu)):
        return _round_cost(PAIRS[name], patch, compiled)


def _round_cost(pair: dict[str, Any], patch: Any, compiled: bool) -> Cost:
    target = weightless_target(pair["target"], pair.get("bits"))
    drafter = weightless_drafter(pair, target, compiled)
    w = pair["block"]
    cache, context = filled_target_cache(target), filled_draft_cache(drafter)
    with nothing_runs(patch), taken_for_metal():
        proposal = drafter.propose(context, mx.array([5]), DraftRequest())
        draft = nodes(proposal.tokens, proposal.finite)
        block = mx.zeros((1, w), dtype=mx.int32)
        block.tolist()  # computed, whatever `mx.eval` is
        verification = target.finish(cache, target.begin(cache, block), w)
        verdict = accept_greedy(verification.logits, block[:, 1:], mx.array([w - 1]))
        seen = [verdict.accepted, verdict.next_token, verification.features]
        verify = nodes(*seen)
        target.commit(cache, verification, w - 1)
        moved = [x for x in (getattr(cache, "states", None), getattr(cache, "windows", None)) if x is not None]
        rows = one_number(verification.features[:, : w - 1])
        context = filled_draft_cache(drafter)
        drafter.commit(context, rows)
        commit = nodes(*seen, *moved) - verify + nodes(context._keys, context._values)
        single, plain = plain_round(target), plain_step(target)
    return Cost(draft, verify, commit, single, plain)


def plain_round(target: PlainTarget) -> int:
    """Nodes of a round of one token: its block, its commit, and the token after it."""
    cache, token = filled_target_cache(target), mx.zeros((1,), dtype=mx.int32)
    token.tolist()
    verification = target.finish(cache, target.begin(cache, token[:, None]), 1)
    following = accept_greedy(verification.logits, token[:, None][:, 1:], mx.array([0])).next_token
    target.commit(cache, verification, 1)
    moved = [x for x in (getattr(cache, "states", None), getattr(cache, "windows", None)) if x is not None]
    return nodes(following, *moved)


def plain_step(target: PlainTarget) -> int:
    """Nodes of mlx-lm's own call for one token."""
    token = mx.zeros((1, 1), dtype=mx.int32)
    token.tolist()
    return nodes(mx.argmax(target.model(token, cache=make_prompt_cache(target.model))[:, -1], axis=-1))


def filled_target_cache(target: PlainTarget) -> Any:
    """A cache that says it holds `CONTEXT` tokens."""
    cache = target.make_cache(4096)
    facts = getattr(target.model.args, "text_config", None) or vars(target.model.args)
    size = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    for layer in cache.layers:
        layer.keys = layer.values = one_number(mx.zeros((1, facts["num_key_value_heads"], 512, size), dtype=mx.bfloat16))
        layer.offset = CONTEXT
    cache.length = CONTEXT
    if getattr(target, "gdn", None):
        layer = next(iter(target.gdn.values()))
        lead, layout = (len(target.gdn), 1), layer.layout
        cache.states = one_number(mx.zeros((*lead, layout.value_heads, layout.value_dim, layout.key_dim)))
        cache.windows = one_number(mx.zeros((*lead, layer.window, layout.channels), dtype=mx.bfloat16))
    return cache


def filled_draft_cache(drafter: MlxDrafter) -> Any:
    cache = drafter.make_cache(4096)
    rows = mx.zeros((1, drafter.config.num_kv_heads, 512, drafter.config.head_dim), dtype=mx.bfloat16)
    cache._keys = [one_number(rows) for _ in cache._keys]
    cache._values = [one_number(rows) for _ in cache._values]
    cache.length = CONTEXT
    return cache
