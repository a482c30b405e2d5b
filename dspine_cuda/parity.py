"""The torch side of `dspine parity`: the core's code on tensors, and the Triton kernels, on CUDA or interpreted."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

import numpy as np
import torch
from torch import Tensor

from dspine import kernels_triton
from dspine.common.environment import interpret_triton
from dspine.common.parity.backends import ParityBackend
from dspine.common.registry import Kernel, registered_kernel
from dspine_cuda import ops
from dspine_cuda.arrays import TorchArrays


def backends() -> list[ParityBackend]:
    """`torch-ops` and `triton`, on the CUDA device where there is one."""
    ops.register()
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    name = torch.cuda.get_device_name() if cuda else "cpu"
    core = _backend("torch-ops", name, device, kernel=_on_cpu if not cuda else _none, fallback=True, scaled=False)
    if importlib.util.find_spec("triton") is None:
        return [core, ParityBackend("triton", "none", skipped="triton is not installed: pip install 'dspine[cuda]'")]
    if not cuda and not interpret_triton():
        reason = "no CUDA device, and Triton was imported before its interpreter was switched on (TRITON_INTERPRET=1)"
        return [core, ParityBackend("triton", "none", skipped=reason)]
    _register_triton_kernels()
    return [core, _backend("triton", name if cuda else "interpreted", device, kernel=_on_cuda, fallback=False, scaled=not cuda)]


def _backend(name: str, label: str, device: str, *, kernel: object, fallback: bool, scaled: bool) -> ParityBackend:
    arrays = TorchArrays(device)

    def to_device(array: np.ndarray, dtype: str) -> Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32 if dtype == "int32" else np.float32))
        return host.to(device=arrays.device, dtype=getattr(torch, dtype), copy=True)

    return ParityBackend(
        name,
        label,
        to_device=to_device,
        to_host=lambda array: arrays.to_host(array)[0],
        kernel=kernel,  # type: ignore[arg-type]
        fallback=fallback,
        scaled=scaled,
        session=torch.inference_mode,
    )


def _register_triton_kernels() -> None:
    """Import and register every kernel file; Triton decides between compiler and interpreter when it decorates one."""
    for module in pkgutil.iter_modules(kernels_triton.__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{kernels_triton.__name__}.{module.name}").register()


def _on_cpu(op: str) -> Kernel | None:
    return registered_kernel(op, "torch", "cpu")


def _on_cuda(op: str) -> Kernel | None:
    return registered_kernel(op, "torch", "cuda")


def _none(op: str) -> Kernel | None:
    return None
