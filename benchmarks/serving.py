"""The server under 1, 2, 4, .. clients: aggregate tokens a second with speculation on and off, in one run.

    python -m benchmarks.serving --prompts FOLDER --sets gsm8k,humaneval,mt-bench --clients 1,2,4,8 --out result.json

One `dspine serve` process; requests with `"draft": false` decode plainly, so both sides use the same server, weights and
scheduler, and take turns block by block. Every block sends the same prompts at temperature 0; each client sends its next
request when its last one is answered. --direct also measures what HTTP costs: the same prompts through the Python API
in a process of its own, in turns with the server, at one client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.provenance import provenance
from benchmarks.speedup import read_prompts


@contextmanager
def serving(arguments: list[str], patience: float = 600.0) -> Iterator[tuple[str, int]]:
    """`dspine serve` on a free port: (base URL, process id). Ended with SIGTERM, and must end in good order."""
    command = [sys.executable, "-m", "dspine.common.cli.main", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    assert process.stderr is not None
    deadline, seen, url = time.monotonic() + patience, [], None
    while url is None:
        line = process.stderr.readline()
        seen.append(line)
        if not line or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError("the server did not start:\n" + "".join(seen[-20:]))
        if line.startswith("page http"):
            url = line.split()[1].rstrip("/")
    drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)  # its log, or the pipe fills up
    try:
        yield url, process.pid
    finally:
        process.terminate()
        code = process.wait(60)
        drain.wait(10)
        if code:
            raise RuntimeError(f"the server ended with code {code}")


def chat_body(model: str, prompt: str, max_tokens: int, draft: bool) -> dict[str, Any]:
    """One request of the benchmark."""
    messages = [{"role": "user", "content": prompt}]
    return {"model": model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "draft": draft}


async def one(client: httpx.AsyncClient, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    """Send a request; its text, usage, seconds, and the time to the first chunk where it is streamed."""
    started = time.perf_counter()
    if not stream:
        answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
        text = answer["choices"][0]["message"]["content"]
        return {"text": text, "usage": answer["usage"], "seconds": time.perf_counter() - started}
    text, usage, first = "", None, None
    async with client.stream(
        "POST", "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    ) as r:
        r.raise_for_status()
        async for line in r.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - started
                chunk = json.loads(line[6:])
                usage = chunk.get("usage") or usage
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    return {"text": text, "usage": usage, "seconds": time.perf_counter() - started, "first": first}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (Linux); on a machine that others use too it is steadier than the clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def block(url: str, bodies: list[dict[str, Any]], clients: int, stream: bool, pid: int | None = None) -> dict[str, Any]:
    """All bodies through `clients` clients; tokens a second over the whole block, and over the server's CPU time with `pid`."""
    waiting = iter(list(enumerate(bodies)))
    answers: dict[int, dict[str, Any]] = {}

    async def work(client: httpx.AsyncClient) -> None:
        for index, body in waiting:
            answers[index] = await one(client, body, stream)

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        spent = cpu_seconds(pid) if pid is not None else 0.0
        started = time.perf_counter()
        await asyncio.gather(*[work(client) for _ in range(clients)])
        seconds = time.perf_counter() - started
        spent = cpu_seconds(pid) - spent if pid is not None else 0.0
    ordered = [answers[i] for i in range(len(bodies))]
    tokens = sum(answer["usage"]["completion_tokens"] for answer in ordered)
    spec = [answer["usage"]["speculative"] for answer in ordered]
    firsts = sorted(answer["first"] for answer in ordered if answer.get("first"))
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / spent if spent else None,
        "texts": [answer["text"] for answer in ordered],
        "latencies": [answer["seconds"] for answer in ordered],
        "first_token_median": statistics.median(firsts) if firsts else None,
        "tokens_per_round": (tokens - len(ordered)) / max(sum(s["rounds"] for s in spec), 1),
        "drafted": sum(s["drafted"] for s in spec),
        "accepted": sum(s["accepted"] for s in spec),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All client counts, each side in turn."""
    prompts = [prompt for _, prompt in read_prompts(args.prompts, args.sets.split(","), args.per_set)]
    arguments = ["--model", args.model, "--draft-model", args.draft_model, "--backend", args.backend, "--device", args.device]
    arguments += ["--prefix-cache", str(args.prefix_cache), "--max-concurrency", str(max(args.clients)), *args.serve]
    rows: list[dict[str, Any]] = []
    with serving(arguments) as (url, pid):
        watched = pid if sys.platform == "linux" else None
        facts = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]
        model = facts["id"]
        for draft in (True, False):  # warm up
            asyncio.run(block(url, [chat_body(model, prompt, 8, draft) for prompt in prompts[:2]], 2, True))
        for count in args.clients:
            # enough requests that the last ones, where clients run dry, do not decide
            wanted = max(len(prompts), args.per_client * count)
            some = (prompts * (1 + wanted // len(prompts)))[:wanted]
            for repeat in range(args.repeats):
                sides = [True, False] if repeat % 2 == 0 else [False, True]
                result = {}
                for draft in sides:
                    bodies = [chat_body(model, prompt, args.max_tokens, draft) for prompt in some]
                    result[draft] = asyncio.run(block(url, bodies, count, True, watched))
                same = sum(a == b for a, b in zip(result[True].pop("texts"), result[False].pop("texts"), strict=True))
                ratio = result[True]["tokens_per_second"] / result[False]["tokens_per_second"]
                spent = [result[draft]["tokens_per_cpu_second"] for draft in (True, False)]
                by_cpu = spent[0] / spent[1] if all(spent) else None
                row = {
                    "ratio_by_cpu_time": by_cpu,
                    "clients": count,
                    "repeat": repeat,
                    "requests": len(some),
                    "same_text": same,
                    "ratio": ratio,
                }
                rows.append(row | {"speculative": result[True], "plain": result[False]})
                told = f"{ratio:.2f}x, by CPU time {by_cpu or 0:.2f}x, {same}/{len(some)} same"
                print(f"{count} clients: {told}", file=sys.stderr, flush=True)
        overhead = measure_overhead(args, url, model, prompts) if args.direct else None
    return {**provenance(), "server": facts["dspine"], "summary": summarise(rows), "overhead": overhead, "rows": rows}


def measure_overhead(args: argparse.Namespace, url: str, model: str, prompts: list[str]) -> dict[str, Any]:
    """Seconds a request through HTTP and through the Python API, prompt by prompt, in turns."""
    from dspine.common.generation import load, stream_generate
    from dspine.common.runtimes import choose_runtime

    runtime, reason = choose_runtime(args.backend)
    engine = load(runtime, args.model, args.draft_model, device=args.device, backend_reason=reason)

    def direct(prompt: str, count: int) -> tuple[float, float, int]:
        started, first, number = time.perf_counter(), 0.0, 0
        for _ in stream_generate(engine, prompt, max_tokens=count):
            first = first or time.perf_counter() - started
            number += 1
        return time.perf_counter() - started, first, number

    direct(prompts[0], 8)
    ratios, firsts = [], []
    for repeat in range(args.repeats):
        for i, prompt in enumerate(prompts):
            found: dict[str, tuple[float, float, int]] = {}
            for side in ("http", "direct") if (i + repeat) % 2 else ("direct", "http"):
                if side == "direct":
                    found[side] = direct(prompt, args.max_tokens)
                else:
                    answer = asyncio.run(block(url, [chat_body(model, prompt, args.max_tokens, True)], 1, True))
                    found[side] = (answer["latencies"][0], answer["first_token_median"], answer["tokens"])
            if found["http"][2] == found["direct"][2]:
                ratios.append(found["http"][0] / found["direct"][0])
                firsts.append(found["http"][1] / found["direct"][1])
    return {
        "requests": len(ratios),
        "seconds_http_over_direct": _spread(ratios),
        "first_token_http_over_direct": _spread(firsts),
    }


def _spread(values: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": middle, "quartiles": [low, high]}


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a client count: medians over repeats."""
    table = []
    for count in dict.fromkeys(row["clients"] for row in rows):
        some = [row for row in rows if row["clients"] == count]
        entry = {"clients": count, "ratio": statistics.median(row["ratio"] for row in some)}
        by_cpu = [row["ratio_by_cpu_time"] for row in some if row["ratio_by_cpu_time"]]
        entry["ratio_by_cpu_time"] = statistics.median(by_cpu) if by_cpu else None
        entry["ratios"] = [round(row["ratio"], 3) for row in some]
        for side in ("speculative", "plain"):
            entry[f"{side}_tokens_per_second"] = statistics.median(row[side]["tokens_per_second"] for row in some)
            entry[f"{side}_first_token"] = statistics.median(row[side]["first_token_median"] for row in some)
        entry["tokens_per_round"] = statistics.median(row["speculative"]["tokens_per_round"] for row in some)
        entry["same_text"] = f"{sum(row['same_text'] for row in some)} of {sum(row['requests'] for row in some)}"
        table.append(entry)
    return table


def main() -> None:
    """Parse, measure, print the summary; the whole result goes to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft-model", default="auto")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=Path, required=True, help="folder with <set>.jsonl")
    parser.add_argument("--sets", default="gsm8k,humaneval,mt-bench")
    parser.add_argument("--per-set", type=int, default=4)
    parser.add_argument("--per-client", type=int, default=4, help="requests of each client, at least every prompt once")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--clients", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prefix-cache", type=int, default=0, help="MiB; 0 so that both sides read every prompt")
    parser.add_argument("--direct", action="store_true", help="also measure what HTTP costs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("serve", nargs="*", help="further flags of dspine serve, after --")
    args = parser.parse_args()
    result = measure(args)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}))


if __name__ == "__main__":
    main()
