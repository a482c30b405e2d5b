"""Prompts: from files in the shapes people have, written by the target itself, without near-copies."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.errors import DSpineError
from dspine.common.tokenizer import Tokenizer, encode_prompt
from dspine_cuda.training.files import json_lines

SHAPES = "a string, or an object with messages, conversations, turns, prompt, question or instruction"
_MARK = "\u241eUSER TURN\u241e"  # no template writes this
SHINGLE = 8  # words
OVERLAP = 13  # words in a row that two texts must not share where one is for evaluation


@dataclass(frozen=True)
class Prompt:
    """The user turns of one conversation, first to last, and its system prompt."""

    name: str
    turns: tuple[str, ...]
    system: str | None = None

    def messages(self, answers: list[str] | None = None) -> list[dict[str, str]]:
        """Chat messages up to the turn after `answers`."""
        answers = answers or []
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        for index in range(len(answers) + 1):
            messages.append({"role": "user", "content": self.turns[index]})
            if index < len(answers):
                messages.append({"role": "assistant", "content": answers[index]})
        return messages


def read_prompts(path: Path | str, limit: int | None = None) -> list[Prompt]:
    """Prompts of a .jsonl or .json file (shapes: see SHAPES) or a text file with one prompt a line, at most `limit`."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DSpineError(f"cannot read the prompts in {path}: {error}") from error
    prompts = []
    for number, row in _rows(path, text):
        if limit is not None and len(prompts) == limit:
            break
        prompts.append(_prompt_of(row, f"{path}:{number}", f"{path.stem}-{number:05d}"))
    if not prompts:
        raise DSpineError(f"{path}: no prompts in the file")
    return prompts


def _rows(path: Path, text: str) -> Iterable[tuple[int, Any]]:
    if path.suffix == ".json":
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise DSpineError(f"{path}: not valid JSON ({error})") from error
        yield from enumerate(content if isinstance(content, list) else [content], 1)
        return
    for number, line in enumerate(json_lines(text) if path.suffix == ".jsonl" else text.splitlines(), 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield number, line.strip()
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise DSpineError(f"{path}:{number}: not valid JSON ({error})") from error


def _prompt_of(row: Any, where: str, name: str) -> Prompt:
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise DSpineError(f"{where}: expected {SHAPES}, got {type(row).__name__}")
    turns, system = row.get("turns"), None
    if turns is None:
        messages = row.get("messages") or row.get("conversations")
        if messages is not None:
            turns, system = _user_turns(messages, where)
        else:
            turns = [next((row[key] for key in ("prompt", "question", "instruction") if key in row), None)]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise DSpineError(f"{where}: no user turn with text; expected {SHAPES}")
    return Prompt(str(row.get("id", name)), tuple(turns), system)


def _user_turns(messages: Any, where: str) -> tuple[list[str], str | None]:
    from dspine_cuda.training.formats import normal_messages

    messages = normal_messages(messages, where)
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    return [message["content"] for message in messages if message["role"] == "user"], system


@dataclass(frozen=True)
class UserTurn:
    """Where the chat template lets a user begin: `opening` int [n], the tokens that end the turn, and how many tokens the
    template writes around the user's own in a prompt."""

    opening: np.ndarray
    ends: frozenset[int]
    overhead: int


def user_turn(tokenizer: Tokenizer) -> UserTurn:
    """The chat template's opening up to the user's first word. DSpineError for a model without a template."""
    if not tokenizer.has_chat_template:
        raise DSpineError(
            f"the model in {tokenizer.folder} has no chat template, so it cannot write prompts itself: give a file of prompts "
            f"(--prompts) and --self-prompts 0"
        )
    text = tokenizer.backend.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=False
    )
    before, mark, after = text.partition(_MARK)
    if not mark:
        raise DSpineError(f"the chat template in {tokenizer.folder} does not print the user's text as it is: use --prompts")
    opening = tokenizer.encode(before)
    if not opening:
        raise DSpineError(f"the chat template in {tokenizer.folder} puts nothing before the user's text: use --prompts")
    prompt = encode_prompt(tokenizer, [{"role": "user", "content": _MARK}], limit=1 << 30)
    overhead = len(prompt) - len(tokenizer.encode(_MARK))
    return UserTurn(np.array(opening), frozenset(tokenizer.stop_ids | set(tokenizer.encode(after)[:1])), overhead)


def usable_prompt(text: str) -> bool:
    """Whether what a model wrote can pass as a request: some words, whole characters, not endless."""
    return 12 <= len(text) <= 4000 and len(text.split()) >= 3 and "\ufffd" not in text


def normal_words(text: str) -> list[str]:
    """Words without case and punctuation."""
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).lower())


def _shingles(words: list[str], size: int) -> set[int]:
    return {hash(tuple(words[i : i + size])) for i in range(len(words) - size + 1)}


class Distinct:
    """Remembers prompts; refuses copies, near-copies (over half of the 8-word runs known) and evaluation prompts (13 shared
    words in a row, or one whole)."""

    def __init__(self, excluded: Iterable[str] = ()) -> None:
        self._exact: set[str] = set()
        self._runs: set[int] = set()
        self._barred: set[int] = set()
        for text in excluded:
            words = normal_words(text)
            self._exact.add(" ".join(words))
            self._barred |= _shingles(words, OVERLAP)

    def add(self, text: str) -> bool:
        """Whether `text` is new; it is remembered if so."""
        words = normal_words(text)
        key = " ".join(words)
        if not words or key in self._exact or not self._barred.isdisjoint(_shingles(words, OVERLAP)):
            return False
        runs = _shingles(words, SHINGLE)
        if runs and len(runs & self._runs) > len(runs) / 2:
            return False
        self._exact.add(key)
        self._runs |= runs
        return True
