"""The MLX runtime on MLX's CUDA back end (or any other): right texts, speeds, and which operation is slow for 2 to 16 rows.

    MLX_ENABLE_TF32=0 python -m benchmarks.mlx_cuda --seconds 100 --json mlx_cuda.json

Figures come in the order of `--parts`, each a part and a form, for all models in turn. Each is printed and written to the JSON
file when it is there; after `--seconds` no further one is begun, and those left out are named. No first run is timed. Where MLX
refuses something, that figure fails with its words and the rest goes on; exit code 1 for a failed figure or a wrong text.

`texts`: greedy text, plain and with drafts, against mlx_lm's own `generate_step` on the same modules, up to the first
near-tie, whose margin is printed; a difference at a clear margin is wrong. `speed`: tokens a second of mlx_lm, of plain
decoding and with drafts, taking turns. `blocks`: a verified block of w rows behind a context that stays, and a draft;
`growing`: behind one that grows, as in life. `operations`: the blocks by their operations (`benchmarks.mlx_operations`).
`compiled`: on CUDA everything before runs our own parts uncompiled, as MLX builds each fused kernel there at its first use, for
seconds; this is `speed` with them. `products`: plain shapes, as of an 8B model.

Of MLX on CUDA: products of packed weights are built at first use, one for each dtype, width of the packing and up to 16, 32,
64, 128 and more rows; float32 multiplies in TF32 unless MLX_ENABLE_TF32=0 is set; MLX_CUDA_USE_CUDNN_SDPA=0 takes attention
off cuDNN, which builds a plan for every new length of the keys; MLX_PTX_CACHE_DIR keeps what was built.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from benchmarks.mlx_operations import ROWS, Operation, operations, shapes
from benchmarks.provenance import provenance
from dspine.common.configs import read_config
from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.errors import DSpineError
from dspine.common.models import resolve_draft, resolve_model
from dspine.common.protocols import DraftRequest
from dspine.common.registry import register_kernel
from dspine.common.selection.policies import StaticPolicy
from dspine.common.tokenizer import encode_prompt, load_tokenizer
from dspine_mlx import fused, lean_gdn
from dspine_mlx.arrays import device_name
from dspine_mlx.drafter import MlxDrafter, load_drafter
from dspine_mlx.targets import wrap_model
from dspine_mlx.targets.layouts import load_options
from dspine_mlx.targets.load import cast
from dspine_mlx.targets.plain import PlainTarget

FORMS = ("float32", "bfloat16", "8", "4")  # 8 and 4: bits, in groups of 64, activations bfloat16 (float32 on the CPU)
PARTS = (
    "texts:float32,speed:bfloat16,blocks:bfloat16,texts:8,speed:8,blocks:8,operations:8,operations:bfloat16,"
    "growing:bfloat16,compiled:bfloat16,compiled:8,products"
)
NEAR_TIE = 0.25  # margin of the two best logits below which rounding may turn the text
VARIABLES = ("MLX_ENABLE_TF32", "MLX_CUDA_USE_CUDNN_SDPA", "MLX_USE_CUDA_GRAPHS", "MLX_DISABLE_COMPILE", "DSPINE_KERNELS")
PROMPTS = (  # 33 to 64 tokens for both models, so that MLX builds its product of packed weights for one size of prompt only
    "Write a Python function that tells whether a number is prime. "
    "Then explain in a few short sentences how it works, and why.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Explain your answer step by step.",
    "Describe the water cycle to a child of ten, with short sentences, and name all the parts of it in their order.",
    "List five reasons why bread rises when it is baked, and say for each of them what a baker can do about it.",
)
CHUNK = 64  # tokens of a prompt at once, for the same reason
SHORT = 8  # tokens of a warm-up
STEPS, PATIENCE = 24, 1.0  # blocks timed, and seconds after which five must do
Tokens = Iterator[tuple[int, Any]]


@dataclass
class Journal:
    """Rows as they are measured: a line each, and the JSON file written anew."""

    path: Path | None
    seconds: float
    started: float = field(default_factory=perf_counter)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def elapsed(self) -> float:
        return perf_counter() - self.started

    def add(self, part: str, row: dict[str, Any], line: str) -> None:
        """A row, in place of the one that says the same thing of fewer turns."""
        rows = self.report.setdefault(part, [])
        same = [i for i, old in enumerate(rows) if "turns" in old and _key(old) == _key(row)]
        if same:
            rows[same[0]] = row
        else:
            rows.append(row)
        print(f"[{self.elapsed:6.1f} s] {part}: {line}", flush=True)
        self.write()

    def write(self) -> None:
        self.report["elapsed"] = round(self.elapsed, 1)
        if self.path is not None:
            self.path.write_text(json.dumps(self.report, indent=1) + "\n")

    def leave_out(self, name: str) -> None:
        """Name a figure that is not there."""
        self.report.setdefault("left_out", []).append(name)
        self.write()

    def run(self, name: str, figure: Callable[[], None]) -> None:
        """One figure, if there is time; what MLX refuses is noted."""
        if self.elapsed >= self.seconds:
            return self.leave_out(name)
        try:
            figure()
        except (RuntimeError, ValueError, DSpineError) as error:
            text = " ".join(str(error).split())[:300]
            self.add("failed", {"figure": name, "error": text}, f"{name}: {text}")


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("model", "form", "way"))


@dataclass
class Pair:
    """A target in one form, its drafter, and the module that both mlx_lm and the target drive."""

    name: str
    form: str
    model: nn.Module
    target: PlainTarget
    drafter: MlxDrafter
    tokenizer: Any

    @property
    def label(self) -> dict[str, str]:
        return {"model": self.name, "form": self.form}

    def __str__(self) -> str:
        return f"{self.name} {self.form}"


def load_pair(name: str, form: str) -> Pair:
    """A shipped pair in one of `FORMS`; quantised here by MLX's own function."""
    folder, draft = resolve_model(name), resolve_draft("auto", name)
    assert draft is not None, f"{name} has no shipped drafter"
    model, config = load_model(folder, **load_options(read_config(folder)))
    bits = int(form) if form.isdigit() else 0
    if bits:
        nn.quantize(model, 64, bits, class_predicate=_fits)
        config = config | {"quantization": {"bits": bits, "group_size": 64}}
    narrow = mx.bfloat16 if form == "bfloat16" or (bits and device_name() != "cpu") else mx.float32
    cast(model, narrow)
    mx.eval(model.parameters())
    target = wrap_model(model, config, name=name)
    return Pair(name, form, model, target, load_drafter(draft, target), load_tokenizer(folder))


