"""The shim against NumPy and MLX: number formats, vectors, simdgroup operations, matrices, atomics, positions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.metal.emulator import SCHEDULES, BFloat16, emulated_metal_kernel, last_report, run_kernel
from tests.metal.rewrite import check_header, rewrite_threadgroup


def run(source, inputs, shape, dtype, grid, threadgroup=None, template=(), header="", **kwargs):
    names = [f"in{i}" for i in range(len(inputs))]
    threadgroup = threadgroup or tuple(min(g, 32) for g in grid)
    return run_kernel("k", source, header, names, inputs, ["o"], [shape], [dtype], grid, threadgroup, template, **kwargs)[0]


def hard_floats():
    """Random bits of every exponent, ties of bfloat16 and half, infinities, denormals; no NaN."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    upper = rng.integers(0, 1 << 16, 20_000, dtype=np.uint64).astype(np.uint32) << 16
    ties = np.concatenate([upper | 0x8000, upper | 0x7FFF, upper | 0x8001, upper])
    half_ties = (rng.integers(-(1 << 11), 1 << 11, 5000) * 2 + 1).astype(np.float32) * np.float32(2.0**-12)
    special = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 1, 0x7F7FFFFF, 0x33000000, 0x33000001], dtype=np.uint32)
    values = np.concatenate([bits, ties, special]).view(np.float32)
    return np.concatenate([values[~np.isnan(values)], half_ties])


def test_bfloat_rounds_like_mlx():
    mx = pytest.importorskip("mlx.core")
    values = hard_floats()
    n = values.size
    got = run("uint n = thread_position_in_grid.x; o[n] = bfloat(in0[n]);", [values], (n,), "bfloat16", (n, 1, 1), (1024, 1, 1))
    expected = np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))
    assert np.array_equal(got, expected)
    back = run(
        "uint n = thread_position_in_grid.x; o[n] = in0[n];", [BFloat16(expected)], (n,), "float32", (n, 1, 1), (1024, 1, 1)
    )
    assert np.array_equal(back, (expected.astype(np.uint32) << 16).view(np.float32))


def test_half_rounds_like_numpy():
    values = hard_floats()
    n = values.size
    got = run("uint n = thread_position_in_grid.x; o[n] = half(in0[n]);", [values], (n,), "float16", (n, 1, 1), (1024, 1, 1))
    with np.errstate(over="ignore"):
        assert np.array_equal(got.view(np.uint16), values.astype(np.float16).view(np.uint16))


def test_every_half_and_bfloat_operation_rounds():
    rng = np.random.default_rng(1)
    a, b, c = rng.standard_normal((3, 4096)).astype(np.float16)
    got = run(
        "uint n = thread_position_in_grid.x; o[n] = in0[n] * in1[n] + in2[n];", [a, b, c], (4096,), "float16", (4096, 1, 1)
    )
    assert np.array_equal(got, a * b + c)
    mx = pytest.importorskip("mlx.core")
    a, b, c = (mx.array(x.astype(np.float32)).astype(mx.bfloat16) for x in (a, b, c))
    source = "uint n = thread_position_in_grid.x; o[n] = in0[n] * in1[n] + in2[n] / bfloat(3);"
    got = run(source, [a, b, c], (4096,), "bfloat16", (4096, 1, 1))
    assert np.array_equal(got, np.array((a * b + c / mx.array(3, dtype=mx.bfloat16)).view(mx.uint16)))


