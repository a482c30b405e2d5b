"""The MLX runtime on MLX's CUDA back end (or any other): right texts, speeds, and which operation is slow for 2 to 16 rows.

    python -m benchmarks.mlx_cuda --models smollm2,hybrid-tiny --json mlx_cuda.json

`--parts texts`: greedy text, plain and with drafts, against mlx_lm's own `generate_step` on the same modules, up to the
first near-tie, whose margin is printed; a difference at a clear margin ends with exit code 1. Float32 there multiplies in
TF32 unless MLX_ENABLE_TF32=0 is set. `speed`: tokens a second of mlx_lm, of plain decoding and with drafts, taking turns.
`blocks`: a verified block of w rows behind a context that grows, as in life, and behind one that stays. `products`: each
product of the models and of an 8B shape for 1 to 16 rows, at bfloat16, 8 and 4 bits, and attention. Attention through
cuDNN builds a plan for every new length of the keys: MLX_CUDA_USE_CUDNN_SDPA=0 shows what that costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import load_model

from benchmarks.provenance import provenance
from dspine.common.configs import read_config
from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.models import resolve_draft, resolve_model
from dspine.common.selection.policies import StaticPolicy
from dspine.common.tokenizer import encode_prompt, load_tokenizer
from dspine_mlx.arrays import device_name
from dspine_mlx.drafter import MlxDrafter, load_drafter
from dspine_mlx.small_rows import picks_of
from dspine_mlx.targets import wrap_model
from dspine_mlx.targets.layouts import load_options
from dspine_mlx.targets.load import cast
from dspine_mlx.targets.plain import PlainTarget

FORMS = ("float32", "bfloat16", "8", "4")  # 8 and 4: bits, in groups of 64, activations bfloat16 (float32 on the CPU)
ROWS = (1, 2, 4, 8, 16)
NEAR_TIE = 0.25  # margin of the two best logits below which rounding may turn the text
PROMPTS = (
    "Write a Python function that checks whether a number is prime.",
    "List five reasons why bread rises when it is baked.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Explain step by step.",
    "Describe the water cycle to a child of ten.",
)
CHAIN, REPEATS = 8, 12


@dataclass
class Pair:
    """A target in one form, its drafter, and the module that both mlx_lm and the target drive."""

    name: str
    form: str
    model: nn.Module
    target: PlainTarget
    drafter: MlxDrafter
    tokenizer: Any


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


def prompt_ids(pair: Pair, text: str) -> list[int]:
    """The prompt as one user message."""
    return encode_prompt(pair.tokenizer, text, limit=2000)


# -- texts -------------------------------------------------------------------------------------------------------------


def ours(pair: Pair, ids: list[int], count: int, drafts: bool) -> Iterator[tuple[int, Any]]:
    """(token, statistics) of greedy decoding by the round loop."""
    params = DecodingParams(max_tokens=count, break_even=0.0)
    loop = DecodingLoop(pair.target, pair.drafter if drafts else None, ids, params, StaticPolicy())
    for event in loop.run():
        yield event.token, event.stats


def library(pair: Pair, ids: list[int], count: int) -> Iterator[tuple[int, Any]]:
    """(token, None) of mlx_lm's own decoding."""
    for token, _ in generate_step(mx.array(ids), pair.model, max_tokens=count):
        yield int(token), None


def compare_texts(pair: Pair, count: int) -> list[dict[str, Any]]:
    """One row a prompt and way of decoding: how far the text is mlx_lm's, and the margin where it is not."""
    rows = []
    for text in PROMPTS:
        ids = prompt_ids(pair, text)
        expected = [token for token, _ in library(pair, ids, count)]
        for drafts in (False, True):
            got = list(ours(pair, ids, count, drafts))
            tokens = [token for token, _ in got]
            at = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), None)
            row = {"model": pair.name, "form": pair.form, "drafts": drafts, "equal": at if at is not None else len(tokens)}
            if at is not None:
                best, second = sorted(pair.model(mx.array([ids + expected[:at]]))[0, -1].tolist())[:-3:-1]
                row["margin"] = best - second
            row["length"] = got[-1][1].accepted_tokens / max(1, got[-1][1].rounds) + 1.0 if drafts else 1.0
            row["right"] = at is None or row["margin"] < NEAR_TIE
            rows.append(row)
            said = "equal" if at is None else f"differs at token {at}, margin {row['margin']:.4f}"
            print(f"{pair.name} {pair.form} {'drafts' if drafts else 'plain '}: {len(tokens)} tokens, {said}", flush=True)
    return rows