def _fits(path: str, layer: Any) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 64 == 0


def use_compiled(pair: Pair, on: bool) -> None:
    """Our own parts with or without `mx.compile`; elsewhere than on CUDA they are as the runtime has them."""
    if device_name() != "cuda":
        return
    pair.drafter.parts.active = on
    for function, supports in fused.OPERATIONS if on else lean_gdn.KERNELS:
        names = {"namespace": "mlx", "device": "cuda", "name": "mlx-compiled" if on else "mlx-lean"}
        register_kernel(function.__name__, function=function, supports=supports, **names)


def prompt_ids(pair: Pair, text: str) -> list[int]:
    """The prompt as one user message."""
    return encode_prompt(pair.tokenizer, text, limit=2000)


# -- texts -------------------------------------------------------------------------------------------------------------


def ours(pair: Pair, ids: list[int], count: int, drafts: bool) -> Tokens:
    """(token, statistics) of greedy decoding by the round loop. It is stopped from outside, so that no shorter block ends
    the text: another length is another shape, whose kernels a GPU may have to build."""
    room = count + pair.drafter.config.block_size + 1
    params = DecodingParams(max_tokens=room, break_even=0.0, prefill_chunk=CHUNK)
    loop = DecodingLoop(pair.target, pair.drafter if drafts else None, ids, params, StaticPolicy())
    with closing(loop.run()) as events:
        for event in islice(events, count):
            yield event.token, event.stats


def library(pair: Pair, ids: list[int], count: int) -> Tokens:
    """(token, logarithms of all probabilities [V]) of mlx_lm's own decoding."""
    for token, logarithms in generate_step(mx.array(ids), pair.model, max_tokens=count, prefill_step_size=CHUNK):
        yield int(token), logarithms


def first_difference(tokens: list[int], expected: list[int]) -> int | None:
    """Index of the first token that is another, None where all are the same."""
    return next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), None)


def margin(logarithms: mx.array) -> float:
    """How far the best logit is above the second."""
    second, best = mx.sort(logarithms.astype(mx.float32))[-2:].tolist()
    return best - second


