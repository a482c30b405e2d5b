"""`dspine bench`: what a pair, or a known shape with random weights, costs on this machine."""

from __future__ import annotations

import json as json_format
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dspine.common.bench.contenders import TracePolicy
from dspine.common.bench.floors import Sizes, folder_sizes
from dspine.common.bench.plots import pyplot, write_plots
from dspine.common.bench.presets import cut_layers, find_preset, plain_drafter
from dspine.common.bench.random_weights import preset_folders
from dspine.common.bench.run import CHOSEN, FULL, LONGEST, PARTS, PLAIN, BenchSettings, Subject, bench
from dspine.common.bench.shapes import target_tensors
from dspine.common.bench.trace import Trace, load_trace, save_trace
from dspine.common.cli.generate import preparing
from dspine.common.cli.options import DType, flag
from dspine.common.configs import read_config
from dspine.common.embedded import EMBEDDED_NAME
from dspine.common.errors import BackendError, DSpineError
from dspine.common.files import write_json
from dspine.common.generation import load
from dspine.common.memory import GIB, device_memory
from dspine.common.models import AUTO_DRAFT, resolve_model
from dspine.common.protocols import Engine
from dspine.common.runtimes import AUTO, choose_runtime
from dspine.common.selection.calibration import device_class
from dspine.common.selection.choose import choose_policy
from dspine.common.selection.prompts import Prompt, read_prompts
from dspine.common.tokenizer import encode_prompt

_MODEL, _SHAPE, _WORK, _OUTPUT = "Model", "Random weights", "Work", "Output"
_DEFAULT = BenchSettings()
FILE_WIDTH = 120  # columns of the tables where no terminal sets them
_TRACE_POLICY = "trace"
PROMPTS = (
    "Explain how binary search works and when it fails.",
    "Write a Python function that counts the words of a text.",
    "Tom has 12 apples. He gives a third to Anna and buys five more. How many has he now?",
    "Describe a quiet morning by the sea in a few sentences.",
)


@dataclass(frozen=True)
class BenchOptions:
    """Everything `dspine bench` can be told."""

    model: Annotated[str, flag("`smollm2` (the embedded model), a model folder, or a hub id.", _MODEL)] = EMBEDDED_NAME
    draft_model: Annotated[str, flag("`auto` (the drafter known for the model), a folder, or a hub id.", _MODEL)] = AUTO_DRAFT
    no_draft: Annotated[bool, flag("Plain decoding only.", _MODEL, "--no-draft")] = False
    backend: Annotated[str, flag("`auto`, `mlx` or `torch`.", _MODEL)] = AUTO
    device: Annotated[str, flag("`auto`, or a device of the backend: cpu, cuda, metal.", _MODEL)] = AUTO
    dtype: Annotated[DType, flag("Number format of weights and activations.", _MODEL)] = DType[AUTO]

    random_weights: Annotated[
        str | None, flag("A known shape instead of a model, e.g. Qwen/Qwen3-8B; its weights are random.", _SHAPE)
    ] = None
    layers: Annotated[int | None, flag("Only so many layers of that shape.", _SHAPE)] = None
    plain_drafter: Annotated[
        bool,
        flag(
            "A causal DFlash drafter of that shape instead of DSpine: what injection and refinement cost.",
            _SHAPE,
            "--plain-drafter",
        ),
    ] = False
    trace: Annotated[
        str | None,
        flag(
            "Replay acceptance: a file of --record-trace, or a shipped one: smollm2, hybrid-tiny (-full, -hybridspec).", _SHAPE
        ),
    ] = None

    full_trace: Annotated[
        str | None,
        flag("With --policy: the trace that full verification beside it replays; without it the one of --trace.", _SHAPE),
    ] = None

    tokens: Annotated[int, flag("Tokens to generate a run.", _WORK)] = _DEFAULT.tokens
    prompts: Annotated[int, flag("How many of the built-in prompts, or of --prompt-file.", _WORK)] = 2
    prompt_file: Annotated[
        Path | None, flag("Prompts from a file: JSON lines with messages, turns or prompt; or text, one a line.", _WORK)
    ] = None
    context: Annotated[int | None, flag("Prompt tokens; without it the prompts' own.", _WORK)] = None
    lengths: Annotated[str, flag("Lengths of the latency curve: `1-16`, or `1,2,4`.", _WORK)] = f"1-{LONGEST}"
    repetitions: Annotated[int, flag("Interleaved repetitions of everything.", _WORK)] = _DEFAULT.repetitions
    policy: Annotated[
        str,
        flag(
            "Tokens to verify a round, as in `dspine generate`; `trace`: those of the trace. Beside any other than `full`, "
            "full verification is timed too.",
            _WORK,
        ),
    ] = "full"
    calibration: Annotated[str | None, flag("Calibration file; else the one beside the drafter.", _WORK)] = None
    only: Annotated[
        str | None,
        flag("Ways to run rounds, by commas: loop, graphs, graphs-read; without it all that differ under the policy.", _WORK),
    ] = None
    parts: Annotated[str, flag("Tables to make, by commas.", _WORK)] = ",".join(PARTS)
    seed: Annotated[int, flag("Order of the lengths, and random prompts.", _WORK)] = _DEFAULT.seed

    record_trace: Annotated[Path | None, flag("Write the accepted drafts of every round to this file.", _OUTPUT)] = None
    plots: Annotated[Path | None, flag("Folder for lengths.png and phases.png.", _OUTPUT)] = None
    out: Annotated[Path | None, flag("Write the report (JSON) to this file, again after every step.", _OUTPUT)] = None
    json: Annotated[bool, flag("The report as one JSON line on standard output, last.", _OUTPUT, "--json")] = False
    tune: Annotated[
        bool,
        flag("Only measure which small-row Metal kernels are faster for this model, and keep the table.", _OUTPUT, "--tune"),
    ] = False


