"""What a round in slots takes of the host: beside what the device needs, it decides how much a longer round costs."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any


class HostShare:
    """What rounds take of the host: a turn without its waiting for the device, over the rounds it told of.

    Waiting is what the device still needs for the round, not all that passes until it is read: the interpreter's lock may be
    taken meanwhile, and that costs the host. While prompts are read, though, a round waits behind theirs on the device."""

    def __init__(self) -> None:
        self._ends = self._started = self._waited = 0.0
        self._quiet = self._rounds = 0  # turns since somebody read a prompt, rounds of this one
        self._counts = False

    def begin(self, reading: bool) -> None:
        """A turn's rounds begin; reading: prompts were read since the last one."""
        self._quiet = 0 if reading else self._quiet + 1
        self._started, self._waited, self._rounds, self._counts = perf_counter(), 0.0, 0, True

    def skip(self) -> None:
        """This turn does what others do not."""
        self._counts = False

    def read(self, wait: Callable[[], tuple[list[Any], float]], launched: float) -> tuple[list[Any], float]:
        """`wait()`, what `Slots.launch` returned for a round that was launched then (`perf_counter`)."""
        before = perf_counter()
        reports, seconds = wait()
        after = perf_counter()
        ends = min(max(self._ends, launched) + seconds, after)
        if self._quiet < 2:
            ends = after
        self._waited += max(ends - before, 0.0)
        self._ends, self._rounds = ends, self._rounds + 1
        return reports, seconds

    def end(self) -> float | None:
        """Seconds a round; None where this turn tells nothing."""
        if not self._rounds or not self._counts:
            return None
        return (perf_counter() - self._started - self._waited) / self._rounds
