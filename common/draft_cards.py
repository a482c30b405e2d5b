"""Spellings of a drafter's card brought to one form, and the settings of each method's own parts (`docs/checkpoints.md`).

A card is `config.json` as a dictionary. What the authors' loaders read stands in `docs/formats.md`; a key that means
something this version does not do is refused by name, a key it does not know is named in a warning.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from dspine.common.errors import CheckpointError

logger = logging.getLogger("dspine")
MISSING = object()
MARKOV_HEADS = ("vanilla", "gated", "rnn")
SPECULATORS = {"DFlashSpeculator": "DFlashDraftModel", "DSparkSpeculator": "DSparkDraftModel"}
BRIDGE = "selected_prefix_code_bridge"  # marks an official DSpine file inside `dflash_config`

ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "DominoDraftModel": "domino",
    "DSparkDraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "DSpineDraftModel": "dspine",
}
_REFUSED = {
    "Gemma4DSparkModel": "its layers are Gemma-shaped (four norms a layer), and no public file was there to check against",
    "DSparkMiniMaxDraftModel": "a bundled draft of MiniMax with its own attention",
    "DeepseekV4ForCausalLMDSpark": "a bundled draft of DeepSeek-V4 with its own attention",
    "PEagleSpeculator": "EAGLE-style drafters are another family",
    "Eagle3Speculator": "EAGLE-style drafters are another family",
    "LlamaForCausalLMEagle3": "EAGLE-style drafters are another family",
}
_UNSUPPORTED = {  # key -> the values that mean nothing; any other value would change the model
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "use_gemma_norm": (None, False),
    "rope_is_neox_style": (None, True),
    "is_neox_style": (None, True),
    "partial_rotary_factor": (None, 1, 1.0),
    "mrope_section": (None,),
    "rope_dim": (None,),
    "use_swa": (None, False),
    "causal": (None,),
    "fused_qkv": (None, False),
    "mlp_bias": (None, False),
}
_SILENT = frozenset(  # written by libraries and trainers; nothing at inference depends on them
    "architectures auto_map model_type dtype torch_dtype transformers_version attention_dropout initializer_range use_cache "
    "bos_token_id eos_token_id pad_token_id tie_word_embeddings max_window_layers use_sliding_window _name_or_path "
    "name_or_path hidden_act num_anchors chunk_size_feed_forward return_dict output_attentions output_hidden_states "
    "is_encoder_decoder is_decoder problem_type id2label label2id _attn_implementation speculators_version "
    "_attn_implementation_autoset attention_mode confidence_head_alpha loss_decay_gamma use_return_dict pruned_heads "
    "mask_token_id mask_token selected_prefix_code_bridge attn_implementation add_cross_attention torchscript "
    "dspine_version".split()
)
_KNOWN = frozenset(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim rms_norm_eps vocab_size "
    "max_position_embeddings block_size num_target_layers target_layer_ids rope_theta rope_scaling rope_parameters "
    "layer_types sliding_window is_causal attention_bias target_hidden_size dspine_config dflash_config dspark_config "
    "quantization quantization_config projector_type shift_label gru_hidden_dim emb_dim pure_draft_prefix_len "
    "conv_kernel_size conv_group_size "
    "selector_rank selector_top_k output_multiplier final_logit_softcapping input_embedding_scale markov_rank "
    "markov_head_type enable_confidence_head confidence_head_with_markov sample_from_anchor speculators "
    "draft_vocab_size".split()
)


@dataclass(frozen=True)
class ConvConfig:
    """DFlash2's grouped dynamic convolution: taps along the block, channels sharing one dynamic kernel."""

    kernel_size: int
    group_size: int


@dataclass(frozen=True)
class SelectorConfig:
    """DFlash2's candidate selector."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class DominoConfig:
    """Domino's GRU and low-rank correction. `shift_label`: row i predicts token i + 1."""

    gru_hidden_dim: int
    emb_dim: int
    shift_label: bool


@dataclass(frozen=True)
class DSparkConfig:
    """DSpark's heads; rank 0 is a file without a Markov head (DeepSpec's own "DFlash" checkpoints)."""

    markov_rank: int
    markov_head_type: str = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False


