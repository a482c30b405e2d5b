"""Prefix cache: committed tokens of finished sequences, target K/V and the drafter's features together, within a byte limit.

The two parts are kept and dropped as one (case R4): a prefix without the drafter's part serves only requests that draft
nothing. Sequences that are still running lend their rows too. Everything here runs on the worker's thread.

Exact reuse: in bfloat16 the bits of a row depend on how many rows were computed with it, and one bit is enough to turn a near
tie, so a warm answer could part from a cold one. Prompts are therefore read in chunks that end at multiples of `grain`, and
only whole chunks of a prompt are reused: rows that a cold run would compute in the very same way. Rows of answers (verified
block by block) and rows of another reader (`DecodingLoop.reader`: graphs may read prompts) are reused only with `exact=False`.

States of linear attention cannot be cut to fewer tokens. For targets that have them (`ops.cuts` is false) snapshots are taken
while a prompt is read, at two places: its last whole grain, where the next turn of the conversation goes on, and the grain up
to which it agrees with a prompt known already, which is what the two share (a system prompt).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspine.common.decoding import DecodingLoop
from dspine.common.protocols import PrefixOps

MIN_TOKENS = 8  # below this a copy costs as much as the tokens


@dataclass(eq=False)
class Entry:
    """A kept prefix. `tokens` int32 [n]: what the rows belong to; reader: what made them."""

    tokens: np.ndarray
    saved: Any
    nbytes: int
    drafts: bool
    reader: str


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two int arrays."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if differs.size else size


class PrefixCache:
    """Least recently used first out. Invariant: `nbytes` is the sum over entries and at most `limit`, before and after
    every call and while a new entry is being copied."""

    def __init__(self, ops: PrefixOps | None, limit: int, *, grain: int = 1, exact: bool = True) -> None:
        self._cuts = bool(getattr(ops, "cuts", True))
        self.grain, self.exact = grain if exact or not self._cuts else 1, exact
        self._ops = ops if limit > 0 else None
        self.limit = limit if self._ops is not None else 0
        self._entries: list[Entry] = []  # oldest use first
        self.nbytes = 0
        self.hits = self.misses = 0
        self._places: weakref.WeakKeyDictionary[DecodingLoop, set[int]] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._entries)

    def fill(self, loop: DecodingLoop, others: Iterable[tuple[np.ndarray, DecodingLoop]] = ()) -> int:
        """Start `loop` from the longest prefix that is known; returns the tokens reused (also in the loop's statistics).

        others: (tokens, loop) of running sequences whose committed rows may be copied.
        """
        if self._ops is None:
            return 0
        wanted, most = loop.prompt, len(loop.prompt) - 1  # one token must be left: its logits start the answer
        drafts = loop.draft_cache is not None
        best, source, shared = MIN_TOKENS - 1, None, 0
        for entry in self._of(loop):
            common = common_length(entry.tokens, wanted)
            length = self._whole(min(common, most))
            shared = max(shared, length)
            if not self._cuts and length < len(entry.tokens):
                continue
            if length > best and (entry.drafts or not drafts):
                best, source = length, entry
        if not self._cuts:
            self._places[loop] = {place for place in (shared, self._whole(most)) if place > max(best, MIN_TOKENS - 1)}
        for tokens, other in others if self._cuts else ():
            if self.exact and other.reader != loop.reader:
                continue
            length = self._whole(min(common_length(tokens, wanted), self._lasting(other, len(tokens)), most))
            if length > best and (other.draft_cache is not None or not drafts):
                best, source = length, other
        if source is None:
            self.misses += 1
            return 0
        if isinstance(source, Entry):
            self._entries.remove(source)
            self._entries.append(source)
            self._ops.load(source.saved, loop.cache, loop.draft_cache, best)
        else:
            self._ops.copy(source.cache, source.draft_cache, loop.cache, loop.draft_cache, best)
        loop.reuse(best)
        self.hits += 1
        return best

    def keep(self, tokens: np.ndarray, loop: DecodingLoop) -> bool:
        """Keep the committed tokens of a loop (finished, or cancelled: never more than was committed)."""
        if self._ops is None or not self._cuts:
            return False
        return self._keep(tokens[: self._whole(self._lasting(loop, len(tokens)))], loop)

    def passed(self, loop: DecodingLoop) -> None:
        """A loop has read some of its prompt: take a snapshot where one is wanted."""
        if self._ops is not None and loop.committed in self._places.get(loop, ()) and loop.reading_prompt:
            self._keep(loop.prompt[: loop.committed], loop)

    def _keep(self, tokens: np.ndarray, loop: DecodingLoop) -> bool:
        assert self._ops is not None
        if len(tokens) < MIN_TOKENS:
            return False
        size = self._ops.nbytes(loop.cache, loop.draft_cache, len(tokens))
        if size > self.limit and self._cuts:  # as much of it as there is room for
            tokens = tokens[: self._whole(len(tokens) * self.limit // size)]
            size = self._ops.nbytes(loop.cache, loop.draft_cache, len(tokens))
        if size > self.limit or len(tokens) < MIN_TOKENS:
            return False
        drafts = loop.draft_cache is not None
        for entry in self._of(loop):
            shared = common_length(entry.tokens, tokens)
            if shared == len(tokens) and entry.drafts >= drafts and (self._cuts or shared == len(entry.tokens)):  # known
                self._entries.remove(entry)
                self._entries.append(entry)
                return True
            covered = self._cuts or shared == len(tokens)
            if shared == len(entry.tokens) and drafts >= entry.drafts and covered:  # the new one says all that this one says
                self._drop(entry)
        while self.nbytes + size > self.limit:
            self._drop(self._entries[0])
        saved = self._ops.save(loop.cache, loop.draft_cache, len(tokens))
        self._entries.append(Entry(tokens, saved, size, drafts, loop.reader))
        self.nbytes += size
        return True

    def _of(self, loop: DecodingLoop) -> list[Entry]:
        """Entries that this loop may start from, oldest use first."""
        return [entry for entry in self._entries if not self.exact or entry.reader == loop.reader]

    def _whole(self, length: int) -> int:
        return length - length % self.grain

    def _lasting(self, loop: DecodingLoop, committed: int) -> int:
        """Committed tokens of a loop that may be reused."""
        return min(committed, len(loop.prompt)) if self.exact else committed

    def _drop(self, entry: Entry) -> None:
        self._entries.remove(entry)
        self.nbytes -= entry.nbytes

    def clear(self) -> None:
        """Drop everything."""
        self._entries, self.nbytes = [], 0
