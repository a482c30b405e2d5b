"""Parity checks of a Gated DeltaNet layer between its products, and of what a round leaves for all layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dspine.common.gdn import GdnFactors
from dspine.common.gdn_rounds import GdnKept, GdnLayerWeights
from dspine.common.norms import RMSNorm
from dspine.common.parity import gdn_checks
from dspine.common.parity.backends import Value
from dspine.common.parity.checks import Check, generator
from dspine.common.parity.gdn_checks import Shape

ROOM = 2  # rows that the memory has beyond the block


def shapes(scaled: bool) -> list[Shape]:
    """Real heads (few of them where a backend is emulated or interpreted), a batch with padding, odd sizes."""
    heads = (1, 2) if scaled else (16, 32)
    real = [Shape(f"qwen3.6-35b w={w}", 1, w, *heads, 128, 128) for w in ((1, 5) if scaled else (1, 4, 16))]
    return [*real, Shape("odd B=3 w=7 2/4 heads 24x40", 3, 7, 2, 4, 24, 40)]


def checks(scaled: bool) -> Iterator[Check]:
    """Every check of the two operations."""
    for shape in shapes(scaled):
        for family in ("random", "first-round", *(("padded",) if shape.batch > 1 else ())):
            yield _round_check(shape, family)
            yield _keep_check(shape, family)


def _room(shape: Shape, layers: tuple[int, ...] = (), fill: float = 7.0) -> GdnKept:
    """Memory that holds something else."""
    rows = (*layers, shape.batch, shape.tokens + ROOM)
    z = np.full((*rows, shape.value_heads, shape.value_dim), fill)
    k, g = np.full((*rows, shape.key_heads, shape.key_dim), fill), np.full((*rows, shape.value_heads), fill)
    return GdnKept(GdnFactors(Value(z, "f32"), Value(k), Value(g, "f32")), Value(np.full((*rows, shape.layout.channels), fill)))


def _round_inputs(shape: Shape, family: str) -> tuple[Any, ...]:
    rng = generator("gdn round", shape.name, family)
    projected, window, a, b, inputs, layout = gdn_checks._inputs_values(shape, "random")
    z = rng.normal(size=(shape.batch, shape.tokens, shape.value_heads * shape.value_dim))
    joined = np.concatenate([projected.array, z, b.array, a.array], axis=-1)
    *_, state, past, pending, live = gdn_checks._deferred_inputs(shape, "padded" if family == "padded" else "random")
    if family == "first-round":
        pending = Value(np.zeros_like(pending.array), "int")
    norm = RMSNorm(Value(rng.uniform(0.2, 3, size=shape.value_dim), "f32"), 1e-6)
    return Value(joined), window, state, past, pending, _room(shape), GdnLayerWeights(inputs, norm, layout), live


def _run_round(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    rows, kept, state = call("gdn_round", *args)
    factors = kept.factors
    return {"rows": rows, "z": factors.z, "k": factors.k, "g": factors.g, "inputs": kept.inputs, "state": state}


def _expect_round(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """From the written-out inputs, the token recurrence, and a norm head by head."""
    joined, window, state, past, pending, _, weights, live = args
    layout = weights.layout
    inputs, z, b, a = np.split(joined, np.cumsum(weights.sections)[:3], axis=-1)
    made = gdn_checks._expect_inputs((inputs, window, a, b, weights.inputs, layout))
    block = [made[name] for name in ("q", "k", "v", "log_decay", "beta")]
    found = gdn_checks._expect_deferred((*block, state, past, pending, live))
    out, gate = found["out"], z.reshape(found["out"].shape)
    normed = weights.norm.weight * out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + weights.norm.eps)
    rows = normed * gate * np.exp(-np.logaddexp(0, -gate))
    return {
        "rows": rows.reshape(*z.shape),
        "z": found["z"],
        "k": made["k"],
        "g": found["g"],
        "inputs": inputs,
        "state": found["state"],
    }


def _round_check(shape: Shape, family: str) -> Check:
    return Check(
        op="gdn_round",
        shape=shape.name,
        family=family,
        build=lambda: _round_inputs(shape, family),
        run=_run_round,
        expect=_expect_round,
        kinds={"rows": "steps", "z": "steps", "k": "out", "g": "state", "inputs": "exact", "state": "state"},
        hostile=True,
    )


def _keep_inputs(shape: Shape, family: str) -> tuple[Any, ...]:
    rng = generator("gdn keep", shape.name, family)
    layers, count = (shape.layers,), shape.tokens + ROOM

    def normal(*size: int) -> np.ndarray:
        return rng.normal(size=(*layers, shape.batch, *size))

    z, k = (shape.value_heads, shape.value_dim), (shape.key_heads, shape.key_dim)
    past, fresh = (GdnFactors(normal(count, *z), normal(count, *k), normal(count, z[0])) for _ in range(2))
    inputs, windows = normal(count, shape.layout.channels), normal(3, shape.layout.channels)
    m = rng.integers(1, count + 1, size=shape.batch)
    if family == "first-round":
        m[...] = 0
    for row, length in enumerate(m):  # what was not accepted is never read
        for array in (fresh.z, fresh.k, fresh.g, inputs):
            array[:, row, length:] = np.nan
    old, new = (GdnFactors(Value(x.z, "f32"), Value(x.k), Value(x.g, "f32")) for x in (past, fresh))
    return Value(windows), old, GdnKept(new, Value(inputs)), Value(m, "int")


def _run_keep(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    windows, past = call("gdn_keep", *args)
    return {"windows": windows, "z": past.z, "k": past.k, "g": past.g}


def _expect_keep(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Token after token."""
    windows, past, fresh, m = args
    windows, z, k, g = (x.copy() for x in (windows, past.z, past.k, past.g))
    for row, count in enumerate(m):
        for i in range(int(count)):
            windows[:, row] = np.concatenate([windows[:, row, 1:], fresh.inputs[:, row, i][:, None]], axis=1)
            z[:, row, i], k[:, row, i], g[:, row, i] = (getattr(fresh.factors, name)[:, row, i] for name in ("z", "k", "g"))
    return {"windows": windows, "z": z, "k": k, "g": g}


def _keep_check(shape: Shape, family: str) -> Check:
    return Check(
        op="gdn_keep",
        shape=shape.name,
        family=family,
        build=lambda: _keep_inputs(shape, family),
        run=_run_keep,
        expect=_expect_keep,
        kinds={"windows": "exact", "z": "exact", "k": "exact", "g": "exact"},
    )
