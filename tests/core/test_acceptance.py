"""Losslessness by exact enumeration: the marginal of every rule equals the target's distribution."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from dspine.common.acceptance import accept_greedy, accept_point_mass, accept_rejection
from dspine.common.arrays import softmax
from dspine.common.decoding import DecodingParams, decode
from dspine.common.sampling import SamplingParams, sample_index, token_probabilities
from dspine.common.transition import path_walk_sampled
from tests.helpers.toys import ToyDrafter, ToyTarget

# Case S1, recomputed there: target p, draft restricted to candidates {0, 1}
TARGET = np.array([2.0, 1.5, 1.0, 0.5])
DRAFT = np.array([0.5, 1.5, -1.0, -2.0])
CANDIDATES = np.array([0, 1])
GRID = (np.arange(2000) + 0.5) / 2000  # midpoints: integrates a step function of u to 1/2000


def marginal_of(rule, draft_probabilities):
    """Distribution of the first emitted token: draft enumerated, both uniforms integrated on a grid."""
    p = softmax(TARGET)
    result, accepted = np.zeros(4), 0.0
    for token, weight in draft_probabilities.items():
        n = len(GRID)
        rows = np.broadcast_to(p, (n, 2, 4))
        draft = np.full((n, 1), token)
        limit = np.ones(n, dtype=np.int32)
        verdict = rule(rows, draft, limit, GRID[:, None])
        result[token] += weight * verdict.accepted.mean()
        accepted += weight * verdict.accepted.mean()
        # the replacement, drawn over its own grid of uniforms, given a rejection
        rejected = rule(rows, draft, limit, np.full((n, 1), 1e9))  # no ratio reaches that
        assert (rejected.accepted == 0).all()
        share = np.bincount(rejected.next_token, minlength=4) / n
        result += weight * (1 - verdict.accepted.mean()) * share
    return result, accepted


def test_s1_rejection_with_the_renormalised_q():
    q = softmax(DRAFT[CANDIDATES])
    draws = np.stack([GRID, GRID], axis=1)

    def rule(rows, draft, limit, u):
        n = len(draft)
        ids, mass = np.broadcast_to(CANDIDATES, (n, 1, 2)), np.broadcast_to(q, (n, 1, 2))
        return accept_rejection(rows, draft, limit, ids, mass, u, draws)

    marginal, accepted = marginal_of(rule, dict(zip(CANDIDATES.tolist(), q, strict=True)))
    np.testing.assert_allclose(marginal, softmax(TARGET), atol=2e-3)
    assert accepted == pytest.approx(0.545, abs=2e-3)


def test_s1_wrong_q_is_seen_by_this_test():
    """The fault of the case: dividing by the raw softmax over the whole vocabulary. TV 0.060 there."""
    q, raw = softmax(DRAFT[CANDIDATES]), softmax(DRAFT)
    draws = np.stack([GRID, GRID], axis=1)

    def rule(rows, draft, limit, u):
        n = len(draft)
        ids, mass = np.broadcast_to(np.arange(4), (n, 1, 4)), np.broadcast_to(raw, (n, 1, 4))
        return accept_rejection(rows, draft, limit, ids, mass, u, draws)

    marginal, _ = marginal_of(rule, dict(zip(CANDIDATES.tolist(), q, strict=True)))
    distance = 0.5 * np.abs(marginal - softmax(TARGET)).sum()
    assert distance == pytest.approx(0.060, abs=3e-3)


@pytest.mark.parametrize("draft", [{1: 1.0}, {0: 0.3, 1: 0.7}, {3: 1.0}])
def test_s1_point_mass_is_exact_for_any_draft(draft):
    draws = np.stack([GRID, GRID], axis=1)
    marginal, accepted = marginal_of(lambda rows, d, limit, u: accept_point_mass(rows, d, limit, u, draws), draft)
    np.testing.assert_allclose(marginal, softmax(TARGET), atol=2e-3)
    if draft == {1: 1.0}:
        assert accepted == pytest.approx(0.276, abs=2e-3)


def test_s1_conditional_walk_q_is_what_it_draws_from():
    """path_walk_sampled: empirical law of every pair equals the product of the q it returns."""
    rng = np.random.default_rng(0)
    scores, candidates = rng.normal(size=(3, 4, 4)), np.arange(12).reshape(3, 4)
    n = 60
    grid = (np.arange(n) + 0.5) / n
    u = np.array(list(itertools.product(grid, repeat=2)))
    u = np.concatenate([u, np.full((len(u), 1), 0.5)], axis=1)
    tokens, q = path_walk_sampled(
        np.broadcast_to(scores, (len(u), 3, 4, 4)), np.broadcast_to(candidates, (len(u), 3, 4)), u, 0.8
    )
    for first in range(4):
        chosen = tokens[:, 0] == candidates[0, first]
        assert chosen.mean() == pytest.approx(softmax(scores[0, 0] / 0.8)[first], abs=1.5 / n)
        for second in range(4):
            share = (tokens[chosen, 1] == candidates[1, second]).mean()
            assert share == pytest.approx(softmax(scores[1, first] / 0.8)[second], abs=1.5 / n)
            np.testing.assert_allclose(q[chosen, 1], np.broadcast_to(softmax(scores[1, first] / 0.8), (chosen.sum(), 4)))


def conditional_drafter(seed: int, vocab: int, block: int, k: int) -> ToyDrafter:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(vocab, block - 1, k, k))
    candidates = np.stack([rng.permutation(vocab)[:k] for _ in range(block - 1)])

    def draft(anchor, uniforms, temperature):
        if temperature == 0.0:
            return candidates[:, 0].tolist(), None, None
        tokens, q = path_walk_sampled(scores[anchor][None], candidates[None], uniforms[None], temperature)
        return tokens[0], candidates, q[0]

    return ToyDrafter(draft, block)


@pytest.mark.parametrize(
    "rule, shape",
    [
        ("rejection", {}),
        ("rejection", {"top_k": 3}),
        ("rejection", {"top_p": 0.8}),
        ("point-mass", {}),
        ("point-mass", {"min_p": 0.2}),
    ],
)
def test_sampling_is_lossless_end_to_end(rule, shape):
    """Chi-square of four-token texts over 2,500 seeds against the target's exact law."""
    vocab, length, runs = 4, 4, 2500
    table = np.random.default_rng(11).normal(size=(vocab, vocab)) * 1.5
    target = ToyTarget(lambda context: table[context[-1]], vocab)
    sampling = SamplingParams(temperature=0.9, **shape)
    p = token_probabilities(table, sampling)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(runs):
        params = DecodingParams(length, SamplingParams(temperature=0.9, seed=seed, **shape), rule, break_even=0)
        text = tuple(e.token for e in decode(target, conditional_drafter(7, vocab, 4, 3), [2], params))
        counts[text] = counts.get(text, 0) + 1
    expected = {}
    for text in itertools.product(range(vocab), repeat=length):
        chain = [2, *text]
        expected[text] = runs * np.prod([p[a, b] for a, b in itertools.pairwise(chain)])
    assert set(counts) <= {t for t, e in expected.items() if e > 0}, "a token outside top-k/top-p/min-p was emitted"
    big = [t for t, e in expected.items() if e >= 5]
    observed = [counts.get(t, 0) for t in big]
    wanted = [expected[t] for t in big]
    observed.append(runs - sum(observed))
    wanted.append(runs - sum(wanted))
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
        wanted = list(np.array(wanted) * sum(observed) / sum(wanted))
    assert stats.chisquare(observed, wanted).pvalue > 1e-4


