"""Gated DeltaNet: the solve against the token recurrence, hostile keys and decays (N1, N2), bad input, memory (M3)."""

from __future__ import annotations

import numpy as np
import pytest

from dspine.common.errors import DSpineError
from dspine.common.gdn import (
    MAX_TOKENS,
    GdnFactors,
    GdnInputWeights,
    GdnLayout,
    check_log_decay,
    gdn_commit,
    gdn_inputs,
    gdn_recurrence,
    gdn_verify,
    gdn_verify_deferred,
)

B, HK, HV, DK, DV = 2, 2, 4, 8, 6


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def block(w, *, seed=0, dtype=np.float64, batch=B, heads=(HK, HV), sizes=(DK, DV)):
    """q, k, v, log_decay, beta, state of one block."""
    rng = np.random.default_rng((seed, w))
    keys, values = (batch, w, heads[0], sizes[0]), (batch, w, heads[1], sizes[1])
    arrays = [
        unit(rng.normal(size=keys)) * sizes[0] ** -0.5,
        unit(rng.normal(size=keys)),
        rng.normal(size=values),
        -rng.exponential(0.4, size=values[:3]),
        rng.random(values[:3]),
        rng.normal(size=(batch, heads[1], sizes[1], sizes[0])),
    ]
    return [array.astype(dtype) for array in arrays]


def error(got, want):
    return np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)


def stacked(factors):
    return GdnFactors(factors.z[None], factors.k[None], factors.g[None])


def commit_state(state, factors, m):
    """The state alone: windows of no channels."""
    rows = factors.z.shape[:2]
    windows, inputs = np.zeros((1, rows[0], 3, 0)), np.zeros((1, *rows, 0))
    return gdn_commit(state[None], stacked(factors), windows, inputs, np.asarray(m))[0][0]


@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (1, 5)])
@pytest.mark.parametrize("w", range(1, MAX_TOKENS + 1))
def test_the_two_forms_agree(w, heads):
    inputs = block(w, heads=heads)
    out, factors = gdn_verify(*inputs)
    want_out, want_z, states, _ = gdn_recurrence(*inputs)
    np.testing.assert_allclose(out, want_out, rtol=0, atol=1e-12)
    np.testing.assert_allclose(factors.z, want_z, rtol=0, atol=1e-12)
    np.testing.assert_allclose(factors.g, np.cumsum(inputs[3], axis=1), rtol=0, atol=1e-12)
    for m in range(1, w + 1):
        np.testing.assert_allclose(commit_state(inputs[5], factors, [m] * B), states[:, m - 1], rtol=0, atol=1e-12)


def test_recurrence_is_equation_1_written_with_loops():
    q, k, v, log_decay, beta, state = block(5)
    out, _, _, last = gdn_recurrence(q, k, v, log_decay, beta, state)
    for b in range(B):
        for h in range(HV):
            s, key_head = state[b, h].copy(), h // (HV // HK)
            for i in range(5):
                s *= np.exp(log_decay[b, i, h])
                key = k[b, i, key_head]
                s += np.outer(beta[b, i, h] * (v[b, i, h] - s @ key), key)
                np.testing.assert_allclose(out[b, i, h], s @ q[b, i, key_head], atol=1e-12)
            np.testing.assert_allclose(last[b, h], s, atol=1e-12)


@pytest.mark.parametrize("beta", [0.5, 0.9, 0.97, 0.999])
@pytest.mark.parametrize("w", range(2, MAX_TOKENS + 1))
def test_n1_parallel_keys(w, beta):
    """All keys of the block the same vector: a power series of the triangle loses every digit here, substitution none."""
    q, k, v, _, _, state = block(w, heads=(1, 1), sizes=(128, 128), batch=1)
    k = np.broadcast_to(k[:, :1], k.shape)
    log_decay, strength = np.full((1, w, 1), np.log(0.999)), np.full((1, w, 1), beta)
    inputs = [x.astype(np.float32) for x in (q, k, v, log_decay, strength, state)]
    out, factors = gdn_verify(*inputs)
    want_out, want_z, states, _ = gdn_recurrence(*(x.astype(np.float64) for x in inputs))
    assert np.isfinite(out).all()
    assert error(factors.z, want_z) <= 1e-5 and error(out, want_out) <= 1e-5
    assert error(commit_state(inputs[5], factors, [w]), states[:, -1]) <= 1e-5


@pytest.mark.parametrize("decay", [6.5e-12, 1e-3, 1.0])
def test_n2_tiny_decay(decay):
    """e^{-g} of 16 such tokens overflows, and so does the masked half of e^{g_i - g_j}: neither may be formed."""
    inputs = block(16, dtype=np.float32)
    inputs[3] = np.full_like(inputs[3], np.log(decay))
    with np.errstate(over="raise", invalid="raise"):
        out, factors = gdn_verify(*inputs)
        state = commit_state(inputs[5], factors, [16, 9])
    want_out, want_z, states, _ = gdn_recurrence(*(x.astype(np.float64) for x in inputs))
    assert error(out, want_out) <= 1e-5 and error(factors.z, want_z) <= 1e-5
    assert error(state, np.stack([states[0, 15], states[1, 8]])) <= 1e-5


