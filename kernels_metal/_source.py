"""Metal text shared by the kernels: sums over the lanes of a simdgroup in one fixed order, maxima, dot products of rows.

Sums are explicit `simd_shuffle_xor` steps 16, 8, 4, 2, 1, so their order is part of the source. Pointers are template
parameters, because MLX places inputs of fewer than 8 elements in `constant` and all others in `device` memory.
"""

from __future__ import annotations

REDUCE = """
// Loops over a thread's arrays are unrolled whole, so that the arrays stay in registers.
#define DSPINE_UNROLL _Pragma("clang loop unroll(full)")

// Totals over the 32 lanes of N values at once (N a power of two, at most 32): lane l returns the total of value
// l / (32 / N). Each step halves the values a lane carries; every total is the same tree of sums for any N.
template <int N>
inline float lane_totals(thread float* values, uint lane) {
    int count = N;
    DSPINE_UNROLL for (ushort offset = 16; offset > 0; offset >>= 1) {
        if (count > 1) {
            count >>= 1;
            const bool upper = (lane & offset) != 0;
            DSPINE_UNROLL for (int i = 0; i < count; ++i) {
                const float kept = upper ? values[i + count] : values[i];
                const float sent = upper ? values[i] : values[i + count];
                values[i] = kept + simd_shuffle_xor(sent, offset);
            }
        } else {
            values[0] += simd_shuffle_xor(values[0], offset);
        }
    }
    return values[0];
}

inline float lane_total(float value) {
    for (ushort offset = 16; offset > 0; offset >>= 1) {
        value += simd_shuffle_xor(value, offset);
    }
    return value;
}

// The total over a threadgroup of S simdgroups, in every thread; `partial` holds S floats and may be reused after it.
template <int S>
inline float group_total(float value, threadgroup float* partial, uint lane, uint simd) {
    value = lane_total(value);
    if (lane == 0) {
        partial[simd] = value;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0;
    for (int s = 0; s < S; ++s) {
        total += partial[s];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return total;
}
"""

DOT = """
// values[r * C + c] += x[row r] . w[column c], this lane's share (k = lane, lane + 32, ...).
template <int R, int C, typename X, typename W>
inline void add_dots(thread float* values, thread const X* x, thread const W* w, int length, uint lane) {
    for (int k = int(lane); k < length; k += 32) {
        float right[C];
        DSPINE_UNROLL for (int c = 0; c < C; ++c) {
            right[c] = float(w[c][k]);
        }
        DSPINE_UNROLL for (int r = 0; r < R; ++r) {
            const float left = float(x[r][k]);
            DSPINE_UNROLL for (int c = 0; c < C; ++c) {
                values[r * C + c] += left * right[c];
            }
        }
    }
}
"""

BEST = """
struct Best {
    float value;
    int id;
};

// The larger value, of equal ones the lower id. An id of -1 means none; NaN is never the larger.
inline Best better(Best a, Best b) {
    const bool second = b.id >= 0 && (a.id < 0 || b.value > a.value || (b.value == a.value && b.id < a.id));
    return second ? b : a;
}

inline Best lane_best(Best mine) {
    for (ushort offset = 16; offset > 0; offset >>= 1) {
        Best other;
        other.value = simd_shuffle_xor(mine.value, offset);
        other.id = simd_shuffle_xor(mine.id, offset);
        mine = better(mine, other);
    }
    return mine;
}

template <int S>
inline Best group_best(Best mine, threadgroup float* values, threadgroup int* ids, uint lane, uint simd) {
    mine = lane_best(mine);
    if (lane == 0) {
        values[simd] = mine.value;
        ids[simd] = mine.id;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    mine.value = values[0];
    mine.id = ids[0];
    for (int s = 1; s < S; ++s) {
        Best other;
        other.value = values[s];
        other.id = ids[s];
        mine = better(mine, other);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return mine;
}
"""

EXTREMES = """
inline float lane_maximum(float value) {
    for (ushort offset = 16; offset > 0; offset >>= 1) {
        value = metal::max(value, simd_shuffle_xor(value, offset));
    }
    return value;
}
inline int lane_minimum(int value) {
    for (ushort offset = 16; offset > 0; offset >>= 1) {
        value = metal::min(value, simd_shuffle_xor(value, offset));
    }
    return value;
}
inline int lane_maximum(int value) {
    for (ushort offset = 16; offset > 0; offset >>= 1) {
        value = metal::max(value, simd_shuffle_xor(value, offset));
    }
    return value;
}
"""

LOG = """
// log(1 + x) for x >= 0, accurate near 0 too (Metal has no log1p).
inline float log_plus_one(float x) {
    const float y = 1.0f + x;
    return y == 1.0f ? x : metal::log(y) * (x / (y - 1.0f));
}
"""
