"""Gated DeltaNet kernels against the core in float64: every w, odd sizes, hostile inputs, padded rows."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from dspine.common import gdn as core
from dspine.common.errors import DSpineError
from dspine.kernels_metal.gdn_commit import gdn_commit
from dspine.kernels_metal.gdn_inputs import gdn_inputs
from dspine.kernels_metal.gdn_verify import gdn_verify, gdn_verify_deferred, threadgroup_bytes
from tests.metal.emulator import last_report
from tests.metal_kernels.running import (
    assert_close,
    low,
    on_device,
    relative_error,
    run_every_schedule,
    run_metal,
    run_reference,
)

F32, BF16 = (2e-6,), (2e-3, 1e-5)  # outputs, then factors
HOSTILE = {"float32": (1e-5,), "bfloat16": (3e-3, 1e-5)}
# batch, w, key heads, value heads, Dk, Dv
SHAPES = [(1, 1, 1, 1, 8, 8), (2, 5, 2, 4, 37, 41), (3, 16, 1, 3, 64, 33), (1, 7, 2, 2, 96, 64), (1, 16, 1, 2, 256, 32)]


def block(rng, batch, count, key_heads, value_heads, key_dim, value_dim, dtype="float32", family="random"):
    """(q, k, v, log_decay, beta, state) of one family."""
    q, k = (rng.normal(size=(batch, count, key_heads, key_dim)) for _ in range(2))
    if family == "parallel":
        k[:] = k[:, :1]
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(batch, count, value_heads, value_dim))
    log_decay, beta = -rng.random((batch, count, value_heads)), rng.random((batch, count, value_heads))
    if family == "parallel":
        log_decay[:], beta[:] = np.log(0.999), np.resize([0.5, 0.9, 0.97, 0.999], beta.shape)
    elif family == "tiny decay":
        log_decay[:] = np.log(6.5e-12)
    elif family == "no decay":
        log_decay[:] = 0
    elif family == "zero strength":
        beta[:] = 0
    state = rng.normal(size=(batch, value_heads, value_dim, key_dim))
    q, k, v = low(q / key_dim**0.5, dtype), low(k, dtype), low(v, dtype)
    return (q, k, v, *(np.float32(x) for x in (log_decay, beta, state)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_verify(shape, dtype):
    args = block(np.random.default_rng(1), *shape, dtype)
    assert_close(
        run_every_schedule(gdn_verify, args), run_reference(core.gdn_verify, args), F32 if dtype == "float32" else BF16
    )
    assert last_report().threadgroup_bytes == threadgroup_bytes(shape[1])


@pytest.mark.parametrize("family", ["parallel", "tiny decay", "no decay", "zero strength"])
@pytest.mark.parametrize("count", range(1, 17))
def test_hostile_inputs_at_every_length(count, family):
    """Case N1: a power series fails here; case N2: a decay factored as e^{g_i} e^{-g_j} fails here."""
    for dtype in ("float32",) if count % 5 else ("float32", "bfloat16"):
        args = block(np.random.default_rng(2), 1, count, 1, 2, 32, 16, dtype, family)
        assert_close(run_metal(gdn_verify, args), run_reference(core.gdn_verify, args), HOSTILE[dtype])


def test_verify_agrees_with_the_token_recurrence():
    args = block(np.random.default_rng(3), 2, 16, 1, 2, 128, 32, family="parallel")
    out, z, _, _ = run_metal(gdn_verify, args)
    witness_out, witness_z, _, _ = core.gdn_recurrence(*(np.float64(x.values if hasattr(x, "values") else x) for x in args))
    assert relative_error(out, witness_out) <= 2e-6 and relative_error(z, witness_z) <= 2e-6


def test_padded_rows_are_never_read():
    """Case R8: NaN in rows at or after a length, and in the whole of an unused slot with its state."""
    shape = (4, 6, 1, 2, 40, 24)
    args, lengths = block(np.random.default_rng(4), *shape), np.array([6, 3, 0, 1], dtype=np.int32)
    clean = run_metal(gdn_verify, (*args, lengths))
    q, k, v, log_decay, beta, state = args
    poisoned = [x.copy() for x in (q.values, k.values, v.values, log_decay, beta)]
    for row, length in enumerate(lengths):
        for x in poisoned:
            x[row, length:] = np.nan
    state = state.copy()
    state[2] = np.nan
    q, k, v = (low(x, "float32") for x in poisoned[:3])
    dirty = run_every_schedule(gdn_verify, (q, k, v, *poisoned[3:], state, lengths))
    for name in (0, 1, 3):  # o, z, g; the key factor is the input itself
        assert dirty[name].tobytes() == clean[name].tobytes()
    expected = run_reference(core.gdn_verify, (*args, lengths))
    assert_close(clean, expected, F32)
    for row, length in enumerate(lengths):
        assert not clean[0][row, length:].any() and not clean[1][row, length:].any()


def test_rows_do_not_depend_on_the_length_that_was_asked():
    """Row i of any w is the same to the bit, so a shorter verify of the same tokens changes nothing."""
    args = block(np.random.default_rng(5), 1, 16, 1, 2, 64, 32, "bfloat16")
    whole = run_metal(gdn_verify, args)
    for count in (1, 2, 3, 7, 15):
        part = run_metal(
            gdn_verify,
            tuple(low(x.values[:, :count], x.dtype) for x in args[:3]) + (args[3][:, :count], args[4][:, :count], args[5]),
        )
        for name in (0, 1, 3):
            assert part[name].tobytes() == np.ascontiguousarray(whole[name][:, :count]).tobytes()


def committed(rng, layers, batch, count, key_heads, value_heads, key_dim, value_dim, width=4, dtype="float32", family="random"):
    """Arguments of `gdn_commit`: factors as the reference's verify gives them."""
    states, zs, ks, gs = [], [], [], []
    for _ in range(layers):
        args = block(rng, batch, count, key_heads, value_heads, key_dim, value_dim, dtype, family)
        _, z, k, g = run_reference(core.gdn_verify, args)
        states.append(args[5])
        zs.append(z)
        ks.append(k)
        gs.append(g)
    factors = core.GdnFactors(np.float32(np.stack(zs)), low(np.stack(ks), dtype), np.float32(np.stack(gs)))
    channels = core.GdnLayout(key_heads, value_heads, key_dim, value_dim).channels
    windows = low(rng.normal(size=(layers, batch, width - 1, channels)), dtype)
    inputs = low(rng.normal(size=(layers, batch, count, channels)), dtype)
    return np.stack(states), factors, windows, inputs


