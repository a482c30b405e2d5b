"""Drafter folders out of the trainer: config.json in both rope spellings, model.safetensors in bfloat16, the transfer
space as its basis in float32, and optionally an affine-quantised form (MLX's layout, undone by `common.checkpoints`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.checkpoints import BASIS, expected_tensors
from dspine.common.configs import DrafterConfig
from dspine.common.errors import DSpineError
from dspine.common.quantization import bfloat16_bits, quantize_affine
from dspine.common.stored import write_safetensors
from dspine.common.transfer_space import TransferBasis, transfer_basis, transfer_codes

GROUP_SIZE = 64
_ARCHITECTURES = {
    "dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "domino": "DFlashDraftModel", "dspark": "DSparkDraftModel",
    "dspine": "DSpineDraftModel",
}  # fmt: skip


@dataclass(frozen=True)
class TransferSpace:
    """basis: float32 arrays as they are stored; codes float32 [V, r]: exactly what a reader of the file makes of them."""

    basis: TransferBasis
    codes: np.ndarray


def transfer_space_of(head_weight: np.ndarray, rank: int) -> TransferSpace:
    """The transfer space of an LM head [V, H], computed in float64, rounded to float32 as it will be stored."""
    wide = head_weight.astype(np.float64)
    exact = transfer_basis(wide, rank)
    stored = TransferBasis(*(np.asarray(a).astype(np.float32) for a in (exact.eigenvectors, exact.eigenvalues, exact.mean)))
    return transfer_space_from(head_weight, stored)


def transfer_space_from(head_weight: np.ndarray, stored: TransferBasis) -> TransferSpace:
    """Codes from a stored float32 basis, the way `DraftTensors.transfer_codes` makes them."""
    widened = TransferBasis(*(a.astype(np.float64) for a in (stored.eigenvectors, stored.eigenvalues, stored.mean)))
    return TransferSpace(stored, transfer_codes(head_weight.astype(np.float64), widened).astype(np.float32))


def drafter_card(config: DrafterConfig) -> dict[str, Any]:
    """config.json of a drafter (`docs/formats.md`): rope in both spellings, layer types and causality explicit."""
    if config.rope.kind != "default":
        raise DSpineError(f"the trainer writes default rotary embeddings only, got {config.rope.kind!r}")
    card: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[config.method]],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": config.rope.theta, "rope_type": "default"},
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dtype": "bfloat16",
        "layer_types": list(config.layer_types),
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "is_causal": config.is_causal,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)},
    }
    if config.dspine is not None:
        card["dspine_config"] = config.dspine.card()
    card["dflash_config"] |= _own_settings(config)
    if config.dspark is not None:  # counts query rows
        card["block_size"] = config.query_rows
    if config.quantization is not None:
        card["quantization"] = dict(config.quantization)
    return card


def _own_settings(config: DrafterConfig) -> dict[str, Any]:
    """What the card says of a kind's own parts (`docs/formats.md`)."""
    if config.conv is not None and config.selector is not None:
        conv, selector = config.conv, config.selector
        return {
            "conv_kernel_size": conv.kernel_size, "conv_group_size": conv.group_size, "selector_rank": selector.rank,
            "selector_top_k": selector.top_k,
        }  # fmt: skip
    if config.domino is not None:
        domino = config.domino
        return {
            "projector_type": "domino", "shift_label": domino.shift_label, "gru_hidden_dim": domino.gru_hidden_dim,
            "emb_dim": domino.emb_dim, "pure_draft_prefix_len": 1,
        }  # fmt: skip
    if config.dspark is not None:
        spark = config.dspark
        return {
            "markov_rank": spark.markov_rank, "markov_head_type": spark.markov_head_type,
            "enable_confidence_head": spark.confidence, "confidence_head_with_markov": spark.confidence_with_markov,
            "sample_from_anchor": config.first_row == 0,
        }  # fmt: skip
    return {}


def export_drafter(
    folder: Path, state: Mapping[str, np.ndarray], config: DrafterConfig, basis: TransferBasis | None, bits: int | None = None
) -> Path:
    """Write a drafter folder. state: every tensor of `expected_tensors(config)` as float32; basis: DSpine's, float32.

    With `bits` matrices are affine-quantised in groups of 64 and the card says so. A tensor that is not finite is an error.
    """
    expected = expected_tensors(config)
    if set(state) != set(expected):
        raise DSpineError(f"export to {folder}: tensors differ from the config's: {sorted(set(state) ^ set(expected))}")
    if (basis is None) != (config.dspine is None):
        raise DSpineError(f"export to {folder}: a transfer basis belongs to a DSpine drafter, the config is {config.method}")
    tensors: dict[str, tuple[str, np.ndarray]] = {}
    for name, shape in expected.items():
        array = np.asarray(state[name], dtype=np.float32)
        if array.shape != shape or not np.isfinite(array).all():
            raise DSpineError(
                f"export to {folder}: {name} has shape {list(array.shape)} (expected {list(shape)}) or is not finite"
            )
        if bits is not None and len(shape) == 2 and shape[1] % GROUP_SIZE == 0:
            words, scales, biases = quantize_affine(array, bits)
            stem = name.removesuffix(".weight")
            tensors[name] = ("U32", words)
            tensors[f"{stem}.scales"], tensors[f"{stem}.biases"] = (("BF16", bfloat16_bits(a)) for a in (scales, biases))
        else:
            tensors[name] = ("BF16", bfloat16_bits(array))
    if basis is not None:
        arrays = (basis.eigenvectors, basis.eigenvalues, basis.mean)
        tensors |= {name: ("F32", np.asarray(a, dtype=np.float32)) for name, a in zip(BASIS, arrays, strict=True)}
    form = {"bits": bits, "group_size": GROUP_SIZE} if bits is not None else None
    folder.mkdir(parents=True, exist_ok=True)
    card = drafter_card(dataclasses.replace(config, quantization=form))
    (folder / "config.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
