"""Rounds of several sequences without the CPU: who has which slot, how many tokens the next round verifies, what came back.

The device runs a round while the host reads the one before it: `run` starts the next round of every way of sampling, then
settles the oldest one. So lengths are chosen, and drafting is given up, one round late, always exactly one: an answer does not
depend on the company. The device emits without looking for stop tokens or stop strings; the host cuts a text where it ends,
and what the round under way makes of it behind that is thrown away.

The shared length is that of `shared.GraphLengths` before the drafts exist: by running acceptance and what rounds take on the
device, or on the host where that is more; it never reads the drafts, so every acceptance rule stays lossless. A pinned
sequence (a seed, a fixed length) keeps its own.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from dspine.common.decoding import DecodingLoop, DecodingParams, Round
from dspine.common.errors import DSpineError
from dspine.common.protocols import Drafter, Engine, LengthPolicy, Slots
from dspine.common.sampling import SamplingParams, uniforms
from dspine.common.selection.policies import StaticPolicy
from dspine.common.serving.host_share import HostShare
from dspine.common.serving.lengths import CostTable
from dspine.common.serving.shared import GraphLengths
from dspine.common.serving.slot_prompts import PromptLoop

KINDS = 4  # ways of sampling that have graphs at once
Kind = tuple[str, SamplingParams]
Tell = Callable[["SlotLoop", Round | DSpineError], None]


class SlotLoop(PromptLoop):
    """A sequence whose caches are a slot. Its own steps read the prompt; its rounds are `SlotRounds.run`'s."""

    def __init__(
        self, slots: Slots, slot: int, pinned: bool, drafter: Drafter | None, prompt: Sequence[int], params: DecodingParams,
        policy: LengthPolicy, target: Any,
    ) -> None:  # fmt: skip
        self.slot, self.pinned, self._slots = slot, pinned, slots
        self.begun, self.settled = False, 0.0  # when its last round was read
        self.launched = self.read = 0  # rounds
        self._undrafted: int | None = None  # the round from which on nothing is drafted
        super().__init__(target, drafter, prompt, params, policy)
        sampling = SamplingParams() if self.rule == "greedy" else replace(params.sampling, seed=0)  # greedy: no filter matters
        self.kind: Kind = (self.rule, sampling)

    def _make_caches(self, capacity: int) -> tuple[Any, Any]:
        """Those of the slot, which has room for a block behind its tokens."""
        return self._slots.caches(self.slot, self.drafter is not None)

    def _round(self) -> Round:
        raise DSpineError("a sequence in a slot has no rounds of its own: report this")

    def begin(self) -> None:
        """The prompt is in the caches: hand them over."""
        table = None
        if not self.params.sampling.greedy:
            table = uniforms(self.params.sampling.seed, self.params.request, 0, self.room + self._slots.rows)
        budget = self.room - self.stats.generated_tokens
        self._slots.begin(self.slot, self.committed, self.anchor, budget, table)
        self.begun, self.settled = True, perf_counter()

    def move(self, to: int) -> None:
        """Go on in another slot, which is idle."""
        length = self.cache.length
        self.cache, self.draft_cache = self._slots.move(self.slot, to, length, self.draft_cache is not None)
        self.slot = to
        for cache in self._counted():
            cache.length = length

    @property
    def top(self) -> int:
        """Most tokens of the next round: 1 where it does not draft. The budget may be a round old; the device has its own."""
        limit, drafts = self.round_limit(), self.drafter is not None
        if self._undrafted is not None:
            drafts = self.launched + 1 < self._undrafted
        if not drafts or limit < 2:
            return 1
        limit = min(limit, 1 + self._slots.drafter.config.num_proposals, self._slots.rows)
        return self.policy.nominal(None, limit) if isinstance(self.policy, StaticPolicy) else limit  # type: ignore[arg-type]

    def _watch_break_even(self, emitted: int) -> None:
        """Given up, drafting ends with the round after the next, which may be under way already."""
        if self._undrafted is None:
            super()._watch_break_even(emitted)
            self._undrafted = self.read + 2 if self.drafter is None else None

    def take(self, report: Any, limit: int) -> Round:
        """A round that came back becomes events."""
        if not report.tokens:
            raise DSpineError("a static round emitted nothing although the request has not ended: report this")
        self.read += 1
        if not report.finite and limit > 1:
            self.note_non_finite()
        drafts = report.drafts[: limit - 1]
        result = self.settle(drafts, report.accepted, report.tokens[-1], None)
        if self.finish_reason is None and len(result.events) != len(report.tokens):
            raise DSpineError(
                f"device and host disagree about a round: {len(report.tokens)} tokens and {len(result.events)}; report this"
            )
        for cache in self._counted():
            cache.length += len(result.events)
        if self.drafter is None:
            self.draft_cache = None
        now = perf_counter()
        self.stats.decode_seconds += now - self.settled
        self.settled = now
        return result


