"""What `dspine bench` times besides the eager loop: static rounds, on CUDA as graphs.

End to end it is `static.loop` itself. Phases and lengths run the same steps, each as a graph of its own between two marks on
the device's timeline; a product in front keeps the device busy while the host queues them, so that no gap of the host is timed.
Replayed acceptance and replayed lengths are device work too: a table and a counter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspine.common.acceptance import Verdict
from dspine.common.bench.contenders import LoopContender, Run, Task, TracePolicy
from dspine.common.bench.timing import PHASES
from dspine.common.decoding import DecodingParams
from dspine.common.errors import DSpineError
from dspine.common.protocols import LengthPolicy, Timer
from dspine.common.selection.policies import StaticPolicy
from dspine_cuda.graphs import PLAIN, POLICY, GraphRunner, Runner, capture, staged
from dspine_cuda.static.arena import Arena, ArenaShape
from dspine_cuda.static.loop import GraphDecoder, Plan, StaticLoop, pair_refusal
from dspine_cuda.static.round import RoundRules, StaticRound
from dspine_cuda.timer import make_timer

BUSY = 4096  # side of the product that keeps the device busy: about 0.2 ms on an H200
PREFILL = 512
MakeRunner = Callable[[StaticRound], Runner]


def contenders(target: Any, drafter: Any | None) -> list[StaticContender]:
    """Graphs, where this pair can have them; see `refusal`."""
    return [] if refusal(target, drafter) is not None else [StaticContender(target, drafter, make_timer(target.info.device))]


def refusal(target: Any, drafter: Any | None) -> str | None:
    """Why graphs are not timed; None where they are."""
    device = torch.device(target.info.device)
    return f"no CUDA: the target is on {device}" if device.type != "cuda" else pair_refusal(target, drafter)


class ReplayedRound(StaticRound):
    """A round whose verdict is computed as ever and then replaced: the next of `counts` drafts are accepted, at most those that
    were verified."""

    def __init__(
        self, target: Any, drafter: Any, arena: Arena, rules: RoundRules | None = None, counts: Sequence[int] = (0,)
    ) -> None:
        super().__init__(target, drafter, arena, rules)
        self.counts = torch.tensor(counts, dtype=torch.int64, device=arena.device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=arena.device)

    def _judge(self, logits: Tensor, draft: Tensor, limit: Tensor) -> Verdict:
        verdict = super()._judge(logits, draft, limit)
        count = self.counts.index_select(0, self.turn % len(self.counts))
        self.turn.add_(1)
        return Verdict(torch.minimum(count.to(verdict.accepted.dtype), limit), verdict.next_token)


class BenchDecoder(GraphDecoder):
    """A decoder that can replay acceptance (`counts`, None: the pair's own) and the lengths of a trace."""

    counts: tuple[int, ...] | None = None

    def make_round(self, rules: RoundRules) -> StaticRound:
        """Replayed where `counts` says so."""
        if self.counts is None:
            return super().make_round(rules)
        assert self.arena is not None
        return ReplayedRound(self.target, self.drafter, self.arena, rules, self.counts)

    def idle_arena(self, tokens: int) -> Arena:
        """The arena for so many tokens, emptied, nothing in flight."""
        self.prepare(tokens)
        assert self.arena is not None
        for runner in self._runners.values():
            runner.drop()
        self.arena.rewind()
        return self.arena

    def runner_key(self, plan: Plan) -> tuple[Any, ...]:
        """Graphs hold the table of counts too."""
        return *super().runner_key(plan), self.counts

    def plan(self, params: DecodingParams, policy: LengthPolicy, drafter: Any | None) -> Plan | str:
        """The lengths of a trace are known beforehand: a graph for each."""
        if not isinstance(policy, TracePolicy) or drafter is None:
            return super().plan(params, policy, drafter)
        found = super().plan(params, StaticPolicy(), drafter)
        if isinstance(found, str):
            return found
        most = drafter.config.block_size
        return Plan(found.mode, found.rules, tuple(min(length, most) for length, _ in policy.trace.rounds))


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


class StaticContender:
    """`bench.contenders.Contender` over static rounds."""

    def __init__(self, target: Any, drafter: Any | None, timer: Timer, make_runner: MakeRunner = GraphRunner) -> None:
        self.target, self.drafter, self.timer = target, drafter, timer
        self.name = "graphs" if make_runner is GraphRunner else "static steps"
        self.decoder = BenchDecoder(target, drafter, make_runner=make_runner)

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
        decoder.idle_arena(len(task.prompt) + task.tokens)
        round_ = decoder.make_round(plan.rules)
        mode = plan.mode if drafter is not None else PLAIN
        lengths = self._lengths_of(plan, mode)
        steps = phase_steps(round_, lengths, drafter is not None)
        loop = self._loop(task)
        while loop.reading_prompt:
            loop.step()
        loop._begin()
        _restart(round_)
        found = self._timed_rounds(round_, steps, mode, plan.sequence, task.tokens - 1)
        loop.finish_reason = "length"  # the arena is free again
        return found

    def _lengths_of(self, plan: Plan, mode: Any) -> list[int]:
        """Every length that a round may verify."""
        if mode == PLAIN:
            return [1]
        if mode == POLICY:
            return list(range(1, self.drafter.config.block_size + 1))  # type: ignore[union-attr]
        return sorted({int(mode)} if not plan.sequence else {int(w) for w in plan.sequence})

    def _timed_rounds(
        self, round_: StaticRound, steps: Steps, mode: Any, sequence: Sequence[Any], budget: int
    ) -> dict[str, list[float]]:
        """Rounds until the budget is used up; as many are queued before a read as cannot go beyond it."""
        marks: list[list[tuple[str, Any, Any]]] = []
        remaining = budget
        while remaining > 0:
            longest = (
                round_.rows if mode == POLICY else max((int(w) for w in sequence), default=1 if mode == PLAIN else int(mode))
            )
            for _ in range(-(-remaining // longest) if mode != POLICY else 1):
                w = 1 if mode == PLAIN else mode
                if sequence:
                    w = sequence[len(marks) % len(sequence)]
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
            arena = round_.arena
            if staged(round_):
                upper = int(arena.upper[0])
                steps.keep_busy()
                timed("stage 0", ("stage 0", upper))
                timed("correction", "correction")
            w = int(arena.chosen[0])
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
    """A replayed round begins its table again."""
    if isinstance(round_, ReplayedRound):
        round_.turn.zero_()


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
        round_ = ReplayedRound(target, drafter, arena, counts=(0,))
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
        tokens = torch.tensor([list(prompt)], device=arena.device)
        with torch.inference_mode():
            filled = target.prefill(arena.cache, tokens, chunk=PREFILL)
            if drafter is not None:
                drafter.commit(arena.draft_cache, filled.features)
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
