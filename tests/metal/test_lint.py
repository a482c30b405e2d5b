"""Pointer-space mistakes that g++ compiles without a word."""

from __future__ import annotations

import numpy as np
import pytest

from tests.metal import lint
from tests.metal.emulator import KernelFault, run_kernel
from tests.metal.signature import Operand, kernel_text

HEADER = """
struct Pair { float value; int index; };
constant float table[3] = {1, 2, 3};
template <typename T> inline float first(const device T* p) { return float(p[0]); }
inline float from_threadgroup(threadgroup float* p) { return p[0]; }
inline void set(thread float& x) { x = 1; }
"""
GOOD = """
    threadgroup float tile[64]; threadgroup Pair pairs[4];
    uint n = thread_position_in_grid.x;
    const device T* p = a + n;
    device T* q = o; threadgroup float* t = tile; thread float local[4]; float4 v = ((const device float4*)b)[0];
    auto row = a + 3; float x = row[0]; set(x); local[n % 4] = x * table[1] + first(a) + v.x + float4(1, 2, 3, 4).w;
    tile[n] = fast::exp(x); pairs[0].index = 3; pairs[1] = pairs[0]; Pair copy = pairs[1];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_matrix<float, 8, 8> m; simdgroup_load(m, tile, 8); simdgroup_store(m, t, 8);
    q[n] = T(from_threadgroup(tile) + local[0] + max(x, 1.0f) + simd_sum(x) + copy.index) + p[0];
"""


def kernel(body):
    inputs = [Operand("a", "bfloat16", (64,)), Operand("b", "float32", (64,))]
    return kernel_text("k", body, HEADER, inputs, [Operand("o", "bfloat16", (64,))], [("T", "bfloat16"), ("D", 4)])


@pytest.fixture(autouse=True)
def clang():
    if reason := lint.lint_unavailable():
        pytest.skip(reason)


def test_a_correct_kernel_is_clean():
    assert lint.address_space_errors(kernel(GOOD), GOOD) == []


@pytest.mark.parametrize(
    "bad",
    [
        "float* p = (device float*)o; p[0] = 1;",
        "thread float* p = tile;",
        "device float* p = tile;",
        "const threadgroup float* p = b;",
        "const constant float* p = b;",
        "const float* p = b + n;",
        "float y = from_threadgroup(local);",
        "float y = first(tile);",
        "const float* p = table;",
        "set(tile[0]);",
        "simdgroup_load(m, local, 8);",
    ],
)
def test_a_pointer_to_another_space_is_found(bad):
    body = GOOD + "{ " + bad + " }\n"
    found = lint.address_space_errors(kernel(body), body)
    assert found, bad


def test_text_that_clang_cannot_read_is_an_error():
    body = GOOD + "not_declared(3);"
    with pytest.raises(lint.LintError, match="not_declared"):
        lint.address_space_errors(kernel(body), body)


def test_check_mode_includes_the_lint():
    source = "uint n = thread_position_in_grid.x; const float* p = a; o[n] = p[n];"
    arguments = ("k", source, "", ["a"], [np.ones(8, np.float32)], ["o"], [(8,)], ["float32"], (8, 1, 1), (8, 1, 1))
    run_kernel(*arguments)
    with pytest.raises(KernelFault, match="address spaces:") as caught:
        run_kernel(*arguments, check=True)
    assert caught.value.kind == "address-space"
