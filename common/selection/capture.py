"""Runs that calibration reads: every draft verified with signals and routing recorded, fixed lengths timed, Stage 0 timed.

The ordinary loop (`decoding.decode`) does the decoding; a recording target and a recording policy stand in for the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from dspine.common.decoding import DecodingParams, decode
from dspine.common.errors import DSpineError
from dspine.common.protocols import DraftRequest, Engine, Proposal, StageZero, Verification
from dspine.common.selection.fitting import Rounds, new_pairs
from dspine.common.selection.prompts import PromptRow
from dspine.common.tokenizer import encode_prompt, stop_token_ids

Advance = Callable[[int, int], None]  # (done, of)
ROOM = 32  # tokens of context that a prompt must leave


@dataclass
class RoundRecord:
    """One drafted round as the loop did it. seconds: the whole round; verify_seconds: the target's part; position: committed
    tokens before it; cut: it ended the request, so A may be short."""

    length: int
    accepted: int
    emitted: int
    seconds: float
    verify_seconds: float
    position: int
    cut: bool = False
    confidence: np.ndarray | None = None
    entropy: np.ndarray | None = None
    picks: Any = None


class RecordingTarget:
    """A target that also keeps each verification's router picks (on the device, read after the round)."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.picks: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def finish(self, cache: Any, stage: StageZero, w: int) -> Verification:
        """As the target's; keeps `router_picks`."""
        found = self._target.finish(cache, stage, w)
        self.picks = found.router_picks
        return found


@dataclass
class RecordingPolicy:
    """Lengths from `schedule` (None: the whole block); keeps the signals of the last round where it reads them."""

    schedule: Iterator[int] | None = None
    needs_signals: bool = False
    name: str = "recording"
    reads_draft_tokens: bool = False
    asked: int = 0
    signals: tuple[np.ndarray | None, np.ndarray | None] = field(default=(None, None))

    def nominal(self, proposal: Proposal, limit: int) -> int:
        """The schedule's next length, cut at the budget."""
        self.signals = (proposal.confidence, proposal.entropy)
        self.asked = next(self.schedule) if self.schedule is not None else limit
        return min(self.asked, limit)

    def stage_zero_length(self, nominal: int, limit: int) -> int:
        return nominal

    def correct(self, stage: StageZero, nominal: int, limit: int) -> int:
        return nominal


def encode(engine: Engine, rows: Sequence[PromptRow]) -> tuple[list[list[int]], int]:
    """Token ids of the prompts that fit the context, and how many did not."""
    limit = engine.target.info.context_length - ROOM
    ids = [encode_prompt(engine.tokenizer, row.prompt, limit=1 << 30) for row in rows]
    fitting = [prompt for prompt in ids if len(prompt) < limit]
    if not fitting:
        raise DSpineError(f"no prompt fits the context of {engine.target.info.name}, {limit} tokens: shorter prompts")
    return fitting, len(ids) - len(fitting)


def record_rounds(
    engine: Engine, prompt: Sequence[int], policy: RecordingPolicy, target: RecordingTarget, max_tokens: int, request: int = 0
) -> Iterator[RoundRecord]:
    """Greedy decoding of one prompt, a record for each drafted round."""
    stop = stop_token_ids(engine.tokenizer, target.info.eos_token_ids)
    params = DecodingParams(max_tokens=max_tokens, stop_ids=frozenset(stop), request=request, break_even=0)
    seen = (0, 0, 0, 0, 0.0, 0.0)  # rounds, drafted, accepted, generated, decode and verify seconds
    record: RoundRecord | None = None
    for event in decode(target, engine.drafter, prompt, params, policy):
        s = event.stats
        now = (s.rounds, s.drafted_tokens, s.accepted_tokens, s.generated_tokens, s.decode_seconds, s.verify_seconds)
        if now[0] > seen[0]:
            if record is not None:
                yield record
            change = [b - a for a, b in zip(seen, now, strict=True)]
            committed = len(prompt) + now[3] - change[3] - 1
            record = None
            if change[1]:
                record = RoundRecord(int(change[1]) + 1, int(change[2]), int(change[3]), change[4], change[5], committed)
                record.confidence, record.entropy = policy.signals
                record.picks = target.picks
        seen = now
        if event.finish_reason is not None and record is not None:
            record.cut = True
    if record is not None:
        yield record


@dataclass(frozen=True)
class Capture:
    """What the capture run left: whole rounds, with the target's time of each, and how many were cut and left out."""

    rounds: Rounds
    verify_seconds: np.ndarray
    positions: np.ndarray
    emitted: int
    left_out: int
    usage: np.ndarray | None = None  # int [MoE layers, experts]: how often each was picked
    repeated_texts: int = 0


def capture(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, advance: Advance) -> Capture:
    """Verify every draft of every round, greedily, with signals and (where the target has routers) routing recorded."""
    target = RecordingTarget(engine.target)
    width = engine.drafter.config.block_size  # type: ignore[union-attr]
    kept: list[RoundRecord] = []
    counts, picks, emitted, left_out, usage = [], 0, 0, 0, None
    before, engine.target.record_routing = engine.target.record_routing, True
    try:
        for index, prompt in enumerate(prompts):
            policy = RecordingPolicy(needs_signals=True)
            for record in record_rounds(engine, prompt, policy, target, max_tokens, index):
                if record.cut or record.length < width:
                    left_out += 1
                    continue
                emitted += record.emitted
                if record.picks is not None:
                    rows = engine.target.arrays.to_host(record.picks)[0]
                    counts.append(new_pairs(rows)[0])
                    picks, record.picks = rows.shape[3], None
                    usage = _count_usage(usage, rows[0])
                kept.append(record)
            advance(index + 1, len(prompts))
    finally:
        engine.target.record_routing = before
    if not kept:
        raise DSpineError(f"{left_out} rounds were captured and all were cut short: more prompts, or a larger --max-tokens")
    if any(record.confidence is None or record.entropy is None for record in kept):
        raise DSpineError("this drafter gives no confidence and entropy, which every calibrated policy reads")
    rounds = Rounds(
        confidence=np.stack([r.confidence[0] for r in kept]).astype(np.float64),  # type: ignore[index]
        entropy=np.stack([r.entropy[0] for r in kept]).astype(np.float64),  # type: ignore[index]
        accepted=np.array([r.accepted for r in kept]),
        new_pairs=np.stack(counts) if counts else None,
        experts_per_token=picks,
    )
    times = np.array([r.verify_seconds for r in kept]), np.array([r.position for r in kept])
    return Capture(rounds, *times, emitted, left_out, usage)