def bench_command(options: BenchOptions) -> None:
    """Time a pair end to end, phase by phase and by length, beside the floor that this machine's memory sets."""
    console, started = Console(stderr=True, highlight=False), perf_counter()
    if not console.is_terminal:
        console.width = max(console.width, FILE_WIDTH)
    if options.tune:
        _tune(options, console)
        return
    settings = build_settings(options)
    if options.plots is not None:
        pyplot()  # absent matplotlib is said before minutes of work
    subject = random_subject(options, settings, console) if options.random_weights else model_subject(options, console)
    if options.policy == _TRACE_POLICY:
        assert settings.trace is not None
        subject = replace(subject, policy=TracePolicy(settings.trace))
    with console.status("starting") as status:

        def progress(step: str) -> None:
            status.update(step)
            console.print(f"{perf_counter() - started:7.1f} s  {step}", style="dim", markup=False, soft_wrap=True)

        report, rounds = bench(subject, make_prompts(options, subject), settings, progress, partial(_save, options.out))
        progress("done")
    _write(options, subject, report, rounds, console)


def build_settings(options: BenchOptions) -> BenchSettings:
    """Flags -> settings; the trace is read here. Raises DSpineError."""
    refused = [
        (options.layers is not None and options.random_weights is None, "--layers goes with --random-weights"),
        (options.plain_drafter and options.random_weights is None, "--plain-drafter goes with --random-weights"),
        (options.prompts < 1, f"--prompts must be at least 1, got {options.prompts}"),
        (
            options.prompts > len(PROMPTS) and options.prompt_file is None,
            f"--prompts must be 1..{len(PROMPTS)} without --prompt-file, got {options.prompts}",
        ),
        (
            options.prompt_file is not None and options.random_weights is not None,
            "--prompt-file is text, and random weights have no tokenizer: drop it",
        ),
        (options.context is not None and options.context < 1, f"--context must be at least 1, got {options.context}"),
        (
            options.random_weights is not None and options.model != EMBEDDED_NAME,
            "--model and --random-weights exclude each other",
        ),
        (options.no_draft and options.trace is not None, "--trace replays what a drafter gained: drop --no-draft"),
        (options.record_trace is not None and options.trace is not None, "--record-trace of a replayed run is no record"),
        (options.record_trace is not None and options.random_weights is not None, "--record-trace needs a real pair"),
        (options.record_trace is not None and options.no_draft, "--record-trace needs a drafter: drop --no-draft"),
        (options.record_trace is not None and "speed" not in options.parts, "--record-trace needs the runs of --parts speed"),
        (options.full_trace is not None and options.no_draft, "--full-trace replays what a drafter gained: drop --no-draft"),
        (
            None not in (options.full_trace, options.trace) and options.policy == "full",
            "--full-trace is for the row of full verification beside another --policy: name one",
        ),
    ]
    for wrong, text in refused:
        if wrong:
            raise DSpineError(text)
    trace, full = (load_trace(options.trace), None) if options.trace is not None else _default_traces(options)
    if options.policy == _TRACE_POLICY and trace is None:
        raise DSpineError("--policy trace takes the lengths of a trace: name one with --trace")
    full = load_trace(options.full_trace) if options.full_trace is not None else full
    if full is not None and trace is None:
        raise DSpineError("--full-trace goes with a replayed run: name its trace with --trace")
    only, parts = (tuple(name.strip() for name in text.split(",")) for text in (options.only or "", options.parts))
    lengths = parse_lengths(options.lengths)
    return BenchSettings(
        options.tokens, lengths, options.repetitions, options.seed, trace, full, only=only if options.only else (), parts=parts
    )