def compare_texts(pair: Pair, number: int, count: int, journal: Journal) -> None:
    """A row a way of decoding: how far the text of one prompt is mlx_lm's, and the margin where it is not."""
    ids = prompt_ids(pair, PROMPTS[number])
    expected = list(library(pair, ids, count))
    for drafts in (False, True):
        got = list(ours(pair, ids, count, drafts))
        at = first_difference([token for token, _ in got], [token for token, _ in expected])
        row: dict[str, Any] = pair.label | {"prompt": number, "drafts": drafts, "equal": count if at is None else at}
        if at is not None:
            row["margin"] = margin(expected[at][1])
        row["length"] = (len(got) - 1) / max(1, got[-1][1].rounds) if drafts else 1.0
        row["right"] = at is None or row["margin"] < NEAR_TIE
        said = "equal" if at is None else f"differs at token {at}, margin {row['margin']:.4f}"
        journal.add("texts", row, f"{pair} {'drafts' if drafts else 'plain '}: {len(got)} tokens, {said}")


# -- speed -------------------------------------------------------------------------------------------------------------


def tokens_a_second(events: Tokens) -> tuple[float, list[int], Any]:
    """(tokens after the first over the time they took, the tokens, the last statistics)."""
    first = last = 0.0
    tokens, stats = [], None
    for token, stats in events:  # noqa: B007
        last = perf_counter()
        first = first or last
        tokens.append(token)
    return (len(tokens) - 1) / max(last - first, 1e-9), tokens, stats


class Speed:
    """Tokens a second of the three ways on one pair, a turn at a time."""

    def __init__(self, part: str, pair: Pair, count: int, prompts: int, journal: Journal) -> None:
        self.part, self.pair, self.count, self.journal = part, pair, count, journal
        self.ids = [prompt_ids(pair, text) for text in PROMPTS[:prompts]]
        self.speeds: dict[str, list[float]] = {"mlx_lm": [], "plain": [], "drafts": []}
        self.lengths: list[float] = []
        self.equal: dict[str, int] = dict.fromkeys(self.speeds, count)
        self.turns = 0
        for way in self.speeds:
            started = perf_counter()
            list(self.run(way, self.ids[0], SHORT))
            print(f"           {pair} {way}: first run {perf_counter() - started:.1f} s", flush=True)

    def run(self, way: str, ids: list[int], count: int) -> Tokens:
        return library(self.pair, ids, count) if way == "mlx_lm" else ours(self.pair, ids, count, way == "drafts")

    def turn(self) -> None:
        """Every prompt once in every way; the medians of all turns so far."""
        for ids in self.ids:
            expected: list[int] = []
            for way, speeds in self.speeds.items():
                speed, tokens, stats = tokens_a_second(self.run(way, ids, self.count))
                speeds.append(speed)
                expected = expected or tokens
                at = first_difference(tokens, expected)
                self.equal[way] = min(self.equal[way], self.count if at is None else at)
                if way == "drafts":
                    self.lengths.append((len(tokens) - 1) / max(1, stats.rounds))
        self.turns += 1
        for way, speeds in self.speeds.items():
            ratio = statistics.median(a / b for a, b in zip(speeds, self.speeds["mlx_lm"], strict=True))
            row = self.pair.label | {"way": way, "tokens_a_second": statistics.median(speeds), "ratio": ratio}
            row |= {"turns": self.turns, "all": [round(s, 2) for s in speeds], "equal": self.equal[way]}
            row |= {"acceptance": statistics.mean(self.lengths)} if way == "drafts" else {}
            line = f"{row['tokens_a_second']:.1f} tokens/s, {ratio:.2f} of mlx_lm, {self.turns} turns"
            self.journal.add(self.part, row, f"{self.pair} {way}: {line}")


# -- blocks ------------------------------------------------------------------------------------------------------------


