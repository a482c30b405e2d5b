# twin: dspine.common.injection.injection_write
"""Write-back of the injection and the next layer's RMSNorm: the product with W, then one launch for everything else.

The product needs the whole width before the next norm can be taken, so there are two launches: W (g * m) in float32
(`_linear`), then a threadgroup a row for RMS(u), the sum, and its norm, taken before the sum is rounded.
"""

from __future__ import annotations

from typing import Any

from dspine.common import injection as core
from dspine.common.errors import DSpineError
from dspine.common.registry import register_kernel
from dspine.kernels_metal._launch import METAL, SIMD, MetalSource, floating, launch, mlx, rows_of
from dspine.kernels_metal._linear import linear
from dspine.kernels_metal._source import REDUCE

Array = Any
SIMDS = 8

_WRITE = """
    // sizes: width H, rows of delta that share a row of u; eps[0] of the norm
    constexpr int SIMDS = 8;
    threadgroup float partial[SIMDS];
    const int width = sizes[0];
    const uint lane = thread_index_in_simdgroup, simd = simdgroup_index_in_threadgroup;
    const int thread_id = int(thread_position_in_threadgroup.x);
    const size_t row = threadgroup_position_in_grid.x;
    const auto u = hidden + row / sizes[1] * width;
    const auto d = delta + row * width;
    float squares = 0;
    for (int k = thread_id; k < width; k += 32 * SIMDS) {
        const float value = float(u[k]);
        squares += value * value;
    }
    const float rms = metal::sqrt(group_total<SIMDS>(squares, partial, lane, simd) / width);
"""

PLAIN = MetalSource(
    name="dspine_injection_write",
    inputs=("hidden", "delta", "sizes"),
    outputs=("written",),
    header=REDUCE,
    body=_WRITE
    + """
    for (int k = thread_id; k < width; k += 32 * SIMDS) {
        written[row * width + k] = OUT(float(u[k]) + rms * d[k]);
    }
""",
)

NORMED = MetalSource(
    name="dspine_injection_write_norm",
    inputs=("hidden", "delta", "norm_weight", "eps", "sizes"),
    outputs=("written", "normed"),
    header=REDUCE,
    body=_WRITE
    + """
    float after = 0;
    for (int k = thread_id; k < width; k += 32 * SIMDS) {
        const float value = float(u[k]) + rms * d[k];
        written[row * width + k] = OUT(value);
        after += value * value;
    }
    const float scale = 1.0f / metal::sqrt(group_total<SIMDS>(after, partial, lane, simd) / width + eps);
    for (int k = thread_id; k < width; k += 32 * SIMDS) {  // its own elements again, computed rather than read back
        const float value = float(u[k]) + rms * d[k];
        normed[row * width + k] = OUT(value * scale * float(norm_weight[k]));
    }
""",
)


def injection_write(hidden: Array, gated: Array, write: Array, norm: Any | None = None) -> Array | tuple[Array, Array]:
    """`common.injection.injection_write` on Metal: u [..., H], gated [..., a], write [H, a] -> h, or (h, norm(h)).

    Statistics and sums in float32, results in the dtype of `hidden`. Raises `DSpineError` on shapes that do not fit.
    """
    mx = mlx()
    _check(hidden, gated, write, norm)
    hidden, shape, shared = _rows(hidden, gated)
    width, rows = hidden.shape[-1], rows_of(gated)
    if rows == 0:
        empty = mx.zeros((*shape, width), dtype=hidden.dtype)
        return empty if norm is None else (empty, empty)
    delta = linear(gated, write)
    sizes = mx.array([width, shared], dtype=mx.int32)
    if norm is None:
        source, inputs = PLAIN, [hidden, delta, sizes]
    else:
        source, inputs = NORMED, [hidden, delta, norm.weight, mx.array(norm.eps, dtype=mx.float32), sizes]
    outputs = launch(
        source,
        inputs,
        template=[("OUT", hidden.dtype)],
        groups=(rows, 1, 1),
        threads=SIMD * SIMDS,
        shapes=[(*shape, width)] * len(source.outputs),
        dtypes=[hidden.dtype] * len(source.outputs),
    )
    return outputs[0] if norm is None else (outputs[0], outputs[1])


def _rows(hidden: Array, gated: Array) -> tuple[Array, tuple[int, ...], int]:
    """`hidden`, the leading shape of the result, and how many rows of `gated` in a row share one of `hidden`."""
    lead = tuple(gated.shape[:-1])
    if tuple(hidden.shape[:-1]) == lead:
        return hidden, lead, 1
    if hidden.ndim == gated.ndim and hidden.ndim > 1 and hidden.shape[-2] == 1 and tuple(hidden.shape[:-2]) == lead[:-1]:
        return hidden, lead, max(lead[-1], 1)
    raise DSpineError(
        f"injection_write: hidden must have the rows of gated {lead}, or 1 in place of the last, got {tuple(hidden.shape[:-1])}"
    )


def _check(hidden: Array, gated: Array, write: Array, norm: Any | None) -> None:
    expected = (hidden.shape[-1], gated.shape[-1])
    if tuple(write.shape) != expected:
        raise DSpineError(f"injection_write: write must have shape [H, a] = {expected}, got {tuple(write.shape)}")
    if norm is not None and tuple(norm.weight.shape) != expected[:1]:
        raise DSpineError(f"injection_write: norm.weight must have shape {expected[:1]}, got {tuple(norm.weight.shape)}")


def supports(hidden: Array, gated: Array, write: Array, norm: Any | None = None) -> bool:
    """Float dtypes; rows that match or share; a norm that shows its `weight` and `eps`."""
    lead, wide = tuple(gated.shape[:-1]), tuple(hidden.shape[:-1])
    shared = len(lead) == len(wide) and lead[:-1] == wide[:-1] and wide[-1:] == (1,)
    fused = norm is None or (hasattr(norm, "weight") and hasattr(norm, "eps") and floating(norm.weight))
    return floating(hidden, gated, write) and (lead == wide or shared) and fused


def register() -> None:
    """Put the kernel in the core's registry."""
    register_kernel(core.injection_write.__name__, function=injection_write, supports=supports, **METAL)
