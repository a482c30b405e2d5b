"""The measurements of `dspine bench` as one report of plain JSON values."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
Progress = Callable[[str], None]


@dataclass(frozen=True)
class BenchSettings:
    """tokens: generated a run. lengths: of the latency curve. repetitions: of everything, interleaved. trace: acceptance is
    replayed from it. warm_up: tokens before anything is timed. only: names of contenders (empty: all)."""

    tokens: int = 48
    lengths: tuple[int, ...] = tuple(range(1, LONGEST + 1))
    repetitions: int = 3
    seed: int = 0
    trace: Trace | None = None
    warm_up: int = 8
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tokens", "repetitions"):
            if getattr(self, name) < 2 - (name == "repetitions"):
                raise DSpineError(f"--{name} must be at least {2 - (name == 'repetitions')}, got {getattr(self, name)}")
        wrong = [w for w in self.lengths if not 1 <= w <= LONGEST]
        if wrong or not self.lengths:
            raise DSpineError(
                f"--lengths must be within 1..{LONGEST} (input tokens, the anchor included), got {wrong or 'none'}"
            )


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
    subject: Subject, prompts: Sequence[Sequence[int]], settings: BenchSettings, progress: Progress = lambda step: None
) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """(report, rounds of the first contender's first pass with drafts as (verified, accepted)). Raises DSpineError."""
    engine = subject.engine
    check_fit(subject, prompts, settings)
    found = _chosen(contenders(subject.runtime, engine), settings.only)
    timer = timer_of(subject.runtime, engine.target)
    progress("bandwidth")
    size = 1 << (28 if engine.target.info.device.startswith("cpu") else 30)
    bandwidth = measure_bandwidth(engine.target.arrays, timer, nbytes=size)
    rounds: list[tuple[int, int]] = []
    rows = []
    for contender in found:
        progress(f"{contender.name}: end to end")
        speed, recorded = end_to_end(contender, subject, prompts, settings)
        rounds = rounds or recorded
        progress(f"{contender.name}: phases")
        phases = phase_rows(contender, subject, prompts[0], settings)
        progress(f"{contender.name}: lengths")
        curve = contender.lengths(prompts[0], settings.lengths, settings.repetitions, settings.seed)
        rows.append({"name": contender.name, **speed, "phases": phases, "lengths": length_rows(curve)})
    progress("floors")
    floors = floor_rows(subject, prompts[0], settings, bandwidth["bytes_per_second"], timer)
    return {
        "setup": setup(subject, prompts, settings, timer.source),
        "acceptance": settings.trace.label() if settings.trace is not None else "the pair's own",
        "replayed": settings.trace is not None,
        "bandwidth": bandwidth,
        "contenders": rows,
        "floors": floors,
        **provenance(),
    }, rounds


def check_fit(subject: Subject, prompts: Sequence[Sequence[int]], settings: BenchSettings) -> None:
    """Everything that would fail later, at the start."""
    engine, context = subject.engine, subject.engine.target.info.context_length
    longest = max(len(prompt) for prompt in prompts) + settings.tokens + LONGEST
    if longest > context:
        raise DSpineError(
            f"--context and --tokens ask for {longest} tokens, {engine.target.info.name} holds {context}: take fewer"
        )
    if settings.trace is not None and engine.drafter is not None:
        most, block = max(a for _, a in settings.trace.rounds), engine.drafter.config.num_proposals
        if most > block:
            raise DSpineError(
                f"trace {settings.trace.name} accepts up to {most} drafts a round, this drafter proposes {block}: take one of "
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


def end_to_end(
    contender: Contender, subject: Subject, prompts: Sequence[Sequence[int]], settings: BenchSettings
) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Tokens a second, plainly and with drafts, every repetition over all prompts; and the rounds of the first with drafts."""
    kinds = [False] if subject.engine.drafter is None else [False, True]
    runs: dict[bool, list[list[Run]]] = {kind: [[] for _ in range(settings.repetitions)] for kind in kinds}
    for kind in kinds:
        contender.run(make_task(subject, prompts[0], kind, settings, settings.warm_up))
    for repetition in range(settings.repetitions):
        for index, prompt in enumerate(prompts):
            turn = (index + repetition) % len(kinds)
            for kind in kinds[turn:] + kinds[:turn]:
                runs[kind][repetition].append(contender.run(make_task(subject, prompt, kind, settings)))
    found: dict[str, Any] = {"plain": speed_row(runs[False])}
    if True not in runs:
        return found, []
    drafted = [run for passes in runs[True] for run in passes]
    found["speculative"] = speed_row(runs[True]) | {
        "acceptance_length": sum(run.tokens for run in drafted) / max(sum(run.round_count for run in drafted), 1),
        "round_ms": 1e3 * sum(run.seconds for run in drafted) / max(sum(run.round_count for run in drafted), 1),
    }
    found["speed_up"] = found["speculative"]["tokens_per_second"] / found["plain"]["tokens_per_second"]
    if settings.trace is None:
        pairs = [(a, b) for one, two in zip(runs[False], runs[True], strict=True) for a, b in zip(one, two, strict=True)]
        found["same_text"] = sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs)
    return found, [item for run in runs[True][0] for item in run.rounds]


def make_task(subject: Subject, prompt: Sequence[int], draft: bool, settings: BenchSettings, tokens: int | None = None) -> Task:
    """One run of this pair; acceptance from the trace where there is one."""
    policy = subject.policy.fresh() if isinstance(subject.policy, TracePolicy) else subject.policy
    replay = tuple(accepted for _, accepted in settings.trace.rounds) if settings.trace is not None else None
    return Task(prompt, tokens or settings.tokens, draft, replay if draft else None, policy)


def speed_row(passes: list[list[Run]]) -> dict[str, float]:
    """Pooled over the prompts of a pass; median and range over the passes."""
    speeds = [sum(run.tokens for run in runs) / max(sum(run.seconds for run in runs), 1e-9) for runs in passes]
    return {"tokens_per_second": statistics.median(speeds), "low": min(speeds), "high": max(speeds)}


def phase_rows(
    contender: Contender, subject: Subject, prompt: Sequence[int], settings: BenchSettings
) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds of each phase a round, of rounds with drafts and of plain ones."""
    found = {}
    for kind in [False] if subject.engine.drafter is None else [True, False]:
        spent = contender.phases(make_task(subject, prompt, kind, settings))
        rows = {name: spread_of(spent[name]) for name in PHASES if spent.get(name)}
        found["speculative" if kind else "plain"] = {name: row for name, row in rows.items() if row["high"] > 0}
    return found


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


def _chosen(found: list[Contender], only: tuple[str, ...]) -> list[Contender]:
    """The contenders of these names; all where none is named. DSpineError for one that is not here."""
    names = [contender.name for contender in found]
    missing = [name for name in only if name not in names]
    if missing:
        raise DSpineError(f"--only {','.join(missing)}: not here; this pair on this device has {', '.join(names)}")
    return [contender for contender in found if not only or contender.name in only]