class Blocks:
    """Milliseconds of verifying w rows, and of a draft, behind `context` tokens; `grows`: each block stands one further on."""

    def __init__(self, pair: Pair, context: int, grows: bool, journal: Journal) -> None:
        self.pair, self.grows, self.journal = pair, grows, journal
        count = context + 2 * (STEPS + 2) * len(ROWS) + max(ROWS)
        self.ids = mx.arange(3, 3 + count)[None] % pair.target.info.vocab_size
        self.cache, self.drafts = pair.target.make_cache(count), pair.drafter.make_cache(count)
        prefill = pair.target.prefill(self.cache, self.ids[:, :context], chunk=CHUNK)
        pair.drafter.commit(self.drafts, prefill.features)
        self.milliseconds: dict[int, float] = {}

    def verify(self, w: int) -> None:
        target, cache = self.pair.target, self.cache

        def step() -> float:
            block = self.ids[:, cache.length : cache.length + w]
            mx.eval(block)
            started = perf_counter()
            verification = target.finish(cache, target.begin(cache, block), w)
            mx.eval(verification.logits)
            seconds = perf_counter() - started
            target.commit(cache, verification, int(self.grows))
            mx.eval([array for array in (getattr(cache, "states", None),) if array is not None])
            return seconds

        self.milliseconds[w] = self._row(f"verify {w} rows", step)

    def draft(self) -> None:
        drafter, feature = self.pair.drafter, mx.zeros((1, 1, self.pair.drafter.config.feature_size))

        def step() -> float:
            started = perf_counter()
            mx.eval(drafter.propose(self.drafts, self.ids[:, 0].astype(mx.int32), DraftRequest()).tokens)
            seconds = perf_counter() - started
            if self.grows:
                drafter.commit(self.drafts, feature.astype(drafter.model.dtype))
            return seconds

        self._row("draft", step)

    def _row(self, what: str, step: Callable[[], float]) -> float:
        first, times, begun = step(), [], perf_counter()
        step()
        while len(times) < STEPS and (len(times) < 5 or perf_counter() - begun < PATIENCE):
            times.append(step())
        row = self.pair.label | {"what": what, "grows": self.grows, "ms": 1e3 * statistics.median(times)}
        row |= {"least_ms": 1e3 * min(times), "first_ms": 1e3 * first, "steps": len(times)}
        line = f"{self.pair} {what}: {row['ms']:.2f} ms (least {row['least_ms']:.2f}, first {row['first_ms']:.0f})"
        self.journal.add("growing" if self.grows else "blocks", row, line)
        return row["ms"]


def time_operation(label: dict[str, str], operation: Operation, journal: Journal) -> None:
    """One row: microseconds a call by rows, and milliseconds a block."""
    times = operation.microseconds()
    block = {w: t * operation.count / 1e3 for w, t in times.items() if isinstance(t, float)}
    row = label | {"what": operation.name, "count": operation.count, "in_block": operation.in_block}
    row |= {"us": times, "ms_a_block": block}
    shown = " ".join(f"{w}:{t:.1f}" if isinstance(t, float) else f"{w}:refused" for w, t in times.items())
    many = " ".join(f"{w}:{t:.2f}" for w, t in block.items())
    where = " ".join(label.values())
    journal.add("operations", row, f"{where} {operation.name}: us by rows {shown}; x {operation.count} = ms a block {many}")


def summarise(pair: Pair, blocks: Blocks, journal: Journal) -> None:
    """The operations that a block of w rows spends its time in."""
    rows = [row for row in journal.report.get("operations", []) if _key(row) == _key(pair.label) and row["in_block"]]
    for w, whole in blocks.milliseconds.items():
        costs = sorted(((row["ms_a_block"].get(w, 0.0), row["what"]) for row in rows), reverse=True)
        named = sum(cost for cost, _ in costs)
        row = pair.label | {"rows": w, "block_ms": whole, "named_ms": named, "slowest": costs[:4]}
        shown = ", ".join(f"{name} {cost:.2f}" for cost, name in costs[:4])
        journal.add("summary", row, f"{pair} {w} rows: block {whole:.2f} ms, operations {named:.2f}: {shown}")


# -- the page ----------------------------------------------------------------------------------------------------------