@pytest.mark.parametrize(
    ("shape", "width", "dtype", "family"),
    [
        ((1, 1, 1, 1, 1, 8, 8), 4, "float32", "random"),
        ((2, 3, 5, 2, 4, 37, 41), 4, "float32", "random"),
        ((3, 2, 16, 1, 2, 64, 33), 3, "bfloat16", "random"),
        ((2, 2, 16, 1, 2, 128, 16), 2, "bfloat16", "parallel"),
        ((1, 2, 16, 1, 1, 32, 32), 4, "float32", "tiny decay"),
    ],
)
def test_commit(shape, width, dtype, family):
    rng = np.random.default_rng(6)
    args = committed(rng, *shape, width=width, dtype=dtype, family=family)
    m = np.resize(np.array([shape[2], 0, 2]), shape[1]).astype(np.int32)
    states, windows = run_every_schedule(gdn_commit, (*args, np.minimum(m, shape[2])))
    expected = run_reference(core.gdn_commit, (*args, np.minimum(m, shape[2])))
    assert relative_error(states, expected[0]) <= 2e-6
    np.testing.assert_array_equal(windows, expected[1])


def test_commit_of_nothing_changes_no_bit():
    args = committed(np.random.default_rng(7), 1, 2, 3, 1, 2, 16, 16)
    args[0][0, 1] = np.nan  # an unused slot
    states, windows = run_metal(gdn_commit, (*args, np.array([0, 0], dtype=np.int32)))
    assert states.tobytes() == args[0].tobytes() and windows.tobytes() == args[2].values.tobytes()


