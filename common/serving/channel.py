"""Between the worker's thread and a request's coroutine: updates in, and the news that the client is gone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from dspine.common.serving.jobs import Job, Update

Receive = Callable[[], Awaitable[Any]]
_MANY = 32  # updates that are worked on before other requests have their turn


class ClientGone(ConnectionError):
    """The client closed its connection."""


class Channel:
    """Updates of all jobs of one request, in order of arrival, as (index of the job, update).

    Every waking of the event loop takes the GIL from the worker for a moment, so there are few: one for all updates that came
    before the loop looked, and, where nobody reads on the way (`whole`), one for `_MANY` of them.
    """

    def __init__(self, whole: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._whole = whole
        self._news: deque[tuple[int, Update]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._posted = False  # a waking is on its way: it will see whatever is in `_news` by then
        self.open = 0

    def sink(self, index: int) -> Callable[[Update], None]:
        """A job's sink, for the worker's thread."""
        self.open += 1

        def put(update: Update) -> None:
            self._news.append((index, update))
            last = update.finish_reason is not None or update.error is not None
            if (last or not self._whole or len(self._news) >= _MANY) and not self._posted and not self._loop.is_closed():
                self._posted = True
                self._loop.call_soon_threadsafe(self._wake)

        return put

    def _wake(self, *_: object) -> None:
        self._posted = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def updates(self, receive: Receive) -> AsyncIterator[list[tuple[int, Update]]]:
        """Everything that has come, again and again until every job has ended. Raises ClientGone as soon as the client is, and
        the `ApiError` of a job that fails (after what came before it)."""
        gone = asyncio.ensure_future(_disconnected(receive))
        gone.add_done_callback(self._wake)
        try:
            while self.open:
                if gone.done():
                    raise ClientGone
                if not self._news:
                    self._waiter = self._loop.create_future()
                    await self._waiter
                    continue
                found: list[tuple[int, Update]] = []
                error = None
                while self._news and error is None and len(found) < _MANY:
                    index, update = self._news.popleft()
                    error = update.error
                    if error is None:
                        found.append((index, update))
                        self.open -= update.finish_reason is not None
                if found:
                    yield found
                if error is not None:
                    raise error
        finally:
            gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Watched:
    """The jobs of a request: whatever ends the request ends them."""

    def __init__(self, jobs: list[Job], cancel: Callable[[list[Job]], None]) -> None:
        self._jobs, self._cancel = jobs, cancel

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *reason: object) -> None:
        running = [job for job in self._jobs if not job.finished]
        if running:
            self._cancel(running)
