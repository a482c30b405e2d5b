"""The application: routes of an OpenAI-compatible server over one `Scheduler` and one `Service`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, Response

from dspine.common.errors import DSpineError
from dspine.common.serving.channel import Channel, ClientGone, Watched
from dspine.common.serving.errors import ApiError
from dspine.common.serving.http import EventStream, Gate, error_response, read_body
from dspine.common.serving.jobs import Job
from dspine.common.serving.metrics import Metrics
from dspine.common.serving.responses import Answer
from dspine.common.serving.scheduler import Scheduler
from dspine.common.serving.schema import ChatRequest, CompletionRequest
from dspine.common.serving.service import Plan, Service, SinkMaker
from dspine.common.serving.settings import ServerSettings

Make = Callable[[Any, str, SinkMaker], Plan]
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models")
_GONE = 499  # the client closed the connection: nobody reads this status, logs and metrics show it


def build_app(service: Service, scheduler: Scheduler, settings: ServerSettings, metrics: Metrics) -> FastAPI:
    """The ASGI application. The scheduler is started and stopped by the caller."""
    app = FastAPI(title="dspine", docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.add_middleware(Gate, metrics=metrics, api_key=settings.api_key)
    _add_errors(app)
    page = files("dspine.common.serving").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": _PAGE_POLICY, "Referrer-Policy": "no-referrer"})

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        running, waiting = scheduler.occupancy
        state = {"status": "ok" if scheduler.alive else "stopping", "running": running, "waiting": waiting}
        facts = {"model": settings.names[0], "speculation": service.engine.drafter is not None, "prompts": scheduler.prompts}
        return JSONResponse({**state, **facts}, status_code=200 if scheduler.alive else 503)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name, service) for name in settings.names]}

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(name, service)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest), responses=_ERRORS)
    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatRequest, settings.max_body_bytes, settings.send_timeout)
        return await _answer(request, body, "chat", service.chat, service, scheduler)

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest), responses=_ERRORS)
    async def completions(request: Request) -> Response:
        body = await read_body(request, CompletionRequest, settings.max_body_bytes, settings.send_timeout)
        return await _answer(request, body, "completion", service.completion, service, scheduler)

    return app


_PAGE_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text}
    for status, text in (
        (400, "A field is wrong; the error names it"),
        (401, "No valid key"),
        (404, "No such model"),
        (408, "The body does not arrive"),
        (413, "The body is too long"),
        (415, "Not application/json"),
        (429, "The queue is full; Retry-After says when to come back"),
        (503, "The server is stopping"),
    )
}


def _body_schema(model: Any) -> dict[str, Any]:
    schema = model.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema)}}}}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without references: OpenAPI would look for them elsewhere."""
    definitions = schema.pop("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, list):
            return [walk(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return walk(definitions[node["$ref"].rpartition("/")[2]])
        return {key: walk(value) for key, value in node.items()}

    return walk(schema)


def _model(name: str, service: Service) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "dspine", "dspine": service.facts()}


def _add_errors(app: FastAPI) -> None:
    """Every error in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(DSpineError)
    async def bad_input(request: Request, error: DSpineError) -> Response:
        return error_response(ApiError(str(error)))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text, code = str(error.detail), None
        if error.status_code == 404:
            text, code = _no_path(request), "not_found"
        elif error.status_code == 405:
            text, code = f"{request.method[:16]} is not for this path", "method_not_allowed"
            text += f": it takes {(error.headers or {}).get('Allow', 'another method')}"
        return error_response(ApiError(text, status=error.status_code, code=code, headers=dict(error.headers or {})))

    @app.exception_handler(ClientGone)
    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=_GONE)

    @app.exception_handler(500)
    async def broken(request: Request, error: Exception) -> Response:
        logging.getLogger("dspine.server").error("a request failed", exc_info=error)
        return error_response(ApiError("the server failed; its log says why", status=500, code="internal_error"))


def _no_path(request: Request) -> str:
    """What a 404 says: base URLs without `/v1`, and with it twice, are what happens to people."""
    path = request.url.path
    meant = next((known for known in PATHS if known.endswith(path.rstrip("/")) or path.endswith(known)), None) if path else None
    hint = f"did you mean {meant}?" if meant and len(path) > 3 else f"there are {', '.join(PATHS)}"
    return f"no such path {path[:128]!r}: {hint}"


async def _answer(request: Request, body: Any, kind: str, make: Make, service: Service, scheduler: Scheduler) -> Response:
    """Plan, queue, and collect or stream. The status of a stream is decided by its first update."""
    scheduler.check_room()
    channel = Channel(whole=not body.stream)
    facts = request.scope["dspine"]
    running = asyncio.get_running_loop()  # templates, tokenizing and grammars of long requests must not hold up other streams
    plan = await running.run_in_executor(service.planner, make, body, facts["client"], channel.sink)
    answer = Answer(kind, body.model, plan, service.engine.tokenizer, service.stop_ids)
    facts |= {"stream": bool(body.stream), "choices": len(plan.jobs)}
    scheduler.submit(plan.jobs)
    updates = channel.updates(request.receive)
    if not body.stream:
        with Watched(plan.jobs, scheduler.cancel):
            async for news in updates:
                for index, update in news:
                    answer.choices[index].add(update)
        _note(facts, plan.jobs, answer)
        return JSONResponse(answer.whole(), headers={"X-Accel-Buffering": "no"})
    events = _events(body, plan, answer, updates, scheduler, facts)
    first = await anext(events)
    return EventStream(_after(first, events), service.settings.send_timeout)


async def _events(
    body: Any, plan: Plan, answer: Answer, updates: AsyncIterator[Any], scheduler: Scheduler, facts: dict[str, Any]
) -> AsyncIterator[list[dict[str, Any]]]:
    """The chunks of a stream, those together that are written together; closing this generator cancels what still runs."""
    usage = body.stream_options is not None and body.stream_options.include_usage
    events = bool(body.speculative_events)
    with Watched(plan.jobs, scheduler.cancel):
        try:
            async for news in updates:
                chunks = [chunk for index, update in news for chunk in answer.chunks(index, update, events=events, usage=usage)]
                if chunks:
                    yield chunks
            if usage:
                yield [answer.usage_chunk()]
        finally:
            await updates.aclose()  # type: ignore[attr-defined]
            _note(facts, plan.jobs, answer)


async def _after(first: list[dict[str, Any]], rest: AsyncIterator[list[dict[str, Any]]]) -> AsyncIterator[list[dict[str, Any]]]:
    try:
        yield first
        async for chunks in rest:
            yield chunks
    finally:
        await rest.aclose()  # type: ignore[attr-defined]


def _note(facts: dict[str, Any], jobs: list[Job], answer: Answer) -> None:
    """What the log line says of an answer: figures only."""
    usage = answer.usage()
    facts |= {
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "drafted": usage["speculative"]["drafted"],
        "accepted": usage["speculative"]["accepted"],
        "rounds": usage["speculative"]["rounds"],
        "finish": [choice.finish_reason for choice in answer.choices],
        "queue_seconds": round(max((job.started - job.submitted for job in jobs if job.started), default=0.0), 4),
        "first_token_seconds": round(max((job.first_token - job.submitted for job in jobs if job.first_token), default=0.0), 4),
    }
