"""The server under 1, 2, 4, .. clients: speculation, full verification and plain decoding, in one run.

    python -m benchmarks.serving --prompts FOLDER --sets gsm8k,humaneval,mt-bench --clients 1,2,4,8 --budget 330 --out load.json
    python -m benchmarks.serving --prompts categories7.jsonl --device cuda --clients 1,2,4,8,16,32 --budget 75 --out load.json

One `dspine serve` process. A request says what it wants: nothing (the server's own choice), `"draft": "full"` (every draft is
verified) or `"draft": false` (plain decoding); so all sides use the same weights and scheduler, and take turns block by block.
A block sends the same prompts at temperature 0; each client sends its next request when its last one is answered. Before that,
everything is warmed up: every prompt is read once, and every side runs at every number of clients, so that what is captured,
compiled or learnt on first use falls into nobody's time. Cycles over all client counts, every side at each, are repeated until
--budget seconds are over. The first cycle is short, one request a client, and always runs, so every side is measured at every
number of clients whatever happens; it counts only where no longer one fits. Figures are medians over cycles; --out is written
after each of them. Then, at one client, the same prompts go through HTTP and through the Python API in turns: what HTTP costs
(`benchmarks.serving_overhead`; --ignore-eos and flags after `--` concern the load alone).
Needs httpx and what `dspine serve` needs, nothing else.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.provenance import provenance
from benchmarks.serving_overhead import OVERHEAD, measure_overhead
from dspine.common.files import write_json

SIDES: dict[str, Any] = {"speculative": True, "full": "full", "plain": False}  # name -> `draft` of the request


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


def read_prompts(place: Path, sets: Sequence[str], count: int) -> list[str]:
    """User turns of a file, or of each <set>.jsonl in a folder: `count` of each, evenly spaced, so that a file sorted by kind
    gives all kinds."""
    files = [place] if place.is_file() else [place / f"{name}.jsonl" for name in sets]
    prompts = []
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        some = min(count, len(lines))
        chosen = [lines[i * len(lines) // some] for i in range(some)]
        prompts += [json.loads(line)["messages"][0]["content"] for line in chosen]
    return prompts


def chat_body(model: str, prompt: str, max_tokens: int, draft: Any) -> dict[str, Any]:
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


async def block(url: str, bodies: list[dict[str, Any]], clients: int, pid: int | None = None) -> dict[str, Any]:
    """All bodies, streamed, through `clients` clients; tokens a second over the whole block, and over the server's CPU time
    with `pid`."""
    waiting = iter(list(enumerate(bodies)))
    answers: dict[int, dict[str, Any]] = {}

    async def work(client: httpx.AsyncClient) -> None:
        for index, body in waiting:
            answers[index] = await one(client, body, True)

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        spent = cpu_seconds(pid) if pid is not None else 0.0
        started = time.perf_counter()
        await asyncio.gather(*[work(client) for _ in range(clients)])
        seconds = time.perf_counter() - started
        spent = cpu_seconds(pid) - spent if pid is not None else 0.0
    return _told([answers[i] for i in range(len(bodies))], seconds, spent)


def _told(answers: list[dict[str, Any]], seconds: float, spent: float) -> dict[str, Any]:
    """Figures of a block. `http`: what a request took outside the worker, client and network included; `outside_share`: the
    share of its time in which neither its prompt was read nor a round of it ran (several clients wait for each other, too)."""
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    spec = [answer["usage"]["speculative"] for answer in answers]
    times = [answer["usage"]["timings"] for answer in answers]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / spent if spent else None,
        "texts": [answer["text"] for answer in answers],
        "latencies": [answer["seconds"] for answer in answers],
        "first_token": statistics.median(answer["first"] for answer in answers),
        "prefill": statistics.median(t["prefill"] for t in times),
        "first_over_prefill": statistics.median(
            answer["first"] / max(t["prefill"], 1e-9) for answer, t in zip(answers, times, strict=True)
        ),
        "http": statistics.median(answer["seconds"] - t["total"] for answer, t in zip(answers, times, strict=True)),
        "outside_share": statistics.median(
            1 - (t["prefill"] + t["decode"]) / answer["seconds"] for answer, t in zip(answers, times, strict=True)
        ),
        "tokens_per_round": (tokens - len(answers)) / max(sum(s["rounds"] for s in spec), 1),
        "drafted": sum(s["drafted"] for s in spec),
        "accepted": sum(s["accepted"] for s in spec),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All client counts, the sides in turn, cycle after cycle."""
    prompts = read_prompts(args.prompts, args.sets.split(","), args.per_set)
    sides = {name: SIDES[name] for name in args.sides}
    arguments = ["--model", args.model, "--draft-model", args.draft_model, "--backend", args.backend, "--device", args.device]
    arguments += ["--prefix-cache", str(args.prefix_cache), "--max-concurrency", str(max(args.clients)), *args.serve]
    with serving(arguments) as (url, pid):
        watched = pid if sys.platform == "linux" and args.device != "cuda" else None
        facts = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]
        result = {**provenance(), "server": facts["dspine"], "max_tokens": args.max_tokens}
        run_cycles(args, url, facts["id"], prompts, sides, watched, result)
    bodies = [chat_body(args.model, prompt, args.max_tokens, True) for prompt in prompts]
    result["overhead"] = measure_overhead(args, prompts, bodies) if args.direct else None
    return result


