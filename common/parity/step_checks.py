"""Parity checks of a round's small steps: rows of tables, a block's entry, uniforms, limits, lengths, what a block holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dspine.common.parity.backends import Value
from dspine.common.parity.checks import BOTH, SINGLE, Check, generator
from dspine.common.selection.lengths import RoundLengths


def checks(scaled: bool) -> Iterator[Check]:
    """Every check of the operations in `common.stepping`, and of a round's lengths."""
    for batch, rows, width, rank in ((1, 16, 4096, 256), (3, 5, 1000, 24), (2, 1, 7, 40)):
        shape = f"B={batch} R={rows} H={width}"
        yield _check("table_rows", shape, "random", _rows_inputs, (batch, rows, width), _run_rows, _expect_rows, BOTH)
        for family in ("random", "scaled", "no-code"):
            size = (batch, rows, width, rank, family)
            yield _check("enter_block", shape, family, _enter_inputs, size, _run_enter, _expect_enter, BOTH)
    for batch, positions, count in ((1, 40, 16), (3, 17, 5), (2, 3, 1)):
        shape, size = f"B={batch} P={positions} n={count}", (batch, positions, count)
        yield _check("round_uniforms", shape, "random", _uniform_inputs, size, _run_uniforms, _expect_uniforms)
    for batch, w, rows in ((1, 16, 16), (5, 4, 8), (3, 1, 5)):
        for family in ("random", "capped"):
            size = (batch, w, family)
            yield _check("round_limits", f"B={batch} w={w}", family, _limit_inputs, size, _run_limits, _expect_limits)
        for family in ("random", "short", "no-check", "none"):
            size = (batch, rows, family)
            yield _check("place_drafts", f"B={batch} W={rows}", family, _place_inputs, size, _run_place, _expect_place)
        for family in ("random", "corrected", "longer-arena"):
            size = (batch, rows, family)
            yield _check("bound_lengths", f"B={batch} W={rows}", family, _bound_inputs, size, _run_bound, _expect_bound)


def _check(
    op: str, shape: str, family: str, build: Any, size: tuple[Any, ...], run: Any, expect: Any, dtypes: tuple[str, ...] = SINGLE
) -> Check:
    def inputs() -> tuple[Any, ...]:
        return build(generator("step", op, shape, family), *size)

    names = {"table_rows": ("rows",), "enter_block": ("block", "code"), "round_uniforms": ("uniforms",),
             "round_limits": ("live", "limit"), "place_drafts": ("block", "flags"),
             "bound_lengths": ("nominal", "upper", "chosen", "survival")}[op]  # fmt: skip
    kinds = {name: "steps" if name == "code" or (op, family) == ("enter_block", "scaled") else "exact" for name in names}
    return Check(op, shape, family, inputs, run, expect, kinds, dtypes)


def _rows_inputs(rng: np.random.Generator, batch: int, rows: int, width: int) -> tuple[Any, ...]:
    return Value(rng.normal(size=(61, width))), Value(rng.integers(0, 61, size=(batch, rows)), "int")