class Figures:
    """Everything that `--parts` asks for, in that order; pairs are loaded when they are first needed."""

    def __init__(self, args: argparse.Namespace, journal: Journal) -> None:
        self.args, self.journal = args, journal
        self.models = args.models.split(",")
        self.pairs: dict[tuple[str, str], Pair] = {}
        self.standing: dict[tuple[str, str], Blocks] = {}

    def pair(self, name: str, form: str) -> Pair:
        if (name, form) not in self.pairs:
            started = perf_counter()
            self.pairs[name, form] = load_pair(name, form)
            print(f"           {name} {form}: loaded in {perf_counter() - started:.1f} s", flush=True)
        return self.pairs[name, form]

    def all(self) -> None:
        for item in self.args.parts.split(","):
            part, _, form = item.partition(":")
            if part == "products":
                self.products()
            for name in self.models if part != "products" else ():
                self.journal.run(f"{item} {name}", lambda p=part, n=name, f=form: getattr(self, p)(n, f))

    def texts(self, name: str, form: str) -> None:
        pair = self.pair(name, form)
        use_compiled(pair, False)
        for number in range(self.args.prompts):
            figure = lambda n=number: compare_texts(pair, n, self.args.max_tokens, self.journal)  # noqa: E731
            self.journal.run(f"texts:{form} {name}, prompt {number}", figure)

    def speed(self, name: str, form: str, part: str = "speed") -> None:
        pair = self.pair(name, form)
        use_compiled(pair, part == "compiled")
        speed = Speed(part, pair, self.args.max_tokens, self.args.prompts, self.journal)
        for turn in range(self.args.repeats):
            self.journal.run(f"{part}:{form} {name}, turn {turn}", speed.turn)
        use_compiled(pair, False)

    def compiled(self, name: str, form: str) -> None:
        if device_name() == "cuda":
            self.speed(name, form, "compiled")
        else:
            self.journal.leave_out(f"compiled:{form} {name}: `speed` already runs as the runtime does")

    def blocks_of(self, name: str, form: str, grows: bool) -> Blocks:
        pair = self.pair(name, form)
        use_compiled(pair, False)
        if (found := self.standing.get((name, form))) is None or grows:
            found = Blocks(pair, self.args.context, grows, self.journal)
            if not grows:
                self.standing[name, form] = found
        return found

    def _time_blocks(self, name: str, form: str, grows: bool) -> None:
        found, word = self.blocks_of(name, form, grows), "growing" if grows else "blocks"
        for w in ROWS:
            self.journal.run(f"{word}:{form} {name}, {w} rows", lambda w=w: found.verify(w))
        self.journal.run(f"{word}:{form} {name}, draft", found.draft)

    def blocks(self, name: str, form: str) -> None:
        self._time_blocks(name, form, False)

    def growing(self, name: str, form: str) -> None:
        self._time_blocks(name, form, True)

    def operations(self, name: str, form: str) -> None:
        pair, found = self.pair(name, form), self.blocks_of(name, form, False)
        for operation in operations(pair.model, pair.target, found.cache):
            figure = lambda o=operation: time_operation(pair.label, o, self.journal)  # noqa: E731
            self.journal.run(f"operations:{form} {name}, {operation.name}", figure)
        summarise(pair, found, self.journal)

    def products(self) -> None:
        pairs = [tuple(int(n) for n in shape.split("x")) for shape in self.args.shapes.split(",") if shape]
        for form, operation in shapes(pairs, ("bfloat16", "8", "4")):
            figure = lambda f=form, o=operation: time_operation({"model": "plain shape", "form": f}, o, self.journal)  # noqa: E731
            self.journal.run(f"products {form}, {operation.name}", figure)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2,hybrid-tiny")
    parser.add_argument("--parts", default=PARTS, help=f"part:form, ...; forms: {', '.join(FORMS)}")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no figure is begun after these")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=2, choices=range(1, len(PROMPTS) + 1))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--context", type=int, default=400, help="tokens before the timed blocks")
    parser.add_argument("--shapes", default="4096x4096,4096x12288,12288x4096", help="plain products: width x columns")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    known = ("texts", "speed", "blocks", "growing", "operations", "compiled")
    for item in args.parts.split(","):
        part, _, form = item.partition(":")
        if item != "products" and (part not in known or form not in FORMS):
            parser.error(f"--parts: {item!r} is no part:form of {', '.join(known)} and {', '.join(FORMS)}, nor products")
    return args


def main() -> int:
    """Print and write figures; 1 where a text is wrong or a figure failed."""
    args = _arguments()
    if args.device != "auto":
        mx.set_default_device(mx.Device(getattr(mx, args.device)))
    journal = Journal(args.json, args.seconds)
    variables = {key: os.environ[key] for key in VARIABLES if key in os.environ}
    journal.report |= {"provenance": provenance(), "device": device_name(), "variables": variables}
    print(f"MLX on {device_name()}, {variables or 'no variables set'}", flush=True)
    Figures(args, journal).all()
    journal.write()
    report = journal.report
    texts, failed, left = (report.get(key, []) for key in ("texts", "failed", "left_out"))
    wrong = [row for row in texts if not row["right"]]
    print(f"{len(wrong)} of {len(texts)} texts differ at a clear margin; {len(failed)} figures failed, {len(left)} left out")
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
