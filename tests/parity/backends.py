"""The backends of this machine by name; where Metal is absent its kernels run in the emulator of `tests/metal`."""

from __future__ import annotations

import functools

from dspine.common.parity.backends import BACKENDS, ParityBackend
from dspine_cuda.runtime import RUNTIME as TORCH
from dspine_mlx.runtime import RUNTIME as MLX


@functools.cache
def backends() -> dict[str, ParityBackend]:
    """All four, absent ones with their reason."""
    found = {backend.name: backend for runtime in (MLX, TORCH) for backend in runtime.parity_backends()}
    assert tuple(found) == BACKENDS
    if found["metal"].skipped and not found["mlx-ops"].skipped:
        found["metal"] = _emulated(found["metal"])
    return found


def _emulated(absent: ParityBackend) -> ParityBackend:
    from dspine.kernels_metal._launch import built_by
    from dspine_mlx.parity import metal_backend
    from tests.metal.emulator import emulated_metal_kernel
    from tests.metal.toolchain import unavailable

    reason = unavailable()
    if reason:
        return ParityBackend("metal", "none", skipped=f"{absent.skipped}; and no emulator: {reason}")
    return metal_backend("emulated", scaled=True, session=lambda: built_by(emulated_metal_kernel))
