"""Length selection, its correction, and acceptance on Metal against the core in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dspine.common import acceptance
from dspine.common.errors import DSpineError
from dspine.common.selection import lengths as core
from dspine.kernels_metal.accept import accept_greedy, accept_point_mass, threadgroup_bytes
from dspine.kernels_metal.correct_length import correct_length
from dspine.kernels_metal.select_length import select_length
from tests.metal.emulator import last_report
from tests.metal_kernels.running import assert_close, low, on_device, run_every_schedule, run_metal, run_reference


def tables_of(rng, drafts, experts=8, points=33):
    return core.LengthTables(
        calibration=np.float32(np.sort(rng.random((drafts, points)), axis=-1)),
        coefficients=np.float32([0.3, 2.5, -0.1, 0.05, -0.4, -0.3]),
        cost=np.float32(1 + 0.1 * rng.random(drafts + 2).cumsum()),
        rate=1.1,
        stage_zero=0.02,
        expert=0.03,
        pairs=np.float32(3 * rng.random(drafts + 2)),
        pairs_given=np.float32(6 * rng.random((drafts + 2, experts + 1))),
    )


@pytest.mark.parametrize(("batch", "drafts", "points"), [(1, 1, 2), (3, 7, 33), (37, 15, 101)])
def test_select_length(batch, drafts, points):
    rng = np.random.default_rng(1)
    confidence, entropy = np.float32(rng.random((batch, drafts))), np.float32(3 * rng.random((batch, drafts)))
    confidence[0, 0], entropy[0, 0] = 1, 0  # the ends of the table, and a certain draft
    limit = rng.integers(2, drafts + 2, batch).astype(np.int32)
    args = (confidence, entropy, limit, tables_of(rng, drafts, points=points))
    assert_close(run_every_schedule(select_length, args), run_reference(core.select_length, args), (2e-6,))


def test_select_length_takes_the_shorter_of_equal_scores_and_skips_a_step_of_the_cost():
    """Every length is scored: beyond a dear length a cheap one may still win."""
    tables = tables_of(np.random.default_rng(2), 3)
    sure = replace(tables, coefficients=np.float32([100, 0, 0, 0, 0, 0]))  # survival 1 everywhere
    signals = np.ones((1, 3), np.float32), np.zeros((1, 3), np.float32), np.array([4], np.int32)
    for cost, expected in (([0, 0, 1, 2, 3], 2), ([0, 0, 1, 9, 2], 4), ([0, 0, 1, 1.5, 9], 3)):
        (length, stage_zero, survival) = run_metal(select_length, (*signals, replace(sure, cost=np.float32(cost), rate=1.0)))
        assert (length[0], stage_zero[0]) == (expected, min(expected + 1, 4)) and survival.min() == 1


@pytest.mark.parametrize(("batch", "covered", "experts"), [(1, 2, 1), (5, 9, 8), (3, 16, 10)])
def test_correct_length(batch, covered, experts):
    rng = np.random.default_rng(3)
    drafts = 15
    tables = tables_of(rng, drafts, experts)
    picks = rng.integers(0, 24, (batch, covered, experts)).astype(np.int32)
    survival = np.float32(rng.random((batch, drafts)).cumprod(-1))
    seen = set()
    for length, limit in itertools.product((2, covered - 1, covered, drafts + 1), (2, 6, 20)):
        args = (picks, np.full(batch, max(length, 1), np.int32), survival, np.full(batch, limit, np.int32), tables)
        got = run_every_schedule(correct_length, args)
        assert_close(got, run_reference(core.correct_length, args), ())
        seen.update((got[0] - np.minimum(args[1], limit)).tolist())
    assert seen == {0, 1} or covered == 2


def test_correct_length_reads_only_the_tokens_a_length_reaches():
    picks = np.full((1, 6, 2), -(2**31), np.int32)
    picks[0, :3] = [[1, 2], [3, 4], [5, 1]]
    tables = tables_of(np.random.default_rng(4), 7, 2)
    args = (picks, np.array([2], np.int32), np.ones((1, 7), np.float32), np.array([8], np.int32))
    given = np.full((9, 3), 1e6, np.float32)
    given[2, 1] = 0  # only one new expert (5) makes the third token pay
    assert run_metal(correct_length, (*args, replace(tables, pairs_given=given)))[0][0] == 3
    given[2, :] = [0, 1e6, 0]
    assert run_metal(correct_length, (*args, replace(tables, pairs_given=given)))[0][0] == 2
    free = replace(tables, rate=0.0)  # a token that costs nothing must still have a chance: p > 0
    for chance, expected in ((0, 2), (1e-30, 3)):
        sure = (*args[:2], np.full((1, 7), chance, np.float32), args[3], free)
        assert run_metal(correct_length, sure)[0][0] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("count", "vocabulary"), [(1, 5), (5, 4099), (16, 257)])
def test_greedy(count, vocabulary, dtype):
    """Every number of accepted drafts, with limits of their own; of equal logits the first."""
    rng = np.random.default_rng(5)
    batch = count + 3
    logits = low(4 * rng.normal(size=(batch, count, vocabulary)), dtype)
    draft = logits.values.argmax(-1)[:, :-1].astype(np.int32)
    for row in range(count - 1):
        draft[row, row] = (draft[row, row] + 1) % vocabulary
    limit = np.full(batch, count - 1, np.int32)
    limit[-1], limit[-2] = 0, min(1, count - 1)
    args = (logits, draft, limit)
    got = run_every_schedule(accept_greedy, args)
    assert_close(got, run_reference(acceptance.accept_greedy, args), ())
    assert set(got[0].tolist()) == set(range(count))


@pytest.mark.parametrize(("count", "vocabulary"), [(1, 5), (4, 255), (5, 4099), (2, 70_001)])
def test_point_mass(count, vocabulary):
    rng = np.random.default_rng(6)
    batch = 6
    p = rng.random((batch, count, vocabulary)) ** 8
    p /= p.sum(-1, keepdims=True)
    draft = p.argmax(-1)[:, :-1].astype(np.int32)
    u_accept = rng.random((batch, count - 1)) * np.take_along_axis(p[:, :-1], draft[..., None], -1)[..., 0] * 1.2
    limit = rng.integers(0, count, batch).astype(np.int32)
    args = (np.float32(p), draft, limit, np.float32(u_accept), np.float32(rng.random((batch, count))))
    got = run_every_schedule(accept_point_mass, args)
    assert last_report().threadgroup_bytes == threadgroup_bytes(vocabulary) <= 32_768
    assert_close(got, run_reference(acceptance.accept_point_mass, args), ())


def test_point_mass_draws_from_what_has_mass():
    """The refused draft is never drawn, nor a token without mass; at a uniform of 0, just below 1, and between."""
    vocabulary = 600
    p = np.zeros((1, 2, vocabulary), np.float32)
    p[0, 0, [3, 299, 599]] = 0.25, 0.5, 0.25
    draft, limit, never = np.array([[299]], np.int32), np.array([1], np.int32), np.ones((1, 1), np.float32)
    for u, token in ((0, 3), (0.49, 3), (0.51, 599), (1 - 2**-23, 599)):
        accepted, drawn = run_metal(accept_point_mass, (p, draft, limit, never, np.full((1, 2), u, np.float32)))
        assert (accepted[0], drawn[0]) == (0, token)
    p[0, 0] = 0
    p[0, 0, 299] = 1  # only rounding can refuse it: then nothing else is left to draw
    accepted, drawn = run_metal(accept_point_mass, (p, draft, limit, never, np.full((1, 2), 0.5, np.float32)))
    assert (accepted[0], drawn[0]) == (0, 299)
    accepted, _ = run_metal(accept_point_mass, (p, draft + 1000, limit, 0 * never, np.full((1, 2), 0.5, np.float32)))
    assert accepted[0] == 0  # outside the vocabulary


def test_point_mass_keeps_the_target_distribution():
    """Drafts come from a distribution q of their own; over a grid of uniforms the emitted token follows the target's p."""
    p, q, grid = np.float32([0.5, 0.3, 0.15, 0.05]), np.array([0.1, 0.2, 0.3, 0.4]), 40
    draft = np.repeat(np.arange(4, dtype=np.int32), grid)[:, None]
    tiled, one = np.tile(p, (4 * grid, 2, 1)), np.ones(4 * grid, np.int32)
    u_draw = np.tile((np.arange(grid, dtype=np.float32) + 0.5) / grid, 4)[:, None].repeat(2, axis=1)
    for u, expected in ((p[draft] * (1 - 1e-6), 1), (p[draft], 0)):  # accepted below p(draft), refused from there on
        accepted, drawn = run_metal(accept_point_mass, (tiled, draft, one, np.float32(u), u_draw))
        assert (accepted == expected).all()
    after_refusal = np.stack([np.bincount(part, minlength=4) / grid for part in drawn.reshape(4, grid)])
    emitted = q * p + ((q * (1 - p))[:, None] * after_refusal).sum(0)
    np.testing.assert_allclose(emitted, p, atol=1 / grid)
    assert not np.diag(after_refusal).any()


