"""Length selection (Eq. 5), the routing correction (Eq. 6) and the draft's signals against plain loops in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dspine.common.errors import DSpineError
from dspine.common.selection.lengths import (
    LengthTables,
    conditional_acceptance,
    correct_length,
    new_experts,
    select_length,
)
from dspine.common.signals import draft_signals

M, K = 15, 8
W = M + 1


def tables(**changes):
    lengths = np.arange(W + 1.0)
    plain = LengthTables(
        calibration=np.tile(np.linspace(0, 1, 11), (M, 1)),
        coefficients=np.array([-1.0, 3.0, -0.05, 0.02, -0.2, -0.1]),
        cost=1 + 0.1 * lengths,
        rate=1.0,
        stage_zero=0.02,
        expert=0.001,
        pairs=np.full(W + 1, 100.0),
        pairs_given=np.tile(np.linspace(20, 180, K + 1), (W + 1, 1)),
    )
    return dataclasses.replace(plain, **changes)


def certain(*survival):
    """Tables and inputs whose conditional acceptances are exactly `survival` (then 0): the identity as logistic model."""
    ratios = np.array([*survival, *[0.0] * (M - len(survival))])
    points = np.clip(ratios, 1e-12, 1 - 1e-12)
    return np.log(points / (1 - points))


def choose(conditional, cost, rate=1.0, limit=W):
    """select_length with given conditional acceptances: confidence 1, and calibrated values that are their logits."""
    logits = certain(*conditional)
    made = tables(
        calibration=np.tile(logits[:, None], (1, 2)), coefficients=np.array([0.0, 1, 0, 0, 0, 0]), cost=cost, rate=rate
    )
    return select_length(np.ones((1, M)), np.zeros((1, M)), np.array([limit]), made)


def test_every_length_is_scored():
    """A cost curve with a cheap length far out: a rule that stops at the first dip would miss it."""
    cost = 1 + 0.5 * np.arange(W + 1.0)
    cost[12] = 1.0
    assert choose([0.9] * M, cost).length[0] == 12


def test_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(200):
        conditional, cost, rate = rng.uniform(0.3, 1, size=M), rng.uniform(0, 3, size=W + 1), rng.uniform(0.1, 2)
        survival = np.cumprod(np.clip(conditional, 1e-12, 1 - 1e-12))
        scores = [1 + survival[: w - 1].sum() - rate * cost[w] for w in range(2, W + 1)]
        choice = choose(conditional, cost, rate)
        assert choice.length[0] == 2 + int(np.argmax(scores))
        np.testing.assert_allclose(choice.survival[0], survival, rtol=1e-9)


def test_ties_take_the_shorter():
    assert choose([0.0] * M, np.zeros(W + 1)).length[0] in (2, 3)  # 1e-12 may still count
    cost = np.arange(W + 1.0)
    logits = np.full((M, 2), -800.0)  # acceptance underflows to 0: the score is 1 - rho C(w)
    flat = tables(calibration=logits, coefficients=np.array([0.0, 1, 0, 0, 0, 0]), cost=cost * 0)
    assert select_length(np.ones((3, M)), np.zeros((3, M)), np.array([W] * 3), flat).length.tolist() == [2, 2, 2]


@pytest.mark.parametrize(("limit", "want"), [(16, 6), (6, 6), (5, 5), (2, 2)])
def test_stage_zero_is_capped_by_the_budget(limit, want):
    cost = 5 + np.abs(np.arange(W + 1.0) - 5) * 2
    choice = choose([0.9] * M, cost, limit=limit)
    assert (choice.length[0], choice.stage_zero[0]) == (5, want)


def test_longest_length_has_no_more_to_cover():
    choice = choose([0.99] * M, np.zeros(W + 1))
    assert (choice.length[0], choice.stage_zero[0]) == (W, W)


def test_acceptance_model_written_out():
    rng = np.random.default_rng(1)
    made = tables(calibration=np.sort(rng.random((M, 11)), axis=1))
    confidence, entropy = rng.random((2, M)), rng.exponential(size=(2, M))
    confidence[0, :3] = (0.0, 1.0, 0.55)
    entropy[1, :4] = 0.0
    got = conditional_acceptance(confidence, entropy, made)
    for b in range(2):
        mean = entropy[b, 0]
        for i in range(M):
            c = np.interp(confidence[b, i], np.linspace(0, 1, 11), made.calibration[i])
            h = entropy[b, i]
            change = np.log((h + 1e-6) / (mean + 1e-6))
            logit = made.coefficients @ [1, c, i + 1, c * (i + 1), np.log(1 + h), change]
            np.testing.assert_allclose(got[b, i], 1 / (1 + np.exp(-logit)), rtol=1e-10)
            mean = (h + mean) / 2
    assert np.isfinite(got).all()


def test_entropy_change_of_the_first_draft_is_zero():
    entropy = np.full((1, M), 2.0)
    only = tables(coefficients=np.array([0.0, 0, 0, 0, 0, 1.0]))
    np.testing.assert_allclose(conditional_acceptance(np.ones((1, M)), entropy, only), 0.5)


def test_new_experts_are_counted_as_sets():
    rng = np.random.default_rng(2)
    picks = np.stack([[rng.permutation(24)[:K] for _ in range(W)] for _ in range(5)])
    for w in range(1, W):
        got = new_experts(picks, np.full(5, w))
        want = [len(set(row[: w + 1].ravel())) - len(set(row[:w].ravel())) for row in picks]
        assert got.tolist() == want


def correction(picks, w0, survival, limit=W, **changes):
    return int(correct_length(picks, np.array([w0]), survival, np.array([limit]), tables(**changes))[0])


def test_correction_pays_for_cheap_tokens_only():
    survival = np.full((1, M), 0.15)
    same = np.tile(np.arange(K), (1, W, 1))  # every token routes alike: nothing new, dL = 0.1 - 0.02 + 0.001 (20 - 100) = 0
    fresh = np.arange(W * K).reshape(1, W, K)  # everything new: dL = 0.08 + 0.08
    assert correction(same, 4, survival) == 5
    assert correction(fresh, 4, survival) == 4
    assert correction(fresh, 4, survival + 0.02) == 5  # 0.17 > 0.16


@pytest.mark.parametrize(("w0", "limit", "want"), [(W, W, W), (4, 4, 4), (4, 3, 3), (4, 5, 5), (W, 2, 2), (2, 2, 2)])
def test_correction_stays_within_what_stage_zero_covers(w0, limit, want):
    same = np.tile(np.arange(K), (1, W, 1))
    assert correction(same, w0, np.full((1, M), 0.9), limit=limit) == want


def test_correction_never_reads_uncovered_rows():
    """Stage 0 covered u = w0 + 1 rows; a longer array's tail may hold anything, a shorter one means no extension."""
    same = np.tile(np.arange(K), (1, W, 1))
    garbage = same.copy()
    garbage[:, 6:] = -7
    assert correction(garbage, 5, np.full((1, M), 0.9)) == 6
    assert correction(same[:, :5], 5, np.full((1, M), 0.9)) == 5


