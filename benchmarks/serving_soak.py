"""Mixed load for a while: streams, cancellations, long and short, bad requests. Errors, memory and answers are checked.

    python -m benchmarks.serving_soak --prompts FOLDER --minutes 30 --clients 6 --out soak.json

Answers at temperature 0 are compared with the same requests sent alone before the load. Resident memory of the server is
read every second; its growth is the mean of the last fifth over the mean of the second fifth (the first is warm-up).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.provenance import provenance
from benchmarks.serving import chat_body, one, read_prompts, serving

BAD = (
    (b"{", 400),
    (b'{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}', 404),
    (b'{"model": "MODEL", "messages": [], "max_tokens": 4}', 400),
    (b'{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', 400),
    (b'{"model": "MODEL", "messages": [{"role": "user", "content": "\xff"}]}', 400),
    (b'{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "n": 99}', 400),
)
_HEADERS = {"content-type": "application/json"}


@dataclass
class Tally:
    """What happened. `wrong` holds what must not have."""

    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    tokens: int = 0


async def soak(url: str, model: str, prompts: list[str], *, seconds: float, clients: int, longest: int, seed: int = 0) -> Tally:
    """Run the load; the reference answers are made first, one at a time."""
    tally = Tally()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        requests = [(prompt, longest if i % 3 == 0 else max(longest // 4, 4)) for i, prompt in enumerate(prompts)]
        wanted = {}
        for prompt, count in requests:
            wanted[prompt, count] = (await one(client, chat_body(model, prompt, count, True), False))["text"]
        end = time.monotonic() + seconds
        work = [_client(client, model, requests, wanted, tally, end, random.Random(seed + i)) for i in range(clients)]
        await asyncio.gather(*work)
    return tally


async def _client(
    client: httpx.AsyncClient,
    model: str,
    requests: list[tuple[str, int]],
    wanted: Any,
    tally: Tally,
    end: float,
    rng: random.Random,
) -> None:
    kinds = ("whole", "stream", "sampled", "cancelled", "bad", "plain")
    while time.monotonic() < end:
        kind = rng.choices(kinds, weights=(3, 3, 2, 2, 2, 1))[0]
        prompt, count = rng.choice(requests)
        try:
            await _request(client, model, kind, prompt, count, wanted, tally, rng)
        except (httpx.HTTPError, KeyError, ValueError) as error:
            tally.wrong.append(f"{kind}: {type(error).__name__}: {error}"[:300])
        tally.kinds[kind] += 1


async def _request(
    client: httpx.AsyncClient, model: str, kind: str, prompt: str, count: int, wanted: Any, tally: Tally, rng: random.Random
) -> None:
    """One request of a kind, checked."""
    body = chat_body(model, prompt, count, kind != "plain")
    if kind == "bad":
        content, status = rng.choice(BAD)
        answer = await client.post("/v1/chat/completions", content=content.replace(b"MODEL", model.encode()), headers=_HEADERS)
        if answer.status_code != status or "error" not in answer.json():
            tally.wrong.append(f"bad: {answer.status_code} instead of {status}")
    elif kind == "cancelled":
        stop = rng.randrange(6)
        async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            number = 0
            async for _ in response.aiter_lines():
                number += 1
                if number > stop:
                    break
    elif kind == "sampled":
        found = await one(client, body | {"temperature": 0.8, "n": rng.choice((1, 2))}, False)
        tally.tokens += found["usage"]["completion_tokens"]
    else:
        found = await one(client, body, kind == "stream")
        tally.tokens += found["usage"]["completion_tokens"]
        if found["text"] != wanted[prompt, count]:
            tally.differing.append(f"{kind}: {prompt[:60]!r}")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process (Linux)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/status has no VmRSS")


async def _watch(pid: int, samples: list[int]) -> None:
    while True:
        samples.append(resident_bytes(pid))
        await asyncio.sleep(1)


def growth(samples: list[int]) -> float:
    """Mean of the last fifth over the mean of the second fifth, minus 1."""
    fifth = max(len(samples) // 5, 1)
    return statistics.mean(samples[-fifth:]) / statistics.mean(samples[fifth : 2 * fifth]) - 1


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start the server, run the load, check that it is idle and alive afterwards."""
    prompts = read_prompts(args.prompts, args.sets.split(","), args.per_set)
    arguments = ["--model", args.model, "--backend", args.backend, "--device", args.device, *args.serve]
    samples: list[int] = []

    async def run(url: str, pid: int, model: str) -> Tally:
        watcher = asyncio.create_task(_watch(pid, samples))
        tally = await soak(url, model, prompts, seconds=60 * args.minutes, clients=args.clients, longest=args.max_tokens)
        watcher.cancel()
        return tally

    with serving(arguments) as (url, pid):
        facts = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]
        tally = asyncio.run(run(url, pid, facts["id"]))
        time.sleep(2)
        health = httpx.get(f"{url}/health", timeout=60).json()
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
    counters = {
        name: float(value)
        for line in metrics.splitlines()
        if not line.startswith("#") and not line.partition("{")[1]
        for name, value in [line.rsplit(" ", 1)]
        if name.endswith("_total")
    }
    return {
        **provenance(),
        "server": facts["dspine"],
        "minutes": args.minutes,
        "clients": args.clients,
        "requests": dict(tally.kinds),
        "tokens": tally.tokens,
        "wrong": tally.wrong,
        "differing": tally.differing,
        "health_after": health,
        "memory": {"growth": growth(samples), "first": samples[0], "largest": max(samples), "last": samples[-1]},
        "counters": counters,
    }


def main() -> None:
    """Parse, run, print; exit code 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=Path, required=True, help="folder with <set>.jsonl")
    parser.add_argument("--sets", default="gsm8k,humaneval,mt-bench")
    parser.add_argument("--per-set", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("serve", nargs="*", help="further flags of dspine serve, after --")
    args = parser.parse_args()
    result = measure(args)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result))
    sys.exit(bool(result["wrong"]))


if __name__ == "__main__":
    main()
