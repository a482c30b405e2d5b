"""The measurements of `dspine bench` as one report of plain JSON values."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dspine.common.bench.contenders import Contender, LengthRounds, Run, Task, TracePolicy, contenders, timer_of
from dspine.common.bench.floors import (
    Sizes,
    WeightBytes,
    context_bytes,
    draft_bytes_read,
    expected_experts,
    measure_bandwidth,
    target_bytes,
)
from dspine.common.bench.provenance import provenance
from dspine.common.bench.timing import PHASES
from dspine.common.bench.trace import Trace
from dspine.common.errors import DSpineError
from dspine.common.protocols import Engine, LengthPolicy
from dspine.common.selection.policies import StaticPolicy

LONGEST = 16  # tokens that a verification takes at most
PARTS = ("speed", "phases", "lengths")
PLAIN, FULL, CHOSEN = "plain", "full", "speculative"  # decoding: without drafts, whole blocks verified, by the policy
Progress = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class BenchSettings:
    """tokens: generated a run. lengths: of the latency curve. repetitions: of everything, interleaved. trace: acceptance is
    replayed from it, and full_trace: that of full verification (None: `trace` too). warm_up: tokens before anything is timed.
    only: names of contenders (empty: all). parts: of `PARTS`."""

    tokens: int = 48
    lengths: tuple[int, ...] = tuple(range(1, LONGEST + 1))
    repetitions: int = 3
    seed: int = 0
    trace: Trace | None = None
    full_trace: Trace | None = None
    warm_up: int = 8
    only: tuple[str, ...] = ()
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        for name in ("tokens", "repetitions"):
            if getattr(self, name) < 2 - (name == "repetitions"):
                raise DSpineError(f"--{name} must be at least {2 - (name == 'repetitions')}, got {getattr(self, name)}")
        wrong = [w for w in self.lengths if not 1 <= w <= LONGEST]
        if wrong or not self.lengths:
            raise DSpineError(
                f"--lengths must be within 1..{LONGEST} (input tokens, the anchor included), got {wrong or 'none'}"
            )
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise DSpineError(f"--parts must name some of {', '.join(PARTS)}, got {', '.join(unknown) or 'none'}")


@dataclass(frozen=True)
class Subject:
    """A loaded pair and what is known of its files: `sizes` and `config` of the target, the drafter's folder. random: the name
    of the preset whose shapes it has, its weights random."""

    engine: Engine
    runtime: Any
    sizes: Sizes
    config: dict[str, Any]
    draft_folder: Path | None = None
    policy: LengthPolicy = field(default_factory=StaticPolicy)
    random: str | None = None


def bench(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    settings: BenchSettings,
    progress: Progress = lambda step: None,
    save: Save = lambda report: None,
) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """(report, rounds of the first contender's first pass with drafts as (verified, accepted)). save: gets the report again
    and again as it grows, `complete` False until the end. Raises DSpineError."""
    engine = subject.engine
    check_fit(subject, prompts, settings)
    found = _chosen(contenders(subject.runtime, engine), settings.only, subject.policy)
    timer = timer_of(subject.runtime, engine.target)
    progress("bandwidth")
    size = 1 << (28 if engine.target.info.device.startswith("cpu") else 30)
    report: dict[str, Any] = {
        "complete": False,
        "setup": setup(subject, prompts, settings, timer.source),
        "acceptance": settings.trace.label() if settings.trace is not None else "the pair's own",
        "full_acceptance": settings.full_trace.label() if settings.full_trace is not None else None,
        "replayed": settings.trace is not None,
        "bandwidth": measure_bandwidth(engine.target.arrays, timer, nbytes=size),
        "contenders": [{"name": contender.name, "phases": {}, "lengths": []} for contender in found],
        "floors": {"lengths": [], "draft": None},
        **provenance(),
    }
    rounds: list[tuple[int, int]] = []
    if "speed" in settings.parts:
        for speeds, recorded in end_to_end(found, subject, prompts, settings, progress):
            rounds = recorded
            for row, speed in zip(report["contenders"], speeds, strict=True):
                row.update(speed)
            save(report)
    for contender, row in zip(found, report["contenders"], strict=True):
        if "phases" in settings.parts:
            progress(f"{contender.name}: phases")
            row |= phase_rows(contender, subject, prompts[0], settings)
            save(report)
        if "lengths" in settings.parts:
            progress(f"{contender.name}: lengths")
            curve = contender.lengths(prompts[0], settings.lengths, settings.repetitions, settings.seed)
            row["lengths"] = length_rows(curve)
            save(report)
    if "lengths" in settings.parts:
        progress("floors")
        report["floors"] = floor_rows(subject, prompts[0], settings, report["bandwidth"]["bytes_per_second"], timer)
    report["complete"] = True
    return report, rounds


def check_fit(subject: Subject, prompts: Sequence[Sequence[int]], settings: BenchSettings) -> None:
    """Everything that would fail later, at the start."""
    engine, context = subject.engine, subject.engine.target.info.context_length
    longest = max(len(prompt) for prompt in prompts) + settings.tokens + LONGEST
    if longest > context:
        raise DSpineError(
            f"--context and --tokens ask for {longest} tokens, {engine.target.info.name} holds {context}: take fewer"
        )
    for trace in (settings.trace, settings.full_trace):
        if trace is None or engine.drafter is None:
            continue
        most, block = max(a for _, a in trace.rounds), engine.drafter.config.num_proposals
        if most > block:
            raise DSpineError(
                f"trace {trace.name} accepts up to {most} drafts a round, this drafter proposes {block}: take one of "
                f"a pair with a block of {block + 1} or less"
            )


def setup(subject: Subject, prompts: Sequence[Sequence[int]], settings: BenchSettings, clock: str) -> dict[str, Any]:
    """Facts of the pair and the run."""
    engine, info = subject.engine, subject.engine.target.info
    return {
        "model": engine.model,
        "random_weights": subject.random,
        "drafter": Path(engine.draft_model).name if engine.draft_model else None,
        "method": getattr(engine.drafter.config, "method", None) if engine.drafter is not None else None,
        "block_size": engine.drafter.config.block_size if engine.drafter is not None else None,
        "policy": subject.policy.name,
        "runtime": engine.runtime,
        "device": engine.device_class or info.device,
        "dtype": info.dtype,
        "adapter": info.adapter,
        "timer": clock,
        "graphs": graphs_refused(subject),
        "context": [len(prompt) for prompt in prompts],
        "tokens": settings.tokens,
        "repetitions": settings.repetitions,
        "seed": settings.seed,
    }


def graphs_refused(subject: Subject) -> str | None:
    """Why the runtime times no rounds as graphs; None where it does, or has none for any pair."""
    refusal = getattr(subject.runtime, "bench_refusal", None)
    return None if refusal is None else refusal(subject.engine.target, subject.engine.drafter)


def kinds_of(subject: Subject) -> list[str]:
    """What is decoded: whole blocks too where the policy is another."""
    if subject.engine.drafter is None:
        return [PLAIN]
    whole = isinstance(subject.policy, StaticPolicy) and subject.policy.length is None
    return [PLAIN, CHOSEN] if whole else [PLAIN, FULL, CHOSEN]


def end_to_end(
    found: Sequence[Contender],
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    settings: BenchSettings,
    progress: Progress,
) -> Iterator[tuple[list[dict[str, Any]], list[tuple[int, int]]]]:
    """Tokens a second of every contender after each repetition, all kinds and contenders interleaved over all prompts; and
    the rounds of the first contender's first repetition by the policy."""
    turns = [(contender, kind) for contender in found for kind in kinds_of(subject)]
    runs: dict[str, dict[str, list[list[Run]]]] = {c.name: {kind: [] for kind in kinds_of(subject)} for c in found}
    for contender in found:
        if (reserve := getattr(contender, "reserve", None)) is not None:
            reserve(max(map(len, prompts)) + settings.tokens)
    for contender, kind in turns:
        progress(f"{contender.name}: {kind}, before anything is timed")
        whole = kind == CHOSEN and not isinstance(subject.policy, StaticPolicy)  # other lengths are other kernels
        contender.run(make_task(subject, prompts[0], kind, settings, None if whole else settings.warm_up))
    recorded: list[tuple[int, int]] = []
    for repetition in range(settings.repetitions):
        progress(f"end to end, repetition {repetition + 1} of {settings.repetitions}")
        for passes in runs.values():
            for each in passes.values():
                each.append([])
        for index, prompt in enumerate(prompts):
            turn = (index + repetition) % len(turns)
            for contender, kind in turns[turn:] + turns[:turn]:
                runs[contender.name][kind][repetition].append(contender.run(make_task(subject, prompt, kind, settings)))
        if not repetition:
            recorded = [item for run in runs[found[0].name].get(CHOSEN, [[]])[0] for item in run.rounds]
        yield [speed_rows(contender, runs[contender.name], settings.trace is not None) for contender in found], recorded


def make_task(subject: Subject, prompt: Sequence[int], kind: str, settings: BenchSettings, tokens: int | None = None) -> Task:
    """One run of this pair; acceptance from a trace where there is one."""
    policy = subject.policy.fresh() if isinstance(subject.policy, TracePolicy) else subject.policy
    trace = settings.trace
    if kind == FULL:
        policy, trace = StaticPolicy(), settings.full_trace or settings.trace
    replay = tuple(accepted for _, accepted in trace.rounds) if trace is not None and kind != PLAIN else None
    return Task(prompt, tokens or settings.tokens, kind != PLAIN, replay, policy)


def speed_rows(contender: Contender, runs: dict[str, list[list[Run]]], replayed: bool) -> dict[str, Any]:
    """The kinds of one contender, and their ratios: of medians."""
    found: dict[str, Any] = {"how": getattr(contender, "how", None), PLAIN: speed_row(runs[PLAIN])}
    plain = found[PLAIN]["tokens_per_second"]
    for kind in (FULL, CHOSEN):
        if kind not in runs:
            continue
        drafted = [run for passes in runs[kind] for run in passes]
        count = max(sum(run.round_count for run in drafted), 1)
        row = found[kind] = speed_row(runs[kind]) | {
            "acceptance_length": sum(run.tokens for run in drafted) / count,
            "round_ms": 1e3 * sum(run.seconds for run in drafted) / count,
            "verified": verified_lengths(drafted),
        }
        row["over_plain"] = row["tokens_per_second"] / plain
        if not replayed:
            pairs = [(a, b) for one, two in zip(runs[PLAIN], runs[kind], strict=True) for a, b in zip(one, two, strict=True)]
            row["same_text"] = sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs)
    if CHOSEN in found:
        found["speed_up"] = found[CHOSEN]["over_plain"]
        found |= {name: found[CHOSEN][name] for name in ("same_text",) if name in found[CHOSEN]}
    if FULL in found:
        found["over_full"] = found[CHOSEN]["tokens_per_second"] / found[FULL]["tokens_per_second"]
    return found


