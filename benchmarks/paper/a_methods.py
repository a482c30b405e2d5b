"""(a) Acceptance by method and data set, greedy and at temperature 1.

python -m benchmarks.paper.a_methods --data SHARDS --prompts EVAL --out OUT --set schedule.max_steps=1500
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from benchmarks.paper.report import Experiment, Results, block_of, exit_code, gain, main_of, percent, tau_of, together, verdict

METHODS = {
    "dflash": "DFlash", "dflash_causal": "DFlash, causal", "domino": "Domino", "dspark": "DSpark", "dflash2": "DFlash2",
    "full": "DSpine",
}  # fmt: skip


def report(results: Results, heat: str) -> dict[str, Any]:
    """tau of every method on every set; gains of DSpine over each other method."""
    blocks = {method: block_of(results, method, heat) for method in METHODS}
    means = {method: tau_of(block) for method, block in blocks.items()}
    sets = {m: {n: {k: e[k] for k in ("tau", "low", "high")} for n, e in b["sets"].items()} for m, b in blocks.items()}
    gains = {method: gain(blocks["full"], block) for method, block in blocks.items() if method != "full"}
    sentences = [f"{METHODS[m]}: {t['tau']:.2f} [{t['low']:.2f}, {t['high']:.2f}]" for m, t in means.items()]
    sentences += [f"DSpine over {METHODS[m]}: {percent(g)}: {verdict(g)}" for m, g in gains.items()]
    holds = together([verdict(g) for g in gains.values()])
    ours = "DSpine over " + ", ".join(f"{METHODS[m]} {percent(g)}" for m, g in gains.items())
    return {"mean": means, "sets": sets, "gains": gains, "ours": ours, "holds": holds, "sentences": sentences}


def plot(content: dict[str, Any], axes: Any) -> None:
    """Grouped bars: a group a set."""
    names = [*next(iter(content["sets"].values())), "mean"]
    width = 0.8 / len(METHODS)
    for i, (method, title) in enumerate(METHODS.items()):
        entries = [*content["sets"][method].values(), content["mean"][method]]
        values = np.array([e["tau"] for e in entries])
        errors = np.abs(np.array([[e["low"], e["high"]] for e in entries]).T - values)
        axes.bar(np.arange(len(names)) + i * width, values, width, yerr=errors, capsize=2, label=title)
    axes.set_xticks(np.arange(len(names)) + 0.4 - width / 2, names, rotation=30, ha="right")
    axes.set_ylabel("tokens a round")
    axes.legend(fontsize=8)


EXPERIMENT = Experiment(
    "a",
    "acceptance by method and data set",
    "Qwen3-8B, mean over seven sets, greedy / T = 1: DFlash 3.77 / 3.39, Domino 4.18 / 3.69, DSpark 4.32 / 3.92, "
    "DFlash2 4.39 / 3.90, DSpine 4.82 / 4.42: DSpine above every other method on every set",
    tuple(METHODS),
    report,
    plot,
)

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main_of(EXPERIMENT)))
