"""Turns `threadgroup` declarations of a kernel body into references into the emulator's threadgroup memory."""

from __future__ import annotations

import re
from collections.abc import Iterator

_TOKEN = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|\bthreadgroup\b", re.DOTALL)
_FIRST = re.compile(r"(.*?[\w>])\s+(\w+)\s*((?:\[.*\]\s*)?)$", re.DOTALL)
_NEXT = re.compile(r"\s*(\w+)\s*((?:\[.*\]\s*)?)$", re.DOTALL)


def rewrite_threadgroup(body: str, form: str = "arena") -> tuple[str, int]:
    """Return the body with every `threadgroup T a[n], b;` replaced, and how many variables were declared.

    A `threadgroup T*` or `T&` (a pointer into threadgroup memory) stays as it is. Line numbers are kept.
    `form`: "arena" for the emulator, "extern" for clang, which knows no automatic variables with an address space.
    Raises ValueError for a declaration that Metal forbids or that is not understood.
    """
    out: list[str] = []
    position = count = 0
    while match := _TOKEN.search(body, position):
        out.append(body[position : match.start()])
        position = match.end()
        if match.group() != "threadgroup":
            out.append(match.group())
            continue
        end = _end(body, position)
        text = body[position:end]
        if _is_pointer(text):
            out.append("threadgroup")
            continue
        if body[end : end + 1] != ";":
            line = body.count("\n", 0, match.start()) + 1
            raise ValueError(
                f"line {line} of the body: expected `threadgroup T name[n];`, got `threadgroup{text}{body[end : end + 1]}`"
            )
        kind, names = _declaration(text)
        before = len(out)
        for name, dimensions in names:
            out.append(_declare(form, count, kind, name, dimensions))
            count += 1
        written = sum(piece.count("\n") for piece in out[before:])
        out.append("\n" * (text.count("\n") - written))
        position = end + 1
    return "".join(out) + body[position:], count


def check_header(header: str) -> None:
    """Raise ValueError for a `threadgroup` variable outside of the kernel's own body, where Metal allows none."""
    for match in _TOKEN.finditer(header):
        end = _end(header, match.end())
        text = header[match.end() : end]
        if match.group() == "threadgroup" and header[end : end + 1] == ";" and not _is_pointer(text):
            line = header.count("\n", 0, match.start()) + 1
            raise ValueError(
                f"line {line} of the header: threadgroup variables live in the kernel's body, got `threadgroup{text};`"
            )


def _is_pointer(text: str) -> bool:
    """Whether a declarator makes a pointer or a reference: `T* p`, `T& x`, `T (&a)[n]`."""
    return bool(re.search(r"[*&]", _outside_brackets(text)) or re.search(r"\(\s*[*&]", text))


def _declare(form: str, number: int, kind: str, name: str, dimensions: str) -> str:
    kind, dimensions = " ".join(kind.split()), " ".join(dimensions.split())
    if form == "extern":
        return f"extern threadgroup {kind} {name}{dimensions}; "
    alias = f"emu_type_{number}"
    return (
        f"using {alias} = {kind}{dimensions}; {alias}& {name} = *({alias}*)"
        f'emu_threadgroup({number}, sizeof({alias}), sizeof({kind}), alignof({alias}), "{name}"); '
    )


def _levels(text: str) -> Iterator[tuple[int, str, int]]:
    """(index, character, depth); angle brackets count only outside of round and square ones, where they are comparisons."""
    round_depth = angle_depth = 0
    for i, c in enumerate(text):
        if c in ")]":
            round_depth -= 1
        if c == ">" and round_depth == 0:
            angle_depth -= 1
        yield i, c, min(round_depth, angle_depth) if min(round_depth, angle_depth) < 0 else round_depth + angle_depth
        if c in "([":
            round_depth += 1
        if c == "<" and round_depth == 0:
            angle_depth += 1


def _end(body: str, start: int) -> int:
    """Index of the character that ends what follows `threadgroup`: `;`, `=`, a brace or a bracket that was not opened."""
    for i, c, depth in _levels(body[start:]):
        if depth < 0 or (depth == 0 and c in ";={}"):
            return start + i
    return len(body)


def _outside_brackets(text: str) -> str:
    return "".join(c for _, c, depth in _levels(text) if depth == 0)


def _declaration(text: str) -> tuple[str, list[tuple[str, str]]]:
    """(type, [(name, dimensions)]) of a declaration without its storage class."""
    commas = [i for i, c, depth in _levels(text) if c == "," and depth == 0]
    pieces = [text[a:b] for a, b in zip([0, *(i + 1 for i in commas)], [*commas, len(text)], strict=True)]
    first, rest = _FIRST.match(pieces[0].strip()), [_NEXT.match(piece) for piece in pieces[1:]]
    if first is None or None in rest:
        raise ValueError(f"expected `threadgroup T name[n];`, got `threadgroup{text};`")
    return first.group(1), [(first.group(2), first.group(3)), *((m.group(1), m.group(2)) for m in rest)]
