"""From results to an experiment's report: figures with paired intervals, the article's claim beside ours, a plot."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.options import add_arguments, options_of
from benchmarks.paper.runner import run_variants
from dspine.common.errors import DSpineError
from dspine.common.files import write_json
from dspine_cuda.training.intervals import ratio_interval

Results = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """letter and title; claim: the article's words and figures; variants: what must be trained; report(results, heat) -> our
    figures, with `ours` (the ones the claim is about, in words), `holds` (yes, no, within noise; None: nothing to say) and
    `sentences`; plot(report, axes)."""

    letter: str
    title: str
    claim: str
    variants: tuple[str, ...]
    report: Callable[[Results, str], dict[str, Any]]
    plot: Callable[[dict[str, Any], Any], None]


def block_of(results: Results, variant: str, heat: str, score: str | None = None) -> dict[str, Any]:
    """Summary of a variant's score (its own by default) at one temperature."""
    scores = results[variant]["scores"]
    name = score or next(iter(scores))
    if name not in scores or heat not in scores[name]["temperatures"]:
        raise DSpineError(f"{variant}: not scored as {name} at temperature {heat} (a call without --few-scores adds it)")
    return scores[name]["temperatures"][heat]


def counts_of(block: dict[str, Any]) -> list[np.ndarray]:
    """Tokens and rounds of every prompt, set by set."""
    return [np.array(entry["counts"], dtype=np.float64) for entry in block["sets"].values()]


def tau_of(block: dict[str, Any]) -> dict[str, float]:
    """tau, low, high over the sets."""
    return dict(block["mean"])


