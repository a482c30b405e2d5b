"""Between the worker's thread and a request's coroutine: updates in, and the news that the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from dspine.common.serving.jobs import Job, Update

Receive = Callable[[], Awaitable[Any]]


class ClientGone(ConnectionError):
    """The client closed its connection."""


class Channel:
    """Updates of all jobs of one request, in order of arrival, as (index of the job, update)."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self.open = 0

    def sink(self, index: int) -> Callable[[Update], None]:
        """A job's sink, for the worker's thread."""
        self.open += 1

        def put(update: Update) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, update))

        return put

    async def updates(self, receive: Receive) -> AsyncIterator[tuple[int, Update]]:
        """Until every job has ended. Raises ClientGone as soon as the client is, and the `ApiError` of a job that fails."""
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            while self.open:
                news = asyncio.ensure_future(self._queue.get())
                await asyncio.wait((news, gone), return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    news.cancel()
                    raise ClientGone
                index, update = news.result()
                if update.error is not None:
                    raise update.error
                self.open -= update.finish_reason is not None
                yield index, update
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
