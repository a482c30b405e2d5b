"""HTTP below the routes: bodies within a limit, streams of events, keys, and one log line a request. Plain ASGI."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from dspine.common.serving.channel import ClientGone
from dspine.common.serving.errors import ApiError, from_validation
from dspine.common.serving.metrics import Metrics

logger = logging.getLogger("dspine.server")
Body = TypeVar("Body", bound=BaseModel)
OPEN_PATHS = frozenset(("/", "/health", "/favicon.ico"))
_KNOWN = frozenset(("/", "/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions"))


async def read_body(request: Request, model: type[Body], limit: int, patience: float) -> Body:
    """The checked body. ApiError: another content type, too long, longer on its way than `patience` seconds, not JSON, not
    UTF-8, or not what the model allows."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            f"the content type must be application/json, got {kind[:64]!r}", status=415, code="unsupported_media_type"
        )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_long(limit)
    received = bytearray()
    try:
        async with asyncio.timeout(patience):
            async for part in request.stream():
                received += part
                if len(received) > limit:
                    raise _too_long(limit)
    except ClientDisconnect as error:
        raise ClientGone from error
    except TimeoutError as error:
        raise ApiError(
            f"the body did not arrive within {patience:g} seconds",
            status=408,
            code="request_timeout",
            headers={"Connection": "close"},
        ) from error
    try:
        return model.model_validate_json(bytes(received))
    except ValidationError as error:
        raise from_validation(error, model.model_fields) from None


def _too_long(limit: int) -> ApiError:
    return ApiError(
        f"the body is longer than {limit} bytes", status=413, code="body_too_large", headers={"Connection": "close"}
    )


def error_response(error: ApiError) -> JSONResponse:
    """An error as an answer."""
    return JSONResponse(error.body(), status_code=error.status, headers=error.headers)


class EventStream(Response):
    """Server-sent events: `data: <json>` for each object, `data: [DONE]` at the end; the objects of one list in one write. An
    error after the first event is sent as an event, because the status is gone by then. A client that reads nothing for
    `timeout` seconds is dropped."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[list[dict[str, Any]]], timeout: float) -> None:
        super().__init__(b"", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._timeout = events, timeout

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send the events as they come."""
        try:
            async with _Patience(self._timeout) as patience:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                try:
                    async for events in self._events:
                        data = "".join(f"data: {_encode(event)}\n\n" for event in events)
                        with patience:
                            await send({"type": "http.response.body", "body": data.encode(), "more_body": True})
                    data = ""
                except ApiError as error:
                    data = f"data: {_encode(error.body())}\n\n"
                with patience:
                    await send({"type": "http.response.body", "body": f"{data}data: [DONE]\n\n".encode(), "more_body": False})
        except (ClientGone, TimeoutError, OSError) as error:
            scope["dspine"]["gone"] = type(error).__name__
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class _Patience:
    """TimeoutError where a write (`with` inside `async with`) takes longer than `seconds`. One timer looks a few times in that
    span, instead of one timer a write."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._loop = seconds, asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> _Patience:
        await self._limit.__aenter__()
        self._look()
        return self

    async def __aexit__(self, *reason: Any) -> bool | None:
        assert self._timer is not None
        self._timer.cancel()
        return await self._limit.__aexit__(*reason)

    def __enter__(self) -> None:
        self._since = self._loop.time()

    def __exit__(self, *reason: object) -> None:
        self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        if self._since is not None and now - self._since >= self._seconds:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_later(self._seconds / 4, self._look)


class Gate:
    """ASGI middleware: the key, a request's id, its metric and its log line."""

    def __init__(self, app: Any, metrics: Metrics, api_key: str | None) -> None:
        self._app, self._metrics = app, metrics
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0
        facts = scope["dspine"] = {"id": uuid.uuid4().hex, "client": _client(scope)}

        async def watch(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", facts["id"].encode())]}
            await send(message)

        try:
            if scope["path"] not in OPEN_PATHS and not self._allowed(scope):
                error = ApiError("a valid API key is needed: Authorization: Bearer KEY", status=401, code="invalid_api_key")
                error.headers["WWW-Authenticate"] = "Bearer"
                await error_response(error)(scope, receive, watch)
            else:
                await self._app(scope, receive, watch)
        finally:
            path = scope["path"] if scope["path"] in _KNOWN else "other"
            self._metrics.requests.labels(path, str(status or 499)).inc()
            seconds = round(time.perf_counter() - started, 4)
            level = logging.DEBUG if path in ("/health", "/metrics") else logging.INFO
            log_event(level, "request", path=path, method=scope["method"], status=status or 499, seconds=seconds, **facts)

    def _allowed(self, scope: Any) -> bool:
        if self._key is None:
            return True
        header = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = header.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


def _client(scope: Any) -> str:
    """Who asks, for the queue's turns: the key (as a digest) or the address."""
    header = dict(scope["headers"]).get(b"authorization")
    if header is not None:
        return hashlib.sha256(header).hexdigest()[:12]
    return scope["client"][0] if scope.get("client") else "local"


def log_event(level: int, event: str, **fields: Any) -> None:
    """One structured line; prompts and answers are never in it."""
    logger.log(level, event, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """Log records as one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """time, level, logger, event and its fields; an exception as text."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
