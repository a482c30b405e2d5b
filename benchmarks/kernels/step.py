"""Whole captured steps of a shape, with random weights, under choices of their kernels: what a choice is worth inside a step.

    python -m benchmarks.kernels.step --profile                       every kernel of a draft and of a verification
    python -m benchmarks.kernels.step --descend --json step.json      one choice after another, kept where the step is faster
    python -m benchmarks.kernels.step --try "late_next=0" --try "attention_ahead=0"
    python -m benchmarks.kernels.step --shape Qwen/Qwen3.6-35B-A3B --layers 8 --descend

A kernel that is fastest alone, called again and again (`benchmarks.kernels.decode --tune`), need not be so between others:
launches that begin early share the machine with the one in front. A choice is a value of DSPINE_KERNELS_TRY. The score is the
product of the medians of all steps. `--profile` switches early launches off, for a kernel's time then is its own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from triton.errors import TritonError

from benchmarks.kernels.decode import compile_all
from benchmarks.kernels.decode_cases import MATRICES
from benchmarks.provenance import provenance
from dspine.common.bench.presets import cut_layers, find_preset, plain_drafter
from dspine.common.bench.random_weights import preset_folders
from dspine.kernels_triton import gated_rows, linear_rows
from dspine.kernels_triton._choices import written
from dspine_cuda.bench import LengthSteps
from dspine_cuda.runtime import RUNTIME

LENGTHS = (1, 16)
STEPS = (("verify", 1), ("verify", 16), "draft")
MODELS = {"Qwen/Qwen3-8B": "8b", "Qwen/Qwen3.6-35B-A3B": "35b"}  # whose matrices are tried
SWITCHES = ("late_next", "attention_ahead", "experts_ahead")
SHAPES = (  # columns, step, warps, stages of linear_rows
    (16, 256, 4, 4), (16, 512, 4, 3), (16, 512, 4, 4), (32, 128, 4, 6), (32, 256, 4, 3), (32, 256, 4, 4), (64, 128, 4, 4),
    (64, 128, 8, 4),
)  # fmt: skip
ATTENTION = ("64,64,4,1", "64,32,4,2", "128,128,4,1", "128,32,4,3", "128,64,8,2", "256,64,4,2", "64,64,8,1")
SPLITS = ((32, 256, 4, 3, 512, 4), (32, 128, 4, 4, 512, 4), (32, 256, 4, 3, 512, 8), (32, 256, 4, 3, 512, 2))  # of few columns
FETCHES = (0, 512, 1024, 4096)  # inputs of each column that are asked for before the wait
GAIN = 0.998  # a choice is kept where it takes less than this share


class Subject:
    """A pair of random weights and a prompt; `time` captures and times its steps as the environment says."""

    def __init__(self, shape: str, layers: int, plain: bool, context: int) -> None:
        preset = cut_layers(find_preset(shape), layers)
        preset = plain_drafter(preset) if plain else preset
        target, drafter = preset_folders(preset, weights=False)
        self.target = RUNTIME.load_random_target(target, device="cuda", dtype="bfloat16")
        self.drafter = RUNTIME.load_drafter(drafter, self.target)
        self.prompt = np.random.default_rng(0).integers(3, self.target.info.vocab_size, size=context).tolist()

    def steps(self) -> LengthSteps:
        """Captured anew."""
        gc.collect()
        torch.cuda.empty_cache()
        return LengthSteps(self.target, self.drafter, self.prompt, list(LENGTHS), 4, 0)

    def time(self, repeats: int, inner: int = 5) -> dict[str, list[float]]:
        """step -> microseconds of a replay, one number a repetition; steps take turns."""
        steps = self.steps().steps
        found: dict[str, list[float]] = {str(step): [] for step in STEPS}
        for repetition in range(repeats + 1):
            for step in STEPS:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(inner):
                    steps.run(step)
                end.record()
                end.synchronize()
                if repetition:
                    found[str(step)].append(1e3 * begin.elapsed_time(end) / inner)
        return found


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """Microseconds of each step."""
    return {step: statistics.median(values) for step, values in times.items()}


def score(times: dict[str, list[float]]) -> float:
    """Geometric mean of the medians."""
    return math.prod(medians(times).values()) ** (1 / len(times))


def text_of(choices: dict[str, str]) -> str:
    """As DSPINE_KERNELS_TRY has it."""
    return ";".join(f"{name}={value}" for name, value in choices.items())


def measure(subject: Subject, choices: dict[str, str], repeats: int) -> dict[str, Any]:
    """One row: the choices and what the steps take; what could not run says so."""
    os.environ["DSPINE_KERNELS_TRY"] = text_of(choices)
    row: dict[str, Any] = {"choices": dict(choices)}
    try:
        times = subject.time(repeats)
        row |= {"score": score(times), "us": medians(times), "range": {k: [min(v), max(v)] for k, v in times.items()}}
    except (RuntimeError, ValueError, TritonError) as error:  # parameters that ask for too much shared memory, say
        row["failed"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
    finally:
        os.environ.pop("DSPINE_KERNELS_TRY", None)
    return row


def show(row: dict[str, Any], label: str) -> None:
    """One line."""
    if "failed" in row:
        print(f"{label:<60} {row['failed']}", flush=True)
        return
    cells = "  ".join(
        f"{step} {us:.1f} ({row['range'][step][0]:.1f}-{row['range'][step][1]:.1f})" for step, us in row["us"].items()
    )
    print(f"{label:<60} {row['score']:8.1f}  {cells}", flush=True)


def launches(columns: int, size: int) -> list[linear_rows.Launch]:
    """Of one matrix: shapes, then what is asked for early, each beside the rest of today's choice."""
    now = linear_rows.choose(columns, size, torch.bfloat16)
    made = [linear_rows.Launch(*shape, now.fetch) for shape in SHAPES]
    made += [linear_rows.Launch(now.columns, now.step, now.num_warps, now.stages, fetch) for fetch in FETCHES if fetch <= size]
    made += [linear_rows.Launch(*split) for split in SPLITS if columns <= 1024]
    return [*dict.fromkeys(made)]


