"""(b) What each part gives: without refinement, and without injection too.

python -m benchmarks.paper.b_ablation --data SHARDS --prompts EVAL --out OUT --set schedule.max_steps=1500
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.paper.report import (
    Experiment,
    Results,
    bars,
    block_of,
    exit_code,
    gain,
    main_of,
    percent,
    tau_of,
    together,
    verdict,
)

NAMES = {"full": "full", "no_refinement": "no refinement", "no_injection": "no injection either"}


def report(results: Results, heat: str) -> dict[str, Any]:
    """tau of each, losses against the full model; and the full model drafting independently, not trained again."""
    blocks = {name: block_of(results, name, heat) for name in NAMES}
    blocks["full, drafted independently"] = block_of(results, "full", heat, "independent")
    means = {name: tau_of(block) for name, block in blocks.items()}
    losses = {name: gain(block, blocks["full"]) for name, block in blocks.items() if name != "full"}
    steps = {
        "refinement": gain(blocks["full"], blocks["no_refinement"]),
        "injection": gain(blocks["no_refinement"], blocks["no_injection"]),
        "both": gain(blocks["full"], blocks["no_injection"]),
    }
    sentences = [f"{NAMES.get(name, name)}: {means[name]['tau']:.2f}, {percent(g)}" for name, g in losses.items()]
    sentences.insert(0, f"full: {means['full']['tau']:.2f}")
    sentences += [f"{part} helps: {verdict(g)}, {percent(g)}" for part, g in steps.items()]
    return {
        "mean": means, "against_full": losses, "parts": steps, "sentences": sentences,
        "ours": ", ".join(f"{part} {percent(g)}" for part, g in steps.items()),
        "holds": together([verdict(steps["refinement"]), verdict(steps["injection"])]),
    }  # fmt: skip


def plot(content: dict[str, Any], axes: Any) -> None:
    """One bar a version."""
    bars(axes, [NAMES.get(name, name) for name in content["mean"]], list(content["mean"].values()))


EXPERIMENT = Experiment(
    "b",
    "ablation",
    "Qwen3-8B, MATH-500: full 5.49, without refinement 5.11, without injection too 4.93; without refinement 6.6-7.1 % "
    "are lost, without both 8.8-10.7 %",
    tuple(NAMES),
    report,
    plot,
)

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main_of(EXPERIMENT)))
