"""Timers of the torch runtime: CUDA events, and the host's clock on the CPU (where a call returns when it is done)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dspine.common.bench.timing import HostTimer
from dspine.common.protocols import Timer


class EventTimer:
    """`protocols.Timer` by events on the device's current stream: no mark waits, so queued work stays queued."""

    source = "CUDA events"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self, *produced: Any) -> torch.cuda.Event:
        """An event behind what the stream holds."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Between neighbouring events; waits for the last."""
        if marks:
            marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in zip(marks[:-1], marks[1:], strict=True)]


def make_timer(device: str) -> Timer:
    """The timer of a device by its name."""
    place = torch.device(device)
    return EventTimer(place) if place.type == "cuda" else HostTimer()
