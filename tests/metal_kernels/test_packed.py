"""Products with packed weights: the core against MLX's own, and the Metal kernels against the core in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dspine.common import quantized_rows as core
from dspine.common.errors import DSpineError
from dspine.kernels_metal.gathered_rows import gathered_rows
from dspine.kernels_metal.quantized_rows import quantized_rows, supports
from tests.metal_kernels.running import assert_close, low, on_device, run_every_schedule, run_metal, run_reference

BOUND = {"float32": (2e-6,), "bfloat16": (4e-3,)}


def packed(rng, shape, bits, group, dtype="float32"):
    """Weights as MLX packs them: words int32 (the same bits), scales and biases in `dtype`."""
    weights = mx.array(rng.normal(size=shape).astype(np.float32)).astype(getattr(mx, dtype))
    words, scales, biases = mx.quantize(weights, group_size=group, bits=bits)
    parts = (np.array(part.astype(mx.float32)) for part in (scales, biases))
    return np.array(words).view(np.int32), *(low(part, dtype) for part in parts)


@pytest.mark.parametrize("bits", core.BITS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_the_core_unpacks_as_mlx_does(bits, group):
    rng = np.random.default_rng(bits + group)
    words, scales, biases = packed(rng, (7, 256), bits, group)
    wanted = np.array(
        mx.dequantize(mx.array(words.view(np.uint32)), mx.array(scales.values), mx.array(biases.values), group, bits)
    )
    for given in (words, words.view(np.uint32)):
        got = core.unpacked(given, scales.values, biases.values, bits, group)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)
    x = rng.normal(size=(3, 256)).astype(np.float32)
    args = (x, words.view(np.uint32), scales.values, biases.values, bits, group)
    device = [mx.array(part) for part in args[:4]]
    own = mx.quantized_matmul(device[0], *device[1:], transpose=True, group_size=group, bits=bits)
    np.testing.assert_allclose(core.quantized_rows.reference(*args), np.array(own), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        np.array(core.quantized_rows.reference(*device, bits, group)), np.array(own), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows", "columns", "width"), [(2, 33, 128), (3, 5, 384), (8, 17, 256), (16, 40, 128), (1, 1, 64), (11, 16, 64)]
)
def test_rows(dtype, rows, columns, width):
    rng = np.random.default_rng(rows)
    args = (low(rng.normal(size=(rows, width)), dtype), *packed(rng, (columns, width), 4, 64, dtype), 4, 64)
    assert_close(run_every_schedule(quantized_rows, args), run_reference(core.quantized_rows, args), BOUND[dtype])


@pytest.mark.parametrize("bits", core.BITS)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_rows_at_every_width(bits, group):
    rng = np.random.default_rng(bits)
    args = (low(rng.normal(size=(5, 256)), "float32"), *packed(rng, (9, 256), bits, group), bits, group)
    assert_close(run_metal(quantized_rows, args), run_reference(core.quantized_rows, args), BOUND["float32"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("shared", [True, False], ids=["up", "down"])
def test_gathered_rows(dtype, bits, shared):
    """Rows of a token shared by its picks, or a row a pick; runs of one expert of every length."""
    rng = np.random.default_rng(bits)
    tokens, k, experts = 9, 3, 6
    picks = np.stack([rng.permutation(experts)[:k] for _ in range(tokens)]).astype(np.int32)
    picks[:, 0] = 4  # one expert for all tokens: a run longer than a tile
    picks[:, 1:] = np.where(picks[:, 1:] == 4, 0, picks[:, 1:])
    x = low(rng.normal(size=(tokens if shared else tokens * k, 128)), dtype)
    args = (x, *packed(rng, (experts, 18, 128), bits, 64, dtype), picks.ravel(), bits, 64)
    assert_close(run_every_schedule(gathered_rows, args), run_reference(core.gathered_rows, args), BOUND[dtype])


def test_gathered_rows_are_mlx_lms():
    rng = np.random.default_rng(0)
    words, scales, biases = packed(rng, (5, 8, 64), 4, 32)
    x, picks = rng.normal(size=(3, 64)).astype(np.float32), np.array([[4, 0], [1, 4], [4, 2]], np.int32)
    parts = mx.array(words.view(np.uint32)), mx.array(scales.values), mx.array(biases.values)
    own = mx.gather_qmm(mx.array(x)[:, None, None], *parts, rhs_indices=mx.array(picks), transpose=True, group_size=32, bits=4)
    got = core.gathered_rows.reference(x, words, scales.values, biases.values, picks.ravel(), 4, 32)
    np.testing.assert_allclose(got.reshape(3, 2, 8), np.array(own)[:, :, 0], rtol=1e-4, atol=1e-4)


def test_bad_shapes_are_errors():
    rng = np.random.default_rng(0)
    words, scales, biases = packed(rng, (8, 64), 4, 32)
    x = np.zeros((2, 64), np.float32)
    for args, message in (
        ((x[0], words, scales.values, biases.values, 4, 32), "x must be"),
        ((x[:, :32], words, scales.values, biases.values, 4, 32), r"for width 32 .* expected words \(8, 4\)"),
        ((x, words, scales.values, biases.values, 7, 32), "bits must be one of"),
        ((x, words, scales.values, biases.values[:, :1], 4, 32), r"got \(8, 8\), \(8, 2\) and \(8, 1\)"),
    ):
        with pytest.raises(DSpineError, match=message):
            core.quantized_rows(*args)
    with pytest.raises(DSpineError, match="P a multiple of 2 rows"):
        core.gathered_rows(x, words[None], scales.values[None], biases.values[None], np.zeros(3, np.int32), 4, 32)
    device = [on_device(part) for part in (x, words, scales, biases)]
    assert supports(*device, 4, 32) and not supports(*device, 4, 4) and not supports(mx.zeros((17, 64)), *device[1:], 4, 32)