def test_s2_conditional_draws_beat_independent_ones():
    """Two modes, A B or C D: 2.0 accepted per two-token block with conditional draws, 1.5 with marginals; both exact."""
    a, b, c, d = range(4)
    eps = 1e-30
    first = np.log(np.array([0.5, eps, 0.5, eps]))
    after = {a: np.log(np.array([eps, 1.0, eps, eps])), c: np.log(np.array([eps, eps, eps, 1.0]))}
    n = 200
    rng = np.random.default_rng(0)
    accepted = {"conditional": [], "independent": []}
    for mode in accepted:
        firsts = []
        for _ in range(n * 10):
            u = rng.random(8)
            scores = np.array([[[0.0, 0.0]] * 2, [[0.0, -200.0], [-200.0, 0.0]] if mode == "conditional" else [[0.0, 0.0]] * 2])
            candidates = np.array([[a, c], [b, d]])
            tokens, q = path_walk_sampled(scores[None], candidates[None], u[None, :2], 1.0)
            rows = np.stack([first, after[int(tokens[0, 0])], np.zeros(4)])
            verdict = accept_rejection(
                softmax(rows)[None], tokens, np.array([2]), candidates[None], q, u[None, 2:4], u[None, 4:7]
            )
            accepted[mode].append(int(verdict.accepted[0]))
            firsts.append(int(tokens[0, 0]))
        assert np.mean(np.array(firsts) == a) == pytest.approx(0.5, abs=0.05)
    assert np.mean(accepted["conditional"]) == pytest.approx(2.0, abs=1e-9)
    assert np.mean(accepted["independent"]) == pytest.approx(1.5, abs=0.05)


def test_greedy_counts_leading_matches_and_respects_limits():
    logits = np.zeros((3, 4, 5))
    for row in range(3):
        for i, token in enumerate([1, 2, 3, 4]):
            logits[row, i, token] = 1
    draft = np.array([[1, 2, 3], [1, 0, 3], [1, 2, 3]])
    verdict = accept_greedy(logits, draft, np.array([3, 3, 1]))
    np.testing.assert_array_equal(verdict.accepted, [3, 1, 1])
    np.testing.assert_array_equal(verdict.next_token, [4, 2, 2])


def test_rejection_survives_an_empty_residual():
    """q above p everywhere after rounding: the residual has no mass, the draw falls back to p."""
    p = np.array([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    verdict = accept_rejection(
        p,
        np.array([[0]]),
        np.array([1]),
        np.array([[[0, 1]]]),
        np.array([[[0.6, 0.6]]]),
        np.array([[0.99]]),
        np.array([[0.7, 0.7]]),
    )
    assert verdict.accepted[0] == 0 and verdict.next_token[0] == 1


@pytest.mark.parametrize("size", [1, 3, 255, 256, 257, 1000, 49152])
def test_sample_index_never_draws_a_zero_and_follows_the_weights(size):
    rng = np.random.default_rng(size)
    weights = rng.random(size).astype(np.float32) * (rng.random(size) < 0.3)
    weights[size // 2] = 0.5
    n = 4000
    u = ((np.arange(n) + 0.5) / n).astype(np.float32)
    index = sample_index(np.broadcast_to(weights, (n, size)), u)
    assert (weights[index] > 0).all()
    exact = np.searchsorted(
        np.cumsum(weights.astype(np.float64)), u.astype(np.float64) * weights.sum(dtype=np.float64), side="right"
    )
    assert (np.abs(index - exact) > 0).mean() < 0.01  # float32 sums may move a draw that falls on a boundary
    edge = sample_index(weights[None], np.array([1 - 2.0**-23], dtype=np.float32))
    assert weights[edge[0]] > 0
