"""The calibration report: PNG plots (matplotlib) and one HTML page that shows them with the figures behind them."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.errors import BackendError
from dspine.common.selection.calibrate import CalibrationRun
from dspine.common.selection.fitting import ECE_BINS

_SIZE = (6.4, 4.2)


def pyplot() -> Any:
    """matplotlib without a window, or a BackendError that says how to install it."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise BackendError(
            "the report needs matplotlib, which is not installed: python -m pip install 'dspine[calibrate]'"
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def write_report(run: CalibrationRun, folder: Path) -> Path:
    """Write `index.html` and its PNG files into `folder` (made where absent); returns the page."""
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    plots: dict[str, tuple[str, Callable[[Any, CalibrationRun], None]]] = {
        "reliability": ("Prefix probabilities against what was accepted", _reliability),
        "cost": ("Round time by verified length, with the quadratic fit", _cost),
        "lengths": ("Expected against realised accepted drafts", _lengths),
        "choices": ("Lengths that the nominal policy takes on the capture run", _choices),
    }
    if run.calibration.routing is not None:
        plots["experts"] = ("New (layer, expert) pairs by position", _experts)
    if run.captured.usage is not None:
        plots["usage"] = ("Expert usage by layer", _usage)
    for name, (_, draw) in plots.items():
        figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
        draw(axes, run)
        figure.savefig(folder / f"{name}.png", dpi=120, metadata={"Software": None})
        plt.close(figure)
    page = folder / "index.html"
    page.write_text(_page(run, {name: title for name, (title, _) in plots.items()}), encoding="utf-8")
    return page


def reliability_points(probability: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean probability, observed share, count) of each bin that holds something."""
    p, y = probability.ravel(), label.ravel().astype(float)
    index = np.minimum((p * ECE_BINS).astype(int), ECE_BINS - 1)
    count, sums, hits = (np.bincount(index, w, ECE_BINS) for w in (None, p, y))
    some = count > 0
    return sums[some] / count[some], hits[some] / count[some], count[some]


def _reliability(axes: Any, run: CalibrationRun) -> None:
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for captured, survival, name in _sides(run):
        label, _ = captured.rounds.labels()
        p, share, count = reliability_points(survival, label)
        figures = run.calibration.figures if name == "calibration" else run.calibration.figures["test"]
        axes.plot(p, share, marker="o", label=f"{name}: ECE {figures['ece_prefix']:.4f}, {count.sum()} labels")
    axes.set(
        xlabel="predicted probability that drafts 1..i are all accepted", ylabel="share that was", xlim=(0, 1), ylim=(0, 1)
    )
    axes.legend()


def _sides(run: CalibrationRun) -> list[tuple[Any, np.ndarray, str]]:
    sides = [(run.captured, run.survival, "calibration")]
    if run.test is not None and run.test_survival is not None:
        sides.append((run.test, run.test_survival, "test"))
    return sides


def _cost(axes: Any, run: CalibrationRun) -> None:
    cost = run.calibration.cost
    rows = [np.array(run.seconds[w]) * 1e3 for w in cost.lengths]
    low, high = ([float(np.quantile(row, q)) for row in rows] for q in (0.25, 0.75))
    axes.fill_between(cost.lengths, low, high, alpha=0.2, label="middle half of the rounds")
    axes.plot(cost.lengths, np.array(cost.measured) * 1e3, marker="o", linestyle="", label="median")
    axes.plot(cost.lengths, (np.array(cost.target) + cost.fixed) * 1e3, label="quadratic fit")
    axes.set(xlabel="verified length w (anchor included)", ylabel="round time, ms", ylim=(0, None))
    axes.legend()


def _lengths(axes: Any, run: CalibrationRun) -> None:
    for captured, survival, name in _sides(run):
        expected = survival.sum(axis=1)
        order = np.argsort(expected, kind="stable")
        groups = np.array_split(order, min(20, len(order)))
        x = [expected[group].mean() for group in groups]
        y = [captured.rounds.accepted[group].mean() for group in groups]
        axes.plot(x, y, marker="o", label=f"{name}, groups of equal size")
    top = float(run.survival.shape[1])
    axes.plot([0, top], [0, top], color="0.7", linewidth=1)
    axes.set(xlabel="expected accepted drafts of the full block", ylabel="accepted drafts, mean")
    axes.legend()


def _choices(axes: Any, run: CalibrationRun) -> None:
    cost = run.calibration.cost
    score = np.cumsum(run.survival, axis=1) - run.calibration.rate * np.array(cost.target)
    chosen = 2 + np.argmax(score, axis=1)
    axes.bar(cost.lengths, [float((chosen == w).mean()) for w in cost.lengths], label=f"nominal, mean {chosen.mean():.2f}")
    best = np.maximum(run.captured.rounds.accepted + 1, 2)
    axes.plot(cost.lengths, [float((best == w).mean()) for w in cost.lengths], color="C1", marker="o", label="accepted + 1")
    axes.set(xlabel="verified length", ylabel="share of rounds")
    axes.legend()


def _experts(axes: Any, run: CalibrationRun) -> None:
    routing, width = run.calibration.routing, run.calibration.identity.block_size
    assert routing is not None
    positions = np.arange(1, width)
    axes.plot(positions, np.array(routing.pairs)[1:width], marker="o", color="k", label="mean")
    for n, column in enumerate(np.array(routing.pairs_given)[1:width].T):
        axes.plot(positions, column, linewidth=1, label=f"{n} new in layer 0")
    correlation = "none" if routing.correlation is None else f"{routing.correlation:.2f}"
    axes.set(xlabel="tokens before it in the block", ylabel="new (layer, expert) pairs", title=f"correlation {correlation}")
    axes.legend(fontsize="small")


def _usage(axes: Any, run: CalibrationRun) -> None:
    usage = run.captured.usage
    assert usage is not None
    image = axes.imshow(usage / usage.sum(axis=1, keepdims=True) * usage.shape[1], aspect="auto", cmap="viridis", vmin=0)
    axes.figure.colorbar(image, label="times the even share")
    axes.set(xlabel="expert", ylabel="MoE layer")


def _page(run: CalibrationRun, titles: dict[str, str]) -> str:
    made = run.calibration
    pieces = [
        f"<h2>{html.escape(title)}</h2><img src='{name}.png' alt='{html.escape(title)}'>" for name, title in titles.items()
    ]
    facts = {
        "identity": made.identity.model_dump(),
        "rho (tokens/s)": made.rate,
        "s (us a token)": made.cost.stage_zero * 1e6,
        "eta (us an expert)": made.cost.expert * 1e6,
        "fixed (ms a round)": made.cost.fixed * 1e3,
        "figures": made.figures,
        "provenance": made.provenance,
    }
    rows = "".join(
        f"<tr><th>{html.escape(key)}</th><td><pre>{html.escape(json.dumps(value, indent=1))}</pre></td></tr>"
        for key, value in facts.items()
    )
    style = (
        "body{font-family:sans-serif;max-width:60em;margin:2em auto}th{text-align:left;vertical-align:top;padding-right:1em}"
    )
    title = f"Calibration of {made.identity.drafter_name} for {made.identity.target_name}"
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(title)}</title><style>{style}</style>"
        f"</head><body><h1>{html.escape(title)}</h1>{''.join(pieces)}<h2>Figures</h2><table>{rows}</table></body></html>\n"
    )
