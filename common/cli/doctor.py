"""`dspine doctor`: one screen that says what runs here, what does not and why, and whether the pair at hand fits.

Exit code 1 where something that was asked about cannot work; every problem is a line of its own. Nothing is downloaded
and no weights are loaded.
"""

from __future__ import annotations

import json as json_format
import platform
import sys
from dataclasses import dataclass, field
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement
from packaging.version import Version
from rich.console import Console
from rich.table import Table

from dspine.common.checkpoints import check_pair
from dspine.common.cli.info import installed_version, titled_table
from dspine.common.configs import load_drafter_config, read_config
from dspine.common.embedded import EMBEDDED_NAME, embedded_folder, is_prepared
from dspine.common.environment import kernel_choice
from dspine.common.errors import BackendError, DSpineError
from dspine.common.generation import check_cache_options
from dspine.common.memory import GIB, CacheOptions, device_memory, host_memory, plan_on
from dspine.common.models import AUTO_DRAFT, SHIPPED_PAIRS, find_draft, resolve_model
from dspine.common.parity.runner import OPERATIONS
from dspine.common.protocols import Availability, Runtime
from dspine.common.runtimes import AUTO, choose_runtime, load_runtime, place_of, runtime_names
from dspine.common.tokenizer import eos_ids_of_folder

PROBLEM = 1
# what the test suite ran with; `tests/cli/test_doctor.py` holds it to constraints.txt
TESTED = {
    "numpy": "2.4.6",
    "transformers": "5.24.0",
    "tokenizers": "0.23.3",
    "safetensors": "0.8.0",
    "mlx": "0.32.4",
    "mlx-lm": "0.32.2",
    "torch": "2.13.0",
    "triton": "3.6.0",
}
_OPTIONAL = ("mlx", "mlx-lm", "torch", "triton")


@dataclass
class Findings:
    """Everything that is shown; `problems` are sentences."""

    python: str
    versions: list[dict[str, str]] = field(default_factory=list)
    runtimes: list[dict[str, Any]] = field(default_factory=list)
    auto: str = ""
    memory: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, str]] = field(default_factory=list)
    kernel_notes: dict[str, str] = field(default_factory=dict)
    pair: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def doctor(
    model: Annotated[str, typer.Option(help="The target to check: `smollm2`, a folder, or a hub id.")] = EMBEDDED_NAME,
    draft_model: Annotated[str, typer.Option(help="`auto`, a folder, or a hub id.")] = AUTO_DRAFT,
    backend: Annotated[str, typer.Option(help="The backend the pair is for: `auto`, `mlx` or `torch`.")] = AUTO,
    device: Annotated[str, typer.Option(help="A device of that backend.")] = AUTO,
    tokens: Annotated[int, typer.Option(help="Context length to plan memory for.", min=1)] = 4096,
    max_kv_size: Annotated[int | None, typer.Option(help="Plan with a rotating cache of this many tokens.")] = None,
    kv_bits: Annotated[int | None, typer.Option(help="Plan with K/V of this many bits.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON line instead of the tables.")] = False,
) -> None:
    """Check this installation and, if it is on this disk, a pair: backends, versions, memory, kernels, fit."""
    options = CacheOptions(max_kv_size=max_kv_size, kv_bits=kv_bits)
    found = Findings(f"{platform.python_version()} on {sys.platform} {platform.machine()}")
    _versions(found)
    loaded = _runtimes(found)
    chosen = _choice(found, backend)
    _memory(found, loaded)
    _kernels(found, loaded)
    _pair(found, chosen, device, model, draft_model, tokens, options)
    if json:
        sys.stdout.write(json_format.dumps(vars(found)) + "\n")
    else:
        _show(Console(highlight=False), found)
    if found.problems:
        raise typer.Exit(PROBLEM)