@dataclass(frozen=True)
class Flight:
    """A round under way: its sequences, where they were then, their limits, its graph (slots and tokens each), what waits for
    it, and when it was launched."""

    loops: list[SlotLoop]
    slots: list[int]
    limits: list[int]
    graph: tuple[int, int]
    read: Callable[[], tuple[list[Any], float]]
    launched: float


class SlotRounds:
    """The slots of a server. `loop` takes one, `run` runs rounds, `release` gives it back."""

    def __init__(self, engine: Engine, slots: Slots, costs: CostTable | None = None) -> None:
        """costs: what rounds take (None: measured here, which makes greedy rounds ready too)."""
        self.engine, self.slots, self.reason = engine, slots, slots.reason
        self.lengths = GraphLengths(costs or CostTable(*slots.measure(), overlaps=True), slots)
        self._host = HostShare()
        self._free = list(range(slots.count))  # a heap: low slots first, so few sequences need few
        self._held: dict[int, SlotLoop] = {}
        self._flights: dict[Kind, deque[Flight]] = {}

    # -- coming and going --------------------------------------------------------------------------------------------------

    def loop(
        self, drafter: Drafter | None, prompt: Sequence[int], params: DecodingParams, policy: LengthPolicy, pinned: bool
    ) -> tuple[SlotLoop | None, str]:
        """A sequence in a slot and how its rounds run, or None and why it must run eagerly. Raises DSpineError for requests
        that no loop takes."""
        refused = self._refusal(drafter, prompt, params, policy, pinned)
        if refused is not None:
            return None, refused
        slot = heapq.heappop(self._free)
        try:
            keeps = pinned and isinstance(policy, StaticPolicy)
            found = SlotLoop(self.slots, slot, keeps, drafter, prompt, params, policy, self.engine.target)
            has_room = self._room_for(found.kind)
        except BaseException:
            heapq.heappush(self._free, slot)
            raise
        if not has_room:
            heapq.heappush(self._free, slot)
            return None, f"{KINDS} other ways of sampling have the graphs"
        self._held[slot] = found
        return found, self.reason

    def _refusal(
        self, drafter: Drafter | None, prompt: Sequence[int], params: DecodingParams, policy: LengthPolicy, pinned: bool
    ) -> str | None:
        if params.sampling.penalised:
            return "penalties are counted on the host"
        if params.top_logprobs is not None:
            return "log-probabilities are made on the host"
        if drafter is not None and drafter is not self.slots.drafter:
            return "the request drafts with another drafter"
        if pinned and drafter is not None and not params.sampling.greedy and not isinstance(policy, StaticPolicy):
            return f"a seed keeps the length policy's own lengths, and {policy.name!r} runs on the host"
        tokens = len(prompt) + min(params.max_tokens, self.engine.target.info.context_length - len(prompt))
        if tokens > self.slots.tokens:
            return f"prompt and answer may take {tokens} tokens, a slot holds {self.slots.tokens}"
        return None if self._free else "no slot is free"

    def _room_for(self, kind: Kind) -> bool:
        """Whether this way of sampling has graphs, or may have; an older one that nobody uses makes room."""
        if kind in self._flights:
            return True
        used = {loop.kind for loop in self._held.values()}
        if len(self._flights) >= KINDS:
            idle = next((old for old in self._flights if old not in used and old[0] != "greedy"), None)
            if idle is None:
                return False
            self._drain(idle)
            del self._flights[idle]
            self.slots.drop(idle)
        self._flights[kind] = deque()
        return True

    def holds(self, loop: DecodingLoop | None) -> bool:
        """Whether this sequence has a slot."""
        return isinstance(loop, SlotLoop) and self._held.get(loop.slot) is loop

    def release(self, loop: DecodingLoop | None) -> None:
        """Its slot is free from now on; a round of it that is under way is thrown away."""
        if loop is not None and self.holds(loop):
            slot = loop.slot  # type: ignore[attr-defined]
            del self._held[slot]
            self.slots.end(slot)
            heapq.heappush(self._free, slot)

    # -- rounds ------------------------------------------------------------------------------------------------------------

    def run(self, loops: Sequence[SlotLoop], tell: Tell) -> None:
        """Start a round of these sequences (all of them that have a slot and have read their prompt) and tell of every round
        that has come back: a sequence has one, none yet, or two; an error ends it (one at the launch, all of that round).
        `tell` may release sequences. Where this raises, none of them can go on; those that come later can."""
        try:
            reading = any(not loop.begun for loop in self._held.values())
            for loop in loops:
                if not loop.begun:
                    loop.begin()
            self._close_up()
            self._host.begin(reading)
            for kind, flights in self._flights.items():
                members = [loop for loop in loops if loop.kind == kind and self._goes_on(loop)]
                if members:
                    self._launch(kind, members, tell)
                while len(flights) > bool(members):
                    self._settle(flights.popleft(), tell)
            took = self._host.end()
            if took is not None:
                self.lengths.costs.observe_host(took)
        except BaseException:
            for kind, flights in self._flights.items():
                flights.clear()
                self.slots.drop(kind)
            raise

    def _goes_on(self, loop: SlotLoop) -> bool:
        """Whether it has neither ended nor left: both may happen while a round of it is under way."""
        return loop.finish_reason is None and self.holds(loop)

    def _close_up(self) -> None:
        """Rounds reach up to the last sequence: where fewer slots would do, it moves down, one sequence a turn."""
        last = max(self._held, default=0)
        loop = self._held.get(last)
        if loop is None or not loop.begun or self.slots.reach(last + 1) == self.slots.reach(len(self._held)):
            return
        to = heapq.heapreplace(self._free, last)
        del self._held[last]
        loop.move(to)
        self._held[to] = loop

    def _launch(self, kind: Kind, loops: list[SlotLoop], tell: Tell) -> None:
        pinned, tops = [loop.pinned for loop in loops], [loop.top for loop in loops]
        lengths = self.lengths.choose(loops, tops, pinned)
        limits = [0] * (1 + max(loop.slot for loop in loops))
        for loop, length in zip(loops, lengths, strict=True):
            limits[loop.slot] = length
        drafting = max(lengths) > 1 or any(loop.drafter is not None for loop in loops)
        if not self.slots.ready(kind, limits, drafting):
            self._host.skip()
            for other in self._flights:  # what is made ready now finds the device at rest
                self._drain(other, tell)
            loops = [loop for loop in loops if self._goes_on(loop)]
            if not loops:
                return
            limits = [limit if any(loop.slot == slot for loop in loops) else 0 for slot, limit in enumerate(limits)]
        lengths = [limits[loop.slot] for loop in loops]
        graph = self.lengths.graph(loops, lengths)
        for loop in loops:
            loop.launched += 1
        launched = perf_counter()
        try:
            read = self.slots.launch(kind, limits, drafting)
        except DSpineError as error:  # no memory for its graph, say: nothing has run, and the other kinds have theirs
            for loop in loops:
                _end(loop, error, tell)
            return
        self._flights[kind].append(Flight(list(loops), [loop.slot for loop in loops], lengths, graph, read, launched))

    def _drain(self, kind: Kind, tell: Tell | None = None) -> None:
        """Read every round of this kind that is under way; without `tell` nobody is left in it."""
        while self._flights[kind]:
            self._settle(self._flights[kind].popleft(), tell or _nobody)

    def _settle(self, flight: Flight, tell: Tell) -> None:
        reports, seconds = self._host.read(flight.read, flight.launched)
        for loop, slot, limit in zip(flight.loops, flight.slots, flight.limits, strict=True):
            if not self._goes_on(loop):
                continue
            try:
                result = loop.take(reports[slot], limit)
            except DSpineError as error:
                _end(loop, error, tell)
                continue
            loop.stats.verify_seconds += seconds
            self.lengths.observe(loop, len(result.drafts), result.accepted)
            tell(loop, result)
        self.lengths.observe_graph(*flight.graph, seconds)


def _end(loop: SlotLoop, error: DSpineError, tell: Tell) -> None:
    loop.finish_reason = "error"
    tell(loop, error)


def _nobody(loop: SlotLoop, _: Round | DSpineError) -> None:
    raise DSpineError(f"a round of slot {loop.slot} came back that nobody waits for: report this")
