"""Files of training data: lines of JSON, and npz shards in the trainer's form."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dspine.common.errors import DSpineError
from dspine.common.files import write_whole


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """One JSON value a line."""

    def write(file: BinaryIO) -> None:
        for row in rows:
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())

    return write_whole(path, write)


def read_json(path: Path) -> Any:
    """One JSON document that this project wrote; a damaged one is a DSpineError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DSpineError(f"{path}: damaged ({error}); delete it to have it made again") from error


def read_npz(path: Path, what: str = "npz shard") -> dict[str, np.ndarray]:
    """All arrays of an npz file; a damaged one is a DSpineError that calls it `what`."""
    try:
        with path.open("rb") as file, np.load(file) as content:  # numpy leaves a damaged file of its own opening open
            return {name: content[name] for name in content.files}
    except (
        OSError,
        ValueError,
        EOFError,
        TypeError,
        MemoryError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DSpineError(f"{path}: not a readable {what} ({error}); delete it or have it made again") from error


def json_lines(text: str) -> list[str]:
    """Lines of a JSONL file. `str.splitlines` would also cut at U+2028 and its like, which may stand inside a JSON string."""
    return text.split("\n")


def write_shard(path: Path, rows: Sequence[tuple[np.ndarray, int, bool]], vocab_size: int) -> Path:
    """rows: (tokens int [n], tokens before the answer, the answer is greedy) -> one npz shard (see `data.py`)."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    empty = np.zeros(0, dtype=dtype)
    arrays = {
        "tokens": np.concatenate([empty, *(tokens.astype(dtype) for tokens, _, _ in rows)]),
        "lengths": np.array([len(tokens) for tokens, _, _ in rows], dtype=np.int32),
        "prompt_lengths": np.array([prompt for _, prompt, _ in rows], dtype=np.int32),
        "greedy": np.array([greedy for _, _, greedy in rows], dtype=bool),
    }
    return write_whole(path, lambda file: np.savez_compressed(file, **arrays))
