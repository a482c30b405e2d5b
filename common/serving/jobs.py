"""One answer on its way: what the scheduler runs, and how its tokens become text on the worker's thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from dspine.common.decoding import DecodingLoop, DecodingParams, LogitsRule, Round
from dspine.common.logprobs import TokenLogprobs
from dspine.common.protocols import Drafter, Engine, LengthPolicy, Rounds
from dspine.common.serving.errors import ApiError
from dspine.common.serving.parsing import StopStrings
from dspine.common.serving.slots import SlotRounds
from dspine.common.statistics import Statistics
from dspine.common.tokenizer import Detokenizer, Tokenizer

_numbers = itertools.count(1)


@dataclass(frozen=True)
class TokenPiece:
    """One token of an answer. `text`: what became certain with it (stop strings cut off); `kind`: `accepted` (a draft that
    stayed), `corrected` (the target's token where a draft was refused), `target` (no draft there)."""

    token: int
    text: str
    kind: str
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Update:
    """News of a job, made on the worker's thread. `refused`: drafts that were thrown away this round. The last update has a
    `finish_reason` or an `error`."""

    pieces: list[TokenPiece] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    tail: str = ""  # text that was held back, with the last update
    finish_reason: str | None = None
    error: ApiError | None = None
    stats: Statistics | None = None
    seconds: float = 0.0  # since the job's previous update: what the round took


class TextStream:
    """Tokens -> text with stop strings. `watch` is the loop's: true ends the answer at that token."""

    def __init__(self, tokenizer: Tokenizer, stops: list[str], markers: dict[int, str]) -> None:
        self._detokenizer, self._stops, self._markers = Detokenizer(tokenizer), StopStrings(stops), markers
        self._special = tokenizer.special_ids
        self.cuts = bool(stops)  # whether it may end an answer
        self._texts: list[str] = []

    def watch(self, token: int) -> bool:
        """One emitted token."""
        text = self._detokenizer.add(token)
        if token in self._markers and token in self._special:  # `<tool_call>` and the like are text to the parser
            text += self._detokenizer.flush() + self._markers[token]
        self._texts.append(self._stops.add(text))
        return self._stops.hit

    def take(self) -> list[str]:
        """Texts of the tokens watched since the last call."""
        texts, self._texts = self._texts, []
        return texts

    def finish(self) -> str:
        """What was held back."""
        return self._stops.add(self._detokenizer.flush()) + self._stops.flush()


@dataclass(eq=False)
class Job:
    """One choice of one request. `sink` gets every `Update`, on the worker's thread; `cancelled` is set by anyone."""

    prompt: list[int]
    params: DecodingParams
    policy: LengthPolicy
    text: TextStream
    sink: Callable[[Update], None]
    client: str = ""
    draft: bool = True
    pinned: bool = False  # lengths are the policy's own: a seed (no clock may decide), or a fixed length that was asked for
    make_rules: Callable[[], list[LogitsRule]] = list
    number: int = field(default_factory=lambda: next(_numbers))
    cancelled: bool = False
    loop: DecodingLoop | None = None
    rounds_by: str = ""  # where the engine has rounds without the CPU: how this request's run, and why
    submitted: float = field(default_factory=perf_counter)
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    _told: float = 0.0

    def open(self, engine: Engine, rounds: Rounds | None = None, slots: SlotRounds | None = None) -> DecodingLoop:
        """Make the loop (allocates its caches), over `rounds` or in one of `slots` where they can run this request. Raises
        DSpineError."""
        drafter = engine.drafter if self.draft else None
        self.started = self._told = perf_counter()
        rules = self.make_rules()
        if rounds is not None:
            self.loop, self.rounds_by = self._without_cpu(rounds, drafter, rules)
        if slots is not None:
            self.loop, self.rounds_by = self._in_slot(slots, drafter, rules)
        if self.loop is None:
            self.loop = DecodingLoop(
                engine.target, drafter, self.prompt, self.params, self.policy, rules=rules, watch=self.text.watch
            )
        return self.loop

    def _without_cpu(self, rounds: Rounds, drafter: Drafter | None, rules: list[LogitsRule]) -> tuple[DecodingLoop | None, str]:
        """Nothing on the host may shape the logits or end the answer early: the device is ahead by then."""
        if rules or self.text.cuts:
            return None, f"eager: {'a bias or a grammar shapes' if rules else 'stop strings are watched'} on the host"
        loop, reason = rounds.loop(drafter, self.prompt, self.params, self.policy)
        if loop is None:
            return None, f"eager: {reason}"
        loop.watch = self.text.watch
        return loop, f"graphs: {reason}"

    def _in_slot(self, slots: SlotRounds, drafter: Drafter | None, rules: list[LogitsRule]) -> tuple[DecodingLoop | None, str]:
        """Nothing on the host may shape the logits; stop strings are the host's there."""
        if rules:
            return None, "eager: a bias or a grammar shapes the logits on the host"
        loop, reason = slots.loop(drafter, self.prompt, self.params, self.policy, self.pinned)
        if loop is None:
            return None, f"eager: {reason}"
        loop.watch = self.text.watch
        return loop, f"graphs: {reason}"

    @property
    def way(self) -> str:
        """How the rounds of this job run: `graphs` or `eager`."""
        return "graphs" if self.rounds_by.startswith("graphs") else "eager"

    def tell(self, result: Round) -> None:
        """Hand a round's events to the sink."""
        if not result.events:
            return
        now = perf_counter()
        self.first_token = self.first_token or now
        events, texts = result.events, self.text.take()
        refused = result.drafts[result.accepted :] if len(events) > result.accepted else []
        kinds = ["accepted" if event.drafted else "corrected" if refused else "target" for event in events]
        pieces = [
            TokenPiece(event.token, text, kind, event.logprobs) for event, text, kind in zip(events, texts, kinds, strict=True)
        ]
        last = events[-1]
        tail = self.text.finish() if last.finish_reason else ""
        if last.finish_reason:
            self.finished = now
        self.sink(
            Update(
                pieces=pieces,
                refused=refused,
                drafted=len(result.drafts),
                accepted=result.accepted,
                tail=tail,
                finish_reason=last.finish_reason,
                stats=last.stats,
                seconds=now - self._told,
            )
        )
        self._told = now

    def fail(self, error: ApiError) -> None:
        """End the job with an error."""
        self.finished = perf_counter()
        self.sink(Update(error=error, stats=self.loop.stats if self.loop is not None else None))
