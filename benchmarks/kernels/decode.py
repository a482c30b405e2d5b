"""One decoding step's kernels at the shapes of Qwen3-8B and Qwen3.6-35B-A3B, against the bytes that they must move.

    python -m benchmarks.kernels.decode --json decode.json
    python -m benchmarks.kernels.decode --tune --json tune.json    launch parameters of linear_rows and routed_experts
    python -m benchmarks.kernels.decode --tune --only dspine       those of DSpine's own kernels, and its readout's product
    python -m benchmarks.kernels.decode --compare --json ab.json  split products; then layers with and without each choice

Times are CUDA graph replays of a chain of calls over different memory (so no cache holds it), divided by the calls: launches
overlap as they do in a step. `x` is the time over the bytes' time at the bandwidth measured first. Everything is compiled
beforehand in parallel processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from benchmarks.kernels import draft_cases
from benchmarks.kernels.decode_cases import LENGTHS, MATRICES, Case, cases, mixture, product
from benchmarks.kernels.timing import measure_floors, replay
from benchmarks.provenance import provenance
from dspine.kernels_triton import (
    linear_rows,
    routed_experts,
)


def linear_choices() -> list[linear_rows.Launch]:
    """Launch parameters worth trying."""
    shapes = (
        (16, 128, 4, 4), (16, 256, 4, 4), (16, 512, 4, 4), (16, 256, 2, 4), (32, 128, 4, 4), (32, 128, 4, 6), (32, 256, 4, 3),
        (32, 256, 4, 4), (64, 128, 4, 4), (64, 128, 8, 4),
    )  # fmt: skip
    return [linear_rows.Launch(*shape, fetch) for shape in shapes for fetch in (0, 512, 2048)]


def split_choices() -> list[linear_rows.Launch | None]:
    """The parameters of now (None), and products split over programs."""
    shapes = (
        (32, 128, 4, 4, 2), (32, 256, 4, 3, 2), (64, 128, 4, 3, 2), (16, 256, 4, 4, 2), (16, 512, 4, 3, 2),
        (32, 128, 4, 4, 4), (32, 256, 4, 3, 4), (64, 128, 4, 3, 4), (64, 128, 4, 4, 4), (64, 256, 8, 3, 4), (64, 128, 4, 3, 8),
    )  # fmt: skip
    return [None, *(linear_rows.Launch(*shape[:4], fetch, shape[4]) for shape in shapes for fetch in (0, 512))]


def expert_choices() -> list[tuple[routed_experts.Launch, routed_experts.Launch]]:
    """One of the two launches at a time, the other as it is."""
    make, inner, outer = routed_experts.Launch, routed_experts.INNER, routed_experts.OUTER
    first = (
        (16, 128, 4, 6), (16, 256, 4, 3), (16, 256, 4, 4), (16, 512, 4, 3), (32, 128, 4, 4), (32, 128, 2, 4), (32, 256, 4, 3),
        (64, 128, 4, 3),
    )  # fmt: skip
    second = (
        (32, 128, 4, 4), (32, 256, 4, 3), (32, 512, 4, 2), (64, 64, 4, 6), (64, 128, 8, 4), (64, 256, 8, 3), (128, 128, 8, 3),
        (16, 256, 4, 3), (64, 128, 4, 4, 0), (32, 256, 4, 3, 0),
    )  # fmt: skip
    return [(inner, outer), *((make(*shape), outer) for shape in first), *((inner, make(*shape)) for shape in second)]


def tuned(names: list[str]) -> list[tuple[str, int, Any]]:
    """(what, w, parameters) of every launch choice."""
    tasks: list[tuple[str, int, Any]] = []
    for w in (1, 16):
        tasks += [(name, w, chosen) for name in names for chosen in linear_choices()]
        tasks += [("experts", w, chosen) for chosen in expert_choices()]
    # last: their choices are left in the environment
    name = draft_cases.READOUT
    readout = [(f"dspine {name}", 16, chosen) for _, w, chosen in split_tasks([name]) if w == 16]
    return tasks + readout + draft_cases.tasks()


def split_tasks(names: list[str]) -> list[tuple[str, int, Any]]:
    """(matrix, w, parameters) of every split; the parameters of now are a choice too."""

    def of(name: str, chosen: linear_rows.Launch | None) -> linear_rows.Launch:
        return chosen or linear_rows.choose(*MATRICES[name], torch.bfloat16)

    return [(name, w, of(name, chosen)) for name in names for w in (1, 16) for chosen in split_choices()]


def best_of(found: list[dict[str, Any]]) -> dict[str, linear_rows.Launch]:
    """matrix -> the parameters with the least product of its times at the lengths that were tried."""
    best: dict[str, linear_rows.Launch] = {}
    for name in dict.fromkeys(row["op"] for row in found):
        times: dict[linear_rows.Launch, list[float]] = {}
        for row in found:
            if row["op"] == name and "us" in row:
                times.setdefault(linear_rows.Launch(**row["launch"]), []).append(row["us"])
        most = max(map(len, times.values()), default=0)
        whole = {chosen: math.prod(us) for chosen, us in times.items() if len(us) == most}
        if whole:
            best[name] = min(whole, key=whole.__getitem__)
    return best


def as_variant(best: dict[str, linear_rows.Launch]) -> str:
    """`DSPINE_KERNELS_TRY` of these parameters."""
    sizes = {name: "x".join(map(str, MATRICES[name])) for name in best}
    return ";".join(f"linear_rows.{sizes[name]}={_brief(asdict(chosen))}" for name, chosen in best.items())


COMPARED = ("8b qkv", "8b o", "8b down", "35b gdn in", "35b out", "35b router")  # not the ones of most programs
VARIANTS = {  # layer -> values of DSPINE_KERNELS_TRY, the last what runs by itself
    "8b layer": ("attention_ahead=0;gated_rows=0", "attention_ahead=1;gated_rows=0", "attention_ahead=1"),
    "35b layer, linear_rows": ("experts_ahead=0", "experts_ahead=1"),
}


def compare(names: list[str], processes: int, floors: Any) -> list[dict[str, Any]]:
    """Split products one by one; then whole layers with each of VARIANTS and with the best products."""
    tasks = split_tasks(names)
    layers = [(layer, w, variant) for layer, ways in VARIANTS.items() for variant in ways for w in (1, 16)]
    compile_all(tasks + layers, processes)
    found = list(rows(tasks, floors, True))
    show_tuned(found)
    best = best_of(found)
    products = as_variant(best)
    print(f"\nDSPINE_KERNELS_TRY='{products}'\n", flush=True)
    tuned_layers = [(layer, w, f"{ways[-1]};{products}") for layer, ways in VARIANTS.items() for w in (1, 16)]
    timed_layers = list(rows(layers + tuned_layers, floors, False))
    for row in timed_layers:
        way = row["launch"].replace(products, "best products")
        row["op"] = f"{row['op'].split(',')[0]}, {way}"
    show(timed_layers)
    return found + timed_layers


def build(task: tuple[str, int, Any], short: bool) -> Case:
    """The case of a plain name (parameters None), of one with a value of DSPINE_KERNELS_TRY, or of a launch choice."""
    name, w, chosen = task
    if name.startswith("dspine") and isinstance(chosen, str):
        os.environ["DSPINE_KERNELS_TRY"] = chosen
        return draft_cases.case(name, short)
    name = name.removeprefix("dspine ")
    if chosen is None or isinstance(chosen, str):
        if chosen:
            os.environ["DSPINE_KERNELS_TRY"] = chosen
        return cases()[name](w, short)
    return mixture(w, short, chosen) if name == "experts" else product(name, w, short, chosen=chosen)


def compile_first(tasks: list[tuple[str, int, Any]]) -> str | None:
    """Fill Triton's cache: one call of each task. What a launch could not do is said by the run that times it."""
    for task in tasks:
        try:
            build(task, True).calls[0]()
        except (TritonError, RuntimeError, ValueError) as error:
            return f"{task[0]} w={task[1]}: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
    torch.cuda.synchronize()
    return None


