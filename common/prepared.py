"""Folders made once in the user's cache: built beside their place under a file lock, published by one rename.

Safe to call from several processes at once and to kill at any moment.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dspine.common.errors import DSpineError

WEIGHTS = "model.safetensors"


def publish(final: Path, files: Sequence[str], fill: Callable[[Path], None]) -> Path:
    """`final`, made by `fill(temporary folder)` unless it is whole already. DSpineError where the cache cannot be written."""
    if is_whole(final, files):
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.parent / f".{final.name}.lock"):
            if not is_whole(final, files):
                _build(final, fill)
    except OSError as error:
        raise DSpineError(f"cannot write the prepared model to {final}: {error}; set DSPINE_CACHE to another folder") from error
    return final


def _build(final: Path, fill: Callable[[Path], None]) -> None:
    """Fill a temporary folder beside `final`, then rename. Called under the lock only."""
    for leftover in final.parent.glob(f".{final.name}.partial-*"):  # of a run that was killed: nobody else holds the lock
        shutil.rmtree(leftover)
    partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.partial-", dir=final.parent))
    try:
        fill(partial)
        partial.chmod(0o755)  # mkdtemp makes it private
        if final.exists():
            shutil.rmtree(final)  # not whole, or we would not be here
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive lock between processes; the kernel drops it when its holder dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def is_whole(folder: Path, files: Sequence[str]) -> bool:
    """All `files` there, and model.safetensors as long as its own header says."""
    if not all((folder / name).is_file() for name in files):
        return False
    weights = folder / WEIGHTS
    size = weights.stat().st_size
    with weights.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = handle.read(length) if length < size else b""
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        return size == 8 + length + max(entry["data_offsets"][1] for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError):  # a damaged header, of whatever shape
        return False
