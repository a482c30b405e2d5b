"""Seeded bugs: each must be flagged, and its correct twin must pass. Fast mode where it can see the bug, check mode always."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.metal.emulator import SCHEDULES, KernelFault, last_report, run_kernel
from tests.metal.toolchain import CompileError

INPUT = np.arange(1, 129, dtype=np.float32)

REDUCE = """
    threadgroup float partial[64];
    uint i = thread_position_in_threadgroup.x;
    uint n = thread_position_in_grid.x;
    partial[i] = a[n];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[n] = partial[63 - i] + partial[(i + 1) % 64];
"""
TWO_PHASES = """
    threadgroup float partial[64];
    uint i = thread_position_in_threadgroup.x;
    uint n = thread_position_in_grid.x;
    partial[i] = a[n];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float other = partial[63 - i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    partial[i] = 2 * other;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[n] = partial[63 - i];
"""
PLAIN = """
    uint i = thread_position_in_threadgroup.x;
    uint n = thread_position_in_grid.x;
    o[n] = a[n] + 1.0;
"""
SIMD = """
    uint i = thread_index_in_simdgroup;
    uint n = thread_position_in_grid.x;
    threadgroup float shared[64];
    uint base = simdgroup_index_in_threadgroup * 32;
    shared[base + i] = a[n];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float x = shared[base + (i ^ 1)];
    o[n] = simd_sum(x);
"""


@dataclass(frozen=True)
class Bug:
    name: str
    good: str
    old: str
    new: str
    check: str  # kind that check mode reports
    fast: str  # kind that fast mode reports; "wrong": the outputs are, in some schedule; "": it cannot see it


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
TWO_BARRIERS = f"if (i < 32)\n {BARRIER}\nelse\n {BARRIER}\n"
BUGS = [
    Bug("missing barrier", REDUCE, BARRIER, "", "uninitialised", "wrong"),
    Bug("missing second barrier", TWO_PHASES, f"- i];\n    {BARRIER}", "- i];", "race", "wrong"),
    Bug("missing third barrier", TWO_PHASES, f"other;\n    {BARRIER}", "other;", "race", "wrong"),
    Bug("barrier for another memory", REDUCE, "mem_flags::mem_threadgroup", "mem_flags::mem_device", "race", ""),
    Bug("barrier without memory", REDUCE, "mem_flags::mem_threadgroup", "mem_flags::mem_none", "race", ""),
    Bug("simdgroup barrier too small", REDUCE, "threadgroup_barrier", "simdgroup_barrier", "uninitialised", "wrong"),
    Bug("simd_sum is no barrier", SIMD, "simdgroup_barrier(mem_flags::mem_threadgroup);", "simd_sum(1.0f);", "race", ""),
    Bug("simdgroup barrier for another memory", SIMD, "mem_flags::mem_threadgroup", "mem_flags::mem_device", "race", ""),
    Bug("missing simdgroup barrier", SIMD, "simdgroup_barrier(mem_flags::mem_threadgroup);", "", "uninitialised", "wrong"),
    Bug("read past the end", PLAIN, "a[n]", "a[n + 1]", "out-of-bounds", "out-of-bounds"),
    Bug("read far past the end", PLAIN, "a[n]", "a[n + 100000]", "out-of-bounds", "out-of-bounds"),
    Bug("read before the start", PLAIN, "a[n]", "a[int(n) - 1]", "out-of-bounds", "wrong"),
    Bug("write past the end", PLAIN, "o[n]", "o[n + 1]", "out-of-bounds", "out-of-bounds"),
    Bug("write before the start", PLAIN, "o[n]", "o[int(n) - 1]", "out-of-bounds", "out-of-bounds"),
    Bug("write before the start again", PLAIN, "o[n]", "if (n == 0) o[-3] = 1; o[n]", "out-of-bounds", "out-of-bounds"),
    Bug("write to an input", PLAIN, "o[n] =", "((device float*)a)[n] = 3; o[n] =", "out-of-bounds", "out-of-bounds"),
    Bug("threadgroup write past the end", REDUCE, "partial[i] =", "partial[i + 1] =", "out-of-bounds", "out-of-bounds"),
    Bug("threadgroup read past the end", REDUCE, "(i + 1) % 64", "i + 1", "out-of-bounds", "out-of-bounds"),
    Bug("unwritten output", PLAIN, "o[n] =", "if (n != 77) o[n] =", "unwritten", "unwritten"),
    Bug("unwritten threadgroup", PLAIN, "o[n] =", "if (n < 64) o[n] =", "unwritten", "unwritten"),
    Bug("divergent barrier", REDUCE, BARRIER, f"if (i < 40) {BARRIER}", "race", "divergence"),
    Bug("barrier after a return", REDUCE, BARRIER, f"if (i == 63) return; {BARRIER}", "divergence", "divergence"),
    Bug("two different barriers", REDUCE, BARRIER, TWO_BARRIERS, "divergence", "divergence"),
    Bug("divergent simd_sum", SIMD, "simd_sum(x)", "(i < 31 ? simd_sum(x) : 0.0f)", "divergence", "divergence"),
    Bug("two simd operations", SIMD, "simd_sum(x)", "(i < 16 ? simd_sum(x) : simd_max(x))", "divergence", "divergence"),
    Bug("different trip counts", SIMD, "o[n] =", "for (uint j = 0; j < (i & 1) + 1; ++j) o[n] =", "divergence", "divergence"),
    Bug("race on one output", PLAIN, "o[n] =", "if (i < 2) o[0] = float(i); if (n) o[n] =", "race", ""),
    Bug("race between threadgroups", PLAIN, "o[n] =", "if (i == 0) o[5] = float(n); if (n != 5) o[n] =", "race", ""),
    Bug("reads another threadgroup's output", PLAIN, "o[n] =", "o[n] = 2; if (n == 100) o[n] = o[3]; else o[n] =", "race", ""),
    Bug("uninitialised threadgroup read", REDUCE, "partial[i] =", "if (i != 9) partial[i] =", "uninitialised", "wrong"),
    Bug("read of an output never set", PLAIN, "o[n] =", "o[n] += a[n]; o[n] = o[n] +", "uninitialised", "wrong"),
    Bug("infinite loop", PLAIN, "o[n] =", "while (a[0] > 0) {} o[n] =", "time", "time"),
    Bug("infinite loop with barriers", REDUCE, "o[n] =", f"while (a[0] > 0) {BARRIER} o[n] =", "time", "time"),
    Bug("threadgroup memory over 32 KB", REDUCE, "partial[64]", "partial[8193]", "threadgroup-memory", "threadgroup-memory"),
    Bug("two arrays over 32 KB", REDUCE, "uint n", "threadgroup half b[16353]; b[i] = 0; uint n", *2 * ["threadgroup-memory"]),
    Bug("integer division by zero", PLAIN, "o[n] =", "o[n] = 7 / (int(a[n]) - 5) +", "trap", "trap"),
    Bug("endless recursion", PLAIN, "o[n] = a[n]", "o[n] = deep(a, n)", "stack", "stack"),
    Bug("uninitialised local", PLAIN, "o[n] = a[n]", "float x[4]; x[i % 3] = a[n]; o[n] = x[3 - i % 2]", "", "wrong"),
]  # fmt: skip

HEADER = """
float deep(const device float* a, uint n) { float x[64]; x[n % 64] = a[n]; return a[n] > -1 ? x[n % 64] + deep(a, n) : 0.0f; }
"""


def run(source, schedule="forward", check=False, **kwargs):
    return run_kernel(
        "seeded", source, HEADER, ["a"], [INPUT], ["o"], [(128,)], ["float32"], (128, 1, 1), (64, 1, 1), [("T", "float32")],
        schedule, check, cpu_seconds=0.15, **kwargs,
    )[0]  # fmt: skip


@pytest.mark.parametrize("good", [REDUCE, TWO_PHASES, PLAIN, SIMD], ids=["reduce", "two phases", "plain", "simd"])
def test_correct_twins_pass(good):
    expected = run(good)
    assert np.isfinite(expected).all()
    for check in (False, True):
        for schedule in SCHEDULES:
            for seed in (0, 5):
                assert np.array_equal(run(good, schedule, check, seed=seed), expected)
    assert last_report().benign_races == 0


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_seeded_bug_is_flagged(bug):
    bad = bug.good.replace(bug.old, bug.new, 1)
    assert bad != bug.good
    if bug.check:
        with pytest.raises(KernelFault) as caught:
            run(bad, check=True)
        assert caught.value.kind == bug.check, caught.value
    if bug.fast == "wrong":
        assert any(not np.array_equal(run(bad, schedule), run(bug.good)) for schedule in SCHEDULES)
    elif bug.fast:
        for schedule in SCHEDULES[: 1 if bug.fast == "time" else 3]:
            with pytest.raises(KernelFault) as caught:
                run(bad, schedule)
            assert caught.value.kind == bug.fast, caught.value


def test_the_message_says_where():
    with pytest.raises(
        KernelFault, match=r"'seeded': out-of-bounds write of 'o': byte 512, it has 512 bytes \(128 elements\)"
    ) as caught:
        run(PLAIN.replace("o[n]", "o[n + 1]"))
    assert "[thread (63, 0, 0) of threadgroup (1, 0, 0), simdgroup 1, lane 31]" in str(caught.value)
    with pytest.raises(KernelFault, match="waits in threadgroup_barrier .* but thread 40 .* is at the end of the kernel"):
        run(REDUCE.replace("threadgroup_barrier(", "if (i >= 40) { o[n] = 0; return; } threadgroup_barrier("))


def test_limits():
    def launch(grid, threadgroup):
        return run_kernel("k", PLAIN, "", ["a"], [INPUT], ["o"], [(128,)], ["float32"], grid, threadgroup)

    with pytest.raises(KernelFault, match="1024 threads"):
        launch((128, 1, 1), (1024, 2, 1))
    with pytest.raises(KernelFault, match="positive"):
        launch((128, 0, 1), (32, 1, 1))
    launch((128, 1, 1), (1024, 1, 1))
    names = [f"a{i}" for i in range(31)]
    with pytest.raises(KernelFault, match="31 buffers, got 32"):
        run_kernel("k", "o[0] = 1;", "", names, [INPUT] * 31, ["o"], [(1,)], ["float32"], (1, 1, 1), (1, 1, 1))
    assert run(REDUCE.replace("partial[64]", "partial[8192]")).shape == (128,)
    assert last_report().threadgroup_bytes == 32768


def test_what_metal_rejects_is_rejected():
    for source, message in [
        ("o[n] = std::exp(a[n]);", "poisoned"),
        ("double x = a[n]; o[n] = x;", "poisoned"),
        ("bfloat x = a[n]; o[n] = x;", "conversion|convert"),
        ("half h = 1.0; bfloat x = h; o[n] = x;", "conversion|convert"),
        ("o[n] = undeclared;", "kernel:"),
        ("throw 1;", "exception"),
    ]:
        with pytest.raises(CompileError, match=message):
            run("    uint n = thread_position_in_grid.x;\n    " + source)


def test_an_output_that_equals_the_poison_counts_as_written():
    bits = np.array([0xA5, 0x5A, 0xFF], dtype=np.uint8)
    out = run_kernel("k", "o[thread_position_in_grid.x] = a[thread_position_in_grid.x];", "", ["a"], [bits], ["o"], [(3,)],
                     ["uint8"], (3, 1, 1), (3, 1, 1))  # fmt: skip
    assert np.array_equal(out[0], bits)


def test_init_value_counts_as_written():
    source = "if (thread_position_in_grid.x == 1) o[1] = a[1];"
    for dtype, expected in (("float32", np.float32(2.5)), ("bfloat16", np.uint16(0x4020))):
        out = run_kernel(
            "k", source.replace("a[1]", "T(a[1])"), "", ["a"], [INPUT], ["o"], [(4,)], [dtype], (4, 1, 1), (4, 1, 1),
            [("T", dtype)], init_value=2.5, check=True,
        )[0]  # fmt: skip
        assert (out[[0, 2, 3]] == expected).all()
        assert out[1] != expected


def test_a_fault_leaves_the_process_usable():
    for _ in range(3):
        with pytest.raises(KernelFault):
            run(PLAIN.replace("o[n]", "o[n + 1]"))
        with pytest.raises(KernelFault):
            run(REDUCE.replace(BARRIER, f"if (i < 7) {BARRIER}"))
        assert np.array_equal(run(PLAIN), INPUT + 1)
