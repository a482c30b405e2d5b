"""Every environment variable of the project, read and checked in this one place."""

from __future__ import annotations

import os
from pathlib import Path

from dspine.common.errors import DSpineError

_KERNEL_CHOICES = ("auto", "reference")


def kernel_choice() -> str:
    """`DSPINE_KERNELS`: `auto` (registered kernels where they fit) or `reference` (the core's own code everywhere)."""
    value = os.environ.get("DSPINE_KERNELS", "auto")
    if value not in _KERNEL_CHOICES:
        raise DSpineError(f"DSPINE_KERNELS must be one of {', '.join(_KERNEL_CHOICES)}, got {value!r}")
    return value


def cache_folder() -> Path:
    """`DSPINE_CACHE`, else `$XDG_CACHE_HOME/dspine`, else `~/.cache/dspine`: where prepared models are kept."""
    explicit = os.environ.get("DSPINE_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dspine"