def _count_usage(usage: np.ndarray | None, picks: np.ndarray) -> np.ndarray:
    """Add picks int [w, layers, k] to the counts [layers, experts], growing them where a higher expert shows up."""
    layers, top = picks.shape[1], int(picks.max()) + 1
    grown = np.zeros((layers, max(top, 0 if usage is None else usage.shape[1])), np.int64)
    if usage is not None:
        grown[:, : usage.shape[1]] = usage
    for layer in range(layers):
        grown[layer] += np.bincount(picks[:, layer].ravel(), minlength=grown.shape[1])
    return grown


def time_lengths(
    engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int, repetitions: int, seed: int, advance: Advance
) -> dict[int, list[float]]:
    """Round times at every length 2..W, the lengths interleaved in shuffled order; the first permutation only warms up."""
    width = engine.drafter.config.block_size  # type: ignore[union-attr]
    rng = np.random.default_rng(seed)
    seconds: dict[int, list[float]] = {w: [] for w in range(2, width + 1)}
    warm = width - 1
    schedule = _permutations(width, rng)
    idle = 0
    while idle < 2 and min(map(len, seconds.values())) < repetitions:
        before = min(map(len, seconds.values()))
        for index, prompt in enumerate(prompts):
            for length, spent in _round_times(engine, prompt, schedule, max_tokens, index):
                warm -= 1
                if warm < 0 and len(seconds[length]) < repetitions:
                    seconds[length].append(spent)
            done = min(map(len, seconds.values()))
            advance(sum(map(len, seconds.values())), repetitions * len(seconds))
            if done >= repetitions:
                break
        idle = idle + 1 if min(map(len, seconds.values())) == before else 0
    return seconds


def _round_times(
    engine: Engine, prompt: Sequence[int], schedule: Iterator[int], max_tokens: int, request: int
) -> Iterator[tuple[int, float]]:
    """(w, seconds) of the whole rounds of one prompt, run as the engine runs them: as graphs where it has them."""
    if engine.rounds is not None:
        stop = frozenset(stop_token_ids(engine.tokenizer, engine.target.info.eos_token_ids))
        params = DecodingParams(max_tokens=max_tokens, stop_ids=stop, request=request, break_even=0)
        yield from engine.rounds.time_rounds(prompt, params, schedule)
        return
    policy = RecordingPolicy(schedule, needs_signals=True)  # as every policy that will read these times
    for record in record_rounds(engine, prompt, policy, RecordingTarget(engine.target), max_tokens, request):
        if not record.cut:
            yield record.length, record.seconds


def _permutations(width: int, rng: np.random.Generator) -> Iterator[int]:
    while True:
        yield from (int(w) for w in rng.permutation(np.arange(2, width + 1)))


def time_stage_zero(
    engine: Engine, prompts: Sequence[Sequence[int]], repetitions: int, seed: int, advance: Advance
) -> tuple[list[int], list[float]]:
    """(lengths u, seconds) of `begin` up to the layer-0 router, read back; empty on targets without a router.

    `begin` leaves the committed cache as it is, so one prefilled prompt serves every length.
    """
    target, drafter = engine.target, engine.drafter
    width = drafter.config.block_size  # type: ignore[union-attr]
    rng, lengths, seconds = np.random.default_rng(seed), [], []
    if engine.rounds is not None:
        for u in range(2, width + 1):
            found = engine.rounds.time_stage_zero(u, repetitions)
            lengths, seconds = lengths + [u] * len(found), seconds + found
            advance(u - 1, width - 1)
        return lengths, seconds
    for index, prompt in enumerate(prompts):
        cache = target.make_cache(len(prompt) + width)
        result = target.prefill(cache, target.arrays.to_device(np.asarray(prompt, np.int32)[None]), chunk=512)
        draft_cache = drafter.make_cache(len(prompt) + width)  # type: ignore[union-attr]
        drafter.commit(draft_cache, result.features)  # type: ignore[union-attr]
        first = np.array([int(np.argmax(target.arrays.to_host(result.logits)[0][0]))], np.int32)
        made = drafter.propose(draft_cache, target.arrays.to_device(first), DraftRequest())  # type: ignore[union-attr]
        tokens = target.arrays.to_host(made.tokens)[0]
        block = np.concatenate([first[:, None], tokens], axis=1).astype(np.int32)
        for turn in range(repetitions + 1):
            for u in rng.permutation(np.arange(2, width + 1)):
                part = target.arrays.to_device(np.ascontiguousarray(block[:, :u]))
                started = perf_counter()
                stage = target.begin(cache, part)
                if stage.router_picks is None:
                    return [], []
                target.arrays.to_host(stage.router_picks)
                if turn:  # the first one warms up
                    lengths.append(int(u))
                    seconds.append(perf_counter() - started)
        advance(index + 1, len(prompts))
    return lengths, seconds