def _versions(found: Findings) -> None:
    allowed = _allowed()
    for package, tested in TESTED.items():
        here = installed_version(package)
        if here == "not installed":
            state = "optional" if package in _OPTIONAL else "missing"
        elif package in allowed and not allowed[package].contains(here, prereleases=True):
            state = f"outside {allowed[package]}"
            found.problems.append(f"{package} {here} is not allowed: dspine needs {package}{allowed[package]}")
        else:
            state = "as tested" if Version(here).public == tested else "not the tested one"
        if state == "missing":
            found.problems.append(f"{package} is not installed: reinstall dspine")
        found.versions.append({"package": package, "installed": here, "tested": tested, "state": state})


def _allowed() -> dict[str, Any]:
    """Version ranges of dspine's own metadata, extras included, where their markers fit this machine."""
    ranges = {}
    for text in requires("dspine") or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", "mlx", "cuda", "train")):
            ranges[requirement.name.lower()] = requirement.specifier
    return ranges


def _runtimes(found: Findings) -> dict[str, tuple[Runtime | None, Availability]]:
    loaded = {name: load_runtime(name) for name in runtime_names()}
    for name, (_, state) in loaded.items():
        found.runtimes.append(
            {
                "name": name,
                "ok": state.ok,
                "reason": state.reason,
                "devices": list(state.devices),
                "install": "" if state.ok else state.install,
            }
        )
    return loaded


def _choice(found: Findings, backend: str) -> Runtime | None:
    try:
        runtime, found.auto = choose_runtime(backend)
    except BackendError as error:
        found.auto = str(error)
        found.problems.append(str(error))
        return None
    found.auto = f"{runtime.name} ({found.auto})"
    return runtime


def _memory(found: Findings, loaded: dict[str, tuple[Runtime | None, Availability]]) -> None:
    host = host_memory()
    found.memory.append({"device": "host", "total": host.total, "usable": host.usable, "source": host.source})
    for name, (runtime, state) in loaded.items():
        for device in state.devices if runtime is not None and state.ok else ():
            if device != "cpu":
                size = device_memory(runtime, device)
                found.memory.append(
                    {"device": f"{name}:{device}", "total": size.total, "usable": size.usable, "source": size.source}
                )


def _kernels(found: Findings, loaded: dict[str, tuple[Runtime | None, Availability]]) -> None:
    """A row an operation: native, emulated (run without their hardware) or fallback (the core's own code) on each backend."""
    backends = [one for runtime, _ in loaded.values() if runtime is not None for one in runtime.parity_backends()]
    forced = kernel_choice() == "reference"
    found.kernel_notes = {backend.name: backend.skipped or f"on {backend.device}" for backend in backends}
    for runtime, _ in loaded.values():
        try:
            found.kernel_notes |= getattr(runtime, "kernel_notes", dict)()
        except DSpineError as error:
            found.problems.append(str(error))
    for name in OPERATIONS:
        row = {"operation": name}
        for backend in backends:
            if backend.skipped:
                row[backend.name] = "absent"
            elif backend.kernel is None or backend.kernel(name) is None or (forced and backend.fallback):
                row[backend.name] = "fallback"
            elif backend.scaled and not backend.fallback:
                row[backend.name] = "emulated"
            else:
                row[backend.name] = "native"
        found.kernels.append(row)


