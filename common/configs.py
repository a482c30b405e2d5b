"""A drafter's config.json: read strictly, both spellings, one frozen object out (`docs/formats.md`)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspine.common.draft_cards import (
    BRIDGE,
    MISSING,
    Card,
    ConvConfig,
    DominoConfig,
    DSparkConfig,
    SelectorConfig,
    check_fields,
    conv_and_selector,
    domino_config,
    draft_vocabulary,
    dspark_config,
    method_of,
    normalise_card,
)
from dspine.common.errors import CheckpointError
from dspine.common.masks import FULL, SLIDING, MaskRule, mask_rule

METHODS = ("dflash", "dflash2", "domino", "dspark", "dspine")
CONDITIONAL = ("dflash2", "domino", "dspark", "dspine")  # each draw is made given the draws before it
_MOST_LAYERS, _MOST_ROWS = 1024, 4096  # a damaged card must not ask for all memory before anything can be checked
PATH_SIGNALS = ("domino", "dspark")  # confidence and entropy are read off the drawn path, so they depend on the drawn tokens


@dataclass(frozen=True)
class RopeConfig:
    """Half-split rotary embedding over the full head, from the drafter's OWN card. `kind`: default, linear or yarn."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class DSpineConfig:
    """The `dspine_config` dictionary (SpecForge form). Training keys are kept, so that a card round-trips."""

    transfer_rank: int = 1024
    message_size: int = 512
    top_k: int = 16
    ce_weight: float = 0.1
    alignment_weight: float = 0.5
    alignment_warmup_steps: int = 146
    replacement_layers: int = 3
    replacement_probability: float = 0.5
    replacement_hold_ratio: float = 1 / 6
    replacement_end_ratio: float = 1 / 3
    candidate_mass_threshold: float = 1e-4
    hops: int = 1  # 2: rows also hear the token before their predecessor (`conditioning`)
    refined_layers: int = 1  # 2: refinement writes the last two layers anew (`conditioning`)

    def card(self) -> dict[str, Any]:
        """As config.json holds it: what is beyond the article only where it is used."""
        values = asdict(self)
        return {k: v for k, v in values.items() if k not in ("hops", "refined_layers") or v != 1}


@dataclass(frozen=True)
class DrafterConfig:
    """One drafter. `block_size` is the verify window: the anchor and `block_size - 1` proposals, whatever the card calls a
    block. The forward runs over `query_rows` rows, of which row `first_row` predicts the first proposal: 1 where a row
    predicts its OWN position, 0 where it predicts the next. `num_target_layers` 0: the card does not say.
    `draft_vocab_size`: how many tokens it may propose, None all.
    """

    method: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    rope: RopeConfig
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_causal: bool | None = None
    attention_bias: bool = False
    target_hidden_size: int | None = None
    dspine: DSpineConfig | None = None
    quantization: dict[str, int] | None = None
    first_row: int = 1
    anchored_window: bool = False
    conv: ConvConfig | None = None
    selector: SelectorConfig | None = None
    domino: DominoConfig | None = None
    dspark: DSparkConfig | None = None
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    draft_vocab_size: int | None = None

    @property
    def num_proposals(self) -> int:
        return self.block_size - 1

    @property
    def query_rows(self) -> int:
        """Rows of the forward. Domino runs its last row even where it predicts a token too many."""
        return self.block_size if self.domino is not None else self.first_row + self.num_proposals

    @property
    def proposal_rows(self) -> slice:
        """The rows that predict the proposals, in order."""
        return slice(self.first_row, self.first_row + self.num_proposals)

    @property
    def scales_logits(self) -> bool:
        """True where the card asks for a scale or a softcap of its own on the draft logits."""
        return self.output_multiplier != 1.0 or self.final_logit_softcapping is not None

    @property
    def feature_size(self) -> int:
        return len(self.target_layer_ids) * (self.target_hidden_size or self.hidden_size)

    def mask_rules(self) -> tuple[MaskRule, ...]:
        """The visibility rule of every layer."""
        window, anchored = self.sliding_window, self.anchored_window
        return tuple(mask_rule(self.method, kind, self.is_causal, window, anchored) for kind in self.layer_types)


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a checkpoint folder as a dictionary; a one-line error where it is missing or damaged."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{folder}: no config.json there; expected a model folder with config.json and safetensors")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


def load_drafter_config(folder: Path) -> DrafterConfig:
    """Read and validate a drafter's card."""
    return parse_drafter_config(read_config(folder), where=str(Path(folder) / "config.json"), folder=Path(folder))


