"""One drafter in every layout it is published in, from files on disk, on both runtimes: the drafts are those of the golden
layout, number for number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("mlx.core", reason="mlx is not installed")

import mlx.core as mx
import torch
from safetensors.numpy import load_file, save_file

from dspine.common.protocols import DraftRequest
from dspine_cuda.drafter import load_drafter as load_torch
from dspine_mlx.drafter import load_drafter as load_mlx
from tests.helpers.checkpoints import two_file_form
from tests.helpers.goldens import golden_arrays, golden_folder
from tests.mlx.goldens import golden_model_target as mlx_target
from tests.torch.test_drafter_goldens import golden_model_target as torch_target

CONTEXT, ANCHOR = 14, 3


def card_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def write(folder: Path, card: dict[str, Any] | None = None, rename: Callable[[str], str] | None = None) -> Path:
    """Another card, other names."""
    if card is not None:
        (folder / "config.json").write_text(json.dumps(card))
    if rename is not None:
        path = folder / "model.safetensors"
        save_file({rename(name): array for name, array in load_file(path).items()}, path)
    return folder


def speculators(folder: Path) -> Path:
    """Taps count the embedding as 0; the layers' facts stand in a card inside the card."""
    flat = card_of(folder)
    facts = flat.get("dflash_config", {}) | {k: flat[k] for k in ("mask_token_id", "target_layer_ids") if k in flat}
    own = ("architectures", "dflash_config", "num_target_layers", "block_size", "mask_token_id", "target_layer_ids")
    kind = "dspark" if "markov_rank" in flat else "dflash"
    heads = {k: flat[k] for k in flat if k.startswith(("markov", "enable_confidence", "confidence"))}
    card = {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"], "speculators_model_type": kind,
        "transformer_layer_config": {k: v for k, v in flat.items() if k not in (*own, *heads)}, "draft_vocab_size": 128,
        "block_size": flat["block_size"], "mask_token_id": facts["mask_token_id"], **heads,
        "aux_hidden_state_layer_ids": [i + 1 for i in facts["target_layer_ids"]],
    }  # fmt: skip
    return write(folder, card)


def forge_dspark(folder: Path) -> Path:
    """SpecForge's DSpark: keys nested, heads under `logit_head.`."""
    flat = card_of(folder)
    nested = {
        k: flat.pop(k) for k in list(flat) if k.startswith(("mask", "target_", "markov", "enable_", "confidence", "num_an"))
    }
    flat |= {"architectures": ["DSparkDraftModel"], "dflash_config": nested | {"projector_type": "dspark"}}
    heads = ("markov_head.", "confidence_head.")
    return write(folder, flat, lambda name: f"logit_head.{name}" if name.startswith(heads) else name)


def served_domino(folder: Path) -> Path:
    """As SGLang serves it: `DFlashDraftModel` with a projector type, a prefix before every name."""
    return write(folder, card_of(folder) | {"architectures": ["DFlashDraftModel"]}, lambda name: f"model.{name}")


def muse(folder: Path) -> Path:
    """The vendor's encoder names, PyPI dflash's codebooks, the prefix, a stored rotary table."""
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
        "candidate_selector.predecessor_codebook": "candidate_selector.predecessor_codebook.weight",
        "candidate_selector.successor_codebook": "candidate_selector.successor_codebook.weight",
    }
    write(folder, None, lambda name: f"model.{names.get(name, name)}")
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"model.rotary_emb.inv_freq": np.ones(8, np.float32)}, path)
    return folder


def shards(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for part in (0, 1):
        some = {name: array for i, (name, array) in enumerate(sorted(tensors.items())) if i % 2 == part}
        save_file(some, folder / f"model-0000{part + 1}-of-00002.safetensors")
    return folder


def older_card(folder: Path) -> Path:
    """Flat rope keys only, block size inside, ids at the top level."""
    card = card_of(folder)
    nested = card.pop("dflash_config")
    del card["rope_parameters"]
    card |= {"mask_token_id": nested["mask_token_id"], "target_layer_ids": nested["target_layer_ids"]}
    return write(folder, card | {"dflash_config": {"block_size": card.pop("block_size")}})


LAYOUTS = {
    "dflash, older and newer keys mixed": ("dflash", older_card),
    "dflash, shards": ("dflash", shards),
    "dflash, speculators": ("dflash", speculators),
    "dflash2, vendor names": ("dflash2", muse),
    "domino, as served": ("domino_shift", served_domino),
    "dspark vanilla, speculators": ("dspark_vanilla", speculators),
    "dspark rnn, SpecForge": ("dspark_rnn", forge_dspark),
    "dspine, two files": ("dspine", two_file_form),
}


def drafts(runtime: str, folder: Path, case: str) -> dict[str, np.ndarray]:
    """Every field of a sampled proposal behind fourteen tokens of context, and the layers whose outputs are asked for."""
    features = golden_arrays(case)["features"][None, :CONTEXT]
    if runtime == "torch":
        drafter, wrap, host = load_torch(folder, torch_target(case)), torch.from_numpy, torch.Tensor.numpy
    else:
        drafter, wrap, host = load_mlx(folder, mlx_target(case)), mx.array, np.array
    cache = drafter.make_cache(64)
    drafter.commit(cache, wrap(features))
    uniforms = np.full((1, drafter.config.num_proposals), 0.5, dtype=np.float32)
    proposal = drafter.propose(cache, wrap(np.array([ANCHOR], dtype=np.int32)), DraftRequest(1.0, wrap(uniforms), signals=True))
    found = {name: getattr(proposal, name) for name in ("tokens", "finite", "candidates", "q", "confidence", "entropy")}
    taps = {"taps": np.array(drafter.config.target_layer_ids)}
    return taps | {name: host(array) for name, array in found.items() if array is not None}


@pytest.mark.parametrize("runtime", ["torch", "mlx"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layout_changes_no_number(name, runtime, tmp_path):
    case, rewrite = LAYOUTS[name]
    want = drafts(runtime, golden_folder(case, tmp_path / "golden_case"), case)
    folder = rewrite(golden_folder(case, tmp_path / "rewritten"))
    got = drafts(runtime, folder, case)
    assert got.keys() == want.keys() and got["finite"].all()
    for field, array in want.items():
        np.testing.assert_array_equal(got[field], array, err_msg=f"{name}: {field}")
