"""Run variants, several at a time, within a budget of minutes; the same command goes on where it stopped.

Each variant is a child process (`benchmarks.paper.one`) that trains, scores and writes `OUT/<variant>/result.json`; what is
there is not run again, wherever it comes from (a result.json, or a results.json, copied into OUT), provided that its settings
are this call's. Out of time, a child stores a checkpoint and goes on from it at the next call.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.paper.one import UNFINISHED, check_comparable, is_finished, read_results
from benchmarks.paper.options import ROOT, Options
from dspine.common.errors import DSpineError
from dspine.common.files import write_json

POLL_SECONDS = 0.5
LEAST_MINUTES = 0.3  # a variant is not begun with less left: it would only compile
Results = dict[str, Any]


def run_variants(names: Sequence[str], options: Options, on_done: Callable[[Results], None] | None = None) -> Results:
    """Results by name, of those that are finished; OUT/results.json (with all earlier ones) is written, and `on_done` called,
    after each."""
    options.out.mkdir(parents=True, exist_ok=True)
    todo = unfinished(names, options)
    if todo and not options.report_only:
        if options.data is None or not options.prompts:
            raise DSpineError(f"--data and --prompts are needed to train {', '.join(todo)} (or --report-only)")
        texts = [options.out / "texts" / f"texts_{heat:g}.npz" for heat in options.temperatures]
        _run(todo if all(path.is_file() for path in texts) else ["texts", *todo], options, on_done)
    return collect(options)


def unfinished(names: Sequence[str], options: Options) -> list[str]:
    """What must still be run, in order; DSpineError where a finished one has other settings than this call's."""
    results = read_results(options)
    for name in names if not options.report_only else ():
        if name in results:
            check_comparable(name, results[name], options)
    return [name for name in names if not is_finished(name, options, results)]


def _run(names: list[str], options: Options, on_done: Callable[[Results], None] | None) -> None:
    """The answers first (scores read them), then variants in order, `jobs` at a time. A failed child is named at the end."""
    deadline = time.monotonic() + 60 * options.minutes
    waiting, running, failed = list(names), {}, []  # type: ignore[var-annotated]
    free = list(range(max(1, options.jobs)))
    try:
        while waiting or running:
            while waiting and free:
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
                if code == 0 and name != "texts":
                    results = collect(options)
                    if on_done is not None:
                        on_done(results)
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
    command += ["--probe"] if name in options.probed else []
    if minutes < 1e6:
        command += ["--time-limit", f"{minutes:.3f}"]
    return command


def environment_of(options: Options, gpu: int) -> dict[str, str]:
    """A child's: its GPU and its share of the cores. What the user has set stays; torch's compile cache is one for all."""
    share = str(max(1, (os.cpu_count() or 1) // max(1, options.jobs)))
    own = {"OMP_NUM_THREADS": share, "TORCHINDUCTOR_COMPILE_THREADS": share}
    return own | os.environ | ({"CUDA_VISIBLE_DEVICES": str(gpu)} if options.gpus > 1 else {})


def _start(name: str, options: Options, minutes: float, gpu: int) -> subprocess.Popen[bytes]:
    print(f"{name}: begun", file=sys.stderr, flush=True)
    log = (options.out / f"{name}.log").open("ab")
    with log:
        command = command_of(name, options, minutes)
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment_of(options, gpu))


def collect(options: Options) -> Results:
    """Every result into results.json; returned by name."""
    results = read_results(options)
    write_json(options.results, results)
    return results