def test_commit_of_every_prefix():
    """Case R9: every m of every w from 1 to 16, against the token recurrence."""
    rng = np.random.default_rng(8)
    for count in range(1, 17):
        args = block(rng, 1, count, 1, 1, 16, 8)
        _, z, _, g = run_metal(gdn_verify, args)
        after = core.gdn_recurrence(*(np.float64(x.values if hasattr(x, "values") else x) for x in args))[2]
        factors = core.GdnFactors(*(np.repeat(x[None], count, axis=1) for x in (z, args[1].values, g)))
        nothing = np.zeros((1, count, 1, 1), dtype=np.float32)
        m = np.arange(1, count + 1, dtype=np.int32)
        states, _ = run_metal(
            gdn_commit,
            (np.repeat(args[5][None], count, axis=1), factors, nothing, np.zeros((1, count, count, 1), np.float32), m),
        )
        assert relative_error(states[0], after[0]) <= 2e-6


def test_state_does_not_drift_over_many_rounds():
    """Case R10: 96 rounds with random acceptance, each on the kernels' own state and factors."""
    rng = np.random.default_rng(9)
    state = witness = None
    errors = {}
    for round_number in range(1, 97):
        args = block(rng, 1, 4, 1, 1, 16, 8, "bfloat16")
        if state is None:
            state, witness = args[5], args[5].astype(np.float64)
        inputs = (*args[:5], state)
        _, z, k, g = run_metal(gdn_verify, inputs)
        m = int(rng.integers(1, 5))
        factors = core.GdnFactors(z[None], low(k[None], "bfloat16"), g[None])
        empty = np.zeros((1, 1, 1, 1), np.float32), np.zeros((1, 1, 4, 1), np.float32)
        state = run_metal(gdn_commit, (state[None], factors, *empty, np.array([m], np.int32)))[0][0]
        tokens = [np.float64(x.values if hasattr(x, "values") else x)[:, :m] for x in args[:5]]
        witness = core.gdn_recurrence(*tokens, witness)[3]
        errors[round_number] = relative_error(state, witness)
    assert errors[96] <= max(2 * errors[16], 5e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deferred_commit(dtype):
    """The state is folded, used and written once; the result is that of commit and verify."""
    rng = np.random.default_rng(10)
    shape = (3, 5, 2, 4, 37, 41)
    pending_args = block(rng, 3, 7, *shape[2:], dtype)
    _, z, k, g = run_reference(core.gdn_verify, pending_args)
    pending = core.GdnFactors(np.float32(z), low(k, dtype), np.float32(g))
    args = (*block(rng, *shape, dtype), pending, np.array([7, 0, 3], np.int32), np.array([5, 2, 0], np.int32))
    got, expected = run_every_schedule(gdn_verify_deferred, args), run_reference(core.gdn_verify_deferred, args)
    assert_close(got, expected, F32 if dtype == "float32" else BF16)
    assert relative_error(got[4], expected[4]) <= 2e-6
    assert got[4][1].tobytes() == args[5][1].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("shape", "width", "bias"),
    [((1, 1, 1, 1, 8, 8), 4, False), ((2, 3, 2, 4, 37, 41), 4, True), ((1, 19, 1, 3, 64, 96), 3, False)],
)
def test_inputs(shape, width, bias, dtype):
    rng = np.random.default_rng(11)
    batch, count, key_heads, value_heads, key_dim, value_dim = shape
    layout = core.GdnLayout(key_heads, value_heads, key_dim, value_dim)
    gates = [low(3 * rng.normal(size=(batch, count, value_heads)), dtype) for _ in range(2)]
    weights = core.GdnInputWeights(
        low(rng.normal(size=(layout.channels, width)), dtype),
        np.float32(rng.normal(size=value_heads)),
        low(rng.normal(size=value_heads), dtype),
        low(rng.normal(size=layout.channels), dtype) if bias else None,
    )
    args = (
        *(low(rng.normal(size=(batch, rows, layout.channels)), dtype) for rows in (count, width - 1)),
        *(*gates, weights, layout),
    )
    got, expected = run_every_schedule(gdn_inputs, args), run_reference(core.gdn_inputs, args)
    assert_close(got[:3], expected[:3], F32 if dtype == "float32" else (2e-3,))
    assert_close(got[3:], expected[3:], F32)


