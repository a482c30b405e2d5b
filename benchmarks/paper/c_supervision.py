"""(c) Layer supervision: none, token cross-entropy, embedding cosine; on the bare backbone (as the article) and on DSpine.

python -m benchmarks.paper.c_supervision --data SHARDS --prompts EVAL --out OUT --set schedule.max_steps=1500
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

BACKBONE = {"none": "dflash_causal", "token": "backbone_token", "cosine": "no_injection"}
DSPINE = {"none": "align_none", "token": "align_token", "cosine": "full"}


def report(results: Results, heat: str) -> dict[str, Any]:
    """tau of each supervision on both models; gains over none."""
    content: dict[str, Any] = {"sentences": [], "mean": {}, "gains": {}}
    for title, names in (("backbone", BACKBONE), ("DSpine", DSPINE)):
        blocks = {kind: block_of(results, name, heat) for kind, name in names.items()}
        content["mean"][title] = {kind: tau_of(block) for kind, block in blocks.items()}
        gains = {kind: gain(blocks[kind], blocks["none"]) for kind in ("token", "cosine")}
        content["gains"][title] = gains
        content["sentences"] += [f"{title}, no layer supervision: {content['mean'][title]['none']['tau']:.2f}"]
        content["sentences"] += [
            f"{title}, {kind}: {content['mean'][title][kind]['tau']:.2f}, {percent(g)}" for kind, g in gains.items()
        ]
    backbone = content["gains"]["backbone"]
    harms = {"no": "yes", "yes": "no"}.get(verdict(backbone["token"]), "within noise")
    content["ours"] = f"backbone: cosine {percent(backbone['cosine'])}, token cross-entropy {percent(backbone['token'])}"
    content["holds"] = together([verdict(backbone["cosine"]), harms])
    content["sentences"].append(f"cosine helps: {verdict(backbone['cosine'])}; token cross-entropy harms: {harms}")
    return content


def plot(content: dict[str, Any], axes: Any) -> None:
    """Three bars a model."""
    names = [f"{title}, {kind}" for title, kinds in content["mean"].items() for kind in kinds]
    bars(axes, names, [entry for kinds in content["mean"].values() for entry in kinds.values()])


EXPERIMENT = Experiment(
    "c",
    "layer supervision",
    "Qwen3-8B on the DFlash backbone, MATH-500 / MBPP / MT-Bench: none 3.75 / 3.48 / 2.91, token cross-entropy 3.67 / 3.40 / "
    "2.84, embedding cosine 3.85 / 3.63 / 2.99: cosine helps, token cross-entropy harms",
    (*BACKBONE.values(), *DSPINE.values()),
    report,
    plot,
)

if __name__ == "__main__":
    sys.exit(exit_code(lambda: main_of(EXPERIMENT)))
