"""What the parity suite needs of a backend: moving arrays, and the kernels it registers.

A runtime offers its backends through `Runtime.parity_backends`. A backend is never dropped: one that cannot run here
comes with the reason in `skipped`, and every result of it says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspine.common.registry import Kernel

Array = Any
BACKENDS = ("mlx-ops", "metal", "torch-ops", "triton")


@dataclass(frozen=True)
class ParityBackend:
    """One way to run the operations on this machine.

    to_device(array NumPy, dtype `float32` | `bfloat16` | `int32`) -> array of the library; to_host(array) -> NumPy (float32
    for bfloat16). `kernel(operation)` -> the registered `Kernel`, or None where there is none; `kernel` itself None: the
    core's own code. `fallback`: where it has no kernel, the core's code is what this backend stands for. `scaled`:
    emulated or interpreted, so real model shapes are cut down. `session`: entered around every run.
    """

    name: str
    device: str
    skipped: str | None = None
    to_device: Callable[[np.ndarray, str], Array] | None = None
    to_host: Callable[[Array], np.ndarray] | None = None
    kernel: Callable[[str], Kernel | None] | None = None
    fallback: bool = False
    scaled: bool = False
    session: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Value:
    """An input in float64 (or int) with its role: `x` takes the dtype under test, `f32` is float32, `int` is int32."""

    array: np.ndarray
    role: str = "x"


def map_values(function: Callable[[Value], Any], tree: Any) -> Any:
    """`tree` (tuples, dataclasses, plain objects) with every `Value` replaced by `function(value)`."""
    if isinstance(tree, Value):
        return function(tree)
    if isinstance(tree, tuple):
        return tuple(map_values(function, item) for item in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = {field.name: map_values(function, getattr(tree, field.name)) for field in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **changed)
    return tree


def rounded(value: Value, dtype: str) -> np.ndarray:
    """The numbers that a backend really gets, in float64 (integers as int64): rounded as its role says."""
    if value.role == "int":
        return value.array.astype(np.int64)
    single = value.array.astype(np.float32)
    if value.role == "x" and dtype == "bfloat16":
        single = to_bfloat16(single)
    return single.astype(np.float64)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16 (ties to even), as float32; NaN and infinities stay."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), nearest.view(np.float32), x)


def role_dtype(value: Value, dtype: str) -> str:
    """Dtype name of a value on the device."""
    return {"x": dtype, "f32": "float32", "int": "int32"}[value.role]
