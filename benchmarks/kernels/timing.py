"""Times by CUDA graph replay, and the machine's own floors: bandwidth and empty launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton

REPEATS, INNER = 20, 10


@dataclass(frozen=True)
class Timing:
    """Microseconds of one run: median of the repeats, and their tenth and ninetieth percentile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.1f} ({self.low:.1f}-{self.high:.1f})"


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`run` as a graph; it is called once before, so that everything is compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay(runs: Sequence[Callable[[], object]], repeats: int = REPEATS, inner: int = INNER) -> Timing:
    """Time of one run; the runs are the same work on different memory and take turns, so that no cache holds it all."""
    graphs = [capture(run) for run in runs]
    for graph in graphs:
        graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for turn in range(inner):
            graphs[turn % len(graphs)].replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / inner)
    marks = statistics.quantiles(times, n=10)
    return Timing(statistics.median(times), marks[0], marks[-1])


@triton.jit
def _empty_kernel(x):
    pass


@dataclass(frozen=True)
class Floors:
    """Bytes a second (read alone; copy, read plus written) and microseconds of graphs of n empty launches."""

    read: float
    copy: float
    launches: dict[int, float]

    def of(self, read: float, written: float = 0.0, launches: int = 1) -> tuple[float, float]:
        """(microseconds of the bytes alone, of the launches alone)."""
        paired = min(read, written)
        bytes_alone = 1e6 * (2 * paired / self.copy + (read + written - 2 * paired) / self.read)
        most = max(self.launches)
        return bytes_alone, self.launches.get(launches, launches * self.launches[most] / most)


def measure_floors(counts: Sequence[int] = (30, 31)) -> Floors:
    """A 1 GiB copy, a 1 GiB reduction, and graphs of empty launches."""
    size = 2**28
    source = torch.randn(size, device="cuda")
    target = torch.empty_like(source)
    copy = replay([lambda: target.copy_(source)], repeats=5, inner=4).median
    read = replay([lambda: torch.sum(source)], repeats=5, inner=4).median
    flag = torch.zeros(1, device="cuda")

    def empty(count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                _empty_kernel[(1,)](flag, num_warps=1)

        return run

    launches = {count: replay([empty(count)]).median for count in counts}
    return Floors(read=4e6 * size / read, copy=8e6 * size / copy, launches=launches)