def test_promotion():
    """float with bfloat is float; a literal is a float; bfloat with an integer stays bfloat."""
    header = "template <class A, class B> constexpr int same() { return metal::is_same_v<A, B>; }\n"
    source = """
        bfloat x = bfloat(1.5); half h = 0.25h; float f = 2;
        o[0] = same<decltype(x * f), float>();
        o[1] = same<decltype(x * x), bfloat>();
        o[2] = same<decltype(x * h), float>();
        o[3] = same<decltype(1.0), float>() && sizeof(1.0) == 4;
        o[4] = same<decltype(x + 1), bfloat>();
        o[5] = same<decltype(h * h), half>();
        o[6] = same<decltype(h * f), float>();
        o[7] = same<decltype(metal::max(x, x)), bfloat>();
        o[8] = same<decltype(exp(x)), bfloat>();
        o[9] = same<decltype(dot(float4(1), float4(2))), float>();
        o[10] = sizeof(float3) == 16;
        o[11] = sizeof(packed_float3) == 12;
    """
    assert run(source, [], (12,), "int32", (1, 1, 1), header=header).all()


def test_literals_are_floats():
    got = run(
        "o[0] = in0[0] * 0.1 == in0[0] * 0.1f; o[1] = sizeof(0.1);",
        [np.float32([3, 1, 2, 4, 5, 6, 7, 8])],
        (2,),
        "int32",
        (1, 1, 1),
    )
    assert got.tolist() == [1, 4]


def test_vectors():
    source = """
        float4 v = ((const device float4*)in0)[0];
        float2 w = v.zw + v.xy * 2;
        uint3 u = uint3(v.xyz);
        half4 h = half4(v);
        float4 s = select(v, float4(w, 9, 10), v > 2.0f);
        o[0] = w.x; o[1] = w.y; o[2] = float(u.z); o[3] = float(h[3]); o[4] = dot(v, v);
        o[5] = s.x; o[6] = s.y; o[7] = s.z; o[8] = s.w; o[9] = float(any(v == 3.0f)); o[10] = length(float3(1, 2, 2));
        v.xy = float2(7, 8); v *= 2; o[11] = v.y; ((device float2*)(o + 12))[0] = v.zw;
    """
    got = run(source, [np.float32([1, 2, 3, 4, 5, 6, 7, 8])], (14,), "float32", (1, 1, 1))
    assert got.tolist() == [5, 8, 3, 4, 30, 1, 2, 9, 10, 1, 3, 16, 6, 8]


LANES = np.random.default_rng(2).standard_normal(64).astype(np.float32)


