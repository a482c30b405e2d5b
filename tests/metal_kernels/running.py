"""Runs a kernel under the emulator and the core's NumPy code in float64 on the very same numbers, and compares."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from dspine.kernels_metal._launch import built_by
from tests.metal.emulator import emulated_metal_kernel

SCHEDULES = (("forward", 0), ("reverse", 0), ("random", 1), ("random", 2))
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True)
class Low:
    """float32 numbers that fit `dtype` exactly: the kernel gets them in that dtype, the reference in float64."""

    values: np.ndarray
    dtype: str


def low(values: Any, dtype: str) -> Low:
    """`values` rounded to `dtype`."""
    rounded = mx.array(np.asarray(values, dtype=np.float32)).astype(DTYPES[dtype]).astype(mx.float32)
    return Low(np.array(rounded), dtype)


def _converted(x: Any, of_low: Any, of_array: Any) -> Any:
    if isinstance(x, Low):
        return of_low(x)
    if isinstance(x, np.ndarray):
        return of_array(x)
    if is_dataclass(x) and not isinstance(x, type):
        return type(x)(**{f.name: _converted(getattr(x, f.name), of_low, of_array) for f in fields(x)})
    return x


def on_device(x: Any) -> Any:
    """Arrays as MLX arrays (float64 as float32), dataclasses of them too; other things as they are."""
    return _converted(
        x,
        lambda v: mx.array(v.values).astype(DTYPES[v.dtype]),
        lambda v: mx.array(v.astype(np.float32) if v.dtype == np.float64 else v),
    )


def exact(x: Any) -> Any:
    """Float arrays as float64, after the rounding that the kernel's input had."""
    wide = lambda v: v.astype(np.float32).astype(np.float64) if v.dtype.kind == "f" else v  # noqa: E731
    return _converted(x, lambda v: v.values.astype(np.float64), wide)


def flat(result: Any) -> list[Any]:
    """The arrays of a result, in order."""
    if isinstance(result, tuple | list):
        return [array for part in result for array in flat(part)]
    if is_dataclass(result):
        return [array for f in fields(result) for array in flat(getattr(result, f.name))]
    return [result]


def numpy(x: mx.array) -> np.ndarray:
    """bfloat16 and float16 as float32, bit for bit otherwise."""
    return np.array(x.astype(mx.float32) if x.dtype in (mx.bfloat16, mx.float16) else x)


def run_metal(kernel: Any, args: tuple[Any, ...], *, schedule: str = "forward", seed: int = 0) -> list[np.ndarray]:
    """The outputs of one run under one order of lanes."""
    return run_from(functools.partial(emulated_metal_kernel, schedule=schedule, seed=seed), kernel, args)


def run_from(factory: Any, kernel: Any, args: tuple[Any, ...]) -> list[np.ndarray]:
    """The outputs, of kernels that `factory` makes."""
    with built_by(factory):
        return [numpy(x) for x in flat(kernel(*(on_device(a) for a in args)))]


def run_every_schedule(kernel: Any, args: tuple[Any, ...]) -> list[np.ndarray]:
    """The outputs, which every order of lanes must give to the bit."""
    first, *others = (run_metal(kernel, args, schedule=s, seed=seed) for s, seed in SCHEDULES)
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert a.tobytes() == b.tobytes()
    return first


def run_reference(operation: Any, args: tuple[Any, ...]) -> list[np.ndarray]:
    """The core's own code in float64."""
    return [np.asarray(x) for x in flat(operation.reference(*(exact(a) for a in args)))]


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    """Relative Frobenius error; infinite where `got` is not finite."""
    if not np.isfinite(got).all():
        return float("inf")
    size = np.linalg.norm(expected.astype(np.float64))
    return float(np.linalg.norm(got.astype(np.float64) - expected) / (size if size else 1.0))


def assert_close(got: list[np.ndarray], expected: list[np.ndarray], bounds: tuple[float, ...]) -> None:
    """Integers equal, floats within their bound (one an output; the last serves the rest)."""
    assert len(got) == len(expected)
    for index, (g, e) in enumerate(zip(got, expected, strict=True)):
        assert g.shape == e.shape
        if g.dtype.kind in "iu":
            np.testing.assert_array_equal(g, e)
        else:
            error, bound = relative_error(g, e), bounds[min(index, len(bounds) - 1)]
            assert error <= bound, f"output {index}: error {error:.2e}, bound {bound:.0e}"