def parse_drafter_config(data: dict[str, Any], where: str = "config", folder: Path | None = None) -> DrafterConfig:
    """A card in any of the known spellings -> `DrafterConfig`; contradictions and gaps are errors that name the field.

    `folder` is only looked at for an official DSpine card, which does not say its sizes: they are read off the tensors.
    """
    data = normalise_card(data, where)
    card = Card(data, where)
    method = method_of(card)
    check_fields(card)
    num_layers = card.integer("num_hidden_layers", 1, high=_MOST_LAYERS)
    heads = card.integer("num_attention_heads", 1)
    hidden = card.integer("hidden_size", 1)
    parts = _parts(card, method, hidden)
    block_size, first_row = _rows(card, method, parts.get("domino"))
    num_target_layers = _num_target_layers(card)
    config = DrafterConfig(
        method=method,
        hidden_size=hidden,
        intermediate_size=card.integer("intermediate_size", 1),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=card.integer("num_key_value_heads", 1, value=data.get("num_key_value_heads", heads)),
        head_dim=card.integer("head_dim", 2, value=data.get("head_dim") or hidden // heads),
        rms_norm_eps=card.number("rms_norm_eps", 1e-6),  # type: ignore[arg-type]
        vocab_size=card.integer("vocab_size", 2),
        max_position_embeddings=card.integer("max_position_embeddings", 1, value=data.get("max_position_embeddings", 32768)),
        block_size=block_size,
        mask_token_id=card.integer("mask_token_id", 0, value=card.either("mask_token_id")),
        num_target_layers=num_target_layers,
        target_layer_ids=_target_layer_ids(card, num_layers, num_target_layers),
        rope=_rope(card),
        layer_types=_layer_types(card, num_layers),
        sliding_window=data.get("sliding_window"),
        is_causal=data.get("is_causal"),
        attention_bias=card.flag("attention_bias", False),
        target_hidden_size=data.get("target_hidden_size"),
        dspine=_dspine(card, hidden, folder) if method == "dspine" else None,
        quantization=card.holder("quantization") or None,
        first_row=first_row,
        anchored_window=bool(data.get("speculators")),
        output_multiplier=card.number("output_multiplier", 1.0),  # type: ignore[arg-type]
        final_logit_softcapping=card.number("final_logit_softcapping", None) or None,
        input_embedding_scale=card.number("input_embedding_scale", 1.0),  # type: ignore[arg-type]
        draft_vocab_size=draft_vocabulary(card, method),
        **parts,
    )
    _validate(config, where, str(data.get("hidden_act", "silu")))
    return config


def _parts(card: Card, method: str, hidden: int) -> dict[str, Any]:
    """The settings of the method's own parts, by the field they fill."""
    if method == "dflash2":
        conv, selector = conv_and_selector(card, hidden)
        return {"conv": conv, "selector": selector}
    if method == "domino":
        return {"domino": domino_config(card)}
    return {"dspark": dspark_config(card)} if method == "dspark" else {}


def _rows(card: Card, method: str, domino: DominoConfig | None) -> tuple[int, int]:
    """(verify window, first proposing row) from the card's block size, which counts query rows."""
    value = card.either("block_size")
    if method == "dspark" or card.optional("sample_from_anchor", False):
        from_anchor = card.flag("sample_from_anchor", True)
        spare = not from_anchor and bool(card.data.get("speculators"))  # the anchor's row is one of the block's, and unused
        rows = card.integer("block_size", 1 + spare, value=value, high=_MOST_ROWS)
        return rows + 1 - spare, 0 if from_anchor else 1
    rows = card.integer("block_size", 2, value=value, high=_MOST_ROWS)
    return rows, 0 if domino is not None and domino.shift_label else 1


def _num_target_layers(card: Card) -> int:
    """0 where the card does not say and names its taps itself."""
    value = card.optional("num_target_layers", None)
    if value is None and card.optional("target_layer_ids", None) is not None:
        return 0
    return card.integer("num_target_layers", 1, value=MISSING if value is None else value)


def _target_layer_ids(card: Card, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    ids = card.either("target_layer_ids")
    if ids is MISSING or ids is None:
        if num_layers == 1:
            return (num_target_layers // 2,)
        return tuple(int(round(1 + i * (num_target_layers - 4) / (num_layers - 1))) for i in range(num_layers))
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise card.error(f"target_layer_ids must be a non-empty list of integers, got {ids!r}")
    if -1 in ids and card.data.get("architectures") == ["Qwen3DSparkModel"]:
        raise card.error("target_layer_ids holds -1 (DeepSpec: the embedding's output), which this version does not capture")
    wrong = [i for i in ids if i < 0 or (num_target_layers and i >= num_target_layers)]
    if wrong:
        last = num_target_layers - 1 if num_target_layers else "N-1"
        raise card.error(f"target_layer_ids {wrong} out of range: the target has layers 0..{last}")
    return tuple(ids)


def _rope(card: Card) -> RopeConfig:
    scaling, parameters = card.holder("rope_scaling"), card.holder("rope_parameters")
    given = [holder["rope_theta"] for holder in (card.data, parameters) if holder.get("rope_theta") is not None]
    thetas = [card.real("rope_theta", theta) for theta in given]
    if not thetas:
        raise card.error("rope_theta is missing (looked at the top level and in rope_parameters)")
    if thetas[0] <= 0:
        raise card.error(f"rope_theta must be above 0, got {thetas[0]}")
    if any(theta != thetas[0] for theta in thetas):
        raise card.error(f"rope_theta is {thetas[0]!r} at the top level but {thetas[1]!r} in rope_parameters; drop one")
    kinds = {str(h.get("rope_type") or h.get("type") or "default") for h in (scaling, parameters) if h}
    if len(kinds) > 1:
        raise card.error(f"rope_scaling and rope_parameters name different rope types: {', '.join(sorted(kinds))}")
    kind = kinds.pop() if kinds else "default"
    if kind not in ("default", "linear", "yarn"):
        raise card.error(f"rope type {kind!r} is unknown; known: default, linear, yarn")
    if kind == "default":
        return RopeConfig(theta=thetas[0])
    merged = {**scaling, **parameters}
    if merged.get("factor") is None:
        raise card.error(f"rope type {kind!r} needs a factor")
    original = merged.get("original_max_position_embeddings") or card.data.get("max_position_embeddings")
    names = ("attention_factor", "mscale", "mscale_all_dim")
    optional = {name: None if merged.get(name) is None else card.real(name, merged[name]) for name in names}
    return RopeConfig(
        theta=thetas[0],
        kind=kind,
        factor=card.real("factor", merged["factor"]),
        original_max_position=None if original is None else card.integer("original_max_position_embeddings", 1, value=original),
        beta_fast=card.real("beta_fast", merged.get("beta_fast") or 32.0),
        beta_slow=card.real("beta_slow", merged.get("beta_slow") or 1.0),
        truncate=bool(merged.get("truncate", True)),
        **optional,
    )


def _layer_types(card: Card, num_layers: int) -> tuple[str, ...]:
    types = card.data.get("layer_types")
    if types is None:
        return (FULL,) * num_layers
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {FULL, SLIDING}:
        raise card.error(f"layer_types must list {num_layers} of {FULL!r}/{SLIDING!r}, got {types!r}")
    window = card.data.get("sliding_window")
    if SLIDING in types and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise card.error(f"sliding_window must be a positive integer where layer_types has {SLIDING!r}, got {window!r}")
    return tuple(types)


def _dspine(card: Card, hidden: int, folder: Path | None) -> DSpineConfig:
    values = card.data.get("dspine_config")
    if values is None and BRIDGE in card.nested and folder is not None:
        from dspine.common.checkpoints import official_dspine_sizes  # it needs `DrafterConfig` from here

        values = official_dspine_sizes(folder, card.nested[BRIDGE])
    if values is None:
        raise card.error(
            "marked as DSpine (selected_prefix_code_bridge) but without dspine_config: the official tensor layout is not "
            f"published; dflash_config holds {sorted(card.nested)}. Convert it to the SpecForge form first"
        )
    if not isinstance(values, dict):
        raise card.error(f"dspine_config must be an object, got {values!r}")
    unknown = sorted(set(values) - set(DSpineConfig.__dataclass_fields__))
    if unknown:
        raise card.error(f"dspine_config has unknown keys {unknown}; known: {sorted(DSpineConfig.__dataclass_fields__)}")
    whole = {name for name, kind in DSpineConfig.__annotations__.items() if kind == "int"}
    for name, value in values.items():
        card.integer(f"dspine_config.{name}", 0, value=value) if name in whole else card.real(f"dspine_config.{name}", value)
    config = DSpineConfig(**values)
    if not 1 <= config.transfer_rank <= hidden:
        raise card.error(f"dspine_config.transfer_rank must be 1..{hidden} (hidden_size), got {config.transfer_rank}")
    if config.top_k < 1 or config.message_size < 1:
        raise card.error(
            f"dspine_config needs top_k and message_size of at least 1, got {config.top_k} and {config.message_size}"
        )
    layers = card.data.get("num_hidden_layers")
    if config.hops not in (1, 2) or config.refined_layers not in (1, 2) or (config.refined_layers == 2 and layers == 1):
        raise card.error(
            f"dspine_config.hops and refined_layers must be 1 or 2 (2 refined layers need as many), got {config.hops} and "
            f"{config.refined_layers}"
        )
    return config


def _validate(config: DrafterConfig, where: str, activation: str) -> None:
    problems = [
        (
            config.num_heads % config.num_kv_heads == 0,
            f"{config.num_heads} heads do not divide into {config.num_kv_heads} K/V heads",
        ),
        (config.head_dim % 2 == 0, f"head_dim must be even for rotary embedding, got {config.head_dim}"),
        (
            config.mask_token_id < config.vocab_size,
            f"mask_token_id {config.mask_token_id} is not below vocab_size {config.vocab_size}",
        ),
        (activation == "silu", f"hidden_act must be 'silu', got {activation!r}"),
        (config.is_causal in (None, True, False), f"is_causal must be true or false, got {config.is_causal!r}"),
        (not (config.method == "dspine" and config.is_causal is False), "a DSpine drafter is block-causal; is_causal is false"),
        (config.output_multiplier > 0, f"output_multiplier must be above 0, got {config.output_multiplier}"),
        (
            config.selector is None or config.selector.top_k <= config.vocab_size,
            f"selector_top_k is above the vocabulary of {config.vocab_size}",
        ),
    ]
    for ok, text in problems:
        if not ok:
            raise CheckpointError(f"{where}: {text}")
