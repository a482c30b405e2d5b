"""Files that are whole or absent; a full disk is one clear line."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from dspine.common.errors import DSpineError


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> Path:
    """Write beside `path`, flush to the disk, rename: a reader never sees half a file. Full disk: DSpineError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise_disk_full(error, path)
        raise
    return path


def raise_disk_full(error: OSError, path: Path, again: str = "run the same command again") -> None:
    """DSpineError if `error` says that the disk is full; else nothing."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent).free / 1e6
        raise DSpineError(
            f"disk full while writing {path} ({free:.0f} MB free); finished files are whole: free some space and {again}"
        ) from error


def write_json(path: Path, content: Any) -> Path:
    """One JSON document."""
    data = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    return write_whole(path, lambda file: file.write(data) and None)
