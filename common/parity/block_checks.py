"""Parity checks of what a target does with a block besides Gated DeltaNet: attention over the cache, a router's choice, routed
experts, products of a few rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspine.common.experts import SharedExpert
from dspine.common.norms import RMSNorm
from dspine.common.parity.backends import Value
from dspine.common.parity.checks import Check, generator


@dataclass(frozen=True)
class AttentionShape:
    """B sequences, w tokens, Hq and Hk heads of D, C rows of the cache."""

    name: str
    batch: int
    count: int
    heads: int
    key_heads: int
    size: int
    capacity: int


@dataclass(frozen=True)
class ExpertShape:
    """N tokens, k of E experts, hidden size H, inner size I."""

    name: str
    tokens: int
    picks: int
    experts: int
    hidden: int
    inner: int


def attention_shapes(scaled: bool) -> list[AttentionShape]:
    """Real heads (few of them, and short caches, where a backend is emulated or interpreted), odd sizes, primes."""
    if scaled:
        real = [AttentionShape("qwen3-8b / 8", 1, 16, 4, 1, 128, 300), AttentionShape("qwen3.6-35b / 4", 1, 8, 4, 1, 256, 200)]
    else:
        real = [
            AttentionShape("qwen3-8b", 1, 16, 32, 8, 128, 2304),
            AttentionShape("qwen3.6-35b", 1, 16, 16, 2, 256, 2304),
            AttentionShape("smollm2", 1, 8, 9, 3, 64, 1024),
        ]
    return [*real, AttentionShape("odd B=3", 3, 5, 6, 2, 48, 270), AttentionShape("w=1", 2, 1, 8, 2, 64, 150)]


def expert_shapes(scaled: bool) -> list[ExpertShape]:
    """Real experts, or few and narrow ones of the same numbers of picks; odd sizes."""
    real = (
        [ExpertShape("qwen3.6-35b / 8", 16, 8, 32, 256, 64)]
        if scaled
        else [ExpertShape("qwen3.6-35b, 32 experts", 16, 8, 32, 2048, 512)]  # all 256 take minutes in float64
    )
    return [*real, ExpertShape("hybrid-tiny", 16, 4, 32, 256, 80), ExpertShape("odd", 5, 3, 7, 130, 37)]


def checks(scaled: bool) -> Iterator[Check]:
    """Every check of the four operations."""
    for shape in attention_shapes(scaled):
        for family in ("random", "not-causal", "window", "large", "no-context"):
            yield _attention_check(shape, family)
    for size in expert_shapes(scaled):
        for family in ("random", "one-token", "same-experts", "zero-weights", "whole-layer"):
            yield _experts_check(size, family)
        for family in ("random", "ties", "not-normalised", "one-token"):
            yield _picks_check(size, family)
    for rows, columns, inputs in [(16, 130, 96), (3, 37, 45)] if scaled else [(1, 12352, 2048), (16, 1281, 2048), (3, 37, 45)]:
        yield _linear_check(rows, columns, inputs)
        yield _gated_check(rows, columns, inputs)


def _attention_inputs(shape: AttentionShape, family: str) -> tuple[Any, ...]:
    rng = generator("attention", shape.name, family)
    query = rng.normal(size=(shape.batch, shape.count, shape.heads, shape.size))
    keys, values = (rng.normal(size=(shape.batch, shape.key_heads, shape.capacity, shape.size)) for _ in range(2))
    if family == "large":  # scores of some hundreds: the exponential must not overflow
        query, keys = query * 10, keys * 10
    lengths = rng.integers(0, shape.capacity - shape.count + 1, size=shape.batch)
    lengths[0] = 0 if family == "no-context" else shape.capacity - shape.count
    for i, length in enumerate(lengths):
        keys[i, :, length + shape.count :] = np.nan
        values[i, :, length + shape.count :] = np.nan
    window = 37 if family == "window" else None
    return Value(query), Value(keys), Value(values), Value(lengths, "int"), shape.size**-0.5, family != "not-causal", window


def _attention(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Token by token over exactly the rows it sees."""
    query, keys, values, lengths, scale, causal, window = args
    out = np.empty_like(query)
    batch, count, heads, _ = query.shape
    group = heads // keys.shape[1]
    for b in range(batch):
        for i in range(count):
            place = int(lengths[b]) + i
            end = place + 1 if causal else int(lengths[b]) + count
            begin = 0 if window is None else max(0, place - window + 1)
            for h in range(heads):
                score = keys[b, h // group, begin:end] @ query[b, i, h] * scale
                weight = np.exp(score - score.max())
                out[b, i, h] = weight @ values[b, h // group, begin:end] / weight.sum()
    return {"out": out}


def _attention_check(shape: AttentionShape, family: str) -> Check:
    return Check(
        op="block_attention",
        shape=shape.name,
        family=family,
        build=lambda: _attention_inputs(shape, family),
        run=lambda call, args: {"out": call("block_attention", *args)},
        expect=_attention,
        kinds={"out": "out"},
        hostile=family == "large",
    )


def _expert_inputs(shape: ExpertShape, family: str) -> tuple[Any, ...]:
    rng = generator("experts", shape.name, family)
    tokens = 1 if family == "one-token" else shape.tokens
    x = rng.normal(size=(tokens, shape.hidden))
    gate_up = rng.normal(size=(shape.experts, 2 * shape.inner, shape.hidden)) / shape.hidden**0.5
    down = rng.normal(size=(shape.experts, shape.hidden, shape.inner)) / shape.inner**0.5
    picks = np.stack([rng.permutation(shape.experts)[: shape.picks] for _ in range(tokens)])
    if family == "same-experts":  # every token hits the same ones, each in an order of its own
        picks = np.stack([rng.permutation(picks[0]) for _ in range(tokens)])
    weights = rng.uniform(0.05, 1, size=picks.shape)
    if family == "zero-weights":
        weights[:, 1:] = 0.0
    args = Value(x), Value(picks, "int"), Value(weights, "f32"), Value(gate_up), Value(down)
    if family != "whole-layer":
        return args
    width = shape.inner + 3
    shared = SharedExpert(
        Value(rng.normal(size=(tokens, 1))), Value(rng.normal(size=(tokens, 2 * width))),
        Value(rng.normal(size=(shape.hidden, width)) / width**0.5),
    )  # fmt: skip
    norm = RMSNorm(Value(rng.uniform(0.2, 3, size=shape.hidden), "f32"), 1e-6)
    return *args, shared, Value(rng.normal(size=(tokens, shape.hidden))), norm


def _silu(x: np.ndarray) -> np.ndarray:
    return x * np.exp(-np.logaddexp(0, -x))


def _experts(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    x, picks, weights, gate_up, down, *rest = args
    inner = down.shape[2]
    out = np.zeros_like(x)
    for n in range(x.shape[0]):
        for expert, weight in zip(picks[n], weights[n], strict=True):
            gate, up = gate_up[expert, :inner] @ x[n], gate_up[expert, inner:] @ x[n]
            out[n] += weight * (down[expert] @ (_silu(gate) * up))
    if not rest:
        return {"out": out}
    shared, residual, norm = rest
    width = shared.down.shape[1]
    hidden = _silu(shared.gate_up[:, :width]) * shared.gate_up[:, width:]
    out += residual + np.exp(-np.logaddexp(0, -shared.amount)) * (hidden @ shared.down.T)
    return {"out": out, "normed": norm.weight * out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + norm.eps)}


def _experts_check(shape: ExpertShape, family: str) -> Check:
    names = ("out", "normed") if family == "whole-layer" else ("out",)

    def run(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
        found = call("routed_experts", *args)
        return dict(zip(names, found if len(names) == 2 else (found,), strict=True))

    return Check(
        op="routed_experts",
        shape=shape.name,
        family=family,
        build=lambda: _expert_inputs(shape, family),
        run=run,
        expect=_experts,
        kinds={"out": "out"} | ({"normed": "steps"} if len(names) == 2 else {}),
    )


def _picks_inputs(shape: ExpertShape, family: str) -> tuple[Any, ...]:
    rng = generator("picks", shape.name, family)
    tokens = 1 if family == "one-token" else shape.tokens
    # distinct whole numbers over 16 are exact in bfloat16: no pair of probabilities is nearly equal
    logits = np.stack([rng.permutation(shape.experts) for _ in range(tokens)]) / 16.0
    if family == "ties":
        logits = rng.integers(0, 4, size=(tokens, shape.experts)).astype(np.float64)
        logits[0] = 0.0
    return Value(logits), shape.picks, family != "not-normalised"


def _picks(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    logits, k, normalised = args
    exponent = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probability = exponent / exponent.sum(axis=-1, keepdims=True)
    picks = np.argsort(-probability, axis=-1, kind="stable")[:, :k]
    weights = np.take_along_axis(probability, picks, axis=-1)
    return {"picks": picks, "weights": weights / weights.sum(axis=-1, keepdims=True) if normalised else weights}


def _picks_check(shape: ExpertShape, family: str) -> Check:
    return Check(
        op="pick_experts",
        shape=shape.name,
        family=family,
        build=lambda: _picks_inputs(shape, family),
        run=lambda call, args: dict(zip(("picks", "weights"), call("pick_experts", *args), strict=True)),
        expect=_picks,
        kinds={"picks": "exact", "weights": "steps"},
    )


def _linear_inputs(rows: int, columns: int, size: int) -> tuple[Any, ...]:
    rng = generator("linear", str(rows), str(columns))
    return Value(rng.normal(size=(rows, size))), Value(rng.normal(size=(columns, size)) / size**0.5)


def _gated_inputs(rows: int, columns: int, size: int) -> tuple[Any, ...]:
    rng = generator("gated", str(rows), str(columns))
    return Value(rng.normal(size=(rows, size))), Value(2 * rng.normal(size=(2 * columns, size)) / size**0.5)


def _gated(args: tuple[Any, ...]) -> dict[str, Any]:
    gate, up = np.split(args[0] @ args[1].T, 2, axis=-1)
    return {"out": gate / (1 + np.exp(-gate)) * up}


def _gated_check(rows: int, columns: int, size: int) -> Check:
    return Check(
        op="gated_rows",
        shape=f"{rows} x {columns} x {size}",
        family="random",
        build=lambda: _gated_inputs(rows, columns, size),
        run=lambda call, args: {"out": call("gated_rows", *args)},
        expect=_gated,
        kinds={"out": "steps"},
    )


def _linear_check(rows: int, columns: int, size: int) -> Check:
    return Check(
        op="linear_rows",
        shape=f"{rows} x {columns} x {size}",
        family="random",
        build=lambda: _linear_inputs(rows, columns, size),
        run=lambda call, args: {"out": call("linear_rows", *args)},
        expect=lambda args: {"out": args[0] @ args[1].T},
        kinds={"out": "out"},
    )
