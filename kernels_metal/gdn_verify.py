# twin: dspine.common.gdn.gdn_verify, dspine.common.gdn.gdn_verify_deferred
"""Gated DeltaNet over w = 1..16 tokens at once: outputs and compact factors, the state read once (equations 3 and 10).

A threadgroup takes 32 rows of one head's state. Its 8 simdgroups form the products of keys and queries among themselves and
with the state (each lane keeps its share of the state in registers), then 32 threads, one a state row, solve by forward
substitution in float32, and all threads add up the outputs. Every w is compiled on its own and runs the same code, w = 1 too:
row i of the result does not depend on how many rows follow, to the bit.

`gdn_verify_deferred` folds the last round's factors into the state it has just read, and writes that state once.
"""

from __future__ import annotations

from typing import Any

from dspine.common import gdn as core
from dspine.common.errors import DSpineError
from dspine.common.gdn import MAX_TOKENS, GdnFactors
from dspine.common.registry import register_kernel
from dspine.kernels_metal._gdn import FOLD, LOAD, MAX_HEAD, SIMDS, STORE, TILE
from dspine.kernels_metal._launch import METAL, SIMD, MetalSource, ceil_div, floating, launch, mlx
from dspine.kernels_metal._source import REDUCE

Array = Any

_HEAD = """
    // W tokens, DK, DV, REPEAT = value heads a key head; P: 2 W up to a power of two. Groups: 32 state rows, head, batch.
    constexpr int SIMDS = 8, ROWS = 4, TILE = SIMDS * ROWS, CHUNKS = (DK + 31) / 32;
    threadgroup float from_state[2 * W * TILE];  // S k_i, then S q_i
    threadgroup float lower[W * W];              // beta_i e^{g_i - g_j} k_i . k_j, j < i
    threadgroup float mixing[W * W];             // e^{g_i - g_j} q_i . k_j, j <= i
    threadgroup float solved[W * TILE];          // z
    threadgroup float decays[W];                 // g
    threadgroup float strengths[W];              // beta
    const int lane = int(thread_index_in_simdgroup), simd = int(simdgroup_index_in_threadgroup);
    const int thread_id = int(thread_position_in_threadgroup.x);
    const int value_heads = int(threadgroups_per_grid.y), key_heads = value_heads / REPEAT;
    const int head = int(threadgroup_position_in_grid.y), key_head = head / REPEAT;
    const size_t batch = threadgroup_position_in_grid.z;
    const int first = int(threadgroup_position_in_grid.x) * TILE + simd * ROWS;
    const int live = metal::clamp(int(lengths[batch]), 0, W);  // rows at or after it are never read
    const auto state = states + (batch * value_heads + head) * DV * DK;
    const auto queries = q + (batch * W * key_heads + key_head) * DK;  // token i: + i * key_heads * DK
    const auto keys = k + (batch * W * key_heads + key_head) * DK;
    const size_t scalars = batch * W * value_heads + head;             // token i: + i * value_heads
"""

