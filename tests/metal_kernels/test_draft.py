"""Injection, transition cache, walk and draft signals on Metal against the core in float64."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from dspine.common import injection, signals, transition
from dspine.common.errors import DSpineError
from dspine.kernels_metal.draft_signals import STRIP, draft_signals
from dspine.kernels_metal.draft_signals import supports as supports_signals
from dspine.kernels_metal.injection_gate import injection_gate
from dspine.kernels_metal.injection_write import injection_write
from dspine.kernels_metal.injection_write import supports as supports_write
from dspine.kernels_metal.path_walk import path_walk, path_walk_sampled
from dspine.kernels_metal.transition_scores import supports as supports_scores
from dspine.kernels_metal.transition_scores import transition_scores
from tests.metal.emulator import last_report
from tests.metal_kernels.running import (
    assert_close,
    low,
    on_device,
    run_every_schedule,
    run_metal,
    run_reference,
)

BOUNDS = {"float32": (2e-6,), "bfloat16": (2e-3,), "float16": (2e-3,)}


def weights_of(rng, hidden, rank, messages, dtype):
    shapes = ((rank, hidden), (hidden, messages), (messages, rank), (messages, rank), (messages, rank), (messages,))
    return injection.InjectionWeights(*(low(rng.normal(size=s) / s[-1] ** 0.5, dtype) for s in shapes))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    ("receiver", "predecessor"), [((5,), (5,)), ((2, 3), (2, 3)), ((2, 3, 1), (2, 3, 16)), ((3, 1), (3, 5)), ((1, 4), (2, 4))]
)
def test_gate(receiver, predecessor, dtype):
    """Rows that match, that share a receiver (in whole tiles of 8, or not), and that broadcast otherwise."""
    rng = np.random.default_rng(1)
    z, p = (low(3 * rng.normal(size=(*shape, 37)), dtype) for shape in (receiver, predecessor))
    args = (z, p, weights_of(rng, 24, 37, 19, dtype))
    assert_close(run_every_schedule(injection_gate, args), run_reference(injection.injection_gate, args), BOUNDS[dtype])


def test_gate_far_out_stays_finite():
    args = [low(np.full((2, 16), 1e4), "float32") for _ in range(2)]
    weights = weights_of(np.random.default_rng(2), 8, 16, 4, "float32")
    (got,) = run_metal(injection_gate, (*args, weights))
    assert np.isfinite(got).all()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("hidden", "gated"), [((2, 3), (2, 3)), ((1,), (1,)), ((2, 3, 1), (2, 3, 4))])
def test_write(hidden, gated, dtype):
    rng = np.random.default_rng(3)
    width, messages = 307, 19
    u, g = low(rng.normal(size=(*hidden, width)), dtype), low(rng.normal(size=(*gated, messages)), dtype)
    write = low(rng.normal(size=(width, messages)) / 4, dtype)
    norm = transition.RMSNorm(low(rng.normal(size=width), dtype), 0.1)
    plain = run_every_schedule(injection_write, (u, g, write))
    assert_close(plain, run_reference(injection.injection_write, (u, g, write)), BOUNDS[dtype])
    fused = run_every_schedule(injection_write, (u, g, write, norm))
    assert fused[0].tobytes() == plain[0].tobytes()
    assert_close(fused, run_reference(injection.injection_write, (u, g, write, norm)), BOUNDS[dtype])


def test_a_silent_injection_changes_no_bit():
    """W starts at zero: the write-back must then return u itself."""
    u = low(np.random.default_rng(4).normal(size=(3, 40)), "bfloat16")
    (got,) = run_metal(injection_write, (u, low(np.ones((3, 8)), "bfloat16"), low(np.zeros((40, 8)), "bfloat16")))
    assert got.tobytes() == u.values.tobytes()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("lead", "count", "width"), [((4,), 5, 261), ((2, 3), 16, 64), ((1, 2), 1, 33)])
def test_transition_scores(lead, count, width, dtype):
    rng = np.random.default_rng(5)
    rank, messages = 48, 19
    args = (
        low(rng.normal(size=(*lead, width)), dtype),
        low(rng.normal(size=(*lead, count, rank)), dtype),
        low(rng.normal(size=(*lead, count, width)), dtype),
        weights_of(rng, width, rank, messages, dtype),
        transition.RMSNorm(low(1 + 0.1 * rng.normal(size=width), dtype), 0.1),
    )
    assert_close(run_every_schedule(transition_scores, args), run_reference(transition.transition_scores, args), BOUNDS[dtype])
    assert last_report().threadgroup_bytes <= 32_768


@pytest.mark.parametrize("count", [1, 5, 16, 32])
def test_walks(count):
    rng = np.random.default_rng(6)
    scores = np.float32(rng.normal(size=(2, 3, 7, count, count)))
    candidates = rng.integers(0, 2**31 - 1, (2, 3, 7, count)).astype(np.int32)
    assert_close(
        run_every_schedule(path_walk, (scores, candidates)), run_reference(transition.path_walk, (scores, candidates)), ()
    )
    uniforms = np.float32(rng.random((2, 3, 7)))
    args = (scores, candidates, uniforms, 0.7)
    assert_close(run_every_schedule(path_walk_sampled, args), run_reference(transition.path_walk_sampled, args), (2e-6,))


def test_walks_break_ties_and_draw_like_the_core():
    """Of equal scores the first; a weight of zero is never drawn, not at a uniform of 0 nor just below 1."""
    scores = np.zeros((1, 3, 4, 4), np.float32)
    scores[..., 0] = scores[..., 3] = -1e4  # their weights underflow to 0
    candidates = np.arange(12, dtype=np.int32).reshape(1, 3, 4)
    np.testing.assert_array_equal(run_metal(path_walk, (scores, candidates))[0], [[1, 5, 9]])
    uniforms = np.array([[0, 1 - 2**-23, 0.5 - 2**-23]], np.float32)
    tokens, q = run_metal(path_walk_sampled, (scores, candidates, uniforms, 1.0))
    np.testing.assert_array_equal(tokens, [[1, 6, 9]])
    np.testing.assert_array_equal(q[0, 0], [0, 0.5, 0.5, 0])


def test_walks_with_nan_scores_stay_in_bounds():
    scores = np.full((1, 2, 3, 3), np.nan, np.float32)
    candidates = np.arange(6, dtype=np.int32).reshape(1, 2, 3)
    assert run_metal(path_walk, (scores, candidates))[0][0, 1] in candidates[0, 1]
    tokens, _ = run_metal(path_walk_sampled, (scores, candidates, np.zeros((1, 2), np.float32), 1.0))
    assert tokens[0, 1] in candidates[0, 1]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(("vocabulary", "count"), [(5, 5), (2503, 16), (2 * STRIP, 3), (33 * STRIP + 7, 16)])
def test_signals(vocabulary, count, dtype):
    rng = np.random.default_rng(7)
    logits = low(4 * rng.normal(size=(2, 2, vocabulary)), dtype)
    got, expected = run_every_schedule(draft_signals, (logits, count)), run_reference(signals.draft_signals, (logits, count))
    assert_close(got, expected, (2e-6,))


def test_signals_of_flat_certain_and_masked_rows():
    """Equal logits give ids 0..K-1 and log V; a certain row gives 1 and about 0; -inf counts as nothing."""
    size = STRIP + 11
    logits = np.zeros((4, size), np.float32)
    logits[1, size - 1] = 200
    logits[2, :] = -np.inf
    logits[2, [9, STRIP + 3, 700]] = 1
    logits[3] = 3e38
    values, ids, confidence, entropy, finite = run_every_schedule(draft_signals, (logits, 3))
    np.testing.assert_array_equal(ids, [[0, 1, 2], [size - 1, 0, 1], [9, 700, STRIP + 3], [0, 1, 2]])
    np.testing.assert_array_equal(values, np.take_along_axis(logits, ids, axis=1))
    np.testing.assert_allclose(confidence, [1 / size, 1, 1 / 3, 1 / size], rtol=2e-6)
    np.testing.assert_allclose(entropy, [np.log(size), 0, np.log(3), np.log(size)], rtol=2e-6, atol=1e-6)
    assert finite[:3].tolist() == [True, True, False]


def test_modules_of_mlx_serve_as_norms():
    """The drafter hands in `mlx.nn.RMSNorm`; a norm that hides its weight goes to the core."""
    rng = np.random.default_rng(9)
    u, g, write = (on_device(np.float32(rng.normal(size=s))) for s in ((2, 16), (2, 4), (16, 4)))
    assert supports_write(u, g, write, nn.RMSNorm(16)) and not supports_write(u, g, write, lambda x: x)
    assert not supports_write(u.astype(mx.int32), g, write)
    weights = on_device(weights_of(rng, 16, 8, 4, "float32"))
    args = (u, mx.zeros((2, 33, 8)), mx.zeros((2, 33, 16)), weights, nn.RMSNorm(16))
    assert not supports_scores(*args)  # more candidates than a thread keeps sums for
    assert supports_scores(args[0], args[1][:, :16], args[2][:, :16], *args[3:])
    assert not supports_signals(mx.zeros((2, 100)), 65)


def test_empty_blocks():
    """No rows is an answer, not a launch."""
    weights = on_device(weights_of(np.random.default_rng(10), 16, 8, 4, "float32"))
    assert injection_gate(mx.zeros((0, 8)), mx.zeros((0, 8)), weights).shape == (0, 4)
    assert injection_write(mx.zeros((0, 16)), mx.zeros((0, 4)), weights.write).shape == (0, 16)
    assert path_walk(mx.zeros((2, 0, 4, 4)), mx.zeros((2, 0, 4), dtype=mx.int32)).shape == (2, 0)
    assert draft_signals(mx.zeros((0, 9)), 2).ids.shape == (0, 2)


def test_bad_input():
    zeros, ints = mx.zeros, lambda *s: mx.zeros(s, dtype=mx.int32)
    weights = on_device(weights_of(np.random.default_rng(11), 16, 8, 4, "float32"))
    norm = transition.RMSNorm(zeros((15,)), 1e-6)
    for call, message in (
        (lambda: injection_gate(zeros((2, 9)), zeros((2, 8)), weights), r"receiver must end in \(8,\).*got \(9,\)"),
        (lambda: injection_write(zeros((2, 16)), zeros((2, 5)), weights.write), r"\[H, a\] = \(16, 5\), got \(16, 4\)"),
        (lambda: injection_write(zeros((3, 16)), zeros((2, 4)), weights.write), r"rows of gated \(2,\).*got \(3,\)"),
        (lambda: injection_write(zeros((2, 16)), zeros((2, 4)), weights.write, norm), r"norm.weight.*\(16,\), got \(15,\)"),
        (lambda: transition_scores(zeros((2, 16)), zeros((2, 3, 8)), zeros((2, 4, 16)), weights, norm), "predecessor_codes"),
        (lambda: transition_scores(zeros((2, 16)), zeros((2, 3, 8)), zeros((1, 3, 16)), weights, norm), "candidate_rows"),
        (lambda: path_walk(zeros((2, 3, 3)), ints(2, 4)), r"got \(2, 3, 3\) and \(2, 4\)"),
        (lambda: path_walk(zeros((2, 3, 3)), zeros((2, 3))), "candidates must be integers"),
        (lambda: path_walk(zeros((2, 33, 33)), ints(2, 33)), "at most 32 candidates"),
        (lambda: path_walk_sampled(zeros((2, 3, 3)), ints(2, 3), zeros((3,)), 1.0), r"uniforms must have shape \(2,\)"),
        (lambda: path_walk_sampled(zeros((2, 3, 3)), ints(2, 3), zeros((2,)), 0.0), "temperature must be above 0"),
        (lambda: draft_signals(zeros((2, 5)), 6), r"k must be 1..5"),
    ):
        with pytest.raises(DSpineError, match=message):
            call()
