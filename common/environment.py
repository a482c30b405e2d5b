"""Every environment variable of the project, read and checked in this one place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dspine.common.errors import DSpineError

_KERNEL_CHOICES = ("auto", "reference")
_VARIANTS = (
    "attention", "attention_ahead", "experts_ahead", "gated_rows", "late_next",
    "injection_messages", "injection_write", "transition_gate", "transition_part",
)  # fmt: skip


def kernel_choice() -> str:
    """`DSPINE_KERNELS`: `auto` (registered kernels where they fit) or `reference` (the core's own code everywhere)."""
    value = os.environ.get("DSPINE_KERNELS", "auto")
    if value not in _KERNEL_CHOICES:
        raise DSpineError(f"DSPINE_KERNELS must be one of {', '.join(_KERNEL_CHOICES)}, got {value!r}")
    return value


def kernels_off() -> frozenset[str]:
    """`DSPINE_KERNELS_OFF`: names of operations, between commas, whose registered kernels are not used (to measure without)."""
    return frozenset(name for name in os.environ.get("DSPINE_KERNELS_OFF", "").replace(",", " ").split() if name)


def early_launches() -> bool:
    """`DSPINE_EARLY_LAUNCH`: `1` (Triton kernels may start before the one in front has ended, where the GPU can) or `0`."""
    value = os.environ.get("DSPINE_EARLY_LAUNCH", "1")
    if value not in ("0", "1"):
        raise DSpineError(f"DSPINE_EARLY_LAUNCH must be 0 or 1, got {value!r}")
    return value == "1"


def kernel_variants() -> dict[str, str]:
    """`DSPINE_KERNELS_TRY`: `name=value` pairs between blanks or semicolons, each in place of a choice that a kernel makes by
    itself (to measure; docs/kernels.md lists the names)."""
    found = {}
    for part in os.environ.get("DSPINE_KERNELS_TRY", "").replace(";", " ").split():
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            raise DSpineError(f"DSPINE_KERNELS_TRY must hold name=value pairs between blanks, got {part!r}")
        if name not in _VARIANTS and not name.startswith("linear_rows."):
            raise DSpineError(
                f"DSPINE_KERNELS_TRY knows {', '.join(_VARIANTS)} and linear_rows.COLUMNSxSIZE, got {name!r} (docs/kernels.md)"
            )
        found[name] = value
    return found


def cache_folder() -> Path:
    """`DSPINE_CACHE`, else `$XDG_CACHE_HOME/dspine`, else `~/.cache/dspine`: where prepared models are kept."""
    explicit = os.environ.get("DSPINE_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dspine"


def interpret_triton() -> bool:
    """Have Triton interpret its kernels on the CPU; False where Triton is already imported and compiles.

    Triton reads `TRITON_INTERPRET` when each function is decorated, its own library included: only setting it before the
    first import works.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    if "triton" in sys.modules:
        return False
    os.environ["TRITON_INTERPRET"] = "1"
    return True


def local_rank() -> int:
    """`LOCAL_RANK` as `torchrun` sets it: this process among those of its machine; without it, its rank."""
    value = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    if not value.isdecimal():
        raise DSpineError(f"LOCAL_RANK must be a whole number, got {value!r}: start with torchrun, or unset it")
    return int(value)


def process_group() -> tuple[int, int]:
    """`WORLD_SIZE` and `RANK` as `torchrun` sets them: (processes, this one's number); (1, 0) without it."""
    values = {"WORLD_SIZE": os.environ.get("WORLD_SIZE", "1"), "RANK": os.environ.get("RANK", "0")}
    for name, value in values.items():
        if not value.isdecimal():
            raise DSpineError(f"{name} must be a whole number, got {value!r}: start with torchrun, or unset it")
    world, rank = int(values["WORLD_SIZE"]), int(values["RANK"])
    if not rank < world:
        raise DSpineError(f"RANK must be below WORLD_SIZE, got {rank} of {world}: start with torchrun, or unset both")
    return world, rank
