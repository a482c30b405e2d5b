"""`dspine calibrate`: measure a pair on this machine and write the file that the length policies read."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dspine.common.cli.generate import preparing
from dspine.common.cli.info import installed_version
from dspine.common.cli.options import DType, flag
from dspine.common.embedded import EMBEDDED_NAME
from dspine.common.errors import DSpineError
from dspine.common.generation import load
from dspine.common.models import AUTO_DRAFT
from dspine.common.protocols import Engine
from dspine.common.runtimes import AUTO, choose_runtime
from dspine.common.selection.calibrate import CalibrateSettings, CalibrationRun, calibrate
from dspine.common.selection.calibration import calibration_path
from dspine.common.selection.prompts import PromptRow, read_prompts

_MODEL, _PROMPTS, _OUTPUT = "Model", "Prompts", "Output"
_PACKAGES = ("dspine", "numpy", "scikit-learn", "torch", "mlx", "mlx-lm", "transformers")
_DEFAULT = CalibrateSettings()


@dataclass(frozen=True)
class CalibrateOptions:
    """Everything `dspine calibrate` can be told."""

    prompts: Annotated[Path, flag("JSON lines with messages, turns or prompt; or text, one prompt a line.", _PROMPTS)]
    model: Annotated[str, flag("`smollm2` (the embedded model), a model folder, or a hub id.", _MODEL)] = EMBEDDED_NAME
    draft_model: Annotated[str, flag("`auto` (the drafter known for the model), a folder, or a hub id.", _MODEL)] = AUTO_DRAFT
    backend: Annotated[str, flag("`auto`, `mlx` or `torch`.", _MODEL)] = AUTO
    device: Annotated[str, flag("`auto`, or a device of the backend: cpu, cuda, metal.", _MODEL)] = AUTO
    dtype: Annotated[DType, flag("Number format of weights and activations.", _MODEL)] = DType[AUTO]
    test_prompts: Annotated[Path | None, flag("Held-out prompts: figures only, nothing is fitted on them.", _PROMPTS)] = None
    split: Annotated[str | None, flag("Only prompts whose field `split` says this (test prompts: `test`).", _PROMPTS)] = None
    max_prompts: Annotated[int | None, flag("The first N prompts of each file only.", _PROMPTS)] = None
    max_tokens: Annotated[int, flag("Tokens to generate for each prompt.", _PROMPTS)] = _DEFAULT.max_tokens
    repetitions: Annotated[int, flag("Timed rounds at each length.", _PROMPTS)] = _DEFAULT.repetitions
    seed: Annotated[int, flag("Order of the timed lengths and prompts.", _PROMPTS)] = _DEFAULT.seed
    out: Annotated[Path | None, flag("The file; else `calibration.RUNTIME-DEVICE.json` beside the drafter.", _OUTPUT)] = None
    report: Annotated[Path | None, flag("Folder for the report (HTML and PNG).", _OUTPUT)] = None
    json: Annotated[bool, flag("One JSON line with the figures on standard output.", _OUTPUT, "--json")] = False


def calibrate_command(options: CalibrateOptions) -> None:
    """Calibrate the length policies for a pair on this machine: acceptance model, cost curve, expert tables, rho."""
    settings = CalibrateSettings(max_tokens=options.max_tokens, repetitions=options.repetitions, seed=options.seed)
    prompts, test = prompt_sets(options)
    if options.report is not None:
        from dspine.common.selection.report import pyplot

        pyplot()  # absent matplotlib is said before minutes of decoding
    engine = _engine(options)
    path = options.out or calibration_path(engine)
    console = Console(stderr=True, highlight=False)
    run = _run(engine, prompts, test, settings, console)
    path.parent.mkdir(parents=True, exist_ok=True)
    run.calibration.save(path)
    console.print(summary(run))
    console.print(f"written: {escape(str(path))}")
    if options.report is not None:
        from dspine.common.selection.report import write_report

        console.print(f"report: {escape(str(write_report(run, options.report)))}")
    if options.json:
        made = run.calibration
        line = {"path": str(path), "rate": made.rate, "figures": made.figures, "identity": made.identity.model_dump()}
        sys.stdout.write(json_format.dumps(line) + "\n")


def prompt_sets(options: CalibrateOptions) -> tuple[list[PromptRow], list[PromptRow]]:
    """(calibration prompts, test prompts) as the options pick them. Raises DSpineError."""
    if options.max_prompts is not None and options.max_prompts < 1:
        raise DSpineError(f"--max-prompts must be at least 1, got {options.max_prompts}")
    prompts = _picked(read_prompts(options.prompts), options.split, options)
    if not prompts:
        raise DSpineError(f"--split {options.split!r} leaves no prompt of {options.prompts}")
    if options.test_prompts is None:
        return prompts, []
    test = _picked(read_prompts(options.test_prompts), "test" if options.split is not None else None, options)
    if not test:
        raise DSpineError(f"no prompt of {options.test_prompts} has split 'test'")
    return prompts, test


def _picked(rows: list[PromptRow], split: str | None, options: CalibrateOptions) -> list[PromptRow]:
    """Rows of one split; with --max-prompts evenly spread over the file, so that every category stays in."""
    rows = [row for row in rows if split is None or row.split == split]
    count = options.max_prompts
    if count is None or count >= len(rows):
        return rows
    return [rows[index * len(rows) // count] for index in range(count)]


def _engine(options: CalibrateOptions) -> Engine:
    runtime, reason = choose_runtime(options.backend)
    with preparing(options.model):
        engine = load(
            runtime, options.model, options.draft_model, device=options.device, dtype=str(options.dtype), backend_reason=reason
        )
    if engine.drafter is None:
        raise DSpineError(f"calibration needs a drafter, and none is known for {options.model!r}: name one with --draft-model")
    return engine


def _run(
    engine: Engine, prompts: list[PromptRow], test: list[PromptRow], settings: CalibrateSettings, console: Console
) -> CalibrationRun:
    columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def progress(step: str, done: int, of: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step, total=of)
            bars.update(tasks[step], completed=done, total=of)

        versions = {package: installed_version(package) for package in _PACKAGES}
        return calibrate(engine, prompts, settings, test_prompts=test, versions=versions, progress=progress)


def summary(run: CalibrationRun) -> Table:
    """The figures for people."""
    made = run.calibration
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    cost, identity = made.cost, made.identity
    rows = [
        (
            "pair",
            f"{identity.target_name} with {identity.drafter_name}, {identity.runtime} on {identity.device}, {identity.dtype}",
        ),
        ("rounds", f"{made.provenance['rounds']} whole, {made.provenance['rounds_left_out']} cut and left out"),
        ("round time", f"{cost.measured[0] * 1e3:.2f} ms at length 2, {cost.measured[-1] * 1e3:.2f} ms at {cost.lengths[-1]}"),
        ("rho", f"{made.rate:.1f} tokens/s"),
        ("s, eta", f"{cost.stage_zero * 1e6:.1f} us a token, {cost.expert * 1e6:.2f} us an expert"),
    ]
    for name, figures in (("calibration", made.figures), ("test", made.figures.get("test"))):
        if figures:
            speeds = figures["throughput"]
            told = (
                f"ECE {figures['ece_prefix']:.4f}; tokens/s under the cost table: nominal {speeds['nominal']:.1f}, "
                f"full {speeds['full']:.1f}, best static ({speeds['best_static_length']:.0f}) {speeds['best_static']:.1f}; "
                f"regret {speeds['oracle_regret']:.1%}, against a clairvoyant {speeds['clairvoyant_regret']:.1%}"
            )
            rows.append((name, told))
    for label, text in rows:
        table.add_row(f"[dim]{label}[/dim]", escape(text))
    return table
