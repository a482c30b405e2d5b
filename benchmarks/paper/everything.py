"""All experiments: train every variant within a budget of minutes, then report what can be reported.

    python -m benchmarks.paper.everything --data SHARDS --prompts EVAL --out OUT --jobs 4 --minutes 25 \\
        --set schedule.max_steps=1500

The same command goes on where it stopped. `--only b,c` picks experiments, and their order is the order of training: a run that
is cut leaves the first ones whole. `--dry-run` prints what would be trained and how long it takes; `--report-only` trains
nothing. Each experiment is written (OUT/<letter>.json and OUT/summary.md) as soon as its last variant is there, plots at the
end.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.paper import (
    a_methods,
    b_ablation,
    c_supervision,
    d_readout,
    e_timing,
    f_sweeps,
    g_block_size,
    h_proposal_temperature,
    i_beyond,
)
from benchmarks.paper.options import Options, add_arguments, options_of
from benchmarks.paper.plan import Costs, add_cost_arguments, make_plan, plan_text
from benchmarks.paper.report import Results, exit_code, summary_of, text_of, write_report
from benchmarks.paper.runner import run_variants
from dspine.common.errors import DSpineError

EXPERIMENTS = {
    m.EXPERIMENT.letter: m.EXPERIMENT
    for m in (
        a_methods,
        b_ablation,
        c_supervision,
        d_readout,
        e_timing,
        f_sweeps,
        g_block_size,
        h_proposal_temperature,
        i_beyond,
    )
}
ORDER = "a,b,c,g,i,e,d,f,h"


class Reports:
    """Writes what can be written of the wanted experiments."""

    def __init__(self, letters: Sequence[str], options: Options, plots: bool) -> None:
        self._letters, self._options, self._plots = letters, options, plots
        self._heats = [f"{heat:g}" for heat in options.temperatures]
        self._written: dict[str, dict[str, Any]] = {}
        self.missing: dict[str, str] = {}  # why an experiment has no report

    def write(self, results: Results, plots: bool = False) -> list[dict[str, Any]]:
        """The reports that there are, in order; those written before are not made again (unless for their plots)."""
        for letter in self._letters:
            if letter in self._written and not plots:
                continue
            try:
                heats = ["0"] if letter == "d" else self._heats
                self._written[letter] = write_report(EXPERIMENTS[letter], results, self._options.out, heats, plots)
                self.missing.pop(letter, None)
            except DSpineError as error:
                self.missing[letter] = str(error)
        reports = [self._written[letter] for letter in self._letters if letter in self._written]
        (self._options.out / "summary.md").write_text(summary_of(reports), encoding="utf-8")
        return reports

    def finish(self, results: Results) -> None:
        """All of them with their plots, printed."""
        for report in self.write(results, self._plots):
            print(text_of(report))
        for letter, why in self.missing.items():
            print(f"({letter}) {why}")


def main(arguments: list[str] | None = None) -> int:
    """Train, then one report an experiment; what is not trained yet is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    add_cost_arguments(parser)
    parser.add_argument("--only", default=ORDER, help="letters, in the order in which their variants are trained")
    parser.add_argument("--no-plot", action="store_true")
    args = parser.parse_args(arguments)
    options, letters = options_of(args), args.only.split(",")
    unknown = [letter for letter in letters if letter not in EXPERIMENTS]
    if unknown:
        raise DSpineError(f"--only takes letters of a..i, got {', '.join(unknown)}")
    if "d" in letters:
        options = dataclasses.replace(options, probed=tuple(d_readout.VARIANTS))
    wanted = list(dict.fromkeys(name for letter in letters for name in EXPERIMENTS[letter].variants))
    if args.dry_run:
        costs = Costs(args.step_ms, args.score_seconds, args.start_seconds)
        plan = make_plan(wanted, options, costs)
        print(plan_text({letter: EXPERIMENTS[letter].variants for letter in letters}, plan, options.minutes))
        return 0
    reports = Reports(letters, options, not args.no_plot)
    reports.finish(run_variants(wanted, options, reports.write))
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
