"""Length policies side by side in one run: autoregressive, full, static lengths, D-Cut, EVICT, DSpark, nominal, corrected.

    python -m benchmarks.hybridspec --model hybrid-tiny --prompts categories7.jsonl --per-category 4 --max-tokens 128 \\
        --repetitions 3 --out result.json --markdown result.md

The prompt file's rows have `messages` and `category`, and `split` (`calibration` or `test`; without it a seeded half of each
category). Without --calibration the pair is calibrated first, on the calibration prompts only. Every repetition runs every
prompt through all contenders one after another, the order turning, so that a slow minute of the machine hits all of them.
Pooled throughput: tokens after each request's first, over the time of its rounds, summed over the prompts; median and range
over the repetitions. Drafting is never switched off (break-even 0), so that every contender runs as named. Temperatures take
turns within a repetition, and --out is written after each of them, so a run that is cut leaves whole tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from benchmarks.speedup import repeats
from dspine.common.generation import generate, load
from dspine.common.protocols import Engine
from dspine.common.runtimes import choose_runtime
from dspine.common.selection.calibrate import CalibrateSettings, calibrate
from dspine.common.selection.calibrated import CALIBRATED
from dspine.common.selection.calibration import Calibration, check_calibration, identify, load_calibration
from dspine.common.selection.prompts import PromptRow, read_prompts, refuse_overlap

STATIC = (2, 4, 8, 12, 16)
PLAIN = "autoregressive"


def split_prompts(
    rows: list[PromptRow], per_category: int, calibration: int, seed: int
) -> tuple[list[PromptRow], list[PromptRow]]:
    """(calibration, test) prompts, disjoint; up to so many of each category, in the file's order."""
    rng = np.random.default_rng(seed)
    sides: tuple[list[PromptRow], list[PromptRow]] = ([], [])
    for category in dict.fromkeys(row.category for row in rows):
        some = [row for row in rows if row.category == category]
        if all(row.split in ("calibration", "test") for row in some):
            halves = [[row for row in some if row.split == name] for name in ("calibration", "test")]
        else:
            order = rng.permutation(len(some))
            halves = [[some[i] for i in sorted(order[side::2])] for side in (0, 1)]
        sides[0].extend(halves[0][:calibration])
        sides[1].extend(halves[1][:per_category])
    refuse_overlap(*sides)
    return sides


def contenders(calibration: Calibration) -> list[str]:
    """Names of what runs side by side; `hybridspec` only where the target has a router."""
    width = calibration.identity.block_size
    names = [PLAIN, "full", *(f"static:{w}" for w in STATIC if w < width), *CALIBRATED]
    return [name for name in names if name != "hybridspec" or calibration.routing is not None]


def measure(
    engine: Engine, prompts: list[PromptRow], names: list[str], options: dict[str, Any], repetition: int, label: str
) -> list[dict[str, Any]]:
    """One repetition: one row for each run of one contender on one prompt."""
    rows = []
    for name in names:  # warm up: first calls set up thread pools, graphs and buffers
        _run(engine, prompts[0], name, {**options, "max_tokens": 16}, 0)
    for index, prompt in enumerate(prompts):
        turn = (index + repetition) % len(names)
        runs = {name: _run(engine, prompt, name, options, index) for name in names[turn:] + names[:turn]}
        plain_ids = runs[PLAIN]["ids"]
        for name, run in runs.items():
            ids = run.pop("ids")
            run |= {"same_text": ids == plain_ids, "repeats": repeats(ids)}
            rows.append({"policy": name, "repetition": repetition, "prompt": index, "category": prompt.category, **run})
        print(f"{label}: {index + 1}/{len(prompts)}", file=sys.stderr, flush=True)
    return rows


