"""Rounds of verify and commit on a small stack of layers, against one token after another (N3, R1, R2, R3, R8, R9, R10)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from dspine.common.gdn import (
    MAX_TOKENS,
    GdnFactors,
    GdnInputWeights,
    GdnLayout,
    gdn_commit,
    gdn_inputs,
    gdn_recurrence,
    gdn_verify,
)

LAYERS, LAYOUT, VOCAB = 3, GdnLayout(1, 2, 4, 4), 64
_RNG = np.random.default_rng(7)
# what a token id feeds each layer: pre-convolution inputs, a and b (a toy: layers do not feed one another)
PROJECTED = _RNG.normal(size=(LAYERS, VOCAB, LAYOUT.channels)).astype(np.float32)
GATES = _RNG.normal(size=(2, LAYERS, VOCAB, LAYOUT.value_heads)).astype(np.float32)
WEIGHTS = [
    GdnInputWeights(
        _RNG.normal(size=(LAYOUT.channels, 4)).astype(np.float32),
        np.log(_RNG.uniform(0.02, 0.5, size=2)).astype(np.float32),
        _RNG.normal(size=2).astype(np.float32),
    )
    for _ in range(LAYERS)
]


@dataclass
class Cache:
    """states [L, B, Hv, Dv, Dk], windows [L, B, 3, C]."""

    states: np.ndarray
    windows: np.ndarray

    def slot(self, index):
        return Cache(self.states[:, index : index + 1], self.windows[:, index : index + 1])


def empty(batch=1, dtype=np.float32):
    heads = (LAYOUT.value_heads, LAYOUT.value_dim, LAYOUT.key_dim)
    return Cache(np.zeros((LAYERS, batch, *heads), dtype), np.zeros((LAYERS, batch, 3, LAYOUT.channels), dtype))


def layer_tokens(layer, window, tokens, dtype):
    """`tokens` int [B, T] -> (GdnTokens, projected)."""
    projected = PROJECTED[layer][tokens].astype(dtype)
    a, b = (gate[layer][tokens].astype(dtype) for gate in GATES)
    return gdn_inputs(projected, window, a, b, WEIGHTS[layer], LAYOUT), projected


def verify(cache, tokens, lengths=None):
    """Outputs [L, B, w, Hv, Dv], stacked factors, and the block's inputs."""
    outs, factors, inputs = [], [], []
    for layer in range(LAYERS):
        t, projected = layer_tokens(layer, cache.windows[layer], tokens, cache.states.dtype)
        out, kept = gdn_verify(t.q, t.k, t.v, t.log_decay, t.beta, cache.states[layer], lengths)
        outs.append(out)
        factors.append(kept)
        inputs.append(projected)
    stacked = GdnFactors(*(np.stack([getattr(f, name) for f in factors]) for name in ("z", "k", "g")))
    return np.stack(outs), stacked, np.stack(inputs)


def play(cache, tokens, m, lengths=None):
    """One round: the first m tokens stay. Returns (outputs, new cache)."""
    tokens = np.atleast_2d(tokens)
    outs, factors, inputs = verify(cache, tokens, lengths)
    m = np.broadcast_to(np.asarray(m), (tokens.shape[0],))
    return outs, Cache(*gdn_commit(cache.states, factors, cache.windows, inputs, m))


def one_by_one(cache, tokens, dtype=np.float64):
    """The witness: token after token through the recurrence, windows shifted by hand."""
    states, windows, outs = cache.states.astype(dtype), cache.windows.astype(dtype), []
    for token in np.asarray(tokens).reshape(-1):
        step = []
        for layer in range(LAYERS):
            t, projected = layer_tokens(layer, windows[layer], np.array([[token]]), dtype)
            out, _, _, last = gdn_recurrence(t.q, t.k, t.v, t.log_decay, t.beta, states[layer])
            states[layer] = last
            windows[layer] = np.concatenate([windows[layer][:, 1:], projected], axis=1)
            step.append(out[:, 0])
        outs.append(np.stack(step))
    return np.stack(outs, axis=2) if outs else None, Cache(states, windows)


def same(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got.states, want.states, rtol=0, atol=tolerance)
    np.testing.assert_allclose(got.windows, want.windows, rtol=0, atol=1e-6)


def draw(count, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, size=count)


PROMPT = draw(7, seed=1)


@pytest.mark.parametrize("w", range(2, MAX_TOKENS + 1))
def test_r9_every_width_and_every_acceptance(w):
    """Also R1: two blocks that share their first A drafts leave the same state and window."""
    _, cache = one_by_one(empty(), PROMPT)
    cache = Cache(cache.states.astype(np.float32), cache.windows.astype(np.float32))
    block, other = draw(w, seed=2), draw(w, seed=3)
    for accepted in range(w):
        m = accepted + 1
        outs, after = play(cache, block, m)
        want_outs, want = one_by_one(cache, block[:m])
        np.testing.assert_allclose(outs[:, :, :m], want_outs, rtol=0, atol=1e-5)
        same(after, want)
        other[:m] = block[:m]
        _, again = play(cache, other, m)
        np.testing.assert_array_equal(again.states, after.states)
        np.testing.assert_array_equal(again.windows, after.windows)


