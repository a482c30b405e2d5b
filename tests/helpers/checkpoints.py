"""Rewriting golden checkpoints into the other forms that the loader takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """Edit the tensors of a checkpoint in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def change_config(folder: Path, **changes: object) -> Path:
    """Edit config.json; None drops a key."""
    config = json.loads((folder / "config.json").read_text())
    config = {k: v for k, v in {**config, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def two_file_form(folder: Path) -> Path:
    """The reference form: model.safetensors without transfer_*, transfer.safetensors with `codes`, config nested."""
    tensors = load_file(folder / "model.safetensors")
    save_file({"codes": tensors.pop("transfer_codes")}, folder / "transfer.safetensors")
    tensors.pop("transfer_ready", None)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"config": config}))
    return folder


def dspine_to_dflash(folder: Path) -> Path:
    """Drop the injection and the transfer space, keep the block-causal backbone."""

    def drop(tensors: dict[str, np.ndarray]) -> None:
        for name in [n for n in tensors if n.startswith(("injection.", "transfer_"))]:
            del tensors[name]

    change_tensors(folder, drop)
    return change_config(folder, architectures=["DFlashDraftModel"], dspine_config=None)
