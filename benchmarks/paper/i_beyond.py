"""(i) Beyond the article: messages from two tokens back, refinement of the last two layers, and both; at equal steps.

Beside tau stands what each costs: a draft, and a step of training, over DSpine's own. Timings compare only where variants
ran one at a time on a device.

python -m benchmarks.paper.i_beyond --data SHARDS --prompts EVAL --out OUT --set schedule.max_steps=1500
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.paper.report import Experiment, Results, bars, block_of, exit_code, gain, main_of, percent, tau_of, verdict

NAMES = {"full": "DSpine", "two_hop": "two hops", "refine_two": "two refined layers", "two_hop_refine_two": "both"}


def cost(results: Results, name: str) -> dict[str, float]:
    """Draft and training step over DSpine's, as ratios."""
    ours, base = results[name], results["full"]
    draft = ours["scores"]["walk"]["draft_ms"] / base["scores"]["walk"]["draft_ms"]
    step = ours.get("train", {}).get("ms_per_step", 1.0) / base.get("train", {}).get("ms_per_step", 1.0)
    return {"draft": draft, "step": step}


def report(results: Results, heat: str) -> dict[str, Any]:
    """tau, gain over DSpine, costs; `holds`: the best change gains more than noise."""
    blocks = {name: block_of(results, name, heat) for name in NAMES}
    means = {name: tau_of(block) for name, block in blocks.items()}
    content: dict[str, Any] = {"mean": means, "gains": {}, "costs": {}, "sentences": [f"DSpine: {means['full']['tau']:.2f}"]}
    for name in list(NAMES)[1:]:
        content["gains"][name], content["costs"][name] = gain(blocks[name], blocks["full"]), cost(results, name)
        draft, step = (content["costs"][name][part] for part in ("draft", "step"))
        content["sentences"].append(
            f"{NAMES[name]}: {means[name]['tau']:.2f}, {percent(content['gains'][name])}: "
            f"{verdict(content['gains'][name])}; draft x {draft:.2f}, training step x {step:.2f}"
        )
    content["ours"] = ", ".join(f"{NAMES[name]} {percent(g)}" for name, g in content["gains"].items())
    content["holds"] = verdict(max(content["gains"].values(), key=lambda g: g["gain"]))
    return content


def plot(content: dict[str, Any], axes: Any) -> None:
    """One bar a version."""
    bars(axes, [NAMES[name] for name in content["mean"]], list(content["mean"].values()))


EXPERIMENT = Experiment(
    "i",
    "two hops, two refined layers",
    "not in the article: messages come from the predecessor alone, and the last layer alone is refined",
    tuple(NAMES),
    report,
    plot,
)

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main_of(EXPERIMENT)))