def test_n2_no_decay_is_the_plain_delta_rule():
    inputs = block(7)
    inputs[3] = np.zeros_like(inputs[3])
    out, _ = gdn_verify(*inputs)
    q, k, v, _, beta, state = inputs
    for i in range(7):
        key, query = (np.repeat(x[:, i], HV // HK, axis=1) for x in (k, q))
        read = np.einsum("bhvk,bhk->bhv", state, key)
        state = state + np.einsum("bh,bhv,bhk->bhvk", beta[:, i], v[:, i] - read, key)
        np.testing.assert_allclose(out[:, i], np.einsum("bhvk,bhk->bhv", state, query), atol=1e-12)


def test_n2_positive_log_decay_raises():
    inputs = block(3)
    with pytest.raises(DSpineError, match=r"log_decay must be at most 0, got 0\.97.*pass log\(decay\)"):
        gdn_verify(*inputs[:3], np.full_like(inputs[3], 0.97), *inputs[4:])
    with pytest.raises(DSpineError, match="at most 0, got 0.25"):
        check_log_decay(np.array([[[-1.0, 0.25]]]))
    padded = np.full_like(inputs[3], 0.5)
    padded[:, :2] = -0.5  # what lies in padding is nobody's decay
    gdn_verify(*inputs[:3], padded, *inputs[4:], np.array([2, 2]))


def test_zero_strength_writes_nothing():
    inputs = block(5)
    inputs[4] = np.zeros_like(inputs[4])
    _, factors = gdn_verify(*inputs)
    assert not factors.z.any()
    total = np.exp(inputs[3].sum(axis=1))[..., None, None]
    np.testing.assert_allclose(commit_state(inputs[5], factors, [5, 5]), total * inputs[5], rtol=1e-12)


def test_deferred_commit_equals_commit_then_verify():
    first, second = block(6), block(4, seed=1)
    _, factors = gdn_verify(*first)
    m = np.array([2, 6])
    state = commit_state(first[5], factors, m)
    out, after, written = gdn_verify_deferred(*second[:5], first[5], factors, m, np.array([4, 3]))
    want_out, want = gdn_verify(*second[:5], state, np.array([4, 3]))
    for got, expected in ((out, want_out), (after.z, want.z), (after.g, want.g), (written, state)):
        np.testing.assert_array_equal(got, expected)


def test_m3_compact_factors_replace_a_state_per_token():
    """Qwen3.6-35B-A3B, 30 layers, 16 tokens: 12 MB of factors a slot; one state per token would take 0.94 GiB."""
    _, factors = gdn_verify(*block(16, batch=1, heads=(16, 32), sizes=(128, 128), dtype=np.float32))
    kept = 30 * sum(array.nbytes for array in (factors.z, factors.k, factors.g))
    assert kept == 30 * 16 * 4 * (32 * 128 + 16 * 128 + 32)
    assert kept < 0.013 * 16 * 30 * 32 * 128 * 128 * 4


# ------------------------------------------------------------------------------------------------------------- inputs
LAYOUT = GdnLayout(1, 2, 4, 4)


def input_arrays(count, dtype=np.float64):
    rng = np.random.default_rng(count)
    weights = GdnInputWeights(
        rng.normal(size=(LAYOUT.channels, 4)), np.log(rng.uniform(1, 16, size=2)), rng.normal(size=2), rng.normal(size=16)
    )
    shapes = ((2, count, LAYOUT.channels), (2, 3, LAYOUT.channels), (2, count, 2), (2, count, 2))
    return [rng.normal(size=shape).astype(dtype) for shape in shapes], weights


def test_inputs_written_out():
    (projected, window, a, b), weights = input_arrays(5)
    found = gdn_inputs(projected, window, a, b, weights, LAYOUT)
    rows = np.concatenate([window, projected], axis=1)
    for t in range(5):
        mixed = sum(rows[:, t + j] * weights.conv[:, j] for j in range(4)) + weights.conv_bias
        mixed = mixed / (1 + np.exp(-mixed))
        q, k, v = mixed[:, :4], mixed[:, 4:8], mixed[:, 8:].reshape(2, 2, 4)
        np.testing.assert_allclose(found.q[:, t, 0], q / np.sqrt((q**2).sum(1, keepdims=True) + 1e-6) / 2, rtol=1e-12)
        np.testing.assert_allclose(found.k[:, t, 0], k / np.sqrt((k**2).sum(1, keepdims=True) + 1e-6), rtol=1e-12)
        np.testing.assert_allclose(found.v[:, t], v, rtol=1e-12)
    np.testing.assert_allclose(found.log_decay, -np.exp(weights.decay_log) * np.log1p(np.exp(a + weights.dt_bias)), rtol=1e-12)
    np.testing.assert_allclose(found.beta, 1 / (1 + np.exp(-b)), rtol=1e-12)


def test_extreme_gates_stay_finite():
    (projected, window, a, b), weights = input_arrays(3, np.float32)
    with np.errstate(over="raise"):
        found = gdn_inputs(projected * 0, window * 0, a * 0 + 200, b * 0 - 200, weights, LAYOUT)
    assert (found.log_decay < -100).all() and np.isfinite(found.log_decay).all()
    assert (found.beta >= 0).all() and (found.beta < 1e-30).all() and np.isfinite(found.k).all()


def test_n3_beta_is_not_rounded():
    """sigmoid(0.5) is 0.62245935; through bfloat16 it would be 0.62109375, once a token, into the state."""
    (projected, window, a, b), weights = input_arrays(2, np.float32)
    for logit, want in ((0.5, 0.62245935), (-0.5, 0.37754068)):
        beta = gdn_inputs(projected, window, a, np.full_like(b, logit), weights, LAYOUT).beta
        np.testing.assert_allclose(beta, np.float32(want), rtol=1e-7)


# ---------------------------------------------------------------------------------------------------------- bad input
def with_changed(index, change):
    inputs = block(4)
    inputs[index] = change(inputs[index])
    return inputs


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        (0, lambda x: x[0], r"q must have shape \[B, w, Hk, Dk\], got \(4, 2, 8\)"),
        (1, lambda x: x[..., :-1], r"k must have shape \(2, 4, 2, 8\), got \(2, 4, 2, 7\)"),
        (1, lambda x: x.astype(np.float32), "q, k and v must have one dtype, got float64, float32 and float64"),
        (2, lambda x: x[:, :, :3], "value heads must be a multiple of key heads, got 3 and 2"),
        (3, lambda x: x[..., 0], r"log_decay must have shape \(2, 4, 4\), got \(2, 4\)"),
        (4, lambda x: x.astype(np.float32), "beta must have the state's dtype float64, got float32"),
        (5, lambda x: x.astype(np.float16), "state must be float32, got float16"),
        (5, lambda x: x.swapaxes(2, 3), r"state must have shape \(2, 4, 6, 8\), got \(2, 4, 8, 6\)"),
    ],
)
def test_bad_blocks(index, change, message):
    with pytest.raises(DSpineError, match=message):
        gdn_verify(*with_changed(index, change))


