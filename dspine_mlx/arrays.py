"""Between host and device: the one place where the MLX runtime reads an array."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

_SHORT = 64  # tokens


class MlxArrays:
    """`ArrayOps` of MLX. Holds no arrays and no stream, so one object serves every thread."""

    def to_device(self, array: Any) -> mx.array:
        """NumPy array, list or number -> MLX array of the same dtype; an MLX array as it is."""
        return array if isinstance(array, mx.array) else mx.array(np.asarray(array))

    def to_host(self, *arrays: mx.array) -> tuple[np.ndarray, ...]:
        """NumPy copies after ONE evaluation (bfloat16 widens to float32, which NumPy has)."""
        wide = [array.astype(mx.float32) if array.dtype == mx.bfloat16 else array for array in arrays]
        mx.eval(*wide)
        return tuple(np.array(array) for array in wide)


def device_name(array: mx.array | None = None) -> str:
    """`metal`, `cuda` or `cpu`: where MLX runs by default in this very call (read now, never at import)."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def release_buffers(tokens: int) -> None:
    """Give the buffers of a long piece of a prompt back to the system, as mlx_lm does after each: the next piece has other
    shapes of attention, and what is kept would grow with the prompt. Short pieces are not worth it."""
    if tokens > _SHORT and device_name() != "cpu":
        mx.clear_cache()


def wire_memory() -> int | None:
    """Let MLX keep as much memory resident as Metal recommends; returns the limit, None without Metal.

    macOS 15 and newer; older ones refuse, and run as before.
    """
    if not mx.metal.is_available():
        return None
    limit = int(mx.device_info()["max_recommended_working_set_size"])
    try:
        mx.set_wired_limit(limit)
    except (RuntimeError, ValueError):
        return None
    return limit
