"""Parity checks of a few rows times packed weights, plain and routed to experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspine.common.parity.backends import Value
from dspine.common.parity.checks import Check, generator


@dataclass(frozen=True)
class PackedShape:
    """R rows, K to N, at `bits` in groups of `group`; `experts` of which every row takes `picks` (0: a plain layer)."""

    name: str
    rows: int
    width: int
    columns: int
    bits: int
    group: int
    experts: int = 0
    picks: int = 1


def shapes(scaled: bool) -> list[PackedShape]:
    """Layers of real models at the widths that mlx-community ships (few columns where a backend is emulated), odd sizes."""
    real = (
        [PackedShape("qwen3.6-35b down / 32", 16, 512, 64, 4, 64), PackedShape("smollm2 up / 16", 8, 576, 96, 8, 64)]
        if scaled
        else [PackedShape("qwen3.6-35b attention", 16, 2048, 1024, 4, 64), PackedShape("smollm2 up", 8, 576, 1536, 8, 64)]
    )
    experts = (
        [PackedShape("qwen3.6-35b experts / 16", 6, 256, 32, 4, 64, experts=16, picks=8)]
        if scaled
        else [PackedShape("qwen3.6-35b experts / 4", 4, 2048, 128, 4, 64, experts=256, picks=8)]
    )
    odd = [PackedShape(f"odd, {bits} bits", 5, 256, 37, bits, 32) for bits in (2, 3, 5, 6)]
    return [*real, *odd, PackedShape("two rows", 2, 128, 7, 4, 128), *experts, PackedShape("odd", 3, 96, 11, 6, 32, 4, 2)]


def checks(scaled: bool) -> Iterator[Check]:
    """Every check of the two operations."""
    for shape in shapes(scaled):
        for family in ("random", "same-experts", "large-bias") if shape.experts else ("random", "large-bias"):
            yield _check(shape, family)


def _unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Words int [..., K b / 32] -> values uint8 [..., K], one bit at a time."""
    single = ((words.astype(np.int64)[..., None] >> np.arange(32)) & 1).astype(np.uint8)
    stream = single.reshape(*words.shape[:-1], -1, bits)
    return (stream << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)


def _build(shape: PackedShape, family: str) -> tuple[Any, ...]:
    rng = generator("packed", shape.name, family)
    lead = (shape.experts, shape.columns) if shape.experts else (shape.columns,)
    words = rng.integers(-(2**31), 2**31, size=(*lead, shape.width * shape.bits // 32))  # any bits are some weights
    groups = (*lead, shape.width // shape.group)
    scales = rng.uniform(0.5, 1.5, size=groups) / 2**shape.bits
    biases = rng.normal(size=groups) * (30 if family == "large-bias" else 0.5)
    parts = (
        Value(rng.normal(size=(shape.rows, shape.width))),
        Value(words, "int"),
        Value(scales),
        Value(biases),
    )
    if not shape.experts:
        return *parts, shape.bits, shape.group
    picks = np.stack([rng.permutation(shape.experts)[: shape.picks] for _ in range(shape.rows)])
    if family == "same-experts":
        picks[:] = picks[0]
    return *parts, Value(picks.ravel(), "int"), shape.bits, shape.group


def _expect(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Row by row."""
    x, words, scales, biases, *picks, bits, group = args

    def weights(part: Any) -> np.ndarray:
        return _unpack(words[part], bits) * np.repeat(scales[part], group, axis=-1) + np.repeat(biases[part], group, axis=-1)

    if not picks:
        return {"out": np.stack([x @ weights(column) for column in range(len(words))], axis=1)}
    share = len(picks[0]) // len(x)
    return {"out": np.stack([weights(expert) @ x[p // share] for p, expert in enumerate(picks[0])])}


def _check(shape: PackedShape, family: str) -> Check:
    op = "gathered_rows" if shape.experts else "quantized_rows"
    return Check(
        op=op,
        shape=shape.name,
        family=family,
        build=lambda: _build(shape, family),
        run=lambda call, args: {"out": call(op, *args)},
        expect=_expect,
        kinds={"out": "out"},
        hostile=family == "large-bias",
    )
