# twin: dspine.common.gdn.gdn_commit
"""The accepted state of ALL layers and their convolution windows in one launch (equation 7).

Threadgroups 0..n-1 of a (layer, batch row) fold 32 rows of a head's state each: read once, written once. The groups after
them move the window. `m` is read per batch row; where it is 0 the row comes out as it went in, to the bit.

MLX arrays do not change and a `metal_kernel` cannot write into its inputs, so states and windows come back as new arrays: for
the length of this launch both exist. Nothing can be donated; dropping the old arrays gives their memory to the next round's.
"""

from __future__ import annotations

from typing import Any

from dspine.common import gdn as core
from dspine.common.errors import DSpineError
from dspine.common.gdn import GdnFactors
from dspine.common.registry import register_kernel
from dspine.kernels_metal._gdn import FOLD, LOAD, MAX_HEAD, SIMDS, STORE, TILE
from dspine.kernels_metal._launch import METAL, SIMD, MetalSource, ceil_div, floating, launch, mlx
from dspine.kernels_metal._source import REDUCE

Array = Any
MOVES = 4  # window elements a thread

SOURCE = MetalSource(
    name="dspine_gdn_commit",
    inputs=("states", "factor_z", "factor_k", "factor_g", "windows", "block", "committed", "sizes"),
    outputs=("new_states", "new_windows"),
    header=REDUCE,
    body="""
    // sizes: w, value heads, key heads, C, state groups. Groups: x (state tiles, then window pieces), batch, layer.
    constexpr int SIMDS = 8, ROWS = 4, TILE = SIMDS * ROWS, CHUNKS = (DK + 31) / 32, TILES = (DV + TILE - 1) / TILE;
    constexpr int KEPT = WIDTH - 1, MOVES = 4;
    const int count = sizes[0], value_heads = sizes[1], key_heads = sizes[2], channels = sizes[3], state_groups = sizes[4];
    const int lane = int(thread_index_in_simdgroup), simd = int(simdgroup_index_in_threadgroup);
    const int group = int(threadgroup_position_in_grid.x);
    const size_t batch = threadgroup_position_in_grid.y;
    const size_t slot = threadgroup_position_in_grid.z * threadgroups_per_grid.y + batch;  // layer * B + batch
    const int m = metal::clamp(int(committed[batch]), 0, count);
    if (group < state_groups) {
        const int head = group / TILES, key_head = head / (value_heads / key_heads);
        const int first = group % TILES * TILE + simd * ROWS;
        const auto state = states + (slot * value_heads + head) * DV * DK;
        const auto kept_state = new_states + (slot * value_heads + head) * DV * DK;
        const auto fold_g = factor_g + slot * count * value_heads + head;
        const auto fold_z = factor_z + (slot * count * value_heads + head) * DV;
        const auto fold_k = factor_k + (slot * count * key_heads + key_head) * DK;
"""
    + LOAD
    + FOLD
    + STORE
    + """
    } else {
        const int start = (group - state_groups) * 32 * SIMDS * MOVES + int(thread_position_in_threadgroup.x);
        for (int i = 0; i < MOVES; ++i) {
            const int index = start + i * 32 * SIMDS;
            if (index < KEPT * channels) {
                const int row = m + index / channels, channel = index % channels;  // of [window, block]
                new_windows[slot * KEPT * channels + index] =
                    row < KEPT ? windows[(slot * KEPT + row) * channels + channel]
                               : KEEP(float(block[(slot * count + row - KEPT) * channels + channel]));
            }
        }
    }
""",
)


def gdn_commit(states: Array, factors: GdnFactors, windows: Array, inputs: Array, m: Array) -> tuple[Array, Array]:
    """`common.gdn.gdn_commit` on Metal; shapes, dtypes and errors as there. Returns new arrays."""
    mx = mlx()
    _check(states, factors, windows, inputs, m)
    layers, batch, value_heads, value_dim, key_dim = states.shape
    count, key_heads = factors.z.shape[2], factors.k.shape[3]
    kept, channels = windows.shape[2:]
    state_groups = value_heads * ceil_div(value_dim, TILE)
    window_groups = ceil_div(kept * channels, SIMD * SIMDS * MOVES)
    new_states, new_windows = launch(
        SOURCE,
        [
            *(states, factors.z, factors.k, factors.g, windows, inputs, m),
            mx.array([count, value_heads, key_heads, channels, state_groups], dtype=mx.int32),
        ],
        template=[("DK", key_dim), ("DV", value_dim), ("WIDTH", kept + 1), ("KEEP", windows.dtype)],
        groups=(state_groups + window_groups, batch, layers),
        threads=SIMD * SIMDS,
        shapes=[tuple(states.shape), tuple(windows.shape)],
        dtypes=[mx.float32, windows.dtype],
    )
    return new_states, new_windows


def _check(states: Array, factors: GdnFactors, windows: Array, inputs: Array, m: Array) -> None:
    where = "gdn_commit"
    for name, x, rank, letters in (
        ("states", states, 5, "[L, B, Hv, Dv, Dk]"),
        ("factors.z", factors.z, 5, "[L, B, w, Hv, Dv]"),
        ("factors.k", factors.k, 5, "[L, B, w, Hk, Dk]"),
        ("windows", windows, 4, "[L, B, width-1, C]"),
        ("inputs", inputs, 4, "[L, B, w, C]"),
    ):
        if x.ndim != rank or 0 in x.shape:
            raise DSpineError(f"{where}: {name} must have shape {letters}, got {tuple(x.shape)}")
    layers, batch, value_heads, value_dim, key_dim = states.shape
    count, key_heads, channels = factors.z.shape[2], factors.k.shape[3], windows.shape[3]
    if value_heads % key_heads or max(key_dim, value_dim) > MAX_HEAD:
        raise DSpineError(
            f"{where}: value heads must be a multiple of key heads and heads at most {MAX_HEAD} wide, got {value_heads} and "
            f"{key_heads}, {value_dim} and {key_dim}"
        )
    for name, x, shape in (
        ("factors.z", factors.z, (layers, batch, count, value_heads, value_dim)),
        ("factors.k", factors.k, (layers, batch, count, key_heads, key_dim)),
        ("factors.g", factors.g, (layers, batch, count, value_heads)),
        ("windows", windows, (layers, batch, windows.shape[2], channels)),
        ("inputs", inputs, (layers, batch, count, channels)),
        ("m", m, (batch,)),
    ):
        if tuple(x.shape) != shape:
            raise DSpineError(f"{where}: {name} must have shape {shape}, got {tuple(x.shape)}")
    for name, x in (("states", states), ("factors.z", factors.z), ("factors.g", factors.g)):
        if not str(x.dtype).endswith(".float32"):
            raise DSpineError(f"{where}: {name} must be float32, got {x.dtype}: the recurrence does not survive less")
    if "int" not in str(m.dtype):
        raise DSpineError(f"{where}: m must be an integer array, got {m.dtype}")


def supports(states: Array, factors: GdnFactors, windows: Array, inputs: Array, m: Array) -> bool:
    """Heads up to 512 wide, float windows, nothing empty."""
    sized = all(0 not in x.shape for x in (states, factors.z, windows, inputs))
    return sized and floating(windows, inputs, factors.k) and max(states.shape[-2:]) <= MAX_HEAD


def register() -> None:
    """Put the kernel in the core's registry."""
    register_kernel(core.gdn_commit.__name__, function=gdn_commit, supports=supports, **METAL)
