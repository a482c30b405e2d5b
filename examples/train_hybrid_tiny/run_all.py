"""Steps 2 to 5 (GPU): pretrain hybrid-tiny, store and describe it, let it write its drafter's data, train the drafter, collect.

    python examples/train_hybrid_tiny/run_all.py --data DATA --work WORK --out OUT [--stages pretrain,finish,...]

Every stage reads what earlier ones left in WORK, so they can run in separate calls; one that was interrupted continues from its
newest checkpoint (pretrain, drafter) or starts again (the others). After `finish` the stored model alone (WORK/hybrid-tiny) is
enough to go on. Progress goes to standard error and to WORK/run_all.log.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspine.common.errors import DSpineError
from dspine.common.stored import expand_stored, write_stored
from dspine_cuda.training.config import load_train_config
from dspine_cuda.training.data import load_conversations
from dspine_cuda.training.devices import pick_device
from dspine_cuda.training.hybrid_config import load_pretrain_config
from dspine_cuda.training.hybrid_generate import GenerationPlan, generate_shards
from dspine_cuda.training.hybrid_model import HybridModel, load_model
from dspine_cuda.training.hybrid_pretrain import Pretrainer
from dspine_cuda.training.hybrid_report import make_report
from dspine_cuda.training.hybrid_shape import PREFIX, write_cards
from dspine_cuda.training.loop import Trainer

HERE = Path(__file__).resolve().parent
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
PART_BYTES = 15 * 2**20
PROBE_STEPS = 100
RESERVE_SECONDS = 45.0  # of the drafter's minutes: compiling again, the last evaluation, the export


class Driver:
    """The stages, each a method."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work, self.data = options, options.work, options.data
        self.work.mkdir(parents=True, exist_ok=True)
        self.device = pick_device(options.device)
        self.dtype = getattr(torch, options.dtype)
        self.stored, self.expanded = self.work / "hybrid-tiny", self.work / "hf"
        self.started = time.perf_counter()

    def log(self, text: str) -> None:
        """One line with the seconds since the start."""
        line = f"[{time.perf_counter() - self.started:7.1f}s] {text}\n"
        sys.stderr.write(line)
        with (self.work / "run_all.log").open("a", encoding="utf-8") as file:
            file.write(line)

    def write(self, name: str, content: dict[str, Any]) -> None:
        """A JSON file in the work folder."""
        (self.work / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def pretrainer(self, resume: bool) -> Pretrainer:
        """The pretraining run of this work folder."""
        folders = [str(self.data / name) for name in ("conversations", "text") if (self.data / name).is_dir()]
        paths = [f"data={json.dumps(folders)}", f"tokenizer={self.data / 'tokenizer'}", f"output_dir={self.work / 'pretrain'}"]
        paths += [f"device={self.options.device}", f"dtype={self.options.dtype}"]
        length = (
            []
            if any(o.startswith("max_steps=") for o in self.options.pretrain)
            else [f"minutes={self.options.pretrain_minutes}"]
        )
        config = load_pretrain_config(self.options.pretrain_config, [*paths, *length, *self.options.pretrain])
        return Pretrainer(config, resume)

    def pretrain(self) -> None:
        """Masters in WORK/pretrain/checkpoints."""
        resume = any((self.work / "pretrain" / "checkpoints").glob("step-*.pt"))
        run = self.pretrainer(resume)
        self.log(f"pretraining from step {run.step}: {len(run.stream.conversations):,} documents")
        summary = run.run()
        self.log(f"pretraining: {json.dumps(summary)}")
        self.write("pretrain.json", summary)

    def finish(self) -> None:
        """Masters -> the stored model -> the expanded folder -> the report."""
        run = self.pretrainer(resume=True)
        if run.step == 0:
            raise DSpineError(f"{self.work}: no pretraining checkpoint to finish")
        tensors = run.masters.tensors_to_store(PREFIX)
        write_stored(self.stored, tensors, {PREFIX + name: form for name, form in run.masters.forms.items()})
        write_cards(run.model.shape, self.stored)
        for name in TOKENIZER_FILES:
            shutil.copyfile(self.data / "tokenizer" / name, self.stored / name)
        self._expand()
        size = sum(path.stat().st_size for path in self.stored.iterdir())
        self.log(f"stored: {size:,} bytes ({size / 2**20:.2f} MiB)")
        if self.options.masters:
            self._keep_masters(tensors)
        self.report(run.held_out, self._cost_of_rounding(run))

    def _cost_of_rounding(self, run: Pretrainer) -> dict[str, float]:
        """Perplexity on a few held-out rows with rounded and with unrounded weights."""
        found = {}
        for name, rounding in (("unrounded", False), ("rounded", True)):
            run.masters.rounding = rounding
            run.masters.refresh()
            found[name] = run.evaluate()["held_out_perplexity"]
        return found

    def report(self, held_out: list[Any], rounding: dict[str, float]) -> None:
        """WORK/report.json, made with the stored model's weights."""
        from tokenizers import Tokenizer

        report = make_report(self.model(), held_out, Tokenizer.from_file(str(self.stored / "tokenizer.json")))
        report["perplexity_by_rounding"] = rounding
        self.write("report.json", report)
        short = {
            name: report[name]
            for name in ("perplexity", "perplexity_by_rounding", "routing_novelty", "least_used_share", "most_used_share")
        }
        self.log(f"report: {json.dumps(short)}")
        for sample in report["samples"][:3]:
            self.log(f"sample: {json.dumps(sample)}")

    def _keep_masters(self, tensors: dict[str, np.ndarray]) -> None:
        """The weights before rounding, bfloat16, for storing them in another width later."""
        from dspine.common.quantization import bfloat16_bits
        from dspine.common.stored import write_safetensors

        write_safetensors(self.work / "masters.safetensors", {n: ("BF16", bfloat16_bits(a)) for n, a in tensors.items()})

    def _expand(self) -> None:
        self.expanded.mkdir(parents=True, exist_ok=True)
        expand_stored(self.stored, self.expanded)

    def model(self) -> HybridModel:
        """The stored model, expanded."""
        if not (self.stored / "storage.json").is_file():
            raise DSpineError(f"{self.stored}: no stored model; run the stage `finish`, or copy a stored model there")
        if not (self.expanded / "model.safetensors").is_file():
            self._expand()
        return load_model(self.expanded, self.device, self.dtype)

    def generate(self) -> None:
        """WORK/generated: the model's own answers to every prompt, held-out prompts last."""
        found = load_conversations(self.data / "conversations")
        prompts = [c.tokens[: c.prompt_length].astype(np.int64) for c in found]
        options = self.options
        plan = GenerationPlan(
            minutes=options.generate_minutes, batch=options.generate_batch, max_new=options.max_new, holdout=options.holdout
        )
        summary = generate_shards(self.model(), prompts, self.work / "generated", plan)
        self.log(f"generated: {json.dumps(summary)}")
        self.write("generate.json", summary)

    def drafter(self) -> None:
        """WORK/drafter: as many steps as fit into the time, measured by a short run first."""
        self.model()
        begun = time.perf_counter()
        paths = [f"model.target={self.expanded}", f"data.path={self.work / 'generated'}", f"run.device={self.options.device}"]
        paths += [f"run.dtype={self.options.dtype}", "run.progress=false"]
        overrides = [*paths, *self.options.drafter]
        output = f"run.output_dir={self.work / 'drafter'}"
        if not any(o.startswith("schedule.max_steps=") for o in overrides):
            overrides.append(f"schedule.max_steps={self._drafter_steps(overrides, begun)}")
        resume = any((self.work / "drafter" / "checkpoints").glob("step-*.pt"))
        config = load_train_config(self.options.drafter_config, [*overrides, output])
        self.log(f"drafter: {config.schedule.max_steps} steps")
        summary = Trainer(config, resume).run()
        self.log(f"drafter: {json.dumps(summary)}")
        self.write("drafter.json", summary)

    def _drafter_steps(self, overrides: list[str], begun: float) -> int:
        """How many steps the rest of the drafter's minutes hold; remembered, so that a continued run keeps its schedule."""
        remembered = self.work / "drafter_steps.json"
        if remembered.is_file():
            return int(json.loads(remembered.read_text(encoding="utf-8"))["steps"])
        probe = self.work / "drafter-probe"
        shutil.rmtree(probe, ignore_errors=True)
        extra = [f"schedule.max_steps={PROBE_STEPS}", "run.log_every=20", "run.eval_every=0", "run.eval_conversations=16"]
        config = load_train_config(self.options.drafter_config, [*overrides, *extra, f"run.output_dir={probe}"])
        milliseconds = Trainer(config).run()["ms_per_step"]
        spent = time.perf_counter() - begun
        left = 60.0 * self.options.drafter_minutes - spent - RESERVE_SECONDS
        steps = max(200, int(1000.0 * left / milliseconds))
        self.log(f"drafter: {milliseconds:.1f} ms a step measured in {spent:.0f} s, {left:.0f} s left")
        self.write("drafter_steps.json", {"steps": steps, "ms_per_step": milliseconds})
        return steps

    def collect(self) -> None:
        """OUT: hybrid-tiny.tar, drafter.tar, logs.tar and, with --masters, masters.part*: each below 15 MiB."""
        out = self.options.out
        out.mkdir(parents=True, exist_ok=True)
        pack(out / "hybrid-tiny.tar", self.stored, [p.name for p in sorted(self.stored.glob("*")) if p.is_file()])
        folder = next(iter(sorted((self.work / "drafter").glob("drafter-*bit"))), None)
        if folder is not None:
            pack(out / "drafter.tar", folder, [path.name for path in sorted(folder.iterdir())])
        names = [str(p.relative_to(self.work)) for p in sorted(self.work.rglob("*")) if p.suffix in (".json", ".jsonl", ".log")]
        kept = [n for n in names if not n.startswith(("hf/", "hybrid-tiny/")) and "/drafter-" not in f"/{n}"]
        pack(out / "logs.tar.gz", self.work, kept)
        masters = self.work / "masters.safetensors"
        if masters.is_file():
            raw = masters.read_bytes()
            for number, start in enumerate(range(0, len(raw), PART_BYTES)):
                (out / f"masters.part{number}").write_bytes(raw[start : start + PART_BYTES])
        self.log("collected: " + ", ".join(f"{p.name} {p.stat().st_size:,}" for p in sorted(out.iterdir())))


def pack(path: Path, folder: Path, names: list[str]) -> None:
    """Files of `folder` as one tar file."""
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name in names:
            archive.add(folder / name, arcname=name)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that prepare.py wrote")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="where `collect` puts what is worth keeping (default: WORK/out)")
    parser.add_argument("--stages", default="pretrain,finish,generate,drafter,collect")
    parser.add_argument("--pretrain-minutes", type=float, default=8.0)
    parser.add_argument("--generate-minutes", type=float, default=2.0)
    parser.add_argument("--drafter-minutes", type=float, default=6.0)
    parser.add_argument("--generate-batch", type=int, default=2048)
    parser.add_argument("--max-new", type=int, default=288, help="answer tokens")
    parser.add_argument("--holdout", type=int, default=500, help="last conversations, never trained on")
    parser.add_argument("--masters", action="store_true", help="also keep the weights before rounding (bfloat16)")
    parser.add_argument("--pretrain-config", type=Path, default=HERE / "pretrain.yaml")
    parser.add_argument("--drafter-config", type=Path, default=HERE / "drafter.yaml")
    parser.add_argument("--pretrain", action="append", default=[], metavar="KEY=VALUE", help="over pretrain.yaml")
    parser.add_argument("--drafter", action="append", default=[], metavar="SECTION.KEY=VALUE", help="over drafter.yaml")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    options = parser.parse_args()
    options.out = options.out or options.work / "out"
    return options


def main() -> int:
    """Run the stages in order; bad input is one line on stderr and exit code 2."""
    options = parse()
    driver = Driver(options)
    stages: dict[str, Callable[[], None]] = {
        name: getattr(driver, name) for name in ("pretrain", "finish", "generate", "drafter", "collect")
    }
    chosen = options.stages.split(",")
    unknown = [name for name in chosen if name not in stages]
    if unknown:
        sys.stderr.write(f"error: unknown stages {', '.join(unknown)}; known: {', '.join(stages)}\n")
        return 2
    torch.set_float32_matmul_precision("high")
    try:
        for name in chosen:
            driver.log(f"stage {name}")
            stages[name]()
    except DSpineError as error:
        driver.log(f"error: {error}")
        return 2
    driver.log("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