def gain(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Relative gain of `ours` over `theirs`, paired over the prompts that both have: {gain, low, high} as fractions."""
    pairs = []
    for name, entry in ours["sets"].items():
        other = theirs["sets"][name]
        shared = [p for p in entry["prompt_ids"] if p in set(other["prompt_ids"])]
        pairs.append(tuple(_rows(block, shared) for block in (entry, other)))
    ratio, low, high = ratio_interval([a for a, _ in pairs], [b for _, b in pairs])
    return {"gain": ratio - 1, "low": low - 1, "high": high - 1}


def _rows(entry: dict[str, Any], prompts: Sequence[int]) -> np.ndarray:
    place = {prompt: row for prompt, row in zip(entry["prompt_ids"], entry["counts"], strict=True)}
    return np.array([place[prompt] for prompt in prompts], dtype=np.float64)


def percent(interval: dict[str, float]) -> str:
    """`+5.1 % [+3.9, +6.2]`."""
    return f"{100 * interval['gain']:+.1f} % [{100 * interval['low']:+.1f}, {100 * interval['high']:+.1f}]"


def together(verdicts: Sequence[str]) -> str:
    """A claim of several parts: `yes` where all hold, `no` where one is refuted, else `within noise`."""
    return "yes" if all(v == "yes" for v in verdicts) else "no" if "no" in verdicts else "within noise"


def verdict(interval: dict[str, float]) -> str:
    """`yes` where the whole interval of a gain is above 0, `no` where it is below, else `within noise`."""
    if interval["low"] > 0:
        return "yes"
    return "no" if interval["high"] < 0 else "within noise"


def bars(axes: Any, names: Sequence[str], blocks: Sequence[dict[str, float]], label: str = "") -> None:
    """tau with intervals."""
    values = np.array([block["tau"] for block in blocks])
    errors = np.abs(np.array([[b["low"], b["high"]] for b in blocks]).T - values)
    axes.bar(range(len(names)), values, yerr=errors, capsize=3, label=label)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
    axes.set_ylabel("tokens a round")
    axes.set_ylim(bottom=max(0.0, float((values - errors[0]).min()) - 0.3))


def line(axes: Any, x: Sequence[float], blocks: Sequence[dict[str, float]], label: str) -> None:
    """tau over a swept setting, with its interval as a band."""
    axes.plot(x, [b["tau"] for b in blocks], marker="o", label=label)
    axes.fill_between(x, [b["low"] for b in blocks], [b["high"] for b in blocks], alpha=0.2)
    axes.set_ylabel("tokens a round")


def build(experiment: Experiment, results: Results, heats: Sequence[str]) -> dict[str, Any]:
    """The report; DSpineError naming what is not trained yet."""
    missing = [name for name in experiment.variants if name not in results]
    if missing:
        raise DSpineError(f"experiment {experiment.letter}: not trained yet: {', '.join(missing)}")
    first = results[experiment.variants[0]]
    for name in experiment.variants:
        _check_equal(experiment, (experiment.variants[0], first), (name, results[name]))
    return {
        "experiment": experiment.letter, "title": experiment.title, "claim": experiment.claim,
        "steps": first["config"]["schedule"]["max_steps"], "target": first["config"]["model"]["target"],
        "temperatures": {heat: experiment.report(results, heat) for heat in heats},
        "provenance": {name: results[name]["provenance"] for name in experiment.variants},
    }  # fmt: skip


def _check_equal(experiment: Experiment, first: tuple[str, Results], other: tuple[str, Results]) -> None:
    """Variants stand side by side only where steps, seed, target and prompts are equal."""
    for words, read in (
        ("steps", lambda r: r["config"]["schedule"]["max_steps"]),
        ("target", lambda r: r["config"]["model"]["target"]),
        ("seed", lambda r: r.get("seed")),
        ("prompts a set", lambda r: max(len(e["counts"]) for b in _first(r).values() for e in b["sets"].values())),
    ):
        one, two = read(first[1]), read(other[1])
        if one != two:
            sides = f"{first[0]} {one}, {other[0]} {two}"
            raise DSpineError(f"experiment {experiment.letter}: {words}: {sides}: cannot be compared")


def _first(result: Results) -> Results:
    """Blocks by temperature of a variant's own score."""
    return dict(next(iter(result["scores"].values()))["temperatures"])


def draw(experiment: Experiment, report: dict[str, Any], path: Path) -> None:
    """One panel a temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heats = report["temperatures"]
    figure, panels = pyplot.subplots(1, len(heats), figsize=(6 * len(heats), 4.2), squeeze=False)
    for axes, (heat, content) in zip(panels[0], heats.items(), strict=True):
        experiment.plot(content, axes)
        axes.set_title(f"({experiment.letter}) {experiment.title}, T = {heat}", fontsize=10)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_report(experiment: Experiment, results: Results, out: Path, heats: Sequence[str], plot: bool) -> dict[str, Any]:
    """OUT/<letter>.json and, with matplotlib, OUT/<letter>.png."""
    report = build(experiment, results, heats)
    write_json(out / f"{experiment.letter}.json", report)
    if plot:
        draw(experiment, report, out / f"{experiment.letter}.png")
    return report


def main_of(
    experiment: Experiment, arguments: list[str] | None = None, probed: tuple[str, ...] = (), heats: tuple[str, ...] = ()
) -> int:
    """The `main` of an experiment's script: train what is missing, then report (heats: at these, not at all temperatures)."""
    parser = argparse.ArgumentParser(description=f"({experiment.letter}) {experiment.title}. The article: {experiment.claim}")
    add_arguments(parser)
    parser.add_argument("--no-plot", action="store_true", help="JSON only (matplotlib is not needed)")
    args = parser.parse_args(arguments)
    options = dataclasses.replace(options_of(args), probed=probed)
    results = run_variants(experiment.variants, options)
    shown = heats or [f"{heat:g}" for heat in options.temperatures]
    report = write_report(experiment, results, options.out, shown, not args.no_plot)
    print(text_of(report))
    return 0


def exit_code(main: Callable[[], int]) -> int:
    """`main`'s, with 2 and one line for what it was given wrongly."""
    try:
        return main()
    except DSpineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def text_of(report: dict[str, Any]) -> str:
    """A few lines for people."""
    lines = [f"({report['experiment']}) {report['title']}, {report['steps']} steps", f"  the article: {report['claim']}"]
    for heat, content in report["temperatures"].items():
        lines += [f"  T = {heat}: {sentence}" for sentence in content["sentences"]]
        if content["holds"] is not None:
            lines.append(f"  T = {heat}: {content['ours']}; does it hold here: {content['holds']}")
    return "\n".join(lines)


def summary_of(reports: Sequence[dict[str, Any]]) -> str:
    """All experiments as one Markdown table: the article's claim, our figure, whether it holds."""
    lines = ["| experiment | the article | T | here | holds |", "| --- | --- | --- | --- | --- |"]
    for report in reports:
        for heat, content in report["temperatures"].items():
            if content["holds"] is not None:
                title = f"({report['experiment']}) {report['title']}, {report['steps']} steps"
                lines.append(f"| {title} | {report['claim']} | {heat} | {content['ours']} | {content['holds']} |")
    return "\n".join(lines) + "\n"
