"""Parity checks of the drafter's operations: injection, signals, transition scores, the walk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspine.common.injection import InjectionWeights
from dspine.common.norms import RMSNorm
from dspine.common.parity.backends import Value
from dspine.common.parity.checks import SINGLE, Check, generator

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """B blocks of M rows; hidden size H, transfer rank r, message width a, K candidates, vocabulary V."""

    name: str
    batch: int
    rows: int
    hidden: int
    rank: int
    message: int
    candidates: int
    vocab: int


def shapes(scaled: bool) -> list[Shape]:
    """Two real drafters (cut down where a backend is emulated or interpreted), odd sizes, primes."""
    if scaled:
        real = [Shape("qwen3-8b / 16", 1, 7, 256, 64, 32, 16, 4748), Shape("smollm2 / 6", 1, 7, 96, 32, 16, 8, 4096)]
    else:
        real = [Shape("qwen3-8b", 1, 15, 4096, 1024, 512, 16, 151_936), Shape("smollm2", 1, 7, 576, 256, 128, 16, 49_152)]
    return [
        *real,
        Shape("odd B=3", 3, 5, 60, 20, 12, 6, 1000),
        Shape("prime B=2", 2, 3, 101, 17, 13, 7, 1009),
    ]


def checks(scaled: bool) -> Iterator[Check]:
    """Every check of the drafter's operations."""
    for shape in shapes(scaled):
        for family in ("random", "saturated", "shared-receiver"):
            yield _gate_check(shape, family)
        for family in ("random", "saturated", "zero-rows", "large"):
            yield _messages_check(shape, family)
        for family in ("random", "zero-write", "zero-rows", "large", "with-norm"):
            yield _write_check(shape, family)
        for family in ("random", "ties", "peaked", "masked", "large"):
            yield _signals_check(shape, family)
        for family, k in (("random", None), ("ties", None), ("masked", None), ("random", 1), ("ties", 1)):
            yield _found_check(shape, family, k)
        for family in ("random", "parallel-keys", "zero-write"):
            yield _transition_check(shape, family)
            yield _tables_check(shape, family)
        for family in ("random", "ties"):
            yield _walk_check(shape, family)
        for temperature in (0.7, 1.0):
            yield _sampled_check(shape, temperature)


def _key(*parts: Any) -> np.random.Generator:
    return generator("draft", *parts)


