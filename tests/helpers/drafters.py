"""Drafters with random weights as checkpoint folders, and real drafters whose drafts are put right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from dspine.common.arrays import array_namespace
from dspine.common.checkpoints import CODES, expected_tensors
from dspine.common.configs import parse_drafter_config
from dspine.common.transfer_space import transfer_basis, transfer_codes

DSPARK = {"markov_rank": 5, "enable_confidence_head": True, "confidence_head_with_markov": True}
DOMINO = {"projector_type": "domino", "pure_draft_prefix_len": 1, "gru_hidden_dim": 7, "emb_dim": 6}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (architecture, settings in dflash_config)
    "dflash": ("DFlashDraftModel", {}),
    "dspine": ("DSpineDraftModel", {}),
    "dflash2": (
        "DFlash2DraftModel",
        {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 5, "selector_top_k": 4},
    ),
    "domino": ("DominoDraftModel", DOMINO | {"shift_label": True}),
    "domino-own": ("DFlashDraftModel", DOMINO | {"shift_label": False}),
    "dspark-vanilla": ("Qwen3DSparkModel", DSPARK | {"markov_head_type": "vanilla"}),
    "dspark-gated": ("DSparkDraftModel", DSPARK | {"markov_head_type": "gated"}),
    "dspark-rnn": ("DSparkDraftModel", DSPARK | {"markov_head_type": "rnn"}),
    "dspark-bare": ("Qwen3DSparkModel", {"markov_rank": 0}),
    "dspark-spare-row": ("DSparkDraftModel", DSPARK | {"markov_head_type": "gated", "sample_from_anchor": False}),
}


def drafter_card(method: str, block: int, head: np.ndarray, target_layers: int, **changes: Any) -> dict[str, Any]:
    """config.json of a 2-layer drafter of one of `KINDS` for a target with LM head `head` [V, H]; its last token id is the
    mask. `block` is the verify window, whatever the kind's own card counts."""
    vocab, hidden = head.shape
    card: dict[str, Any] = {
        "architectures": [KINDS[method][0]],
        "hidden_size": hidden, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "vocab_size": vocab, "max_position_embeddings": 1024,
        "rope_theta": 10000.0, "num_target_layers": target_layers,
        "block_size": block - method.startswith("dspark"),
        "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": [1, 2], **KINDS[method][1]},
    }  # fmt: skip
    if method == "dspine":
        card["dspine_config"] = {"transfer_rank": 8, "message_size": 6, "top_k": 4}
    return card | changes


def drafter_folder(
    folder: Path, method: str, block: int, head: np.ndarray, target_layers: int = 4, seed: int = 0, **changes: Any
) -> Path:
    """A drafter of random weights for a toy target whose LM head is `head` [V, H]."""
    folder.mkdir(exist_ok=True)
    card = drafter_card(method, block, head, target_layers, **changes)
    config = parse_drafter_config(card)
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        scale = 1.0 / shape[-1] ** 0.5 if len(shape) > 1 else 0.1
        tensors[name] = rng.normal(1.0 if name.endswith("norm.weight") else 0.0, scale, shape).astype(np.float32)
    if config.dspine is not None:
        wide = head.astype(np.float64)
        tensors[CODES] = transfer_codes(wide, transfer_basis(wide, config.dspine.transfer_rank)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(card))
    return folder


class Prompted:
    """The real drafter, whose drafts are overwritten by the right text except at every `wrong_every`-th position: rounds of
    every acceptance length, while context K/V, proposals and commits are the real ones."""

    def __init__(self, drafter: Any, prompt: list[int], text: list[int], wrong_every: int) -> None:
        self.drafter, self.prompt, self.text, self.wrong_every = drafter, prompt, text, wrong_every
        self.config, self.info, self.make_cache, self.commit = drafter.config, drafter.info, drafter.make_cache, drafter.commit

    def propose(self, cache: Any, anchor: Any, request: Any) -> Any:
        proposal = self.drafter.propose(cache, anchor, request)
        start = cache.length - len(self.prompt) + 1
        right = self.text[start : start + self.config.num_proposals]
        vocab = self.config.vocab_size
        rows = [(t + (i % self.wrong_every == 0)) % vocab for i, t in enumerate(right, start=start)]
        rows += [0] * (self.config.num_proposals - len(rows))
        xp = array_namespace(proposal.tokens)
        place = {"device": proposal.tokens.device} if hasattr(proposal.tokens, "device") else {}
        return replace(proposal, tokens=xp.asarray([rows], dtype=xp.int32, **place))
