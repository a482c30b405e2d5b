# twin: dspine.common.signals.draft_signals
"""Top-K, top-1 probability and entropy of each row of logits, in one pass over the vocabulary and one small merge.

A threadgroup takes a strip of 4096 logits of a row into registers (each is read once): maximum, sum of e^(x - max), sum of
e^(x - max) (x - max), and the strip's K largest, found by K rounds of a maximum over the threadgroup. The second launch
merges the strips of a row the same way. Of equal values the lower id wins, always.
"""

from __future__ import annotations

from typing import Any

from dspine.common import signals as core
from dspine.common.errors import DSpineError
from dspine.common.registry import register_kernel
from dspine.common.signals import DraftSignals
from dspine.kernels_metal._launch import METAL, SIMD, MetalSource, ceil_div, floating, launch, mlx, rows_of
from dspine.kernels_metal._source import BEST, REDUCE

Array = Any
SIMDS, PER_THREAD = 8, 16
STRIP = SIMD * SIMDS * PER_THREAD
MAX_K = 64

STRIPS = MetalSource(
    name="dspine_draft_signals_strips",
    inputs=("logits", "sizes"),
    outputs=("values", "ids", "sums"),
    header=REDUCE + BEST,
    body="""
    // sizes: V, strips, K. Thread t holds logits t, t + 256, ... of the strip, so of equal ones its first has the lowest id.
    constexpr int SIMDS = 8, EACH = 16, THREADS = 32 * SIMDS;
    threadgroup float best_values[SIMDS];
    threadgroup int best_ids[SIMDS];
    threadgroup float partial[SIMDS];
    const int vocabulary = sizes[0], strips = sizes[1], count = sizes[2];
    const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    const int thread_id = int(thread_position_in_threadgroup.x);
    const size_t row = threadgroup_position_in_grid.y, strip = threadgroup_position_in_grid.x;
    const auto x = logits + row * vocabulary;
    const int start = int(strip) * THREADS * EACH;
    float mine[EACH];
    uint left = 0;  // bit i: logit i of this thread has not been taken
    DSPINE_UNROLL for (int i = 0; i < EACH; ++i) {
        const int id = start + i * THREADS + thread_id;
        mine[i] = id < vocabulary ? float(x[id]) : -INFINITY;
        left |= id < vocabulary ? 1u << i : 0u;
    }
    const size_t at = row * strips + strip;
    float highest = 0;
    for (int j = 0; j < count; ++j) {
        Best best;
        best.value = 0;
        best.id = -1;
        DSPINE_UNROLL for (int i = 0; i < EACH; ++i) {
            Best other;
            other.value = mine[i];
            other.id = (left >> i & 1u) ? start + i * THREADS + thread_id : -1;
            best = better(best, other);
        }
        best = group_best<SIMDS>(best, best_values, best_ids, lane, simd);
        if (j == 0) {
            highest = best.value;
        }
        if (best.id >= 0 && (best.id - start) % THREADS == thread_id) {
            left &= ~(1u << ((best.id - start) / THREADS));
        }
        if (thread_id == 0) {
            values[at * count + j] = best.value;
            ids[at * count + j] = best.id;
        }
    }
    float total = 0, products = 0;
    DSPINE_UNROLL for (int i = 0; i < EACH; ++i) {
        const float shifted = mine[i] - highest;
        const float weight = highest == -INFINITY ? 0.0f : metal::exp(shifted);
        total += weight;
        products += weight > 0 ? weight * shifted : 0.0f;  // 0 * -inf would be NaN
    }
    total = group_total<SIMDS>(total, partial, lane, simd);
    products = group_total<SIMDS>(products, partial, lane, simd);
    if (thread_id == 0) {
        sums[at * 2] = total;
        sums[at * 2 + 1] = products;
    }
""",
)