def verified_lengths(runs: Sequence[Run]) -> dict[str, Any]:
    """Mean, and rounds of each length, the last of every run left out; the budget may have cut one before it."""
    counted = Counter(verified for run in runs for verified, _ in run.rounds)
    total = sum(counted.values())
    return {
        "mean": sum(w * n for w, n in counted.items()) / total if total else None,
        "rounds": {str(w): counted[w] for w in sorted(counted)},
    }


def speed_row(passes: list[list[Run]]) -> dict[str, float]:
    """Pooled over the prompts of a pass; median and range over the passes."""
    speeds = [sum(run.tokens for run in runs) / max(sum(run.seconds for run in runs), 1e-9) for runs in passes]
    return {"tokens_per_second": statistics.median(speeds), "low": min(speeds), "high": max(speeds)}


def phase_rows(contender: Contender, subject: Subject, prompt: Sequence[int], settings: BenchSettings) -> dict[str, Any]:
    """Seconds of each phase a round, of rounds with drafts and of plain ones. Of a trace only the commonest length is taken
    (`phases_length`): every other one would be as many graphs again."""
    found, length = {}, None
    if isinstance(subject.policy, TracePolicy):
        trace = subject.policy.trace
        length = Counter(verified for verified, _ in trace.rounds).most_common(1)[0][0]
        subject = replace(subject, policy=TracePolicy(replace(trace, rounds=((length, 0),))))
    for kind in [PLAIN] if subject.engine.drafter is None else [CHOSEN, PLAIN]:
        spent = contender.phases(make_task(subject, prompt, kind, settings))
        rows = {name: spread_of(spent[name]) for name in PHASES if spent.get(name)}
        found[kind] = {name: row for name, row in rows.items() if row["high"] > 0}
    return {"phases": found, "phases_length": length}


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def length_rows(curve: dict[int, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """One row a length: verification and whole round."""
    return [
        {"length": w, "verify": spread_of([v for v, _ in times]), "round": spread_of([r for _, r in times])}
        for w, times in sorted(curve.items())
        if times
    ]


def floor_rows(
    subject: Subject, prompt: Sequence[int], settings: BenchSettings, bandwidth: float, timer: Any
) -> dict[str, Any]:
    """Bytes and seconds of the floor of each length, and of a draft."""
    engine, info = subject.engine, subject.engine.target.info
    if not subject.sizes:
        return {"lengths": [], "draft": None, "note": "the target's files are not known, so there is no floor"}
    weights = target_bytes(subject.sizes, subject.config, info.dtype)
    context = context_bytes(subject.config, len(prompt), info.dtype)
    hits, source = expert_hits(subject, prompt, settings, weights, timer)
    rows = []
    for w in settings.lengths:
        total = weights.read(hits[w]) + context
        rows.append({"length": w, "bytes": total, "seconds": total / bandwidth, "experts_hit": hits[w]})
    draft = None
    if engine.drafter is not None and subject.draft_folder is not None:
        total = draft_bytes_read(engine.drafter.config, subject.draft_folder, weights.head, len(prompt), info.dtype)
        draft = {"bytes": total, "seconds": total / bandwidth}
    return {"lengths": rows, "draft": draft, "context_bytes": context, "experts": source}


def expert_hits(
    subject: Subject, prompt: Sequence[int], settings: BenchSettings, weights: WeightBytes, timer: Any
) -> tuple[dict[int, float], str]:
    """Distinct experts a layer for each length, and where the number comes from."""
    if not weights.experts:
        return dict.fromkeys(settings.lengths, 0.0), "none"
    facts = {**subject.config, **(subject.config.get("text_config") or {})}
    picks = int(facts.get("num_experts_per_tok") or 1)
    room = len(settings.lengths) + LONGEST
    rounds = LengthRounds(subject.engine.target, subject.engine.drafter, prompt, room, timer, settings.seed)
    counted = {w: rounds.experts_hit(w) for w in settings.lengths}
    if any(value is None for value in counted.values()):
        return {w: expected_experts(weights.experts, picks, w) for w in settings.lengths}, "expected of even picks"
    return {w: float(value) for w, value in counted.items()}, "counted"  # type: ignore[arg-type]


def _chosen(found: list[Contender], only: tuple[str, ...], policy: LengthPolicy) -> list[Contender]:
    """The contenders of these names; where none is named, those that the policy tells apart (`for_chosen_lengths`: one that a
    fixed length does not). DSpineError for a name that is not here."""
    names = [contender.name for contender in found]
    missing = [name for name in only if name not in names]
    if missing:
        raise DSpineError(f"--only {','.join(missing)}: not here; this pair on this device has {', '.join(names)}")
    fixed = isinstance(policy, StaticPolicy)
    return [c for c in found if c.name in only or not (only or (fixed and getattr(c, "for_chosen_lengths", False)))]
