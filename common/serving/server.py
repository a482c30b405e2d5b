"""Start, say what runs, serve, and stop in good order."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

import uvicorn

from dspine.common.decoding import DecodingParams
from dspine.common.protocols import Engine
from dspine.common.selection.choose import choose_policy
from dspine.common.serving.app import build_app
from dspine.common.serving.http import JsonLines, log_event
from dspine.common.serving.metrics import Metrics
from dspine.common.serving.scheduler import Scheduler
from dspine.common.serving.service import Service
from dspine.common.serving.settings import LOOPBACK, ServerSettings

_CAPTURED = 8192  # tokens: a longer request makes its own arena, and waits for its graphs


class Server:
    """A loaded engine behind an application. `app` is ASGI; `close` ends the worker."""

    def __init__(self, load: Callable[[], Engine], settings: ServerSettings) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.scheduler = Scheduler(lambda: captured(load(), settings), settings.scheduler, self.metrics)
        engine = self.scheduler.start()
        try:
            self.service = Service(engine, settings)
            self.app = build_app(self.service, self.scheduler, settings, self.metrics)
        except BaseException:
            self.scheduler.stop(0)
            raise

    def summary(self) -> dict[str, Any]:
        """What was started: model, drafter, policy, backend and why, batching, memory plan."""
        scheduler, settings = self.scheduler, self.settings.scheduler
        plan = scheduler.bytes_per_token
        return {
            "models": list(self.settings.names),
            **self.service.facts(),
            "batching": scheduler.batches,
            "batching_reason": scheduler.support.reason,
            "graphs": scheduler.rounds is not None or scheduler.slots is not None,
            "graphs_reason": self.graphs_reason,
            "prompts": scheduler.prompts,
            "max_concurrency": settings.max_concurrency,
            "max_queue": settings.max_queue,
            "prefix_cache_bytes": scheduler.prefixes.limit,
            "cache_bytes_per_token": plan,
            "cache_bytes_per_sequence": scheduler.bytes_per_sequence,
            "cache_bytes_at_most": None if plan is None else self._plan(plan),
            "tools": self.service.prompts.takes_tools,
            "structured_output": self.service.grammars.available(),
            "api_key": self.settings.api_key is not None,
        }

    def _plan(self, per_token: int) -> int:
        """Bytes that caches take at most: slots, and as many eager sequences. States lie twice for the moment in which a batch
        takes a new sequence in."""
        scheduler, count = self.scheduler, self.settings.scheduler.max_concurrency
        moved = 2 if scheduler.batches and count > 1 else 1
        each = per_token * self.service.context + moved * scheduler.bytes_per_sequence
        slots = 0 if scheduler.slots is None else scheduler.slots.slots.nbytes
        return slots + each * count + scheduler.prefixes.limit

    @property
    def graphs_reason(self) -> str:
        """Why rounds run as graphs, or not."""
        if self.scheduler.slots is not None:
            return self.scheduler.slots.reason
        if self.settings.scheduler.max_concurrency > 1:
            return self.scheduler.slots_reason
        return self.scheduler.engine.rounds_reason or "this engine has no rounds as graphs"

    def close(self, grace: float = 0.0) -> bool:
        """End the worker; true if every request was finished."""
        self.service.planner.shutdown(wait=False)
        return self.scheduler.stop(grace)


def captured(engine: Engine, settings: ServerSettings) -> Engine:
    """The engine, its graphs of greedy requests captured where this server uses them (on the worker's thread), in an arena as
    long as requests may be, up to `_CAPTURED` tokens: the first request does not wait for it."""
    if engine.rounds is None or settings.scheduler.max_concurrency > 1:
        return engine
    drafts = engine.drafter is not None
    choice = choose_policy(
        settings.policy, engine, calibration=settings.calibration, acceptance=settings.acceptance, draft=drafts
    )
    context = min(engine.target.info.context_length, settings.max_context or _CAPTURED, _CAPTURED)
    params = DecodingParams(max_tokens=max(context - 1, 1), break_even=0)
    loop, _ = engine.rounds.loop(engine.drafter, [0], params, choice.policy)
    if loop is not None:
        while len(loop.output) < 2 and loop.finish_reason is None:
            loop.step()
        loop.finish_reason = "captured"  # it holds the arena no more
    return engine


class _Uvicorn(uvicorn.Server):
    """Tells where it listens once it does (with port 0 only then known)."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[str], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: Any = None) -> None:
        """Bind, then tell."""
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")


def run(load: Callable[[], Engine], settings: ServerSettings, ready: Callable[[str, dict[str, Any]], None]) -> int:
    """Serve until a signal; returns the exit code. `ready` gets the address and the summary.

    On SIGINT or SIGTERM: no new connections, requests in the house finish (for `grace` seconds), then the worker ends.
    """
    set_up_logging()
    server = Server(load, settings)
    summary = server.summary()
    log_event(logging.INFO, "started", **summary)
    if settings.host not in (LOOPBACK, "localhost", "::1") and settings.api_key is None:
        log_event(logging.WARNING, "open to the network without a key", host=settings.host)
    config = uvicorn.Config(
        server.app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=max(int(settings.grace), 1),
        h11_max_incomplete_event_size=64 * 1024,
    )
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises the signal again when it has stopped: no news then
        signal.signal(number, lambda *_: None)
    try:
        _Uvicorn(config, lambda address: ready(address, summary)).run()
    finally:
        finished = server.close(1.0)
        log_event(logging.INFO, "stopped", finished_everything=finished)
    return 0


def set_up_logging(level: int = logging.INFO) -> None:
    """JSON lines on standard error, for this project and uvicorn."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("dspine", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level if name == "dspine" else logging.WARNING)
