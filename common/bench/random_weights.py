"""Folders of random weights in the real layout: what a preset names, as something that any runtime can load.

A folder lies in the user's cache and is made once. Numbers come out of one pool of normal draws, at a place that differs for
each tensor: making them costs no more than writing the file. The values mean nothing; time and bytes do not depend on them,
but for which experts are hit, and those are counted.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.bench.presets import Preset
from dspine.common.bench.shapes import Shapes, spread, target_tensors
from dspine.common.checkpoints import CODES, expected_tensors
from dspine.common.configs import parse_drafter_config
from dspine.common.environment import cache_folder
from dspine.common.errors import DSpineError

_POOL = 1 << 22  # draws; tensors longer than that repeat them
_REVISION = 1


def preset_folders(preset: Preset, *, weights: bool = True) -> tuple[Path, Path]:
    """(target folder, drafter folder) of a preset; `weights` False: the target's folder has its config.json only, for a
    runtime that makes random weights in its own memory."""
    shapes = target_tensors(preset.config)
    target = _prepare(preset.config, shapes if weights else {}, "target")
    config = parse_drafter_config(preset.drafter, where=f"preset {preset.name}")
    drafter = expected_tensors(config)
    if config.dspine is not None:
        drafter[CODES] = (config.vocab_size, config.dspine.transfer_rank)
    return target, _prepare(preset.drafter, drafter, "drafter")


def _prepare(config: dict[str, Any], shapes: Shapes, role: str) -> Path:
    """The folder for this card, made where it is not there yet."""
    key = hashlib.sha256(json.dumps([config, sorted(shapes.items()), _REVISION], sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder() / "random" / f"{role}-{key}"
    if (folder / "config.json").is_file():
        return folder
    size = sum(2 * int(np.prod(shape)) for shape in shapes.values())
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if size > free:
        raise DSpineError(
            f"random weights take {size / 2**30:.1f} GiB and {folder} has {free / 2**30:.1f} GiB free: use --layers N, or "
            "set DSPINE_CACHE to a larger disk"
        )
    if shapes:
        write_random(folder / "model.safetensors", shapes)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")  # last: marks a whole folder
    return folder


def write_random(path: Path, shapes: Shapes, seed: int = 0) -> None:
    """A safetensors file of bfloat16 tensors, a tensor at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pool = np.random.default_rng(seed).standard_normal(
        min(_POOL, max(int(np.prod(s)) for s in shapes.values())), dtype=np.float32
    )
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for index, (name, shape) in enumerate(shapes.items()):
            mean, deviation = spread(name, shape)
            for piece in _pieces(pool, int(np.prod(shape)), index):
                file.write(_bfloat16(piece * np.float32(deviation) + np.float32(mean)).tobytes())
    partial.replace(path)


def _pieces(pool: np.ndarray, count: int, index: int) -> Iterator[np.ndarray]:
    """`count` numbers of the pool, from a place of the tensor's own, round and round."""
    at = index * 7919 % len(pool)
    while count:
        piece = pool[at : at + count]
        yield piece
        count, at = count - len(piece), 0


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 -> the upper halves, rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
