"""What a call would do, before it is paid for: variants in order, steps left, when each experiment's table is whole.

The estimate: a device works on one variant's step at a time (jobs that share one only hide each other's start), a variant costs
steps x milliseconds and its scores, and nothing is paid for what is finished.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.paper.one import read_results, train_settings
from benchmarks.paper.options import Options
from benchmarks.paper.runner import unfinished
from benchmarks.paper.variants import VARIANTS


@dataclass(frozen=True)
class Costs:
    """Of a variant alone on its device: ms a step, seconds a score (all temperatures), seconds of imports and compilation."""

    step_ms: float
    score_seconds: float
    start_seconds: float


@dataclass(frozen=True)
class Item:
    """One variant: state in words, steps left, seconds of the device, seconds after which it is done."""

    name: str
    state: str
    steps: int
    seconds: float
    done: float


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the estimate; the defaults are an H200's, for SmolLM2 and the configuration of `examples/train_smollm2`."""
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--step-ms", type=float, default=64.0, help="of the plan: a step alone on its device")
    parser.add_argument("--score-seconds", type=float, default=12.0, help="of the plan: one way to draft, all temperatures")
    parser.add_argument("--start-seconds", type=float, default=75.0, help="of the plan: imports, loading, compilation")


def make_plan(names: Sequence[str], options: Options, costs: Costs) -> list[Item]:
    """Every variant in order, finished ones with no seconds."""
    results, todo = read_results(options), unfinished(names, options)
    items, clock = [], costs.start_seconds if todo else 0.0
    jobs = max(1.0, options.jobs / options.gpus)
    for name in names:
        whole = train_settings(VARIANTS[name], options, None).schedule.steps
        if name not in todo:
            items.append(Item(name, f"finished: {results[name]['config']['schedule']['max_steps']} steps", 0, 0.0, 0.0))
            continue
        left, state = _left(name, whole, options)
        seconds = left * costs.step_ms / 1000 + costs.score_seconds * len(VARIANTS[name].wanted(options.few_scores))
        clock += max(seconds, (seconds + costs.start_seconds) / jobs) / options.gpus
        items.append(Item(name, state, left, seconds, clock))
    return items


def _left(name: str, whole: int, options: Options) -> tuple[int, str]:
    """(steps left, in words)."""
    folder = options.out / name
    if (folder / "train.json").is_file():
        return 0, "trained, to be scored"
    files = sorted((folder / "checkpoints").glob("step-*.pt"))
    if files:
        step = int(files[-1].stem.removeprefix("step-"))
        return max(0, whole - step), f"goes on from step {step} of {whole}"
    return whole, f"to train: {whole} steps"


def plan_text(experiments: Mapping[str, Sequence[str]], items: Sequence[Item], minutes: float) -> str:
    """For people: a line a variant, then a line an experiment; experiments: letter -> variants."""
    lines = [f"{item.name:20} {item.state:34} {item.seconds:6.0f} s   done after {item.done / 60:5.1f} min" for item in items]
    ends = {item.name: item.done for item in items}
    for letter, names in experiments.items():
        end = max(ends[name] for name in names) / 60
        late = f"   (beyond --minutes {minutes:g})" if end > minutes else ""
        lines.append(f"({letter}) whole after {end:.1f} min{late}")
    return "\n".join(lines)
