"""Files that are whole or absent; a full disk is one clear line."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from dspine.common.errors import DSpineError

AGAIN = "run the same command again"


def write_whole(path: Path, write: Callable[[BinaryIO], None], again: str = AGAIN) -> Path:
    """Write beside `path`, flush to the disk, rename: a reader never sees half a file. A device or a pipe is written as it is.
    DSpineError where the disk is full (`again`: what to do then) or the place cannot be written."""
    temporary = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a rename would put a file in the place of /dev/null
            with path.open("wb") as file:
                write(file)
            return path
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise_disk_full(error, path, again)
        raise DSpineError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def check_place(option: str, path: Path) -> None:
    """DSpineError unless `write_whole` can write to `path`; asked before the work whose result goes there."""
    try:
        if path.is_dir():
            raise DSpineError(f"{option}: {path} is a folder: name a file")
        probe = path.with_name(path.name + ".part")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # a device or a pipe is written as it is
            return
        probe.open("wb").close()
        probe.unlink()
    except OSError as error:
        raise DSpineError(f"{option}: cannot write {path} ({error.strerror or error}): name another place") from error


def raise_disk_full(error: OSError, path: Path, again: str = AGAIN) -> None:
    """DSpineError if `error` says that the disk is full, or that no file may be this long; else nothing."""
    if error.errno == errno.EFBIG:
        raise DSpineError(
            f"{path} would be longer than the file system or the shell (ulimit -f) allows; finished files are whole: write "
            f"elsewhere or raise the limit, and {again}"
        ) from error
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent).free / 1e6
        raise DSpineError(
            f"disk full while writing {path} ({free:.0f} MB free); finished files are whole: free some space and {again}"
        ) from error


def write_json(path: Path, content: Any) -> Path:
    """One JSON document."""
    data = (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    return write_whole(path, lambda file: file.write(data) and None)