def test_bad_tables():
    ones, limit = np.ones((1, M)), np.array([W])
    for changes, message in (
        ({"cost": np.ones(W)}, "tables.cost must have 17 entries for 15 drafts, got 16"),
        ({"calibration": np.ones((M, 1))}, "2 points or more"),
        ({"coefficients": np.ones(5)}, "coefficients 6 entries"),
    ):
        with pytest.raises(DSpineError, match=message):
            select_length(ones, ones, limit, tables(**changes))
    with pytest.raises(DSpineError, match=r"one shape \[B, M\], got \(1, 15\) and \(1, 14\)"):
        select_length(ones, ones[:, 1:], limit, tables())
    picks = np.zeros((1, W, K), dtype=int)
    with pytest.raises(DSpineError, match="no expert counts"):
        correct_length(picks, limit, ones, limit, tables(pairs=None))
    with pytest.raises(DSpineError, match=r"pairs_given must have shape \(17, 9\)"):
        correct_length(picks, limit, ones, limit, tables(pairs_given=np.ones((W + 1, K))))


def test_signals_written_out():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(2, 3, 300)) * 4
    logits[0, 0, 5:] = -np.inf
    logits[1, 1] = 2.0  # all equal: the lowest ids win, the entropy is log V
    found = draft_signals(logits, 4)
    for index in np.ndindex(2, 3):
        row = logits[index]
        p = np.exp(row - row.max())
        p /= p.sum()
        ids = sorted(range(300), key=lambda v, row=row: (-row[v], v))[:4]
        assert found.ids[index].tolist() == ids
        np.testing.assert_array_equal(found.values[index], row[ids])
        np.testing.assert_allclose(found.confidence[index], p.max(), rtol=1e-12)
        np.testing.assert_allclose(found.entropy[index], -(p[p > 0] * np.log(p[p > 0])).sum(), rtol=1e-10)
    np.testing.assert_allclose(found.entropy[1, 1], np.log(300), rtol=1e-12)
    for k in (0, 301):
        with pytest.raises(DSpineError, match=f"k must be 1..300 .*got {k}"):
            draft_signals(logits, k)
