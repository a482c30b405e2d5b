"""A whole drafter and the acceptance with MLX's device taken for Metal: the registry sends every operation to its kernel."""

from __future__ import annotations

import contextlib

import mlx.core as mx
import numpy as np

from dspine.common import acceptance, registry
from dspine.common.protocols import DraftRequest
from dspine.kernels_metal._launch import built_by
from dspine_mlx import ops
from dspine_mlx.arrays import device_name
from tests.helpers.goldens import golden_arrays
from tests.metal.emulator import emulated_metal_kernel
from tests.mlx.goldens import ids, load_case


@contextlib.contextmanager
def as_metal():
    """Names of the kernels that are launched while MLX arrays count as Metal's."""
    names: list[str] = []

    def make(**text):
        kernel = emulated_metal_kernel(**text)

        def launch(**call):
            names.append(text["name"].removeprefix("dspine_"))
            return kernel(**call)

        return launch

    ops.register()
    registry.register_device("mlx", lambda array: "metal")
    try:
        with built_by(make):
            yield names
    finally:
        registry.register_device("mlx", device_name)


def proposals(drafter, request):
    cache = drafter.make_cache(48, 2)
    features = golden_arrays("dspine")["features"][:20]
    drafter.commit(cache, mx.array(np.stack([features, features[::-1]])))
    result = drafter.propose(cache, ids([7, 9]), request)
    return [np.array(x) for x in (result.tokens, result.q) if x is not None]


def test_a_drafter_proposes_the_same(tmp_path):
    drafter = load_case("dspine", tmp_path)
    uniforms = np.random.default_rng(1).random((2, 5)).astype(np.float32)
    seen = set()
    for request in (DraftRequest(), DraftRequest(temperature=0.6, uniforms=mx.array(uniforms))):
        expected = proposals(drafter, request)
        with as_metal() as launched:
            on_metal = proposals(drafter, request)
        np.testing.assert_array_equal(on_metal[0], expected[0])
        for got, want in zip(on_metal[1:], expected[1:], strict=True):
            np.testing.assert_allclose(got, want, atol=2e-6)
        seen.update(launched)
    assert {"injection_gate", "linear", "injection_write", "transition_scores", "path_walk", "path_walk_sampled"} <= seen


def test_acceptance_is_dispatched():
    logits = mx.array(np.random.default_rng(2).normal(size=(2, 3, 50)).astype(np.float32))
    draft, limit = mx.argmax(logits, axis=-1)[:, :2].astype(mx.int32), ids([2, 1])
    with as_metal() as launched:
        verdict = acceptance.accept_greedy(logits, draft, limit)
    np.testing.assert_array_equal(np.array(verdict.accepted), [2, 1])
    assert launched == ["accept_strips", "accept_greedy"]