def butterfly(values):
    values = values.astype(np.float32).copy()
    for step in (1, 2, 4, 8, 16):
        values = values + values[np.arange(32) ^ step]
    return values[0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_simd_operations(schedule):
    expressions = {
        "simd_sum(x)": lambda x: np.full(32, butterfly(x)),
        "simd_max(x)": lambda x: np.full(32, x.max()),
        "simd_min(x)": lambda x: np.full(32, x.min()),
        "simd_shuffle(x, 31 - l)": lambda x: x[::-1],
        "simd_shuffle_xor(x, 5)": lambda x: x[np.arange(32) ^ 5],
        "simd_shuffle_up(x, 3)": lambda x: np.concatenate([x[:3], x[:-3]]),
        "simd_shuffle_down(x, 3)": lambda x: np.concatenate([x[3:], x[-3:]]),
        "simd_shuffle_rotate_up(x, 3)": lambda x: np.roll(x, 3),
        "simd_shuffle_rotate_down(x, 3)": lambda x: np.roll(x, -3),
        "simd_shuffle_and_fill_up(x, 2 * x, 3)": lambda x: np.concatenate([2 * x[-3:], x[:-3]]),
        "simd_shuffle_and_fill_down(x, 2 * x, 3)": lambda x: np.concatenate([x[3:], 2 * x[:3]]),
        "simd_broadcast(x, 7)": lambda x: np.full(32, x[7]),
        "simd_broadcast_first(x)": lambda x: np.full(32, x[0]),
        "simd_prefix_inclusive_sum(x)": lambda x: np.cumsum(x, dtype=np.float32),
        "simd_prefix_exclusive_sum(x)": lambda x: np.concatenate([[0], np.cumsum(x, dtype=np.float32)[:-1]]),
        "float(simd_any(x > 1.7f))": lambda x: np.full(32, (x > 1.7).any()),
        "float(simd_all(x > -99.0f))": lambda x: np.full(32, 1),
        "float(simd_sum(int(l)))": lambda x: np.full(32, 496),
        "float(simd_xor(l))": lambda x: np.full(32, 0),
        "float(uint64_t(simd_ballot(x > 0.0f)) >> l & 1)": lambda x: x > 0,
        "quad_sum(l * 1.0f)": lambda x: np.repeat(np.arange(32).reshape(8, 4).sum(axis=1), 4),
        "quad_shuffle_xor(x, 1)": lambda x: x[np.arange(32) ^ 1],
        "simd_sum(float2(x, 1)).y": lambda x: np.full(32, 32),
        "float(simd_product(l == 3 ? 2 : 1))": lambda x: np.full(32, 2),
    }
    lines = "\n".join(f"o[{i} * 64 + n] = {e};" for i, e in enumerate(expressions))
    source = f"uint n = thread_position_in_grid.x; uint l = thread_index_in_simdgroup; float x = in0[n];\n{lines}"
    got = run(source, [LANES], (len(expressions), 64), "float32", (64, 1, 1), (64, 1, 1), schedule=schedule)
    for row, (expression, expected) in zip(got, expressions.items(), strict=True):
        values = np.concatenate([expected(LANES[:32]), expected(LANES[32:])]).astype(np.float32)
        assert np.array_equal(row, values), expression


def test_a_missing_lane_takes_no_part_and_its_value_is_undefined():
    source = """
        uint n = thread_position_in_grid.x;
        o[n] = simd_sum(1.0f); o[20 + n] = simd_max(-2.0f); o[40 + n] = simd_product(2.0f);
        o[60 + n] = simd_shuffle(1.0f, 31 - n);
    """
    got = run(source, [], (80,), "float32", (20, 1, 1))
    assert (got[:20] == 20).all() and (got[20:40] == -2).all() and (got[40:60] == 2.0**20).all()
    assert np.isnan(got[60:72]).all() and (got[72:] == 1).all()


def test_simd_operations_of_small_types():
    bits = (LANES[:32].view(np.uint32) >> 16).astype(np.uint16)
    source = "uint n = thread_position_in_grid.x; o[n] = simd_shuffle_xor(in0[n], 1);"
    assert np.array_equal(run(source, [BFloat16(bits)], (32,), "bfloat16", (32, 1, 1)), bits[np.arange(32) ^ 1])
    half = LANES[:32].astype(np.float16)
    source = "uint n = thread_position_in_grid.x; o[n] = simd_sum(in0[n]);"
    expected = half.copy()
    for step in (1, 2, 4, 8, 16):
        expected = expected + expected[np.arange(32) ^ step]
    assert np.array_equal(run(source, [half], (32,), "float16", (32, 1, 1)), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_matrices(schedule, dtype):
    rng = np.random.default_rng(3)
    a, b = rng.integers(-4, 5, (2, 16, 24)).astype(dtype)
    source = """
        uint sg = simdgroup_index_in_threadgroup;
        ulong2 corner = ulong2(0, sg * 8);
        simdgroup_matrix<T, 8, 8> x, y; simdgroup_matrix<float, 8, 8> c = make_filled_simdgroup_matrix<float, 8, 8>(0.5f);
        for (ulong k = 0; k < 24; k += 8) {
            simdgroup_load(x, in0 + k, 24, corner);
            simdgroup_load(y, in1 + k, 24, ulong2(0, 0), true);
            simdgroup_multiply_accumulate(c, x, y, c);
        }
        threadgroup float tile[2][64];
        simdgroup_store(c, tile[sg], 8);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        uint t = thread_position_in_threadgroup.x;
        for (uint i = t; i < 128; i += 64) o[i] = tile[i / 64][i % 64];
    """
    expected = a.astype(np.float64) @ b[:8].astype(np.float64).T + 0.5
    for check in (False, True):
        got = run(source, [a, b], (16, 8), "float32", (64, 1, 1), (64, 1, 1), [("T", dtype)], schedule=schedule, check=check)
        assert np.array_equal(got, expected)


def test_matrix_elements_are_where_mlx_looks_for_them():
    source = """
        simdgroup_matrix<float, 8, 8> m; simdgroup_load(m, in0, 8);
        uint l = thread_index_in_simdgroup; uint quad = l / 4;
        uint row = (quad & 4) + (l / 2) % 4, column = (quad & 2) * 2 + (l % 2) * 2;
        o[row * 8 + column] = m.thread_elements()[0]; o[row * 8 + column + 1] = m.thread_elements()[1];
    """
    values = np.arange(64, dtype=np.float32)
    assert np.array_equal(run(source, [values], (64,), "float32", (32, 1, 1)), values)


@pytest.mark.parametrize("check", [False, True])
def test_atomics(check):
    source = """
        uint n = thread_position_in_grid.x;
        atomic_fetch_add_explicit(&o[0], 1.0f, memory_order_relaxed);
        atomic_fetch_max_explicit(&o[1], float(n), memory_order_relaxed);
        threadgroup atomic_uint counter;
        if (thread_index_in_threadgroup == 0) atomic_store_explicit(&counter, 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&counter, n % 2, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&o[2], float(atomic_load_explicit(&counter, memory_order_relaxed)), memory_order_relaxed);
    """
    got = run(source, [], (3,), "float32", (1000, 1, 1), (100, 1, 1), init_value=0.0, atomic_outputs=True, check=check)
    assert got.tolist() == [1000, 999, 50 * 1000]


def test_positions_of_an_uneven_grid():
    """MLX dispatches threads, not threadgroups: those at the edge are smaller, and a small grid clamps the threadgroup."""
    names = """thread_position_in_grid.x thread_position_in_grid.y thread_position_in_threadgroup.x
        threadgroup_position_in_grid.y threads_per_threadgroup.x threads_per_threadgroup.y dispatch_threads_per_threadgroup.x
        threadgroups_per_grid.x threads_per_grid.y thread_index_in_threadgroup thread_index_in_simdgroup
        simdgroups_per_threadgroup simdgroup_index_in_threadgroup threads_per_simdgroup""".split()
    lines = "".join(f"o[n * {len(names)} + {i}] = {name};\n" for i, name in enumerate(names))
    source = f"uint n = thread_position_in_grid.y * 70 + thread_position_in_grid.x;\n{lines}"
    got = run(source, [], (3, 70, len(names)), "uint32", (70, 3, 1), (40, 2, 4))
    assert got[2, 69].tolist() == [69, 2, 29, 1, 30, 1, 40, 2, 3, 29, 29, 1, 0, 32]
    assert got[1, 39].tolist() == [39, 1, 39, 0, 40, 2, 40, 2, 3, 79, 15, 3, 2, 32]


def test_shapes_strides_and_scalars():
    source = "o[0] = in0_shape[1] * 100 + in0_strides[0] * 10 + in0_ndim; o[1] = in1; o[2] = int(in2 * 2); o[3] = in3;"
    got = run(source, [np.zeros((2, 5), np.int8), 7, 1.5, True], (4,), "int32", (1, 1, 1))
    assert got.tolist() == [552, 7, 3, 1]


def test_non_contiguous_inputs_are_copied():
    values = np.arange(24, dtype=np.int64).reshape(4, 6)
    got = run("uint n = thread_position_in_grid.x; o[n] = in0[n];", [values[::2, 1:].T], (10,), "int64", (10, 1, 1))
    assert np.array_equal(got, values[::2, 1:].T.reshape(-1))


def test_empty_arrays():
    assert run("if (in0_shape[0]) o[0] = in0[0];", [np.zeros((0, 3), np.float32)], (0,), "float32", (1, 1, 1)).shape == (0,)


def test_mlx_form():
    mx = pytest.importorskip("mlx.core")
    kernel = emulated_metal_kernel(
        "k", ["a"], ["o", "p"], "uint n = thread_position_in_grid.x; o[n] = a[n] * a[n]; p[n] = a[n] > 1;"
    )
    a = mx.array([0.5, 1.5, 3.0], dtype=mx.bfloat16)
    o, p = kernel(
        inputs=[a], grid=(3, 1, 1), threadgroup=(3, 1, 1), output_shapes=[(3, 1), (3,)], output_dtypes=[a.dtype, mx.bool_]
    )
    assert o.dtype == mx.bfloat16 and o.shape == (3, 1) and p.dtype == mx.bool_
    assert mx.array_equal(o.reshape(3), a * a) and p.tolist() == [False, True, True]


def test_threadgroup_declarations():
    source = """
        constexpr int W = 4;
        struct Pair { float value; int index; };
        threadgroup float rows[2][W * 2], column[W], one; // threadgroup float comment[3];
        threadgroup
            Pair best[(W > 3 ? 2 : 1)];
        threadgroup vec<half, 4> wide[W];
        threadgroup float* pointer = &rows[1][0];
        threadgroup Pair& first = best[0];
        const threadgroup float* again = column;
        uint n = thread_position_in_grid.x;
        for (int i = 0; i < W * 2; ++i) pointer[i] = i;
        column[n] = n; wide[n] = vec<half, 4>(half(n)); one = 5; first.value = 2; best[1] = Pair{3, 4};
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[n] = rows[1][7] + again[3 - n] + one + best[0].value + best[1].index + float(wide[n].w);
    """
    got = run(source, [], (4,), "float32", (4, 1, 1))
    assert got.tolist() == [21.0] * 4
    assert last_report().threadgroup_bytes == (2 * 8 * 4 + 16 + 4) + 16 + 4 + 32  # 4 of padding before the half4s


def test_rewriting_keeps_lines_and_leaves_pointers():
    body = 'threadgroup float a[\n  8];\nuse("threadgroup int x[2];"); threadgroup int* p = q; f((threadgroup float*)a);\n'
    text, count = rewrite_threadgroup(body)
    assert count == 1 and text.count("\n") == body.count("\n")
    assert text.endswith(body.partition(";\n")[2])


@pytest.mark.parametrize("text", ["threadgroup float x = 3;", "threadgroup float x[2] = {1, 2};", "f(threadgroup float x);"])
def test_a_declaration_that_is_not_understood_is_an_error(text):
    with pytest.raises(ValueError, match="line 2 of the body: expected `threadgroup T name"):
        rewrite_threadgroup(f"int i;\n{text}\n")


def test_headers_hold_no_threadgroup_variables():
    check_header(
        "inline void f(threadgroup float* p, threadgroup float q[4], threadgroup float (&r)[4]);\n// threadgroup int x;\n"
    )
    check_header("struct S { threadgroup int* p; };")
    with pytest.raises(ValueError, match="line 2 of the header"):
        run(
            "o[0] = f();",
            [],
            (1,),
            "float32",
            (1, 1, 1),
            header="inline float f() {\n threadgroup float x[3]; x[0] = 1; return x[0]; }\n",
        )


def test_bfloat_matrices_and_diagonals():
    source = """
        simdgroup_matrix<bfloat, 8, 8> x, twice(bfloat(2.0f)), product;
        simdgroup_load(x, in0, 8);
        simdgroup_multiply(product, x, twice);
        simdgroup_store(product, o, 8, ulong2(0, 0), true);
    """
    bits = (np.arange(64, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    got = run(source, [BFloat16(bits)], (8, 8), "bfloat16", (32, 1, 1))
    assert np.array_equal((got.astype(np.uint32) << 16).view(np.float32), 2 * np.arange(64, dtype=np.float32).reshape(8, 8).T)
