"""The heads of the family in the core: against plain loops in float64, and `torch.nn.GRU`."""

from __future__ import annotations

import numpy as np
import pytest

from dspine.common.acceptance import accept_rejection, accept_rejection_dense
from dspine.common.draft_heads import (
    DominoWeights,
    Draws,
    MarkovWeights,
    SelectorWeights,
    confidence_logits,
    conv_kernels,
    domino_walk,
    grouped_conv,
    gru_step,
    markov_walk,
    selector_lattice,
)
from dspine.common.masks import FULL, SLIDING, mask_rule

RNG = np.random.default_rng(7)


def table(*shape):
    return RNG.normal(size=shape)


def linear(weight, bias=0.0):
    return lambda x: x @ weight.T + bias


def logistic(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("taps, rows", [(1, 4), (2, 5), (3, 6), (4, 2)])
def test_grouped_conv_is_the_written_sum(taps, rows):
    hidden, groups = 6, 3
    x, base, weight = table(2, rows, hidden), table(taps, hidden), table(2 * taps * groups, hidden)
    first, second = conv_kernels(x, linear(weight), taps)
    flat = x @ weight.T
    for side, kernel in enumerate((first, second)):
        got = grouped_conv(x, kernel, base)
        want = np.zeros_like(x)
        for b, t, c in np.ndindex(*x.shape):
            group = c // (hidden // groups)
            for j in range(min(taps, t + 1)):
                delta = flat[b, t, (side * taps + j) * groups + group]
                want[b, t, c] += (base[j, c] + delta) * x[b, t - j, c]
        np.testing.assert_allclose(got, want, atol=1e-12)


def test_a_new_convolution_is_the_identity():
    x, base = table(1, 4, 6), np.zeros((2, 6))
    base[0] = 1.0
    kernel, _ = conv_kernels(x, lambda x: np.zeros((*x.shape[:-1], 12)), 2)
    np.testing.assert_array_equal(grouped_conv(x, kernel, base), x)


def test_selector_lattice_is_the_written_sum():
    hidden, unary, candidates = table(2, 3, 5), table(2, 3, 4), RNG.integers(0, 9, size=(2, 3, 4))
    before, after, weight, anchor = table(9, 6), table(9, 6), table(6, 5), np.array([3, 8])
    weights = SelectorWeights(lambda ids: before[ids], lambda ids: after[ids], linear(weight))
    got = selector_lattice(hidden, unary, candidates, anchor, weights)
    for b, t, i, j in np.ndindex(*got.shape):
        predecessor = anchor[b] if t == 0 else candidates[b, t - 1, i]
        want = unary[b, t, j] + (before[predecessor] * (weight @ hidden[b, t])) @ after[candidates[b, t, j]]
        assert got[b, t, i, j] == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_markov_walk_is_the_written_recurrence(kind, temperature):
    vocab, rank, size, steps = 11, 4, 5, 6
    base, hidden, anchor = table(2, steps, vocab), table(2, steps, size), np.array([1, 7])
    w1, w2 = table(vocab, rank), table(vocab, rank)
    mix, bias = (
        (table(rank, size + rank), table(rank)) if kind == "gated" else (table(3 * rank, 2 * rank + size), table(3 * rank))
    )
    draws = Draws(temperature, RNG.random((2, steps)) if temperature else None)
    weights = MarkovWeights(kind, lambda ids: w1[ids], linear(w2), None if kind == "vanilla" else linear(mix, bias))
    got = markov_walk(base, hidden, anchor, weights, draws)
    for b in range(2):
        previous, state = anchor[b], np.zeros(rank)
        for t in range(steps):
            e, h = w1[previous], hidden[b, t]
            latent = e
            if kind == "gated":
                latent = logistic(mix @ np.concatenate([h, e]) + bias) * e
            elif kind == "rnn":
                g, c, o = np.split(mix @ np.concatenate([state, e, h]) + bias, 3)
                state = logistic(g) * state + (1 - logistic(g)) * np.tanh(c)
                latent = np.tanh(o)
            logits = base[b, t] + w2 @ latent
            np.testing.assert_allclose(got.logits[b, t], logits, atol=1e-12)
            if temperature:
                q = np.exp(logits / temperature - (logits / temperature).max())
                q /= q.sum()
                np.testing.assert_allclose(got.q[b, t], q, atol=1e-12)
                previous = int(np.searchsorted(np.cumsum(q), draws.uniforms[b, t]))
            else:
                previous = int(logits.argmax())
            assert got.tokens[b, t] == previous


def test_confidence_sees_the_tokens_before_only():
    hidden, w1, weight = table(1, 3, 5), table(9, 4), table(1, 9)
    tokens, anchor = np.array([[2, 5, 6]]), np.array([8])
    got = confidence_logits(hidden, anchor, tokens, linear(weight, 0.25), lambda ids: w1[ids])
    for t, before in enumerate([8, 2, 5]):
        assert got[0, t] == pytest.approx((weight @ np.concatenate([hidden[0, t], w1[before]]))[0] + 0.25)
    last = confidence_logits(hidden, anchor, np.array([[2, 5, 0]]), linear(weight, 0.25), lambda ids: w1[ids])
    np.testing.assert_array_equal(got, last)
    plain = confidence_logits(hidden, anchor, tokens, linear(weight[:, :5]), None)
    np.testing.assert_allclose(plain, hidden @ weight[0, :5], atol=1e-12)


def test_gru_step_equals_torch():
    torch = pytest.importorskip("torch", reason="torch.nn.GRU is the witness")
    gru = torch.nn.GRU(5, 3, bias=False, dtype=torch.float64)
    x = torch.from_numpy(table(2, 4, 5))
    with torch.no_grad():
        want = gru(x.transpose(0, 1))[0].transpose(0, 1).numpy()
        wx, ws = gru.weight_ih_l0.numpy(), gru.weight_hh_l0.numpy()
    weights, state = DominoWeights(linear(wx), linear(ws), None, None, None), None
    for t in range(4):
        state = gru_step(x[:, t].numpy(), state, weights)
        np.testing.assert_allclose(state, want[:, t], atol=1e-12)


def test_domino_corrects_from_the_second_proposal_on():
    vocab, size, gru, emb = 9, 5, 3, 4
    base, hidden, anchor = table(1, 4, vocab), table(1, 4, size), np.array([2])
    embedding, wx, ws, e0, e2 = table(vocab, size), table(9, size), table(9, gru), table(emb, size + gru), table(vocab, emb)
    weights = DominoWeights(linear(wx), linear(ws), linear(e0), linear(e2), lambda ids: embedding[ids])
    got = domino_walk(base, hidden, anchor, weights, Draws())
    np.testing.assert_array_equal(got.logits[:, 0], base[:, 0])
    state, previous = gru_step(embedding[anchor], None, weights), int(base[0, 0].argmax())
    for t in range(1, 4):
        state = gru_step(embedding[[previous]], state, weights)
        inner = e0 @ np.concatenate([hidden[0, t], state[0]])
        logits = base[0, t] + e2 @ (inner * logistic(inner))
        np.testing.assert_allclose(got.logits[0, t], logits, atol=1e-12)
        previous = int(logits.argmax())
        assert got.tokens[0, t] == previous


def test_dense_rejection_is_rejection_over_all_ids():
    """The same verdict, draw for draw, as the form with candidates that happen to be the whole vocabulary."""
    vocab, drafts = 7, 3
    for _ in range(200):
        p, q = RNG.dirichlet(np.ones(vocab), (1, drafts + 1)), RNG.dirichlet(np.ones(vocab), (1, drafts))
        draft = np.array([[RNG.choice(vocab, p=q[0, i]) for i in range(drafts)]])
        limit, accept, draw = np.array([drafts]), RNG.random((1, drafts)), RNG.random((1, drafts + 1))
        ids = np.broadcast_to(np.arange(vocab), (1, drafts, vocab))
        want = accept_rejection(p, draft, limit, ids, q, accept, draw)
        got = accept_rejection_dense(p, draft, limit, q, accept, draw)
        assert (got.accepted, got.next_token) == (want.accepted, want.next_token)


def test_dense_rejection_keeps_the_targets_distribution():
    p, q = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.2, 0.3, 0.4])
    count, first = 4000, np.zeros(4)
    grid = (np.arange(count) + 0.5) / count
    for u, v, w in zip(RNG.permutation(grid), RNG.permutation(grid), RNG.permutation(grid), strict=True):
        draft = np.array([[int(np.searchsorted(np.cumsum(q), u))]])
        rows = np.stack([p, p])[None]
        verdict = accept_rejection_dense(rows, draft, np.array([1]), q[None, None], np.array([[v]]), np.array([[w, w]]))
        first[draft[0, 0] if verdict.accepted[0] else verdict.next_token[0]] += 1
    np.testing.assert_allclose(first / count, p, atol=0.03)