@pytest.mark.parametrize("w", [0, 17, 64])
def test_length_out_of_range(w):
    with pytest.raises(DSpineError, match=f"1..16 tokens at once, got {w}"):
        gdn_verify(*block(w))


def test_bad_commits():
    inputs = block(4)
    _, factors = gdn_verify(*inputs)
    state, m = inputs[5][None], np.array([1, 2])
    windows, rows = np.zeros((1, 2, 3, 5)), np.zeros((1, 2, 4, 5))
    good = (state, stacked(factors), windows, rows, m)
    gdn_commit(*good)
    for index, value, message in (
        (0, state[0], r"states must have shape \[L, B, Hv, Dv, Dk\]"),
        (1, factors, r"factors.z must have shape \[L, B, w, Hv, Dv\], got \(2, 4, 4, 6\)"),
        (2, windows[:, :1], r"windows must have shape \(1, 2, 3, 5\), got \(1, 1, 3, 5\)"),
        (3, rows[:, :, :3], r"inputs must have shape \(1, 2, 4, 5\), got \(1, 2, 3, 5\)"),
        (4, m.astype(np.float64), "m must be an integer array, got float64"),
        (4, m[:1], r"m must have shape \(2,\), got \(1,\)"),
    ):
        with pytest.raises(DSpineError, match=message):
            gdn_commit(*good[:index], value, *good[index + 1 :])


def test_bad_inputs():
    (projected, window, a, b), weights = input_arrays(3)
    good = (projected, window, a, b, weights, LAYOUT)
    for index, value, message in (
        (0, projected[..., 1:], r"projected must have shape \(2, 3, 16\), got \(2, 3, 15\)"),
        (1, window[:, :2], r"window must have shape \(2, 3, 16\), got \(2, 2, 16\)"),
        (2, a[..., :1], r"a must have shape \(2, 3, 2\), got \(2, 3, 1\)"),
    ):
        with pytest.raises(DSpineError, match=message):
            gdn_inputs(*good[:index], value, *good[index + 1 :])
    with pytest.raises(DSpineError, match="multiple of key heads, got 3 and 2"):
        GdnLayout(2, 3, 4, 4)