def _default_traces(options: BenchOptions) -> tuple[Trace | None, Trace | None]:
    """(trace, full verification's) for random weights, which accept nothing of their own: those of the same kind of target,
    where its block fits. For lengths HybridSpec's on a hybrid, and beside it whole blocks of the same prompts."""
    if options.random_weights is None or options.no_draft:
        return None, None
    preset = find_preset(options.random_weights)
    hybrid = "text_config" in preset.config and preset.drafter["block_size"] >= LONGEST
    if hybrid and options.policy == _TRACE_POLICY:
        return load_trace("hybrid-tiny-hybridspec"), load_trace("hybrid-tiny-full")
    return load_trace("hybrid-tiny" if hybrid else "smollm2"), None


def parse_lengths(text: str) -> tuple[int, ...]:
    """`1-16`, `1,2,4` or both mixed -> lengths in ascending order."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or len(part) > 9:
            raise DSpineError(f"--lengths must look like 1-16 or 1,2,4, got {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= LONGEST:
            raise DSpineError(
                f"--lengths must be within 1..{LONGEST} (input tokens, the anchor included), got {part.strip()!r}"
            )
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def model_subject(options: BenchOptions, console: Console) -> Subject:
    """A real pair."""
    runtime, reason = choose_runtime(options.backend)
    with preparing(options.model):
        folder = resolve_model(options.model)
        engine = load(
            runtime,
            options.model,
            None if options.no_draft else options.draft_model,
            device=options.device,
            dtype=str(options.dtype),
            backend_reason=reason,
        )
    for note in engine.notes:
        console.print(f"note: {note}", style="dim", markup=False)
    if engine.drafter is None and (options.trace is not None or options.record_trace is not None):
        raise DSpineError(f"a trace needs a drafter, and none is known for {options.model!r}: name one with --draft-model")
    chosen = "full" if options.policy == _TRACE_POLICY else options.policy
    policy = choose_policy(chosen, engine, calibration=options.calibration, draft=engine.drafter is not None).policy
    draft = Path(engine.draft_model) if engine.draft_model is not None else None
    return Subject(engine, runtime, folder_sizes(folder), read_config(folder), draft, policy)


def random_subject(options: BenchOptions, settings: BenchSettings, console: Console) -> Subject:
    """A known shape with random weights: made in the runtime's memory where it can, else as a folder in the cache."""
    preset = find_preset(options.random_weights or "")
    if options.layers is not None:
        preset = cut_layers(preset, options.layers)
    if options.plain_drafter:
        preset = plain_drafter(preset)
    runtime, reason = choose_runtime(options.backend)
    own = getattr(runtime, "load_random_target", None)
    console.print(f"{preset.name}: RANDOM weights ({preset.about})", markup=False)
    if settings.trace is not None:
        console.print(settings.trace.label(), markup=False)
    sizes = {name: (shape, "BF16") for name, shape in target_tensors(preset.config).items()}
    _check_memory(runtime, options, preset.name, sizes)
    with console.status("making random weights"):
        folder, draft = preset_folders(preset, weights=own is None)
        target = (own or runtime.load_target)(folder, device=options.device, dtype=str(options.dtype))
        drafter = None if options.no_draft else runtime.load_drafter(draft, target)
    device = target.info.device
    engine = Engine(
        target=target,
        drafter=drafter,
        tokenizer=None,
        runtime=runtime.name,
        backend_reason=reason,
        model=preset.name,
        draft_model=str(draft) if drafter is not None else None,
        device_class=device_class(device.partition(":")[0], runtime.accelerator(device)),
    )
    chosen = "full" if options.policy in (_TRACE_POLICY, AUTO) else options.policy
    policy = choose_policy(chosen, engine, calibration=options.calibration, draft=drafter is not None).policy
    return Subject(engine, runtime, sizes, preset.config, draft if drafter is not None else None, policy, preset.name)


