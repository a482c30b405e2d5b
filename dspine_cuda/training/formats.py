"""SpecForge's data files: conversations JSONL, preformatted texts and pre-tokenised rows, read as they are and written.

A row is `{"id", "conversations": [{"role", "content"}, ...]}`, also in ShareGPT's spelling (`from`/`value`, human/gpt);
`{"id", "text"}`, already rendered with the chat template; or `{"input_ids", "loss_mask"}` (`docs/training.md`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.errors import DSpineError
from dspine_cuda.training.files import json_lines

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system", "tool": "tool"}
SHAPES = "conversations (or messages): [{'role', 'content'}, ...], text, or input_ids with loss_mask"


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) of every line of a JSONL file."""
    try:
        lines = json_lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DSpineError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DSpineError(f"{where}: not valid JSON ({error})") from error
        if not isinstance(row, dict):
            raise DSpineError(f"{where}: expected an object with {SHAPES}, got {type(row).__name__}")
        yield where, row


def normal_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """`role`/`content` messages from either spelling; text content only."""
    if not isinstance(messages, list) or not messages:
        raise DSpineError(f"{where}: expected {SHAPES}; the conversation is empty")
    normal = []
    for number, message in enumerate(messages):
        role = message.get("role", message.get("from")) if isinstance(message, dict) else None
        content = message.get("content", message.get("value")) if isinstance(message, dict) else None
        if role not in _ROLES:
            raise DSpineError(f"{where}: expected {SHAPES}; message {number} has role {role!r}, known: {', '.join(_ROLES)}")
        if not isinstance(content, str):
            kind = type(content).__name__
            raise DSpineError(f"{where}: expected {SHAPES}; message {number} has no text content, but {kind}")
        extra = {key: message[key] for key in ("tool_calls", "reasoning_content") if message.get(key)}
        normal.append({"role": _ROLES[role], "content": content} | extra)
    return normal


def tokens_of_ids(row: dict[str, Any], where: str) -> tuple[np.ndarray, np.ndarray]:
    """A pre-tokenised row -> tokens int [n], supervised bool [n]."""
    ids, mask = row["input_ids"], row.get("loss_mask")
    if mask is None:
        raise DSpineError(f"{where}: input_ids need a loss_mask of the same length (1 = the target wrote this token)")
    ids, mask = (value[0] if value and isinstance(value[0], list) else value for value in (ids, mask))  # [1, n] or [n]
    try:
        tokens, supervised = np.array(ids, dtype=np.int64), np.array(mask, dtype=np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise DSpineError(f"{where}: input_ids and loss_mask must be lists of whole numbers") from error
    if tokens.ndim != 1 or tokens.shape != supervised.shape or (tokens < 0).any():
        raise DSpineError(f"{where}: {tokens.shape} input_ids and {supervised.shape} loss_mask; expected two equal lists")
    return tokens, supervised != 0


def tokens_of_text(text: Any, tokenizer: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    """A text already rendered with the chat template: the tokens of every assistant turn, its end included, are supervised."""
    if not isinstance(text, str) or not text:
        raise DSpineError(f"{where}: text must be a string that is not empty")
    header, end = assistant_marks(tokenizer, where)
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
    supervised = np.zeros(len(tokens), dtype=bool)
    start = text.find(header)
    while start >= 0:
        first = start + len(header)
        stop = text.find(end, first)
        last = len(text) if stop < 0 else stop + len(end)
        counts = [len(tokenizer.encode(text[:cut], add_special_tokens=False)) for cut in (first, last)]
        supervised[counts[0] : counts[1]] = True
        start = text.find(header, last)
    if not supervised.any():
        raise DSpineError(f"{where}: no assistant turn in the text; expected {header!r} before each")
    return tokens, supervised


def assistant_marks(tokenizer: Any, where: str) -> tuple[str, str]:
    """What the chat template writes before and after an assistant turn."""
    if not getattr(tokenizer, "chat_template", None):
        raise DSpineError(f"{where}: the target has no chat template; give input_ids with loss_mask instead")
    user, mark = {"role": "user", "content": "?"}, "\u241eANSWER\u241e"
    prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    without = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=False)
    whole = tokenizer.apply_chat_template([user, {"role": "assistant", "content": mark}], tokenize=False)
    header, after = prompt.removeprefix(without), whole.partition(mark)[2]
    if not header or not after or header == prompt:
        raise DSpineError(f"{where}: the chat template does not mark assistant turns; give input_ids with loss_mask instead")
    return header, after.rstrip("\n") or after


def export_rows(conversations: list[Any], decode: Callable[[list[int]], str] | None) -> Iterator[dict[str, Any]]:
    """SpecForge rows of tokenised conversations: pre-tokenised, or preformatted texts where `decode` is given."""
    for number, conversation in enumerate(conversations):
        ids = [int(token) for token in conversation.tokens]
        row: dict[str, Any] = {"id": f"dspine-{number:07d}"}
        if decode is None:
            yield row | {"input_ids": ids, "loss_mask": conversation.supervised.astype(int).tolist()}
        else:
            yield row | {"text": decode(ids), "is_preformatted": True}
