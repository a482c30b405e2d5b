"""`python -m tests.serving.ray_main FOLDER`: two toy replicas under Ray Serve on this machine; prints what it found as JSON."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve

from dspine.common import runtimes
from examples.ray_serve.app import deployment
from tests.packaging.tree import ROOT
from tests.serving.toys import Point, ToyRuntime, toy_engine, toy_settings


def main() -> None:
    folder = Path(sys.argv[1])

    def load_engine():
        runtime = ToyRuntime()
        runtimes._registered = lambda: {"toy": Point(runtime)}
        return toy_engine(folder)

    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment, logging_level="error")
    try:
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(deployment(load_engine, toy_settings(), num_replicas=2, ray_actor_options={"num_cpus": 0.1}))
        print(json.dumps(talk(f"http://127.0.0.1:{port}")))
    finally:
        serve.shutdown()
        ray.shutdown()


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(content: str) -> dict[str, Any]:
    """A request."""
    messages = [{"role": "user", "content": content}]
    return {"model": "toy", "messages": messages, "max_tokens": 12, "temperature": 0}


def talk(url: str) -> dict[str, Any]:
    """Conversations in sessions of their own, a stream, an error; and which replicas had them."""
    found: dict[str, Any] = {"texts": [], "cached": []}
    path = "/v1/chat/completions"
    with httpx.Client(base_url=url, timeout=60) as client:
        deadline = time.monotonic() + 60
        while len(replicas(client)) < 2 and time.monotonic() < deadline:  # until the proxy routes to both
            client.post(path, json=ask("hello"))
        for number in range(6):
            headers = {"x-session-id": f"session {number}"}
            content = f"{number} is a conversation of its own, " * 3
            answers = [client.post(path, json=ask(content), headers=headers).json() for _ in range(4)]
            found["texts"].append([answer["choices"][0]["message"]["content"] for answer in answers])
            found["cached"].append([answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers])
        with client.stream("POST", path, json=ask("hello") | {"stream": True}) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
        found["stream"] = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
        found["whole"] = client.post(path, json=ask("hello")).json()["choices"][0]["message"]["content"]
        found["status"] = [client.post(path, json=ask("x") | {"n": 99}).status_code, client.get("/health").status_code]
        found["replicas"] = len(replicas(client))
    return found


def replicas(client: httpx.Client) -> set[str]:
    """Different answers of /metrics: every replica has counters of its own. Ours are told apart by the time of their start."""
    found = set()
    for number in range(12):
        text = client.get("/metrics", headers={"x-session-id": f"probe {number}"}).text
        found |= {line for line in text.splitlines() if line.startswith("dspine_rejected_created")}
    return found


if __name__ == "__main__":
    main()
