"""Prompts read into slots: pieces are queued on the device, the first token is asked for at once and read a step later."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from dspine.common.decoding import DecodingLoop, Round
from dspine.common.protocols import Slots

EAGER, CAPTURED = "eager", "captured"


class PromptLoop(DecodingLoop):
    """The part of a sequence in a slot that reads its prompt: by `Slots.read` where there is one, else as every loop does."""

    slot: int
    _slots: Slots
    _first: Callable[[], Any] | None = None  # waits for the first token, once the whole prompt is under way
    _asked = 0.0

    @property
    def reader(self) -> str:  # type: ignore[override]
        """`DecodingLoop.reader`."""
        return CAPTURED if self._slots.piece else EAGER

    @property
    def awaiting(self) -> bool:  # type: ignore[override]
        """`DecodingLoop.awaiting`: all of the prompt is under way."""
        return self._first is not None

    @property
    def reading_prompt(self) -> bool:
        """Whether the next step is a piece of the prompt, or waits for the token behind it."""
        return self.awaiting or super().reading_prompt

    def _prefill(self) -> Round:
        """Queue one piece of the prompt; the step after the last one gives the first token. So whoever has other work queues it
        between the two, and nobody waits. Pieces end where chunks end."""
        if not self._slots.piece:
            return super()._prefill()
        if self._first is not None:
            self.stats.prefill_seconds += perf_counter() - self._asked
            first, self._first = self._first, None
            return self.settle([], 0, int(first()[0]), None)
        chunk = self.params.prefill_chunk
        rest = chunk - (self._read - self.stats.cached_tokens) % chunk
        part = self.prompt[self._read : self._read + min(rest, self._slots.piece)]
        logits = self._slots.read(self.slot, self._read, part)
        for cache in self._counted():
            cache.length += len(part)
        self._read += len(part)
        if self._read == len(self.prompt):
            verdict = self.judge(logits[:, None], self.target.arrays.to_device(np.zeros((1, 1), dtype=np.int32)), None)
            self._first, self._asked = self._slots.later(verdict.next_token), perf_counter()
        return Round()

    def _counted(self) -> list[Any]:
        """Everything that counts committed tokens, once each."""
        found = (self.cache, getattr(self.cache, "kv", None), self.draft_cache)
        return list({id(cache): cache for cache in found if cache is not None}.values())
