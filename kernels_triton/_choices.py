"""Launch parameters as small dataclasses of whole numbers, each of which `DSPINE_KERNELS_TRY` may replace."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from dspine.common.environment import kernel_variants
from dspine.common.errors import DSpineError

T = TypeVar("T")
FREE = ("stages", "split", "late")  # fields that need not be powers of two


def choice(name: str, default: T) -> T:
    """`default`, or what `name=…` in DSPINE_KERNELS_TRY says: a number for each field, between commas, in their order.

    DSpineError where there are too few or too many, or where one that must be a power of two is not.
    """
    text = kernel_variants().get(name)
    return default if text is None else read(name, text, default)


def read(name: str, text: str, default: T) -> T:
    """The numbers of `text` as an object like `default` (a dataclass)."""
    names = [field.name for field in fields(default)]  # type: ignore[arg-type]
    parts = text.split(",")
    if len(parts) != len(names) or not all(part.isdigit() for part in parts):
        raise DSpineError(f"launch parameters of {name}: {','.join(names)} expected, got {text!r}")
    made: dict[str, Any] = dict(zip(names, map(int, parts), strict=True))
    for key, value in made.items():
        if key != "late" and value < 1 or key not in FREE and value & (value - 1):
            raise DSpineError(f"launch parameters of {name}: {key} must be a power of two, got {value} in {text!r}")
    return type(default)(**made)


def written(parameters: Any) -> str:
    """The text that `read` takes."""
    return ",".join(str(int(getattr(parameters, field.name))) for field in fields(parameters))
