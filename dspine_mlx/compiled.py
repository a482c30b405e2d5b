"""The parts of a drafter's round whose shapes never change, under `mx.compile`.

Everything but the attention over the growing context has fixed shapes: opening a block, each layer before and behind its
attention, the heads and the walk, and the context K/V of 1..16 new tokens (one trace a length). So a steady-state round
traces nothing. `traces` counts how often Python ran through each part: the cache misses, held to a budget by
`tests/mlx/test_lean_round.py` (`docs/mac.md`). Weights are read when a part is first traced; they are frozen from then on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from dspine_mlx.arrays import device_name

COMMIT_LENGTHS = 16  # tokens a round commits at most: longer pieces are prompt chunks, which run as they are
_MOST = 64  # compiled variants kept (temperatures, mostly); beyond it the oldest goes


def compiling_pays() -> bool:
    """False on the CPU, where MLX builds every fused kernel with a C++ compiler, for seconds each."""
    return device_name() != "cpu"


class Parts:
    """Functions by name, compiled where `active`. A name is traced once for each set of shapes and each thread."""

    def __init__(self, active: bool) -> None:
        self.active = active
        self.traces: dict[str, int] = {}
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def run(self, key: Any, make: Callable[[], Callable[..., Any]], *inputs: mx.array) -> Any:
        """`make()(*inputs)`; `key` names the function and every Python value that it closes over. It takes arrays and
        returns an array, or a tuple or list of them."""
        if not self.active:
            return make()(*inputs)
        with self._lock:
            function = self._functions.get(key)
            if function is None:
                while len(self._functions) >= _MOST:
                    del self._functions[next(iter(self._functions))]
                function = self._functions[key] = mx.compile(self._counted(str(key), make()))
        return function(*inputs)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def traced(*inputs: mx.array) -> Any:
            self.traces[name] = self.traces.get(name, 0) + 1
            return function(*inputs)

        return traced
