# twin: dspine.common.acceptance.accept_greedy, dspine.common.acceptance.accept_point_mass
"""Acceptance, greedy and point-mass, with a limit of its own for each row of the batch.

Greedy: strips of the vocabulary give their maxima, then a simdgroup a batch row compares and counts. Point-mass: one
threadgroup a batch row does everything in one launch: the tests, then an inverse-CDF draw in two levels (blocks of 256) from
the row after the last accepted draft, without the rejected draft.
"""

from __future__ import annotations

from typing import Any

from dspine.common import acceptance as core
from dspine.common.acceptance import Verdict
from dspine.common.errors import DSpineError
from dspine.common.registry import register_kernel
from dspine.kernels_metal._launch import METAL, SIMD, MetalSource, ceil_div, floating, launch, mlx
from dspine.kernels_metal._source import BEST, EXTREMES, REDUCE

Array = Any
SIMDS, PER_THREAD = 8, 16
STRIP = SIMD * SIMDS * PER_THREAD
BLOCK = 256
DRAW_SIMDS = 32
MAX_BLOCKS = 4096  # block sums in threadgroup memory: 16 KB, a vocabulary of 1,048,576

STRIPS = MetalSource(
    name="dspine_accept_strips",
    inputs=("logits", "sizes"),
    outputs=("values", "ids"),
    header=BEST,
    body="""
    // sizes: V, strips
    constexpr int SIMDS = 8, EACH = 16, THREADS = 32 * SIMDS;
    threadgroup float best_values[SIMDS];
    threadgroup int best_ids[SIMDS];
    const int vocabulary = sizes[0], strips = sizes[1];
    const size_t row = threadgroup_position_in_grid.y, strip = threadgroup_position_in_grid.x;
    const auto x = logits + row * vocabulary;
    Best best;
    best.value = 0;
    best.id = -1;
    for (int i = 0; i < EACH; ++i) {
        Best other;
        other.id = int(strip) * THREADS * EACH + i * THREADS + int(thread_position_in_threadgroup.x);
        if (other.id < vocabulary) {
            other.value = float(x[other.id]);
            best = better(best, other);
        }
    }
    best = group_best<SIMDS>(best, best_values, best_ids, thread_index_in_simdgroup, simdgroup_index_in_threadgroup);
    if (thread_position_in_threadgroup.x == 0) {
        values[row * strips + strip] = best.value;
        ids[row * strips + strip] = best.id;
    }
""",
)

GREEDY = MetalSource(
    name="dspine_accept_greedy",
    inputs=("strip_values", "strip_ids", "draft", "limit", "sizes"),
    outputs=("accepted", "next_token"),
    header=BEST,
    body="""
    // sizes: w, strips, V; one simdgroup a batch row
    const int tokens = sizes[0], strips = sizes[1], vocabulary = sizes[2];
    const int lane = int(thread_index_in_simdgroup);
    const size_t batch = threadgroup_position_in_grid.x;
    const int most = metal::min(int(limit[batch]), tokens - 1);
    int count = 0, token = 0;
    for (int i = 0; i < tokens; ++i) {  // the same in every lane: rows up to and including the first that differs
        Best best;
        best.value = 0;
        best.id = -1;
        for (int s = lane; s < strips; s += 32) {
            Best other;
            other.value = strip_values[(batch * tokens + i) * strips + s];
            other.id = strip_ids[(batch * tokens + i) * strips + s];
            best = better(best, other);
        }
        token = metal::clamp(lane_best(best).id, 0, vocabulary - 1);
        if (i >= most || int(draft[batch * (tokens - 1) + i]) != token) {
            break;
        }
        count = i + 1;
    }
    if (lane == 0) {
        accepted[batch] = count;
        next_token[batch] = token;
    }
""",
)

