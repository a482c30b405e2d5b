"""Prompt files for calibration: JSON lines with `messages`, `turns` or `prompt`, or plain text with one prompt a line.

A calibration on repeated prompts counts the same rounds twice and looks surer than it is, so repeats are refused by line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine.common.errors import DSpineError

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class PromptRow:
    """One prompt and where it stands. `category` and `split`: fields of the row, "" where it has none."""

    line: int
    prompt: Prompt
    category: str = ""
    split: str = ""

    @property
    def key(self) -> str:
        """The text without differences of case and blanks: equal keys are repeats."""
        parts = [self.prompt] if isinstance(self.prompt, str) else [str(m.get("content", "")) for m in self.prompt]
        return " ".join("\n".join(parts).lower().split())


def read_prompts(path: Path) -> list[PromptRow]:
    """Every prompt of a file. `messages` go in as they are, of `turns` the first. Raises DSpineError: unreadable, empty, a row
    without a prompt, or repeats (with their lines)."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DSpineError(f"prompts {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DSpineError(f"prompts {path} are not UTF-8 text (byte {error.start})") from error
    filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not filled:
        raise DSpineError(f"prompts {path} hold nothing: expected JSON lines or one prompt a line")
    is_json = path.suffix in (".jsonl", ".json") or filled[0][1].lstrip().startswith("{")
    rows = [_row(path, number, line) if is_json else PromptRow(number, line.strip()) for number, line in filled]
    refuse_repeats(rows, str(path))
    return rows


def _row(path: Path, number: int, line: str) -> PromptRow:
    where = f"prompts {path}, line {number}"
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise DSpineError(f"{where} is no JSON ({error.msg}): expected one object a line") from error
    if not isinstance(data, dict):
        raise DSpineError(f"{where} is no JSON object, but {type(data).__name__}")
    prompt: Any = None
    if data.get("messages"):
        prompt = data["messages"]
    elif data.get("turns"):
        prompt = data["turns"][0]
    else:
        prompt = data.get("prompt")
    chat = isinstance(prompt, list) and bool(prompt) and all(isinstance(m, dict) and "content" in m for m in prompt)
    if not chat and not (isinstance(prompt, str) and prompt.strip()):
        raise DSpineError(
            f"{where} holds no prompt: expected messages (list of objects), turns (list of text) or prompt (text)"
        )
    return PromptRow(number, prompt, str(data.get("category", "")), str(data.get("split", "")))


def refuse_repeats(rows: Sequence[PromptRow], where: str) -> None:
    """DSpineError naming the lines of prompts that stand more than once."""
    lines: dict[str, list[int]] = {}
    for row in rows:
        lines.setdefault(row.key, []).append(row.line)
    repeated = [found for found in lines.values() if len(found) > 1]
    if repeated:
        shown = "; ".join(" = ".join(map(str, found)) for found in repeated[:8])
        more = f" and {len(repeated) - 8} more" if len(repeated) > 8 else ""
        raise DSpineError(
            f"prompts repeat in {where}, lines {shown}{more}: calibration needs distinct prompts, drop the repeats"
        )


def refuse_overlap(rows: Sequence[PromptRow], test: Sequence[PromptRow]) -> None:
    """DSpineError naming the lines of test prompts that are also calibration prompts."""
    known = {row.key: row.line for row in rows}
    both = [(known[row.key], row.line) for row in test if row.key in known]
    if both:
        shown = "; ".join(f"{left} = {right}" for left, right in both[:8])
        raise DSpineError(f"calibration and test prompts must be disjoint, {len(both)} are in both (lines {shown}): drop them")