_BODY = """
    if (thread_id < W) {
        float g = 0;
        for (int j = 0; j < W; ++j) {  // padded rows repeat the last live one's
            g += j <= thread_id && j < live ? log_decay[scalars + size_t(j) * value_heads] : 0.0f;
        }
        decays[thread_id] = g;
        strengths[thread_id] = thread_id < live ? beta[scalars + size_t(thread_id) * value_heads] : 0.0f;
        if (threadgroup_position_in_grid.x == 0) {
            factor_g[scalars + size_t(thread_id) * value_heads] = g;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int i = simd; i < live; i += SIMDS) {
        float sums[P];
        DSPINE_UNROLL for (int j = 0; j < P; ++j) {
            sums[j] = 0;
        }
        DSPINE_UNROLL for (int c = 0; c < CHUNKS; ++c) {
            const int column = c * 32 + lane;
            if (column < DK) {
                const float key = float(keys[size_t(i) * key_heads * DK + column]);
                const float query = float(queries[size_t(i) * key_heads * DK + column]);
                DSPINE_UNROLL for (int j = 0; j < W; ++j) {
                    if (j <= i) {
                        const float other = float(keys[size_t(j) * key_heads * DK + column]);
                        sums[j] += key * other;
                        sums[P / 2 + j] += query * other;
                    }
                }
            }
        }
        const float total = lane_totals<P>(sums, uint(lane));
        const int index = lane / (32 / P), j = index % (P / 2);
        if (lane % (32 / P) == 0 && j <= i) {
            const float weighted = metal::exp(decays[i] - decays[j]) * total;
            if (index >= P / 2) {
                mixing[i * W + j] = weighted;
            } else if (j < i) {
                lower[i * W + j] = strengths[i] * weighted;
            }
        }
    }

    for (int i = 0; i < live; ++i) {
        float sums[2 * ROWS];
        DSPINE_UNROLL for (int r = 0; r < 2 * ROWS; ++r) {
            sums[r] = 0;
        }
        DSPINE_UNROLL for (int c = 0; c < CHUNKS; ++c) {
            const int column = c * 32 + lane;
            const float key = column < DK ? float(keys[size_t(i) * key_heads * DK + column]) : 0.0f;
            const float query = column < DK ? float(queries[size_t(i) * key_heads * DK + column]) : 0.0f;
            DSPINE_UNROLL for (int r = 0; r < ROWS; ++r) {
                sums[r] += s[r * CHUNKS + c] * key;
                sums[ROWS + r] += s[r * CHUNKS + c] * query;
            }
        }
        const float total = lane_totals<2 * ROWS>(sums, uint(lane));
        const int index = lane / 4;
        if (lane % 4 == 0) {
            from_state[(index / ROWS * W + i) * TILE + simd * ROWS + index % ROWS] = total;
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (thread_id < TILE) {
        const int row = int(threadgroup_position_in_grid.x) * TILE + thread_id;
        float z[W];
        DSPINE_UNROLL for (int i = 0; i < W; ++i) {
            z[i] = 0;
            if (i < live && row < DV) {
                const size_t at = (scalars + size_t(i) * value_heads) * DV + row;
                const float read = metal::exp(decays[i]) * from_state[i * TILE + thread_id];
                z[i] = strengths[i] * (float(v[at]) - read);
                DSPINE_UNROLL for (int j = 0; j < i; ++j) {
                    z[i] -= lower[i * W + j] * z[j];
                }
            }
            solved[i * TILE + thread_id] = z[i];
            if (row < DV) {
                factor_z[(scalars + size_t(i) * value_heads) * DV + row] = z[i];
            }
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int index = thread_id; index < W * TILE; index += 32 * SIMDS) {
        const int i = index / TILE, column = index % TILE;
        const int row = int(threadgroup_position_in_grid.x) * TILE + column;
        if (row < DV) {
            float sum = 0;
            if (i < live) {
                sum = metal::exp(decays[i]) * from_state[(W + i) * TILE + column];
                for (int j = 0; j <= i; ++j) {
                    sum += mixing[i * W + j] * solved[j * TILE + column];
                }
            }
            out[(scalars + size_t(i) * value_heads) * DV + row] = OUT(sum);
        }
    }
"""

SOURCE = MetalSource(
    name="dspine_gdn_verify",
    inputs=("q", "k", "v", "log_decay", "beta", "states", "lengths"),
    outputs=("out", "factor_z", "factor_g"),
    header=REDUCE,
    body=_HEAD + LOAD + _BODY,
)

DEFERRED = MetalSource(
    name="dspine_gdn_verify_deferred",
    inputs=(
        "q",
        "k",
        "v",
        "log_decay",
        "beta",
        "states",
        "lengths",
        "pending_z",
        "pending_k",
        "pending_g",
        "pending_m",
        "sizes",
    ),
    outputs=("out", "factor_z", "factor_g", "new_states"),
    header=REDUCE,
    body=_HEAD
    + """
    // sizes: tokens of the pending block
    const int m = metal::clamp(int(pending_m[batch]), 0, int(sizes[0]));
    const auto fold_g = pending_g + batch * sizes[0] * value_heads + head;
    const auto fold_z = pending_z + (batch * sizes[0] * value_heads + head) * DV;
    const auto fold_k = pending_k + (batch * sizes[0] * key_heads + key_head) * DK;
    const auto kept_state = new_states + (batch * value_heads + head) * DV * DK;
"""
    + LOAD
    + FOLD
    + STORE
    + _BODY,
)


def gdn_verify(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, lengths: Array | None = None
) -> tuple[Array, GdnFactors]:
    """`common.gdn.gdn_verify` on Metal; shapes, dtypes and errors as there. The state is read, not changed."""
    mx = mlx()
    _check(q, k, v, log_decay, beta, state, lengths)
    inputs, template, groups, shapes, dtypes = _plan(mx, q, k, v, log_decay, beta, state, lengths)
    out, z, g = launch(SOURCE, inputs, template=template, groups=groups, threads=SIMD * SIMDS, shapes=shapes, dtypes=dtypes)
    return out, GdnFactors(z, k, g)


def gdn_verify_deferred(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    state: Array,
    pending: GdnFactors,
    pending_m: Array,
    lengths: Array | None = None,
) -> tuple[Array, GdnFactors, Array]:
    """`common.gdn.gdn_verify_deferred` on Metal: (o, factors, the state after `pending_m` tokens of `pending`).

    The returned state is a new array (MLX arrays do not change); drop the old one, and its memory serves the next round.
    """
    mx = mlx()
    _check(q, k, v, log_decay, beta, state, lengths)
    _check_pending(pending, pending_m, state, k)
    inputs, template, groups, shapes, dtypes = _plan(mx, q, k, v, log_decay, beta, state, lengths)
    sizes = mx.array([pending.z.shape[1]], dtype=mx.int32)
    out, z, g, new_state = launch(
        DEFERRED,
        [*inputs, pending.z, pending.k, pending.g, pending_m, sizes],
        template=template,
        groups=groups,
        threads=SIMD * SIMDS,
        shapes=[*shapes, tuple(state.shape)],
        dtypes=[*dtypes, mx.float32],
    )
    return out, GdnFactors(z, k, g), new_state


