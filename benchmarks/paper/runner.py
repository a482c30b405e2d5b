"""Run variants, several at a time, within a budget of minutes; the same command goes on where it stopped.

Each variant is a child process (`benchmarks.paper.one`) that trains, scores and writes `OUT/<variant>/result.json`; what is
there is not run again. Out of time, a child stores a checkpoint and goes on from it at the next call.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.one import UNFINISHED, is_finished, read_result
from benchmarks.paper.options import ROOT, Options
from dspine.common.errors import DSpineError
from dspine_cuda.training.files import write_json

POLL_SECONDS = 0.5
LEAST_MINUTES = 0.3  # a variant is not begun with less left: it would only compile


def run_variants(names: Sequence[str], options: Options) -> dict[str, Any]:
    """Results by name, of those that are finished; also written to OUT/results.json (with all earlier ones)."""
    options.out.mkdir(parents=True, exist_ok=True)
    todo = [name for name in names if not is_finished(name, options)]
    if todo and not options.report_only:
        if options.data is None or not options.prompts:
            raise DSpineError(f"--data and --prompts are needed to train {', '.join(todo)} (or --report-only)")
        texts = [options.out / "texts" / f"texts_{heat:g}.npz" for heat in options.temperatures]
        _run(todo if all(path.is_file() for path in texts) else ["texts", *todo], options)
    return collect(options)


def _run(names: list[str], options: Options) -> None:
    """The answers first, alone; then variants in order, `jobs` at a time. A failed child is named at the end."""
    deadline = time.monotonic() + 60 * options.minutes
    waiting, running, failed = list(names), {}, []  # type: ignore[var-annotated]
    free = list(range(max(1, options.jobs)))
    try:
        while waiting or running:
            slots = 1 if "texts" in waiting or "texts" in running else options.jobs
            while waiting and len(running) < slots and "texts" not in running:
                left = (deadline - time.monotonic()) / 60
                if left < LEAST_MINUTES:
                    print(f"out of time: {', '.join(waiting)} not begun", file=sys.stderr, flush=True)
                    waiting = []
                    break
                name, slot = waiting.pop(0), free.pop(0)
                running[name] = (slot, _start(name, options, left, slot % options.gpus))
            for name, (slot, process) in list(running.items()):
                code = process.poll()
                if code is None:
                    continue
                del running[name]
                free.append(slot)
                state = {0: "done", UNFINISHED: "out of time, to be continued"}.get(code, f"failed with code {code}")
                print(f"{name}: {state}", file=sys.stderr, flush=True)
                if code not in (0, UNFINISHED):
                    failed.append(name)
                    waiting = [] if name == "texts" else waiting
            time.sleep(POLL_SECONDS)
    finally:
        for _, process in running.values():
            process.terminate()
    if failed:
        logs = ", ".join(str(options.out / f"{name}.log") for name in failed)
        raise DSpineError(f"failed: {', '.join(failed)}; see {logs}")


def command_of(name: str, options: Options, minutes: float) -> list[str]:
    """The child that trains and scores `name`."""
    command = [sys.executable, "-m", "benchmarks.paper.one", "--variant", name, *options.child_arguments()]
    if minutes < 1e6:
        command += ["--time-limit", f"{minutes:.3f}"]
    return command


def _start(name: str, options: Options, minutes: float, gpu: int) -> subprocess.Popen[bytes]:
    print(f"{name}: begun", file=sys.stderr, flush=True)
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": str(gpu)} if options.gpus > 1 else {})
    log = (options.out / f"{name}.log").open("ab")
    with log:
        return subprocess.Popen(command_of(name, options, minutes), cwd=ROOT, stdout=log, stderr=log, env=environment)


def collect(options: Options) -> dict[str, Any]:
    """Merge every variant's result into results.json and return them by name."""
    results: dict[str, Any] = {}
    if options.results.is_file():
        import json

        results = json.loads(options.results.read_text(encoding="utf-8"))
    for folder in sorted(Path(options.out).iterdir()):
        found = read_result(folder) if folder.is_dir() else None
        if found is not None:
            results[folder.name] = found
    write_json(options.results, results)
    return results
