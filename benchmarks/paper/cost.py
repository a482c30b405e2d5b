"""What a draft costs, by variant and by K: drafters before their first step, one after another on an idle machine, in turns.

A draft takes as long with any weights, so nothing is trained; experiments f, g and i name tau, this names the milliseconds
beside it, which `draft_ms` of a run with several jobs on one GPU cannot.

    python -m benchmarks.paper.cost --out OUT --turns 7
    python -m benchmarks.paper.cost --out OUT --device cpu --batches 1 --rounds 20     # 32 at a time take a CPU long
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.paper.one import draft_milliseconds, train_settings, with_top_k
from benchmarks.paper.options import Options, add_arguments, options_of
from benchmarks.paper.report import exit_code
from benchmarks.paper.variants import VARIANTS
from benchmarks.provenance import provenance
from dspine.common.files import write_json
from dspine.common.models import resolve_model
from dspine_cuda.drafter import load_drafter
from dspine_cuda.runtime import RUNTIME
from dspine_cuda.training.devices import pick_device
from dspine_cuda.training.export import export_drafter
from dspine_cuda.training.initial import drafter_config, starting_model
from dspine_cuda.training.target import load_frozen_target

NAMES = ("full", "rank_64", "rank_128", "rank_576", "block_4", "block_12", "block_16", "block_24", "block_32",
         "two_hop", "refine_two", "two_hop_refine_two")  # fmt: skip
TOP_K = (4, 8, 12, 24, 32)
Turns = dict[str, dict[int, list[float]]]  # label -> batch -> milliseconds of every turn


def untrained(name: str, options: Options, target: Any) -> Path:
    """The folder of one variant's drafter as its training would begin."""
    folder = options.out / "untrained" / name
    if not (folder / "config.json").is_file():
        settings = train_settings(VARIANTS[name], options, None)
        shape = drafter_config(settings, target.shape, settings.model.mask_token_id)
        model, space = starting_model(settings, shape, target)
        state = {key: value.detach().float().cpu().numpy() for key, value in model.named_parameters()}
        export_drafter(folder, state, shape, None if space is None else space.basis)
    return folder


def measure(options: Options, names: list[str], turns: int, batches: list[int], rounds: int) -> dict[str, Any]:
    """Milliseconds of a draft: median, least and greatest of the turns, and the ratio to `full`; OUT/cost.json after each."""
    model = train_settings(VARIANTS["full"], options, None).model.target
    device, folder = pick_device(options.device), resolve_model(model)
    frozen = load_frozen_target(folder, device, getattr(torch, options.dtype))
    folders = {name: untrained(name, options, frozen) for name in names}
    del frozen
    target = RUNTIME.load_target(folder, device=str(device), dtype=options.dtype)  # drafts as generation has them
    asked = [(name, name, None) for name in names] + [(f"top_{k}", "full", k) for k in TOP_K if "full" in names]
    times: Turns = {label: {batch: [] for batch in batches} for label, _, _ in asked}
    result: dict[str, Any] = {}
    for turn in range(turns + 1):
        for label, name, top_k in asked:
            drafter = load_drafter(folders[name], target)
            if top_k is not None:
                drafter = with_top_k(drafter, top_k)
            for batch in batches:
                milliseconds = draft_milliseconds(drafter, batch, rounds)
                if turn:  # the first builds kernels
                    times[label][batch].append(milliseconds)
        if turn:
            result = {"draft_ms": _rows(times), "turns": turn, "rounds": rounds, "provenance": provenance()}
            write_json(options.out / "cost.json", result)
    return result


def _rows(times: Turns) -> dict[str, Any]:
    full = times.get("full", {})
    return {
        label: {str(batch): _row(found, full.get(batch)) for batch, found in by_batch.items()}
        for label, by_batch in times.items()
    }


def _row(found: list[float], base: list[float] | None) -> dict[str, float]:
    row = {"median": statistics.median(found), "least": min(found), "greatest": max(found)}
    return row if base is None else row | {"over_full": statistics.median(a / b for a, b in zip(found, base, strict=True))}


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print a table and write OUT/cost.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--variants", nargs="+", default=list(NAMES), choices=sorted(VARIANTS), metavar="NAME")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32], metavar="N", help="sequences at a time")
    parser.add_argument("--rounds", type=int, default=50, help="drafts a turn")
    args = parser.parse_args(arguments)
    result = measure(
        options_of(args), list(dict.fromkeys(args.variants)), max(1, args.turns), args.batches, max(5, args.rounds)
    )
    print("drafter".ljust(22) + "".join(f"ms, {batch} at a time".ljust(34) for batch in args.batches))
    for label, row in result["draft_ms"].items():
        cells = []
        for entry in row.values():
            ratio = f"  x {entry['over_full']:.2f}" if "over_full" in entry else ""
            cells.append(f"{entry['median']:.2f} ({entry['least']:.2f}-{entry['greatest']:.2f}){ratio}".ljust(34))
        print((label.ljust(22) + "".join(cells)).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
