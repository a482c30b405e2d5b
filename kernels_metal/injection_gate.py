# twin: dspine.common.injection.injection_gate
"""g * m of the injection in one launch: three products, the sigmoid and the gate, all in float32, rounded once.

A simdgroup owns 2 columns (2 rows of each weight matrix) and 8 rows of the block; its lanes split the width r. Where all 8
rows share one receiver (the K predecessors of a transition), the receiver's product is taken once.
"""

from __future__ import annotations

from typing import Any

from dspine.common import injection as core
from dspine.common.errors import DSpineError
from dspine.common.registry import register_kernel
from dspine.kernels_metal._launch import METAL, SIMD, MetalSource, ceil_div, floating, launch, mlx, rows_of
from dspine.kernels_metal._source import DOT, REDUCE

Array = Any
SIMDS, ROWS, COLS = 4, 8, 2

SOURCE = MetalSource(
    name="dspine_injection_gate",
    inputs=("receiver", "predecessor", "receiver_gate", "predecessor_gate", "message", "bias", "sizes"),
    outputs=("gated",),
    header=REDUCE + DOT,
    body="""
    // sizes: rows of the predecessor, r, a; predecessor row n hears receiver row n / REPEAT
    constexpr int ROWS = 8, COLS = 2;
    const int rows = sizes[0], width = sizes[1], messages = sizes[2];
    const uint lane = thread_index_in_simdgroup;
    const int row0 = int(threadgroup_position_in_grid.y) * ROWS;
    const uint simd = threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup;
    const int column0 = int(simd) * COLS;

    decltype(receiver + 0) z[ROWS];
    decltype(predecessor + 0) p[ROWS];
    DSPINE_UNROLL for (int r = 0; r < ROWS; ++r) {  // rows and columns past the end read the last one and are not written
        const int row = min(row0 + r, rows - 1);
        z[r] = receiver + size_t(row / REPEAT) * width;
        p[r] = predecessor + size_t(row) * width;
    }
    decltype(receiver_gate + 0) from_z[COLS];
    decltype(predecessor_gate + 0) from_p[COLS];
    decltype(message + 0) to_message[COLS];
    DSPINE_UNROLL for (int c = 0; c < COLS; ++c) {
        const int column = min(column0 + c, messages - 1);
        from_z[c] = receiver_gate + size_t(column) * width;
        from_p[c] = predecessor_gate + size_t(column) * width;
        to_message[c] = message + size_t(column) * width;
    }

    float sums[2 * ROWS * COLS];  // the gate's, then the message's
    DSPINE_UNROLL for (int i = 0; i < 2 * ROWS * COLS; ++i) {
        sums[i] = 0;
    }
    if (REPEAT % ROWS == 0) {
        float shared[COLS];
        DSPINE_UNROLL for (int c = 0; c < COLS; ++c) {
            shared[c] = 0;
        }
        add_dots<1, COLS>(shared, z, from_z, width, lane);
        DSPINE_UNROLL for (int i = 0; i < ROWS * COLS; ++i) {
            sums[i] = shared[i % COLS];
        }
    } else {
        add_dots<ROWS, COLS>(sums, z, from_z, width, lane);
    }
    add_dots<ROWS, COLS>(sums, p, from_p, width, lane);
    add_dots<ROWS, COLS>(sums + ROWS * COLS, p, to_message, width, lane);
    const float total = lane_totals<2 * ROWS * COLS>(sums, lane);
    const float heard = simd_shuffle_xor(total, ushort(ROWS * COLS));  // lanes 0..15 hold gates, 16..31 messages
    const int row = row0 + int(lane) / COLS, column = column0 + int(lane) % COLS;
    if (lane < ROWS * COLS && row < rows && column < messages) {
        const float gate = total + float(bias[column]);
        const float small = metal::exp(-metal::abs(gate));
        const float opened = (gate >= 0 ? 1.0f : small) / (1.0f + small);
        gated[size_t(row) * messages + column] = OUT(opened * heard);
    }
""",
)


def injection_gate(receiver: Array, predecessor: Array, weights: Any, out_dtype: Any | None = None) -> Array:
    """`common.injection.injection_gate` on Metal: receiver, predecessor [..., r] (broadcasting) -> [..., a].

    Sums in float32; the result in the dtype of `predecessor`, or `out_dtype` (a following kernel takes float32).
    Raises `DSpineError` on widths that do not fit.
    """
    mx = mlx()
    messages, width = weights.message.shape
    _check(receiver, predecessor, weights)
    shape, receiver, predecessor, repeat = _broadcast(receiver, predecessor)
    out_dtype = predecessor.dtype if out_dtype is None else out_dtype
    rows = rows_of(predecessor)
    if rows == 0:
        return mx.zeros((*shape, messages), dtype=out_dtype)
    (out,) = launch(
        SOURCE,
        [
            *(receiver, predecessor, weights.receiver_gate, weights.predecessor_gate, weights.message, weights.bias),
            mx.array([rows, width, messages], dtype=mx.int32),
        ],
        template=[("OUT", out_dtype), ("REPEAT", repeat)],
        groups=(ceil_div(messages, COLS * SIMDS), ceil_div(rows, ROWS), 1),
        threads=SIMD * SIMDS,
        shapes=[(*shape, messages)],
        dtypes=[out_dtype],
    )
    return out


def _broadcast(receiver: Array, predecessor: Array) -> tuple[tuple[int, ...], Array, Array, int]:
    """Common leading shape, both arrays, and how many consecutive predecessor rows share a receiver row."""
    mx = mlx()
    if receiver.shape == predecessor.shape:
        return tuple(predecessor.shape[:-1]), receiver, predecessor, 1
    same = receiver.ndim == predecessor.ndim and receiver.ndim > 1 and receiver.shape[-2] == 1
    if same and receiver.shape[:-2] == predecessor.shape[:-2] and predecessor.shape[-2] > 0:
        return tuple(predecessor.shape[:-1]), receiver, predecessor, predecessor.shape[-2]
    receiver, predecessor = mx.broadcast_arrays(receiver, predecessor)
    return tuple(predecessor.shape[:-1]), receiver, predecessor, 1


def _check(receiver: Array, predecessor: Array, weights: Any) -> None:
    messages, width = weights.message.shape
    for name, x, shape in (
        ("receiver", receiver.shape[-1:], (width,)),
        ("predecessor", predecessor.shape[-1:], (width,)),
        ("receiver_gate", weights.receiver_gate.shape, (messages, width)),
        ("predecessor_gate", weights.predecessor_gate.shape, (messages, width)),
        ("bias", weights.bias.shape, (messages,)),
    ):
        if tuple(x) != shape:
            raise DSpineError(
                f"injection_gate: {name} must end in {shape} for a message of {messages} x {width}, got {tuple(x)}"
            )


def supports(receiver: Array, predecessor: Array, weights: Any) -> bool:
    """float32, bfloat16 and float16 throughout."""
    gates = (weights.receiver_gate, weights.predecessor_gate, weights.message, weights.bias)
    return floating(receiver, predecessor, *gates)


def register() -> None:
    """Put the kernel in the core's registry."""
    register_kernel(core.injection_gate.__name__, function=injection_gate, supports=supports, **METAL)
