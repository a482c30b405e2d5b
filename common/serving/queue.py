"""The waiting line: clients take turns, so that one with many requests does not hold up one with few."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from dspine.common.serving.jobs import Job


class FairQueue:
    """First come, first served within a client; clients in turn. Not thread-safe: the scheduler locks around it."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __iter__(self) -> Iterator[Job]:
        for line in self._lines.values():
            yield from line

    def push(self, job: Job) -> None:
        """To the end of its client's line."""
        self._lines.setdefault(job.client, deque()).append(job)

    def pop(self) -> Job:
        """The next job; its client goes to the end of the turn. IndexError when empty."""
        if not self._lines:
            raise IndexError("the queue is empty")
        client, line = next(iter(self._lines.items()))
        job = line.popleft()
        del self._lines[client]
        if line:
            self._lines[client] = line
        return job

    def drop_cancelled(self) -> list[Job]:
        """Take out the jobs whose clients are gone."""
        gone = [job for job in self if job.cancelled]
        if gone:
            for client in list(self._lines):
                self._lines[client] = deque(job for job in self._lines[client] if not job.cancelled)
                if not self._lines[client]:
                    del self._lines[client]
        return gone
