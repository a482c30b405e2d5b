"""Rounds as CUDA graphs: one for plain decoding, one for each fixed length, one for each Stage-0 and Stage-1 length.

Where the driver and cuda-bindings have SWITCH nodes, a round whose length is chosen on the device is one launch
(`static.switch`); elsewhere the same graphs are launched after ONE read of the host. Which of the two is decided once, when a
`GraphRunner` is made, and `reason` says it. `EagerRunner` runs the same steps without graphs: the CPU's form, and the tests'.

Graphs are captured while every slot is idle (`remaining` 0), so warm-up rounds change nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch

from dspine.common.errors import BackendError, DSpineError, OutOfMemory
from dspine_cuda.static.arena import GIB
from dspine_cuda.static.hybrid import StaticHybrid
from dspine_cuda.static.round import StaticRound
from dspine_cuda.static.switch import SwitchGraph, switch_support

PLAIN, POLICY = "plain", "policy"
Mode = str | int  # PLAIN, POLICY, or a fixed number of verified tokens
WARM_UPS = 2  # Triton compiles and cuBLAS finds its workspace in the first, the second is the steady state


class Runner(Protocol):
    """Rounds of one pair: `launch` starts one, `wait` gives the oldest unread report, int32 [B, 4 + 2 W]."""

    reason: str
    depth: int  # rounds that may be started before one is read
    seconds: float  # that the round took whose report was read last

    def prepare(self, mode: Mode) -> None: ...

    def launch(self, mode: Mode) -> None: ...

    def wait(self) -> np.ndarray: ...

    def has(self, mode: Mode) -> bool:
        """Whether `launch` finds this mode ready."""
        ...

    def drop(self) -> None:
        """Forget the rounds that were started and not read."""
        ...


def staged(round_: StaticRound) -> bool:
    """Whether a policy's round has a Stage 0 of its own."""
    split = isinstance(round_.target, StaticHybrid) and round_.target.stops_at_router
    return split and round_.rules.corrected


def length_bodies(round_: StaticRound) -> list[int]:
    """The length whose graph runs where 1, 2, ... was chosen: the same one, or where `RoundRules.lengths` leaves it out the
    next longer one (rows beyond a slot's budget never count). What is chosen beyond the last entry runs as that."""
    rows, named = round_.arena.shape.rows, round_.rules.lengths
    if named is None:
        return list(range(1, rows + 1))
    if not named or min(named) < 1 or max(named) > rows:
        raise DSpineError(f"graphs: the lengths of a round must lie within 1..{rows}, got {named}; correct RoundRules.lengths")
    return [min(w for w in named if w >= chosen) for chosen in range(1, max(named) + 1)]


def body_of(bodies: list[int], chosen: int) -> int:
    """As a SWITCH node looks it up: what lies outside goes to the first or the last."""
    return bodies[min(max(chosen, 1), len(bodies)) - 1]