def run_cycles(
    args: argparse.Namespace,
    url: str,
    model: str,
    prompts: list[str],
    sides: dict[str, Any],
    pid: int | None,
    result: dict[str, Any],
) -> None:
    """Warm up, then cycles as long as the budget has room for another one. The first one is short, so that every side is
    measured at every client count early; `result` is filled, and written, after each."""
    started = time.monotonic()
    warm_up(args, url, model, prompts, sides)
    result |= {"warm_seconds": time.monotonic() - started, "overhead": None}
    rows: list[dict[str, Any]] = []
    started, longest, sizes, cycle = time.monotonic(), {}, [1], 0
    while sizes:
        before, each = time.monotonic(), sizes[0]
        rows += [_row(args, url, model, prompts, sides, count, each, cycle, pid) for count in args.clients]
        took = time.monotonic() - before
        longest[each], cycle = max(longest.get(each, 0.0), took), cycle + 1
        longest.setdefault(args.per_client, took * _requests(args, args.per_client) / _requests(args, each))
        result |= {"cycles": cycle, "summary": summarise(rows), "rows": rows}
        if args.out is not None:
            write_json(args.out, result)
        left = args.budget - (time.monotonic() - started)
        sizes = [size for size in (args.per_client, 1) if longest[size] < left and cycle < args.cycles]


def _requests(args: argparse.Namespace, each: int) -> int:
    """Requests of a cycle, of one side."""
    return sum(max(args.least, each * count) for count in args.clients)


def warm_up(args: argparse.Namespace, url: str, model: str, prompts: list[str], sides: dict[str, Any]) -> None:
    """Every prompt once (its length may have a graph of its own), then every side at every number of clients: kernels compile,
    graphs are captured, the lengths find their costs. Nothing is left to one side of the first cycle alone."""
    draft = next(iter(sides.values()))
    asyncio.run(block(url, [_body(args, model, prompt, 2, draft) for prompt in prompts], max(args.clients)))
    for draft in sides.values():
        for count in args.clients:
            bodies = [_body(args, model, prompts[i % len(prompts)], args.warm_tokens, draft) for i in range(count)]
            asyncio.run(block(url, bodies, count))


def _body(args: argparse.Namespace, model: str, prompt: str, max_tokens: int, draft: Any) -> dict[str, Any]:
    return chat_body(model, prompt, max_tokens, draft) | ({"ignore_eos": True} if args.ignore_eos else {})


def _row(
    args: argparse.Namespace,
    url: str,
    model: str,
    prompts: list[str],
    sides: dict[str, Any],
    count: int,
    each: int,
    cycle: int,
    pid: int | None,
) -> dict[str, Any]:
    """One block of every side at one number of clients, about `each` requests a client; the first side is another one in every
    cycle, and at every number of clients."""
    wanted = max(args.least, each * count)  # enough that the last ones, where clients run dry, do not decide
    some = [prompts[(i + cycle * wanted) % len(prompts)] for i in range(wanted)]
    names = list(sides)
    turn = (cycle + args.clients.index(count)) % len(names)
    row: dict[str, Any] = {"clients": count, "cycle": cycle, "requests": wanted}
    for name in names[turn:] + names[:turn]:
        bodies = [_body(args, model, prompt, args.max_tokens, sides[name]) for prompt in some]
        row[name] = asyncio.run(block(url, bodies, count, pid))
    texts = [row[name].pop("texts") for name in names]
    row["same_text"] = sum(len(set(answer)) == 1 for answer in zip(*texts, strict=True))
    told = ", ".join(f"{name} {row[name]['tokens_per_second']:.1f}" for name in names)
    print(f"{count} clients: {told} tokens/s, {row['same_text']}/{wanted} same", file=sys.stderr, flush=True)
    return row


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry a client count: medians over its longest cycles; ratios are medians of each cycle's ratio."""
    table = []
    for count in dict.fromkeys(row["clients"] for row in rows):
        most = max(row["requests"] for row in rows if row["clients"] == count)
        some = [row for row in rows if row["clients"] == count and row["requests"] == most]
        sides = [name for name in SIDES if name in some[0]]
        entry: dict[str, Any] = {"clients": count, "cycles": len(some)}
        entry["same_text"] = f"{sum(row['same_text'] for row in some)} of {sum(row['requests'] for row in some)}"
        for side in sides:
            for name in ("tokens_per_second", "first_token", "first_over_prefill", "http", "tokens_per_round"):
                entry[f"{side}_{name}"] = statistics.median(row[side][name] for row in some)
        for other in [side for side in sides if side != "speculative"] if "speculative" in sides else ():
            for name, field in (("tokens_per_second", "ratio"), ("tokens_per_cpu_second", "cpu_ratio")):
                both = [(row["speculative"][name], row[other][name]) for row in some]
                ratios = [a / b for a, b in both if a and b]
                entry[f"{field}_over_{other}"] = statistics.median(ratios) if ratios else None
                entry[f"{field}s_over_{other}"] = [round(ratio, 3) for ratio in ratios]
        table.append(entry)
    return table


