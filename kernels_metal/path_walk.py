# twin: dspine.common.transition.path_walk
"""The walk over the transition cache, greedy or drawn from given uniforms: one simdgroup a batch row, one launch.

Lane j holds candidate j of the current row; the pick passes to the next row by shuffles. K is at most 32.
"""

from __future__ import annotations

from typing import Any

from dspine.common import transition as core
from dspine.common.errors import DSpineError
from dspine.common.registry import register_kernel
from dspine.kernels_metal._launch import METAL, SIMD, MetalSource, launch, mlx
from dspine.kernels_metal._source import EXTREMES

Array = Any
MAX_CANDIDATES = 32

GREEDY = MetalSource(
    name="dspine_path_walk",
    inputs=("scores", "candidates", "sizes"),
    outputs=("tokens",),
    header=EXTREMES,
    body="""
    // sizes: M, K; one simdgroup a batch row
    const int steps = sizes[0], count = sizes[1];
    const int lane = int(thread_index_in_simdgroup);
    const size_t batch = threadgroup_position_in_grid.x;
    int pick = 0;  // every row 0 of T_1 is the anchor's
    for (int t = 0; t < steps; ++t) {
        const size_t at = batch * steps + t;
        const float score = lane < count ? float(scores[(at * count + pick) * count + lane]) : -INFINITY;
        const float best = lane_maximum(score);
        pick = lane_minimum(lane < count && score == best ? lane : 32);  // of equal scores the lower
        pick = pick == 32 ? 0 : pick;  // only NaN scores get here
        if (lane == 0) {
            tokens[at] = candidates[at * count + pick];
        }
    }
""",
)

SAMPLED = MetalSource(
    name="dspine_path_walk_sampled",
    inputs=("scores", "candidates", "uniforms", "temperature", "sizes"),
    outputs=("tokens", "q"),
    header=EXTREMES,
    body="""
    // sizes: M, K; one simdgroup a batch row; q is exactly what each token is drawn from
    const int steps = sizes[0], count = sizes[1];
    const int lane = int(thread_index_in_simdgroup);
    const size_t batch = threadgroup_position_in_grid.x;
    int pick = 0;
    for (int t = 0; t < steps; ++t) {
        const size_t at = batch * steps + t;
        const float score = lane < count ? float(scores[(at * count + pick) * count + lane]) / temperature : -INFINITY;
        const float highest = lane_maximum(score);  // by all lanes: never inside a condition
        const float weight = lane < count ? metal::exp(score - highest) : 0.0f;
        float total = weight;
        for (ushort offset = 16; offset > 0; offset >>= 1) {
            total += simd_shuffle_xor(total, offset);
        }
        const float p = weight / total;
        float running = p;  // inclusive sum over the lanes
        for (ushort offset = 1; offset < 32; offset <<= 1) {
            const float before = simd_shuffle_up(running, offset);
            running += lane >= int(offset) ? before : 0.0f;
        }
        const float threshold = uniforms[at] * simd_shuffle(running, ushort(31));
        const int last = metal::max(lane_maximum(p > 0 ? lane : -1), 0);  // weight 0 is never drawn
        pick = metal::min(lane_minimum(p > 0 && running > threshold ? lane : 32), last);
        if (lane < count) {
            q[at * count + lane] = p;
        }
        if (lane == 0) {
            tokens[at] = candidates[at * count + pick];
        }
    }
""",
)


def path_walk(scores: Array, candidates: Array) -> Array:
    """`common.transition.path_walk` on Metal: scores [..., M, K, K], candidates int [..., M, K] -> tokens [..., M]."""
    mx = mlx()
    _check("path_walk", scores, candidates)
    *lead, steps, count = candidates.shape
    if 0 in candidates.shape:
        return mx.zeros((*lead, steps), dtype=candidates.dtype)
    (tokens,) = launch(
        GREEDY,
        [scores, candidates, mx.array([steps, count], dtype=mx.int32)],
        template=[],
        groups=(candidates.size // (steps * count), 1, 1),
        threads=SIMD,
        shapes=[(*lead, steps)],
        dtypes=[candidates.dtype],
    )
    return tokens


def path_walk_sampled(scores: Array, candidates: Array, uniforms: Array, temperature: float) -> tuple[Array, Array]:
    """`common.transition.path_walk_sampled` on Metal: with uniforms [..., M] -> tokens [..., M], q float32 [..., M, K]."""
    mx = mlx()
    _check("path_walk_sampled", scores, candidates)
    *lead, steps, count = candidates.shape
    if tuple(uniforms.shape) != (*lead, steps):
        raise DSpineError(f"path_walk_sampled: uniforms must have shape {(*lead, steps)}, got {tuple(uniforms.shape)}")
    if not temperature > 0:
        raise DSpineError(f"path_walk_sampled: temperature must be above 0, got {temperature}; use path_walk for 0")
    if 0 in candidates.shape:
        return mx.zeros((*lead, steps), dtype=candidates.dtype), mx.zeros(candidates.shape, dtype=mx.float32)
    tokens, q = launch(
        SAMPLED,
        [
            *(scores, candidates, uniforms.astype(mx.float32), mx.array(temperature, dtype=mx.float32)),
            mx.array([steps, count], dtype=mx.int32),
        ],
        template=[],
        groups=(candidates.size // (steps * count), 1, 1),
        threads=SIMD,
        shapes=[(*lead, steps), candidates.shape],
        dtypes=[candidates.dtype, mx.float32],
    )
    return tokens, q


def _check(where: str, scores: Array, candidates: Array) -> None:
    if candidates.ndim < 2 or tuple(scores.shape) != (*candidates.shape, candidates.shape[-1]):
        raise DSpineError(
            f"{where}: scores [..., M, K, K] and candidates [..., M, K] expected, got {tuple(scores.shape)} and "
            f"{tuple(candidates.shape)}"
        )
    if "int" not in str(candidates.dtype):
        raise DSpineError(f"{where}: candidates must be integers, got {candidates.dtype}")
    if candidates.shape[-1] > MAX_CANDIDATES:
        raise DSpineError(f"{where}: at most {MAX_CANDIDATES} candidates on Metal, got {candidates.shape[-1]}")


def supports(scores: Array, candidates: Array, *rest: Any) -> bool:
    """Up to 32 candidates a row."""
    return candidates.shape[-1] <= MAX_CANDIDATES


def register() -> None:
    """Put both kernels in the core's registry."""
    register_kernel(core.path_walk.__name__, function=path_walk, supports=supports, **METAL)
    register_kernel(core.path_walk_sampled.__name__, function=path_walk_sampled, supports=supports, **METAL)
