# twin: dspine.common.quantized_rows.quantized_rows
"""A few rows times packed weights: every weight is read and unpacked once, whatever the number of rows (2..16).

MLX has one kernel for a single row, which reads the weights again for each row, and one for many, which wastes most of its
tile on a few. A simdgroup owns COLS columns and all rows; its lanes split the inner width.
"""

from __future__ import annotations

from typing import Any

from dspine.common import quantized_rows as core
from dspine.common.registry import register_kernel
from dspine.kernels_metal._launch import METAL, SIMD, MetalSource, ceil_div, floating, launch, mlx
from dspine.kernels_metal._packed import PACKED

Array = Any
SIMDS, COLS, MOST_ROWS = 4, 4, 16

SOURCE = MetalSource(
    name="dspine_quantized_rows",
    inputs=("x", "words", "scales", "biases", "sizes"),
    outputs=("out",),
    header=PACKED,
    body="""
    // sizes: rows of x, inner width, columns
    constexpr int COLS = 4, TOTALS = ROWS * COLS < 32 ? ROWS * COLS : 32;
    constexpr int WORDS = pack_words(BITS), VALUES = WORDS * 32 / BITS;
    const int rows = sizes[0], width = sizes[1], columns = sizes[2];
    const uint lane = thread_index_in_simdgroup;
    const uint simd = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    const int column0 = int(simd) * COLS;
    decltype(x + 0) left[ROWS];
    decltype(words + 0) packed[COLS];
    decltype(scales + 0) scale[COLS];
    decltype(scales + 0) bias[COLS];
    DSPINE_UNROLL for (int r = 0; r < ROWS; ++r) {  // rows and columns past the end read the last one and are not written
        left[r] = x + size_t(min(r, rows - 1)) * width;
    }
    DSPINE_UNROLL for (int c = 0; c < COLS; ++c) {
        const size_t column = size_t(min(column0 + c, columns - 1));
        packed[c] = words + column * (width / VALUES * WORDS);
        scale[c] = scales + column * (width / GROUP);
        bias[c] = biases + column * (width / GROUP);
    }
    float sums[ROWS * COLS];
    DSPINE_UNROLL for (int i = 0; i < ROWS * COLS; ++i) {
        sums[i] = 0;
    }
    add_packed<ROWS, COLS, BITS, GROUP>(sums, left, packed, scale, bias, width, lane);
    DSPINE_UNROLL for (int part = 0; part < ROWS * COLS / TOTALS; ++part) {
        const float total = lane_totals<TOTALS>(sums + part * TOTALS, lane);
        const int index = part * TOTALS + int(lane) / (32 / TOTALS), row = index / COLS, column = column0 + index % COLS;
        if (int(lane) % (32 / TOTALS) == 0 && row < rows && column < columns) {
            out[size_t(row) * columns + column] = X(total);
        }
    }
""",
)


def quantized_rows(x: Array, words: Array, scales: Array, biases: Array, bits: int, group_size: int) -> Array:
    """`common.quantized_rows.quantized_rows` on Metal, for 1..16 rows."""
    core.check_packed("quantized_rows", x, words, scales, biases, bits, group_size)
    mx = mlx()
    (rows, width), columns = x.shape, words.shape[0]
    tile = next(size for size in (2, 4, 8, 16) if size >= rows)
    (out,) = launch(
        SOURCE,
        [x, words, scales, biases.astype(scales.dtype), mx.array([rows, width, columns], dtype=mx.int32)],
        template=[("X", x.dtype), ("ROWS", tile), ("BITS", bits), ("GROUP", group_size)],
        groups=(ceil_div(columns, COLS * SIMDS), 1, 1),
        threads=SIMD * SIMDS,
        shapes=[(rows, columns)],
        dtypes=[x.dtype],
    )
    return out


def supports(x: Array, words: Array, scales: Array, biases: Array, bits: int, group_size: int) -> bool:
    """Float rows, 1..16 of them; whole packs, each within one group."""
    pack = 32 // bits if 32 % bits == 0 else 16 if bits == 6 else 32
    fits = x.ndim == 2 and words.ndim == 2 and 1 <= x.shape[0] <= MOST_ROWS and words.shape[0] > 0
    return fits and bits in core.BITS and group_size % pack == 0 and floating(x, scales, biases)


def register() -> None:
    """Put the kernel in the core's registry."""
    register_kernel(core.quantized_rows.__name__, function=quantized_rows, supports=supports, **METAL)
