# twin: dspine.common.transition.transition_scores
"""The transition cache: the last layer's injection for all K predecessors of each row, final norm, K x K scores.

Five launches: readout (`_linear`) and its norm, gate (`injection_gate`, float32 out), W (g * m) (`_linear`), and a threadgroup
a pair (row, predecessor) that writes back, norms, and takes the K dot products with the row's own LM-head rows. Everything
between the inputs and the scores stays float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dspine.common import transition as core
from dspine.common.errors import DSpineError
from dspine.common.injection import InjectionWeights
from dspine.common.registry import register_kernel
from dspine.kernels_metal._launch import METAL, SIMD, MetalSource, floating, launch, mlx
from dspine.kernels_metal._linear import linear
from dspine.kernels_metal._source import REDUCE
from dspine.kernels_metal.injection_gate import injection_gate

Array = Any
SIMDS = 8
MAX_CANDIDATES = 32  # sums a thread keeps

SOURCE = MetalSource(
    name="dspine_transition_scores",
    inputs=("hidden", "delta", "norm_weight", "eps", "candidate_rows", "sizes"),
    outputs=("scores",),
    header=REDUCE,
    body="""
    // sizes: width H; K and P (K up to a power of two) are compiled in; threadgroup x: row * K + predecessor
    constexpr int SIMDS = 8;
    threadgroup float partial[SIMDS];
    threadgroup float dots[SIMDS * P];
    const int width = sizes[0];
    const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    const int thread_id = int(thread_position_in_threadgroup.x);
    const size_t pair = threadgroup_position_in_grid.x, row = pair / K;
    const auto u = hidden + row * width;
    const auto d = delta + pair * width;
    const auto heads = candidate_rows + row * K * width;
    float squares = 0;
    for (int k = thread_id; k < width; k += 32 * SIMDS) {
        const float value = float(u[k]);
        squares += value * value;
    }
    const float rms = metal::sqrt(group_total<SIMDS>(squares, partial, lane, simd) / width);
    float after = 0;
    float sums[P];
    DSPINE_UNROLL for (int j = 0; j < P; ++j) {
        sums[j] = 0;
    }
    for (int k = thread_id; k < width; k += 32 * SIMDS) {  // the norm's scale is common to all, so it comes last
        const float value = float(u[k]) + rms * d[k];
        after += value * value;
        const float weighted = value * float(norm_weight[k]);
        DSPINE_UNROLL for (int j = 0; j < K; ++j) {
            sums[j] += weighted * float(heads[size_t(j) * width + k]);
        }
    }
    const float scale = 1.0f / metal::sqrt(group_total<SIMDS>(after, partial, lane, simd) / width + eps);
    const float total = lane_totals<P>(sums, lane);
    if (lane % (32 / P) == 0) {
        dots[simd * P + lane / (32 / P)] = total;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_id < K) {
        float score = 0;
        for (int s = 0; s < SIMDS; ++s) {
            score += dots[s * P + thread_id];
        }
        scores[pair * K + thread_id] = score * scale;
    }
""",
)


def transition_scores(
    hidden: Array, predecessor_codes: Array, candidate_rows: Array, weights: InjectionWeights, norm: Callable[[Array], Array]
) -> Array:
    """`common.transition.transition_scores` on Metal: [..., M, H], [..., M, K, r], [..., M, K, H] -> float32 [..., M, K, K].

    Raises `DSpineError` on shapes that do not fit.
    """
    mx = mlx()
    _check(hidden, predecessor_codes, candidate_rows)
    *lead, count, width = candidate_rows.shape
    pairs = count
    for size in lead:
        pairs *= size
    if pairs == 0:
        return mx.zeros((*lead, count, count), dtype=mx.float32)
    # sqrt(r) x / |x| is x / RMS(x); the epsilon only keeps a row of zeros at zero
    receiver = mx.expand_dims(mx.fast.rms_norm(linear(hidden, weights.readout), None, 1e-30), axis=-2)
    gated = injection_gate(receiver, predecessor_codes, weights, out_dtype=mx.float32)
    padded = 1 << (count - 1).bit_length()
    (scores,) = launch(
        SOURCE,
        [
            *(hidden, linear(gated, weights.write), norm.weight, mx.array(norm.eps, dtype=mx.float32)),
            *(candidate_rows, mx.array([width], dtype=mx.int32)),
        ],
        template=[("K", count), ("P", padded)],
        groups=(pairs, 1, 1),
        threads=SIMD * SIMDS,
        shapes=[(*lead, count, count)],
        dtypes=[mx.float32],
    )
    return scores


def _check(hidden: Array, codes: Array, rows: Array) -> None:
    lead, width = tuple(hidden.shape[:-1]), hidden.shape[-1]
    if tuple(rows.shape[:-2]) != lead or rows.shape[-1] != width:
        raise DSpineError(f"transition_scores: candidate_rows must be {lead} + (K, {width}), got {tuple(rows.shape)}")
    if tuple(codes.shape[:-1]) != tuple(rows.shape[:-1]):
        raise DSpineError(
            f"transition_scores: predecessor_codes must be {tuple(rows.shape[:-1])} + (r,), got {tuple(codes.shape)}"
        )


def supports(hidden: Array, predecessor_codes: Array, candidate_rows: Array, weights: Any, norm: Any) -> bool:
    """Float dtypes, K up to 32, and a norm that shows its `weight` and `eps`."""
    fused = hasattr(norm, "weight") and hasattr(norm, "eps") and floating(norm.weight)
    arrays = (hidden, predecessor_codes, candidate_rows, weights.readout, weights.write, weights.bias, weights.message)
    return (
        fused
        and floating(*arrays, weights.receiver_gate, weights.predecessor_gate)
        and candidate_rows.shape[-2] <= MAX_CANDIDATES
    )


def register() -> None:
    """Put the kernel in the core's registry."""
    register_kernel(core.transition_scores.__name__, function=transition_scores, supports=supports, **METAL)
