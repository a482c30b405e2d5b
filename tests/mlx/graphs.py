"""What a round costs on the host: graph nodes handed to MLX, and reads. Counted instead of timed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from dspine_mlx.arrays import MlxArrays


def nodes(*arrays: Any) -> int:
    """Primitives in the graph behind these arrays that still wait to be computed."""
    flat = [array for _, array in tree_flatten(list(arrays)) if isinstance(array, mx.array)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.dot"
        mx.export_to_dot(str(path), *flat)
        return path.read_text().count("shape=rectangle")


PHASES = ("draft", "verify", "commit")


@dataclass
class Round:
    """Nodes by phase, and reads, between two marks."""

    nodes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    reads: int = 0


@dataclass
class Meter:
    """Everything that is handed to `mx.eval` and `mx.async_eval`, and every read of the host, by round and phase."""

    rounds: list[Round] = field(default_factory=lambda: [Round()])
    phase: str = "verify"

    def mark(self) -> None:
        self.rounds.append(Round())

    def within(self, phase: str, function: Any) -> Any:
        """`function`, whose nodes count as `phase`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.phase = self.phase, phase
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = before

        return run


@contextmanager
def metered(monkeypatch: Any, target: Any, drafter: Any) -> Iterator[Meter]:
    """Count what this pair hands to MLX inside."""
    meter = Meter()
    read = MlxArrays.to_host

    def count(real: Any) -> Any:
        def counted(*arrays: Any) -> None:
            meter.rounds[-1].nodes[meter.phase] += nodes(*arrays)
            real(*arrays)

        return counted

    def counted_read(self: MlxArrays, *arrays: Any) -> Any:
        meter.rounds[-1].reads += 1
        return read(self, *arrays)

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", count(mx.eval))
        patch.setattr(mx, "async_eval", count(mx.async_eval))
        patch.setattr(MlxArrays, "to_host", counted_read)
        patch.setattr(target, "commit", meter.within("commit", target.commit))
        patch.setattr(drafter, "commit", meter.within("commit", drafter.commit))
        patch.setattr(drafter, "propose", meter.within("draft", drafter.propose))
        yield meter
