"""`dspine serve` as a Ray Serve deployment: replicas over GPUs and nodes, autoscaling, conversations kept on one replica.

    serve run examples.ray_serve.app:build model=smollm2 replicas=2
    serve run examples.ray_serve.app:build model=Qwen/Qwen3-8B gpus=1 min_replicas=1 max_replicas=8

A replica is one `dspine.common.serving.server.Server`, the very application that `dspine serve` runs: same endpoints, same
page, same metrics (of that replica). Everything between the replicas is Ray's: scaling, restarts, routing.

Routing: Ray's `ConsistentHashRouter` sends requests with the same `x-session-id` header to the same replica, so a
conversation finds its prefix in that replica's cache; requests without the header are spread. (Ray's
`PrefixCacheAffinityRouter`, which reads the prompts themselves, belongs to its own LLM deployments: it looks for `prompt`
or `messages` among a deployment call's arguments, and an HTTP ingress has only the raw request.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from dspine.common.errors import DSpineError
from dspine.common.generation import load
from dspine.common.protocols import Engine
from dspine.common.runtimes import choose_runtime
from dspine.common.serving.scheduler import SchedulerSettings
from dspine.common.serving.server import Server
from dspine.common.serving.settings import ServerSettings

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


def make_app(load_engine: Callable[[], Engine], settings: ServerSettings) -> Callable[[], Any]:
    """What Ray calls when a replica starts: loads the engine there and returns the ASGI application."""

    def build_asgi_app() -> Any:
        return Server(load_engine, settings).app

    return build_asgi_app


def deployment(load_engine: Callable[[], Engine], settings: ServerSettings, **options: Any) -> Application:
    """An application of replicas that each run `load_engine`. options: those of `serve.deployment`."""
    concurrency = settings.scheduler.max_concurrency + settings.scheduler.max_queue
    wrapped = serve.deployment(serve.ingress(make_app(load_engine, settings))())
    return wrapped.options(
        name="dspine",
        max_ongoing_requests=concurrency,  # beyond it Ray tries another replica; the replica's own queue answers with 429
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        **options,
    ).bind()


ARGUMENTS = (
    ("model", "draft_model", "backend", "device", "max_concurrency", "max_context", "prefix_cache")
    + ("gpus", "cpus", "replicas", "min_replicas", "max_replicas")
)  # fmt: skip


def build(args: dict[str, str]) -> Application:
    """For `serve run`: model, draft_model, backend, device, max_concurrency, max_context (tokens), prefix_cache (MiB), gpus and
    cpus (of a replica), replicas, or min_replicas and max_replicas. DSpineError for a name that is none of them."""
    unknown = sorted(set(args) - set(ARGUMENTS))
    if unknown:
        raise DSpineError(f"unknown argument {', '.join(unknown)}: there are {', '.join(ARGUMENTS)}")
    if "replicas" in args and {"min_replicas", "max_replicas"} & set(args):
        raise DSpineError("replicas is a fixed number, min_replicas and max_replicas let Ray scale: give one kind")
    model, backend = args.get("model", "smollm2"), args.get("backend", "torch")
    gpus = float(args.get("gpus", "0"))

    def load_engine() -> Engine:
        runtime, reason = choose_runtime(backend)
        device = args.get("device", "cuda" if gpus else "auto")
        return load(runtime, model, args.get("draft_model", "auto"), device=device, backend_reason=reason)

    concurrency = int(args.get("max_concurrency", "8"))
    scheduler = SchedulerSettings(max_concurrency=concurrency, prefix_bytes=int(args.get("prefix_cache", "256")) * 2**20)
    context = int(args["max_context"]) if "max_context" in args else None
    settings = ServerSettings(names=(model,), max_context=context, scheduler=scheduler)
    options: dict[str, Any] = {"ray_actor_options": {"num_gpus": gpus, "num_cpus": float(args.get("cpus", "1"))}}
    if "max_replicas" in args:
        options["autoscaling_config"] = {
            "min_replicas": int(args.get("min_replicas", "1")),
            "max_replicas": int(args["max_replicas"]),
            "target_ongoing_requests": concurrency / 2,
        }
    else:
        options["num_replicas"] = int(args.get("replicas", "1"))
    return deployment(load_engine, settings, **options)
