"""Parity checks of the gated DeltaNet operations: hostile keys and decays, padding, long runs of commits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspine.common import gdn
from dspine.common.gdn import MAX_TOKENS, GdnFactors, GdnInputWeights, GdnLayout
from dspine.common.parity.backends import Value
from dspine.common.parity.checks import SINGLE, Check, generator

HOSTILE_FAMILIES = ("parallel-keys", "tiny-decay", "zero-strength")
FAMILIES = ("random", *HOSTILE_FAMILIES, "padded")
STATE = {"state": "state", "window": "exact"}
VERIFY = {"out": "out", "z": "state", "g": "state"}


@dataclass(frozen=True)
class Shape:
    """B batch, w tokens, heads and their sizes; L layers of a commit."""

    name: str
    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    layers: int = 2

    @property
    def layout(self) -> GdnLayout:
        return GdnLayout(self.key_heads, self.value_heads, self.key_dim, self.value_dim)


def shapes(scaled: bool) -> list[Shape]:
    """Real heads (few of them where a backend is emulated or interpreted), odd sizes, primes; one token and sixteen."""
    heads, lengths = ((1, 2), (1, 4, 16)) if scaled else ((16, 32), (1, 2, 4, 8, 16))
    real = [Shape(f"qwen3.6-35b w={w}", 1, w, *heads, 128, 128) for w in lengths]
    return [
        *real,
        Shape("qwen3.6-27b w=6", 1, 6, *((1, 3) if scaled else (16, 48)), 128, 128),
        Shape("odd B=3 w=7 2/4 heads 24x40", 3, 7, 2, 4, 24, 40),
        Shape("prime B=2 w=13 1/5 heads 17x19", 2, 13, 1, 5, 17, 19),
        Shape("small B=4 w=3 1/2 heads 4x4", 4, 3, 1, 2, 4, 4, 4),
    ]


def checks(scaled: bool) -> Iterator[Check]:
    """Every check of the four operations."""
    for shape in shapes(scaled):
        for family in ("random", "extreme"):
            yield _inputs_check(shape, family)
        for family in _families(shape, scaled):
            yield _verify_check(shape, family)
            yield _commit_check(shape, family)
        if shape.tokens == 3 or (shape.tokens == 7 and not scaled):
            yield _long_run(shape, 12 if scaled else 64)
        if shape.tokens in (3, 7):
            yield _deferred_check(shape, "padded")
        if shape.tokens in (3, 7, 16):
            yield _deferred_check(shape, "random")
            yield _deferred_check(shape, "parallel-keys")
    for w in range(2, MAX_TOKENS + 1):  # cases N1 and R9: every length is its own specialised kernel
        shape = Shape(f"width w={w} 1/2 heads 32x16", 1, w, 1, 2, 32, 16)
        for family in ("random", "parallel-keys"):
            yield dataclasses.replace(_verify_check(shape, family), dtypes=SINGLE)
        yield dataclasses.replace(_commit_check(shape, "random"), dtypes=SINGLE)


def _families(shape: Shape, scaled: bool) -> tuple[str, ...]:
    """Padding needs a batch; the short real shapes meet the hostile families only where that is quick."""
    if scaled and shape.batch == 1 and shape.tokens < 16:
        return FAMILIES[:1]
    return FAMILIES if shape.batch > 1 else FAMILIES[:-1]


def unit(x: np.ndarray) -> np.ndarray:
    """x / |x| over the last axis."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def tokens(shape: Shape, family: str, rng: np.random.Generator, lead: tuple[int, ...] = ()) -> dict[str, np.ndarray]:
    """q, k, v, log_decay, beta of a block, [*lead, B, w, ...], in float64."""
    rows = (*lead, shape.batch, shape.tokens)
    keys = (*rows, shape.key_heads, shape.key_dim)
    q, k = unit(rng.normal(size=keys)) * shape.key_dim**-0.5, unit(rng.normal(size=keys))
    v = rng.normal(size=(*rows, shape.value_heads, shape.value_dim))
    scalars = (*rows, shape.value_heads)
    log_decay, beta = -rng.exponential(0.3, size=scalars), 1 / (1 + np.exp(-rng.normal(size=scalars)))
    if family == "parallel-keys":  # case N1: sixteen times the same token
        k = np.broadcast_to(k[..., :1, :, :], k.shape).copy()
        log_decay = np.full(scalars, np.log(0.999))
        beta = rng.choice([0.5, 0.9, 0.97, 0.999], size=scalars)
    elif family == "tiny-decay":  # case N2: e^{-g} overflows from the fourth token on
        log_decay = np.log(rng.choice([6.5e-12, 1e-3], size=scalars))
    elif family == "zero-strength":
        beta, log_decay = np.zeros(scalars), np.zeros(scalars)
    return {"q": q, "k": k, "v": v, "log_decay": log_decay, "beta": beta}


