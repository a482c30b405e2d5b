# twin: dspine.common.gdn.gdn_inputs
"""From a Gated DeltaNet layer's projections to what its recurrence takes, in one launch.

A simdgroup takes one head of q, k or v at one token: the short convolution of its channels over the kept window, SiLU, and
for q and k the l2 norm. One more simdgroup a token turns a and b into log decay and write strength. All in float32; q, k and
v are rounded once, decay and write strength never (case N3).
"""

from __future__ import annotations

from typing import Any

from dspine.common import gdn as core
from dspine.common.errors import DSpineError
from dspine.common.gdn import NORM_EPS, GdnInputWeights, GdnLayout, GdnTokens
from dspine.common.registry import register_kernel
from dspine.kernels_metal._launch import METAL, SIMD, MetalSource, ceil_div, floating, launch, mlx
from dspine.kernels_metal._source import LOG, REDUCE

Array = Any
SIMDS = 8
MAX_HEAD = 512

SOURCE = MetalSource(
    name="dspine_gdn_inputs",
    inputs=("projected", "window", "a", "b", "conv", "conv_bias", "decay_log", "dt_bias", "norm", "sizes"),
    outputs=("q", "k", "v", "log_decay", "beta"),
    header=REDUCE + LOG,
    body="""
    // sizes: T, key heads, value heads; norm: eps, 1 / sqrt(Dk). Units of a token: q heads, k heads, v heads, gates.
    constexpr int LARGEST = DK > DV ? DK : DV, CHUNKS = (LARGEST + 31) / 32;
    const int count = sizes[0], key_heads = sizes[1], value_heads = sizes[2];
    const int lane = int(thread_index_in_simdgroup);
    const int unit = int(threadgroup_position_in_grid.x * simdgroups_per_threadgroup + simdgroup_index_in_threadgroup);
    const int token = int(threadgroup_position_in_grid.y);
    const size_t batch = threadgroup_position_in_grid.z, at = batch * count + token;
    const int heads = 2 * key_heads + value_heads;
    if (unit == heads) {
        for (int h = lane; h < value_heads; h += 32) {
            const float x = float(a[at * value_heads + h]) + float(dt_bias[h]);
            const float soft = metal::max(x, 0.0f) + log_plus_one(metal::exp(-metal::abs(x)));
            log_decay[at * value_heads + h] = -metal::exp(float(decay_log[h])) * soft;
            const float y = float(b[at * value_heads + h]), small = metal::exp(-metal::abs(y));
            beta[at * value_heads + h] = (y >= 0 ? 1.0f : small) / (1.0f + small);
        }
    } else if (unit < heads) {
        const bool is_value = unit >= 2 * key_heads;
        const int channels = 2 * key_heads * DK + value_heads * DV, size = is_value ? DV : DK;
        const int first = is_value ? 2 * key_heads * DK + (unit - 2 * key_heads) * DV : unit * DK;
        float mixed[CHUNKS];
        float squares = 0;
        DSPINE_UNROLL for (int c = 0; c < CHUNKS; ++c) {
            mixed[c] = 0;
            const int i = c * 32 + lane, channel = first + i;
            if (i < size) {
                float sum = 0;
                DSPINE_UNROLL for (int j = 0; j < WIDTH; ++j) {  // row token + j of [window, projected]
                    const int row = token + j - (WIDTH - 1);
                    const float x = row < 0 ? float(window[(batch * (WIDTH - 1) + token + j) * channels + channel])
                                            : float(projected[(batch * count + row) * channels + channel]);
                    sum += x * float(conv[channel * WIDTH + j]);
                }
                if (BIAS) {
                    sum += float(conv_bias[channel]);
                }
                const float small = metal::exp(-metal::abs(sum));
                sum *= (sum >= 0 ? 1.0f : small) / (1.0f + small);
                mixed[c] = sum;
                squares += sum * sum;
            }
        }
        const float scale = 1.0f / metal::sqrt(lane_total(squares) + norm[0]);
        DSPINE_UNROLL for (int c = 0; c < CHUNKS; ++c) {
            const int i = c * 32 + lane;
            if (i < size) {
                if (is_value) {
                    v[(at * value_heads + unit - 2 * key_heads) * DV + i] = OUT(mixed[c]);
                } else if (unit < key_heads) {
                    q[(at * key_heads + unit) * DK + i] = OUT(mixed[c] * scale * norm[1]);
                } else {
                    k[(at * key_heads + unit - key_heads) * DK + i] = OUT(mixed[c] * scale);
                }
            }
        }
    }
""",
)