MERGE = MetalSource(
    name="dspine_draft_signals_merge",
    inputs=("strip_values", "strip_ids", "strip_sums", "sizes"),
    outputs=("values", "ids", "confidence", "entropy"),
    header=REDUCE + BEST,
    body="""
    // sizes: strips, K; one simdgroup a row. Lane l holds strips l, l + 32, ...; each strip's list is in descending order.
    constexpr int EACH = STRIPS_PER_LANE;
    const int strips = sizes[0], count = sizes[1];
    const uint lane = thread_index_in_simdgroup;
    const size_t row = threadgroup_position_in_grid.x;
    const auto v = strip_values + row * strips * count;
    const auto n = strip_ids + row * strips * count;
    const auto s = strip_sums + row * strips * 2;
    int taken[EACH];
    DSPINE_UNROLL for (int i = 0; i < EACH; ++i) {
        taken[i] = 0;
    }
    float highest = 0;
    for (int j = 0; j < count; ++j) {
        Best best;
        best.value = 0;
        best.id = -1;
        int from = 0;
        DSPINE_UNROLL for (int i = 0; i < EACH; ++i) {
            const int strip = i * 32 + int(lane);
            if (strip < strips && taken[i] < count) {
                Best other;
                other.value = v[strip * count + taken[i]];
                other.id = n[strip * count + taken[i]];
                const Best next = better(best, other);
                from = next.id == other.id ? i : from;
                best = next;
            }
        }
        const Best whole = lane_best(best);
        DSPINE_UNROLL for (int i = 0; i < EACH; ++i) {
            taken[i] += whole.id >= 0 && whole.id == best.id && i == from ? 1 : 0;
        }
        if (j == 0) {
            highest = whole.value;
        }
        if (lane == 0) {
            values[row * count + j] = whole.value;
            ids[row * count + j] = whole.id;
        }
    }
    float total = 0, products = 0;
    for (int strip = int(lane); strip < strips; strip += 32) {
        const float shift = v[strip * count] - highest;  // of the strip's own maximum
        const float weight = n[strip * count] >= 0 && shift > -INFINITY ? metal::exp(shift) : 0.0f;
        total += weight * s[strip * 2];
        products += weight > 0 ? weight * (s[strip * 2 + 1] + s[strip * 2] * shift) : 0.0f;
    }
    total = lane_total(total);
    products = lane_total(products);
    if (lane == 0) {
        confidence[row] = 1.0f / total;
        entropy[row] = metal::log(total) - products / total;
    }
""",
)


def draft_signals(logits: Array, k: int) -> DraftSignals:
    """`common.signals.draft_signals` on Metal: logits [..., V] -> values, ids int32 [..., K], confidence, entropy [...].

    Rows that hold NaN, or nothing above -inf, give NaN or meaningless signals but stay in bounds. Raises `DSpineError`
    where k is not 1..min(V, 64).
    """
    mx = mlx()
    vocabulary = logits.shape[-1]
    if not 1 <= k <= min(vocabulary, MAX_K):
        raise DSpineError(f"draft_signals: k must be 1..{min(vocabulary, MAX_K)} (the vocabulary, at most {MAX_K}), got {k}")
    lead, rows, strips = tuple(logits.shape[:-1]), rows_of(logits), ceil_div(vocabulary, STRIP)
    if rows == 0:
        empty = mx.zeros(lead, dtype=mx.float32)
        wide = mx.zeros((*lead, k), dtype=mx.float32)
        return DraftSignals(wide, wide.astype(mx.int32), empty, empty, empty.astype(mx.bool_))
    parts = launch(
        STRIPS,
        [logits, mx.array([vocabulary, strips, k], dtype=mx.int32)],
        template=[],
        groups=(strips, rows, 1),
        threads=SIMD * SIMDS,
        shapes=[(rows, strips, k), (rows, strips, k), (rows, strips, 2)],
        dtypes=[mx.float32, mx.int32, mx.float32],
    )
    outputs = launch(
        MERGE,
        [*parts, mx.array([strips, k], dtype=mx.int32)],
        template=[("STRIPS_PER_LANE", ceil_div(strips, SIMD))],
        groups=(rows, 1, 1),
        threads=SIMD,
        shapes=[(*lead, k), (*lead, k), lead, lead],
        dtypes=[mx.float32, mx.int32, mx.float32, mx.float32],
    )
    return DraftSignals(*outputs, core.rows_finite(logits.astype(mx.float32)))  # runs only where it is read


def supports(logits: Array, k: int) -> bool:
    """Float dtypes, K up to 64."""
    return floating(logits) and k <= MAX_K


def register() -> None:
    """Put the kernel in the core's registry."""
    register_kernel(core.draft_signals.__name__, function=draft_signals, supports=supports, **METAL)