@pytest.mark.parametrize("method", ["dflash", "dflash2", "domino", "dspark", "dspine"])
@pytest.mark.parametrize("kind", [FULL, SLIDING])
@pytest.mark.parametrize("causal", [None, True, False])
def test_masks_of_every_kind(method, kind, causal):
    """The truth table of `docs/formats.md`, with a window smaller than the block."""
    if method == "dspine" and causal is False:
        pytest.skip("refused by the card")
    rule, window, start = mask_rule(method, kind, causal, 3), 3, 9
    limits = kind == SLIDING and (causal is not None or method in ("dflash", "dflash2"))
    for o in range(6):
        for j in range(6):
            one_way = method == "dspine" or (causal if causal is not None else kind == SLIDING)
            want = (j <= o) if one_way else True
            if limits:
                want = want and abs(o - j) < window
            assert bool(rule.block(np.array(o), np.array(j))) == want, (o, j)
        for kv in range(9):
            want = kind == FULL or start + o - kv < window
            assert bool(rule.context(np.array(o), start, np.array(kv))) == want
    assert rule.reach == (None if kind == FULL else 2)


def test_masks_of_speculators_files():
    """Their window hangs on the anchor and never cuts the block."""
    rule = mask_rule("dflash", SLIDING, None, 3, anchored=True)
    assert rule.reach == 3
    for o in range(6):
        assert [bool(rule.block(np.array(o), np.array(j))) for j in range(6)] == [j <= o for j in range(6)]
        assert [bool(rule.context(np.array(o), 9, np.array(kv))) for kv in range(9)] == [kv >= 6 for kv in range(9)]
    assert mask_rule("dflash2", SLIDING, False, 3, anchored=True).block(np.array(0), np.array(5))
