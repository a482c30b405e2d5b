"""Pictures of a report: round latency against length, and where a round's time goes."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from dspine.common.bench.timing import PHASES
from dspine.common.errors import BackendError

TITLE = 110  # letters of a line that fit the picture


def pyplot() -> Any:
    """matplotlib without a display; BackendError where it is absent."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise BackendError("plots need matplotlib, which is not installed: python -m pip install 'dspine[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def write_plots(report: dict[str, Any], folder: Path) -> list[Path]:
    """`lengths.png` and `phases.png` in the folder."""
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, draw in (("lengths", _lengths), ("phases", _phases)):
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        draw(axes, report)
        figure.suptitle(_title(report), fontsize=8)
        figure.savefig(folder / f"{name}.png", dpi=150)
        plt.close(figure)
        made.append(folder / f"{name}.png")
    return made


def _title(report: dict[str, Any]) -> str:
    facts = report["setup"]
    model = f"{facts['random_weights']}, RANDOM weights" if facts["random_weights"] else facts["model"]
    lines = [f"{model}; {facts['runtime']} on {facts['device']}, {facts['dtype']}; commit {report['commit']}"]
    if report["replayed"]:
        lines.append(report["acceptance"])
    return "\n".join(part for line in lines for part in textwrap.wrap(line, TITLE))


def _lengths(axes: Any, report: dict[str, Any]) -> None:
    for row in report["contenders"]:
        for kind, style in (("round", "-"), ("verify", "--")):
            at = [item["length"] for item in row["lengths"]]
            middle, low, high = ([1e3 * item[kind][key] for item in row["lengths"]] for key in ("median", "low", "high"))
            (line,) = axes.plot(at, middle, style, marker="o", markersize=3, label=f"{row['name']}: {kind}")
            axes.fill_between(at, low, high, alpha=0.15, color=line.get_color())
    floors = report["floors"]["lengths"]
    axes.plot([f["length"] for f in floors], [1e3 * f["seconds"] for f in floors], ":", color="black", label="floor (verify)")
    axes.set_xlabel("input tokens verified, the anchor included")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _phases(axes: Any, report: dict[str, Any]) -> None:
    bars = [
        (f"{row['name']}\n{kind}{' (replayed)' if report['replayed'] and kind == 'speculative' else ''}", phases)
        for row in report["contenders"]
        for kind, phases in row["phases"].items()
    ]
    bottoms = [0.0] * len(bars)
    for phase in PHASES:
        heights = [1e3 * phases.get(phase, {}).get("median", 0.0) for _, phases in bars]
        if any(heights):
            axes.bar([label for label, _ in bars], heights, bottom=bottoms, width=0.5, label=phase)
            bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
    axes.set_ylabel("milliseconds a round (medians)")
    if any(bottoms):  # a run of some parts may have none
        axes.legend(fontsize=8)
