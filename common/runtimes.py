"""Which runtime runs here: found by name through the entry-point group `dspine.runtimes`, never imported upward.

A named runtime must work or the call fails; only `auto` chooses, and it says why.
"""

from __future__ import annotations

import platform
import sys
from importlib.metadata import EntryPoint, entry_points

from dspine.common.errors import BackendError
from dspine.common.protocols import Availability, Runtime

AUTO = "auto"
GROUP = "dspine.runtimes"


def runtime_names() -> tuple[str, ...]:
    """Names of all registered runtimes, sorted; whether they can run here is another question (`availability`)."""
    return tuple(sorted(_registered()))


def availability(name: str) -> Availability:
    """Whether runtime `name` can run here, and why (not). BackendError for a name nobody registered."""
    return load_runtime(name)[1]


def choose_runtime(name: str = AUTO) -> tuple[Runtime, str]:
    """The runtime called `name`, or for `auto` the best that is here, with the reason of the choice in one line.

    auto: MLX on an Apple GPU, else torch, else MLX on the CPU, else any other that is registered. BackendError when nothing
    fits; it names what is there and how to install what is not.
    """
    if name != AUTO:
        runtime, state = load_runtime(name)
        if runtime is None or not state.ok:
            raise BackendError(_absent(name, state))
        return runtime, f"asked for; {state.reason}"
    states: dict[str, Availability] = {}
    for candidate in _preference():
        runtime, state = load_runtime(candidate)
        states[candidate] = state
        if runtime is not None and state.ok:
            return runtime, _auto_reason(candidate, state, states)
    listed = "; ".join(f"{candidate}: {state.reason} (install: {state.install})" for candidate, state in states.items())
    raise BackendError(f"no runtime can run here: {listed or 'none is registered, reinstall dspine'}")


def place_of(runtime: Runtime, device: str) -> str:
    """The device a pair would go to: `device`, for `auto` the runtime's first. BackendError for a kind that is not here."""
    devices = runtime.availability().devices or ("cpu",)
    if device == AUTO:
        return devices[0]
    if device.partition(":")[0] not in {name.partition(":")[0] for name in devices}:
        raise BackendError(
            f"device {device!r} is not there for {runtime.name}; here: {', '.join(devices)}; or leave --device at auto"
        )
    return device


def on_apple_silicon() -> bool:
    """Whether this is a Mac with an Apple chip (Metal itself is for the MLX runtime to confirm)."""
    return sys.platform == "darwin" and platform.machine() == "arm64"


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def load_runtime(name: str) -> tuple[Runtime | None, Availability]:
    """The runtime object called `name` (None if its module cannot be imported) and its availability."""
    registered = _registered()
    if name not in registered:
        known = ", ".join((AUTO, *sorted(registered)))
        raise BackendError(f"unknown backend {name!r}: expected one of {known}")
    try:
        runtime: Runtime = registered[name].load()
    except ModuleNotFoundError as error:
        reason = f"its module needs {error.name!r}, which is not installed"
        return None, Availability(ok=False, reason=reason, install=_install_hint(name))
    return runtime, runtime.availability()


def _install_hint(name: str) -> str:
    extra = {"torch": "cuda"}.get(name, name)
    return f"python -m pip install 'dspine[{extra}]'"


def _preference() -> list[str]:
    """Runtimes in the order `auto` tries them."""
    first = ["mlx", "torch"] if on_apple_silicon() and _mlx_has_gpu() else ["torch", "mlx"]
    registered = runtime_names()
    return [name for name in first if name in registered] + [name for name in registered if name not in first]


def _mlx_has_gpu() -> bool:
    return "mlx" in runtime_names() and any(not device.startswith("cpu") for device in availability("mlx").devices)


def _auto_reason(name: str, state: Availability, tried: dict[str, Availability]) -> str:
    """One line: why `auto` took this one, and why those before it were not taken."""
    passed = [f"{other} is not available: {tried[other].reason}" for other in tried if other != name]
    if name == "mlx" and "torch" not in tried:
        why = "Apple GPU"
    elif name == "torch":
        why = f"no Apple GPU with MLX on {sys.platform} {platform.machine()}"
    else:
        why = "the first that can run here"
    return "; ".join([f"auto: {why}", state.reason, *passed])


def _absent(name: str, state: Availability) -> str:
    """The message for a named runtime that cannot run: why, what is there, how to install it."""
    others = {other: availability(other) for other in runtime_names() if other != name}
    there = [other for other, other_state in others.items() if other_state.ok]
    install = f"; install it with: {state.install}" if state.install else ""
    return f"backend {name!r} is not available: {state.reason}; available here: {', '.join(there) or 'none'}{install}"