def call(name: str, w: int) -> None:
    """The product of this name as a step has it."""
    columns, size = MATRICES[name]
    x, weight = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in ((w, size), (columns, size)))
    (gated_rows.gated_rows if name.endswith("gate_up") else linear_rows.linear_rows)(x, weight)


def compile_share(tasks: Sequence[tuple[str, linear_rows.Launch]]) -> None:
    """Fill Triton's cache; what cannot be launched says so when it is timed."""
    for name, launch in tasks:
        key = "linear_rows.{}x{}".format(*MATRICES[name])
        os.environ["DSPINE_KERNELS_TRY"] = f"{key}={written(launch)}"
        for w in LENGTHS:
            with contextlib.suppress(RuntimeError, ValueError, TritonError):
                call(name, w)
    torch.cuda.synchronize()


def descend(subject: Subject, model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Choice by choice, from today's defaults; compiled beforehand in parallel."""
    names = [name for name in MATRICES if name.startswith(model) and "head" not in name]
    compile_all([(name, launch) for name in names for launch in launches(*MATRICES[name])], options.processes, compile_share)
    found = [measure(subject, {}, 2 * options.repeats)]
    show(found[0], "today's defaults")
    best, kept = found[0]["score"], dict[str, str]()

    def attempt(name: str, value: str) -> None:
        nonlocal best, kept
        if time.monotonic() - options.begun > options.seconds:
            return
        row = measure(subject, kept | {name: value}, options.repeats)
        found.append(row)
        better = row.get("score", math.inf) < GAIN * best
        if better:  # once more, for luck would be kept as well
            again = measure(subject, kept | {name: value}, 2 * options.repeats)
            better = again.get("score", math.inf) < GAIN * best
            row = again if "score" in again else row
        if better:
            best, kept = row["score"], kept | {name: value}
        show(row, f"{'kept ' if better else '     '}{name}={value}")

    for name in SWITCHES:
        attempt(name, "0")
    for text in ATTENTION:
        attempt("attention", text)
    for name in names:
        key = f"linear_rows.{MATRICES[name][0]}x{MATRICES[name][1]}"
        for launch in launches(*MATRICES[name]):
            attempt(key, written(launch))
        now = linear_rows.read_launch(kept[key]) if key in kept else linear_rows.choose(*MATRICES[name], torch.bfloat16)
        for fetch in FETCHES if key in kept else ():
            attempt(key, written(replace(now, fetch=fetch)))
    last = measure(subject, kept, 2 * options.repeats)
    first = measure(subject, {}, 2 * options.repeats)
    show(first, "today's defaults, again")
    show(last, "all that was kept")
    print(f"DSPINE_KERNELS_TRY='{text_of(kept)}'", flush=True)
    return [*found, first, last]


def profiled(subject: Subject, replays: int = 10) -> list[dict[str, Any]]:
    """Every kernel of each step: launches and microseconds of a replay."""
    os.environ["DSPINE_EARLY_LAUNCH"] = "0"
    steps = subject.steps().steps
    found = []
    for step in (*STEPS, ("rest", LENGTHS[-1])):
        for _ in range(3):
            steps.run(step)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(replays):
                steps.run(step)
            torch.cuda.synchronize()
        rows: dict[str, list[float]] = {}
        for event in trace.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                rows.setdefault(event.name, []).append(event.time_range.elapsed_us())
        total = sum(map(sum, rows.values())) / replays
        print(f"{step}: {total:.1f} us in {sum(map(len, rows.values())) / replays:.0f} launches")
        for name, times in sorted(rows.items(), key=lambda item: -sum(item[1])):
            each, count = statistics.median(times), len(times) / replays
            print(f"  {name[:64]:<64} {count:6.1f} x {each:7.2f} = {sum(times) / replays:8.1f} us")
            found.append({"step": str(step), "kernel": name, "launches": count, "us": each})
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Qwen/Qwen3-8B", choices=tuple(MODELS))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--plain-drafter", action="store_true")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--descend", action="store_true", help="choices one after another")
    parser.add_argument("--profile", action="store_true", help="every kernel's time")
    parser.add_argument(
        "--try", action="append", default=[], dest="tries", help="a value of DSPINE_KERNELS_TRY; may be repeated"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no choice is begun after these")
    parser.add_argument("--processes", type=int, default=12, help="that compile at once")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.begun = time.monotonic()
    subject = Subject(options.shape, options.layers, options.plain_drafter, options.context)
    found: list[dict[str, Any]] = []
    for text in ["", *options.tries] if options.tries or not (options.descend or options.profile) else ():
        found.append(measure(subject, dict(part.split("=", 1) for part in text.split(";") if part), options.repeats))
        show(found[-1], text or "today's defaults")
    if options.descend:
        found += descend(subject, MODELS[options.shape], options)
    if options.profile:
        found += profiled(subject)
    report = provenance() | {"shape": options.shape, "layers": options.layers, "rows": found}
    if options.json:
        options.json.write_text(json.dumps(report) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
