"""(g) Block size from 4 to 32, with equal block rows a step. Milliseconds compare only where variants ran one at a time on
a device.

python -m benchmarks.paper.g_block_size --data SHARDS --prompts EVAL --out OUT --set schedule.max_steps=1500
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.paper.report import Experiment, Results, block_of, exit_code, gain, line, main_of, percent, tau_of, verdict

BLOCKS = {4: "block_4", 8: "full", 12: "block_12", 16: "block_16", 24: "block_24", 32: "block_32"}


def report(results: Results, heat: str) -> dict[str, Any]:
    """tau and milliseconds a draft by block size; gains over 8."""
    base = block_of(results, "full", heat)
    content: dict[str, Any] = {"blocks": {}, "sentences": []}
    for block, name in BLOCKS.items():
        score, ours = results[name]["scores"]["walk"], block_of(results, name, heat)
        entry = tau_of(ours) | {"gain": gain(ours, base)}
        content["blocks"][str(block)] = entry | {"draft_ms": score["draft_ms"]}
        content["sentences"].append(
            f"block {block}: {entry['tau']:.2f}, {percent(entry['gain'])} over 8, draft {score['draft_ms']:.2f} ms"
        )
    best = max(content["blocks"], key=lambda block: content["blocks"][block]["tau"])
    content["best"] = int(best)
    longer = content["blocks"]["16"]["gain"]
    content["holds"] = verdict(longer)  # what blocks of 16 would be chosen for
    content["ours"] = f"16 rows {percent(longer)} over 8; the longest acceptance has block {best}"
    content["sentences"].append(content["ours"])
    return content


def plot(content: dict[str, Any], axes: Any) -> None:
    """tau over the block size."""
    line(axes, [int(block) for block in content["blocks"]], list(content["blocks"].values()), "DSpine")
    axes.set_xticks(list(BLOCKS))
    axes.set_xlabel("block size (anchor included)")


EXPERIMENT = Experiment(
    "g",
    "block size",
    "the article drafts in blocks of 16 throughout (an anchor and 15 drafts); it sweeps no other size",
    tuple(BLOCKS.values()),
    report,
    plot,
)

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main_of(EXPERIMENT)))
