"""Config of the hybrid and mixture-of-experts decoders: Qwen3.5, Qwen3.5-MoE, Qwen3-Next, Qwen3-MoE.

Official cards nest the language model under `text_config` beside a vision tower; text-only ones are flat. Both are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dspine.common.configs import RopeConfig
from dspine.common.errors import CheckpointError
from dspine.common.gdn import GdnLayout
from dspine.common.rope import rope_frequencies
from dspine_cuda.targets.config import Card, number, read_rope

HYBRID_FAMILIES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen3_moe")
LINEAR, FULL = "linear_attention", "full_attention"
_MOE_FAMILIES = ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen3_moe")


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts of one layer, and the shared one (`shared_inner` 0: none). `normalised`: the weights of the picks sum
    to 1."""

    experts: int
    top_k: int
    inner: int
    shared_inner: int
    normalised: bool


@dataclass(frozen=True)
class HybridConfig:
    """One decoder whose layers are Gated DeltaNet or attention, each followed by a dense MLP or a mixture of experts.

    `kinds` and `sparse` hold one entry a layer. `tied` None: the card's two levels disagree, and whether the file holds
    an LM head decides, as `transformers` ends up doing.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int
    rms_norm_eps: float
    context_length: int
    rope: RopeConfig
    tied: bool | None
    gated_attention: bool  # q_proj also makes a gate on the heads' output
    centred_norms: bool  # norms multiply by 1 + weight
    grouped_projections: bool  # Qwen3-Next: in_proj_qkvz and in_proj_ba, a key head at a time
    kinds: tuple[str, ...]
    sparse: tuple[bool, ...]
    intermediate_size: int  # of dense MLPs; 0 where there are none
    moe: MoeConfig | None
    gdn: GdnLayout | None
    conv_width: int

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Ids of the layers that keep K/V."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind == FULL)

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Ids of the layers that keep a state and a convolution window."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind == LINEAR)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Ids of the layers with routed experts."""
        return tuple(i for i, sparse in enumerate(self.sparse) if sparse)

    def frequencies(self) -> tuple[np.ndarray, float]:
        """Inverse frequencies float64 [rotary_dim / 2] and the factor on cos and sin."""
        return rope_frequencies(self.rope, self.rotary_dim)


