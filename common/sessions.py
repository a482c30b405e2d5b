"""What stays between two requests of one conversation: the caches, the tokens they hold, and the text those stand for.

A cache is only ever reused for a prompt that begins with exactly the tokens it holds (or with fewer, where it can be cut),
so a wrong guess about the text costs time, never correctness (case R11).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dspine.common.decoding import DecodingLoop, TokenEvent
from dspine.common.protocols import Engine
from dspine.common.runtimes import load_runtime
from dspine.common.tokenizer import Tokenizer, render_chat

Progress = Callable[[int, int], None]  # (prompt tokens read, prompt tokens in all)


class Session:
    """The caches of one conversation. Invariant: both hold exactly `tokens` int32 [n], or there are none (n = 0).

    ops: `protocols.PrefixOps`; with `move` and `reaches` where the runtime has them. None: nothing is kept.
    """

    def __init__(self, ops: Any | None) -> None:
        self.ops = ops
        self.clear()

    def clear(self) -> None:
        """Keep nothing."""
        self.tokens = np.zeros(0, dtype=np.int32)
        self.cache: Any = None
        self.draft_cache: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes held, where the caches say so."""
        return sum(getattr(cache, "nbytes", 0) for cache in (self.cache, self.draft_cache) if cache is not None)

    def open(self, loop: DecodingLoop) -> int:
        """Give what is known of the loop's prompt to its caches; returns the tokens reused. The session is empty after it."""
        count = self._shared(loop)
        if count:
            self._transfer(loop, count)
            loop.reuse(count)
        self.clear()
        return count

    def _shared(self, loop: DecodingLoop) -> int:
        """Leading prompt tokens that both caches can be cut to; one must be left to read."""
        if self.ops is None or self.cache is None or (loop.draft_cache is not None and self.draft_cache is None):
            return 0
        size = min(len(self.tokens), len(loop.prompt) - 1)
        differs = np.flatnonzero(self.tokens[:size] != loop.prompt[:size])
        count = int(differs[0]) if differs.size else size
        draft = self.draft_cache if loop.draft_cache is not None else None
        reaches = getattr(self.ops, "reaches", None)
        if reaches is not None:
            can = count > 0 and reaches(self.cache, draft, count)
        else:
            can = getattr(self.ops, "cuts", True) or count == len(self.tokens)
        return count if can else 0

    def _transfer(self, loop: DecodingLoop, count: int) -> None:
        """The first `count` tokens to the loop's empty caches, without a copy where the runtime can."""
        draft = self.draft_cache if loop.draft_cache is not None else None
        ops: Any = self.ops
        if hasattr(ops, "move"):
            ops.move(self.cache, draft, loop.cache, loop.draft_cache, count)
        elif getattr(ops, "cuts", True):
            ops.copy(self.cache, draft, loop.cache, loop.draft_cache, count)
        else:
            ops.load(ops.save(self.cache, draft, count), loop.cache, loop.draft_cache, count)

    def close(self, loop: DecodingLoop) -> None:
        """Take the caches of a loop that ended, or was stopped between two steps."""
        if self.ops is None:
            return
        self.tokens = np.concatenate([loop.prompt, np.asarray(loop.output, dtype=np.int32)])[: loop.committed]
        self.cache, self.draft_cache = loop.cache, loop.draft_cache

    def run(self, loop: DecodingLoop, progress: Progress | None = None) -> Iterator[TokenEvent]:
        """The loop's events, with the caches taken from here before and put back after, unless a step was broken off."""
        self.open(loop)
        whole, total = True, len(loop.prompt)
        try:
            while loop.finish_reason is None:
                reading, whole = loop.reading_prompt, False
                events = loop.step(ahead=True).events
                whole = True
                if reading and progress is not None:
                    progress(min(loop.committed, total), total)
                yield from events
        finally:
            if whole:
                loop.drop_ahead()
                self.close(loop)


def open_session(engine: Engine) -> Session:
    """A session for this engine; one that keeps nothing where the runtime cannot hand caches on."""
    runtime = load_runtime(engine.runtime)[0]
    ask = getattr(runtime, "session_ops", None)
    if ask is not None:
        return Session(ask(engine.target, engine.drafter))
    serving = getattr(runtime, "serving", None)
    return Session(serving(engine.target, engine.drafter).prefixes if serving is not None else None)


class Transcript:
    """Token ids of a growing conversation, such that what was generated stays as it was generated.

    Rendering the answers anew and encoding them could give other tokens for the same text; then nothing could be reused.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[int] = (), text: str = "") -> None:
        self.tokenizer = tokenizer
        self.tokens, self.text = list(tokens), text
        self._asked: tuple[list[int], str] = (self.tokens, text)

    def prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of the messages up to where the answer begins. If they do not go on from what is known, all is encoded anew."""
        full = render_chat(self.tokenizer, messages)
        if self.text and full.startswith(self.text) and len(full) > len(self.text):
            ids = [*self.tokens, *self.tokenizer.encode(full[len(self.text) :])]
        else:
            ids = self.tokenizer.encode(full)
        self._asked = ids, full
        return list(ids)

    def answered(self, output: Sequence[int]) -> None:
        """These tokens followed the newest prompt, a stop token included."""
        ids, text = self._asked
        shown = self.tokenizer.backend.decode(list(output), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        self.tokens, self.text = [*ids, *output], text + shown
