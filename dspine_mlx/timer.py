"""The timer of the MLX runtime: the host's clock, once everything that a step has produced is computed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dspine.common.bench.timing import HostTimer

_DEPTH = 6  # objects in objects: caches hold layers, layers hold arrays


def arrays_in(thing: Any, depth: int = _DEPTH) -> list[mx.array]:
    """Every array that hangs on an object: containers, dataclasses and the attributes of caches."""
    if isinstance(thing, mx.array):
        return [thing]
    if depth == 0 or thing is None or isinstance(thing, (str, bytes, int, float, type)) or callable(thing):
        return []
    if isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, (list, tuple, set, frozenset)):
        parts = list(thing)
    else:
        parts = list(getattr(thing, "__dict__", {}).values())
        parts += [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
    return [array for part in parts for array in arrays_in(part, depth - 1)]


def _evaluate(things: tuple[Any, ...]) -> None:
    mx.eval(*[array for thing in things for array in arrays_in(thing)])


def make_timer(device: str) -> HostTimer:
    """Marks evaluate what they are given; MLX computes nothing before."""
    timer = HostTimer(_evaluate)
    timer.source = f"host clock after evaluation on {device}"
    return timer