def text_config(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The language model's part of config.json, with what only the outer level says (end tokens, tying)."""
    inner = data.get("text_config")
    if inner is None:
        return dict(data)
    if not isinstance(inner, dict):
        raise CheckpointError(f"{where}: text_config must be an object, got {inner!r}")
    outer = {key: data[key] for key in ("eos_token_id", "tie_word_embeddings") if data.get(key) is not None}
    merged = outer | {key: value for key, value in inner.items() if value is not None or key not in outer}
    return merged | {"model_type": data["model_type"]}


def parse_hybrid_config(data: dict[str, Any], where: str) -> HybridConfig:
    """config.json of a family of `HYBRID_FAMILIES`. What the decoder cannot run is refused by name."""
    text = text_config(data, where)
    card = Card(text, where)
    family = text["model_type"]
    _refuse_variants(card)
    heads, hidden, layers = (card.integer(key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    kv_heads = card.integer("num_key_value_heads", heads)
    official = family.startswith("qwen3_5") or family == "qwen3_next"
    head_dim = card.integer("head_dim", 256 if official else hidden // heads or None)
    rope, rotary_dim = _rotary(card, head_dim, 0.25 if official else 1.0)
    if heads % kv_heads:
        raise card.error(f"{heads} heads over {kv_heads} K/V heads: must divide")
    kinds = _kinds(card, layers, official)
    moe, sparse = _experts(card, family, layers)
    gdn, width = _gdn(card) if LINEAR in kinds else (None, 0)
    return HybridConfig(
        model_type=family,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        vocab_size=card.integer("vocab_size"),
        rms_norm_eps=number(card, text, "rms_norm_eps", 1e-6),
        context_length=card.integer("max_position_embeddings"),
        rope=rope,
        tied=_tied(data, text, card),
        gated_attention=official,
        centred_norms=official,
        grouped_projections=family == "qwen3_next",
        kinds=kinds,
        sparse=sparse,
        intermediate_size=0 if all(sparse) else card.integer("intermediate_size"),
        moe=moe,
        gdn=gdn,
        conv_width=width,
    )


def _refuse_variants(card: Card) -> None:
    """Options of these families that no released checkpoint uses, and that this decoder does not have."""
    data = card.data
    checks = {
        f"activation {data.get('hidden_act')!r}": data.get("hidden_act", "silu") == "silu",
        "attention_bias": not data.get("attention_bias"),
        "attn_output_gate false": data.get("attn_output_gate", True) is True,
        "a sliding window": not data.get("use_sliding_window"),
        f"output_gate_type {data.get('output_gate_type')!r}": data.get("output_gate_type") in (None, "silu", "swish"),
    }
    for name, fine in checks.items():
        if not fine:
            raise card.error(f"{name} is not in the {data['model_type']} decoder of the torch runtime")


def _rotary(card: Card, head_dim: int, default: float) -> tuple[RopeConfig, int]:
    values = card.rope()
    if values["rope_type"] not in ("default", "yarn"):
        raise card.error(f"rope type {values['rope_type']!r} is not in the {card.data['model_type']} decoder: default or yarn")
    share = values.get("partial_rotary_factor")
    share = card.data.get("partial_rotary_factor") if share is None else share
    factor = number(card, {"partial_rotary_factor": share}, "partial_rotary_factor", default)
    size = int(head_dim * factor)
    if size % 2 or not 2 <= size <= head_dim:
        raise card.error(
            f"partial_rotary_factor {factor} of head_dim {head_dim} rotates {size} dimensions: must be even, 2 or more"
        )
    return read_rope(card)[0], size


def _tied(data: dict[str, Any], text: dict[str, Any], card: Card) -> bool | None:
    levels = {Card(level, card.where).flag("tie_word_embeddings") for level in (data, data.get("text_config") or data)
              if level.get("tie_word_embeddings") is not None}  # fmt: skip
    return None if len(levels) == 2 else levels.pop() if levels else False


def _kinds(card: Card, layers: int, hybrid: bool) -> tuple[str, ...]:
    given = card.data.get("layer_types")
    if given is None:
        interval = card.integer("full_attention_interval", 4) if hybrid else 1
        given = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]
    allowed = {FULL, LINEAR} if hybrid else {FULL}
    if not isinstance(given, list) or len(given) != layers or not set(given) <= allowed:
        raise card.error(f"layer_types must list {layers} of {sorted(allowed)}, got {given!r}")
    return tuple(given)


def _experts(card: Card, family: str, layers: int) -> tuple[MoeConfig | None, tuple[bool, ...]]:
    if family not in _MOE_FAMILIES:
        return None, (False,) * layers
    step, only = card.integer("decoder_sparse_step", 1), card.data.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(isinstance(i, int) and 0 <= i < layers for i in only):
        raise card.error(f"mlp_only_layers must list layers of 0..{layers - 1}, got {only!r}")
    sparse = tuple(i not in only and (i + 1) % step == 0 for i in range(layers))
    if not any(sparse):
        return None, sparse
    moe = MoeConfig(
        experts=card.integer("num_experts" if "num_experts" in card.data else "num_local_experts"),
        top_k=card.integer("num_experts_per_tok"),
        inner=card.integer("moe_intermediate_size"),
        shared_inner=0 if family == "qwen3_moe" else card.integer("shared_expert_intermediate_size"),
        normalised=card.flag("norm_topk_prob", family != "qwen3_moe"),
    )
    if moe.top_k > moe.experts:
        raise card.error(f"num_experts_per_tok {moe.top_k} is above num_experts {moe.experts}")
    return moe, sparse


def _gdn(card: Card) -> tuple[GdnLayout, int]:
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    keys, values, key_dim, value_dim = (card.integer(name) for name in names)
    if values % keys:
        raise card.error(f"linear_num_value_heads {values} must be a multiple of linear_num_key_heads {keys}")
    width = card.integer("linear_conv_kernel_dim", 4)
    if width < 2:
        raise card.error(f"linear_conv_kernel_dim must be at least 2, got {width}")
    return GdnLayout(keys, values, key_dim, value_dim), width


def rollback_bytes(config: HybridConfig, w: int, itemsize: int = 2) -> tuple[int, int]:
    """Bytes a request holds to roll back a block of `w` tokens: (compact factors, a state after every token).

    Compact: z [w, Hv, Dv] and g [w, Hv] in float32, k [w, Hk, Dk] and the pre-convolution inputs [w, C] in the model's
    dtype (`itemsize` bytes), for every GDN layer. Per token: a float32 state [Hv, Dv, Dk] for every token and layer, and
    the same inputs. Attention needs nothing: rejected K/V rows are overwritten.
    """
    layout, layers = config.gdn, len(config.gdn_layers)
    if layout is None:
        return 0, 0
    inputs = itemsize * w * layout.channels
    factors = 4 * w * layout.value_heads * (layout.value_dim + 1) + itemsize * w * layout.key_heads * layout.key_dim
    states = 4 * w * layout.value_heads * layout.value_dim * layout.key_dim
    return layers * (factors + inputs), layers * (states + inputs)


def fp8_block(data: dict[str, Any], where: str) -> tuple[int, int] | None:
    """Rows and columns that share a scale in an FP8 checkpoint; None for an unquantised one."""
    method = data.get("quantization_config")
    if not method:
        return None
    size = method.get("weight_block_size")
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and n > 0 for n in size)):
        raise CheckpointError(
            f"{where}: quantised weights (fp8) without weight_block_size [rows, columns] are not read, got {size!r}"
        )
    return size[0], size[1]
