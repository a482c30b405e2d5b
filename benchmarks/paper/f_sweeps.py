"""(f) Candidates K and width r of the transfer space: acceptance, and what a draft costs.

K is swept on one trained drafter (trained with 16); every r is trained. Milliseconds compare only where variants ran one at a
time on a device.

python -m benchmarks.paper.f_sweeps --data SHARDS --prompts EVAL --out OUT --set schedule.max_steps=1500
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.paper.report import (
    Experiment,
    Results,
    block_of,
    exit_code,
    gain,
    line,
    main_of,
    percent,
    tau_of,
    together,
    verdict,
)
from benchmarks.paper.variants import VARIANTS

LITTLE = 0.01  # a gain below this is not worth more candidates
RANKS = {64: "rank_64", 128: "rank_128", 256: "full", 576: "rank_576"}
TOP_K = {score.top_k: score.name for score in VARIANTS["full"].scores if score.top_k} | {16: "walk"}


def report(results: Results, heat: str) -> dict[str, Any]:
    """tau and milliseconds a draft by K and by r; gains over K = 16 and r = 256."""
    content: dict[str, Any] = {"top_k": {}, "rank": {}, "sentences": []}
    base, scored = block_of(results, "full", heat), results["full"]["scores"]
    for top_k in sorted(TOP_K):
        if TOP_K[top_k] in scored:  # --few-scores leaves the sweep out
            content["top_k"][str(top_k)] = _entry(results, "full", TOP_K[top_k], heat, base)
    for rank, name in RANKS.items():
        content["rank"][str(rank)] = _entry(results, name, "walk", heat, base)
    for title, key in (("K", "top_k"), ("r", "rank")):
        content["sentences"] += [
            f"{title} = {value}: {e['tau']:.2f}, {percent(e['gain'])}, draft {e['draft_ms']:.2f} ms, "
            f"of 32 {e['draft_ms_batch_32']:.2f} ms"
            for value, e in content[key].items()
        ]
    widest = f"r = 576 {percent(content['rank']['576']['gain'])} over 256"
    more = {int(value): e["gain"] for value, e in content["top_k"].items() if int(value) > 16}
    if not more:
        content |= {"ours": widest, "holds": None}
        content["sentences"].append("K is not swept (a call without --few-scores adds it)")
        return content
    content["ours"] = f"K = {max(more)} {percent(more[max(more)])} over 16; {widest}"
    content["holds"] = together([verdict({"low": LITTLE - g["high"], "high": LITTLE - g["low"]}) for g in more.values()])
    content["sentences"].append(f"K above 16 adds less than 1 %: {content['holds']}")
    return content


def _entry(results: Results, variant: str, name: str, heat: str, base: dict[str, Any]) -> dict[str, Any]:
    block, score = block_of(results, variant, heat, name), results[variant]["scores"][name]
    costs = {name: score[name] for name in ("draft_ms", "draft_ms_batch_32")}
    return tau_of(block) | {"gain": gain(block, base)} | costs


def plot(content: dict[str, Any], axes: Any) -> None:
    """tau over K and over r / 16, on one logarithmic axis."""
    for key, label, scale in (("top_k", "K", 1), ("rank", "r / 16", 16)):
        line(axes, [int(value) / scale for value in content[key]], list(content[key].values()), label)
    axes.set_xscale("log", base=2)
    axes.set_xticks([2, 4, 8, 16, 32], ["2", "4", "8", "16", "32"])
    axes.set_xlabel("K, or r / 16")
    axes.legend(fontsize=8)


EXPERIMENT = Experiment(
    "f",
    "candidates K and width r",
    "no sweep published: K = 16 is said to be enough at little extra cost (score work grows with K squared); r = 1024 of 4096",
    tuple(RANKS.values()),
    report,
    plot,
)

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main_of(EXPERIMENT)))
