"""(d) How much of the answer can be read off each layer, by position in the block: rank-64 probes on frozen drafters.

python -m benchmarks.paper.d_readout --data SHARDS --prompts EVAL --out OUT --set schedule.max_steps=1500
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.paper.report import Experiment, Results, exit_code, main_of, together, verdict
from dspine.common.errors import DSpineError

VARIANTS = {"dflash": "DFlash", "full": "DSpine"}
CLAIM = (
    "Qwen3-8B-DFlash-b16, layer 5: 58.3 % for block positions 1-4, 33.7 % for 5-8, 21.5 % for 9-15; at every depth early "
    "positions are read better than late ones, and every group rises with depth"
)


def report(results: Results, heat: str = "0") -> dict[str, Any]:
    """Accuracy tables, and whether early beats late at every layer and depth helps every group (of greedy texts)."""
    probes = {name: results[name].get("probes") for name in VARIANTS if name in results}
    missing = [name for name in VARIANTS if not probes.get(name)]
    if missing:
        raise DSpineError(f"experiment d: not probed yet: {', '.join(missing)}")
    sentences, verdicts, deepest = [], [], []
    for name, result in probes.items():
        bounds = result["intervals"]
        for layer, row in enumerate(result["accuracy"], 1):
            cells = [
                f"{a}-{b}: {100 * v:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
                for (a, b), v, (low, high) in zip(result["groups"], row, bounds["groups"][layer - 1], strict=True)
            ]
            sentences.append(f"{VARIANTS[name]}, layer {layer}: positions {', '.join(cells)}")
        deepest.append(sentences[-1])
        early, deep = (together([_above_zero(b) for b in bounds[key]]) for key in ("early_over_late", "depth"))
        sentences.append(f"{VARIANTS[name]}: early above late at every layer: {early}; all groups rise with depth: {deep}")
        verdicts += [early, deep]
    return {"probes": probes, "holds": together(verdicts), "ours": "; ".join(deepest), "sentences": sentences}


def _above_zero(bounds: list[float]) -> str:
    return verdict({"low": bounds[0], "high": bounds[1]})


def plot(content: dict[str, Any], axes: Any) -> None:
    """A line a group of positions, with its interval as a band; dashed for DFlash."""
    for name, result in content["probes"].items():
        for group, (first, last) in enumerate(result["groups"]):
            values = [100 * row[group] for row in result["accuracy"]]
            layers = range(1, len(values) + 1)
            ends = [[100 * row[group][side] for row in result["intervals"]["groups"]] for side in (0, 1)]
            axes.fill_between(layers, *ends, color=f"C{group}", alpha=0.15)
            axes.plot(
                layers, values, marker="o", color=f"C{group}", linestyle="--" if name == "dflash" else "-",
                label=f"{VARIANTS[name]}, positions {first}-{last}",
            )  # fmt: skip
    axes.set_xticks(layers)
    axes.set_xlabel("drafter layer")
    axes.set_ylabel("read-out accuracy, %")
    axes.legend(fontsize=7)


EXPERIMENT = Experiment("d", "read-out accuracy by layer and position", CLAIM, tuple(VARIANTS), report, plot)


def main(arguments: list[str] | None = None) -> int:
    """Train what is missing, fit the probes, report."""
    return main_of(EXPERIMENT, arguments, probed=tuple(VARIANTS), heats=("0",))


if __name__ == "__main__":
    sys.exit(exit_code(main))