def test_gates_are_not_rounded_and_do_not_overflow():
    """Case N3: sigmoid(0.5) is 0.62245935, in bfloat16 it would be 0.62109375; and +-100 stay finite."""
    layout = core.GdnLayout(1, 4, 8, 8)
    b = np.array([0.5, -0.5, 100, -100]).reshape(1, 1, 4)
    ones = np.ones(4, np.float32)
    args = (
        *(low(np.zeros((1, rows, layout.channels)), "bfloat16") for rows in (1, 3)),
        *(low(2 * b, "bfloat16"), low(b, "bfloat16")),
        *(core.GdnInputWeights(low(np.ones((layout.channels, 4)), "bfloat16"), ones, 0 * ones), layout),
    )
    q, _, _, log_decay, beta = run_metal(gdn_inputs, args)
    np.testing.assert_allclose(beta[0, 0], [0.62245935, 0.37754068, 1, 3.783506e-44], rtol=2e-7)
    assert_close([log_decay], [run_reference(core.gdn_inputs, args)[3]], F32)
    assert not q.any()  # a zero row has no direction, and no NaN


def test_threadgroup_memory_fits_for_every_shape():
    """Case M5: dtype x (Dk, Dv) in {64, 128, 256}^2 x w: what the formula says, and that it is what a kernel takes."""
    dtypes, sizes = ("float32", "bfloat16"), (64, 128, 256)
    for _, _, _, count in itertools.product(dtypes, sizes, sizes, range(1, 17)):
        assert threadgroup_bytes(count) <= 32_768
    for dtype, key_dim, value_dim in itertools.product(dtypes, (64, 256), (64, 256)):
        run_metal(gdn_verify, block(np.random.default_rng(12), 1, 16, 1, 1, key_dim, value_dim, dtype))
        assert last_report().threadgroup_bytes == threadgroup_bytes(16)


def _broken(change):
    args = dict(
        zip(
            "q k v log_decay beta state".split(),
            map(on_device, block(np.random.default_rng(14), 2, 3, 2, 4, 8, 8)),
            strict=True,
        )
    )
    return {**args, **change(args)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: {"k": a["k"][:, :2]}, r"k must have shape \(2, 3, 2, 8\), got \(2, 2, 2, 8\)"),
        (lambda a: {"state": a["state"].astype(mx.bfloat16)}, "state must be float32, got mlx.core.bfloat16"),
        (lambda a: {"beta": a["beta"].astype(mx.bfloat16)}, "beta must be float32, got mlx.core.bfloat16"),
        (lambda a: {"v": a["v"].astype(mx.bfloat16)}, "one float dtype, got mlx.core.float32"),
        (lambda a: {"v": a["v"][:, :, :3]}, "multiple of key heads, got 3 and 2"),
        (lambda a: {"q": mx.zeros((1, 17, 1, 8))}, "1..16 tokens at once, got 17"),
        (lambda a: {"q": a["q"][0]}, r"q \[B, w, Hk, Dk\]"),
        (lambda a: {"lengths": mx.zeros((3,), dtype=mx.int32)}, r"lengths must be int \(2,\)"),
        (lambda a: {"lengths": mx.zeros((2,))}, "lengths must be int"),
    ],
)
def test_bad_blocks(change, message):
    with pytest.raises(DSpineError, match=message):
        gdn_verify(**_broken(change))


def test_bad_commits():
    states, factors, windows, inputs = (on_device(x) for x in committed(np.random.default_rng(15), 1, 2, 3, 1, 2, 8, 8))
    m = mx.array([1, 2], dtype=mx.int32)
    for args, message in (
        ((states, factors, windows, inputs[:, :, :2], m), r"inputs must have shape \(1, 2, 3, 32\), got \(1, 2, 2, 32\)"),
        ((states, factors, windows, inputs, m[:1]), r"m must have shape \(2,\)"),
        ((states, factors, windows, inputs, m.astype(mx.float32)), "m must be an integer array"),
        ((states[0], factors, windows, inputs, m), r"states must have shape \[L, B, Hv, Dv, Dk\]"),
        ((states.astype(mx.float16), factors, windows, inputs, m), "states must be float32"),
    ):
        with pytest.raises(DSpineError, match=message):
            gdn_commit(*args)
