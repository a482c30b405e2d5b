"""Parity checks of what lies between the products of a decoder layer: attention's inputs, residual sums and norms, gates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dspine.common.norms import RMSNorm
from dspine.common.parity.backends import Value
from dspine.common.parity.checks import Check, generator

EPS = 1e-6


@dataclass(frozen=True)
class InputsShape:
    """B sequences, w tokens, Hq and Hk heads of D of which R dimensions turn, sections behind v, C rows of the cache."""

    name: str
    batch: int
    count: int
    heads: int
    key_heads: int
    size: int
    turned: int
    behind: int
    capacity: int


def inputs_shapes(scaled: bool) -> list[InputsShape]:
    """Real heads (few of them where a backend is emulated or interpreted), partial rotation with gates behind, odd sizes."""
    if scaled:
        real = [InputsShape("qwen3-8b / 8", 1, 16, 4, 1, 128, 128, 0, 40)]
        real.append(InputsShape("qwen3.6-35b / 8", 1, 8, 2, 1, 256, 64, 2, 40))
    else:
        real = [InputsShape("qwen3-8b", 1, 16, 32, 8, 128, 128, 0, 2304)]
        real.append(InputsShape("qwen3.6-35b", 1, 16, 16, 2, 256, 64, 16, 2304))
    return [*real, InputsShape("odd B=3", 3, 5, 6, 2, 48, 22, 1, 37), InputsShape("w=1, keys only", 2, 1, 0, 3, 64, 64, 0, 20)]


def checks(scaled: bool) -> Iterator[Check]:
    """Every check of the four operations."""
    for shape in inputs_shapes(scaled):
        for family in ("random", "no-norm", "wide-norm", "dead-rows", "large"):
            yield _inputs_check(shape, family)
        for layers, family in ((1, "random"), (3, "random"), (2, "wide-norm"), (3, "dead-rows")):
            yield _context_check(shape, layers, family)
    for rows, columns in ((1, 4096), (16, 2048), (3, 37)) if not scaled else ((1, 1024), (3, 37)):
        for family in ("random", "no-sum", "wide-norm", "zeros", "large"):
            yield _norm_check(rows, columns, family)
    for rows, size in ((1, 12288), (16, 1536), (3, 37)) if not scaled else ((2, 1300), (3, 37)):
        for family in ("random", "large"):
            yield _silu_check(rows, size, family)
            yield _gate_check(rows, size, family)


def _inputs(shape: InputsShape, family: str) -> tuple[Any, ...]:
    rng = generator("attention inputs", shape.name, family)
    sections = shape.heads + 2 * shape.key_heads + shape.behind
    projected = rng.normal(size=(shape.batch, shape.count, sections, shape.size))
    if family == "large":
        projected *= 1e4
    angle = rng.uniform(-3, 3, size=(shape.capacity, shape.turned // 2))
    cos, sin = np.concatenate([np.cos(angle)] * 2, axis=1), np.concatenate([-np.sin(angle), np.sin(angle)], axis=1)
    lengths = rng.integers(0, shape.capacity - shape.count, size=shape.batch)
    live = np.full(shape.batch, shape.count)
    if family == "dead-rows":
        live = rng.integers(0, shape.count, size=shape.batch)
    keys, values = (rng.normal(size=(shape.batch, shape.key_heads, shape.capacity, shape.size)) for _ in range(2))
    norm = None
    if family != "no-norm":
        weight = rng.uniform(0.2, 3, size=(shape.heads + shape.key_heads, shape.size))
        norm = RMSNorm(Value(weight, "f32" if family == "wide-norm" else "x"), EPS)
    return (
        Value(projected), Value(cos), Value(sin), Value(lengths, "int"), Value(live, "int"), Value(keys), Value(values),
        shape.heads, norm,
    )  # fmt: skip


def _expect_inputs(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Token by token, head by head."""
    projected, cos, sin, lengths, live, keys, values, heads, norm = args
    batch, count, _, size = projected.shape
    key_heads, capacity, half = keys.shape[1], keys.shape[2], cos.shape[1] // 2
    query, keys, values = np.empty((batch, count, heads, size)), keys.copy(), values.copy()
    for b in range(batch):
        for i in range(count):
            place = int(lengths[b]) + i if i < live[b] else capacity - 1
            for h in range(heads + key_heads):
                x = projected[b, i, h]
                if norm is not None:
                    x = norm.weight[h] * x / np.sqrt(np.mean(x**2) + norm.eps)
                # x cos + roll(x) sin, whatever the tables hold: the two halves of a pair one after the other
                first = x[:half] * cos[place, :half] + x[half : 2 * half] * sin[place, :half]
                second = x[half : 2 * half] * cos[place, half:] + x[:half] * sin[place, half:]
                row = np.concatenate([first, second, x[2 * half :]])
                if h < heads:
                    query[b, i, h] = row
                else:
                    keys[b, h - heads, place] = row
            for h in range(key_heads):
                values[b, h, place] = projected[b, i, heads + key_heads + h]
    return {"query": query, "keys": keys[:, :, :-1], "values": values[:, :, :-1]}