def _run_rows(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    return {"rows": call("table_rows", *args)}


def _expect_rows(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    return {"rows": args[0][args[1]]}


def _enter_inputs(rng: np.random.Generator, batch: int, rows: int, width: int, rank: int, family: str) -> tuple[Any, ...]:
    codes = None if family == "no-code" else Value(rng.normal(size=(53, rank)))
    scale = 2.25 if family == "scaled" else 1.0
    anchor = Value(rng.integers(0, 53, size=batch), "int")
    return Value(rng.normal(size=(53, width))), anchor, Value(rng.normal(size=width)), rows, codes, scale


def _run_enter(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    block, code = call("enter_block", *args)
    return {"block": block} if code is None else {"block": block, "code": code}


def _expect_enter(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    table, anchor, fill, rows, codes, scale = args
    block = np.repeat(np.repeat(fill[None, None], rows, axis=1), len(anchor), axis=0)
    block[:, 0] = table[anchor] * scale
    return {"block": block} if codes is None else {"block": block, "code": codes[anchor] * np.sqrt(codes.shape[1])}


def _uniform_inputs(rng: np.random.Generator, batch: int, positions: int, count: int) -> tuple[Any, ...]:
    start = rng.integers(0, positions, size=batch)
    start[0] = positions - 1  # beyond the table from its second position on
    return Value(rng.random((batch, positions, 3)), "f32"), Value(start, "int"), count


def _run_uniforms(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    return {"uniforms": call("round_uniforms", *args)}


def _expect_uniforms(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    table, start, count = args
    rows = [[table[b, min(first + i, table.shape[1] - 1)] for i in range(count)] for b, first in enumerate(start)]
    return {"uniforms": np.array(rows).transpose(2, 0, 1)}


def _limit_inputs(rng: np.random.Generator, batch: int, w: int, family: str) -> tuple[Any, ...]:
    remaining, finite = rng.integers(0, 2 * w + 1, size=batch), rng.integers(0, 2, size=batch)
    finite[0] = 1
    limits = Value(rng.integers(0, w + 2, size=batch), "int") if family == "capped" else None
    return Value(remaining, "int"), Value(finite, "int"), w, limits


def _run_limits(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    live, limit = call("round_limits", args[0], args[1] != 0, *args[2:])
    return {"live": live, "limit": limit}


def _expect_limits(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    remaining, finite, w, limits = args
    live = [min(left, w, w if limits is None else limits[b]) for b, left in enumerate(remaining)]
    return {"live": np.array(live), "limit": np.array([max(x - 1, 0) if ok else 0 for x, ok in zip(live, finite, strict=True)])}


def _place_inputs(rng: np.random.Generator, batch: int, rows: int, family: str) -> tuple[Any, ...]:
    count = {"short": (rows - 1) // 2, "none": 0}.get(family, rows - 1)
    finite = None if family in ("no-check", "none") else Value(np.arange(batch) % 2, "int")
    tokens, anchor = rng.integers(0, 90, size=(batch, count)), rng.integers(0, 90, size=batch)
    block = Value(rng.integers(0, 90, size=(batch, rows)), "int")
    return Value(tokens, "int"), finite, Value(anchor, "int"), block, Value(rng.integers(0, 2, size=batch), "int")


def _run_place(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    tokens, finite, anchor, block, flags = args
    block, flags = call("place_drafts", tokens, None if finite is None else finite != 0, anchor, block, flags != 0)
    return {"block": block, "flags": flags}


def _expect_place(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    tokens, finite, anchor, block, flags = args
    found = block.copy()
    flags = np.ones_like(flags) if finite is None else finite
    for b, row in enumerate(found):
        row[0] = anchor[b]
        row[1 : 1 + tokens.shape[1]] = tokens[b] * flags[b]
    return {"block": found, "flags": flags}


def _bound_inputs(rng: np.random.Generator, batch: int, rows: int, family: str) -> tuple[Any, ...]:
    length = rng.integers(2, rows + 2, size=batch)
    remaining, finite = rng.integers(0, rows + 3, size=batch), np.arange(batch) % 3 != 1
    room = [Value(np.full(batch, 77), "int") for _ in range(3)]
    wide = rows + (3 if family == "longer-arena" else 0)
    room.append(Value(np.full((batch, wide), 0.5), "f32"))
    given = (Value(length, "int"), Value(np.minimum(length + 1, rows), "int"), Value(rng.random((batch, rows)), "f32"))
    return (*given, Value(finite, "int"), Value(remaining, "int"), RoundLengths(*room), rows, family == "corrected")


def _run_bound(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    length, stage_zero, survival, finite, *rest = args
    found = dict(vars(call("bound_lengths", length, stage_zero, survival, finite != 0, *rest)))
    found["survival"] = found["survival"][:, : survival.shape[1]]
    return found


def _expect_bound(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    length, stage_zero, survival, finite, remaining, _, rows, corrected = args
    most = np.array([max(min(left, rows), 1) if ok else 1 for left, ok in zip(remaining, finite, strict=True)])
    upper = np.minimum(stage_zero if corrected else length, most)
    return {"nominal": length, "upper": upper, "chosen": np.minimum(length, most), "survival": survival}
