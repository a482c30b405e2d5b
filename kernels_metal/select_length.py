# twin: dspine.common.selection.lengths.select_length
"""Eq. 5 in one launch: calibration, logistic model, prefix products, and the best of all lengths.

One thread a batch row runs the at most 15 positions in order, so every sum and product has one order: in float32 the
kernel and the core differ by rounding of exp and log only.
"""

from __future__ import annotations

from typing import Any

from dspine.common.errors import DSpineError
from dspine.common.registry import register_kernel
from dspine.common.selection import lengths as core
from dspine.common.selection.lengths import ENTROPY_EPS, LengthChoice, LengthTables
from dspine.kernels_metal._launch import METAL, SIMD, MetalSource, ceil_div, launch, mlx
from dspine.kernels_metal._source import LOG

Array = Any

SOURCE = MetalSource(
    name="dspine_select_length",
    inputs=("confidence", "entropy", "limit", "calibration", "coefficients", "cost", "rate", "eps", "sizes"),
    outputs=("length", "stage_zero", "survival"),
    header=LOG,
    body="""
    // sizes: B, M, points of the calibration tables
    const int batches = sizes[0], drafts = sizes[1], points = sizes[2];
    const int batch = int(thread_position_in_grid.x);
    if (batch >= batches) {
        return;
    }
    const auto h = entropy + size_t(batch) * drafts;
    const auto seen = confidence + size_t(batch) * drafts;
    float mean = drafts > 0 ? float(h[0]) : 0.0f;
    float alive = 1, expected = 1, best_score = 0;
    int best = 2;
    for (int i = 0; i < drafts; ++i) {
        float place = seen[i] > 0 ? seen[i] * (points - 1) : 0.0f;
        place = place < points - 1 ? place : float(points - 1);
        const int left = metal::min(int(place), points - 2);
        const float low = calibration[i * points + left], high = calibration[i * points + left + 1];
        const float calibrated = low + (place - left) * (high - low);
        const float change = metal::log((h[i] + eps) / (mean + eps));
        mean = (h[i] + mean) / 2;
        const float position = i + 1;
        float logit = coefficients[0] + coefficients[1] * calibrated + coefficients[2] * position;
        logit += coefficients[3] * calibrated * position;
        logit += coefficients[4] * log_plus_one(h[i]) + coefficients[5] * change;
        const float small = metal::exp(-metal::abs(logit));
        alive *= (logit >= 0 ? 1.0f : small) / (1.0f + small);
        survival[size_t(batch) * drafts + i] = alive;
        expected += alive;
        const float score = expected - rate * cost[i + 2];
        if (i == 0 || score > best_score) {  // of equal scores the shorter
            best_score = score;
            best = i + 2;
        }
    }
    length[batch] = best;
    stage_zero[batch] = metal::min(metal::min(best + 1, drafts + 1), int(limit[batch]));
""",
)


def select_length(confidence: Array, entropy: Array, limit: Array, tables: LengthTables) -> LengthChoice:
    """`common.selection.lengths.select_length` on Metal: confidence, entropy float32 [B, M], limit int [B].

    Raises `DSpineError` on shapes that do not fit.
    """
    mx = mlx()
    _check(confidence, entropy, limit, tables)
    batch, drafts = confidence.shape
    length, stage_zero, survival = launch(
        SOURCE,
        [
            *(confidence, entropy, limit.astype(mx.int32), tables.calibration, tables.coefficients, tables.cost),
            *(mx.array(tables.rate, dtype=mx.float32), mx.array(ENTROPY_EPS, dtype=mx.float32)),
            mx.array([batch, drafts, tables.calibration.shape[1]], dtype=mx.int32),
        ],
        template=[],
        groups=(ceil_div(batch, SIMD), 1, 1),
        threads=SIMD,
        shapes=[(batch,), (batch,), (batch, drafts)],
        dtypes=[mx.int32, mx.int32, mx.float32],
    )
    return LengthChoice(length, stage_zero, survival)


def _check(confidence: Array, entropy: Array, limit: Array, tables: LengthTables) -> None:
    shape = tuple(confidence.shape)
    if len(shape) != 2 or tuple(entropy.shape) != shape or 0 in shape:
        raise DSpineError(
            f"select_length: confidence and entropy must have one shape [B, M], got {shape} and {tuple(entropy.shape)}"
        )
    if tuple(limit.shape) != shape[:1] or "int" not in str(limit.dtype):
        raise DSpineError(f"select_length: limit must be int [B] = {shape[:1]}, got {limit.dtype} {tuple(limit.shape)}")
    drafts, points = shape[1], tables.calibration.shape[-1]
    for name, x, expected in (
        ("calibration", tables.calibration, (drafts, max(points, 2))),
        ("coefficients", tables.coefficients, (6,)),
        ("cost", tables.cost, (drafts + 2,)),
    ):
        if tuple(x.shape) != expected:
            raise DSpineError(f"select_length: tables.{name} must have shape {expected}, got {tuple(x.shape)}")


def supports(confidence: Array, entropy: Array, limit: Array, tables: LengthTables) -> bool:
    """float32 signals and tables."""
    arrays = (confidence, entropy, tables.calibration, tables.coefficients, tables.cost)
    return all(str(x.dtype).endswith("float32") for x in arrays) and 0 not in confidence.shape


def register() -> None:
    """Put the kernel in the core's registry."""
    register_kernel(core.select_length.__name__, function=select_length, supports=supports, **METAL)
