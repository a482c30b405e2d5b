"""Kernels that nobody here wrote, run from their own source strings and held against their authors' other implementations."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial

import numpy as np
import pytest

from tests.metal.emulator import SCHEDULES, KernelFault, emulated, emulated_metal_kernel, last_report
from tests.metal.lint import lint_unavailable

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
gated_delta = pytest.importorskip("mlx_lm.models.gated_delta", reason="mlx-lm is not installed")
ssm = pytest.importorskip("mlx_lm.models.ssm", reason="mlx-lm is not installed")

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
# Measured: 4.2e-7 at the most in float32; in bf16 and f16 the difference is the rounding of the output itself.
BOUNDS = {"float32": 4.3e-7, "bfloat16": 4e-3, "float16": 5e-4}


def relative(got, expected):
    a, b = (np.array(x.astype(mx.float32), dtype=np.float64) for x in (got, expected))
    assert a.shape == b.shape
    assert np.isfinite(a).all()
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def identical(a, b):
    kind = {2: mx.uint16, 4: mx.uint32}[a.dtype.size]
    return np.array_equal(np.array(a.view(kind)), np.array(b.view(kind)))


def gdn_case(dtype, vectorised=False, masked=False, shape=(2, 3, 2, 4, 64, 8), seed=0):
    batch, tokens, key_heads, value_heads, dk, dv = shape
    rng = np.random.default_rng(seed)

    def array(*s):
        return mx.array(rng.standard_normal(s).astype(np.float32))

    q, k = array(batch, tokens, key_heads, dk), array(batch, tokens, key_heads, dk)
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = array(batch, tokens, value_heads, dv)
    g = mx.exp(-mx.abs(array(batch, tokens, value_heads, *((dk,) if vectorised else ()))))
    beta = mx.sigmoid(array(batch, tokens, value_heads))
    state = array(batch, value_heads, dv, dk)
    mask = mx.array(rng.random((batch, tokens)) < 0.7) if masked else None
    return [x.astype(dtype) for x in (q, k, v)] + [g, beta.astype(dtype), state], mask


def gdn_kernel(arrays, mask, schedule="forward", check=False, make=None, seed=0):
    """mlx-lm's kernel through the emulator; every module-level kernel is None here, because there is no Metal."""
    vectorised = arrays[3].ndim == 4
    with emulated(schedule, check, seed):
        kernel = make() if make else gated_delta._make_gated_delta_kernel(has_mask=mask is not None, vectorized=vectorised)
    q, k, v, g, beta, state = arrays
    batch, tokens, key_heads, dk = k.shape
    value_heads, dv = v.shape[2:]
    packed = make is gated_delta._make_gated_delta_packed_kernel
    return kernel(
        inputs=[q, k, v, g, beta, state, tokens] + ([] if mask is None else [mask]),
        template=[("InT", q.dtype), ("StT", state.dtype), ("Dk", dk), ("Dv", dv), ("Hk", key_heads), ("Hv", value_heads)],
        grid=(32, dv // 8 if packed else dv, batch * value_heads),
        threadgroup=(32, 2 if packed else 4, 1),
        output_shapes=[(batch, tokens, value_heads, dv), state.shape],
        output_dtypes=[q.dtype, state.dtype],
    )


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("vectorised", [False, True], ids=["scalar", "vectorised"])
@pytest.mark.parametrize("name", DTYPES)
def test_gated_delta_against_the_ops_path(name, vectorised, masked):
    arrays, mask = gdn_case(DTYPES[name], vectorised, masked)
    y, state = gdn_kernel(arrays, mask)
    expected_y, expected_state = gated_delta.gated_delta_ops(*arrays, mask)
    if masked:  # the kernel writes 0 where the mask is false, the ops path writes what the old state gives
        expected_y = mx.where(mask[..., None, None], expected_y, 0)
    assert relative(state, expected_state) <= BOUNDS["float32"]
    assert relative(y, expected_y) <= BOUNDS[name]


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_gated_delta_is_the_same_in_every_schedule(masked):
    arrays, mask = gdn_case(mx.bfloat16, masked=masked)
    expected = gdn_kernel(arrays, mask)
    for schedule in SCHEDULES:
        for seed in (0, 1):
            got = gdn_kernel(arrays, mask, schedule, seed=seed)
            assert all(identical(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
def test_gated_delta_in_check_mode(masked):
    arrays, mask = gdn_case(mx.bfloat16, masked=masked, shape=(1, 2, 1, 2, 32, 4))
    got = gdn_kernel(arrays, mask, check=True)
    assert last_report().lint == "clean" or lint_unavailable()
    # all 32 lanes write the 0 of a masked row: a race in form, harmless in fact, and counted as such
    assert (last_report().benign_races > 0) == masked
    assert all(identical(a, b) for a, b in zip(got, gdn_kernel(arrays, mask), strict=True))


def test_packed_kernel_equals_its_comparator_bit_by_bit():
    """mlx-lm says so by construction; simd_sum as the 1-2-4-8-16 butterfly makes the generic kernel the third of them."""
    if not hasattr(gated_delta, "_make_gated_delta_packed_kernel"):
        pytest.skip("this mlx-lm has no packed kernel")
    arrays, _ = gdn_case(mx.bfloat16, shape=(1, 3, 1, 2, 128, 16))
    generic = gdn_kernel(arrays, None)
    for make in (gated_delta._make_gated_delta_packed_kernel, gated_delta._make_gated_delta_kernel_xtree):
        got = gdn_kernel(arrays, None, make=make)
        assert all(identical(a, b) for a, b in zip(got, generic, strict=True)), make.__name__


def test_gated_delta_at_a_real_shape():
    arrays, _ = gdn_case(mx.bfloat16, shape=(1, 4, 16, 32, 128, 128))
    y, state = gdn_kernel(arrays, None)
    expected_y, expected_state = gated_delta.gated_delta_ops(*arrays)
    assert relative(y, expected_y) <= BOUNDS["bfloat16"]
    assert relative(state, expected_state) <= BOUNDS["float32"]


@pytest.mark.parametrize("name", DTYPES)
def test_ssm_against_the_ops_path(name, monkeypatch):
    batch, heads, dh, groups, ds = 2, 4, 16, 2, 32
    rng = np.random.default_rng(1)

    def array(*s):
        return mx.array(rng.standard_normal(s).astype(np.float32))

    x, b, c = array(batch, 1, heads, dh), array(batch, 1, groups, ds), array(batch, 1, groups, ds)
    a_log, d, dt, dt_bias = mx.abs(array(heads)), array(heads), array(batch, 1, heads), array(heads)
    state = array(batch, heads, dh, ds)
    x, b, c = (z.astype(DTYPES[name]) for z in (x, b, c))
    arguments = (x, a_log, b, c, d, dt, dt_bias, state, (0.001, 100.0))
    with emulated():
        monkeypatch.setattr(ssm, "_ssm_kernel", ssm.make_ssm_kernel())
    y, new_state = ssm.ssm_update_kernel(*arguments)
    expected_y, expected_state = ssm.ssm_attn(*[z.astype(mx.float32) for z in arguments[:-1]], arguments[-1])
    assert relative(new_state, expected_state) <= BOUNDS["float32"]
    assert relative(y, expected_y) <= BOUNDS[name]


def private_copy(module):
    """An mlx-lm module whose kernels are made by the emulator, under another name, so that the real one stays as it is."""
    spec = importlib.util.find_spec(f"mlx_lm.kernels.{module}") if importlib.util.find_spec("mlx_lm.kernels") else None
    if spec is None:
        pytest.skip(f"this mlx-lm has no kernels.{module}")
    spec = importlib.util.spec_from_file_location(f"mlx_lm.kernels._emulated_{module}", spec.origin)
    copy = importlib.util.module_from_spec(spec)
    return spec, copy


@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_norm_add_norm_with_threadgroup_memory(schedule, check):
    spec, copy = private_copy("norm_add_norm")
    with emulated(schedule, check):
        spec.loader.exec_module(copy)
    width, rows = 1000, 2  # 96 threads: three simdgroups, and lanes without a last element
    rng = np.random.default_rng(2)
    branch, stream = (rng.standard_normal((rows, width)).astype(np.float32) for _ in range(2))
    alpha, beta, post, pre = (rng.standard_normal(width).astype(np.float32) for _ in range(4))
    norm = type("Norm", (), {"weight": mx.array(pre), "eps": 1e-6})()
    kwargs = dict(alpha=mx.array(alpha), beta=mx.array(beta), post_weight=mx.array(post), post_eps=1e-5, next_norm=norm)
    new_stream, normed = copy.norm_add_norm(mx.array(branch), mx.array(stream), **kwargs)

    def rms(x, eps):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)

    wide = partial(np.asarray, dtype=np.float64)
    expected = wide(alpha) * stream + wide(beta) * rms(wide(branch) * post, 1e-5)
    assert np.linalg.norm(np.array(new_stream) - expected) <= 3e-7 * np.linalg.norm(expected)
    expected = rms(expected, 1e-6) * pre
    assert np.linalg.norm(np.array(normed) - expected) <= 3e-7 * np.linalg.norm(expected)
    assert last_report().threadgroup_bytes == 2 * 32 * 4
    assert last_report().lint == "clean" or not check or lint_unavailable()


def test_expert_routing():
    spec, copy = private_copy("expert_routing")
    with emulated("random", check=True):
        spec.loader.exec_module(copy)
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((3, 77)).astype(np.float32)
    bias = rng.standard_normal(77).astype(np.float32) * 0.1
    copied = copy.expert_routing(mx.array(logits), mx.array(bias), top_k=5, multiplier=1.5, score_eps=1e-9, route_scale=2.0)
    scores = 1 / (1 + np.exp(-1.5 * logits.astype(np.float64)))
    order = np.argsort(-(scores + bias), axis=-1)[:, :5]
    assert np.array_equal(np.array(copied[0]), order)
    picked = np.take_along_axis(scores, order, axis=-1)
    np.testing.assert_allclose(np.array(copied[1]), 2 * picked / picked.sum(axis=-1, keepdims=True), rtol=1e-6)


def test_the_real_modules_are_untouched():
    assert gated_delta._gated_delta_kernel is None or mx.metal.is_available()
    assert not any(name.startswith("mlx_lm.kernels._emulated_") for name in sys.modules)


@pytest.fixture
def kl_forward(monkeypatch):
    """The arguments with which mlx-lm's KL kernel is made."""
    losses = pytest.importorskip("mlx_lm.tuner.losses", reason="mlx-lm is not installed")
    if not hasattr(losses, "_make_kl_forward_kernel"):
        pytest.skip("this mlx-lm has no KL kernel")
    monkeypatch.setattr(losses, "can_run_metal", lambda: True)
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **arguments: arguments)
    arguments = losses._make_kl_forward_kernel()
    if "threadgroup_barrier(mem_flags::mem_none)" not in arguments["source"]:
        pytest.skip("this mlx-lm has another KL kernel than the one with the faults")
    return arguments


def run_kl(arguments, schedule="forward", check=False):
    rng = np.random.default_rng(4)
    q, p = (rng.standard_normal((2, 5003)).astype(np.float32) for _ in range(2))
    kernel = emulated_metal_kernel(**arguments, schedule=schedule, check=check)
    shape = dict(grid=(1024, 2, 1), threadgroup=(1024, 1, 1), output_shapes=[(2,)], output_dtypes=[mx.float32])
    (out,) = kernel(inputs=[mx.array(q), mx.array(p)], template=[("T", mx.float32), ("V", 5003)], **shape)
    log_q, log_p = (x - np.log(np.exp(x).sum(axis=-1, keepdims=True)) for x in (q.astype(np.float64), p.astype(np.float64)))
    expected = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    return np.abs(np.array(out) - expected).max() / expected.max()


def test_real_faults_in_a_shipped_kernel(kl_forward):
    """One barrier is missing (sums overwrite maxima that others still read), two order no memory; put right, it passes."""
    with pytest.raises(KernelFault, match="race: write of 'shared'"):
        run_kl(kl_forward, check=True)
    assert max(run_kl(kl_forward, schedule) for schedule in SCHEDULES) > 1e-2

    head, read, tail = kl_forward["source"].partition("max_p = shared[simd_lane_id * 2 + 1];")
    assert read
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    repaired = kl_forward | {"source": head + read + barrier + tail}
    with pytest.raises(KernelFault, match="race"):
        run_kl(repaired, check=True)
    repaired["source"] = repaired["source"].replace("mem_flags::mem_none", "mem_flags::mem_threadgroup")
    assert run_kl(repaired, check=True) < 1e-5
    assert max(run_kl(repaired, schedule) for schedule in SCHEDULES) < 1e-5