def capture(function: Callable[[], None], device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """Warm up and capture. Every slot of the arena must be idle; inference mode and the device are the caller's."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
    finally:  # also where memory runs out: what it has queued writes back what it read, and others may run next
        torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        function()
    return graph


def held_pool(device: torch.device) -> tuple[Any, torch.cuda.CUDAGraph]:
    """Memory for graphs that come and go, and a graph that keeps it. torch gives a pool up with its last graph and then refuses
    to capture into it ("use_count > 0") for as long as any of its memory is not yet back."""
    pool = torch.cuda.graph_pool_handle()

    def something() -> None:
        torch.zeros(1, device=device)

    with torch.cuda.device(device), torch.inference_mode():
        return pool, capture(something, device, pool)


class EagerRunner:
    """The static steps one after another, lengths read by the host."""

    depth = 1

    def __init__(self, round_: StaticRound, reason: str = "static steps without graphs") -> None:
        self.round, self.reason, self.seconds = round_, reason, 0.0
        self._reports: deque[tuple[np.ndarray, float]] = deque()

    def prepare(self, mode: Mode) -> None:
        """Nothing to capture."""

    def has(self, mode: Mode) -> bool:
        """Always."""
        return True

    @torch.inference_mode()
    def launch(self, mode: Mode) -> None:
        """Run one round."""
        started = perf_counter()
        round_, arena = self.round, self.round.arena
        if mode == PLAIN:
            round_.plain()
        elif mode == POLICY:
            bodies = length_bodies(round_)
            round_.draft()
            if staged(round_):
                round_.begin(body_of(bodies, int(arena.upper[0])))
                round_.correct()
                round_.finish(body_of(bodies, int(arena.chosen[0])))
            else:
                round_.verify(body_of(bodies, int(arena.chosen[0])))
        else:
            round_.drafted(int(mode))
        self._reports.append((arena.report.cpu().numpy().copy(), perf_counter() - started))

    def wait(self) -> np.ndarray:
        """The oldest report."""
        report, self.seconds = self._reports.popleft()
        return report

    def drop(self) -> None:
        """Forget what was not read."""
        self._reports.clear()


class GraphRunner:
    """CUDA graphs of a `StaticRound`; captured on first use of a mode, or by `prepare`."""

    depth = 2

    def __init__(self, round_: StaticRound, *, conditional: bool | None = None, pool: Any = None) -> None:
        """conditional: None takes SWITCH nodes where they are available, False never, True raises where they are not. pool:
        memory of the graphs, shared by runners of which one round runs behind another (None: their own)."""
        arena = round_.arena
        if arena.device.type != "cuda":
            raise BackendError(f"CUDA graphs need a CUDA device, the target is on {arena.device}; use graphs off")
        found, why = switch_support(arena.device)
        if conditional and not found:
            raise BackendError(f"conditional CUDA graphs cannot be used: {why}; use graphs with lengths read by the host")
        self.round, self.device = round_, arena.device
        self.conditional = found if conditional is None else conditional
        self.reason = why if self.conditional else f"graphs, chosen lengths read by the host ({why})"
        self._pool, self.seconds = pool, 0.0
        self._graphs: dict[Any, Any] = {}
        self._switches: dict[Mode, SwitchGraph] = {}
        self._pinned = [torch.zeros_like(arena.report, device="cpu", pin_memory=True) for _ in range(self.depth)]
        self._lengths = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._begins = [torch.cuda.Event(enable_timing=True) for _ in range(self.depth)]
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(self.depth)]
        self._flight: deque[int] = deque()
        self._next = 0

    def has(self, mode: Mode) -> bool:
        """Whether this mode is captured."""
        return mode in self._graphs or mode in self._switches

    # -- capture -----------------------------------------------------------------------------------------------------------

    def prepare(self, mode: Mode) -> None:
        """Capture what `mode` needs. Every slot must be idle; OutOfMemory where memory is short."""
        if self.has(mode):
            return
        if self._flight:
            raise DSpineError("graphs are captured while nothing runs: read or drop the rounds in flight first")
        free = torch.cuda.mem_get_info(self.device)[0]
        try:
            with torch.cuda.device(self.device), torch.inference_mode():
                self._capture_mode(mode)
        except torch.cuda.OutOfMemoryError as error:
            asked = sum(self.round.arena.parts.values())
            raise OutOfMemory(
                f"graphs: out of memory while capturing {mode!r}: {free / GIB:.2f} GiB were free beside an arena of "
                f"{asked / GIB:.2f} GiB; ask for fewer tokens, or decode with graphs off"
            ) from error

    def _capture_mode(self, mode: Mode) -> None:
        round_ = self.round
        if mode == PLAIN:
            self._graphs[mode] = self._capture(round_.plain)
        elif mode != POLICY:
            length = int(mode)
            self._graphs[mode] = self._capture(lambda: round_.drafted(length))
        else:
            self._capture_policy()

    def _capture_policy(self) -> None:
        round_, arena = self.round, self.round.arena
        bodies = length_bodies(round_)
        lengths = sorted(set(bodies))
        graphs: dict[Any, Any] = {"draft": self._capture(round_.draft)}
        if staged(round_):
            for u in lengths:
                graphs["begin", u] = self._capture(lambda u=u: round_.begin(u))
            graphs["correct"] = self._capture(round_.correct)
        for w in lengths:
            body = (lambda w=w: round_.finish(w)) if staged(round_) else (lambda w=w: round_.verify(w))
            graphs["finish", w] = self._capture(body)
        self._graphs[POLICY] = graphs
        if not self.conditional:
            return
        parent = SwitchGraph(self.device)
        parent.child(graphs["draft"])
        if staged(round_):
            parent.switch(arena.upper[:1], 1, [graphs["begin", u] for u in bodies])
            parent.child(graphs["correct"])
        parent.switch(arena.chosen[:1], 1, [graphs["finish", w] for w in bodies])
        self._switches[POLICY] = parent.finish()

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """All graphs share one pool, because they run one behind another."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return capture(function, self.device, self._pool)

    # -- steady state ------------------------------------------------------------------------------------------------------

    def launch(self, mode: Mode) -> None:
        """Start a round and the copy of its report; nothing is waited for, except one read of a length where SWITCH nodes are
        not available."""
        if len(self._flight) >= self.depth:
            raise DSpineError(f"{self.depth} rounds are in flight already: read one first")
        self.prepare(mode)
        place, self._next = self._next, (self._next + 1) % self.depth
        self._begins[place].record(torch.cuda.current_stream(self.device))
        if mode in self._switches:
            self._switches[mode].replay()
        elif mode == POLICY:
            self._launch_read()
        else:
            self._graphs[mode].replay()
        self._pinned[place].copy_(self.round.arena.report, non_blocking=True)
        self._events[place].record(torch.cuda.current_stream(self.device))
        self._flight.append(place)

    def _launch_read(self) -> None:
        """The policy's graphs, each length read by the host."""
        graphs, arena, bodies = self._graphs[POLICY], self.round.arena, length_bodies(self.round)
        graphs["draft"].replay()
        if staged(self.round):
            graphs["begin", body_of(bodies, self._read(arena.upper))].replay()
            graphs["correct"].replay()
        graphs["finish", body_of(bodies, self._read(arena.chosen))].replay()

    def _read(self, length: torch.Tensor) -> int:
        self._lengths.copy_(length[:1], non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        return int(self._lengths[0])

    def wait(self) -> np.ndarray:
        """The oldest report, once its copy has arrived."""
        place = self._flight.popleft()
        self._events[place].synchronize()
        self.seconds = 1e-3 * self._begins[place].elapsed_time(self._events[place])
        return self._pinned[place].numpy().copy()

    def drop(self) -> None:
        """Wait for the rounds in flight and forget them."""
        while self._flight:
            self._events[self._flight.popleft()].synchronize()

    def close(self) -> None:
        """Free the graphs."""
        self.drop()
        torch.cuda.synchronize(self.device)
        for graph in self._switches.values():
            graph.close()
        self._switches.clear()
        self._graphs.clear()
        self._pool = None
