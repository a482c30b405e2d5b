# twin: dspine.common.quantized_rows.gathered_rows
"""Rows times the packed weights of the experts that they were routed to: an expert's weights are read once for its rows.

Picks are sorted by expert first. A threadgroup belongs to one place in that order and COLS columns a simdgroup; only
where a run of equal experts begins (or goes on after ROWS rows) does it work, for all rows of the run up to ROWS.
"""

from __future__ import annotations

from typing import Any

from dspine.common import quantized_rows as core
from dspine.common.registry import register_kernel
from dspine.kernels_metal._launch import METAL, SIMD, MetalSource, ceil_div, floating, launch, mlx
from dspine.kernels_metal._packed import PACKED

Array = Any
SIMDS, COLS, ROWS, MOST_PICKS = 4, 4, 4, 256

SOURCE = MetalSource(
    name="dspine_gathered_rows",
    inputs=("x", "words", "scales", "biases", "order", "sorted", "sizes"),
    outputs=("out",),
    header=PACKED,
    body="""
    // sizes: picks, inner width, columns, picks that share a row of x; order[i]: the pick at place i of the sorted ones
    constexpr int COLS = 4, ROWS = 4;
    constexpr int WORDS = pack_words(BITS), VALUES = WORDS * 32 / BITS;
    const int picks = sizes[0], width = sizes[1], columns = sizes[2], share = sizes[3];
    const uint lane = thread_index_in_simdgroup;
    const uint simd = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    const int place = int(threadgroup_position_in_grid.y), column0 = int(simd) * COLS;
    const int expert = sorted[place];
    int before = 0;
    while (before < place && sorted[place - 1 - before] == expert) {
        ++before;
    }
    if (before % ROWS == 0) {  // the same for the whole threadgroup
        int count = 1;
        while (count < ROWS && place + count < picks && sorted[place + count] == expert) {
            ++count;
        }
        decltype(x + 0) left[ROWS];
        decltype(words + 0) packed[COLS];
        decltype(scales + 0) scale[COLS];
        decltype(scales + 0) bias[COLS];
        DSPINE_UNROLL for (int r = 0; r < ROWS; ++r) {
            left[r] = x + size_t(order[place + min(r, count - 1)] / share) * width;
        }
        DSPINE_UNROLL for (int c = 0; c < COLS; ++c) {
            const size_t column = size_t(expert) * columns + min(column0 + c, columns - 1);
            packed[c] = words + column * (width / VALUES * WORDS);
            scale[c] = scales + column * (width / GROUP);
            bias[c] = biases + column * (width / GROUP);
        }
        float sums[ROWS * COLS];
        DSPINE_UNROLL for (int i = 0; i < ROWS * COLS; ++i) {
            sums[i] = 0;
        }
        add_packed<ROWS, COLS, BITS, GROUP>(sums, left, packed, scale, bias, width, lane);
        const float total = lane_totals<ROWS * COLS>(sums, lane);
        const int index = int(lane) / 2, row = index / COLS, column = column0 + index % COLS;
        if (lane % 2 == 0 && row < count && column < columns) {
            out[size_t(order[place + row]) * columns + column] = X(total);
        }
    }
""",
)


def gathered_rows(x: Array, words: Array, scales: Array, biases: Array, picks: Array, bits: int, group_size: int) -> Array:
    """`common.quantized_rows.gathered_rows` on Metal, for 1..256 picks."""
    core.check_packed("gathered_rows", x, words, scales, biases, bits, group_size)
    mx = mlx()
    (rows, width), columns, count = x.shape, words.shape[1], picks.shape[0]
    order = mx.argsort(picks).astype(mx.int32)
    sizes = mx.array([count, width, columns, count // rows], dtype=mx.int32)
    (out,) = launch(
        SOURCE,
        [x, words, scales, biases.astype(scales.dtype), order, mx.take(picks, order).astype(mx.int32), sizes],
        template=[("X", x.dtype), ("BITS", bits), ("GROUP", group_size)],
        groups=(ceil_div(columns, COLS * SIMDS), count, 1),
        threads=SIMD * SIMDS,
        shapes=[(count, columns)],
        dtypes=[x.dtype],
    )
    return out


def supports(x: Array, words: Array, scales: Array, biases: Array, picks: Array, bits: int, group_size: int) -> bool:
    """Float rows, 1..256 picks; whole packs, each within one group."""
    pack = 32 // bits if 32 % bits == 0 else 16 if bits == 6 else 32
    fits = x.ndim == 2 and words.ndim == 3 and picks.ndim == 1 and words.shape[1] > 0
    fits = fits and 0 < x.shape[0] and 1 <= picks.shape[0] <= MOST_PICKS and picks.shape[0] % x.shape[0] == 0
    return fits and bits in core.BITS and group_size % pack == 0 and floating(x, scales, biases)


def register() -> None:
    """Put the kernel in the core's registry."""
    register_kernel(core.gathered_rows.__name__, function=gathered_rows, supports=supports, **METAL)
