"""Time by phase, measured through the protocols: marks on the device's timeline at the borders of a round's steps.

The loop runs as it always does, with a target and a drafter that set a mark before and after every call. What lies between
two calls is a phase too: choosing the length, correcting it, accepting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from dspine.common.protocols import Drafter, DraftRequest, Proposal, StageZero, Target, Timer, Verification

PHASES = ("draft", "select", "stage 0", "correction", "stage 1", "accept", "commit")


class HostTimer:
    """`protocols.Timer` by the host's clock; `wait(things)` returns when the device has computed them."""

    source = "host clock"

    def __init__(self, wait: Callable[[tuple[Any, ...]], None] = lambda things: None) -> None:
        self._wait = wait

    def mark(self, *produced: Any) -> float:
        """Seconds, once `produced` is there."""
        self._wait(produced)
        return perf_counter()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """Between neighbours: one less than there are marks."""
        return [after - before for before, after in zip(marks[:-1], marks[1:], strict=True)]


class PhaseRecorder:
    """Marks of many rounds; `phases` turns them into seconds once the rounds are over."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self._rounds: list[list[tuple[str, Any]]] = []

    def start(self, *produced: Any) -> None:
        """A round begins here, unless one is open."""
        self._rounds.append([("", self.timer.mark(*produced))])

    def end(self, phase: str, *produced: Any) -> None:
        """The phase `phase` ends here and the next one begins. Outside a round: nothing (the prompt)."""
        if self._rounds and self._rounds[-1][-1][0] != "commit drafter":
            self._rounds[-1].append((phase, self.timer.mark(*produced)))

    @property
    def open(self) -> bool:
        """Whether a round has begun and not yet come to its commit."""
        return bool(self._rounds) and not self._rounds[-1][-1][0].startswith("commit")

    def phases(self) -> dict[str, list[float]]:
        """Seconds of each phase, a number a round; phases that a round did not have count as 0."""
        found: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for marks in self._rounds:
            if not marks[-1][0].startswith("commit"):
                continue
            spent = dict.fromkeys(PHASES, 0.0)
            for (name, _), seconds in zip(marks[1:], self.timer.seconds([mark for _, mark in marks]), strict=True):
                spent["commit" if name.startswith("commit") else name] += seconds
            for phase, seconds in spent.items():
                found[phase].append(seconds)
        return found


class TimedTarget:
    """`protocols.Target` that marks the borders of its steps; everything else is the target's own."""

    def __init__(self, target: Target, recorder: PhaseRecorder) -> None:
        self._target, self._recorder = target, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def begin(self, cache: Any, tokens: Any) -> StageZero:
        if self._recorder.open:
            self._recorder.end("select", tokens)
        else:  # a plain round
            self._recorder.start(tokens)
        stage = self._target.begin(cache, tokens)
        self._recorder.end("stage 0", stage)
        return stage

    def finish(self, cache: Any, stage: StageZero, w: int) -> Verification:
        self._recorder.end("correction")
        verification = self._target.finish(cache, stage, w)
        self._recorder.end("stage 1", verification)
        return verification

    def commit(self, cache: Any, verification: Verification, m: int) -> None:
        self._recorder.end("accept")
        self._target.commit(cache, verification, m)
        self._recorder.end("commit", cache)


class TimedDrafter:
    """`protocols.Drafter` that marks its steps. Drafts are not queued ahead: a phase must be over where it ends."""

    queues_ahead = False

    def __init__(self, drafter: Drafter, recorder: PhaseRecorder) -> None:
        self._drafter, self._recorder = drafter, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, cache: Any, anchor: Any, request: DraftRequest) -> Proposal:
        self._recorder.start(anchor, cache)
        proposal = self._drafter.propose(cache, anchor, request)
        self._recorder.end("draft", proposal)
        return proposal

    def commit(self, cache: Any, features: Any) -> None:
        self._drafter.commit(cache, features)
        self._recorder.end("commit drafter", cache)
