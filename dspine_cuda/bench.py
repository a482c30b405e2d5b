"""What `dspine bench` times besides the eager loop: static rounds, on CUDA as graphs.

End to end it is `static.loop` itself. Phases and lengths run the same steps, each as a graph of its own between two marks on
the device's timeline; a product in front keeps the device busy while the host queues them, so that no gap of the host is timed.
Replayed acceptance and replayed lengths are device work too (`bench_replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspine.common.bench.contenders import LoopContender, Run, Task
from dspine.common.bench.timing import PHASES
from dspine.common.decoding import DecodingParams
from dspine.common.errors import DSpineError
from dspine.common.protocols import Timer
from dspine_cuda.bench_replay import BenchDecoder, ReplayedRound, ReplayRules
from dspine_cuda.graphs import PLAIN, POLICY, GraphRunner, Runner, body_of, capture, length_bodies, staged
from dspine_cuda.static.arena import Arena, ArenaShape
from dspine_cuda.static.loop import StaticLoop, pair_refusal
from dspine_cuda.static.round import StaticRound
from dspine_cuda.static.switch import switch_support
from dspine_cuda.timer import make_timer

BUSY = 4096  # side of the product that keeps the device busy: about 0.2 ms on an H200
PREFILL = 512
MakeRunner = Callable[[StaticRound], Runner]


def contenders(target: Any, drafter: Any | None) -> list[StaticContender]:
    """Graphs, where this pair can have them (see `refusal`), and where rounds run through SWITCH nodes the same graphs launched
    after a read of each length too."""
    if refusal(target, drafter) is not None:
        return []
    timer = make_timer(target.info.device)
    found = [StaticContender(target, drafter, timer)]
    if drafter is not None and switch_support(torch.device(target.info.device))[0]:
        found.append(StaticContender(target, drafter, timer, read_by_host))
    return found


def read_by_host(round_: StaticRound) -> GraphRunner:
    """Graphs without SWITCH nodes, whatever the driver has."""
    return GraphRunner(round_, conditional=False)


def refusal(target: Any, drafter: Any | None) -> str | None:
    """Why graphs are not timed; None where they are."""
    device = torch.device(target.info.device)
    return f"no CUDA: the target is on {device}" if device.type != "cuda" else pair_refusal(target, drafter)


class Steps:
    """Device work by name: graphs on CUDA, plain calls elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._functions, self._graphs = device, {}, {}
        self._pool: Any = None
        self._busy: Tensor | None = None
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._busy = torch.ones((BUSY, BUSY), dtype=torch.bfloat16, device=device)

    def add(self, name: Any, function: Callable[[], None]) -> None:
        """Note a step; on CUDA it is captured now, while every slot is idle."""
        self._functions[name] = function
        if self._pool is not None:
            with torch.cuda.device(self.device), torch.inference_mode():
                self._graphs[name] = capture(function, self.device, self._pool)
                self._graphs[name].replay()  # made ready and uploaded: no timed replay is the first

    def run(self, name: Any) -> None:
        """Queue the step."""
        if self._pool is not None:
            self._graphs[name].replay()
        else:
            with torch.inference_mode():
                self._functions[name]()

    def keep_busy(self) -> None:
        """Work that the host can hide its next launches behind."""
        if self._busy is not None:
            torch.mm(self._busy, self._busy)


def phase_steps(round_: StaticRound, lengths: Sequence[int], drafting: bool) -> Steps:
    """Every phase of rounds of these lengths as a step: `draft`, (`stage 0`, u), `correction`, (`stage 1`, w), ..."""
    steps = Steps(round_.arena.device)
    split = drafting and staged(round_)
    steps.add("draft", round_.draft if drafting else round_.anchor_only)
    if split:
        for u in lengths:
            steps.add(("stage 0", u), lambda u=u: round_.begin(u))
        steps.add("correction", round_.correct)
    for w in lengths:
        steps.add(("stage 1", w), lambda w=w: round_.resume(w) if split else round_.forward(w))
        steps.add(("accept", w), lambda w=w: round_.accept(w))
        steps.add(("commit", w), lambda: round_.commit(drafting))
    return steps


NAMES: dict[Any, str] = {GraphRunner: "graphs", read_by_host: "graphs-read"}


