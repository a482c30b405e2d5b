"""Calibrated length policies: lengths stay in range, equal a plain reading of the formulas and the core's operations, and no
policy changes what is generated."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.common.acceptance import accept_point_mass, accept_rejection
from dspine.common.decoding import DecodingParams, decode, resolve_acceptance
from dspine.common.errors import DSpineError
from dspine.common.protocols import Proposal, StageZero
from dspine.common.sampling import SamplingParams
from dspine.common.selection.calibrated import CALIBRATED, HybridSpecPolicy, LengthModel, NominalPolicy
from dspine.common.selection.lengths import conditional_acceptance, correct_length, select_length
from dspine.common.selection.policies import check_policy_name, parse_policy
from tests.helpers.calibrations import (
    EXPERTS,
    PICKS,
    RoutedTarget,
    SignalDrafter,
    calibration,
    router_picks,
    signal_oracle,
    signals,
)
from tests.helpers.toys import ToyTarget, markov_logits

VOCAB = 32
LOGITS = markov_logits(VOCAB, seed=3)
PROMPT = [1, 2, 3]
NAMES = ["full", "static:2", "static:5", *CALIBRATED]


def proposal(confidence, entropy) -> Proposal:
    row = np.asarray(confidence, np.float32)[None]
    return Proposal(
        np.zeros(row.shape, np.int32), np.array([True]), confidence=row, entropy=np.asarray(entropy, np.float32)[None]
    )


def drawn(seed: int, drafts: int):
    rng = np.random.default_rng(seed)
    confidence, entropy = rng.random(drafts).astype(np.float32), rng.exponential(size=drafts).astype(np.float32)
    confidence[rng.random(drafts) < 0.1] = 1.0
    entropy[rng.random(drafts) < 0.1] = 0.0
    return confidence, entropy


def picks_of(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(EXPERTS)[:PICKS] for _ in range(count)])[None]


def run_policy(policy, made: Proposal, picks: np.ndarray, limit: int) -> tuple[int, int, int]:
    """(nominal, Stage-0 length, executed length) as the loop asks for them."""
    nominal = policy.nominal(made, limit)
    upper = policy.stage_zero_length(nominal, limit)
    return nominal, upper, policy.correct(StageZero(None, None, picks[:, :upper]), nominal, min(limit, upper))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(2, 16), name=st.sampled_from(sorted(CALIBRATED)), data=st.data())
def test_lengths_stay_between_two_and_the_budget(seed, width, name, data):
    """Arbitrary cost curves (not monotone), acceptance models and expert tables."""
    policy = parse_policy(name, calibration(width, random=True, seed=seed))
    limit = data.draw(st.integers(2, width))
    nominal, upper, length = run_policy(policy, proposal(*drawn(seed, width - 1)), picks_of(seed, width), limit)
    assert 2 <= nominal <= upper <= min(nominal + 1, limit)
    assert nominal <= length <= upper


@pytest.mark.parametrize("width", [2, 5, 8, 16])
def test_lean_evaluation_equals_the_core_operations(width):
    """Same survival, same w0 and same executed length as `select_length` and `correct_length`, the budget's cap included."""
    kept = extended = 0
    for seed in range(150):
        made = calibration(width, random=True, seed=seed)
        tables = made.tables()
        confidence, entropy = drawn(seed, width - 1)
        wide = confidence[None].astype(np.float64), entropy[None].astype(np.float64)
        np.testing.assert_allclose(
            LengthModel(made.acceptance).conditional(wide[0][0], wide[1][0]),
            conditional_acceptance(*wide, tables)[0],
            rtol=1e-12,
            atol=1e-14,
        )
        for limit in {2, width // 2 + 1, width}:
            choice = select_length(*wide, np.array([limit]), tables)
            picks = picks_of(seed, int(choice.stage_zero[0]))
            want = int(correct_length(picks, choice.length, choice.survival, np.array([limit]), tables)[0])
            padded = picks_of(seed, width)
            assert NominalPolicy(made).nominal(proposal(confidence, entropy), limit) == min(int(choice.length[0]), limit)
            _, upper, got = run_policy(HybridSpecPolicy(made), proposal(confidence, entropy), padded, limit)
            assert got == want and upper <= int(choice.stage_zero[0])
            kept += upper == int(choice.stage_zero[0])
            extended += got > min(int(choice.length[0]), limit)
    assert width == 2 or (kept and extended), "the cases must reach the correction"


def brute(name: str, made, confidence, entropy) -> int:
    """The formulas of `algorithms` 4, one length after another."""
    width, t = made.identity.block_size, made.tables()
    seconds = {w: made.cost.measured[w - 2] for w in range(2, width + 1)}
    raw = [float(np.prod(confidence[:i].astype(np.float64))) for i in range(1, width)]
    if name in ("dcut", "evict"):
        lengths = range(2, width + 1) if name == "evict" else [width // 4 * q for q in (1, 2, 3, 4)]
        best = {w: (1 + sum(raw[: w - 1])) / seconds[w] for w in lengths}
        return max(best, key=lambda w: (best[w], -w))
    grid = np.linspace(0, 1, t.calibration.shape[1])
    c = [np.interp(confidence[i], grid, t.calibration[i]) for i in range(width - 1)]
    if name == "dspark":
        w = 2
        while w < width and (1 + sum(np.cumprod(c)[:w])) / seconds[w + 1] > (1 + sum(np.cumprod(c)[: w - 1])) / seconds[w]:
            w += 1
        return w
    probability = conditional_acceptance(confidence[None].astype(np.float64), entropy[None].astype(np.float64), t)[0]
    score = {w: 1 + sum(np.cumprod(probability)[: w - 1]) - made.rate * made.cost.target[w - 2] for w in range(2, width + 1)}
    return max(score, key=lambda w: (score[w], -w))


@pytest.mark.parametrize("name", sorted(CALIBRATED))
def test_policies_equal_a_plain_reading(name):
    seen = set()
    for seed in range(200):
        made = calibration(16, random=seed % 2 == 1, seed=seed)
        confidence, entropy = drawn(seed, 15)
        confidence = confidence ** np.float32(0.2 if seed % 3 else 1.0)
        got = parse_policy(name, made).nominal(proposal(confidence, entropy), 16)
        assert got == brute(name, made, confidence, entropy)
        seen.add(got)
    assert len(seen) > 2 and (name != "dcut" or seen <= {4, 8, 12, 16})


def test_ties_go_to_the_shorter():
    flat = calibration(8)
    flat = flat.model_copy(update={"cost": flat.cost.model_copy(update={"measured": [1.0] * 7, "target": [0.0] * 7})})
    nothing = proposal(np.zeros(7), np.ones(7))
    for name in ("dcut", "evict", "dspark"):
        assert parse_policy(name, flat).nominal(nothing, 8) == 2, name
    dead = {"acceptance": flat.acceptance.model_copy(update={"coefficients": [-800.0, 0, 0, 0, 0, 0]})}
    assert NominalPolicy(flat.model_copy(update=dead)).nominal(nothing, 8) == 2


def test_a_cheap_length_far_out_is_found_and_the_schedule_stops_early():
    made = calibration(16)
    measured = [0.02 + 0.05 * w for w in range(2, 17)]
    measured[10] = 0.021  # length 12
    cost = made.cost.model_copy(update={"measured": measured, "target": [t - 0.02 for t in measured]})
    made = made.model_copy(update={"cost": cost, "rate": 20.0})
    sure = proposal(np.full(15, 0.95), np.full(15, 0.05))
    lengths = {name: parse_policy(name, made).nominal(sure, 16) for name in CALIBRATED}
    assert lengths == {"dcut": 12, "evict": 12, "dspark": 4, "nominal": 12, "hybridspec": 12}


def test_stage_zero_covers_no_token_that_no_router_outcome_could_keep():
    made = calibration(8, routed=True)
    routing = made.routing.model_copy(update={"pairs_given": [[100.0] * (PICKS + 1)] * 9})
    policy = HybridSpecPolicy(made.model_copy(update={"routing": routing}))
    confidence, entropy = drawn(1, 7)
    nominal, upper, length = run_policy(policy, proposal(confidence, entropy), picks_of(0, 8), 8)
    assert nominal == upper == length < 8


@pytest.mark.parametrize("wrong_every", [0, 3])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("block", [2, 3, 8, 16])
def test_greedy_output_equals_plain(name, block, wrong_every):
    made = calibration(block)
    text = list(PROMPT)
    for _ in range(96):
        text.append(int(np.argmax(LOGITS(text))))
    target = RoutedTarget(LOGITS, VOCAB)
    drafter = signal_oracle(LOGITS, PROMPT, block, wrong_every)
    params = DecodingParams(max_tokens=96, break_even=0)
    events = list(decode(target, drafter, PROMPT, params, parse_policy(name, made)))
    assert [e.token for e in events] == text[len(PROMPT) :]
    assert all(w <= u <= w + 1 for u, w in target.stages)


def test_the_correction_happens_in_the_loop():
    made = calibration(8)
    made = made.model_copy(update={"cost": made.cost.model_copy(update={"expert": 0.003, "stage_zero": 0.003})})
    target = RoutedTarget(LOGITS, VOCAB)
    list(decode(target, signal_oracle(LOGITS, PROMPT, 8, 4), PROMPT, DecodingParams(max_tokens=200), HybridSpecPolicy(made)))
    drafted = [(u, w) for u, w in target.stages if u > 1]
    assert sum(u == w + 1 for u, w in drafted) > 5, "a token that Stage 0 covered was dropped"
    plain = RoutedTarget(LOGITS, VOCAB)
    list(decode(plain, signal_oracle(LOGITS, PROMPT, 8, 4), PROMPT, DecodingParams(max_tokens=200), NominalPolicy(made)))
    assert all(u == w for u, w in plain.stages) and plain.stages != target.stages


def reads_tokens_drafter(block: int) -> SignalDrafter:
    """Sampled drafts from a poor q, with candidates and q as a real drafter gives them."""
    q = np.array([0.6, 0.3, 0.1])

    def draft(anchor, uniforms, temperature):
        if uniforms is None:
            return [(anchor + i) % 3 for i in range(block - 1)], None, None
        tokens = np.searchsorted(np.cumsum(q), uniforms[: block - 1], side="right").clip(0, 2)
        return tokens, np.tile(np.arange(3), (block - 1, 1)), np.tile(q, (block - 1, 1))

    return SignalDrafter(draft, block)


@pytest.mark.parametrize("name", ["nominal", "hybridspec"])
def test_sampling_keeps_the_targets_distribution(name):
    """Chi-square of the first four tokens against the exact joint; the correction is on, its length depends on the drafts."""
    from scipy.stats import chi2

    logits = markov_logits(3, seed=8, scale=0.5)
    made = calibration(4)
    made = made.model_copy(update={"cost": made.cost.model_copy(update={"stage_zero": 0.003, "expert": 0.003})})
    policy, target, count = parse_policy(name, made), RoutedTarget(logits, 3), 4000
    drafter, seen = reads_tokens_drafter(4), np.zeros((3, 3, 3, 3))
    for request in range(count):
        params = DecodingParams(max_tokens=6, sampling=SamplingParams(temperature=1.0, seed=5), request=request, break_even=0)
        tokens = [e.token for e in decode(target, drafter, [1, 2], params, policy)]
        seen[tuple(tokens[:4])] += 1
    exact = np.zeros((3, 3, 3, 3))

    def p(context):
        row = np.exp(logits(context))
        return row / row.sum()

    for index in np.ndindex(3, 3, 3, 3):
        context = [1, 2]
        exact[index] = np.prod([p(context + list(index[:i]))[index[i]] for i in range(4)])
    assert exact.min() * count > 2, "cells too thin for chi-square"
    statistic = ((seen - exact * count) ** 2 / (exact * count)).sum()
    assert statistic < chi2.ppf(0.9999, exact.size - 1)
    dropped = sum(u > w for u, w in target.stages)
    assert name == "nominal" or 0 < dropped < sum(u > 2 for u, w in target.stages), "the router must really decide"


def emitted_joint(rule: str, length_of, q: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Joint [3, 3, 3] of the first three tokens after anchor 0, by enumeration: every pair of drafts (drawn from `q`), and
    uniforms at the midpoints of a grid on which every probability here is a whole number of cells, so sums are exact.

    length_of(drafts) -> verified length 2 or 3; rows [3, 3]: the target's p(next | token). What a round leaves open is filled
    in with the target's own conditionals.
    """
    first, second, draw = (x.ravel() for x in np.meshgrid(*((np.arange(n) + 0.5) / n for n in (6, 6, 60)), indexing="ij"))
    count, joint = len(draw), np.zeros((3, 3, 3))
    for drafts in np.ndindex(3, 3):
        w = length_of(drafts)
        p = np.broadcast_to(rows[[0, *drafts[: w - 1]]], (count, w, 3))
        draft = np.broadcast_to(np.array(drafts[: w - 1]), (count, w - 1))
        limit, accept = np.full(count, w - 1), np.stack([first, second], axis=1)[:, : w - 1]
        uniforms = (accept, np.broadcast_to(draw[:, None], (count, w)))
        if rule == "point-mass":
            verdict = accept_point_mass(p, draft, limit, *uniforms)
        else:
            candidates = np.broadcast_to(np.arange(3), (count, w - 1, 3))
            verdict = accept_rejection(p, draft, limit, candidates, np.broadcast_to(q, candidates.shape), *uniforms)
        for kept, token in zip(verdict.accepted.tolist(), verdict.next_token.tolist(), strict=True):
            emitted = (*drafts[:kept], token)
            mass = q[drafts[0]] * q[drafts[1]] / count
            for rest in np.ndindex(*(3,) * (3 - len(emitted))):
                text = (*emitted, *rest)
                joint[text] += mass * np.prod([rows[text[i - 1], text[i]] for i in range(len(emitted), 3)])
    return joint


def test_point_mass_is_exact_for_lengths_that_the_router_corrects():
    """Enumeration: with point-mass the emitted joint is the target's, though the length depends on the drafted tokens. The
    rejection rule is exact for a fixed length only, which is why it is refused with this policy."""
    rows, q = np.array([[1, 2, 3], [3, 1, 2], [2, 3, 1]]) / 6, np.array([3, 2, 1]) / 6
    want = rows[0][:, None, None] * rows[:, :, None] * rows[None]
    made = calibration(3)
    routing = made.routing.model_copy(update={"pairs": [6.0] * 4, "pairs_given": [[1.0, 3, 5, 8, 12]] * 4})
    cost = made.cost.model_copy(update={"expert": 0.003, "stage_zero": 0.003})
    policy = HybridSpecPolicy(made.model_copy(update={"routing": routing, "cost": cost}))

    def corrected(drafts):
        picks = np.array([router_picks([0, *drafts[:i]], 0) for i in range(3)])[None]
        nominal, upper, length = run_policy(policy, proposal([0.45, 0.45], [0.9, 0.9]), picks, 3)
        assert (nominal, upper) == (2, 3)
        return length

    assert {corrected(drafts) for drafts in np.ndindex(3, 3)} == {2, 3}, "the router must really decide"
    np.testing.assert_allclose(emitted_joint("point-mass", corrected, q, rows), want, atol=1e-12)
    for fixed in (2, 3):
        np.testing.assert_allclose(emitted_joint("rejection", lambda drafts, w=fixed: w, q, rows), want, atol=1e-12)


def test_rules_that_go_together():
    config = SimpleNamespace(method="dspine")
    drafter = SimpleNamespace(config=config)
    sampled, greedy = SamplingParams(temperature=1.0), SamplingParams()
    made = calibration(8)
    for name in NAMES:
        policy = parse_policy(name, made)
        want = "point-mass" if name == "hybridspec" else "rejection"
        assert resolve_acceptance("auto", sampled, drafter, policy) == want
        assert resolve_acceptance("auto", greedy, drafter, policy) == "greedy"
        assert check_policy_name(name) == (name == "hybridspec")
        if name == "hybridspec":
            with pytest.raises(DSpineError, match="not lossless.*point-mass"):
                resolve_acceptance("rejection", sampled, drafter, policy)
        else:
            assert resolve_acceptance("rejection", sampled, drafter, policy) == "rejection"


@pytest.mark.parametrize("method", ["domino", "dspark"])
@pytest.mark.parametrize("name", sorted(CALIBRATED))
def test_signals_of_a_drawn_path_exclude_the_rejection_rule(name, method):
    """Domino and DSpark read confidence and entropy off the drafts they drew: a length from them reads drafted tokens."""
    drafter = SimpleNamespace(config=SimpleNamespace(method=method))
    sampled, policy = SamplingParams(temperature=1.0), parse_policy(name, calibration(8))
    assert resolve_acceptance("auto", sampled, drafter, policy) == "point-mass"
    with pytest.raises(DSpineError, match="not lossless"):
        resolve_acceptance("rejection", sampled, drafter, policy)
    assert resolve_acceptance("auto", sampled, drafter, parse_policy("full")) == "rejection"


@pytest.mark.parametrize("name", sorted(CALIBRATED))
def test_calibrated_policies_need_a_calibration(name):
    with pytest.raises(DSpineError, match="dspine calibrate.*--policy full"):
        parse_policy(name)


def test_refusals_name_what_is_missing():
    with pytest.raises(DSpineError, match="nominal"):
        HybridSpecPolicy(calibration(8, routed=False))
    policy = HybridSpecPolicy(calibration(8))
    with pytest.raises(DSpineError, match="confidence and entropy"):
        policy.nominal(Proposal(np.zeros((1, 7)), np.array([True])), 8)
    with pytest.raises(DSpineError, match="7 drafts"):
        policy.nominal(proposal(np.ones(3), np.ones(3)), 4)
    made = dataclasses.replace(proposal(*signals(0, 7)))
    nominal = policy.nominal(made, 8)
    with pytest.raises(DSpineError, match="router"):
        policy.correct(StageZero(None, None, None), nominal, nominal + 1)
    with pytest.raises(DSpineError, match="experts a token"):
        policy.correct(StageZero(None, None, picks_of(0, 8)[:, :, :2]), nominal, nominal + 1)


def test_dense_target_with_the_nominal_policy():
    target = ToyTarget(LOGITS, VOCAB)
    events = list(
        decode(
            target, signal_oracle(LOGITS, PROMPT, 8, 4), PROMPT, DecodingParams(max_tokens=64), NominalPolicy(calibration(8))
        )
    )
    assert events[-1].stats.generated_tokens == 64 and events[-1].stats.drafted_tokens > 0
