"""Parity checks of the decisions of a round: how many tokens to verify, and which drafts stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dspine.common.parity.backends import Value, to_bfloat16
from dspine.common.parity.checks import SINGLE, Check, generator
from dspine.common.parity.draft_checks import middle_of_draw
from dspine.common.selection.lengths import ENTROPY_EPS, LengthTables
from dspine.common.settling import REPORT_HEAD, Counters

MARGIN = 1e-4  # decisions whose two sides lie closer than this are not asked for: rounding may take either


def checks(scaled: bool) -> Iterator[Check]:
    """Every check of selection, correction, acceptance and the end of a round."""
    for name, batch, drafts, experts in (
        ("B=1 M=15 8/256", 1, 15, 256),
        ("B=4 M=7 8/64", 4, 7, 64),
        ("prime B=5 M=11", 5, 11, 31),
    ):
        for family in ("random", "certain", "ties"):
            yield _select_check(name, batch, drafts, experts, family)
        for family in ("random", "parallel-keys", "at-the-limit"):
            yield _correct_check(name, batch, drafts, experts, family)
    vocab = 4099 if scaled else 151_936
    for name, batch, count, size in (
        (f"B=1 w=16 V={vocab}", 1, 16, vocab),
        ("B=3 w=5 V=1009", 3, 5, 1009),
        ("B=2 w=1 V=64", 2, 1, 64),
    ):
        for family in ("random", "all-accepted", "none-accepted", "limits"):
            yield _greedy_check(name, batch, count, size, family)
            yield _point_mass_check(name, batch, count, size, family)
        for family in ("random", "none-accepted", "limits", "cold", "masked"):
            for rule in ("point_mass", "rejection") if count > 1 else ("point_mass",):
                yield _logits_check(rule, name, batch, count, size, family)
    for batch, rows, w in ((1, 16, 16), (3, 16, 5), (7, 8, 8), (2, 1, 1), (3, 5, 1)):
        for family in ("random", "stops", "budgets", "idle"):
            yield _settle_check(batch, rows, w, family)


def _key(*parts: Any) -> np.random.Generator:
    return generator("decision", *parts)


def _tables(drafts: int, experts: int, rng: np.random.Generator, family: str) -> LengthTables:
    """An increasing calibration per position, a cost curve that is not monotone in its steps, expert counts."""
    lengths = np.arange(drafts + 2)
    cost = 1.0 + 0.05 * lengths + 0.004 * lengths**2 + rng.uniform(0, 0.1, size=drafts + 2)
    if family == "ties":
        cost = np.zeros(drafts + 2)
    pairs = np.linspace(300, 60, drafts + 2)
    return LengthTables(
        calibration=Value(np.sort(rng.random((drafts, 33)), axis=1), "f32"),
        coefficients=Value(np.array([-1.0, 4.0, -0.05, 0.02, -0.3, -0.2]), "f32"),
        cost=Value(cost, "f32"),
        rate=1.1,
        stage_zero=0.01,
        expert=0.002,
        pairs=Value(pairs, "f32"),
        pairs_given=Value(pairs[:, None] * np.linspace(0.4, 2.0, 9), "f32"),
    )


def _draws(batch: int, drafts: int, family: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    confidence, entropy = rng.random((batch, drafts)), rng.exponential(1.0, size=(batch, drafts))
    if family == "certain":  # confidence 1, entropy 0: the ends of the table and the logarithm's guard
        confidence[:, ::2], entropy[:, ::2] = 1.0, 0.0
        confidence[:, 1] = 0.0
    return confidence, entropy


def _survival(confidence: np.ndarray, entropy: np.ndarray, tables: Any) -> np.ndarray:
    points = np.linspace(0, 1, tables.calibration.shape[1])
    coefficients, found = tables.coefficients, np.empty(confidence.shape)
    for b in range(confidence.shape[0]):
        mean, product = entropy[b, 0], 1.0
        for i in range(confidence.shape[1]):
            h, position = entropy[b, i], i + 1
            c = np.interp(confidence[b, i], points, tables.calibration[i])
            change = np.log((h + ENTROPY_EPS) / (mean + ENTROPY_EPS))
            logit = coefficients @ np.array([1, c, position, c * position, np.log1p(h), change])
            product *= np.exp(-np.logaddexp(0, -logit))
            mean = (h + mean) / 2
            found[b, i] = product
    return found


def _score(survival: np.ndarray, tables: Any) -> np.ndarray:
    """[B, M]: Eq. 5 at lengths 2..W."""
    return 1 + np.cumsum(survival, axis=1) - tables.rate * tables.cost[2:]


def _select_inputs(name: str, batch: int, drafts: int, experts: int, family: str) -> tuple[Any, ...]:
    for attempt in range(100):
        rng = _key("select", name, family, attempt)
        confidence, entropy = _draws(batch, drafts, family, rng)
        tables = _tables(drafts, experts, rng, family)
        if family == "ties":  # survival underflows: all later lengths score the same, the first of them wins
            entropy[:, 3:] = 0.0
            tables = LengthTables(**{**vars(tables), "coefficients": Value(np.array([-400.0, 0, 0, 0, 0, 0]), "f32")})
        plain = LengthTables(**{k: v.array if isinstance(v, Value) else v for k, v in vars(tables).items()})
        best = np.sort(_score(_survival(confidence, entropy, plain), plain), axis=1)
        if family == "ties" or (best[:, -1] - best[:, -2] > MARGIN).all():
            limit = rng.integers(2, drafts + 2, size=batch)
            return Value(confidence, "f32"), Value(entropy, "f32"), Value(limit, "int"), tables
    raise AssertionError("no inputs with a clear winner")


def _run_select(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    choice = call("select_length", *args)
    return {"length": choice.length, "stage_zero": choice.stage_zero, "survival": choice.survival}


def _expect_select(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    confidence, entropy, limit, tables = args
    survival = _survival(confidence, entropy, tables)
    length = 2 + np.argmax(_score(survival, tables), axis=1)
    stage_zero = np.minimum(np.minimum(length + 1, confidence.shape[1] + 1), limit)
    return {"length": length, "stage_zero": stage_zero, "survival": survival}


def _select_check(name: str, batch: int, drafts: int, experts: int, family: str) -> Check:
    return Check(
        op="select_length",
        shape=name,
        family=family,
        build=lambda: _select_inputs(name, batch, drafts, experts, family),
        run=_run_select,
        expect=_expect_select,
        kinds={"length": "exact", "stage_zero": "exact", "survival": "state"},
        dtypes=SINGLE,
        hostile=True,  # a product of M sigmoids of float32 logits
    )


def _correct_inputs(name: str, batch: int, drafts: int, experts: int, family: str) -> tuple[Any, ...]:
    for attempt in range(100):
        rng = _key("correct", name, family, attempt)
        tables = _tables(drafts, experts, rng, family)
        picks = np.stack([[rng.permutation(experts)[:8] for _ in range(drafts + 1)] for _ in range(batch)])
        if family == "parallel-keys":  # every token picks the same experts: nothing new to load
            picks = np.broadcast_to(picks[:, :1], picks.shape).copy()
        survival = np.cumprod(rng.uniform(0.7, 1.0, size=(batch, drafts)), axis=1)
        length = rng.integers(2, drafts + 2, size=batch)
        limit = rng.integers(2, drafts + 2, size=batch)
        if family == "at-the-limit":
            limit = np.where(np.arange(batch) % 2, length, np.maximum(length - 1, 2))
        args = (Value(picks, "int"), Value(length, "int"), Value(survival, "f32"), Value(limit, "int"), tables)
        plain = LengthTables(**{k: v.array if isinstance(v, Value) else v for k, v in vars(tables).items()})
        if all(abs(gap) > MARGIN for gap in _gaps(picks, length, survival, limit, plain) if gap is not None):
            return args
    raise AssertionError("no inputs with a clear answer")


def _gaps(picks: np.ndarray, length: np.ndarray, survival: np.ndarray, limit: np.ndarray, tables: Any) -> list[float | None]:
    """p_{w0} - rho dL of each row by sets, None where Stage 0 does not cover one more token."""
    found: list[float | None] = []
    for b, w in enumerate(length):
        if min(w + 1, survival.shape[1] + 1, limit[b]) != w + 1:
            found.append(None)
            continue
        seen = set(picks[b, :w].ravel())
        new = len(seen | set(picks[b, w])) - len(seen)
        step = tables.cost[w + 1] - tables.cost[w] - tables.stage_zero
        step += tables.expert * (tables.pairs_given[w, new] - tables.pairs[w])
        found.append(float(survival[b, w - 1] - tables.rate * step))
    return found


def _expect_correct(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    length, limit = args[1], args[3]
    longer = np.array([gap is not None and gap > 0 for gap in _gaps(*args)])
    return {"length": np.minimum(length + longer, limit)}


def _correct_check(name: str, batch: int, drafts: int, experts: int, family: str) -> Check:
    return Check(
        op="correct_length",
        shape=name,
        family=family,
        build=lambda: _correct_inputs(name, batch, drafts, experts, family),
        run=lambda call, args: {"length": call("correct_length", *args)},
        expect=_expect_correct,
        kinds={"length": "exact"},
        dtypes=SINGLE,
    )


def _limits(batch: int, count: int, family: str, rng: np.random.Generator) -> np.ndarray:
    if family != "limits":
        return np.full(batch, count - 1)
    limits = rng.integers(0, count, size=batch)
    limits[0] = 0
    return limits


def _greedy_inputs(name: str, batch: int, count: int, vocab: int, family: str) -> tuple[Any, ...]:
    rng = _key("greedy", name, family)
    logits = rng.normal(size=(batch, count, vocab))
    best = rng.integers(0, vocab, size=(batch, count))
    np.put_along_axis(logits, best[..., None], 9.0, axis=-1)
    draft = best[:, :-1].copy()
    if family == "none-accepted":
        draft = (draft + 1) % vocab
    elif family == "random" and count > 1:
        wrong = rng.random(draft.shape) < 0.2
        draft = np.where(wrong, (draft + 1) % vocab, draft)
    return Value(logits), Value(draft, "int"), Value(_limits(batch, count, family, rng), "int")


def _run_accept(name: str) -> Any:
    def run(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
        verdict = call(name, *args)
        return {"accepted": verdict.accepted, "next_token": verdict.next_token}

    return run


def _expect_greedy(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    logits, draft, limit = args
    accepted, following = [], []
    for b in range(logits.shape[0]):
        count = 0
        while count < min(limit[b], draft.shape[1]) and draft[b, count] == np.argmax(logits[b, count]):
            count += 1
        accepted.append(count)
        following.append(int(np.argmax(logits[b, count])))
    return {"accepted": np.array(accepted), "next_token": np.array(following)}


def _greedy_check(name: str, batch: int, count: int, vocab: int, family: str) -> Check:
    return Check(
        op="accept_greedy",
        shape=name,
        family=family,
        build=lambda: _greedy_inputs(name, batch, count, vocab, family),
        run=_run_accept("accept_greedy"),
        expect=_expect_greedy,
        kinds={"accepted": "exact", "next_token": "exact"},
    )


def _point_mass_inputs(name: str, batch: int, count: int, vocab: int, family: str) -> tuple[Any, ...]:
    """Uniforms lie in the middle of what they decide."""
    rng = _key("point-mass", name, family)
    weights = np.exp(rng.normal(size=(batch, count, vocab)) * 4)
    p = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32).astype(np.float64)
    draft = np.array([[middle_of_draw(p[b, i], rng)[0] for i in range(count - 1)] for b in range(batch)])
    draft = draft.reshape(batch, count - 1).astype(np.int64)
    limit = _limits(batch, count, family, rng)
    keep = {"all-accepted": 1.0, "none-accepted": 0.0}.get(family, 0.75)
    of_draft = np.take_along_axis(p[:, : count - 1], draft[..., None], axis=-1)[..., 0]
    u_accept = np.where(rng.random(draft.shape) < keep, of_draft / 2, (1 + of_draft) / 2)
    u_draw = np.zeros((batch, count))
    for b in range(batch):
        for i in range(count):
            row = p[b, i].copy()
            if i < min(limit[b], count - 1):  # reached only by a rejection
                row[draft[b, i]] = 0.0
            u_draw[b, i] = middle_of_draw(row, rng)[1]
    return Value(p, "f32"), Value(draft, "int"), Value(limit, "int"), Value(u_accept, "f32"), Value(u_draw, "f32")


def _expect_point_mass(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    p, draft, limit, u_accept, u_draw = args
    accepted, following = [], []
    for b in range(p.shape[0]):
        count = 0
        while count < min(limit[b], draft.shape[1]) and u_accept[b, count] < p[b, count, draft[b, count]]:
            count += 1
        row = p[b, count].copy()
        if count < min(limit[b], draft.shape[1]):
            row[draft[b, count]] = 0.0
        accepted.append(count)
        following.append(int(np.searchsorted(np.cumsum(row), u_draw[b, count] * row.sum(), side="right")))
    return {"accepted": np.array(accepted), "next_token": np.array(following)}


def _point_mass_check(name: str, batch: int, count: int, vocab: int, family: str) -> Check:
    return Check(
        op="accept_point_mass",
        shape=name,
        family=family,
        build=lambda: _point_mass_inputs(name, batch, count, vocab, family),
        run=_run_accept("accept_point_mass"),
        expect=_expect_point_mass,
        kinds={"accepted": "exact", "next_token": "exact"},
        dtypes=SINGLE,
    )


TEMPERATURES = {"random": 0.8, "none-accepted": 1.7, "limits": 1.0, "cold": 0.05, "masked": 0.6}
CANDIDATES = 6


def _logits_inputs(rule: str, name: str, batch: int, count: int, vocab: int, family: str) -> tuple[Any, ...]:
    """Logits that are bfloat16 numbers, so that both dtypes decide the same; uniforms in the middle of what they decide.
    Rejection: half of the candidates are likely ones, so mass is taken from blocks that are drawn from."""
    rng, temperature = _key("logits", rule, name, family), TEMPERATURES[family]
    logits = to_bfloat16((rng.normal(size=(batch, count, vocab)) * 3 * temperature).astype(np.float32)).astype(np.float64)
    if family == "masked":
        logits[:, :, rng.random(vocab) < 0.5] = -np.inf
        logits[:, :, : vocab // 3] = -np.inf
    p = _probabilities(logits, temperature)
    candidates, q = np.zeros((batch, count - 1, CANDIDATES), dtype=np.int64), np.zeros((batch, count - 1, CANDIDATES))
    draft, u_accept = np.zeros((batch, count - 1), dtype=np.int64), np.zeros((batch, count - 1))
    limit = _limits(batch, count, family, rng)
    keep = 0.0 if family == "none-accepted" else 0.75
    u_draw = np.zeros((batch, count))
    for b in range(batch):
        for i in range(count):
            row = p[b, i]
            if i < count - 1:
                likely = np.argsort(-row)[: CANDIDATES // 2]
                other = rng.choice(np.setdiff1d(np.arange(vocab), likely), CANDIDATES - len(likely), replace=False)
                candidates[b, i] = rng.permutation(np.concatenate([likely, other]))
                q[b, i] = rng.dirichlet(np.ones(CANDIDATES)).astype(np.float32)
                slot = int(np.argmax(q[b, i] - row[candidates[b, i]]))
                draft[b, i] = candidates[b, i, slot]
                chance = row[draft[b, i]] / (q[b, i, slot] if rule == "rejection" else 1.0)
                u_accept[b, i] = chance / 2 if rng.random() < keep else (1 + chance) / 2
            if i < min(limit[b], count - 1):  # reached only by a rejection
                row = _residual(rule, row, draft[b, i], candidates[b, i], q[b, i])
            u_draw[b, i] = middle_of_draw(row, rng)[1]
    of_draft = (Value(candidates, "int"), Value(q, "f32")) if rule == "rejection" else ()
    return (Value(logits), Value(draft, "int"), Value(limit, "int"), *of_draft, Value(u_accept, "f32"), Value(u_draw, "f32"),
            temperature)  # fmt: skip


def _probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits - logits.max(axis=-1, keepdims=True)) / temperature)
    return weights / weights.sum(axis=-1, keepdims=True)


def _residual(rule: str, row: np.ndarray, draft: int, candidates: np.ndarray, q: np.ndarray) -> np.ndarray:
    left = row.copy()
    if rule == "point_mass":
        left[draft] = 0.0
    else:
        left[candidates] = np.maximum(left[candidates] - q, 0.0)
    return left


def _expect_logits(rule: str, args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    logits, draft, limit, *of_draft, u_accept, u_draw, temperature = args
    p, accepted, following = _probabilities(logits, temperature), [], []
    for b, most in enumerate(np.minimum(limit, draft.shape[1])):
        candidates, q = (x[b] for x in of_draft) if of_draft else (draft[b][:, None], np.ones((draft.shape[1], 1)))
        count = 0
        while count < most:
            drawn = q[count][candidates[count] == draft[b, count]].sum()
            if u_accept[b, count] * drawn >= p[b, count, draft[b, count]]:
                break
            count += 1
        row = p[b, count]
        if count < most:
            row = _residual(rule, row, draft[b, count], candidates[count], q[count])
        accepted.append(count)
        following.append(int(np.searchsorted(np.cumsum(row), u_draw[b, count] * row.sum(), side="right")))
    return {"accepted": np.array(accepted), "next_token": np.array(following)}


def _logits_check(rule: str, name: str, batch: int, count: int, vocab: int, family: str) -> Check:
    op = f"accept_{rule}_logits"
    return Check(
        op=op,
        shape=name,
        family=family,
        build=lambda: _logits_inputs(rule, name, batch, count, vocab, family),
        run=_run_accept(op),
        expect=lambda args: _expect_logits(rule, args),
        kinds={"accepted": "exact", "next_token": "exact"},
    )


def _settle_inputs(batch: int, rows: int, w: int, family: str) -> tuple[Any, ...]:
    rng = _key("settle", batch, rows, w, family)
    block, stops = rng.integers(0, 50, size=(batch, rows)), np.full(16, -1)
    accepted, token = rng.integers(0, w, size=batch), rng.integers(0, 50, size=batch)
    remaining = rng.integers(w, 40, size=batch)
    if family == "stops":  # two of the tokens that stand in the blocks, the token behind the drafts too
        stops[:3] = (block[0, -1], block[-1, 0], token[0])
    elif family == "budgets":
        remaining = rng.integers(0, w + 1, size=batch)
    elif family == "idle":
        remaining[:] = 0
    counters = Counters(
        *(Value(x, "int") for x in (rng.integers(0, 99, batch), token + 50, remaining, rng.integers(1, 9, batch)))
    )
    report = Value(rng.integers(0, 9, size=(batch, REPORT_HEAD + 2 * rows)), "int")
    finite = Value(rng.integers(0, 2, size=batch), "int")
    return *(Value(x, "int") for x in (accepted, token, block)), finite, counters, Value(stops, "int"), report, w


def _run_settle(call: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    found = call("settle_round", *args)
    return {"m": found.m, "before": found.before, "report": found.report, **vars(found.counters)}


def _expect_settle(args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Token by token."""
    accepted, token, block, finite, counters, stops, report, w = args
    found = {name: x.copy() for name, x in vars(counters).items()} | {
        "report": report.copy(),
        "before": counters.lengths.copy(),
    }
    found["m"] = np.zeros_like(accepted)
    rows = block.shape[1]
    for b, count in enumerate(accepted):
        row = [*block[b, 1 : count + 1], *[token[b]] * (w - count)]
        left = int(counters.remaining[b])
        emitted, stopped = 0, False
        while emitted <= count and emitted < left and not stopped:
            stopped = row[emitted] in stops
            emitted += 1
        found["m"][b] = emitted
        found["report"][b, :REPORT_HEAD] = (emitted, count, min(left, w), finite[b])
        found["report"][b, REPORT_HEAD : REPORT_HEAD + rows] = block[b]
        found["report"][b, REPORT_HEAD + rows : REPORT_HEAD + rows + w] = row
        found["lengths"][b] += emitted
        found["generated"][b] += emitted
        found["remaining"][b] = 0 if stopped else left - emitted
        if emitted:
            found["anchor"][b] = row[emitted - 1]
    return found


def _settle_check(batch: int, rows: int, w: int, family: str) -> Check:
    names = ("m", "before", "report", "lengths", "anchor", "remaining", "generated")
    return Check(
        op="settle_round",
        shape=f"B={batch} W={rows} w={w}",
        family=family,
        build=lambda: _settle_inputs(batch, rows, w, family),
        run=_run_settle,
        expect=_expect_settle,
        kinds=dict.fromkeys(names, "exact"),
        dtypes=SINGLE,
    )
