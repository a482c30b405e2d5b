"""(d) How much of the answer can be read off each layer, by position in the block: rank-64 probes on frozen drafters.

python -m benchmarks.paper.d_readout --data SHARDS --prompts EVAL --out OUT --set schedule.max_steps=1500
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from benchmarks.paper.options import Options, add_arguments, options_of
from benchmarks.paper.report import Experiment, draw, text_of
from benchmarks.paper.runner import run_variants
from benchmarks.provenance import provenance
from dspine_cuda.training.files import write_json

VARIANTS = {"dflash": "DFlash", "full": "DSpine"}
CLAIM = (
    "Qwen3-8B-DFlash-b16, layer 5: 58.3 % for block positions 1-4, 33.7 % for 5-8, 21.5 % for 9-15; at every depth early "
    "positions are read better than late ones, and every group rises with depth"
)


def probes(options: Options) -> dict[str, Any]:
    """Probe results by variant; those on disk are not made again."""
    results = {}
    for name in VARIANTS:
        path = options.out / name / "probes.json"
        if not path.is_file():
            from benchmarks.paper.probe import probe_variant

            write_json(path, probe_variant(name, options))
        results[name] = json.loads(path.read_text(encoding="utf-8"))
    return results


def report(results: dict[str, Any]) -> dict[str, Any]:
    """Accuracy tables, and whether early beats late at every layer and depth helps every group."""
    sentences, holds = [], True
    for name, result in results.items():
        for layer, row in enumerate(result["accuracy"], 1):
            cells = ", ".join(f"{a}-{b}: {100 * v:.1f} %" for (a, b), v in zip(result["groups"], row, strict=True))
            sentences.append(f"{VARIANTS[name]}, layer {layer}: positions {cells}")
        early = all(row[0] > row[-1] for row in result["accuracy"])
        deep = all(last > first for first, last in zip(result["accuracy"][0], result["accuracy"][-1], strict=True))
        sentences.append(f"{VARIANTS[name]}: early above late at every layer: {early}; all groups rise with depth: {deep}")
        holds = holds and early and deep
    return {"probes": results, "holds": holds, "sentences": sentences}


def plot(content: dict[str, Any], axes: Any) -> None:
    """A line a group of positions; dashed for DFlash."""
    for name, result in content["probes"].items():
        for group, (first, last) in enumerate(result["groups"]):
            values = [100 * row[group] for row in result["accuracy"]]
            axes.plot(
                range(1, len(values) + 1), values, marker="o", color=f"C{group}", linestyle="--" if name == "dflash" else "-",
                label=f"{VARIANTS[name]}, positions {first}-{last}",
            )  # fmt: skip
    axes.set_xlabel("drafter layer")
    axes.set_ylabel("read-out accuracy, %")
    axes.legend(fontsize=7)


def write(options: Options, plotted: bool) -> dict[str, Any]:
    """OUT/d.json and OUT/d.png."""
    content = report(probes(options))
    result = {
        "experiment": "d", "title": "read-out accuracy by layer and position", "claim": CLAIM, "temperatures": {"0": content},
        "provenance": provenance(),
    }  # fmt: skip
    write_json(options.out / "d.json", result)
    if plotted:
        draw(
            Experiment("d", result["title"], CLAIM, tuple(VARIANTS), lambda r, h: content, plot), result, options.out / "d.png"
        )
    return result


def main(arguments: list[str] | None = None) -> int:
    """Train what is missing, fit the probes, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--no-plot", action="store_true")
    args = parser.parse_args(arguments)
    options = options_of(args)
    run_variants(tuple(VARIANTS), options)
    print(text_of(write(options, not args.no_plot)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
