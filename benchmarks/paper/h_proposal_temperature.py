"""(h) Beyond the article: drafts at another temperature than the target's, under the rejection rule (which stays lossless).

python -m benchmarks.paper.h_proposal_temperature --data SHARDS --prompts EVAL --out OUT --set schedule.max_steps=1500
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.paper.report import Experiment, Results, block_of, exit_code, gain, line, main_of, percent, tau_of, verdict
from benchmarks.paper.variants import VARIANTS

HEATS = {score.draft_heat: score.name for score in VARIANTS["full"].scores if score.draft_heat} | {1.0: "walk"}


def report(results: Results, heat: str) -> dict[str, Any]:
    """tau by the drafter's temperature over the target's; gains over the same temperature."""
    if float(heat) == 0:
        return {"heats": {}, "holds": None, "ours": "", "sentences": ["greedy drafts have no temperature"]}
    base = block_of(results, "full", heat)
    blocks = {factor: block_of(results, "full", heat, HEATS[factor]) for factor in sorted(HEATS)}
    content: dict[str, Any] = {
        "heats": {f"{factor:g}": tau_of(block) | {"gain": gain(block, base)} for factor, block in blocks.items()}
    }
    content["sentences"] = [
        f"drafts at {factor} T: {e['tau']:.2f}, {percent(e['gain'])}" for factor, e in content["heats"].items()
    ]
    others = {factor: e["gain"] for factor, e in content["heats"].items() if factor != "1"}
    best = max(others, key=lambda factor: others[factor]["gain"])
    content["ours"] = f"the best other temperature, {best} T: {percent(others[best])}"
    content["holds"] = verdict(others[best])
    content["sentences"].append(f"another temperature pays: {content['holds']}")
    return content


def plot(content: dict[str, Any], axes: Any) -> None:
    """tau over the factor."""
    if content["heats"]:
        line(axes, [float(factor) for factor in content["heats"]], list(content["heats"].values()), "DSpine")
    axes.set_xlabel("drafter's temperature / target's")


EXPERIMENT = Experiment(
    "h", "temperature of the proposals", "not in the article: it drafts at the target's temperature", ("full",), report, plot
)

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main_of(EXPERIMENT)))
