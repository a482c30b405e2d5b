"""Strict reading of a target's safetensors: one file, or shards through `model.safetensors.index.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspine.common.checkpoints import read_header
from dspine.common.errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_LISTED = 6  # names shown in an error before "and N more"


def listed(names: list[str]) -> str:
    """Names for an error line: `none`, or the first few and a count."""
    if not names:
        return "none"
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")


class TargetTensors:
    """The tensors of one model folder. Every tensor must be asked for, and every one that is asked for must be there."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        wanted = self._index()
        for path in sorted(set(wanted.values())) if wanted else [self._single()]:
            for name, entry in read_header(path).items():
                self._file_of[name] = path
                self.shapes[name] = entry.shape
        astray = sorted(name for name, path in wanted.items() if self._file_of.get(name) != path)
        if astray:
            raise CheckpointError(f"{self.folder}: {INDEX} places tensors in shards that lack them: {listed(astray)}")
        self._open: dict[Path, Any] = {}

    def _single(self) -> Path:
        path = self.folder / SINGLE
        if path.is_file():
            return path
        others = sorted(p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".safetensors", ".gguf", ".pt"))
        raise CheckpointError(f"{self.folder}: expected {SINGLE} or {INDEX}, found weight files: {listed(others)}")

    def _index(self) -> dict[str, Path]:
        path = self.folder / INDEX
        if not path.is_file():
            return {}
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            names = {name: str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: expected JSON with a weight_map of names to files ({error!r})") from error
        outside = sorted({file for file in names.values() if Path(file).name != file})
        if outside or not names:
            raise CheckpointError(f"{path}: weight_map must name files of this folder, got: {listed(outside)}")
        missing = sorted({file for file in names.values() if not (self.folder / file).is_file()})
        if missing:
            raise CheckpointError(f"{self.folder}: shards that {INDEX} names are missing: {listed(missing)}")
        return {name: self.folder / file for name, file in names.items()}

    def check(self, expected: dict[str, tuple[int, ...]], *, optional: frozenset[str] = frozenset()) -> None:
        """Names and shapes must be exactly `expected` (plus `optional`); the error lists what differs."""
        found = {name for name in self.shapes if not name.endswith(".rotary_emb.inv_freq")}  # a buffer of old Llama files
        missing, extra = sorted(set(expected) - found), sorted(found - set(expected) - optional)
        if missing or extra:
            raise CheckpointError(
                f"{self.folder}: tensors do not fit config.json; missing: {listed(missing)}; unused: {listed(extra)}"
            )
        wrong = [
            f"{name} is {list(self.shapes[name])}, config.json asks for {list(shape)}"
            for name, shape in sorted(expected.items())
            if self.shapes[name] != shape
        ]
        if wrong:
            raise CheckpointError(f"{self.folder}: wrong shapes: {listed(wrong)}")

    def read(self, name: str) -> Tensor:
        """One tensor as stored, on the CPU."""
        path = self._file_of[name]
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            return self._open[path].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error}); fetch the file again") from error

    def read_as(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One tensor as `dtype` on `device`, in memory of its own (not the mapped file)."""
        tensor = self.read(name)
        return tensor.to(device=device, dtype=dtype, copy=True)