@pytest.mark.parametrize("prefill", [1, 2, 3, 9])
def test_r2_a_block_continues_from_the_cache(prefill):
    """Row 0 of a block equals the single step, for prompts shorter than the convolution window too."""
    _, cache = play(empty(), draw(prefill, seed=4), prefill)
    token = draw(16, seed=5)
    alone, _ = play(cache, token[:1], 1)
    for w in range(2, MAX_TOKENS + 1):
        outs, _ = play(cache, token[:w], 1)
        np.testing.assert_allclose(outs[:, :, 0], alone[:, :, 0], rtol=0, atol=1e-6)


def test_r3_steps_without_drafts_between_blocks():
    """w=6 A=3, then a plain step, then w=4 A=0; m of 1 and 2 mix old and new rows of the window."""
    _, cache = play(empty(), PROMPT, len(PROMPT))
    want = cache
    for w, m, seed in ((6, 4, 6), (1, 1, 7), (4, 1, 8), (5, 2, 9), (1, 1, 10), (2, 2, 11)):
        block = draw(w, seed)
        _, cache = play(cache, block, m)
        _, want = one_by_one(want, block[:m])
        same(cache, want)


def test_n3_forced_reject_is_plain_decoding():
    """64 rounds that accept nothing leave what 64 single steps leave."""
    _, rejected = play(empty(), PROMPT, len(PROMPT))
    plain = Cache(rejected.states.copy(), rejected.windows.copy())
    for step, token in enumerate(draw(64, seed=12)):
        block = draw(6, seed=100 + step)
        block[0] = token
        outs, rejected = play(rejected, block, 1)
        want, plain = play(plain, [token], 1)
        np.testing.assert_allclose(outs[:, :, 0], want[:, :, 0], rtol=0, atol=1e-5)
    same(rejected, plain)


def test_r8_padded_rows_touch_nothing():
    """Three requests as a padded batch of four, 20 rounds; the unused slot holds NaN and keeps it, wherever it is."""
    for unused in (0, 3):
        live = [slot for slot in range(4) if slot != unused]
        batch, alone = empty(4), [empty() for _ in live]
        for array in (batch.states, batch.windows):
            array[:, unused] = np.nan
        for step in range(20):
            rng = np.random.default_rng((unused, step))
            tokens, lengths = rng.integers(0, VOCAB, size=(4, 5)), rng.integers(1, 6, size=4)
            m = rng.integers(1, lengths + 1)
            lengths[unused] = m[unused] = 0
            outs, batch = play(batch, tokens, m, lengths)
            assert not outs[:, unused].any()
            for index, slot in enumerate(live):
                want, alone[index] = play(alone[index], tokens[slot : slot + 1], m[slot], lengths[slot : slot + 1])
                np.testing.assert_array_equal(outs[:, slot], want[:, 0])
                assert not outs[:, slot, lengths[slot] :].any()
        for index, slot in enumerate(live):
            np.testing.assert_array_equal(batch.slot(slot).states, alone[index].states)
            np.testing.assert_array_equal(batch.slot(slot).windows, alone[index].windows)
        assert np.isnan(batch.states[:, unused]).all() and np.isnan(batch.windows[:, unused]).all()


def test_padding_in_factors_is_never_read():
    cache = empty(2)
    _, factors, inputs = verify(cache, draw(10, seed=13).reshape(2, 5))
    clean = gdn_commit(cache.states, factors, cache.windows, inputs, np.array([2, 4]))
    for array in (factors.z, factors.k, factors.g, inputs):
        array[:, 0, 2:], array[:, 1, 4:] = np.nan, np.nan
    for got, want in zip(gdn_commit(cache.states, factors, cache.windows, inputs, np.array([2, 4])), clean, strict=True):
        np.testing.assert_array_equal(got, want)


def test_r10_long_runs_do_not_drift():
    """512 rounds with random acceptance: the state's error stays within twice that of round 16."""
    rng = np.random.default_rng(14)
    cache, want, errors = empty(), empty(dtype=np.float64), []
    for _ in range(512):
        w = int(rng.integers(2, 9))
        m, block = int(rng.integers(1, w + 1)), rng.integers(0, VOCAB, size=w)
        _, cache = play(cache, block, m)
        _, want = one_by_one(want, block[:m])
        errors.append(np.linalg.norm(cache.states - want.states) / np.linalg.norm(want.states))
    early, late = np.mean(errors[8:24]), np.mean(errors[-16:])
    assert late <= 2 * early, (early, late)
    assert max(errors) < 2e-6