POINT_MASS = MetalSource(
    name="dspine_accept_point_mass",
    inputs=("p", "draft", "limit", "u_accept", "u_draw", "sizes"),
    outputs=("accepted", "next_token"),
    header=REDUCE
    + EXTREMES
    + """
struct Draw {
    int index;
    float before;
};

// First index whose running sum exceeds the threshold, and the sum before it; only positive weights are drawn. The n weights
// lie in consecutive runs, one a lane. `threshold` comes in as a share of the total where `share`. All lanes return the same.
inline Draw draw_index(threadgroup const float* weights, int n, thread float& threshold, bool share, int lane) {
    const int run = (n + 31) / 32, first = metal::min(lane * run, n), end = metal::min(first + run, n);
    float sum = 0;
    for (int i = first; i < end; ++i) {
        sum += weights[i];
    }
    float running = sum;
    for (ushort offset = 1; offset < 32; offset <<= 1) {
        const float other = simd_shuffle_up(running, offset);
        running += lane >= int(offset) ? other : 0.0f;
    }
    threshold = share ? threshold * simd_shuffle(running, ushort(31)) : threshold;
    const int last = metal::max(lane_maximum(sum > 0 ? lane : -1), 0);
    const int chosen = metal::min(lane_minimum(sum > 0 && running > threshold ? lane : 32), last);
    float before = simd_shuffle(running, ushort(metal::max(chosen - 1, 0)));
    before = chosen > 0 ? before : 0.0f;
    Draw drawn;
    drawn.index = metal::min(chosen * run, n - 1);
    drawn.before = before;
    for (int i = chosen * run; i < metal::min(chosen * run + run, n); ++i) {
        const float weight = weights[i];
        if (weight > 0) {
            drawn.index = i;
            drawn.before = before;
            if (before + weight > threshold) {
                break;
            }
        }
        before += weight;
    }
    return drawn;
}
""",
    body="""
    // sizes: w, V, blocks of 256
    constexpr int SIMDS = 32, BLOCK = 256;
    threadgroup float sums[BLOCKS];
    threadgroup float inside[BLOCK];
    threadgroup float partial[SIMDS];
    const int tokens = sizes[0], vocabulary = sizes[1], blocks = sizes[2];
    const int lane = int(thread_index_in_simdgroup), simd = int(simdgroup_index_in_threadgroup);
    const size_t batch = threadgroup_position_in_grid.x;
    const int most = metal::min(int(limit[batch]), tokens - 1);
    int count = 0, refused = -1;
    while (count < most) {  // at most 15 draws, the same in every thread
        const size_t at = batch * (tokens - 1) + count;
        const int token = int(draft[at]);
        const bool known = token >= 0 && token < vocabulary;
        const float chance = known ? p[(batch * tokens + count) * vocabulary + token] : 0.0f;
        if (!(u_accept[at] < chance)) {
            refused = known ? token : -1;
            break;
        }
        ++count;
    }
    const auto row = p + (batch * tokens + count) * vocabulary;
    float total = 0;
    for (int attempt = 0; attempt < 2; ++attempt) {  // again with the draft where nothing else has mass
        if (attempt == 0 || (refused >= 0 && !(total > 0))) {
            refused = attempt == 0 ? refused : -1;
            float mine = 0;
            for (int block = simd; block < blocks; block += SIMDS) {
                float sum = 0;
                for (int i = block * BLOCK + lane; i < metal::min(block * BLOCK + BLOCK, vocabulary); i += 32) {
                    sum += i == refused ? 0.0f : row[i];
                }
                sum = lane_total(sum);
                mine += sum;
                if (lane == 0) {
                    sums[block] = sum;
                }
            }
            total = group_total<SIMDS>(lane == 0 ? mine : 0.0f, partial, uint(lane), uint(simd));
        }
    }
    float threshold = u_draw[batch * tokens + count];
    const Draw outer = draw_index(sums, blocks, threshold, true, lane);
    for (int i = int(thread_position_in_threadgroup.x); i < BLOCK; i += 32 * SIMDS) {
        const int id = outer.index * BLOCK + i;
        inside[i] = id < vocabulary && id != refused ? row[id] : 0.0f;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    threshold -= outer.before;
    const Draw inner = draw_index(inside, BLOCK, threshold, false, lane);
    if (thread_position_in_threadgroup.x == 0) {
        accepted[batch] = count;
        next_token[batch] = metal::min(outer.index * BLOCK + inner.index, vocabulary - 1);
    }
""",
)


