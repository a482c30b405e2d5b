"""Arguments that every experiment takes, and what becomes of them in a child process."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Options:
    """data: training shards; prompts: folder or files of evaluation prompts; out: where everything goes."""

    out: Path
    data: Path | None
    prompts: tuple[Path, ...]
    config: Path
    overrides: tuple[str, ...]
    count: int
    max_tokens: int
    temperatures: tuple[float, ...]
    jobs: int
    minutes: float
    seed: int
    device: str
    dtype: str
    report_only: bool
    gpus: int = 1
    few_scores: bool = False
    probed: tuple[str, ...] = ()  # variants whose layers are probed too (experiment d)

    @property
    def results(self) -> Path:
        """All figures of all variants so far."""
        return self.out / "results.json"

    @property
    def evaluation(self) -> dict[str, object]:
        """What the scores depend on besides the drafter."""
        from dspine_cuda.training.eval_sets import SETS

        names = sorted(name for path in self.prompts for name in (SETS if path.is_dir() else (path.stem,)))
        return {"count": self.count, "max_tokens": self.max_tokens, "dtype": self.dtype, "sets": names}

    def child_arguments(self) -> list[str]:
        """For `benchmarks.paper.one` (which is told itself whether to probe)."""
        arguments = ["--out", str(self.out), "--config", str(self.config), "--count", str(self.count)]
        arguments += ["--max-tokens", str(self.max_tokens), "--seed", str(self.seed), "--device", self.device]
        arguments += ["--dtype", self.dtype, "--data", str(self.data)]
        for path in self.prompts:
            arguments += ["--prompts", str(path)]
        for heat in self.temperatures:
            arguments += ["--temperature", str(heat)]
        arguments += ["--few-scores"] if self.few_scores else []
        return [*arguments, *(f"--set={text}" for text in self.overrides)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The common flags."""
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="training shards (data.path)")
    parser.add_argument("--prompts", type=Path, action="append", default=[], help="folder with the seven sets, or files")
    parser.add_argument("--config", type=Path, default=ROOT / "examples/train_smollm2/dspine.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="over the config, repeatable")
    parser.add_argument("--count", type=int, default=64, help="prompts a set")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, action="append", default=None)
    parser.add_argument("--jobs", type=int, default=1, help="variants trained at the same time")
    parser.add_argument("--gpus", type=int, default=1, help="CUDA devices that the jobs take in turn")
    parser.add_argument(
        "--few-scores",
        action="store_true",
        help="no sweeps (f and h need them; a later call adds them)",
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="stop (to be continued) after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--report-only", action="store_true", help="train nothing: report what results.json holds")


def options_of(args: argparse.Namespace) -> Options:
    """Parsed flags -> options."""
    return Options(
        out=args.out, data=args.data, prompts=tuple(args.prompts), config=args.config, overrides=tuple(args.set),
        count=args.count, max_tokens=args.max_tokens, temperatures=tuple(args.temperature or (0.0, 1.0)), jobs=args.jobs,
        minutes=args.minutes, seed=args.seed, device=args.device, dtype=args.dtype, report_only=args.report_only,
        gpus=args.gpus, few_scores=args.few_scores,
    )  # fmt: skip