# -- speed -------------------------------------------------------------------------------------------------------------


def tokens_a_second(events: Iterator[tuple[int, Any]]) -> tuple[float, Any]:
    """(tokens after the first over the time they took, the last statistics)."""
    first = last = 0.0
    count, stats = 0, None
    for _, stats in events:  # noqa: B007
        last = perf_counter()
        first = first or last
        count += 1
    return (count - 1) / max(last - first, 1e-9), stats


def compare_speed(pair: Pair, count: int, repeats: int) -> list[dict[str, Any]]:
    """Median tokens a second of the three ways, which take turns; the first turn is for warming up."""
    ways: dict[str, Callable[[list[int]], Iterator[tuple[int, Any]]]] = {
        "mlx_lm": lambda ids: library(pair, ids, count),
        "plain": lambda ids: ours(pair, ids, count, False),
        "drafts": lambda ids: ours(pair, ids, count, True),
    }
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    accepted = []
    for turn in range(repeats + 1):
        for text in PROMPTS:
            for way, run in ways.items():
                speed, stats = tokens_a_second(run(prompt_ids(pair, text)))
                if turn:
                    speeds[way].append(speed)
                if turn and way == "drafts":
                    accepted.append(stats.accepted_tokens / max(1, stats.rounds) + 1.0)
    rows = []
    for way, values in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(values, speeds["mlx_lm"], strict=True))
        row = {"model": pair.name, "form": pair.form, "way": way, "tokens_a_second": statistics.median(values), "ratio": ratio}
        rows.append(row | ({"acceptance": statistics.mean(accepted)} if way == "drafts" else {}))
        print(f"{pair.name} {pair.form} {way}: {row['tokens_a_second']:.1f} tokens/s, {ratio:.2f} of mlx_lm", flush=True)
    return rows


def time_blocks(pair: Pair, context: int, steps: int = 24) -> list[dict[str, Any]]:
    """Milliseconds of verifying w rows where each block stands one token further on, and where none does; and of a draft."""
    rows = []
    widest = max(ROWS)
    ids = mx.arange(3, 3 + context + 2 * steps * len(ROWS) + widest)[None] % pair.target.info.vocab_size
    for grows in (True, False):
        cache = pair.target.make_cache(ids.shape[1])
        drafts = pair.drafter.make_cache(ids.shape[1])
        prefill = pair.target.prefill(cache, ids[:, :context], chunk=256)
        pair.drafter.commit(drafts, prefill.features)
        for w in ROWS:
            times = []
            for _ in range(steps):
                block = ids[:, cache.length : cache.length + w]
                started = perf_counter()
                verification = pair.target.finish(cache, pair.target.begin(cache, block), w)
                mx.eval(verification.logits)
                times.append(perf_counter() - started)
                pair.target.commit(cache, verification, int(grows))
                if grows:
                    pair.drafter.commit(drafts, verification.features[:, :1])
            rows.append(_block_row(pair, f"verify {w} rows", grows, times))
        rows.append(_block_row(pair, "draft", grows, list(_draft_times(pair, drafts, ids, grows, steps))))
    return rows


