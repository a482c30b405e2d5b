"""Where a decoding step of the torch target goes: milliseconds at several widths, `transformers`' step beside it, a breakdown.

    python -m benchmarks.profile_cpu_step --model smollm2 --context 192 --repeats 40

Contenders take turns inside one process, so that a slow minute of the machine hits all of them; minima and medians are
shown. `transformers` is timed as `generate` is (one token at a time on a growing cache) and as one bare forward a step.
The last line is one JSON object with machine, versions and commit.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from benchmarks.provenance import provenance
from dspine.common.models import resolve_model
from dspine_cuda.runtime import RUNTIME

WIDTHS = (1, 2, 4, 8, 16)


def interleaved(contenders: dict[str, Callable[[], float]], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each contender: every repeat runs all of them once, after one round of warming up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name, run in contenders.items():
            seconds = run()
            if turn:
                times[name].append(1e3 * seconds)
    return {name: {"min": min(t), "median": statistics.median(t)} for name, t in times.items()}


def target_steps(target: Any, context: int) -> dict[str, Callable[[], float]]:
    """One verification of w tokens behind `context` committed ones, dropped afterwards."""
    ids = torch.randint(3, target.info.vocab_size, (1, context + max(WIDTHS)), generator=torch.Generator().manual_seed(0))
    cache = target.make_cache(context + max(WIDTHS))
    target.prefill(cache, ids[:, :context], chunk=128)

    def step(w: int) -> float:
        block = ids[:, context : context + w]
        for _ in range(2):  # the first one brings the weights back into the caches after another contender's turn
            start = perf_counter()
            verification = target.finish(cache, target.begin(cache, block), w)
            target.commit(cache, verification, 0)
            seconds = perf_counter() - start
        return seconds

    return {f"w={w}": lambda w=w: step(w) for w in WIDTHS}


def plain_decoding(target: Any, context: int, count: int = 8) -> Callable[[], float]:
    """Seconds a token of greedy decoding with the target, one host read a token."""
    ids = torch.randint(3, target.info.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))

    def run() -> float:
        cache = target.make_cache(context + count + 1)
        token = target.prefill(cache, ids, chunk=128).logits.argmax(dim=-1, keepdim=True)
        start = perf_counter()
        for _ in range(count):
            verification = target.finish(cache, target.begin(cache, token), 1)
            target.commit(cache, verification, 1)
            token = target.arrays.to_device(target.arrays.to_host(verification.logits[:, -1].argmax(dim=-1, keepdim=True))[0])
        return (perf_counter() - start) / count

    return run


class Clock:
    """A streamer of `generate` that only notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """One call with the prompt, then one a token."""
        self.times.append(perf_counter())

    def end(self) -> None:
        """Nothing to close."""


def transformers_steps(folder: Any, dtype: torch.dtype, context: int, count: int = 8) -> dict[str, Callable[[], float]]:
    """`generate` (seconds a token beyond the first), and bare forwards on a cache."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.randint(3, model.config.vocab_size, (1, context), generator=torch.Generator().manual_seed(0))
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def generate() -> float:
        clock = Clock()
        options = {"max_new_tokens": 1 + count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
        return (clock.times[-1] - clock.times[1]) / count  # the first entry is the prompt

    @torch.inference_mode()
    def forward() -> float:
        cache = {name: DynamicCache(config=model.config)}
        model(ids, use_cache=True, logits_to_keep=1, **cache)
        start = perf_counter()
        for _ in range(count):
            model(ids[:, :1], use_cache=True, **cache)
        return (perf_counter() - start) / count

    return {"transformers generate": generate, "transformers forward": forward}


def breakdown(step: Callable[[], float], count: int = 10) -> dict[str, float]:
    """Milliseconds a step by torch operation (self time; the profiler slows small operations down), largest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(count):
            step()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_cpu_time_total)
    return {row.key: row.self_cpu_time_total / 1e3 / count for row in rows[:16]}


def main() -> None:
    """Print the tables, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="embedded name, folder or hub id")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=192, help="committed tokens before the step")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--no-transformers", action="store_true")
    options = parser.parse_args()
    folder = resolve_model(options.model)
    target = RUNTIME.load_target(folder, device=options.device, dtype=options.dtype)
    middle = target.info.num_layers // 2
    target.bind_features(sorted({1, middle, target.info.num_layers - 3}))
    steps = target_steps(target, options.context)
    contenders = steps | {"plain decoding": plain_decoding(target, options.context)}
    if not options.no_transformers:
        contenders |= transformers_steps(folder, getattr(torch, target.info.dtype), options.context)
    times = interleaved(contenders, options.repeats)
    print(f"{target.info.name}: {target.info.adapter}; {torch.get_num_threads()} threads, context {options.context}")
    for name, time in times.items():
        print(f"  {name:24s} min {time['min']:8.2f} ms   median {time['median']:8.2f} ms")
    parts = {name: breakdown(steps[name]) for name in ("w=1", "w=8")}
    for name, rows in parts.items():
        print(f"breakdown of {name} (self time, ms a step)")
        for operation, milliseconds in rows.items():
            print(f"  {operation:48s} {milliseconds:8.3f}")
    ratios = {"w=8 / w=1": times["w=8"]["min"] / times["w=1"]["min"]}
    if not options.no_transformers:
        ratios["generate / plain decoding"] = times["transformers generate"]["min"] / times["plain decoding"]["min"]
    print(json.dumps({"times_ms": times, "ratios_of_minima": ratios, "breakdown_ms": parts, "adapter": target.info.adapter,
                      "threads": torch.get_num_threads(), "context": options.context} | provenance()))  # fmt: skip


if __name__ == "__main__":
    main()
