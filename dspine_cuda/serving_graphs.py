"""Batches as CUDA graphs: `protocols.Slots` over an arena of `max_concurrency` slots.

Graphs are captured for the first 1, 2, 4, 8, .. slots (a round takes the smallest that reaches its last sequence), and of each
for a few numbers of tokens: one without drafts, and those of `SHARED` up to the block. How many of them a slot verifies, and
whether it takes part at all, is read on the device (`SlotArena.limits`), so rounds of unequal sequences share a graph. Why not
always the whole arena: a drafted round of 32 slots is 512 rows through every product, whoever is there.

Each way of sampling (acceptance rule and parameters, without the seed) has graphs of its own, captured when they are first
needed: while graphs are captured every slot is parked, so nobody notices but by the time it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from dspine.common.errors import DSpineError
from dspine.common.sampling import SamplingParams
from dspine.common.serving.shared import SHARED
from dspine_cuda.graphs import PLAIN, GraphRunner, Mode, Runner, held_pool
from dspine_cuda.serving_prompts import SlotPrompts
from dspine_cuda.static.arena import GIB, ArenaShape, arena_bytes
from dspine_cuda.static.loop import pair_refusal
from dspine_cuda.static.prompts import prompt_bytes
from dspine_cuda.static.round import Report, RoundRules, StaticRound, read_report
from dspine_cuda.static.slots import SlotArena, SlotRound, SlotView
from dspine_cuda.targets.hybrid import HybridTarget
from dspine_cuda.targets.moe import SparseMlp

SHARE = 0.6  # of the free memory that an arena, and the prompt being read, may take: graphs and eager sequences lie beside it
SMALLEST = 1024  # tokens a slot; where even these do not fit, the start is refused
TIMED = 4  # rounds of each graph that are timed at the start
_KIND = ("greedy", SamplingParams())


def slot_tokens(target: Any, drafter: Any | None, count: int, wanted: int, free: int | None = None) -> int:
    """Tokens a slot: `wanted`, or half of it, a quarter, .. until `count` of them, and a prompt being read, fit into `SHARE` of
    the memory that is free (read here on CUDA; `free` for tests). DSpineError where `SMALLEST` do not fit."""
    wanted = min(wanted, target.info.context_length)
    if free is None:
        if target.device.type != "cuda":
            return wanted
        free = torch.cuda.mem_get_info(target.device)[0]
    tokens = wanted
    while True:
        shape = ArenaShape(tokens, count, _rows(drafter))
        asked = sum(arena_bytes(target, drafter, shape).values()) + prompt_bytes(target, drafter, shape)
        if asked <= SHARE * free:
            return tokens
        if tokens <= SMALLEST:
            raise DSpineError(
                f"graphs: {count} slots of {tokens} tokens ask for {asked / GIB:.2f} GiB, {free / GIB:.2f} GiB are free and "
                f"{SHARE:.0%} of them may be taken; lower --max-concurrency or --max-context, or use --graphs off"
            )
        tokens = max(tokens // 2, min(SMALLEST, tokens))


def experts_refusal(target: Any, rows: int) -> str | None:
    """Why rounds of so many rows cannot be captured; None where they can."""
    if target.device.type != "cuda" or not isinstance(target, HybridTarget):
        return None
    if not any(isinstance(layer.mlp, SparseMlp) and layer.mlp.reads_host(rows) for layer in target.layers):
        return None
    return f"experts of {rows} rows at once need grouped products (bfloat16, compute capability 9); lower --max-concurrency"


def _rows(drafter: Any | None) -> int:
    return 1 if drafter is None else drafter.config.block_size


class SlotGraphs:
    """Slots of one pair. `drafter` and `tokens` (committed tokens that a slot holds) are fixed; `widths`: tokens that drafted
    graphs verify; `sizes`: slots that graphs reach."""

    def __init__(
        self, target: Any, drafter: Any | None, count: int, tokens: int,
        make_runner: Callable[[StaticRound], Runner] | None = None, *, prompts: bool = True, pool: Any = None,
    ) -> None:  # fmt: skip
        """make_runner: `EagerRunner` in tests (None: graphs). prompts: false reads them by the eager prefill. pool: memory of
        the graphs (None: one is made; with a make_runner, prompts are read without graphs). DSpineError where the pair has no
        static form, or no room."""
        refused = pair_refusal(target, drafter) or experts_refusal(target, count * _rows(drafter))
        if refused is not None:
            raise DSpineError(f"graphs: {refused}; use graphs off")
        self.target, self.drafter, self.count, self.rows = target, drafter, count, _rows(drafter)
        self.tokens = slot_tokens(target, drafter, count, tokens)
        self.arena = SlotArena(target, drafter, ArenaShape(self.tokens, count, self.rows))
        self.widths = [*(w for w in SHARED if w < self.rows), self.rows] if drafter is not None else []
        self.sizes = [*(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n < count), count]
        if make_runner is None:
            if pool is None:
                pool, self._keeper = held_pool(self.arena.device)
            make_runner = partial(GraphRunner, conditional=False, pool=pool)
        self._make_runner = make_runner
        self._prompts = SlotPrompts(target, drafter, self.arena, wanted=prompts, pool=pool)
        self.piece, self.prompts = self._prompts.piece, self._prompts.reason
        self._views: dict[int, SlotView] = {}
        self._runners: dict[tuple[Hashable, int], Runner] = {}
        self.reason = f"batches of up to {count} slots of {self.tokens} tokens, one launch a round"

    @property
    def nbytes(self) -> int:
        """Of the arena, and of the prompt being read."""
        return sum(self.arena.parts.values()) + self._prompts.nbytes

    # -- slots -------------------------------------------------------------------------------------------------------------

    def caches(self, slot: int, drafting: bool) -> tuple[Any, Any | None]:
        """`Slots.caches`."""
        return self.arena.caches(slot, drafting)

    def read(self, slot: int, start: int, tokens: Sequence[int]) -> torch.Tensor:
        """`Slots.read`."""
        return self._prompts.read(slot, start, tokens)

    def later(self, array: torch.Tensor) -> Callable[[], np.ndarray]:
        """`Slots.later`."""
        return self.target.arrays.later(array)

    def prepare_prompts(self, chunk: int) -> None:
        """`Slots.prepare_prompts`."""
        self._prompts.prepare(chunk)

    def begin(self, slot: int, length: int, anchor: int, remaining: int, uniforms: np.ndarray | None) -> None:
        """`Slots.begin`."""
        self.arena.begin(slot, length, anchor, remaining, uniforms)

    def end(self, slot: int) -> None:
        """`Slots.end`."""
        self.arena.end(slot)

    def move(self, slot: int, to: int, length: int, drafting: bool) -> tuple[Any, Any | None]:
        """`Slots.move`. The device may be a round ahead of `length`."""
        return self.arena.move(slot, to, min(length + 2 * self.rows, self.tokens), drafting)

    def reach(self, slots: int) -> int:
        """`Slots.reach`."""
        return next(size for size in self.sizes if size >= slots)

    # -- rounds ------------------------------------------------------------------------------------------------------------

    def ready(self, kind: tuple[str, SamplingParams], limits: Sequence[int], drafting: bool) -> bool:
        """`Slots.ready`."""
        return self._runner(kind, len(limits)).has(self._mode(limits, drafting))

    def launch(
        self, kind: tuple[str, SamplingParams], limits: Sequence[int], drafting: bool
    ) -> Callable[[], tuple[list[Report], float]]:
        """`Slots.launch`."""
        runner, mode = self._runner(kind, len(limits)), self._mode(limits, drafting)
        if not runner.has(mode):
            self.arena.limit([])
            runner.prepare(mode)
        self.arena.limit(list(limits))
        runner.launch(mode)

        def read() -> tuple[list[Report], float]:
            rows = runner.wait()
            return [read_report(row) for row in rows], runner.seconds

        return read

    def drop(self, kind: tuple[str, SamplingParams]) -> None:
        """`Slots.drop`."""
        for key in [key for key in self._runners if key[0] == kind]:
            runner = self._runners.pop(key)
            runner.drop()
            getattr(runner, "close", lambda: None)()

    def close(self) -> None:
        """Free the graphs."""
        for kind, _ in list(self._runners):
            self.drop(kind)  # type: ignore[arg-type]
        self._prompts.close()

    def measure(self) -> tuple[dict[tuple[int, int], float], dict[int, float]]:
        """`Slots.measure`: captures the graphs of greedy rounds, too. Every slot must be idle."""
        spread = torch.randint(self.target.info.vocab_size, (self.count,), generator=torch.Generator().manual_seed(0))
        self.arena.anchor.copy_(spread.to(torch.int32))  # equal tokens would all go to the same experts
        verify: dict[tuple[int, int], float] = {}
        draft: dict[int, float] = {}
        for size in self.sizes:
            plain = self._time(size, 1 if self.widths else PLAIN)
            verify[size, 1] = plain
            if self.widths:
                self._time(size, PLAIN)
            whole = {w: self._time(size, w) for w in self.widths if w > 1}
            if whole:  # the shortest drafted round does little more than draft and a plain round's work
                draft[size] = max(min(whole.values()) - plain, 0.0)
                verify |= {(size, w): max(seconds - draft[size], plain) for w, seconds in whole.items()}
        return verify, draft

    def _time(self, size: int, mode: Mode) -> float:
        """Seconds of the quickest of some rounds in which every slot is parked: weights and rows are those of a live one."""
        runner = self._runner(_KIND, size)
        self.arena.limit([])
        runner.prepare(mode)
        found = []
        for _ in range(TIMED):
            runner.launch(mode)
            runner.wait()
            found.append(runner.seconds)
        return min(found)

    def _mode(self, limits: Sequence[int], drafting: bool) -> Mode:
        """The graph for a round of these limits; drafting: some sequence drafts, now or later."""
        most = max(limits)
        if most < 2:
            return 1 if drafting and self.widths else PLAIN
        return next(w for w in self.widths if w >= most)

    def _runner(self, kind: tuple[str, SamplingParams], reach: int) -> Runner:
        """The runner over the fewest slots that hold the first `reach`."""
        size = self.reach(reach)
        if (kind, size) not in self._runners:
            view = self._views.setdefault(size, SlotView(self.arena, size))
            rules = RoundRules(rule=kind[0], sampling=kind[1])
            self._runners[kind, size] = self._make_runner(SlotRound(self.target, self.drafter, view, rules))
        return self._runners[kind, size]