def _draft_times(pair: Pair, cache: Any, ids: mx.array, grows: bool, steps: int) -> Iterator[float]:
    from dspine.common.protocols import DraftRequest

    feature = mx.zeros((1, 1, pair.drafter.config.feature_size), dtype=pair.drafter.model.dtype)
    for _ in range(steps):
        started = perf_counter()
        mx.eval(pair.drafter.propose(cache, ids[:, 0].astype(mx.int32), DraftRequest()).tokens)
        yield perf_counter() - started
        if grows:
            pair.drafter.commit(cache, feature)


def _block_row(pair: Pair, what: str, grows: bool, times: list[float]) -> dict[str, Any]:
    middle = 1e3 * statistics.median(times[2:])
    where = "context grows" if grows else "context stays"
    print(f"{pair.name} {pair.form} {what}, {where}: {middle:.2f} ms (first {1e3 * times[0]:.1f})", flush=True)
    return {"model": pair.name, "form": pair.form, "what": what, "grows": grows, "ms": middle, "first_ms": 1e3 * times[0]}


# -- products ----------------------------------------------------------------------------------------------------------


def microseconds(run: Callable[[int], mx.array]) -> float | str:
    """Median time of one of `CHAIN` calls evaluated together, or why MLX refuses it."""
    try:
        mx.eval([run(i) for i in range(CHAIN)])
        times = []
        for _ in range(REPEATS):
            started = perf_counter()
            mx.eval([run(i) for i in range(CHAIN)])
            times.append((perf_counter() - started) / CHAIN)
    except (RuntimeError, ValueError) as error:
        return " ".join(str(error).split())[:120]
    return 1e6 * statistics.median(times)


def time_products(pair: Pair) -> list[dict[str, Any]]:
    """Every shape of a linear map in the model, experts too."""
    seen: set[Any] = set()
    rows = []
    picks = picks_of(pair.model)
    dtype = getattr(mx, pair.target.info.dtype)
    for name, layer in pair.model.named_modules():
        if not isinstance(layer, nn.Linear | nn.QuantizedLinear | SwitchLinear | QuantizedSwitchLinear):
            continue
        packed = "scales" in layer
        width = layer["scales"].shape[-1] * layer.group_size if packed else layer["weight"].shape[-1]
        key = (type(layer).__name__, width, layer["weight"].shape)
        if key in seen:
            continue
        seen.add(key)
        times = {w: microseconds(_product(layer, width, w, picks, dtype, name.endswith("down_proj"))) for w in ROWS}
        rows.append(_product_row(f"{pair.name} {pair.form}", f"{name} {width} to {layer['weight'].shape[-2]}", times))
    return rows


def _product(layer: Any, width: int, w: int, picks: int, dtype: mx.Dtype, a_row_a_pick: bool) -> Callable[[int], mx.array]:
    """A call of `layer` on w rows; experts on w tokens of `picks` experts each."""
    if not isinstance(layer, SwitchLinear | QuantizedSwitchLinear):
        x = mx.random.normal((CHAIN, 1, w, width)).astype(dtype)
        mx.eval(x)
        return lambda i: layer(x[i])
    x = mx.random.normal((CHAIN, 1, w, picks if a_row_a_pick else 1, 1, width)).astype(dtype)
    chosen = mx.argsort(mx.random.normal((1, w, layer["weight"].shape[0])), axis=-1)[..., :picks]
    mx.eval(x, chosen)
    return lambda i: layer(x[i], chosen)


