"""The Gated DeltaNet operations in MLX's own operations: the core in float64 says what they must say; bad calls."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dspine.common import gdn as core
from dspine.common.errors import DSpineError
from dspine.common.gdn import GdnFactors, GdnInputWeights, GdnLayout
from dspine_mlx import lean_gdn, ops
from tests.mlx.graphs import nodes
from tests.mlx.hybrids import hybrid_target, started, verify

WIDTH = 4
LAYOUTS = (GdnLayout(2, 4, 8, 16), GdnLayout(3, 3, 16, 8), GdnLayout(1, 4, 8, 8))


@pytest.fixture(autouse=True)
def _registered():
    ops.register()


def draw(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(0.0, scale, shape)


def on_mlx(array: np.ndarray, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(array.astype(np.float32)).astype(dtype)


def rounded(array: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """float64 of what MLX holds, so that only the computation is compared."""
    return np.array(on_mlx(array, dtype).astype(mx.float32)).astype(np.float64)


def close(got: mx.array, want: np.ndarray, tolerance: float) -> None:
    got = np.array(got.astype(mx.float32))
    assert got.shape == want.shape and np.isfinite(got).all()
    assert np.abs(got - want).max() <= tolerance * max(1.0, np.abs(want).max())


def small_weights(layout: GdnLayout, bias: bool) -> list[np.ndarray | None]:
    heads, channels = layout.value_heads, layout.channels
    made = [draw(1, channels, WIDTH), draw(2, heads), draw(3, heads, scale=4.0)]
    return [*made, draw(4, channels) if bias else None]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 2, 16, 33])
@pytest.mark.parametrize("dtype, tolerance", [(mx.float32, 2e-6), (mx.bfloat16, 8e-3)])
def test_inputs(layout, count, dtype, tolerance):
    batch = 2
    shapes = (batch, count, layout.channels), (batch, WIDTH - 1, layout.channels), *[(batch, count, layout.value_heads)] * 2
    arrays = [draw(5 + i, *shape, scale=3.0) for i, shape in enumerate(shapes)]
    arrays[0][0, 0] = arrays[1][0] = 0.0  # keys of nothing: the norm's eps alone
    arrays[2][0, 0] = 60.0  # softplus far out
    weights = small_weights(layout, bias=count == 2)
    want = core.gdn_inputs.reference(
        *(rounded(x, dtype) for x in arrays),
        GdnInputWeights(*(None if x is None else rounded(x, dtype) for x in weights)),
        layout,
    )
    inputs = [*(on_mlx(x, dtype) for x in arrays), GdnInputWeights(*(None if x is None else on_mlx(x, dtype) for x in weights))]
    assert lean_gdn.inputs_fit(*inputs, layout)
    got = core.gdn_inputs(*inputs, layout)
    for name in ("q", "k", "v", "log_decay", "beta"):
        wide = mx.float32 if name in ("log_decay", "beta") else dtype
        assert getattr(got, name).dtype == wide
        close(getattr(got, name), getattr(want, name), 2e-6 if wide == mx.float32 else tolerance)


def token(layout: GdnLayout, decay: float, batch: int = 2) -> list[np.ndarray]:
    """q, k, v, log_decay, beta, state of one token."""
    heads, (key, value) = layout.value_heads, (layout.key_dim, layout.value_dim)
    q, k = (draw(seed, batch, 1, layout.key_heads, key) for seed in (11, 12))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    gates = np.full((batch, 1, heads), decay), np.full((batch, 1, heads), 0.97)
    return [q, k, draw(13, batch, 1, heads, value), *gates, draw(14, batch, heads, value, key)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("decay", [0.0, -0.01, -412.0])
@pytest.mark.parametrize("dtype, tolerance", [(mx.float32, 2e-6), (mx.bfloat16, 8e-3)])
def test_one_token(layout, decay, dtype, tolerance):
    """Outputs and factors, then the states and windows after none or one of them; NaN where nothing is kept."""
    arrays = [rounded(x, dtype) if i < 3 else x for i, x in enumerate(token(layout, decay))]
    out, factors = core.gdn_verify.reference(*arrays)
    inputs = [on_mlx(x, dtype if i < 3 else mx.float32) for i, x in enumerate(arrays)]
    assert lean_gdn.one_token(*inputs)
    got, own = core.gdn_verify(*inputs)
    assert got.dtype == dtype and own.k is inputs[1] and own.z.dtype == own.g.dtype == mx.float32
    close(got, out, tolerance)
    close(own.z, factors.z, 2e-6)
    close(own.g, factors.g, 2e-6)

    states = np.stack([arrays[5], -arrays[5]])
    windows, rows = draw(15, 2, 2, WIDTH - 1, layout.channels), draw(16, 2, 2, 1, layout.channels)
    two = GdnFactors(*(np.stack([x, x]) for x in (factors.z, factors.k, factors.g)))
    for m in ([1, 1], [0, 1], [0, 0]):
        want = core.gdn_commit.reference(states, two, windows, rows, np.array(m))
        spoilt = [np.where(np.reshape(m, (1, 2, *[1] * (x.ndim - 2))) > 0, x, np.nan) for x in (two.z, two.k, two.g)]
        block = on_mlx(states), GdnFactors(*map(on_mlx, spoilt)), on_mlx(windows), on_mlx(rows), mx.array(m, dtype=mx.int32)
        assert lean_gdn.one_token_each(*block)
        moved, window = core.gdn_commit(*block)
        close(moved, want[0], 2e-6)
        np.testing.assert_array_equal(np.array(window), want[1].astype(np.float32))
        if m[0] == 0:
            np.testing.assert_array_equal(np.array(moved[:, 0]), states[:, 0].astype(np.float32))


def test_a_drifting_state(monkeypatch):
    """N3: 200 tokens one by one, beside equation 1 in float64."""
    layout = LAYOUTS[0]
    state = wide = draw(17, 1, layout.value_heads, layout.value_dim, layout.key_dim)
    state = on_mlx(state)
    for i in range(200):
        q, k, v = (draw(20 + i, *x.shape) for x in token(layout, -0.05, batch=1)[:3])
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        gates = np.full((1, 1, layout.value_heads), -0.05), np.full((1, 1, layout.value_heads), 0.9)
        q, k, v = (x.astype(np.float32).astype(np.float64) for x in (q, k, v))
        want, _, _, wide = core.gdn_recurrence(q, k, v, *gates, wide)
        out, factors = core.gdn_verify(*(on_mlx(x) for x in (q, k, v, *gates)), state)
        close(out, want, 1e-5)
        stacked = GdnFactors(*(x[None] for x in (factors.z, factors.k, factors.g)))
        window = mx.zeros((1, 1, 3, layout.channels)), mx.zeros((1, 1, 1, layout.channels))
        state = core.gdn_commit(state[None], stacked, *window, mx.array([1]))[0][0]
        mx.eval(state)
    close(state, wide, 1e-5)


def test_bad_calls_are_the_cores_to_refuse():
    layout = LAYOUTS[0]
    q, k, v, decay, beta, state = (on_mlx(x) for x in token(layout, -0.1))
    with pytest.raises(DSpineError, match="gdn_verify: state must have shape"):
        core.gdn_verify(q, k, v, decay, beta, state[:, :, :, :4])
    with pytest.raises(DSpineError, match="must be float32"):
        core.gdn_verify(q, k, v, decay.astype(mx.bfloat16), beta, state)
    weights = GdnInputWeights(*(on_mlx(x) for x in small_weights(layout, bias=False)[:3]))
    block = [on_mlx(draw(30, 1, 1, layout.channels)), on_mlx(draw(31, 1, 2, layout.channels))]
    gates = [on_mlx(draw(32, 1, 1, layout.value_heads))] * 2
    with pytest.raises(DSpineError, match="gdn_inputs: window must have shape"):
        core.gdn_inputs(*block, *gates, weights, layout)
    _, factors = core.gdn_verify(q, k, v, decay, beta, state)
    stacked = GdnFactors(*(x[None] for x in (factors.z, factors.k, factors.g)))
    windows, rows = mx.zeros((1, 2, 3, layout.channels)), mx.zeros((1, 2, 1, layout.channels))
    with pytest.raises(DSpineError, match="gdn_commit: m must"):
        core.gdn_commit(state[None], stacked, windows, rows, mx.array([1.0, 1.0]))
    live = mx.array([1, 0])  # an unused slot: the core's own code
    assert not lean_gdn.one_token(q, k, v, decay, beta, state, live)
    assert np.array(core.gdn_verify(q, k, v, decay, beta, state, live)[0][1] == 0).all()


def test_a_plain_round_hands_fewer_nodes_to_mlx(monkeypatch):
    """The core's own code against this, one token through a hybrid; and dropping a block moves nothing."""
    target = hybrid_target("qwen3_5")
    counts = []
    for off in ("gdn_inputs,gdn_verify,gdn_commit", ""):
        monkeypatch.setenv("DSPINE_KERNELS_OFF", off)
        cache = started(target, [3, 5, 7])
        with monkeypatch.context() as patch:
            patch.setattr(mx, "async_eval", lambda *arrays: None)
            verification = verify(target, cache, [9])
            target.commit(cache, verification, 1)
        counts.append(nodes(verification.logits, cache.states, cache.windows))
    assert counts[1] < 0.85 * counts[0], counts
    cache = started(target, [3, 5, 7])
    states = cache.states
    target.commit(cache, verify(target, cache, [9, 11]), 0)
    assert cache.states is states and cache.length == 3