def compile_all(tasks: list[Any], processes: int, compile_share: Callable[[list[Any]], str | None] = compile_first) -> None:
    """Compile in parallel, tasks dealt out so that each process has its share of each kernel."""
    shares = [tasks[i::processes] for i in range(processes)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for failure in pool.map(compile_share, [share for share in shares if share]):
            if failure:
                print(f"not compiled beforehand: {failure}", file=sys.stderr)


def timed(case: Case, quick: bool) -> float:
    """Microseconds of one call."""

    def run() -> None:
        for call in case.calls:
            call()

    return replay([run], *((3, 3) if quick else (10, 5))).median / len(case.calls)


def rows(tasks: list[tuple[str, int, Any]], floors: Any, quick: bool) -> Iterator[dict[str, Any]]:
    """One row a task; a failure ends that row only."""
    for task in tasks:
        name, w, chosen = task
        row: dict[str, Any] = {"op": name, "w": w}
        if chosen is not None:
            parts = chosen if isinstance(chosen, tuple) else (chosen,)
            made = [part if isinstance(part, str) else asdict(part) for part in parts]
            row["launch"] = made if isinstance(chosen, tuple) else made[0]
        try:
            case = build(task, False)
            row["us"] = timed(case, quick)
            row["floor"] = floors.of(case.read, case.written)[0]
            row["launches"] = case.launches
        except (TritonError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            if not quick:
                traceback.print_exc()
            row["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
        yield row
        case = None  # its memory is free before the next one's is made


def show(found: list[dict[str, Any]]) -> None:
    """One line an operation, a column a length: microseconds (times the bytes' floor)."""
    wide = max(28, *(len(row["op"]) + 1 for row in found))
    print(f"{'us (x bytes)':<{wide}}" + "".join(f"{'w=' + str(w):>18}" for w in LENGTHS))
    for name in dict.fromkeys(row["op"] for row in found):
        cells = []
        for w in LENGTHS:
            row = next((r for r in found if r["op"] == name and r["w"] == w), {})
            cells.append(f"{row['us']:.1f} ({row['us'] / row['floor']:.2f})" if "us" in row else row.get("failed", "-")[:16])
        print(f"{name:<{wide}}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def show_tuned(found: list[dict[str, Any]]) -> None:
    """The four best choices of each operation and length."""
    for name, w in dict.fromkeys((row["op"], row["w"]) for row in found):
        mine = sorted((r for r in found if (r["op"], r["w"]) == (name, w) and "us" in r), key=lambda r: r["us"])
        best = "; ".join(f"{r['us']:.1f} {_brief(r['launch'])}" for r in mine[:4])
        print(f"{name:<18} w={w:<3}floor {mine[0]['floor']:.1f}  {best}" if mine else f"{name} w={w}: none ran", flush=True)
        for row in found:
            if (row["op"], row["w"]) == (name, w) and "failed" in row:
                print(f"    {_brief(row['launch'])}: {row['failed']}", flush=True)
        today = next((r["us"] for r in mine if r["launch"] == draft_cases.today(name)), None)
        if today is not None:
            print(f"    today's: {today:.1f}", flush=True)
    if kept := draft_cases.best(found):
        print(f"DSPINE_KERNELS_TRY='{kept}'", flush=True)


def _brief(launch: Any) -> str:
    parts = launch if isinstance(launch, list) else [launch]
    return " | ".join(part if isinstance(part, str) else ",".join(map(str, part.values())) for part in parts)


def plain(options: argparse.Namespace, wanted: list[str], begun: float) -> tuple[list[dict[str, Any]], Any]:
    """(rows, floors) of every case, or of every launch choice with --tune."""
    tasks: list[tuple[str, int, Any]] = (
        tuned(wanted) if options.tune else [(name, w, None) for name in cases() for w in LENGTHS]
    )
    tasks = [task for task in tasks if not options.only or options.only in task[0]]
    compile_all(tasks, options.processes)
    compiled = time.monotonic() - begun
    floors = measure_floors((1,))
    print(
        f"compiled in {compiled:.0f} s; read {floors.read / 1e12:.2f} TB/s, empty launch {floors.launches[1]:.1f} us",
        flush=True,
    )
    with torch.inference_mode():
        found = list(rows(tasks, floors, options.tune))
    (show_tuned if options.tune else show)(found)
    return found, floors


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try launch parameters instead of timing")
    parser.add_argument("--compare", action="store_true", help="split products, and whole layers with and without each choice")
    parser.add_argument("--matrices", help="names of MATRICES by commas, for --tune and --compare")
    parser.add_argument("--only", help="a word that names of operations must hold")
    parser.add_argument("--processes", type=int, default=14, help="that compile at once")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the kernel benchmark needs a CUDA device", file=sys.stderr)
        sys.exit(2)
    begun = time.monotonic()
    wanted = [name for name in MATRICES if not name.endswith("head")] if options.tune else list(COMPARED)
    wanted = options.matrices.split(",") if options.matrices else wanted
    if options.compare:
        floors = measure_floors((1,))
        print(f"read {floors.read / 1e12:.2f} TB/s", flush=True)
        with torch.inference_mode():
            found = compare(wanted, options.processes, floors)
    else:
        found, floors = plain(options, wanted, begun)
    print(f"{time.monotonic() - begun:.0f} s in all")
    if options.json:
        report = provenance() | {
            "device": torch.cuda.get_device_name(),
            "read": floors.read,
            "copy": floors.copy,
            "results": found,
        }
        options.json.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