def _weights(shape: Shape, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Scaled so that gates are of order 1 for codes of norm sqrt(r), as in a trained drafter."""
    hidden, rank, message = shape.hidden, shape.rank, shape.message
    spread = {"readout": ((rank, hidden), hidden), "write": ((hidden, message), message), "bias": ((message,), 1)}
    for name in ("message", "receiver_gate", "predecessor_gate"):
        spread[name] = ((message, rank), rank)
    return {name: rng.normal(size=size) / fan_in**0.5 for name, (size, fan_in) in spread.items()}


def _injection(arrays: dict[str, np.ndarray]) -> InjectionWeights:
    return InjectionWeights(**{name: Value(array) for name, array in arrays.items()})


def _codes(shape: Shape, rng: np.random.Generator, *lead: int) -> np.ndarray:
    x = rng.normal(size=(*lead, shape.rank))
    return x / np.linalg.norm(x, axis=-1, keepdims=True) * shape.rank**0.5


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def _gate(receiver: np.ndarray, predecessor: np.ndarray, w: Any) -> np.ndarray:
    gate = np.einsum("...r,ar->...a", receiver, w.receiver_gate) + np.einsum("...r,ar->...a", predecessor, w.predecessor_gate)
    return _sigmoid(gate + w.bias) * np.einsum("...r,ar->...a", predecessor, w.message)


def _write(hidden: np.ndarray, gated: np.ndarray, write: np.ndarray) -> np.ndarray:
    rms = np.sqrt((hidden**2).mean(axis=-1, keepdims=True))
    return hidden + rms * np.einsum("...a,ha->...h", gated, write)


def _norm(x: np.ndarray, norm: Any) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + norm.eps) * norm.weight


def _gate_inputs(shape: Shape, family: str) -> tuple[Any, ...]:
    rng = _key("gate", shape.name, family)
    arrays = _weights(shape, rng)
    receiver, predecessor = (_codes(shape, rng, shape.batch, shape.rows) for _ in range(2))
    if family == "saturated":  # sigmoids at both ends: e^x of either sign would overflow
        arrays["receiver_gate"] *= 100
    if family == "shared-receiver":  # the K predecessors of a transition row hear one receiver
        receiver = receiver[..., None, :]
        predecessor = _codes(shape, rng, shape.batch, shape.rows, shape.candidates)
    return Value(receiver), Value(predecessor), _injection(arrays)


def _gate_check(shape: Shape, family: str) -> Check:
    return Check(
        op="injection_gate",
        shape=shape.name,
        family=family,
        build=lambda: _gate_inputs(shape, family),
        run=lambda call, args: {"gated": call("injection_gate", *args)},
        expect=lambda args: {"gated": _gate(*args)},
        kinds={"gated": "out"},
        hostile=family == "saturated",
    )


def _messages_inputs(shape: Shape, family: str) -> tuple[Any, ...]:
    rng = _key("messages", shape.name, family)
    arrays = _weights(shape, rng)
    raw = rng.normal(size=(shape.batch, shape.rows + 1, shape.rank)) * (1e4 if family == "large" else 3.0)
    if family == "saturated":
        arrays["receiver_gate"] *= 100
    elif family == "zero-rows":
        raw[:, ::2] = 0.0
    return Value(raw), Value(_codes(shape, rng, shape.batch)), _injection(arrays)


def _messages(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Row by row."""
    raw, codes, weights = args
    out = np.zeros((*raw.shape[:2], weights.bias.shape[0]))
    size = np.linalg.norm(raw, axis=-1, keepdims=True)
    z = raw / np.where(size > 0, size, 1.0) * raw.shape[-1] ** 0.5
    for t in range(1, raw.shape[1]):
        out[:, t] = _gate(z[:, t], codes if t == 1 else z[:, t - 1], weights)
    z[:, 0] = 0.0
    return {"gated": out, "heard": z @ weights.receiver_gate.T}


def _messages_check(shape: Shape, family: str) -> Check:
    return Check(
        op="injection_messages",
        shape=shape.name,
        family=family,
        build=lambda: _messages_inputs(shape, family),
        run=lambda call, args: dict(zip(("gated", "heard"), call("injection_messages", *args, True), strict=True)),
        expect=_messages,
        kinds={"gated": "steps", "heard": "scores"},
        hostile=family == "saturated",
    )


def _write_inputs(shape: Shape, family: str) -> tuple[Any, ...]:
    rng = _key("write", shape.name, family)
    hidden = rng.normal(size=(shape.batch, shape.rows, shape.hidden)) * rng.uniform(0.5, 4, size=(shape.batch, shape.rows, 1))
    gated = rng.normal(size=(shape.batch, shape.rows, shape.message))
    write = _weights(shape, rng)["write"]
    if family == "zero-write":
        write = np.zeros_like(write)
    elif family == "zero-rows":
        hidden[:, ::2] = 0.0
    elif family == "large":  # case Q1: residuals beyond float16
        hidden *= 7e4
    norm = RMSNorm(Value(rng.normal(1, 0.2, size=shape.hidden)), EPS) if family in ("with-norm", "large") else None
    return Value(hidden), Value(gated), Value(write), norm


def _run_write(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    found = call("injection_write", *args)
    return {"h": found} if args[3] is None else {"h": found[0], "normed": found[1]}


def _expect_write(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    hidden, gated, write, norm = args
    h = _write(hidden, gated, write)
    return {"h": h} if norm is None else {"h": h, "normed": _norm(h, norm)}


def _write_check(shape: Shape, family: str) -> Check:
    return Check(
        op="injection_write",
        shape=shape.name,
        family=family,
        build=lambda: _write_inputs(shape, family),
        run=_run_write,
        expect=_expect_write,
        kinds={"h": "out", "normed": "out"},
        hostile=family in ("large", "zero-rows"),
    )


def _signals_inputs(shape: Shape, family: str) -> tuple[Any, ...]:
    rng = _key("signals", shape.name, family)
    logits = rng.normal(size=(shape.batch, shape.rows, shape.vocab)) * 3
    if family == "ties":
        logits = np.round(logits)
    elif family == "peaked":
        logits[..., shape.vocab // 3] += 60.0
    elif family == "masked":  # most of the vocabulary forbidden, the last entry allowed
        logits[..., shape.candidates : -1] = -np.inf
    elif family == "large":
        logits *= 1e4
    return Value(logits), shape.candidates


def _run_signals(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    found = call("draft_signals", *args)
    return dict(vars(found))


def _expect_signals(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    logits, k = args
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    top = logits.max(axis=-1, keepdims=True)
    log_z = np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))
    log_p = logits - top - log_z
    p = np.exp(log_p)
    entropy = -np.where(p > 0, p * np.where(p > 0, log_p, 0), 0).sum(axis=-1)
    found = {"values": np.take_along_axis(logits, ids, -1), "ids": ids, "finite": np.isfinite(logits).all(axis=-1)}
    return {**found, "confidence": p.max(axis=-1), "entropy": entropy}


def _signals_check(shape: Shape, family: str) -> Check:
    return Check(
        op="draft_signals",
        shape=shape.name,
        family=family,
        build=lambda: _signals_inputs(shape, family),
        run=_run_signals,
        expect=_expect_signals,
        kinds={"values": "exact", "ids": "exact", "confidence": "state", "entropy": "state", "finite": "exact"},
        hostile=family in ("peaked", "large"),
    )


def _expect_found(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    found = _expect_signals(args)
    return {name: found[name] for name in ("values", "ids", "finite")}


def _found_check(shape: Shape, family: str, k: int | None) -> Check:
    return Check(
        op="draft_candidates",
        shape=f"{shape.name} K={k or shape.candidates}",
        family=family,
        build=lambda: (_signals_inputs(shape, family)[0], k or shape.candidates),
        run=lambda call, args: dict(vars(call("draft_candidates", *args))),
        expect=_expect_found,
        kinds={"values": "exact", "ids": "exact", "finite": "exact"},
    )


def _transition_inputs(shape: Shape, family: str) -> tuple[Any, ...]:
    rng = _key("transition", shape.name, family)
    arrays = _weights(shape, rng)
    hidden = rng.normal(size=(shape.batch, shape.rows, shape.hidden))
    codes = _codes(shape, rng, shape.batch, shape.rows, shape.candidates)
    rows = rng.normal(size=(shape.batch, shape.rows, shape.candidates, shape.hidden)) / shape.hidden**0.5
    if family == "parallel-keys":  # all candidates of a row the same token
        codes, rows = (np.broadcast_to(x[..., :1, :], x.shape).copy() for x in (codes, rows))
    elif family == "zero-write":
        arrays["write"] = np.zeros_like(arrays["write"])
    norm = RMSNorm(Value(rng.normal(1, 0.2, size=shape.hidden)), EPS)
    return Value(hidden), Value(codes), Value(rows), _injection(arrays), norm


def _expect_transition(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Pair after pair."""
    hidden, codes, rows, w, norm = args
    z = np.einsum("...h,rh->...r", hidden, w.readout)
    z = z / np.linalg.norm(z, axis=-1, keepdims=True) * codes.shape[-1] ** 0.5
    scores = np.empty((*rows.shape[:-1], rows.shape[-2]))
    for i in range(codes.shape[-2]):
        refined = _norm(_write(hidden, _gate(z, codes[..., i, :], w), w.write), norm)
        scores[..., i, :] = np.einsum("...h,...kh->...k", refined, rows)
    return {"scores": scores}


def _transition_check(shape: Shape, family: str) -> Check:
    return Check(
        op="transition_scores",
        shape=shape.name,
        family=family,
        build=lambda: _transition_inputs(shape, family),
        run=lambda call, args: {"scores": call("transition_scores", *args)},
        expect=_expect_transition,
        kinds={"scores": "scores"},
    )


def _tables_inputs(shape: Shape, family: str) -> tuple[Any, ...]:
    """Tables of `vocab` rows; of parallel keys all candidates of a row are one token."""
    rng = _key("candidates", shape.name, family)
    arrays = _weights(shape, rng)
    if family == "zero-write":
        arrays["write"] = np.zeros_like(arrays["write"])
    ids = _candidates(shape, rng)
    if family == "parallel-keys":
        ids = np.broadcast_to(ids[..., :1], ids.shape).copy()
    vocab = min(shape.vocab, 4096)
    hidden = rng.normal(size=(shape.batch, shape.rows, shape.hidden))
    heard = rng.normal(size=(shape.batch, shape.rows, shape.message))
    codes = _codes(shape, rng, vocab) / shape.rank**0.5
    head = rng.normal(size=(vocab, shape.hidden)) / shape.hidden**0.5
    norm, anchor = RMSNorm(Value(rng.normal(1, 0.2, size=shape.hidden)), EPS), _codes(shape, rng, shape.batch)
    tables = Value(ids % vocab, "int"), Value(codes), Value(head)
    return Value(hidden), Value(heard, "f32"), Value(anchor), *tables, _injection(arrays), norm


def _expect_tables(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Pair after pair."""
    hidden, heard, anchor, ids, codes, head, w, norm = args
    scores = np.empty((*ids.shape, ids.shape[-1]))
    for b, t, i in np.ndindex(*ids.shape):
        code = codes[ids[b, t - 1, i]] * codes.shape[-1] ** 0.5 if t else anchor[b]
        gated = _sigmoid(heard[b, t] + w.predecessor_gate @ code + w.bias) * (w.message @ code)
        scores[b, t, i] = head[ids[b, t]] @ _norm(_write(hidden[b, t], gated, w.write), norm)
    return {"scores": scores}


def _tables_check(shape: Shape, family: str) -> Check:
    return Check(
        op="candidate_scores",
        shape=shape.name,
        family=family,
        build=lambda: _tables_inputs(shape, family),
        run=lambda call, args: {"scores": call("candidate_scores", *args)},
        expect=_expect_tables,
        kinds={"scores": "scores"},
    )


def _candidates(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    order = rng.random((shape.batch, shape.rows, shape.vocab)).argpartition(shape.candidates)
    return order[..., : shape.candidates]


def _walk_inputs(shape: Shape, family: str) -> tuple[Any, ...]:
    rng = _key("walk", shape.name, family)
    scores = rng.normal(size=(shape.batch, shape.rows, shape.candidates, shape.candidates)) * 3
    if family == "ties":  # of equal scores the first candidate
        scores = np.round(scores / 3)
    return Value(scores, "f32"), Value(_candidates(shape, rng), "int")


def _expect_walk(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    scores, candidates = args
    tokens = np.empty(candidates.shape[:2], dtype=np.int64)
    for b in range(scores.shape[0]):
        pick = 0
        for t in range(scores.shape[1]):
            pick = int(np.argmax(scores[b, t, pick if t else 0]))
            tokens[b, t] = candidates[b, t, pick]
    return {"tokens": tokens}


def _walk_check(shape: Shape, family: str) -> Check:
    return Check(
        op="path_walk",
        shape=shape.name,
        family=family,
        build=lambda: _walk_inputs(shape, family),
        run=lambda call, args: {"tokens": call("path_walk", *args)},
        expect=_expect_walk,
        kinds={"tokens": "exact"},
        dtypes=SINGLE,
    )


def middle_of_draw(p: np.ndarray, rng: np.random.Generator) -> tuple[int, float]:
    """A draw from weights `p` [n] and a uniform in the middle of its interval, so that rounding cannot move it."""
    p = p / p.sum()
    likely = np.where(p > 1e-3, p, 0) if (p > 1e-3).any() else p
    pick = int(rng.choice(len(p), p=likely / likely.sum()))
    return pick, float(p[:pick].sum() + p[pick] / 2)


def _sampled_inputs(shape: Shape, temperature: float) -> tuple[Any, ...]:
    rng = _key("sampled", shape.name, temperature)
    scores = (rng.normal(size=(shape.batch, shape.rows, shape.candidates, shape.candidates)) * 2).astype(np.float32)
    uniforms = np.empty((shape.batch, shape.rows))
    for b in range(shape.batch):
        pick = 0
        for t in range(shape.rows):
            row = scores[b, t, pick if t else 0].astype(np.float64) / temperature
            pick, uniforms[b, t] = middle_of_draw(np.exp(row - row.max()), rng)
    return Value(scores, "f32"), Value(_candidates(shape, rng), "int"), Value(uniforms, "f32"), temperature


def _run_sampled(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    tokens, q = call("path_walk_sampled", *args)
    return {"tokens": tokens, "q": q}


def _expect_sampled(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    scores, candidates, uniforms, temperature = args
    tokens, q = np.empty(candidates.shape[:2], dtype=np.int64), np.empty(candidates.shape)
    for b in range(scores.shape[0]):
        pick = 0
        for t in range(scores.shape[1]):
            row = scores[b, t, pick if t else 0] / temperature
            weights = np.exp(row - row.max())
            q[b, t] = weights / weights.sum()
            pick = int(np.searchsorted(np.cumsum(q[b, t]), uniforms[b, t], side="right"))
            tokens[b, t] = candidates[b, t, pick]
    return {"tokens": tokens, "q": q}


def _sampled_check(shape: Shape, temperature: float) -> Check:
    return Check(
        op="path_walk_sampled",
        shape=shape.name,
        family=f"temperature {temperature}",
        build=lambda: _sampled_inputs(shape, temperature),
        run=_run_sampled,
        expect=_expect_sampled,
        kinds={"tokens": "exact", "q": "out"},
        dtypes=SINGLE,
    )