class StaticContender:
    """`bench.contenders.Contender` over static rounds."""

    def __init__(self, target: Any, drafter: Any | None, timer: Timer, make_runner: MakeRunner = GraphRunner) -> None:
        self.target, self.drafter, self.timer = target, drafter, timer
        self.name = NAMES.get(make_runner, "static steps")
        self.for_chosen_lengths = make_runner is read_by_host  # of a fixed length it is the other one
        self.decoder = BenchDecoder(target, drafter, make_runner=make_runner)

    @property
    def how(self) -> str:
        """How rounds run, once one has."""
        return self.decoder.reason

    def reserve(self, tokens: int) -> None:
        """Room for the longest run at once: a larger arena later is all graphs again."""
        self.decoder.prepare(tokens)

    # -- end to end --------------------------------------------------------------------------------------------------------

    def run(self, task: Task) -> Run:
        """Decode over static rounds."""
        return LoopContender._drain(self._loop(task))

    def _params(self, task: Task) -> DecodingParams:
        return DecodingParams(max_tokens=task.tokens, break_even=0.0)

    def _loop(self, task: Task) -> StaticLoop:
        self.decoder.counts = task.replay if task.draft else None
        drafter = self.drafter if task.draft else None
        loop, reason = self.decoder.loop(drafter, task.prompt, self._params(task), task.policy)
        if loop is None:
            raise DSpineError(f"graphs cannot run this: {reason}; time it without them")
        assert isinstance(loop, StaticLoop)
        _restart(getattr(loop._runner, "round", None))
        return loop

    # -- phases ------------------------------------------------------------------------------------------------------------

    def phases(self, task: Task) -> dict[str, list[float]]:
        """Seconds of each phase a round, of the very steps that a graph of the whole round holds."""
        decoder, drafter = self.decoder, self.drafter if task.draft else None
        decoder.counts = task.replay if task.draft else None
        plan = decoder.plan(self._params(task), task.policy, drafter)
        if isinstance(plan, str):
            raise DSpineError(f"graphs cannot run this: {plan}; time it without them")
        arena = decoder.idle_arena(len(task.prompt) + task.tokens)
        round_ = decoder.make_round(plan.rules)
        mode = plan.mode if drafter is not None else PLAIN
        steps = phase_steps(round_, self._lengths_of(round_, mode), drafter is not None)
        arena.rewind()
        anchor = fill(self.target, drafter, arena, task.prompt)
        arena.start([len(task.prompt)], [anchor], [task.tokens - 1], frozenset(), None)
        _restart(round_)
        found = self._timed_rounds(round_, steps, mode, task.tokens - 1)
        arena.rewind()
        return found

    @staticmethod
    def _lengths_of(round_: StaticRound, mode: Any) -> list[int]:
        """Every length that a round may verify."""
        if mode == PLAIN:
            return [1]
        return sorted(set(length_bodies(round_))) if mode == POLICY else [int(mode)]

    def _timed_rounds(self, round_: StaticRound, steps: Steps, mode: Any, budget: int) -> dict[str, list[float]]:
        """Rounds until the budget is used up; as many are queued before a read as cannot go beyond it."""
        marks: list[list[tuple[str, Any, Any]]] = []
        remaining = budget
        w = 1 if mode == PLAIN else mode
        while remaining > 0:
            for _ in range(1 if mode == POLICY else -(-remaining // w)):
                marks.append(self._timed_round(round_, steps, w, drafting=mode != PLAIN))
            remaining = int(round_.arena.remaining[0])
        found: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for row in marks:
            spent = dict.fromkeys(PHASES, 0.0)
            for phase, before, after in row:
                spent[phase] += self.timer.seconds([before, after])[0]
            for phase, seconds in spent.items():
                found[phase].append(seconds)
        return found

    def _timed_round(self, round_: StaticRound, steps: Steps, w: Any, drafting: bool) -> list[tuple[str, Any, Any]]:
        """(phase, mark before, mark after) of one round; a policy's lengths are read between its phases."""
        found: list[tuple[str, Any, Any]] = []

        def timed(phase: str, name: Any) -> None:
            before = self.timer.mark()
            steps.run(name)
            found.append((phase, before, self.timer.mark()))

        steps.keep_busy()
        timed("draft", "draft")
        if not drafting:
            found.clear()  # copying the anchor is no draft
        if w == POLICY:
            arena, bodies = round_.arena, length_bodies(round_)
            if staged(round_):
                upper = body_of(bodies, int(arena.upper[0]))
                steps.keep_busy()
                timed("stage 0", ("stage 0", upper))
                timed("correction", "correction")
            w = body_of(bodies, int(arena.chosen[0]))
            steps.keep_busy()
        timed("stage 1", ("stage 1", int(w)))
        timed("accept", ("accept", int(w)))
        timed("commit", ("commit", int(w)))
        return found

    # -- lengths -----------------------------------------------------------------------------------------------------------

    def lengths(
        self, prompt: Sequence[int], lengths: Sequence[int], repetitions: int, seed: int
    ) -> dict[int, list[tuple[float, float]]]:
        """`Contender.lengths`; verification and round are timed one after the other, each behind other device work. Behind a
        short drafter's block stand tokens drawn at random. Every round commits one token."""
        rounds = LengthSteps(self.target, self.drafter, prompt, lengths, repetitions + 1, seed)
        found: dict[int, list[tuple[float, float]]] = {w: [] for w in lengths}
        for w in lengths:
            rounds.one(w, self.timer)
        rng = np.random.default_rng(seed)
        for _ in range(repetitions):
            for w in rng.permutation(list(lengths)):
                found[int(w)].append(rounds.one(int(w), self.timer))
        return found


def _restart(round_: Any) -> None:
    """A replayed round begins its tables again."""
    if isinstance(round_, ReplayedRound):
        round_.restart()


@torch.inference_mode()
def fill(target: Any, drafter: Any | None, arena: Arena, prompt: Sequence[int]) -> int:
    """Read a prompt into an empty arena's caches; the most likely next token."""
    tokens = torch.tensor([list(prompt)], device=arena.device)
    filled = target.prefill(arena.cache, tokens, chunk=PREFILL)
    if drafter is not None:
        drafter.commit(arena.draft_cache, filled.features)
    return int(filled.logits[0].argmax())


class LengthSteps:
    """Rounds of chosen lengths behind one prompt, on an arena of their own; each commits one token."""

    def __init__(
        self, target: Any, drafter: Any | None, prompt: Sequence[int], lengths: Sequence[int], passes: int, seed: int
    ) -> None:
        """passes: calls of `one` for each length."""
        room = 2 * passes * len(lengths) + max(lengths)
        if len(prompt) + room > target.info.context_length:
            raise DSpineError(
                f"a prompt of {len(prompt)} tokens and {room} rounds exceed the context of {target.info.context_length}: "
                "fewer --repetitions or --lengths, or a shorter --context"
            )
        rows = max(*lengths, drafter.config.block_size if drafter is not None else 1)
        arena = self.arena = Arena(target, drafter, ArenaShape(len(prompt) + room, 1, rows))
        draws = np.random.default_rng(seed).integers(3, target.info.vocab_size, size=rows + 1)
        round_ = ReplayedRound(target, drafter, arena, ReplayRules(counts=(0,)))
        self.steps = Steps(arena.device)
        self.drafts = drafter is not None
        arena.block.copy_(torch.from_numpy(draws[None, :rows]).to(torch.int32))
        if self.drafts:
            self.steps.add("draft", round_.draft)
        self.steps.add("anchor", round_.anchor_only)
        for w in lengths:
            self.steps.add(("verify", w), lambda w=w: round_.forward(w))
            self.steps.add(("rest", w), lambda w=w: (round_.accept(w), round_.commit()))
            self.steps.add(("round", w), lambda w=w: self._whole(round_, w))
        fill(target, drafter, arena, prompt)
        arena.start([len(prompt)], [int(draws[-1])], [room], frozenset(), None)

    def _whole(self, round_: StaticRound, w: int) -> None:
        """One round of w: the draft too where w > 1."""
        if self.drafts and w > 1:
            round_.draft()
        else:
            round_.anchor_only()
        round_.verify(w)

    def one(self, w: int, timer: Timer) -> tuple[float, float]:
        """(seconds of both stages, seconds of a whole round)."""
        steps = self.steps
        steps.keep_busy()
        steps.run("draft" if self.drafts and w > 1 else "anchor")
        marks = [timer.mark()]
        steps.run(("verify", w))
        marks.append(timer.mark())
        steps.run(("rest", w))
        marks.append(timer.mark())
        steps.run(("round", w))
        marks.append(timer.mark())
        verify, _, whole = timer.seconds(marks)
        return verify, whole