def _check_memory(runtime: Any, options: BenchOptions, name: str, sizes: Sizes) -> None:
    """Weights that cannot fit are refused before any is made; caches and activations are not counted."""
    place = options.device if options.device != AUTO else (runtime.availability().devices or ("cpu",))[0]
    width = 4 if options.dtype == "float32" else 2
    need, memory = sum(width * int(np.prod(shape)) for shape, _ in sizes.values()), device_memory(runtime, place)
    if need > memory.usable:
        raise DSpineError(
            f"{name} takes {need / GIB:.1f} GiB of weights, but {memory.usable / GIB:.1f} GiB are usable on {place} "
            f"({memory.source}): use --layers N"
        )


def make_prompts(options: BenchOptions, subject: Subject) -> list[list[int]]:
    """Token ids: the built-in prompts, repeated or cut to --context; drawn at random where there is no tokenizer."""
    engine = subject.engine
    limit = engine.target.info.context_length
    if engine.tokenizer is None:
        rng = np.random.default_rng(options.seed)
        size = options.context or min(2048, limit // 2)
        return [rng.integers(3, engine.target.info.vocab_size, size=size).tolist() for _ in range(options.prompts)]
    texts: Sequence[Prompt] = PROMPTS
    if options.prompt_file is not None:
        texts = [row.prompt for row in read_prompts(options.prompt_file)]
        if len(texts) < options.prompts:
            raise DSpineError(f"--prompts {options.prompts}: {options.prompt_file} holds {len(texts)}; take fewer")
    if options.context is None:
        return [encode_prompt(engine.tokenizer, text, limit=limit) for text in texts[: options.prompts]]
    made = []
    for text in texts[: options.prompts]:
        ids = encode_prompt(engine.tokenizer, text, limit=limit)
        made.append((ids * (options.context // len(ids) + 1))[: options.context])
    return made


def _tune(options: BenchOptions, console: Console) -> None:
    runtime, _ = choose_runtime(options.backend)
    tune: Callable[..., Path | None] | None = getattr(runtime, "tune", None)
    if tune is None:
        raise BackendError(f"--tune fills the table of MLX's small-row Metal kernels; the {runtime.name} runtime has none")
    if options.random_weights is not None:
        raise DSpineError("--tune measures a quantised model's own shapes: name it with --model, without --random-weights")
    path = tune(resolve_model(options.model), lambda line: console.print(line, markup=False))
    if path is not None:
        sys.stdout.write(f"{path}\n")


def _write(
    options: BenchOptions, subject: Subject, report: dict[str, Any], rounds: list[tuple[int, int]], console: Console
) -> None:
    show(report, console)
    if options.record_trace is not None:
        facts = report["setup"]
        source = {key: facts[key] for key in ("model", "drafter", "runtime", "device", "dtype", "policy")}
        source["prompts"] = len(facts["context"])
        source |= {"commit": report["commit"], "date": datetime.now(UTC).date().isoformat(), "temperature": 0}
        save_trace(options.record_trace, subject.engine.drafter.config.block_size, rounds, source)  # type: ignore[union-attr]
        console.print(f"trace: {len(rounds)} rounds in {options.record_trace}", markup=False)
    _save(options.out, report)
    if options.plots is not None:
        for path in write_plots(report, options.plots):
            console.print(f"plot: {path}", markup=False)
    if options.json:
        sys.stdout.write(json_format.dumps(report) + "\n")


def _save(path: Path | None, report: dict[str, Any]) -> None:
    """The report as far as it goes, in place of an earlier one at once: a run that is cut leaves a whole file."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise DSpineError(f"--out {path}: cannot be written (there is no folder {path.parent})")
    try:
        write_json(path, report)
    except OSError as error:
        raise DSpineError(f"--out {path}: cannot be written ({error})") from error


def show(report: dict[str, Any], console: Console) -> None:
    """The report for people."""
    facts = report["setup"]
    model = f"{facts['random_weights']}, RANDOM weights" if facts["random_weights"] else facts["model"]
    machine, clock = report["machine"], facts["timer"]
    lines = {
        "model": f"{model}  ({facts['dtype']}, {facts['adapter']})",
        "drafter": f"{facts['drafter'] or 'none'}  ({facts['method']}, block {facts['block_size']}, policy {facts['policy']})",
        "where": f"{facts['runtime']} on {facts['device']}, {machine['processor']}, {machine['cores']} cores",
        "acceptance": report["acceptance"],
        **({"full": report["full_acceptance"]} if report["full_acceptance"] else {}),
        "work": f"context {facts['context']}, {facts['tokens']} tokens, {facts['repetitions']} repetitions, by {clock}",
        "bandwidth": f"{report['bandwidth']['bytes_per_second'] / 1e9:.1f} GB/s read (measured here)",
        "commit": report["commit"],
    }
    if facts["graphs"] is not None:
        lines["graphs"] = f"not timed: {facts['graphs']}"
    for label, text in lines.items():
        console.print(f"[dim]{label:<11}[/dim] {escape(text)}")
    for row in report["contenders"]:
        if PLAIN in row:
            console.print(_speeds(row, report))
        if row["phases"]:
            console.print(_phases(row, report["replayed"]))
        if row["lengths"]:
            console.print(_lengths(row, report["floors"]))
    draft = report["floors"]["draft"]
    if draft is not None:
        console.print(f"floor of a draft: {1e3 * draft['seconds']:.3f} ms ({draft['bytes'] / 1e6:.1f} MB)", markup=False)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    return table


def _speeds(row: dict[str, Any], report: dict[str, Any]) -> Table:
    headings = ("decoding", "tokens/s", "range", "x plain", "x full", "a round", "verified (lengths)", "ms", "same text")
    table = _table(f"{row['name']}: end to end", *headings)
    notes = ["acceptance REPLAYED"] if report["replayed"] else []
    table.caption = "; ".join([*notes, *([row["how"]] if row.get("how") else [])]) or None
    full = row.get(FULL, row.get(CHOSEN))
    for kind, label in ((PLAIN, "plain"), (FULL, "full"), (CHOSEN, report["setup"]["policy"])):
        if kind not in row:
            continue
        fast, more = row[kind], ["1.00", "", "1.00", "", "", ""]
        if kind != PLAIN:
            mean, rounds = fast["verified"]["mean"], fast["verified"]["rounds"]
            over = fast["tokens_per_second"] / full["tokens_per_second"]
            more = [f"{fast['over_plain']:.2f}", f"{over:.2f}", f"{fast['acceptance_length']:.2f}"]
            more += ["" if mean is None else f"{mean:.2f} ({len(rounds)})", f"{fast['round_ms']:.3f}"]
            more.append(f"{fast['same_text']:.0%}" if "same_text" in fast else "")
        table.add_row(label, f"{fast['tokens_per_second']:.1f}", f"{fast['low']:.1f}-{fast['high']:.1f}", *more)
    return table


def _phases(row: dict[str, Any], replayed: bool) -> Table:
    length = f" of {row['phases_length']} tokens" if row["phases_length"] else ""
    table = _table(f"{row['name']}: phases of a round{length}, ms", "phase", *row["phases"])
    if replayed:
        table.caption = "acceptance replayed"
    names = list(dict.fromkeys(name for phases in row["phases"].values() for name in phases))
    for name in names:
        cells = [phases.get(name) for phases in row["phases"].values()]
        table.add_row(name, *("" if cell is None else _spread(cell) for cell in cells))
    return table


def _spread(cell: dict[str, float]) -> str:
    return f"{1e3 * cell['median']:.3f} ({1e3 * cell['low']:.3f}-{1e3 * cell['high']:.3f})"


def _lengths(row: dict[str, Any], floors: dict[str, Any]) -> Table:
    table = _table(f"{row['name']}: by length, ms", "w", "verify", "round", "floor", "verify / floor", "experts")
    floor = {item["length"]: item for item in floors["lengths"]}
    for item in row["lengths"]:
        least = floor.get(item["length"])
        ends = ["", "", ""]
        if least is not None:
            hit = f"{least['experts_hit']:.1f}" if least["experts_hit"] else ""
            ends = [f"{1e3 * least['seconds']:.3f}", f"{item['verify']['median'] / least['seconds']:.2f}", hit]
        table.add_row(str(item["length"]), _spread(item["verify"]), _spread(item["round"]), *ends)
    return table