def test_threadgroup_memory_of_every_vocabulary():
    assert max(threadgroup_bytes(v) for v in (1, 256, 257, 50_257, 151_936, 262_144, 1_048_576)) <= 32_768
    with pytest.raises(DSpineError, match="at most 1048576 tokens"):
        accept_point_mass(mx.zeros((1, 1, 1_048_577)), _ints(1, 0), _ints(1), mx.zeros((1, 0)), mx.zeros((1, 1)))


def _ints(*shape):
    return mx.zeros(shape, dtype=mx.int32)


def test_bad_input():
    zeros = mx.zeros
    tables = on_device(tables_of(np.random.default_rng(9), 3, 2))
    for call, message in (
        (lambda: accept_greedy(zeros((2, 3)), _ints(2, 2), _ints(2)), r"logits must have shape \[B, w, V\], got \(2, 3\)"),
        (lambda: accept_greedy(zeros((2, 3, 5)), _ints(2, 3), _ints(2)), r"draft must be int \(2, 2\), got .*\(2, 3\)"),
        (lambda: accept_greedy(zeros((2, 3, 5)), _ints(2, 2), zeros((2,))), r"limit must be int \(2,\), got mlx.core.float32"),
        (lambda: accept_point_mass(zeros((2, 3, 5)), _ints(2, 2), _ints(2), zeros((2, 3)), zeros((2, 3))), "u_accept"),
        (lambda: accept_point_mass(zeros((2, 3, 5)), _ints(2, 2), _ints(2), zeros((2, 2)), zeros((2, 2))), "u_draw"),
        (lambda: select_length(zeros((2, 3)), zeros((2, 4)), _ints(2), tables), r"\(2, 3\) and \(2, 4\)"),
        (lambda: select_length(zeros((2, 4)), zeros((2, 4)), _ints(2), tables), r"calibration must have shape \(4, 33\)"),
        (lambda: select_length(zeros((2, 3)), zeros((2, 3)), zeros((2,)), tables), r"limit must be int \[B\]"),
        (lambda: correct_length(_ints(2, 3), _ints(2), zeros((2, 3)), _ints(2), tables), r"picks must have shape \[B, u, k\]"),
        (
            lambda: correct_length(_ints(2, 3, 4), _ints(2), zeros((2, 3)), _ints(2), tables),
            r"pairs_given .*\(5, 5\), got \(5, 3\)",
        ),
        (
            lambda: correct_length(_ints(2, 3, 2), _ints(2), zeros((2, 3)), _ints(2), replace(tables, pairs=None)),
            "calibrate on a MoE target",
        ),
    ):
        with pytest.raises(DSpineError, match=message):
            call()
