"""Speculative against plain decoding and against `transformers.generate`, side by side in one run.

    python -m benchmarks.speedup --prompts FOLDER --sets gsm8k,humaneval,mt-bench --per-set 8 --max-tokens 128

FOLDER holds `<set>.jsonl`, rows with `messages` (one user turn). Every prompt runs through all contenders one after
another (the order turns with the prompt), so that a slow minute of the machine hits all of them. Speeds are tokens after
the first over decoding time; the ratio is taken per prompt and reported as median with quartiles, and over the totals.
Greedy text of ours, plain and speculative, is compared token by token (in bfloat16 near-ties may differ; counted).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.provenance import provenance
from dspine.common.generation import generate, load
from dspine.common.models import resolve_model
from dspine.common.runtimes import choose_runtime


def read_prompts(folder: Path, sets: list[str], count: int) -> list[tuple[str, str]]:
    """(set, user turn) pairs, the first `count` of each set."""
    prompts = []
    for name in sets:
        lines = (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
        prompts += [(name, json.loads(line)["messages"][0]["content"]) for line in lines]
    return prompts


def repeats(tokens: list[int]) -> bool:
    """True where one 4-gram occurs 20 times or more: such a text makes acceptance look good."""
    grams: dict[tuple[int, ...], int] = {}
    for i in range(len(tokens) - 3):
        key = tuple(tokens[i : i + 4])
        grams[key] = grams.get(key, 0) + 1
    return bool(grams) and max(grams.values()) >= 20


class TransformersContender:
    """`transformers` generate on the same folder, dtype, device and threads."""

    def __init__(self, model: str, dtype: str, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = resolve_model(model)
        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)

    def run(self, prompt: str, max_tokens: int) -> tuple[int, float]:
        """(tokens after the first, seconds for them): the time to the first token is measured apart and taken off."""
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        inputs = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).to(self.model.device)

        def timed(count: int) -> tuple[int, float]:
            started = perf_counter()
            with self.torch.inference_mode():
                output = self.model.generate(**inputs, max_new_tokens=count, min_new_tokens=1, do_sample=False)
                output[0, -1].item()  # a GPU has done its work when this is read
            return output.shape[1] - inputs["input_ids"].shape[1], perf_counter() - started

        _, first = timed(1)
        count, whole = timed(max_tokens)
        return count - 1, max(whole - first, 1e-9)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run every contender over every prompt."""
    runtime, reason = choose_runtime(args.backend)
    engine = load(
        runtime, args.model, args.draft_model, device=args.device, dtype=args.dtype, backend_reason=reason, graphs=args.graphs
    )
    other = (
        TransformersContender(args.model, engine.target.info.dtype, engine.target.info.device) if args.transformers else None
    )
    options = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "acceptance": args.acceptance,
        "policy": args.policy,
    }
    prompts = read_prompts(args.prompts, args.sets.split(","), args.per_set)
    for draft in (True, False):  # warm up
        generate(engine, prompts[0][1], draft=draft, **{**options, "max_tokens": 16})
    if other is not None:
        other.run(prompts[0][1], 16)
    rows = []
    for index, (name, prompt) in enumerate(prompts):
        row: dict[str, Any] = {"set": name, "index": index}
        contenders = ["speculative"] + ["plain"] * args.plain + ["transformers"] * (other is not None)
        for contender in contenders[index % len(contenders) :] + contenders[: index % len(contenders)]:
            if contender == "transformers":
                count, seconds = other.run(prompt, args.max_tokens)  # type: ignore[union-attr]
                row[contender] = {"tokens": count, "seconds": seconds}
                continue
            result = generate(engine, prompt, draft=contender == "speculative", seed=index, **options)
            stats = result.stats
            row[contender] = {"tokens": stats.generated_tokens - 1, "seconds": stats.decode_seconds}
            row[f"{contender}_ids"] = result.token_ids
            if contender == "speculative":
                row |= {"tau": stats.mean_acceptance_length, "stats": stats.as_dict(), "repeats": repeats(result.token_ids)}
        ids = [row.pop(f"{name}_ids", None) for name in ("speculative", "plain")]
        row["same_text"] = ids[0] == ids[1] if args.plain else None
        rows.append(row)
        print(f"{index + 1}/{len(prompts)} {name}: tau {row['tau']:.2f}", file=sys.stderr, flush=True)
    facts = {
        "backend": engine.runtime,
        "backend_reason": engine.backend_reason,
        "rounds": engine.rounds_reason,
        "adapter": engine.target.info.adapter,
    }
    return {**provenance(), **facts, "dtype": engine.target.info.dtype, "options": options, **summarise(rows), "rows": rows}


def speed(row: dict[str, Any]) -> float:
    """Tokens a second."""
    return row["tokens"] / row["seconds"] if row["seconds"] else 0.0


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians with quartiles, per set and over all."""
    summary: dict[str, Any] = {"prompts": len(rows), "same_text": sum(bool(r["same_text"]) for r in rows)}
    for name in [*dict.fromkeys(r["set"] for r in rows), "all"]:
        some = [r for r in rows if name in ("all", r["set"])]
        entry: dict[str, Any] = {"tau_mean_of_prompts": statistics.mean(r["tau"] for r in some)}
        tokens = sum(r["stats"]["generated_tokens"] - 1 for r in some)
        rounds = sum(r["stats"]["rounds"] for r in some)
        entry |= {"tau": tokens / rounds, "texts_that_repeat": sum(r["repeats"] for r in some)}
        for key, base in (("speedup_over_plain", "plain"), ("speedup_over_transformers", "transformers")):
            ratios = sorted(speed(r["speculative"]) / speed(r[base]) for r in some if base in r)
            if len(ratios) >= 4:
                low, middle, high = statistics.quantiles(ratios, n=4)
                entry[key] = {"median": middle, "quartiles": [low, high]}
        for contender in ("speculative", "plain", "transformers"):
            if contender in some[0]:
                seconds = sum(r[contender]["seconds"] for r in some)
                entry[f"{contender}_tokens_per_second"] = sum(r[contender]["tokens"] for r in some) / seconds
        if "plain" in some[0] and "transformers" in some[0]:
            entry["plain_over_transformers"] = statistics.median(speed(r["plain"]) / speed(r["transformers"]) for r in some)
        entry["draft_share"] = sum(r["stats"]["draft_seconds"] for r in some) / sum(r["stats"]["decode_seconds"] for r in some)
        summary[name] = entry
    return {"summary": summary}


def main() -> None:
    """Parse, measure, print the summary; the whole result goes to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft-model", default="auto")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--graphs", default="auto", help="auto, on or off: rounds as CUDA graphs")
    parser.add_argument("--prompts", type=Path, required=True, help="folder with <set>.jsonl")
    parser.add_argument("--sets", default="gsm8k,humaneval,mt-bench")
    parser.add_argument("--per-set", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--acceptance", default="auto")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--plain", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = measure(args)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "rows"}))


if __name__ == "__main__":
    main()
