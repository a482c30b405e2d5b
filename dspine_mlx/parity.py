"""The MLX side of `dspine parity`: the core's code on MLX arrays, and the Metal kernels where Metal is.

Without Metal the kernels are reported as skipped; the test suite runs their source in an emulator, through `metal_backend`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import numpy as np

from dspine import kernels_metal
from dspine.common.parity.backends import ParityBackend
from dspine.common.registry import Kernel, registered_kernel
from dspine_mlx import ops
from dspine_mlx.arrays import MlxArrays, device_name


def to_device(array: np.ndarray, dtype: str) -> mx.array:
    """float64 or int NumPy -> MLX array of the named dtype."""
    host = array.astype(np.int32 if dtype == "int32" else np.float32)
    return mx.array(host).astype(getattr(mx, dtype))


def to_host(array: mx.array) -> np.ndarray:
    """MLX -> NumPy; bfloat16 widens to float32."""
    return MlxArrays().to_host(array)[0]


def register_metal_kernels() -> None:
    """Register every kernel file of `kernels_metal` (harmless without Metal: nothing is built before a launch)."""
    for module in pkgutil.iter_modules(kernels_metal.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{kernels_metal.__name__}.{module.name}").register()


def metal_backend(device: str, *, scaled: bool, session: Callable[[], AbstractContextManager[Any]]) -> ParityBackend:
    """The Metal kernels, run by Metal itself or by whatever `session` puts in its place."""
    register_metal_kernels()
    return ParityBackend(
        "metal",
        device,
        to_device=to_device,
        to_host=to_host,
        kernel=lambda op: registered_kernel(op, "mlx", "metal"),
        scaled=scaled,
        session=session,
    )


def backends() -> list[ParityBackend]:
    """`mlx-ops` on MLX's default device, and `metal`."""
    ops.register()
    device = device_name()
    found = [
        ParityBackend(
            "mlx-ops", device, to_device=to_device, to_host=to_host, kernel=_on_cpu, fallback=True, scaled=device == "cpu"
        )
    ]
    if mx.metal.is_available():
        name = str(mx.device_info().get("device_name", "Metal"))
        on_gpu = lambda: mx.stream(mx.Device(mx.gpu))  # noqa: E731 - whatever `--device` made the default
        return [*found, metal_backend(name, scaled=False, session=on_gpu)]
    return [*found, ParityBackend("metal", "none", skipped="no Metal device here; the test suite runs the kernels emulated")]


def _on_cpu(op: str) -> Kernel | None:
    """What the CPU has beside the core's code; on a GPU `mlx-ops` is the core's code alone."""
    return registered_kernel(op, "mlx", "cpu") if device_name() == "cpu" else None
