"""(e) When conditioning arrives: messages from layer l on, and two layers only with the earlier one moved.

Where the article gives a frozen DFlash the correct prefix at chosen layers, these drafters are trained with messages in those
layers alone; the last layer always has them (refinement writes there).

python -m benchmarks.paper.e_timing --data SHARDS --prompts EVAL --out OUT --set schedule.max_steps=1500
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

SUSTAINED = {1: "full", 2: "from_2", 3: "from_3", 4: "from_4", 5: "from_5"}
PAIRS = {1: "pair_1_5", 2: "pair_2_5", 3: "pair_3_5", 4: "from_4"}


def report(results: Results, heat: str) -> dict[str, Any]:
    """tau by first layer, gains over the latest start, and early against late with two layers."""
    content: dict[str, Any] = {"sentences": []}
    for title, names, latest in (("sustained", SUSTAINED, 5), ("pairs", PAIRS, 4)):
        blocks = {layer: block_of(results, name, heat) for layer, name in names.items()}
        gains = {layer: gain(block, blocks[latest]) for layer, block in blocks.items() if layer != latest}
        content[title] = {str(layer): tau_of(block) for layer, block in blocks.items()}
        content[f"{title}_gains"] = {str(layer): g for layer, g in gains.items()}
        words = "messages from layer {} on" if title == "sustained" else "messages in layers {} and 5"
        content["sentences"] += [
            f"{words.format(layer)}: {content[title][str(layer)]['tau']:.2f}, {percent(g)} over {latest}"
            for layer, g in gains.items()
        ]
    early, pair = content["sustained_gains"]["1"], content["pairs_gains"]["2"]
    content["ours"] = f"from layer 1 on {percent(early)} over layer 5 only; layers 2 and 5 {percent(pair)} over 4 and 5"
    content["holds"] = together([verdict(early), verdict(pair)])
    content["sentences"].append(f"earlier is better: sustained {verdict(early)}, two layers {verdict(pair)}")
    return content


def plot(content: dict[str, Any], axes: Any) -> None:
    """Two lines over the first layer."""
    for title, label in (("sustained", "from layer l on"), ("pairs", "layers l and 5")):
        line(axes, [int(layer) for layer in content[title]], list(content[title].values()), label)
    axes.set_xticks(list(SUSTAINED))
    axes.set_xlabel("first layer with messages")
    axes.legend(fontsize=8)


EXPERIMENT = Experiment(
    "e",
    "when conditioning arrives",
    "correct prefixes for a frozen DFlash: +6.7 % from layer 1 on, +2.9 % from 2, 0.0 % from 3; two layers only: L2+L5 +4.3 %, "
    "L3+L5 +2.1 %, L4+L5 +1.2 %: earlier is better at an equal number of layers",
    tuple(dict.fromkeys((*SUSTAINED.values(), *PAIRS.values()))),
    report,
    plot,
)

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main_of(EXPERIMENT)))
