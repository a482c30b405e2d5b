"""What is timed: something that decodes a prompt plainly or with drafts. The loop of every runtime is one; a runtime that has
another way to run a round (recorded graphs) adds its own through `bench_contenders`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dspine.common.acceptance import Verdict, accept_greedy
from dspine.common.arrays import array_namespace, astype
from dspine.common.bench.timing import HostTimer, PhaseRecorder, TimedDrafter, TimedTarget
from dspine.common.bench.trace import Trace
from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.errors import DSpineError
from dspine.common.protocols import Drafter, DraftRequest, Engine, LengthPolicy, Target, TimedRuntime, Timer
from dspine.common.selection.policies import StaticPolicy


@dataclass(frozen=True)
class Task:
    """One run: greedy, stop tokens ignored. draft: with the drafter. replay: drafts each round accepts instead of its own
    verdict (the verdict is computed all the same), used from the start and around again. policy: whole blocks unless told."""

    prompt: Sequence[int]
    tokens: int
    draft: bool
    replay: tuple[int, ...] | None = None
    policy: LengthPolicy = field(default_factory=StaticPolicy)


@dataclass(frozen=True)
class Run:
    """seconds: of the rounds, the prompt left out; tokens: those that came out of rounds. rounds: (input tokens verified,
    drafts accepted) of each whole one; the last is left out where the end cut it short."""

    token_ids: list[int]
    tokens: int
    seconds: float
    round_count: int
    rounds: list[tuple[int, int]]

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@runtime_checkable
class Contender(Protocol):
    """A way to run rounds."""

    name: str

    def run(self, task: Task) -> Run: ...

    def phases(self, task: Task) -> dict[str, list[float]]:
        """Seconds of each phase (`timing.PHASES`), a number a round, by the contender's own timer."""
        ...

    def lengths(
        self, prompt: Sequence[int], lengths: Sequence[int], repetitions: int, seed: int
    ) -> dict[int, list[tuple[float, float]]]:
        """For each length w (seconds of verification, seconds of the whole round), `repetitions` of them in mixed order.
        Verification: begin, finish. Whole: the draft too where w > 1, acceptance and one read, commits."""
        ...


def contenders(runtime: Any, engine: Engine) -> list[Contender]:
    """The loop first, then what the runtime adds (`bench_contenders(target, drafter)`, where it has it)."""
    more = getattr(runtime, "bench_contenders", None)
    found: list[Contender] = [LoopContender(engine.target, engine.drafter, timer_of(runtime, engine.target))]
    return found + list(more(engine.target, engine.drafter) if more is not None else ())


def timer_of(runtime: Any, target: Target) -> Timer:
    """The runtime's own, or the host's clock behind a host read of one array of what was produced."""
    if isinstance(runtime, TimedRuntime):
        return runtime.timer(target.info.device)

    def wait(things: tuple[Any, ...]) -> None:
        for thing in things:
            parts = thing if isinstance(thing, (list, tuple)) else (thing, *getattr(thing, "__dict__", {}).values())
            for value in reversed(parts):  # of a list the last, which the others come before
                if hasattr(value, "shape") and hasattr(value, "dtype"):
                    target.arrays.to_host(value)
                    break

    return HostTimer(wait)