def accept_greedy(logits: Array, draft: Array, limit: Array) -> Verdict:
    """`common.acceptance.accept_greedy` on Metal: logits [B, w, V], draft int [B, w-1], limit int [B] -> int32 [B] each.

    Raises `DSpineError` on shapes that do not fit.
    """
    mx = mlx()
    _check("accept_greedy", "logits", logits, draft, limit)
    batch, tokens, vocabulary = logits.shape
    strips = ceil_div(vocabulary, STRIP)
    values, ids = launch(
        STRIPS,
        [logits, mx.array([vocabulary, strips], dtype=mx.int32)],
        template=[],
        groups=(strips, batch * tokens, 1),
        threads=SIMD * SIMDS,
        shapes=[(batch * tokens, strips)] * 2,
        dtypes=[mx.float32, mx.int32],
    )
    accepted, token = launch(
        GREEDY,
        [values, ids, _some(draft, limit), limit, mx.array([tokens, strips, vocabulary], dtype=mx.int32)],
        template=[],
        groups=(batch, 1, 1),
        threads=SIMD,
        shapes=[(batch,), (batch,)],
        dtypes=[mx.int32, mx.int32],
    )
    return Verdict(accepted, token)


def accept_point_mass(p: Array, draft: Array, limit: Array, u_accept: Array, u_draw: Array) -> Verdict:
    """`common.acceptance.accept_point_mass` on Metal: p float32 [B, w, V], uniforms [B, w-1] and [B, w] -> int32 [B] each.

    A draft outside the vocabulary is refused. Raises `DSpineError` on shapes that do not fit, and above 1,048,576 tokens.
    """
    mx = mlx()
    _check("accept_point_mass", "p", p, draft, limit)
    batch, tokens, vocabulary = p.shape
    for name, x, shape in (("u_accept", u_accept, (batch, tokens - 1)), ("u_draw", u_draw, (batch, tokens))):
        if tuple(x.shape) != shape:
            raise DSpineError(f"accept_point_mass: {name} must have shape {shape}, got {tuple(x.shape)}")
    blocks = ceil_div(vocabulary, BLOCK)
    if blocks > MAX_BLOCKS:
        raise DSpineError(f"accept_point_mass: at most {MAX_BLOCKS * BLOCK} tokens in the vocabulary, got {vocabulary}")
    accepted, token = launch(
        POINT_MASS,
        [
            *(p.astype(mx.float32), _some(draft, limit), limit),
            *(_some(u_accept.astype(mx.float32), limit.astype(mx.float32)), u_draw.astype(mx.float32)),
            mx.array([tokens, vocabulary, blocks], dtype=mx.int32),
        ],
        template=[("BLOCKS", table_size(blocks))],
        groups=(batch, 1, 1),
        threads=SIMD * DRAW_SIMDS,
        shapes=[(batch,), (batch,)],
        dtypes=[mx.int32, mx.int32],
    )
    return Verdict(accepted, token)


def table_size(blocks: int) -> int:
    """Block sums that the kernel is compiled for: a power of two, so that few versions exist."""
    return 1 << max(blocks - 1, 0).bit_length()


def threadgroup_bytes(vocabulary: int) -> int:
    """Threadgroup memory of the point-mass kernel."""
    return 4 * (table_size(ceil_div(vocabulary, BLOCK)) + BLOCK + DRAW_SIMDS)


def _some(x: Array, stand_in: Array) -> Array:
    """`x`, or something to bind where w = 1 leaves it empty (it is not read then)."""
    return x if x.size else stand_in


def _check(where: str, name: str, x: Array, draft: Array, limit: Array) -> None:
    if x.ndim != 3 or 0 in x.shape:
        raise DSpineError(f"{where}: {name} must have shape [B, w, V], got {tuple(x.shape)}")
    batch, tokens, _ = x.shape
    for label, y, shape in (("draft", draft, (batch, tokens - 1)), ("limit", limit, (batch,))):
        if tuple(y.shape) != shape or "int" not in str(y.dtype):
            raise DSpineError(f"{where}: {label} must be int {shape}, got {y.dtype} {tuple(y.shape)}")


def _supports_greedy(logits: Array, draft: Array, limit: Array) -> bool:
    return floating(logits) and 0 not in logits.shape


def _supports_point_mass(p: Array, *rest: Any) -> bool:
    return floating(p) and 0 not in p.shape and ceil_div(p.shape[-1], BLOCK) <= MAX_BLOCKS


def register() -> None:
    """Put both kernels in the core's registry."""
    register_kernel(core.accept_greedy.__name__, function=accept_greedy, supports=_supports_greedy, **METAL)
    register_kernel(core.accept_point_mass.__name__, function=accept_point_mass, supports=_supports_point_mass, **METAL)
