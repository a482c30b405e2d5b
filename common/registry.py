"""The one place that picks a kernel: (operation, array namespace, device) -> function.

A core function marked with `@operation` is the reference and the fallback. A runtime registers faster versions when it
is imported; nothing here looks for them. `DSPINE_KERNELS=reference` forces the core's own code everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from dspine.common.environment import kernel_choice, kernels_off
from dspine.common.errors import DSpineError

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Kernel:
    """A registered fast version: `supports(*args, **kwargs)` says whether it can run this very call."""

    operation: str
    namespace: str
    device: str
    function: Callable[..., Any]
    name: str
    supports: Callable[..., bool] | None = None


_operations: dict[str, Callable[..., Any]] = {}
_kernels: dict[tuple[str, str, str], Kernel] = {}
_reference_depth = [0]  # of `reference_only`; parity runs are not concurrent with decoding
_device_of: dict[str, Callable[[Any], str]] = {"numpy": lambda array: "cpu"}


def namespace_name(array: Any) -> str:
    """`numpy`, `torch` or `mlx`: the top package that the array's type comes from."""
    return type(array).__module__.partition(".")[0]


def register_device(namespace: str, device_of: Callable[[Any], str]) -> None:
    """Tell how to read the device (`cpu`, `cuda`, `metal`) of an array of this namespace."""
    _device_of[namespace] = device_of


def register_kernel(
    operation_name: str,
    *,
    namespace: str,
    device: str,
    function: Callable[..., Any],
    name: str,
    supports: Callable[..., bool] | None = None,
) -> None:
    """Register `function` for an operation of the core; it takes the same arguments and returns the same."""
    if operation_name not in _operations:
        known = ", ".join(sorted(_operations))
        raise DSpineError(f"register_kernel: unknown operation {operation_name!r}; the core has: {known}")
    key = (operation_name, namespace, device)
    _kernels[key] = Kernel(operation_name, namespace, device, function, name, supports)


def operation(function: F) -> F:
    """Mark a core function as an operation: calls go to the kernel of the first argument's namespace and device.

    The first argument is positional; `.reference` is the core's own code.
    """
    name = function.__name__
    _operations[name] = function

    @functools.wraps(function)
    def dispatch(array: Any, /, *args: Any, **kwargs: Any) -> Any:
        kernel = find_kernel(name, array)
        if kernel is None or (kernel.supports is not None and not kernel.supports(array, *args, **kwargs)):
            return function(array, *args, **kwargs)
        return kernel.function(array, *args, **kwargs)

    dispatch.reference = function  # type: ignore[attr-defined]
    return dispatch  # type: ignore[return-value]


def find_kernel(operation_name: str, array: Any) -> Kernel | None:
    """The kernel for this array, or None where the core's own code runs."""
    if _reference_depth[0] or kernel_choice() == "reference" or operation_name in kernels_off():
        return None
    namespace = namespace_name(array)
    device_of = _device_of.get(namespace)
    if device_of is None:
        return None
    return _kernels.get((operation_name, namespace, device_of(array)))


def registered_kernel(operation_name: str, namespace: str, device: str) -> Kernel | None:
    """What was registered for this key, whatever `DSPINE_KERNELS` says."""
    return _kernels.get((operation_name, namespace, device))


@contextmanager
def reference_only() -> Iterator[None]:
    """Inside, operations run the core's own code, also those that other operations call (parity runs)."""
    _reference_depth[0] += 1
    try:
        yield
    finally:
        _reference_depth[0] -= 1


def kernel_report() -> dict[str, str]:
    """What runs where: `operation/namespace/device` -> name of the kernel. Operations not listed run the core's code."""
    if kernel_choice() == "reference":
        return {}
    off = kernels_off()
    return {"/".join(key): kernel.name for key, kernel in sorted(_kernels.items()) if key[0] not in off}