def markdown(result: dict[str, Any]) -> str:
    """The load table and the cost of HTTP, for docs."""

    def show(value: Any, form: str = ".2f") -> str:
        return "-" if value is None else format(value, form)

    head = "| clients | speculative tok/s | full tok/s | plain tok/s | over plain | over full | by CPU time, over plain | "
    head += "tokens a round | first token s | of prefill | same texts |"
    lines = [head, "|" + " --- |" * 11]
    for entry in result["summary"]:
        cells = [str(entry["clients"])]
        cells += [show(entry.get(f"{side}_tokens_per_second"), ".1f") for side in SIDES]
        cells += [f"**{show(entry.get('ratio_over_plain'))}**", show(entry.get("ratio_over_full"))]
        cells += [show(entry.get("cpu_ratio_over_plain")), show(entry.get("speculative_tokens_per_round"))]
        cells += [show(entry.get("speculative_first_token"), ".3f"), show(entry.get("speculative_first_over_prefill"))]
        lines.append("| " + " | ".join([*cells, entry["same_text"]]) + " |")
    overhead = result["overhead"]
    if overhead is not None:
        lines.append("")
        lines.append(
            f"At one client, HTTP against the Python API over {overhead['requests']} requests in turns (median, quartiles):"
        )
        lines.append("")
        for name in OVERHEAD:
            found = overhead[name]
            low, high = found["quartiles"] or (None, None)
            lines.append(
                f"- {name.replace('_', ' ')}: {show(found['median'], '.3f')} ({show(low, '.3f')} to {show(high, '.3f')})"
            )
    return "\n".join(lines)


def counts(text: str) -> list[int]:
    """`1,2,4` -> [1, 2, 4]."""
    return [int(part) for part in text.split(",")]


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft-model", default="auto")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=Path, required=True, help="a .jsonl file, or a folder with <set>.jsonl")
    parser.add_argument("--sets", default="gsm8k,humaneval,mt-bench", help="of a folder")
    parser.add_argument("--per-set", type=int, default=4, help="prompts of each set (of a file: in all), evenly spaced")
    parser.add_argument("--clients", type=counts, default=[1, 2, 4, 8])
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SIDES), help="of " + ",".join(SIDES))
    parser.add_argument("--per-client", type=int, default=2, help="requests of a client in a block, from the second cycle on")
    parser.add_argument("--least", type=int, default=3, help="requests of a block at least")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--ignore-eos", action="store_true", help="answers of exactly --max-tokens tokens")
    parser.add_argument("--warm-tokens", type=int, default=24, help="of the warm-up's answers")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for cycles; a short one always runs")
    parser.add_argument("--cycles", type=int, default=20, help="at most")
    parser.add_argument("--prefix-cache", type=int, default=0, help="MiB; 0 so that all sides read every prompt")
    parser.add_argument("--no-direct", dest="direct", action="store_false", help="do not measure what HTTP costs")
    parser.add_argument("--direct-prompts", type=int, default=4)
    parser.add_argument("--direct-seconds", type=float, default=40.0)
    parser.add_argument("--out", type=Path, help="everything, as JSON; written after every cycle")
    parser.add_argument("--markdown", type=Path, help="the tables; they are printed in any case")
    parser.add_argument("serve", nargs="*", help="further flags of dspine serve, after --")
    args = parser.parse_args(argv)
    unknown = [name for name in args.sides if name not in SIDES]
    if unknown or not args.sides or min(args.clients) < 1 or args.per_client < 1:
        parser.error(
            f"--sides takes {', '.join(SIDES)}, --clients and --per-client numbers from 1, "
            f"got {args.sides}, {args.clients} and {args.per_client}"
        )
    return args


def main() -> None:
    """Parse, measure, print the tables; the whole result goes to --out."""
    args = parse()
    result = measure(args)
    if args.out is not None:
        write_json(args.out, result)
    text = markdown(result)
    if args.markdown:
        args.markdown.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
