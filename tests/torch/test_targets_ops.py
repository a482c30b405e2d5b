"""Pieces below the targets: top-k with ties, host copies, packed products, norms and rotation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.common import arrays, registry
from dspine_cuda import ops
from dspine_cuda.arrays import TorchArrays
from dspine_cuda.targets.layers import RotaryTables, can_pack, make_linear, make_norm, rotate_

CPU = torch.device("cpu")


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(0, 10**6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_top_k_orders_ties_by_id(rows, size, seed, dtype):
    """Many equal values, both zeros and infinities: the order is that of a stable sort in NumPy."""
    rng = np.random.default_rng(seed)
    values = rng.choice(np.array([-np.inf, -2.5, -1.0, -0.0, 0.0, 1.0, 2.5, np.inf], dtype=np.float32), size=(rows, size))
    k = int(rng.integers(1, size + 1))
    want = np.argsort(-values, axis=-1, kind="stable")[:, :k]
    for top_k in (ops.top_k, ops.top_k_cpu):
        got, ids = top_k(torch.from_numpy(values).to(dtype), k)
        np.testing.assert_array_equal(ids.numpy(), want)
        np.testing.assert_array_equal(got.float().numpy(), np.take_along_axis(values, want, axis=-1))
        assert got.dtype == dtype


def test_top_k_where_more_values_tie_than_are_looked_at():
    x = torch.zeros(2, 500)
    x[0, 490], x[1, 3] = 1.0, float("nan")
    got, ids = ops.top_k_cpu(x[:1], 4)
    assert ids.tolist() == [[490, 0, 1, 2]] and got.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert ops.top_k_cpu(x, 4)[1].tolist() == [[490, 0, 1, 2], [3, 0, 1, 2]]


def test_top_k_of_random_values_equals_the_core():
    for x in (torch.randn(2, 3, 1009) * 1e3, torch.randn(2, 3, 1009).bfloat16()):
        want = arrays.top_k.reference(x, 16)
        for top_k in (ops.top_k, ops.top_k_cpu):
            got = top_k(x, 16)
            torch.testing.assert_close(got[0], want[0], atol=0, rtol=0)
            torch.testing.assert_close(got[1], want[1].to(torch.int64), atol=0, rtol=0)


def test_registered_once_asked_and_only_where_it_fits(monkeypatch):
    monkeypatch.delenv("DSPINE_KERNELS", raising=False)
    ops.register()
    ops.register()
    assert registry.kernel_report()["top_k/torch/cpu"] == "torch.topk over keys"
    assert registry.kernel_report()["top_k/torch/cuda"] == "torch.topk over keys"
    kernel = registry.find_kernel("top_k", torch.zeros(3))
    monkeypatch.setenv("DSPINE_KERNELS_OFF", "path_walk, top_k")
    assert registry.find_kernel("top_k", torch.zeros(3)) is None and "top_k/torch/cpu" not in registry.kernel_report()
    monkeypatch.delenv("DSPINE_KERNELS_OFF")
    assert kernel is not None and kernel.supports is not None
    assert kernel.supports(torch.zeros(3), 3) and not kernel.supports(torch.zeros(3, dtype=torch.float64), 3)
    doubles = torch.tensor([1.0, 1.0 + 1e-12, 0.0], dtype=torch.float64)  # equal as float32: the core's own code must run
    assert arrays.top_k(doubles, 2)[1].tolist() == [1, 0]
    monkeypatch.setenv("DSPINE_KERNELS", "reference")
    assert registry.find_kernel("top_k", torch.zeros(3)) is None


def test_to_host_copies_and_widens():
    host = TorchArrays("cpu")
    x, y = torch.ones(3, dtype=torch.bfloat16), torch.arange(3)
    a, b = host.to_host(x, y)
    y.add_(5)
    assert a.dtype == np.float32 and b.tolist() == [0, 1, 2]
    assert host.to_host() == ()


def test_to_device_shares_no_memory_and_keeps_dtype():
    host = TorchArrays("cpu")
    source = np.arange(4, dtype=np.int32)
    tensor = host.to_device(source)
    source[:] = 9
    assert tensor.tolist() == [0, 1, 2, 3] and tensor.dtype == torch.int32
    assert host.to_device([[1, 2]]).shape == (1, 2)
    assert host.to_device(tensor) is tensor
    assert host.to_device(np.float32(0.5)).dtype == torch.float32


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_equals_float64_and_does_not_depend_on_neighbour_rows(dtype, bias):
    """A row alone and in a block of 16: the same bits where weights are packed (so verification agrees with plain steps)."""
    torch.manual_seed(0)
    weight, shift = torch.randn(72, 48).to(dtype), torch.randn(72).to(dtype) if bias else None
    x = torch.randn(16, 48).to(dtype)
    linear = make_linear(weight, shift)
    got = linear(x)
    want = F.linear(x.double(), weight.double(), None if shift is None else shift.double())
    assert got.dtype == dtype
    assert float((got.double() - want).abs().max()) < (2e-2 if dtype is torch.bfloat16 else 1e-6) * float(want.abs().max())
    if can_pack(dtype, CPU):
        for count in (1, 2, 5, 8):
            assert torch.equal(linear(x[:count]), got[:count])


def test_only_bfloat16_on_the_cpu_is_packed():
    assert not can_pack(torch.float32, CPU) and not can_pack(torch.float16, CPU)
    assert not can_pack(torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 48), (1, 2, 6, 16)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_norm_equals_float64(dtype, shape, size):
    """Tiny rows (where eps decides) and huge ones; weights by feature, or by head and feature."""
    torch.manual_seed(1)
    x = (torch.randn(shape) * size).to(dtype)
    weight = torch.rand(shape[-2:] if len(shape) > 2 else shape[-1:]).to(dtype) + 0.5
    before = x.clone()
    got = make_norm(weight, 1e-5)(x)
    wide = x.double()
    want = wide / (wide.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert got.dtype == dtype and torch.equal(x, before)
    assert float((got.double() - want).abs().max()) <= (1e-6 if dtype is torch.float32 else 1e-2) * float(want.abs().max())


def test_rotation_equals_complex_multiplication():
    """(x1 + i x2) turns by position * frequency, halves paired; tables grow without changing what they held."""
    frequencies = 100.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    tables = RotaryTables(frequencies, 1.25, torch.float32, CPU)
    tables.grow(7)
    first = tables.rows(0, 7)[0].clone()
    tables.grow(40)
    torch.testing.assert_close(tables.rows(0, 7)[0], first, atol=0, rtol=0)
    torch.manual_seed(2)
    x = torch.randn(2, 9, 3, 16)
    turn = torch.polar(
        torch.full((), 1.25, dtype=torch.float64), torch.arange(30, 39, dtype=torch.float64)[:, None] * frequencies
    )
    want = torch.complex(x[..., :8].double(), x[..., 8:].double()) * turn[None, :, None]
    got = rotate_(x.clone(), *tables.rows(30, 9))
    torch.testing.assert_close(got.double(), torch.cat([want.real, want.imag], dim=-1), atol=1e-5, rtol=1e-5)
