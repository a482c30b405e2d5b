"""Text of an answer as it arrives -> reasoning, content and tool calls; stop strings.

Both work on text, never on tokens or deltas: a block of accepted drafts may hold `</think>` and a whole `<tool_call>` at
once (case T5), or half a marker.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dspine.common.serving.prompts import END_THINK, END_TOOL, THINK, TOOL


@dataclass(frozen=True)
class ToolCallText:
    """A parsed call; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Piece:
    """One piece of an answer: exactly one of the three is set."""

    content: str = ""
    reasoning: str = ""
    call: ToolCallText | None = None


def held_back(text: str, needles: Iterable[str]) -> int:
    """Length of the longest end of `text` that may still become one of `needles`."""
    longest = 0
    for needle in needles:
        for size in range(min(len(needle) - 1, len(text)), longest, -1):
            if text.endswith(needle[:size]):
                longest = size
                break
    return longest


class StopStrings:
    """Cuts text at the first of some strings; what may be the start of one is held back."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def add(self, text: str) -> str:
        """Text that is certain now. After a hit nothing comes any more."""
        if self.hit:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        places = [place for stop in self._stops if (place := held.find(stop)) >= 0]
        if places:
            self.hit, self._held = True, ""
            return held[: min(places)]
        keep = held_back(held, self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


class OutputParser:
    """Splits text into reasoning, content and tool calls. The pieces do not depend on how the text was cut.

    `thinking`: the prompt ended inside <think>; `reasoning`: split it at all; `tools`: parse calls. A call that is not
    valid is given out as content, as the model wrote it.
    """

    def __init__(self, *, reasoning: bool, thinking: bool, tools: bool) -> None:
        self._reasoning, self._tools = reasoning, tools
        self._state = "reasoning" if reasoning and thinking else "start"
        self._held = ""
        self._trim = False  # white space after a marker belongs to neither side
        self.calls = 0

    def add(self, text: str) -> list[Piece]:
        """Pieces that are certain now."""
        self._held += text
        pieces: list[Piece] = []
        while self._advance(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """The end of the text: what was held back comes out as what it would have been."""
        held, self._held = self._held, ""
        if self._state == "tool":
            return [Piece(content=TOOL + held)]
        return self._text(held)

    def _advance(self, pieces: list[Piece]) -> bool:
        """Consume up to the next marker; true while there may be more."""
        if self._trim:
            self._held = self._held.lstrip()
            if not self._held:
                return False
            self._trim = False
        if self._state == "start":
            return self._start()
        if self._state == "tool":
            return self._tool(pieces)
        markers = {END_THINK: "content"} if self._state == "reasoning" else {TOOL: "tool"} if self._tools else {}
        found = [(place, marker) for marker in markers if (place := self._held.find(marker)) >= 0]
        if found:
            place, marker = min(found)
            pieces += self._text(self._held[:place].rstrip())
            self._held = self._held[place + len(marker) :]
            self._state, self._trim = markers[marker], True
            return True
        keep = held_back(self._held, markers)
        if markers:  # white space before a marker goes with it
            body = self._held[: len(self._held) - keep]
            keep += len(body) - len(body.rstrip())
        pieces += self._text(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _start(self) -> bool:
        """At the first characters: does the answer open with <think>?"""
        text = self._held.lstrip()
        if self._reasoning and text.startswith(THINK):
            self._held, self._state, self._trim = text[len(THINK) :], "reasoning", True
            return True
        if self._reasoning and THINK.startswith(text):
            return False
        self._state = "content"
        return True

    def _tool(self, pieces: list[Piece]) -> bool:
        place = self._held.find(END_TOOL)
        if place < 0:
            return False
        body, self._held = self._held[:place], self._held[place + len(END_TOOL) :]
        call = parse_call(body)
        if call is None:
            pieces.append(Piece(content=f"{TOOL}{body}{END_TOOL}"))
        else:
            self.calls += 1
            pieces.append(Piece(call=call))
        self._state, self._trim = "content", call is not None
        return True

    def _text(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [Piece(reasoning=text) if self._state == "reasoning" else Piece(content=text)]


def parse_call(body: str) -> ToolCallText | None:
    """`{"name": ..., "arguments": {...}}` (Hermes and Qwen), or None where it is not that, or holds what JSON and UTF-8 cannot
    say (NaN, half a surrogate pair)."""
    try:
        data = json.loads(body, parse_constant=_no_number)
        call = _call_of(data)
        if call is not None:
            f"{call.name}{call.arguments}".encode()
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeEncodeError are ValueErrors
        return None
    return call


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _call_of(data: Any) -> ToolCallText | None:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as text
        return ToolCallText(data["name"], arguments)
    return ToolCallText(data["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