def _key(*parts: Any) -> np.random.Generator:
    return generator("gdn", *parts)


def _lengths(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Per-row lengths with an unused slot (0), a full row and whatever lies between."""
    lengths = rng.integers(1, shape.tokens + 1, size=shape.batch)
    lengths[0], lengths[-1] = 0, shape.tokens
    return lengths


def _state(shape: Shape, rng: np.random.Generator, lead: tuple[int, ...] = ()) -> np.ndarray:
    return rng.normal(size=(*lead, shape.batch, shape.value_heads, shape.value_dim, shape.key_dim))


def _block_values(block: dict[str, np.ndarray]) -> tuple[Value, ...]:
    roles = {"log_decay": "f32", "beta": "f32"}
    return tuple(Value(array, roles.get(name, "x")) for name, array in block.items())


def _poison(block: dict[str, np.ndarray], state: np.ndarray, lengths: np.ndarray) -> None:
    """NaN in every padded row and in unused states (case R8)."""
    for row, length in enumerate(lengths):
        for array in block.values():
            array[row, length:] = np.nan
        if length == 0:
            state[row] = np.nan


def _verify_inputs(shape: Shape, family: str) -> tuple[Any, ...]:
    rng = _key("verify", shape.name, family)
    block, state, lengths = tokens(shape, family, rng), _state(shape, rng), None
    if family == "padded":
        lengths = _lengths(shape, rng)
        _poison(block, state, lengths)
    return (*_block_values(block), Value(state, "f32"), None if lengths is None else Value(lengths, "int"))


def _run_verify(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    out, factors = call("gdn_verify", *args)
    return {"out": out, "z": factors.z, "g": factors.g}


def _expect_verify(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """By the token recurrence, the form that shares nothing with the solve."""
    q, k, v, log_decay, beta, state, lengths = args
    out, z, g = np.zeros(v.shape), np.zeros(v.shape), np.zeros(beta.shape)
    for row in range(q.shape[0]):
        count = q.shape[1] if lengths is None else int(lengths[row])
        if count == 0:
            continue
        part = [x[row : row + 1, :count] for x in (q, k, v, log_decay, beta)]
        out[row, :count], z[row, :count] = (x[0] for x in gdn.gdn_recurrence(*part, state[row : row + 1])[:2])
        g[row, :count] = np.cumsum(log_decay[row, :count], axis=0)
        g[row, count:] = g[row, count - 1]
    return {"out": out, "z": z, "g": g}


def _verify_check(shape: Shape, family: str) -> Check:
    return Check(
        op="gdn_verify",
        shape=shape.name,
        family=family,
        build=lambda: _verify_inputs(shape, family),
        run=_run_verify,
        expect=_expect_verify,
        kinds=VERIFY,
        hostile=family in HOSTILE_FAMILIES,
    )


def _factors(shape: Shape, family: str, rng: np.random.Generator, layers: int) -> GdnFactors:
    """Stacked factors that really come from a block: z of order beta v."""
    block = tokens(shape, family, rng, (layers,))
    flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in block.items()}
    _, z, _, _ = gdn.gdn_recurrence(*flat.values(), np.zeros((layers * shape.batch, *_state(shape, rng).shape[1:])))
    g = np.cumsum(block["log_decay"], axis=2)
    return GdnFactors(z.reshape(block["v"].shape), block["k"], g)


def _commit_inputs(shape: Shape, family: str) -> tuple[Any, ...]:
    rng = _key("commit", shape.name, family)
    layers = shape.layers
    factors, states = _factors(shape, family, rng, layers), _state(shape, rng, (layers,))
    windows = rng.normal(size=(layers, shape.batch, 3, shape.layout.channels))
    inputs = rng.normal(size=(layers, shape.batch, shape.tokens, shape.layout.channels))
    m = rng.integers(1, shape.tokens + 1, size=shape.batch)
    if family == "padded":
        m = _lengths(shape, rng)
        for row, length in enumerate(m):
            for array in (factors.z, factors.k, factors.g, inputs):
                array[:, row, length:] = np.nan
            if length == 0:
                states[:, row], windows[:, row] = np.nan, np.nan
    stacked = GdnFactors(Value(factors.z, "f32"), Value(factors.k), Value(factors.g, "f32"))
    return Value(states, "f32"), stacked, Value(windows), Value(inputs), Value(m, "int")


def _run_commit(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    states, windows = call("gdn_commit", *args)
    return {"state": states, "window": windows}


def _expect_commit(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Token after token: S <- alpha S + z k^T, and a window that shifts by one input."""
    states, factors, windows, inputs, m = args
    states, windows = states.copy(), windows.copy()
    k = np.repeat(factors.k, states.shape[2] // factors.k.shape[3], axis=3)
    for row, count in enumerate(m):
        before = np.zeros_like(factors.g[:, row, 0])
        for i in range(int(count)):
            alpha = np.exp(factors.g[:, row, i] - before)[..., None, None]
            before = factors.g[:, row, i]
            states[:, row] = alpha * states[:, row] + factors.z[:, row, i][..., None] * k[:, row, i][..., None, :]
            windows[:, row] = np.concatenate([windows[:, row, 1:], inputs[:, row, i][:, None]], axis=1)
    return {"state": states, "window": windows}


def _commit_check(shape: Shape, family: str) -> Check:
    return Check(
        op="gdn_commit",
        shape=shape.name,
        family=family,
        build=lambda: _commit_inputs(shape, family),
        run=_run_commit,
        expect=_expect_commit,
        kinds=STATE,
        hostile=family in HOSTILE_FAMILIES,
    )


def _deferred_inputs(shape: Shape, family: str) -> tuple[Any, ...]:
    rng = _key("deferred", shape.name, family)
    plain = "random" if family == "padded" else family
    factors = _factors(shape, plain, rng, 1)
    block, state, lengths = tokens(shape, plain, rng), _state(shape, rng), None
    pending = rng.integers(1, shape.tokens + 1, size=shape.batch)
    if family == "padded":
        lengths = _lengths(shape, rng)
        pending[lengths == 0] = 0
        _poison(block, state, lengths)
        for row, length in enumerate(pending):
            for array in (factors.z, factors.k, factors.g):
                array[:, row, length:] = np.nan
    last = GdnFactors(Value(factors.z[0], "f32"), Value(factors.k[0]), Value(factors.g[0], "f32"))
    live = None if lengths is None else Value(lengths, "int")
    return (*_block_values(block), Value(state, "f32"), last, Value(pending, "int"), live)


def _run_deferred(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    out, factors, state = call("gdn_verify_deferred", *args)
    return {"out": out, "z": factors.z, "g": factors.g, "state": state}


def _expect_deferred(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    *block, state, pending, m, lengths = args
    nothing = np.zeros((1, state.shape[0], 3, 1))
    stacked = GdnFactors(pending.z[None], pending.k[None], pending.g[None])
    inputs = np.zeros((1, *pending.g.shape[:2], 1))
    state = _expect_commit((state[None], stacked, nothing, inputs, m))["state"][0]
    return {**_expect_verify((*block, state, lengths)), "state": state}


def _deferred_check(shape: Shape, family: str) -> Check:
    return Check(
        op="gdn_verify_deferred",
        shape=shape.name,
        family=family,
        build=lambda: _deferred_inputs(shape, family),
        run=_run_deferred,
        expect=_expect_deferred,
        kinds={**VERIFY, "state": "state"},
        hostile=family in HOSTILE_FAMILIES,
    )


def _long_inputs(shape: Shape, count: int) -> tuple[Any, ...]:
    rng = _key("long", shape.name)
    rounds = tuple(
        (*_block_values(tokens(shape, "random", rng)), Value(rng.integers(1, shape.tokens + 1, size=shape.batch), "int"))
        for _ in range(count)
    )
    return rounds, Value(_state(shape, rng), "f32")


def _run_long(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Verify and commit round after round on the backend (case R10)."""
    rounds, state = args
    for *block, m in rounds:
        out, factors = call("gdn_verify", *block, state, None)
        stacked = GdnFactors(factors.z[None], factors.k[None], factors.g[None])
        state = call("gdn_commit", state[None], stacked, factors.g[None][:, :, :1, :1], factors.g[None][..., :1], m)[0][0]
    return {"out": out, "state": state}


def _expect_long(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    rounds, state = args
    for *block, m in rounds:
        out, _, states, _ = gdn.gdn_recurrence(*block, state)
        state = np.stack([states[row, count - 1] for row, count in enumerate(m)])
    return {"out": out, "state": state}


def _long_run(shape: Shape, count: int) -> Check:
    return Check(
        op="gdn_commit",
        shape=shape.name,
        family=f"long-run of {count}",
        build=lambda: _long_inputs(shape, count),
        run=_run_long,
        expect=_expect_long,
        kinds={"out": "out", "state": "state"},
    )


def _inputs_values(shape: Shape, family: str) -> tuple[Any, ...]:
    rng = _key("inputs", shape.name, family)
    layout, rows = shape.layout, (shape.batch, shape.tokens)
    projected, window = (rng.normal(size=(shape.batch, n, layout.channels)) for n in (shape.tokens, 3))
    a, b = rng.normal(size=(*rows, layout.value_heads)), rng.normal(size=(*rows, layout.value_heads))
    if family == "extreme":  # gates far out on both sides, and keys of zeros: the norm's epsilon decides
        a, b = a * 60, b * 60
        projected[:, ::2] = 0.0
        window[...] = 0.0
    weights = GdnInputWeights(
        Value(rng.normal(size=(layout.channels, 4))),
        Value(np.log(rng.uniform(0.5, 16, size=layout.value_heads)), "f32"),
        Value(rng.normal(size=layout.value_heads)),
    )
    return Value(projected), Value(window), Value(a), Value(b), weights, layout


def _run_inputs(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    found = call("gdn_inputs", *args)
    return {name: getattr(found, name) for name in ("q", "k", "v", "log_decay", "beta")}


def _expect_inputs(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Written out token by token."""
    projected, window, a, b, weights, layout = args
    joined = np.concatenate([window, projected], axis=1)
    count, keys = projected.shape[1], layout.key_heads * layout.key_dim
    mixed = np.stack([np.einsum("bjc,cj->bc", joined[:, t : t + 4], weights.conv) for t in range(count)], axis=1)
    mixed = mixed * np.exp(-np.logaddexp(0, -mixed))
    q, k = (
        part.reshape(*part.shape[:2], layout.key_heads, layout.key_dim) for part in np.split(mixed, [keys, 2 * keys], 2)[:2]
    )
    q, k = (x / np.sqrt((x**2).sum(axis=-1, keepdims=True) + gdn.NORM_EPS) for x in (q, k))
    log_decay = -np.exp(weights.decay_log) * np.logaddexp(0, a + weights.dt_bias)
    v = mixed[..., 2 * keys :].reshape(*mixed.shape[:2], layout.value_heads, layout.value_dim)
    return {"q": q * layout.key_dim**-0.5, "k": k, "v": v, "log_decay": log_decay, "beta": np.exp(-np.logaddexp(0, -b))}


def _inputs_check(shape: Shape, family: str) -> Check:
    return Check(
        op="gdn_inputs",
        shape=shape.name,
        family=family,
        build=lambda: _inputs_values(shape, family),
        run=_run_inputs,
        expect=_expect_inputs,
        kinds={"q": "out", "k": "out", "v": "out", "log_decay": "state", "beta": "state"},
        hostile=family == "extreme",
    )