def repeated(
    engine: Engine, prompts: list[PromptRow], names: list[str], path: Path, args: argparse.Namespace
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """All rows so far by temperature, again after every repetition of every temperature."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for repetition in range(args.repetitions):
        for temperature in args.temperatures:
            options = {"max_tokens": args.max_tokens, "temperature": temperature, "break_even": 0.0, "calibration": path}
            label = f"T={temperature:g}, repetition {repetition + 1} of {args.repetitions}"
            rows.setdefault(f"{temperature:g}", []).extend(measure(engine, prompts, names, options, repetition, label))
            yield rows


def _progress(every: float = 5.0) -> Callable[[str, int, int], None]:
    """Calibration's steps on standard error, a line every few seconds."""
    started = last = perf_counter()

    def show(step: str, done: int, of: int) -> None:
        nonlocal last
        now = perf_counter()
        if now - last >= every:
            last = now
            print(f"[{now - started:5.0f} s] {step}: {done}/{of}", file=sys.stderr, flush=True)

    return show


def _run(engine: Engine, prompt: PromptRow, name: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    plain = name == PLAIN
    policy = {"draft": False, "policy": "full"} if plain else {"policy": name}
    result = generate(engine, prompt.prompt, seed=seed, **options | policy)
    stats = result.stats
    return {
        "ids": result.token_ids,
        "tokens": stats.generated_tokens - 1,
        "seconds": stats.decode_seconds,
        "rounds": stats.rounds,
        "verified": sum(w * n for w, n in stats.verified_lengths.items()),
        "lengths": {str(w): n for w, n in sorted(stats.verified_lengths.items())},
        "draft_seconds": stats.draft_seconds,
        "acceptance": None if plain else result.acceptance,
    }


def summarise(rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Pooled figures of each contender, and the better static length once more by name."""
    table = []
    for name in names:
        some = [row for row in rows if row["policy"] == name]
        speeds = [_pooled([row for row in some if row["repetition"] == r]) for r in sorted({row["repetition"] for row in some})]
        rounds = sum(row["rounds"] for row in some)
        table.append(
            {
                "policy": name,
                "tokens_per_second": statistics.median(speeds),
                "low": min(speeds),
                "high": max(speeds),
                "acceptance_length": sum(row["tokens"] for row in some) / rounds if rounds else 0.0,
                "verified_length": sum(row["verified"] for row in some) / rounds if rounds else 0.0,
                "round_ms": 1e3 * sum(row["seconds"] for row in some) / rounds if rounds else 0.0,
                "acceptance": some[0]["acceptance"],
                "same_text": sum(row["same_text"] for row in some) / len(some),
                "texts_that_repeat": sum(row["repeats"] for row in some),
                "by_category": {
                    category: _pooled([row for row in some if row["category"] == category])
                    for category in dict.fromkeys(row["category"] for row in some)
                },
            }
        )
    speed = {row["policy"]: row["tokens_per_second"] for row in table}
    static = [row for row in table if row["policy"].startswith("static") or row["policy"] == "full"]
    best = max(static, key=lambda row: row["tokens_per_second"])["policy"]
    for row in table:
        row |= {"over_plain": row["tokens_per_second"] / speed[PLAIN], "over_full": row["tokens_per_second"] / speed["full"]}
        row["best_static"] = row["policy"] == best
    return table


def _pooled(rows: list[dict[str, Any]]) -> float:
    seconds = sum(row["seconds"] for row in rows)
    return sum(row["tokens"] for row in rows) / seconds if seconds else 0.0


def markdown(result: dict[str, Any]) -> str:
    """The tables for people."""
    facts, made = result["setup"], result["calibration"]
    done = min(1 + max(row["repetition"] for row in rows) for rows in result["rows"].values())
    lines = [
        f"{facts['model']} with {facts['drafter']}, {facts['runtime']} on {facts['device']}, {facts['dtype']}; "
        f"{facts['prompts']} test prompts, {facts['max_tokens']} tokens, {done} interleaved repetitions. "
        f"Commit {result['commit']}.",
        "",
        f"Calibration: rho {made['rate']:.1f} tokens/s, s {made['stage_zero_us']:.1f} us, eta {made['expert_us']:.2f} us.",
    ]
    for temperature, table in result["tables"].items():
        lines += [
            "",
            f"Temperature {temperature}:",
            "",
            "| policy | tokens/s (range) | x plain | x full | tokens a round | verified | ms a round | rule | same text |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        lines += [_markdown_row(row) for row in table]
    return "\n".join(lines) + "\n"


def _markdown_row(row: dict[str, Any]) -> str:
    speed = f"{row['tokens_per_second']:.1f} ({row['low']:.1f} to {row['high']:.1f})"
    ratios = f"{row['over_plain']:.2f} | {row['over_full']:.2f}"
    lengths = f"{row['acceptance_length']:.2f} | {row['verified_length']:.2f} | {row['round_ms']:.2f}"
    name = row["policy"] + (" (best fixed)" if row["best_static"] else "")
    return f"| {name} | {speed} | {ratios} | {lengths} | {row['acceptance'] or '-'} | {row['same_text']:.0%} |"


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Load, calibrate where no file was named, measure; the result so far, after every repetition of every temperature."""
    runtime, reason = choose_runtime(args.backend)
    engine = load(
        runtime, args.model, args.draft_model, device=args.device, dtype=args.dtype, backend_reason=reason, graphs=args.graphs
    )
    calibration_rows, test = split_prompts(
        read_prompts(args.prompts), args.per_category, args.calibration_per_category, args.seed
    )
    with tempfile.TemporaryDirectory() as scratch:
        path = args.calibration or Path(scratch) / "calibration.json"
        if args.calibration is None:
            print(f"calibrating on {len(calibration_rows)} prompts", file=sys.stderr, flush=True)
            settings = CalibrateSettings(max_tokens=args.max_tokens, seed=args.seed)
            calibrate(engine, calibration_rows, settings, test_prompts=test, progress=_progress()).calibration.save(path)
        made = load_calibration(path)
        check_calibration(made, identify(engine), path)
        names = [name for name in contenders(made) if args.policies is None or name in (PLAIN, "full", *args.policies)]
        facts = {**provenance(), "setup": setup_of(engine, made, len(test), args), "calibration": figures_of(made)}
        for rows in repeated(engine, test, names, path, args):
            yield {**facts, "tables": {t: summarise(some, names) for t, some in rows.items()}, "rows": rows}


def setup_of(engine: Engine, made: Calibration, prompts: int, args: argparse.Namespace) -> dict[str, Any]:
    """What ran, on what."""
    return {
        "model": args.model,
        "drafter": made.identity.drafter_name,
        "runtime": engine.runtime,
        "device": made.identity.device,
        "dtype": made.identity.dtype,
        "rounds": engine.rounds_reason,
        "adapter": engine.target.info.adapter,
        "prompts": prompts,
        "max_tokens": args.max_tokens,
        "repetitions": args.repetitions,
        "seed": args.seed,
    }


def figures_of(made: Calibration) -> dict[str, Any]:
    """The calibration's own figures."""
    return {
        "rate": made.rate,
        "stage_zero_us": made.cost.stage_zero * 1e6,
        "expert_us": made.cost.expert * 1e6,
        "measured_ms": [1e3 * t for t in made.cost.measured],
        "figures": made.figures,
        "provenance": made.provenance,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft-model", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--graphs", default="auto", help="auto, on or off: rounds as CUDA graphs where a policy has such a form"
    )
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--per-category", type=int, default=4, help="test prompts of each category")
    parser.add_argument("--calibration-per-category", type=int, default=8)
    parser.add_argument("--calibration", type=Path, help="a calibration file; else one is made first")
    parser.add_argument("--policies", nargs="+", help="only these, beside plain decoding and full verification")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print the tables; everything goes to --out."""
    args = parse()
    text = ""
    for result in run(args):
        text = markdown(result)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1))
        if args.markdown:
            args.markdown.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