def time_shapes(shapes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Products of plain shapes, `CHAIN` weights in turn, so that no cache on the chip holds them."""
    rows = []
    for (width, columns), form in itertools.product(shapes, ("bfloat16", "8", "4")):
        weights = [mx.random.normal((columns, width)).astype(mx.bfloat16) for _ in range(CHAIN)]
        packed = [mx.quantize(weight, 64, int(form)) for weight in weights] if form.isdigit() else []
        mx.eval(weights, packed)
        times = {}
        for w in ROWS:
            x = mx.random.normal((w, width)).astype(mx.bfloat16)
            if packed:
                run = lambda i, x=x, p=packed, b=int(form): mx.quantized_matmul(x, *p[i], group_size=64, bits=b)  # noqa: E731
            else:
                run = lambda i, x=x, p=weights: x @ p[i].T  # noqa: E731
            times[w] = microseconds(run)
        rows.append(_product_row(form if form == "bfloat16" else f"{form} bits", f"{width} to {columns}", times))
    return rows


def time_attention(context: int = 512) -> list[dict[str, Any]]:
    """w queries of 9 heads over 3 K/V heads of 64, causal: the same number of keys each time, and another one each time."""
    keys = mx.random.normal((1, 3, context + 4 * CHAIN * REPEATS + 64, 64)).astype(mx.bfloat16)
    rows = []
    for grows in (False, True):
        times = {}
        for w in ROWS:
            query = mx.random.normal((1, 9, w, 64)).astype(mx.bfloat16)
            turn = itertools.count()

            def attend(i: int, query: mx.array = query, turn: Any = turn, grows: bool = grows, w: int = w) -> mx.array:
                stop = context + w + (next(turn) if grows else 0)
                part = keys[:, :, :stop]
                mask = "causal" if w > 1 else None
                return mx.fast.scaled_dot_product_attention(query, part, part, scale=0.125, mask=mask)

            times[w] = microseconds(attend)
        rows.append(_product_row("attention", f"{context} keys, {'another length' if grows else 'one length'}", times))
    return rows


def _product_row(form: str, what: str, times: dict[int, float | str]) -> dict[str, Any]:
    shown = " ".join(f"{w}:{t:.1f}" if isinstance(t, float) else f"{w}:refused" for w, t in times.items())
    print(f"{form}, {what}: us by rows {shown}", flush=True)
    return {"form": form, "what": what, "us": times}


# -- the page ----------------------------------------------------------------------------------------------------------


def run_pair(pair: Pair, parts: list[str], args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The parts that were asked for, of one pair in one form."""
    found: dict[str, list[dict[str, Any]]] = {}
    if "texts" in parts:
        found["texts"] = compare_texts(pair, args.max_tokens)
    if "speed" in parts:
        found["speed"] = compare_speed(pair, args.max_tokens, args.repeats)
    if "blocks" in parts:
        found["blocks"] = time_blocks(pair, args.context)
    if "products" in parts:
        found["products"] = time_products(pair)
    return found


def main() -> int:
    """Print a line a figure, then write JSON; 1 where a text is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="smollm2,hybrid-tiny")
    parser.add_argument("--forms", default="float32,bfloat16,8,4", help=f"of {', '.join(FORMS)}")
    parser.add_argument("--parts", default="texts,speed,blocks,products")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu"))
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--context", type=int, default=400, help="tokens before the timed blocks")
    parser.add_argument("--shapes", default="4096x4096,4096x12288,12288x4096", help="plain products: width x columns")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device != "auto":
        mx.set_default_device(mx.Device(getattr(mx, args.device)))
    variables = {key: os.environ[key] for key in ("MLX_ENABLE_TF32", "MLX_CUDA_USE_CUDNN_SDPA") if key in os.environ}
    parts = args.parts.split(",")
    report: dict[str, Any] = {"provenance": provenance(), "device": device_name(), "variables": variables}
    print(f"MLX on {report['device']}, {variables or 'no variables set'}", flush=True)
    for name, form in itertools.product(args.models.split(","), args.forms.split(",")):
        if form not in FORMS:
            parser.error(f"--forms: {form!r} is none of {', '.join(FORMS)}")
        for part, rows in run_pair(load_pair(name, form), parts, args).items():
            report.setdefault(part, []).extend(rows)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")
    if "products" in parts and args.shapes:
        report["products"] += time_shapes([tuple(int(n) for n in shape.split("x")) for shape in args.shapes.split(",")])
        report["products"] += time_attention()
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [row for row in report.get("texts", []) if not row["right"]]
    print(f"{len(wrong)} of {len(report.get('texts', []))} texts differ at a clear margin" if "texts" in parts else "done")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