class ReplayLoop(DecodingLoop):
    """The loop with another verdict: how many drafts stay comes from a list. Everything is computed as ever, the verdict too;
    only its count is replaced, by at most the drafts that were verified."""

    def __init__(self, *args: Any, counts: Sequence[int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counts_of_rounds, self._judged = counts, 0

    def judge(self, logits: Any, block: Any, proposal: Any, ahead: int = 0) -> Verdict:
        verdict = super().judge(logits, block, proposal, ahead)
        if proposal is None:  # the prompt's token, and plain rounds
            return verdict
        count = min(self._counts_of_rounds[self._judged % len(self._counts_of_rounds)], block.shape[1] - 1)
        self._judged += 1
        accepted = self.target.arrays.to_device(np.array([count], dtype=np.int32))
        return Verdict(astype(accepted, verdict.accepted.dtype), verdict.next_token)


class LoopContender:
    """The project's own loop over a target and a drafter."""

    name = "loop"

    def __init__(self, target: Target, drafter: Drafter | None, timer: Timer) -> None:
        self.target, self.drafter, self.timer = target, drafter, timer

    def run(self, task: Task) -> Run:
        """Decode as the command line does."""
        return self._drain(self._loop(task, self.target, self.drafter), ahead=True)

    def phases(self, task: Task) -> dict[str, list[float]]:
        """The same with marks between the steps."""
        recorder = PhaseRecorder(self.timer)
        drafter = TimedDrafter(self.drafter, recorder) if self.drafter is not None else None
        self._drain(self._loop(task, TimedTarget(self.target, recorder), drafter))  # type: ignore[arg-type]
        return recorder.phases()

    def _loop(self, task: Task, target: Target, drafter: Drafter | None) -> DecodingLoop:
        params = DecodingParams(max_tokens=task.tokens, break_even=0.0)
        drafter = drafter if task.draft else None
        if task.draft and task.replay is not None:
            return ReplayLoop(target, drafter, task.prompt, params, task.policy, counts=task.replay)
        return DecodingLoop(target, drafter, task.prompt, params, task.policy)

    @staticmethod
    def _drain(loop: DecodingLoop, ahead: bool = False) -> Run:
        rounds: list[tuple[int, int]] = []
        while loop.finish_reason is None:
            step = loop.step(ahead)
            if step.events and loop.finish_reason is None and loop.stats.rounds:
                rounds.append((len(step.drafts) + 1, step.accepted))
        stats = loop.stats
        return Run(loop.output, stats.generated_tokens - 1, stats.decode_seconds, stats.rounds, rounds)

    def lengths(
        self, prompt: Sequence[int], lengths: Sequence[int], repetitions: int, seed: int
    ) -> dict[int, list[tuple[float, float]]]:
        """`Contender.lengths`; drafts longer than the drafter's block are filled up with tokens drawn at random."""
        rounds = LengthRounds(
            self.target, self.drafter, prompt, len(lengths) * (repetitions + 1) + max(lengths), self.timer, seed
        )
        found: dict[int, list[tuple[float, float]]] = {w: [] for w in lengths}
        for w in lengths:  # first calls at a length set up buffers and kernels
            rounds.one(w)
        rng = np.random.default_rng(seed)
        for _ in range(repetitions):
            for w in rng.permutation(list(lengths)):
                found[int(w)].append(rounds.one(int(w)))
        return found


class LengthRounds:
    """Single rounds of a chosen length behind one prompt; each commits one token, so that the context hardly grows."""

    def __init__(
        self, target: Target, drafter: Drafter | None, prompt: Sequence[int], room: int, timer: Timer, seed: int
    ) -> None:
        if len(prompt) + room > target.info.context_length:
            raise DSpineError(
                f"a prompt of {len(prompt)} tokens and {room} rounds exceed the context of {target.info.context_length}: "
                "fewer --repetitions or --lengths, or a shorter --context"
            )
        self.target, self.drafter, self.timer = target, drafter, timer
        self.tokens = np.random.default_rng(seed).integers(3, target.info.vocab_size, size=room + 1).astype(np.int32)
        self.cache = target.make_cache(len(prompt) + room)
        self.draft_cache = drafter.make_cache(len(prompt) + room) if drafter is not None else None
        filled = target.prefill(self.cache, target.arrays.to_device(np.array([prompt], dtype=np.int32)), chunk=512)
        if drafter is not None:
            drafter.commit(self.draft_cache, filled.features)

    def block(self, w: int) -> Any:
        """int [1, w]: an anchor, drafts, and behind a short drafter's block random tokens."""
        xp = array_namespace(self.target.arrays.to_device(self.tokens[:1]))
        anchor = self.target.arrays.to_device(self.tokens[:1])
        parts = [anchor[:, None]]
        if self.drafter is not None and w > 1:
            proposal = self.drafter.propose(self.draft_cache, anchor, DraftRequest())
            parts.append(astype(proposal.tokens, anchor.dtype)[:, : w - 1])
        have = sum(part.shape[1] for part in parts)
        if have < w:
            parts.append(self.target.arrays.to_device(self.tokens[None, have:w]))
        return xp.concat(parts, axis=1)

    def one(self, w: int) -> tuple[float, float]:
        """(seconds of begin and finish, seconds of everything) of one round."""
        target, mark = self.target, self.timer.mark
        begun = mark(self.cache, self.draft_cache)
        block = self.block(w)
        drafted = mark(block)
        verification = target.finish(self.cache, target.begin(self.cache, block), w)
        verified = mark(verification)
        limit = target.arrays.to_device(np.array([w - 1], dtype=np.int32))
        verdict = accept_greedy(verification.logits, block[:, 1:], limit)
        target.arrays.to_host(verdict.accepted, verdict.next_token)
        target.commit(self.cache, verification, 1)
        if self.drafter is not None:
            self.drafter.commit(self.draft_cache, verification.features[:, :1])
        ended = mark(self.cache, self.draft_cache)
        draft, verify, rest = self.timer.seconds([begun, drafted, verified, ended])
        return verify, draft + verify + rest

    def experts_hit(self, w: int) -> float | None:
        """Distinct experts that a block of `w` hits, mean over the MoE layers; None where the target does not tell."""
        target = self.target
        if not hasattr(target, "record_routing"):
            return None
        target.record_routing = True
        try:
            block = self.block(w)
            verification = target.finish(self.cache, target.begin(self.cache, block), w)
        finally:
            target.record_routing = False
        target.commit(self.cache, verification, 1)
        if self.drafter is not None:
            self.drafter.commit(self.draft_cache, verification.features[:, :1])
        if verification.router_picks is None:
            return None
        picks = target.arrays.to_host(verification.router_picks)[0][0]
        return float(np.mean([len(np.unique(picks[:, layer])) for layer in range(picks.shape[1])]))


@dataclass(frozen=True)
class TracePolicy:
    """Lengths as a trace recorded them, one after another."""

    trace: Trace
    name: str = "trace"
    needs_signals: bool = False
    reads_draft_tokens: bool = False
    _at: list[int] = field(default_factory=lambda: [0])

    def fresh(self) -> TracePolicy:
        """From the start again."""
        return replace(self, _at=[0])

    def nominal(self, proposal: Any, limit: int) -> int:
        length = self.trace.rounds[self._at[0] % len(self.trace.rounds)][0]
        self._at[0] += 1
        return min(length, limit)

    def stage_zero_length(self, nominal: int, limit: int) -> int:
        return nominal

    def correct(self, stage: Any, nominal: int, limit: int) -> int:
        return nominal
