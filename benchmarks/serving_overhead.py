"""What HTTP costs: the same prompts through the server and through the Python API, in turns, on the very same weights.

The server runs in this process, as threads; its client is a process of its own. With the Python API in another process the
figure was worth little: on a CPU two processes that load the same model differ by up to a tenth in how fast they decode (where
their pages happen to lie), whatever they do with it. `benchmarks.serving` runs this at its end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OVERHEAD = (
    "seconds_http_over_direct",
    "rounds_http_over_direct",  # reading and rounds on the server over the whole of the direct call: do they run slower there?
    "cpu_http_over_direct",  # CPU time of this process for both: steadier than the clock on a busy machine
    "first_token_http_over_direct",
    "first_token_over_prefill",
    "outside_rounds_share",
)
_ROOT = Path(__file__).resolve().parents[1]
Own = tuple[float, float, int, float]  # seconds, seconds to the first token, tokens, CPU seconds
Ask = Callable[[dict[str, Any]], dict[str, Any]]


@contextmanager
def hosted(args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """A server in this process: (base URL, its engine)."""
    import uvicorn

    from dspine.common.generation import load
    from dspine.common.runtimes import choose_runtime
    from dspine.common.serving.scheduler import SchedulerSettings
    from dspine.common.serving.server import Server
    from dspine.common.serving.settings import ServerSettings

    runtime, reason = choose_runtime(args.backend)
    drafter = None if args.draft_model == "none" else args.draft_model
    scheduler = SchedulerSettings(max_concurrency=max(args.clients), prefix_bytes=args.prefix_cache * 2**20)
    server = Server(
        lambda: load(runtime, args.model, drafter, device=args.device, backend_reason=reason),
        ServerSettings(names=(args.model,), port=0, scheduler=scheduler),
    )
    web = uvicorn.Server(uvicorn.Config(server.app, port=0, log_config=None, access_log=False, lifespan="off"))
    thread = threading.Thread(target=web.run, daemon=True)
    thread.start()
    try:
        while not web.started:
            if not thread.is_alive():
                raise RuntimeError("the server's thread ended while starting")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{web.servers[0].sockets[0].getsockname()[1]}", server.scheduler.engine
    finally:
        web.should_exit = True
        thread.join(30)
        server.close(5.0)


@contextmanager
def asking(url: str) -> Iterator[Ask]:
    """A client in a process of its own: body -> what `benchmarks.serving.block` tells of it."""
    command = [sys.executable, "-m", "benchmarks.serving_overhead", url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    assert process.stdin is not None and process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        requests.write(json.dumps(body) + "\n")
        requests.flush()
        line = answers.readline()
        if not line:
            raise RuntimeError("the client ended; its error is above")
        return json.loads(line)

    try:
        yield ask
    finally:
        requests.close()
        process.wait(30)
        answers.close()


def measure_overhead(args: argparse.Namespace, prompts: list[str], bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """Every prompt once at least and on until --direct-seconds are over; the side that goes first takes turns, too."""
    from dspine.common.generation import stream_generate

    found: dict[str, list[float]] = {name: [] for name in OVERHEAD}
    with hosted(args) as (url, engine), asking(url) as ask:

        def direct(prompt: str, count: int) -> Own:
            started, spent, first, number = time.perf_counter(), time.process_time(), 0.0, 0
            for _ in stream_generate(engine, prompt, max_tokens=count):
                first = first or time.perf_counter() - started
                number += 1
            return time.perf_counter() - started, first, number, time.process_time() - spent

        def through_http(body: dict[str, Any]) -> dict[str, Any]:
            spent = time.process_time()
            return ask(body) | {"cpu": time.process_time() - spent}

        direct(prompts[0], 8)
        ask(bodies[0] | {"max_tokens": 8})
        until = time.monotonic() + args.direct_seconds
        turn = 0
        while turn < min(len(prompts), args.direct_prompts) or time.monotonic() < until:
            prompt, body = prompts[turn % len(prompts)], bodies[turn % len(prompts)]
            if turn % 2:
                answer = through_http(body)
                compare(found, answer, direct(prompt, args.max_tokens))
            else:
                own = direct(prompt, args.max_tokens)
                compare(found, through_http(body), own)
            turn += 1
    return {"requests": len(found[OVERHEAD[0]]), **{name: spread(values) for name, values in found.items()}}


def compare(found: dict[str, list[float]], answer: dict[str, Any], own: Own) -> None:
    """Add the figures of one prompt; over `own` only where both gave as many tokens."""
    seconds, first, tokens, spent = own
    found["first_token_over_prefill"].append(answer["first_over_prefill"])
    found["outside_rounds_share"].append(answer["outside_share"])
    if answer["tokens"] != tokens:
        return
    latency = answer["latencies"][0]
    found["seconds_http_over_direct"].append(latency / seconds)
    found["rounds_http_over_direct"].append((1 - answer["outside_share"]) * latency / seconds)
    found["cpu_http_over_direct"].append(answer["cpu"] / spent)
    found["first_token_http_over_direct"].append(answer["first_token"] / first)


def spread(values: list[float]) -> dict[str, Any]:
    """Median and quartiles; None where there are no values."""
    if not values:
        return {"median": None, "quartiles": None}
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": middle, "quartiles": [low, high]}


def main() -> None:
    """The client's process: a body a line in, figures a line out."""
    from benchmarks.serving import block

    for line in sys.stdin:
        answer = asyncio.run(block(sys.argv[1], [json.loads(line)], 1))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
