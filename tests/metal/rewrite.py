"""Turns `threadgroup` declarations of a kernel body into references into the emulator's threadgroup memory."""

from __future__ import annotations

import re

_TOKEN = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|\bthreadgroup\b", re.DOTALL)
_DECLARATOR = re.compile(r"\s*(\w+)\s*((?:\[.*\]\s*)?)$", re.DOTALL)


def rewrite_threadgroup(body: str) -> tuple[str, int]:
    """Return the body with every `threadgroup T a[n], b;` replaced, and how many arrays were declared.

    A `threadgroup T*` or `T&` (a pointer into threadgroup memory) stays as it is. Line numbers are kept.
    """
    out: list[str] = []
    position = count = 0
    while match := _TOKEN.search(body, position):
        if match.group() != "threadgroup":
            out.append(body[position : match.end()])
            position = match.end()
            continue
        end = _statement_end(body, match.end())
        declaration = _parse(body[match.end() : end]) if end >= 0 else None
        if declaration is None:
            out.append(body[position : match.end()])
            position = match.end()
            continue
        kind, names = declaration
        out.append(body[position : match.start()])
        for name, dimensions in names:
            alias = f"emu_type_{count}"
            out.append(
                f"using {alias} = {kind}{dimensions}; {alias}& {name} = *({alias}*)"
                f'emu_threadgroup({count}, sizeof({alias}), sizeof({kind}), alignof({alias}), "{name}"); '
            )
            count += 1
        out.append("\n" * body.count("\n", match.start(), end))
        position = end + 1
    return "".join(out) + body[position:], count


def _statement_end(body: str, start: int) -> int:
    """Index of the `;` that ends a declaration from `start`, or -1 when something else comes first."""
    depth = 0
    for i in range(start, len(body)):
        c = body[i]
        if c in "[(<":
            depth += 1
        elif c in "])>":
            depth -= 1
        if depth < 0 or c in "{=":
            return -1
        if c == ";" and depth == 0:
            return i
    return -1


def _parse(text: str) -> tuple[str, list[tuple[str, str]]] | None:
    """(type, [(name, dimensions)]) of a declaration without its storage class, or None for pointers and parameters."""
    pieces = _split(text)
    head = re.match(r"(.*?[\w>])\s+(\w+)\s*((?:\[.*\]\s*)?)$", pieces[0].strip(), re.DOTALL)
    if head is None or "*" in head.group(1) or "&" in head.group(1):
        return None
    names = [(head.group(2), head.group(3).strip())]
    for piece in pieces[1:]:
        match = _DECLARATOR.match(piece)
        if match is None:
            return None
        names.append((match.group(1), match.group(2).strip()))
    return head.group(1).strip(), names


def _split(text: str) -> list[str]:
    pieces, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[(<") - (c in "])>")
        if c == "," and depth == 0:
            pieces.append(text[start:i])
            start = i + 1
    return [*pieces, text[start:]]