class Card:
    """A config dictionary together with the place it came from, for errors."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = data, where
        self.nested = data.get("dflash_config") or {}
        if not isinstance(self.nested, dict):
            raise self.error(f"dflash_config must be an object, got {type(self.nested).__name__}")

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {text}")

    def either(self, key: str) -> Any:
        """A key that may sit at the top or inside `dflash_config`; both and different is an error."""
        top, nested = self.data.get(key, MISSING), self.nested.get(key, MISSING)
        if top is not MISSING and nested is not MISSING and top != nested:
            raise self.error(f"{key} is {top!r} at the top level but {nested!r} in dflash_config; make them equal or drop one")
        return nested if top is MISSING else top

    def integer(self, key: str, low: int, *, value: Any = MISSING, high: int = 2**31 - 1) -> int:
        """A whole number from `low` to `high`: the size of something that is going to be made."""
        value = self.data.get(key, MISSING) if value is MISSING else value
        if value is MISSING or value is None:
            raise self.error(f"{key} is missing (looked at the top level and in dflash_config)")
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.error(f"{key} must be an integer of at least {low}, got {value!r}")
        if value > high:
            raise self.error(f"{key} must be at most {high}, got {value}")
        return value

    def optional(self, key: str, default: Any) -> Any:
        """Like `either`, with a default for a key that is absent or null."""
        value = self.either(key)
        return default if value is MISSING or value is None else value

    def flag(self, key: str, default: bool) -> bool:
        value = self.optional(key, default)
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}")
        return value

    def number(self, key: str, default: float | None) -> float | None:
        value = self.optional(key, default)
        return None if value is None else self.real(key, value)

    def real(self, key: str, value: Any) -> float:
        """A finite number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"{key} must be a number, got {value!r}")
        return float(value)

    def holder(self, key: str) -> dict[str, Any]:
        """A nested object; empty where it is absent or null."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"{key} must be an object, got {value!r}")
        return value or {}


def normalise_card(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The two-file, speculators and `dspark_`-prefixed spellings as one flat card with `dflash_config`."""
    if isinstance(data.get("config"), dict):  # the two-file reference form nests everything under `config`
        data = data["config"]
    data = dict(data)
    names = data.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    if (isinstance(first, str) and first in SPECULATORS) or "speculators_model_type" in data:
        return _from_speculators(data, first, where)
    if isinstance(data.get("dspark_config"), dict) and isinstance(data.get("dflash_config") or {}, dict):
        data["dflash_config"] = {**(data.get("dflash_config") or {}), **data.pop("dspark_config")}
    names = {"noise_token_id": "mask_token_id"}
    for key in ("block_size", "markov_rank", "markov_head_type", "noise_token_id", "target_layer_ids"):
        value = data.pop(f"dspark_{key}", None)
        if value is not None:
            data[names.get(key, key)] = value
            if key == "markov_rank":
                data.setdefault("markov_head_type", "vanilla")
    return data