def gdn_inputs(projected: Array, window: Array, a: Array, b: Array, weights: GdnInputWeights, layout: GdnLayout) -> GdnTokens:
    """`common.gdn.gdn_inputs` on Metal; shapes, dtypes and errors as there. T is free."""
    mx = mlx()
    _check(projected, window, a, b, weights, layout)
    batch, count, _ = projected.shape
    width = weights.conv.shape[1]
    keys = (batch, count, layout.key_heads, layout.key_dim)
    values, gates = (batch, count, layout.value_heads, layout.value_dim), (batch, count, layout.value_heads)
    window = window.astype(projected.dtype) if window.size else projected  # width 1 keeps no window: nothing is read
    bias = weights.dt_bias if weights.conv_bias is None else weights.conv_bias
    outputs = launch(
        SOURCE,
        [
            *(projected, window, a, b, weights.conv, bias, weights.decay_log, weights.dt_bias),
            mx.array([NORM_EPS, layout.key_dim**-0.5], dtype=mx.float32),
            mx.array([count, layout.key_heads, layout.value_heads], dtype=mx.int32),
        ],
        template=[
            *(("OUT", projected.dtype), ("DK", layout.key_dim), ("DV", layout.value_dim)),
            *(("WIDTH", width), ("BIAS", weights.conv_bias is not None)),
        ],
        groups=(ceil_div(2 * layout.key_heads + layout.value_heads + 1, SIMDS), count, batch),
        threads=SIMD * SIMDS,
        shapes=[keys, keys, values, gates, gates],
        dtypes=[projected.dtype] * 3 + [mx.float32] * 2,
    )
    return GdnTokens(*outputs)


def _check(projected: Array, window: Array, a: Array, b: Array, weights: GdnInputWeights, layout: GdnLayout) -> None:
    if projected.ndim != 3 or 0 in projected.shape or weights.conv.ndim != 2:
        raise DSpineError(
            f"gdn_inputs: projected must have shape [B, T, C] and weights.conv [C, width], got {tuple(projected.shape)} and "
            f"{tuple(weights.conv.shape)}"
        )
    batch, count, _ = projected.shape
    channels, heads, width = layout.channels, layout.value_heads, weights.conv.shape[1]
    bias = weights.dt_bias if weights.conv_bias is None else weights.conv_bias
    for name, x, shape in (
        ("projected", projected, (batch, count, channels)),
        ("window", window, (batch, width - 1, channels)),
        ("a", a, (batch, count, heads)),
        ("b", b, (batch, count, heads)),
        ("weights.conv", weights.conv, (channels, width)),
        ("weights.decay_log", weights.decay_log, (heads,)),
        ("weights.dt_bias", weights.dt_bias, (heads,)),
        ("weights.conv_bias", bias, (heads,) if weights.conv_bias is None else (channels,)),
    ):
        if tuple(x.shape) != shape:
            raise DSpineError(f"gdn_inputs: {name} must have shape {shape}, got {tuple(x.shape)}")


def supports(projected: Array, window: Array, a: Array, b: Array, weights: GdnInputWeights, layout: GdnLayout) -> bool:
    """Float dtypes, heads up to 512 wide, at least one token."""
    arrays = [projected, window, a, b, weights.conv, weights.decay_log, weights.dt_bias]
    arrays += [] if weights.conv_bias is None else [weights.conv_bias]
    return floating(*arrays) and 0 not in projected.shape and max(layout.key_dim, layout.value_dim) <= MAX_HEAD


def register() -> None:
    """Put the kernel in the core's registry."""
    register_kernel(core.gdn_inputs.__name__, function=gdn_inputs, supports=supports, **METAL)
