# twin: dspine.common.selection.lengths.correct_length
"""Eq. 6 in one launch: experts that one more token would add, the corrected cost, and the output budget's cap.

A simdgroup a batch row; its lanes share the picks of the tokens before. Expert ids are compared, never used as indices.
"""

from __future__ import annotations

from typing import Any

from dspine.common.errors import DSpineError
from dspine.common.registry import register_kernel
from dspine.common.selection import lengths as core
from dspine.common.selection.lengths import LengthTables
from dspine.kernels_metal._launch import METAL, SIMD, MetalSource, launch, mlx

Array = Any

SOURCE = MetalSource(
    name="dspine_correct_length",
    inputs=("picks", "length", "survival", "limit", "cost", "pairs", "pairs_given", "prices", "sizes"),
    outputs=("corrected",),
    body="""
    // sizes: u (rows of picks), k, M; prices: rho, s, eta
    const int covered = sizes[0], experts = sizes[1], drafts = sizes[2];
    const int lane = int(thread_index_in_simdgroup);
    const size_t batch = threadgroup_position_in_grid.x;
    const int chosen = length[batch], cap = limit[batch];
    const bool may = chosen >= 1 && chosen < drafts + 1 && chosen < cap && chosen < covered;
    const int at = may ? chosen : 0;  // lookups below exist even where nothing may be added
    const auto rows = picks + batch * covered * experts;
    int added = 0;
    for (int e = 0; e < experts; ++e) {
        const int newest = rows[at * experts + e];
        int seen = 0;
        for (int i = lane; i < at * experts; i += 32) {
            seen |= rows[i] == newest ? 1 : 0;
        }
        for (ushort offset = 16; offset > 0; offset >>= 1) {
            seen |= simd_shuffle_xor(seen, offset);
        }
        added += seen ? 0 : 1;
    }
    if (lane == 0) {
        float change = cost[at + 1] - cost[at] - prices[1];
        change += prices[2] * (pairs_given[at * (experts + 1) + added] - pairs[at]);
        const float gain = survival[batch * drafts + metal::max(at - 1, 0)];
        const int longer = may && gain > prices[0] * change ? chosen + 1 : chosen;
        corrected[batch] = metal::min(longer, cap);
    }
""",
)


def correct_length(picks: Array, length: Array, survival: Array, limit: Array, tables: LengthTables) -> Array:
    """`common.selection.lengths.correct_length` on Metal: picks int [B, u, k] -> int32 [B].

    Raises `DSpineError` on shapes that do not fit, and on tables without expert counts.
    """
    mx = mlx()
    _check(picks, length, survival, limit, tables)
    batch, covered, experts = picks.shape
    (corrected,) = launch(
        SOURCE,
        [
            *(picks.astype(mx.int32), length.astype(mx.int32), survival, limit.astype(mx.int32)),
            *(tables.cost, tables.pairs, tables.pairs_given),
            mx.array([tables.rate, tables.stage_zero, tables.expert], dtype=mx.float32),
            mx.array([covered, experts, survival.shape[1]], dtype=mx.int32),
        ],
        template=[],
        groups=(batch, 1, 1),
        threads=SIMD,
        shapes=[(batch,)],
        dtypes=[mx.int32],
    )
    return corrected


def _check(picks: Array, length: Array, survival: Array, limit: Array, tables: LengthTables) -> None:
    if picks.ndim != 3 or 0 in picks.shape:
        raise DSpineError(f"correct_length: picks must have shape [B, u, k], got {tuple(picks.shape)}")
    if tables.pairs is None or tables.pairs_given is None:
        raise DSpineError("correct_length: the tables hold no expert counts (pairs, pairs_given); calibrate on a MoE target")
    batch, _, experts = picks.shape
    drafts = survival.shape[-1]
    for name, x, expected in (
        ("length", length, (batch,)),
        ("limit", limit, (batch,)),
        ("survival", survival, (batch, drafts)),
        ("tables.cost", tables.cost, (drafts + 2,)),
        ("tables.pairs", tables.pairs, (drafts + 2,)),
        ("tables.pairs_given", tables.pairs_given, (drafts + 2, experts + 1)),
    ):
        if tuple(x.shape) != expected:
            raise DSpineError(f"correct_length: {name} must have shape {expected}, got {tuple(x.shape)}")


def supports(picks: Array, length: Array, survival: Array, limit: Array, tables: LengthTables) -> bool:
    """float32 tables; a batch that is not empty."""
    arrays = (survival, tables.cost, tables.pairs, tables.pairs_given)
    return 0 not in picks.shape and all(x is None or str(x.dtype).endswith("float32") for x in arrays)


def register() -> None:
    """Put the kernel in the core's registry."""
    register_kernel(core.correct_length.__name__, function=correct_length, supports=supports, **METAL)
