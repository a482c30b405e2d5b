"""The compiled Gated DeltaNet operations for CUDA, compiled here for the CPU: what the core says, with fewer launches."""

from __future__ import annotations

import shutil

import mlx.core as mx
import numpy as np
import pytest

from dspine.common import gdn as core
from dspine.common.gdn import MAX_TOKENS, GdnFactors, GdnInputWeights, GdnLayout
from dspine.common.registry import registered_kernel
from dspine_mlx import fused, ops
from dspine_mlx.arrays import device_name
from tests.mlx.graphs import nodes

LAYOUT = GdnLayout(2, 4, 8, 8)

pytestmark = pytest.mark.skipif(
    device_name() == "cpu" and shutil.which("g++") is None, reason="mx.compile needs g++ on the CPU"
)


def block(count: int, dtype: mx.Dtype, bias: bool) -> tuple:
    rng = np.random.default_rng(count)
    draw = lambda *shape: mx.array(rng.normal(size=shape).astype(np.float32))  # noqa: E731
    channels, heads = LAYOUT.channels, LAYOUT.value_heads
    weights = GdnInputWeights(draw(channels, 4), draw(heads), draw(heads), draw(channels) if bias else None)
    inputs = draw(1, count, channels).astype(dtype), draw(1, 3, channels).astype(dtype)
    return *inputs, draw(1, count, heads).astype(dtype), draw(1, count, heads).astype(dtype), weights, LAYOUT


def same(got: tuple, want: tuple, tolerance: float) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        difference = np.abs(np.array(one.astype(mx.float32)) - np.array(other.astype(mx.float32)))
        assert difference.max() <= tolerance * max(1.0, float(mx.max(mx.abs(other))))


def parts(tokens: core.GdnTokens) -> tuple:
    return tokens.q, tokens.k, tokens.v, tokens.log_decay, tokens.beta


@pytest.mark.parametrize("count, dtype, tolerance, bias", [(1, mx.float32, 1e-6, True), (3, mx.bfloat16, 8e-3, False)])
def test_they_say_what_the_core_says(count, dtype, tolerance, bias):
    inputs = block(count, dtype, bias)
    tokens = core.gdn_inputs.reference(*inputs)
    same(parts(fused.gdn_inputs(*inputs)), parts(tokens), tolerance)
    state = mx.random.normal((1, 4, 8, 8), key=mx.random.key(0))
    out, factors = core.gdn_verify.reference(*parts(tokens), state)
    got, own = fused.gdn_verify(*parts(tokens), state)
    same((got, own.z, own.g), (out, factors.z, factors.g), tolerance)
    assert own.k is tokens.k
    states, windows = mx.stack([state, 2 * state]), mx.stack([inputs[1], inputs[1]])
    stacked = GdnFactors(*(mx.stack([x, x]) for x in (factors.z, factors.k, factors.g)))
    rows = mx.stack([inputs[0], inputs[0]])
    for kept in (0, count):
        m = mx.array([kept], dtype=mx.int32)
        want = core.gdn_commit.reference(states, stacked, windows, rows, m)
        done = fused.gdn_commit(states, stacked, windows, rows, m)
        same(done, want, 1e-6)
        assert kept or (mx.array_equal(done[0], states) and mx.array_equal(done[1], windows))


def test_a_block_hands_fewer_nodes_to_mlx():
    inputs = block(2, mx.float32, False)
    mx.eval(*inputs[:4])
    assert nodes(*parts(fused.gdn_inputs(*inputs))) < 0.5 * nodes(*parts(core.gdn_inputs.reference(*inputs)))


def test_they_are_registered_for_cuda_only_and_for_blocks_only():
    ops.register()
    for function, supports in fused.OPERATIONS:
        kernel = registered_kernel(function.__name__, "mlx", "cuda")
        assert kernel is not None and kernel.function is function and kernel.supports is supports
        for device in ("cpu", "metal"):
            other = registered_kernel(function.__name__, "mlx", device)
            assert other is None or other.function is not function


def test_a_prompt_is_not_traced(monkeypatch):
    """Prompts have any length, and each would be a trace."""
    monkeypatch.setattr(fused, "_inputs", lambda layout: pytest.fail("traced"))
    inputs = block(MAX_TOKENS + 1, mx.float32, False)
    same(parts(fused.gdn_inputs(*inputs)), parts(core.gdn_inputs.reference(*inputs)), 1e-6)