def _inputs_check(shape: InputsShape, family: str) -> Check:
    def run(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
        query, keys, values = call("attention_inputs", *args)
        return {"query": query, "keys": keys[:, :, :-1], "values": values[:, :, :-1]}  # the last row is scrap

    return Check(
        op="attention_inputs",
        shape=shape.name,
        family=family,
        build=lambda: _inputs(shape, family),
        run=run,
        expect=_expect_inputs,
        kinds={"query": "steps", "keys": "steps", "values": "exact"},
    )


def _context_check(shape: InputsShape, layers: int, family: str) -> Check:
    """The keys and values of several layers, each as `attention_inputs` without queries makes them."""

    def each() -> list[tuple[Any, ...]]:
        alone = replace(shape, heads=0, behind=0)
        return [_inputs(replace(alone, name=f"{shape.name} {layer}"), family) for layer in range(layers)]

    def build() -> tuple[Any, ...]:
        parts = each()
        projected = Value(np.stack([part[0].array for part in parts], axis=2))
        store = Value(np.stack([np.stack([part[5].array, part[6].array]) for part in parts]))
        weight = Value(np.stack([part[8].weight.array for part in parts]), parts[0][8].weight.role)
        return projected, *parts[0][1:5], store, weight, EPS

    def expect(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
        projected, cos, sin, lengths, live, store, weight, eps = args
        found = [
            _expect_inputs((projected[:, :, i], cos, sin, lengths, live, *store[i], 0, RMSNorm(weight[i], eps)))
            for i in range(layers)
        ]
        return {name: np.stack([part[name] for part in found]) for name in ("keys", "values")}

    def run(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
        store = call("context_inputs", *args)
        return {"keys": store[:, 0, :, :, :-1], "values": store[:, 1, :, :, :-1]}

    return Check(
        op="context_inputs",
        shape=f"{shape.name} L={layers}",
        family=family,
        build=build,
        run=run,
        expect=expect,
        kinds={"keys": "steps", "values": "exact"},
    )


def _norm_check(rows: int, columns: int, family: str) -> Check:
    def build() -> tuple[Any, ...]:
        rng = generator("add rms norm", rows, columns, family)
        scale = {"zeros": 0.0, "large": 1e4}.get(family, 1.0)
        x, y = (scale * rng.normal(size=(rows, columns)) for _ in range(2))
        weight = Value(rng.uniform(0.2, 3, size=columns), "f32" if family == "wide-norm" else "x")
        return Value(x), None if family == "no-sum" else Value(y), RMSNorm(weight, EPS)

    def expect(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
        x, y, norm = args
        total = x if y is None else x + y
        return {"sum": total, "normed": norm.weight * total / np.sqrt(np.mean(total**2, axis=-1, keepdims=True) + norm.eps)}

    return Check(
        op="add_rms_norm",
        shape=f"{rows} x {columns}",
        family=family,
        build=build,
        run=lambda call, args: dict(zip(("sum", "normed"), call("add_rms_norm", *args), strict=True)),
        expect=expect,
        kinds={"sum": "out", "normed": "steps"},
    )


def _silu_check(rows: int, size: int, family: str) -> Check:
    def build() -> tuple[Any, ...]:
        rng = generator("silu mul", rows, size, family)
        return (Value(rng.normal(size=(rows, 2 * size)) * (1e3 if family == "large" else 1.0)),)

    def expect(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
        gate, up = args[0][:, :size], args[0][:, size:]
        return {"out": gate * np.exp(-np.logaddexp(0, -gate)) * up}

    return Check(
        op="silu_mul",
        shape=f"{rows} x {size}",
        family=family,
        build=build,
        run=lambda call, args: {"out": call("silu_mul", *args)},
        expect=expect,
        kinds={"out": "steps"},
    )


def _gate_inputs(rows: int, size: int, family: str) -> tuple[Any, ...]:
    rng = generator("gate", str(rows), str(size), family)
    scale = 1e4 if family == "large" else 1.0
    return tuple(Value(scale * rng.normal(size=(1, rows, 1, size))) for _ in range(2))


def _gate_check(rows: int, size: int, family: str) -> Check:
    return Check(
        op="sigmoid_mul",
        shape=f"{rows} x {size}",
        family=family,
        build=lambda: _gate_inputs(rows, size, family),
        run=lambda call, args: {"out": call("sigmoid_mul", *args)},
        expect=lambda args: {"out": args[0] * np.exp(-np.logaddexp(0, -args[1]))},
        kinds={"out": "steps"},
        hostile=family == "large",
    )
