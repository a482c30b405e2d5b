"""Target features on disk: made once, read in every epoch (`data.features: cache`).

One flat file of [token, taps x H + H] in the run's dtype, conversations end to end as the trainer holds them. Worth it where
epochs are many and the target is slow: SmolLM2 needs 7 kB a token, an 8B target 49 kB.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine.common.files import raise_disk_full, write_json
from dspine_cuda.training.data import Conversation, PackedRows, pack_epoch, pack_rows
from dspine_cuda.training.files import read_json
from dspine_cuda.training.masks import document_mask
from dspine_cuda.training.progress import progress_bar

ROWS = 8  # packed rows the target runs at a time
SAVE_EVERY = 64  # groups of rows between two notes of how far it got
_STORED = {torch.bfloat16: np.int16, torch.float32: np.float32}


class FeatureCache:
    """Invariant: rows of the first `done` packed groups (`features.json`) are in the file."""

    def __init__(
        self, folder: Path, conversations: Sequence[Conversation], sequence_length: int, target: Any, taps: Sequence[int]
    ):
        self.folder, self.target, self.taps = Path(folder), target, tuple(taps)
        self.conversations, self.sequence_length = conversations, sequence_length
        lengths = np.array([min(len(c.tokens), sequence_length) for c in conversations])
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.width = (len(self.taps) + 1) * target.shape.hidden_size
        self.kind = _STORED[target.dtype]
        self._file = self.folder / "features.bin"
        self._store: np.memmap | None = None

    def facts(self) -> dict[str, Any]:
        """What the file's content depends on."""
        digest = hashlib.blake2b(digest_size=16)
        for conversation in self.conversations:
            digest.update(np.asarray(conversation.tokens[: self.sequence_length], dtype=np.int64).tobytes())
        return {
            "target": self.target.info.name, "taps": list(self.taps), "width": self.width, "tokens": int(self.starts[-1]),
            "dtype": self.target.info.dtype, "conversations": digest.hexdigest(),
        }  # fmt: skip

    def prepare(self, progress: bool = True) -> None:
        """Make what is missing; an interrupted run goes on. DSpineError where the disk has no room."""
        path, facts = self.folder / "features.json", self.facts()
        state = read_json(path) if path.is_file() else {"facts": facts, "done": 0}
        if not isinstance(state, dict) or state.get("facts") != facts:
            raise DSpineError(f"{self.folder} holds features of another target or data; use another data.cache_dir")
        rows = pack_epoch(np.diff(self.starts), self.sequence_length, 64, np.random.default_rng(0))
        groups = [rows[i : i + ROWS] for i in range(0, len(rows), ROWS)]
        size = int(self.starts[-1]) * self.width * np.dtype(self.kind).itemsize
        if path.is_file() and self._file.is_file() and self._file.stat().st_size == size:
            done = state["done"]
        else:  # without its file the note is worth nothing
            done = 0
            self._reserve(size)
        self._store = np.memmap(self._file, dtype=self.kind, mode="r+", shape=(int(self.starts[-1]), self.width))
        with progress_bar(len(groups), progress and done < len(groups), "features", every_call=False) as advance:
            for number in range(done, len(groups)):
                self._fill(pack_rows(self.conversations, groups[number], self.sequence_length))
                if (number + 1) % SAVE_EVERY == 0 or number + 1 == len(groups):
                    self._store.flush()  # type: ignore[union-attr]
                    write_json(path, {"facts": facts, "done": number + 1})
                advance(number + 1, "")

    def open(self) -> None:
        """Read a file that another process prepared."""
        self._store = np.memmap(self._file, dtype=self.kind, mode="r", shape=(int(self.starts[-1]), self.width))

    def _reserve(self, size: int) -> None:
        """A new file of `size` bytes that are really there: a mapping into a disk that fills up later ends the process."""
        instead = "use another data.cache_dir, or data.features=recompute"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.folder).free
            if free < size:
                raise DSpineError(
                    f"the features take {size / 1e9:.1f} GB, {self.folder} has {free / 1e9:.1f} GB free: {instead}"
                )
            with self._file.open("wb") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
                else:
                    file.truncate(size)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.unlink()
            raise_disk_full(error, self._file, instead)
            raise DSpineError(f"cannot write {self._file}: {error.strerror or error}; {instead}") from error

    def _fill(self, rows: PackedRows) -> None:
        assert self._store is not None and rows.members is not None
        device = self.target.device
        tokens, positions, documents = (torch.from_numpy(a).to(device) for a in (rows.tokens, rows.positions, rows.documents))
        features, last = self.target.eager_features(tokens, positions, document_mask(documents), self.taps)
        states = torch.cat([features, last], dim=-1).cpu()
        stored = states.view(torch.int16).numpy() if states.dtype == torch.bfloat16 else states.numpy()
        for row, members in enumerate(rows.members):
            start = 0
            for index, count in members:
                self._store[self.starts[index] : self.starts[index] + count] = stored[row, start : start + count]
                start += count

    def gather(self, rows: PackedRows) -> Tensor:
        """States [B, S, taps x H + H] of packed rows, zero on padding."""
        assert self._store is not None and rows.members is not None
        states = np.zeros((*rows.tokens.shape, self.width), dtype=self.kind)
        for row, members in enumerate(rows.members):
            start = 0
            for index, count in members:
                states[row, start : start + count] = self._store[self.starts[index] : self.starts[index] + count]
                start += count
        tensor = torch.from_numpy(states)
        return tensor.view(torch.bfloat16) if self.kind is np.int16 else tensor
