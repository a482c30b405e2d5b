"""All experiments: train every variant within a budget of minutes, then report what can be reported.

    python -m benchmarks.paper.everything --data SHARDS --prompts EVAL --out OUT --jobs 2 --minutes 25 \\
        --set schedule.max_steps=1500

The same command goes on where it stopped. `--only a,b` picks experiments; `--report-only` trains nothing.
"""

from __future__ import annotations

import argparse
import sys

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
from benchmarks.paper.options import add_arguments, options_of
from benchmarks.paper.report import text_of, write_report
from benchmarks.paper.runner import run_variants
from dspine.common.errors import DSpineError

EXPERIMENTS = {
    m.EXPERIMENT.letter: m.EXPERIMENT
    for m in (a_methods, b_ablation, c_supervision, e_timing, f_sweeps, g_block_size, h_proposal_temperature, i_beyond)
}


def main(arguments: list[str] | None = None) -> int:
    """Train, then one report an experiment; what is not trained yet is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--only", default="a,b,c,d,e,f,g,h,i", help="letters, in the order in which their variants are trained")
    parser.add_argument("--no-plot", action="store_true")
    args = parser.parse_args(arguments)
    options, letters = options_of(args), args.only.split(",")
    unknown = [letter for letter in letters if letter not in (*EXPERIMENTS, "d")]
    if unknown:
        raise DSpineError(f"--only takes letters of a..i, got {', '.join(unknown)}")
    wanted = [name for x in letters for name in (EXPERIMENTS[x].variants if x != "d" else d_readout.VARIANTS)]
    results = run_variants(list(dict.fromkeys(wanted)), options)
    heats = [f"{heat:g}" for heat in options.temperatures]
    for letter in letters:
        try:
            if letter == "d":
                report = d_readout.write(options, not args.no_plot) if all(v in results for v in d_readout.VARIANTS) else None
            else:
                report = write_report(EXPERIMENTS[letter], results, options.out, heats, not args.no_plot)
        except DSpineError as error:
            print(f"({letter}) {error}")
            continue
        print("(d) not trained yet" if report is None else text_of(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
