"""`dspine parity`: every operation on every backend of this machine against float64, as a table or one JSON line."""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dspine.common.errors import BackendError, DSpineError
from dspine.common.parity.backends import BACKENDS, ParityBackend
from dspine.common.parity.runner import OPERATIONS, Result, run_all
from dspine.common.runtimes import load_runtime, runtime_names

MISSED = 1


def parity(
    op: Annotated[list[str] | None, typer.Option(help=f"Only these operations: {', '.join(OPERATIONS)}.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help=f"Only these backends: {', '.join(BACKENDS)}.")] = None,
    json: Annotated[
        bool, typer.Option("--json", help="End standard output with one JSON line; the table goes to stderr.")
    ] = False,
) -> None:
    """Hold every kernel and every backend of this machine against float64; exit code 1 when one misses its bound."""
    backends = _chosen(backend)
    console = Console(highlight=False, stderr=json)
    results: list[Result] = []
    with console.status("running") as status:
        for result in run_all(backends, op):
            results.append(result)
            status.update(f"{len(results)}: {result.backend} {result.op}")
    console.print(summary(results))
    for reason in skip_reasons(results):
        console.print(escape(reason), style="dim")
    for result in results:
        if result.missed:
            console.print(f"missed: {escape(_line(result))}", style="red")
    if json:
        sys.stdout.write(json_format.dumps({"results": [result.as_dict() for result in results]}) + "\n")
    if any(result.missed for result in results):
        raise typer.Exit(MISSED)


def available_backends() -> list[ParityBackend]:
    """Backends of every registered runtime; one whose module does not import is there too, skipped with the reason."""
    found = []
    for name in runtime_names():
        runtime, state = load_runtime(name)
        if runtime is None:
            found.append(ParityBackend(name, "none", skipped=state.reason))
        else:
            found += runtime.parity_backends()
    return found


def _chosen(names: list[str] | None) -> list[ParityBackend]:
    found = available_backends()
    if not names:
        return found
    unknown = sorted(set(names) - {backend.name for backend in found})
    if unknown:
        listed = ", ".join(backend.name for backend in found)
        raise DSpineError(f"--backend {', '.join(unknown)} is not registered; there are: {listed}")
    chosen = [backend for backend in found if backend.name in names]
    for backend in chosen:  # a backend that was asked for must run
        if backend.skipped:
            raise BackendError(f"backend {backend.name} cannot run here: {backend.skipped}")
    return chosen


def summary(results: Iterable[Result]) -> Table:
    """One row an operation, backend and dtype: the worst error against its bound, and how many checks were skipped."""
    table = Table(
        title="Parity against float64 (relative Frobenius error)", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    for heading in ("operation", "backend (device)", "dtype", "worst", "bound", "checks", "result"):
        justify = "right" if heading in ("worst", "bound", "checks") else "left"
        table.add_column(heading, justify=justify, no_wrap=not heading.startswith("backend"))  # type: ignore[arg-type]
    groups: dict[tuple[str, str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.op, f"{result.backend} ({result.device})", result.dtype), []).append(result)
    for key, rows in sorted(groups.items()):
        table.add_row(*(escape(part) for part in key), *_verdict(rows))
    return table


def _verdict(rows: list[Result]) -> tuple[str, str, str, str]:
    ran = [row for row in rows if row.skipped_reason is None]
    if not ran:
        return "", "", f"0/{len(rows)}", "[yellow]skipped[/]"
    worst = max(ran, key=lambda row: (row.missed, row.error / row.bound if row.bound else row.error))  # type: ignore[operator]
    passed = sum(not row.missed for row in ran)
    word = "[green]ok[/]" if passed == len(ran) else "[red]missed[/]"
    note = f", {len(rows) - len(ran)} skipped" if len(ran) < len(rows) else ""
    return f"{worst.error:.1e}", f"{worst.bound:.1e}", f"{passed}/{len(rows)}", word + note


def skip_reasons(results: Iterable[Result]) -> list[str]:
    """`skipped 12: reason`, each reason once."""
    counts: dict[str, int] = {}
    for result in results:
        if result.skipped_reason is not None:
            key = f"{result.backend}: {result.skipped_reason}"
            counts[key] = counts.get(key, 0) + 1
    return [f"skipped {count} on {reason}" for reason, count in counts.items()]


def _line(result: Result) -> str:
    where = f"{result.op} on {result.backend} ({result.device}), {result.dtype}, {result.shape}, {result.family}"
    return f"{where}: error {result.error:.2e}, bound {result.bound:.1e}"
