"""x Wᵀ for a few rows, in float32 from any input dtype: MLX's own product would round to bfloat16 in between.

A simdgroup owns 4 columns (rows of W, read once, contiguous) and 8 rows of x; its lanes split the inner width.
"""

from __future__ import annotations

from typing import Any

from dspine.kernels_metal._launch import SIMD, MetalSource, ceil_div, launch, mlx, rows_of
from dspine.kernels_metal._source import DOT, REDUCE

Array = Any
SIMDS, ROWS, COLS = 4, 8, 4

SOURCE = MetalSource(
    name="dspine_linear",
    inputs=("x", "weight", "sizes"),
    outputs=("out",),
    header=REDUCE + DOT,
    body="""
    // sizes: rows of x, inner width, rows of the weight
    constexpr int ROWS = 8, COLS = 4;
    const int rows = sizes[0], width = sizes[1], columns = sizes[2];
    const uint lane = thread_index_in_simdgroup;
    const int row0 = int(threadgroup_position_in_grid.y) * ROWS;
    const uint simd = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    const int column0 = int(simd) * COLS;
    decltype(x + 0) left[ROWS];
    decltype(weight + 0) right[COLS];
    DSPINE_UNROLL for (int r = 0; r < ROWS; ++r) {  // rows and columns past the end read the last one and are not written
        left[r] = x + size_t(min(row0 + r, rows - 1)) * width;
    }
    DSPINE_UNROLL for (int c = 0; c < COLS; ++c) {
        right[c] = weight + size_t(min(column0 + c, columns - 1)) * width;
    }
    float sums[ROWS * COLS];
    DSPINE_UNROLL for (int i = 0; i < ROWS * COLS; ++i) {
        sums[i] = 0;
    }
    add_dots<ROWS, COLS>(sums, left, right, width, lane);
    const float total = lane_totals<ROWS * COLS>(sums, lane);
    const int row = row0 + int(lane) / COLS, column = column0 + int(lane) % COLS;
    if (row < rows && column < columns) {
        out[size_t(row) * columns + column] = total;
    }
""",
)


def linear(x: Array, weight: Array) -> Array:
    """x [..., k], weight [n, k] -> float32 [..., n]; at least one row."""
    mx = mlx()
    rows, (columns, width) = rows_of(x), weight.shape
    (out,) = launch(
        SOURCE,
        [x, weight, mx.array([rows, width, columns], dtype=mx.int32)],
        template=[],
        groups=(ceil_div(columns, COLS * SIMDS), ceil_div(rows, ROWS), 1),
        threads=SIMD * SIMDS,
        shapes=[(*x.shape[:-1], columns)],
        dtypes=[mx.float32],
    )
    return out