def threadgroup_bytes(tokens: int) -> int:
    """Threadgroup memory of a verify kernel: float32, and free of the inputs' dtype and of both head sizes (case M5)."""
    return 4 * (3 * tokens * TILE + 2 * tokens * tokens + 2 * tokens)


def _plan(
    mx: Any, q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, lengths: Array | None
) -> tuple[list[Array], list[tuple[str, Any]], tuple[int, int, int], list[tuple[int, ...]], list[Any]]:
    """Inputs, template, groups, and the outputs' shapes and dtypes, as both kernels take them."""
    batch, count, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    lengths = mx.array([count] * batch, dtype=mx.int32) if lengths is None else lengths
    padded = max(2, 1 << (2 * count - 1).bit_length())
    template = [
        *(("OUT", v.dtype), ("W", count), ("P", padded), ("DK", key_dim), ("DV", value_dim)),
        ("REPEAT", value_heads // key_heads),
    ]
    shapes = [(batch, count, value_heads, value_dim)] * 2 + [(batch, count, value_heads)]
    groups = (ceil_div(value_dim, TILE), value_heads, batch)
    return [q, k, v, log_decay, beta, state, lengths], template, groups, shapes, [v.dtype, mx.float32, mx.float32]


def _check(q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, lengths: Array | None) -> None:
    where = "gdn_verify"
    if q.ndim != 4 or v.ndim != 4 or 0 in q.shape or 0 in v.shape:
        raise DSpineError(f"{where}: q [B, w, Hk, Dk] and v [B, w, Hv, Dv] expected, got {tuple(q.shape)} and {tuple(v.shape)}")
    batch, count, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    if count > MAX_TOKENS:
        raise DSpineError(f"{where}: 1..{MAX_TOKENS} tokens at once, got {count}; cut longer input into blocks")
    if value_heads % key_heads:
        raise DSpineError(f"{where}: value heads must be a multiple of key heads, got {value_heads} and {key_heads}")
    if max(key_dim, value_dim) > MAX_HEAD:
        raise DSpineError(f"{where}: heads of at most {MAX_HEAD} on Metal, got {key_dim} and {value_dim}")
    scalars = (batch, count, value_heads)
    lengths_ok = lengths is None or (tuple(lengths.shape) == (batch,) and "int" in str(lengths.dtype))
    if not lengths_ok:
        raise DSpineError(f"{where}: lengths must be int {(batch,)}, got {lengths.dtype} {tuple(lengths.shape)}")
    for name, x, shape in (
        ("k", k, tuple(q.shape)),
        ("v", v, (batch, count, value_heads, value_dim)),
        ("log_decay", log_decay, scalars),
        ("beta", beta, scalars),
        ("state", state, (batch, value_heads, value_dim, key_dim)),
    ):
        if tuple(x.shape) != shape:
            raise DSpineError(f"{where}: {name} must have shape {shape}, got {tuple(x.shape)}")
    if not q.dtype == k.dtype == v.dtype or not floating(q):
        raise DSpineError(f"{where}: q, k and v must have one float dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    for name, x in (("log_decay", log_decay), ("beta", beta), ("state", state)):
        if not str(x.dtype).endswith(".float32"):
            raise DSpineError(f"{where}: {name} must be float32, got {x.dtype}: the recurrence does not survive less")


def _check_pending(pending: GdnFactors, pending_m: Array, state: Array, k: Array) -> None:
    batch, value_heads, value_dim, key_dim = state.shape
    count = pending.z.shape[1] if pending.z.ndim == 4 else 0
    for name, x, shape in (
        ("pending.z", pending.z, (batch, max(count, 1), value_heads, value_dim)),
        ("pending.k", pending.k, (batch, count, k.shape[2], key_dim)),
        ("pending.g", pending.g, (batch, count, value_heads)),
        ("pending_m", pending_m, (batch,)),
    ):
        if tuple(x.shape) != shape:
            raise DSpineError(f"gdn_verify_deferred: {name} must have shape {shape}, got {tuple(x.shape)}")
    for name, x in (("pending.z", pending.z), ("pending.g", pending.g)):
        if not str(x.dtype).endswith(".float32"):
            raise DSpineError(f"gdn_verify_deferred: {name} must be float32, got {x.dtype}")


def supports(q: Array, *rest: Any) -> bool:
    """Heads up to 512 wide and at least one row; what else does not fit is an error on every path."""
    return q.ndim == 4 and 0 not in q.shape and q.shape[3] <= MAX_HEAD and rest[1].shape[-1] <= MAX_HEAD


def register() -> None:
    """Put both kernels in the core's registry."""
    register_kernel(core.gdn_verify.__name__, function=gdn_verify, supports=supports, **METAL)
    register_kernel(core.gdn_verify_deferred.__name__, function=gdn_verify_deferred, supports=supports, **METAL)