def _pair(
    found: Findings,
    runtime: Runtime | None,
    device: str,
    model: str,
    draft_model: str,
    tokens: int,
    options: CacheOptions,
) -> None:
    """Whether target and drafter belong together, and whether they fit the device."""
    pair = found.pair = {"model": model, "state": "", "drafter": None, "matches": None, "plan": None, "fits": None}
    try:
        folder = local_folder(model)
        if folder is None:
            pair["state"] = f"not on this disk yet: dspine prepare {model}"
            return
        card = read_config(folder)
        pair["state"] = f"{folder} ({card.get('model_type', 'no model_type')})"
        draft, reason = find_draft(draft_model, model)
        pair["drafter"] = f"{draft} ({reason})" if draft is not None else reason
        if draft is not None:
            facts = {**card, **(card.get("text_config") or {})}
            info = SimpleNamespace(
                name=folder.name,
                hidden_size=facts.get("hidden_size"),
                vocab_size=facts.get("vocab_size"),
                num_layers=facts.get("num_hidden_layers"),
                eos_token_ids=eos_ids_of_folder(folder),
            )
            pair["matches"] = False  # unless the next line says nothing
            check_pair(load_drafter_config(draft), info, str(draft))
            pair["matches"] = True
        if runtime is None:
            return
        check_cache_options(runtime, options)
        name = place_of(runtime, device)
        plan = plan_on(runtime, name, folder, draft, tokens=tokens, options=options)
        memory = device_memory(runtime, name)
        pair["plan"] = {"device": name, "line": plan.line(), "bytes": dict(plan.parts), "usable": memory.usable}
        pair["fits"] = plan.total <= memory.usable
        plan.check(memory, f"{model} on {name}")
    except DSpineError as error:
        found.problems.append(str(error))


def local_folder(model: str) -> Path | None:
    """The model's folder if it is on this disk (models shipped with dspine are); None where it would have to be fetched."""
    if model == EMBEDDED_NAME:
        return embedded_folder() if is_prepared() else None
    if any(model == pair.model for pair in SHIPPED_PAIRS) or Path(model).expanduser().is_dir():
        return resolve_model(model)
    if "/" not in model or model.startswith((".", "/", "~")):
        return resolve_model(model)  # raises, and says what a name may be
    return None


def _show(console: Console, found: Findings) -> None:
    rows = [("python", found.python)]
    rows += [
        (v["package"], f"{v['installed']}  ({v['state']}{'' if v['state'] == 'as tested' else ': ' + v['tested']})")
        for v in found.versions
    ]
    console.print(titled_table("Versions", rows))
    rows = []
    for runtime in found.runtimes:
        devices = f"; devices: {', '.join(runtime['devices'])}" if runtime["devices"] else ""
        install = f"; install: {runtime['install']}" if runtime["install"] else ""
        rows.append((runtime["name"], f"{'yes' if runtime['ok'] else 'no'}: {runtime['reason']}{devices}{install}"))
    console.print(titled_table("Backends", [*rows, ("chosen", found.auto)]))
    rows = [
        (m["device"], f"{m['usable'] / GIB:.1f} of {m['total'] / GIB:.1f} GiB usable ({m['source']})") for m in found.memory
    ]
    console.print(titled_table("Memory", rows))
    _show_kernels(console, found)
    pair = found.pair
    rows = [("model", f"{pair['model']}: {pair['state']}" if pair["state"] else pair["model"])]
    if pair["drafter"]:
        rows.append(("drafter", pair["drafter"]))
    if pair["matches"] is not None:
        rows.append(("match", "yes" if pair["matches"] else "no"))
    if pair["plan"]:
        rows.append(
            ("memory", f"{pair['plan']['line']}; {'fits' if pair['fits'] else 'does not fit'} {pair['plan']['device']}")
        )
    console.print(titled_table("Pair", rows))
    for problem in found.problems:
        console.print(f"problem: {problem}", style="red", markup=False)
    if not found.problems:
        console.print("no problems found", style="green")


def _show_kernels(console: Console, found: Findings) -> None:
    """Backends as columns; operations whose row is the same share one line."""
    names = [name for name in (found.kernels[0] if found.kernels else {}) if name != "operation"]
    table = Table(title=f"Kernels (DSPINE_KERNELS={kernel_choice()})", title_justify="left", title_style="bold", box=None)
    table.add_column("operations", overflow="fold")
    for name in names:
        table.add_column(name)
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in found.kernels:
        groups.setdefault(tuple(row[name] for name in names), []).append(row["operation"])
    for states, operations in groups.items():
        table.add_row(", ".join(operations), *states)
    console.print(table)
    for name, note in found.kernel_notes.items():
        console.print(f" {name}: {note}", style="dim", markup=False)