def _from_speculators(data: dict[str, Any], known: Any, where: str) -> dict[str, Any]:
    """The layout of the `speculators` package: layer settings nested, tap ids count the embedding as 0."""
    layers = data.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise CheckpointError(f"{where}: a speculators card needs transformer_layer_config, an object, got {layers!r}")
    method = str(data.get("speculators_model_type") or "")
    names = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
    architecture = names.get(method) if method else SPECULATORS.get(str(known))
    if architecture is None:
        raise CheckpointError(f"{where}: speculators model {method or known!r} is not run; known: {', '.join(names)}")
    taps = data.get("aux_hidden_state_layer_ids")
    if not isinstance(taps, list) or not all(isinstance(i, int) and i >= 1 for i in taps):
        raise CheckpointError(f"{where}: aux_hidden_state_layer_ids must list integers of at least 1, got {taps!r}")
    keys = ("block_size", "mask_token_id", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
            "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")  # fmt: skip
    nested = {key: data[key] for key in keys if data.get(key) is not None}
    nested.setdefault("block_size", 8)
    nested |= {"target_layer_ids": [i - 1 for i in taps], "sample_from_anchor": data.get("sample_from_anchor")}
    if architecture == "DSparkDraftModel":
        defaults = {"markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True}
        nested = {**defaults, "confidence_head_with_markov": True, **nested}
    whole = data.get("sliding_window_non_causal")
    flat = {**layers, "architectures": [architecture], "dflash_config": nested, "speculators": True}
    flat["is_causal"] = False if (architecture == "DFlash2DraftModel" if whole is None else whole) else None
    flat["draft_vocab_size"] = data.get("draft_vocab_size", 32000)
    flat["target_hidden_size"] = data.get("target_hidden_size")
    return flat


def method_of(card: Card) -> str:
    """Which method the card asks for: architecture first, then the marks inside it."""
    names = card.data.get("architectures") or ["DFlashDraftModel"]
    name = str(names[0] if isinstance(names, list) and names else names)
    if name in _REFUSED:
        raise card.error(f"architecture {name!r} is not run: {_REFUSED[name]}")
    method = ARCHITECTURES.get(name)
    if method is None:
        raise card.error(f"architecture {name!r} is not a drafter this version runs; known: {', '.join(ARCHITECTURES)}")
    projector = card.optional("projector_type", None)
    if projector not in (None, "dflash", "domino", "dspark"):
        raise card.error(f"projector_type {projector!r} is not supported; known: dflash, domino, dspark")
    if projector in ("domino", "dspark") and method in ("dflash", projector):
        return projector
    if projector in ("domino", "dspark"):
        raise card.error(f"projector_type {projector!r} contradicts architecture {name!r}")
    if method == "dflash" and ("dspine_config" in card.data or BRIDGE in card.nested):
        return "dspine"
    if method == "dflash" and any(card.nested.get(key) for key in ("conv_kernel_size", "selector_rank")):
        return "dflash2"
    return method


def conv_and_selector(card: Card, hidden: int) -> tuple[ConvConfig, SelectorConfig]:
    """DFlash2's two parts; both are needed."""
    kernel, group = (card.integer(key, 1, value=card.either(key)) for key in ("conv_kernel_size", "conv_group_size"))
    rank, top_k = (card.integer(key, 1, value=card.either(key)) for key in ("selector_rank", "selector_top_k"))
    if hidden % group:
        raise card.error(f"conv_group_size must divide hidden_size {hidden}, got {group}")
    return ConvConfig(kernel, group), SelectorConfig(rank, top_k)


def domino_config(card: Card) -> DominoConfig:
    """Domino's settings; only a pure prefix of one token is defined at inference."""
    prefix = card.integer("pure_draft_prefix_len", 0, value=card.optional("pure_draft_prefix_len", 1))
    if prefix != 1:
        raise card.error(f"Domino runs with pure_draft_prefix_len 1 only, got {prefix}")
    shift = card.either("shift_label")
    if not isinstance(shift, bool):
        raise card.error("Domino needs shift_label, true or false" + ("" if shift is MISSING else f", got {shift!r}"))
    sizes = [card.integer(key, 1, value=card.either(key)) for key in ("gru_hidden_dim", "emb_dim")]
    return DominoConfig(*sizes, shift_label=shift)


def dspark_config(card: Card) -> DSparkConfig:
    """DSpark's heads; `enable_confidence_head` absent means off."""
    rank = card.integer("markov_rank", 0, value=card.optional("markov_rank", 0))
    kind = card.optional("markov_head_type", None)
    if rank and kind is None:
        raise card.error(f"markov_rank is {rank}, so markov_head_type is needed; known: {', '.join(MARKOV_HEADS)}")
    kind = "vanilla" if kind is None else str(kind).lower()
    if kind not in MARKOV_HEADS:
        raise card.error(f"markov_head_type {kind!r} is unknown; known: {', '.join(MARKOV_HEADS)}")
    alpha = card.number("confidence_head_alpha", 0.0) or 0.0
    confidence = card.flag("enable_confidence_head", alpha > 0)
    with_markov = confidence and card.flag("confidence_head_with_markov", False)
    if with_markov and not rank:
        raise card.error("confidence_head_with_markov is true, but markov_rank is 0: there is no Markov embedding")
    return DSparkConfig(rank, kind, confidence, with_markov)


def draft_vocabulary(card: Card, method: str) -> int | None:
    """Tokens the drafter may propose, where they are fewer than the target's (`t2d` in the file says which)."""
    own, vocab = card.optional("draft_vocab_size", None), card.integer("vocab_size", 2)
    if own in (None, vocab):
        return None
    if method not in ("dflash", "dflash2", "dspark"):
        raise card.error(f"draft_vocab_size {own} below vocab_size {vocab} is not defined for a {method} drafter")
    if card.integer("draft_vocab_size", 1, value=own) > vocab:
        raise card.error(f"draft_vocab_size {own} is above vocab_size {vocab}")
    return own


def check_fields(card: Card) -> None:
    """Refuse keys that ask for something this version does not do; name keys it does not know in one warning."""
    form = card.data.get("quantization_config")
    if form is not None and form != card.data.get("quantization"):
        name = form.get("quant_method") if isinstance(form, dict) else form
        raise card.error(f"quantization_config {name!r} is unknown; known: MLX's affine form, under `quantization`")
    unknown = []
    rope = card.holder("rope_parameters")
    for where, holder in (("", card.data), ("dflash_config.", card.nested), ("rope_parameters.", rope)):
        for key, value in holder.items():
            if key in _UNSUPPORTED:
                if value not in _UNSUPPORTED[key]:
                    raise card.error(f"{where}{key} is {value!r}, which this version does not run")
            elif not where.startswith("rope") and key not in _KNOWN and key not in _SILENT:
                unknown.append(where + key)
    if unknown:
        logger.warning(
            "%s: fields this version does not know, and ignores: %s. If one of them changes the model, its drafts will be poor",
            card.where,
            ", ".join(sorted(unknown)),
        )
