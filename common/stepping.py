"""The small steps of a round on the device between its large ones: rows of tables, uniforms, limits, what a block holds.

Each is one launch where a runtime has a kernel, in place of two to eight of a library. Letters: B sequences, R rows of a draft
block, M drafts, W tokens of the longest block, P output positions that have uniforms.
"""

from __future__ import annotations

from typing import Any

from dspine.common.arrays import arange, array_namespace, astype, take_along, take_rows
from dspine.common.errors import DSpineError
from dspine.common.registry import operation

Array = Any


@operation
def table_rows(table: Array, ids: Array) -> Array:
    """Rows of `table` [V, d] for `ids` int [...], which must lie in 0..V-1: [..., d]. Copies, so exact."""
    check_table("table_rows", table)
    return take_rows(table, ids)


@operation
def enter_block(
    table: Array, anchor: Array, fill: Array, rows: int, codes: Array | None, scale: float = 1.0
) -> tuple[Array, Array | None]:
    """Input rows of draft blocks [B, R, H], the anchor's row of `table` [V, H] times `scale` and `fill` [H] below it; and the
    anchors' known-token code sqrt(r) C_x0 [B, r] of `codes` [V, r] (None without). anchor int [B]; rows: R."""
    check_enter_block(table, anchor, fill, rows, codes)
    xp = array_namespace(table, anchor)
    first = take_rows(table, anchor)
    first = first * scale if scale != 1.0 else first
    below = xp.broadcast_to(xp.reshape(fill, (1, 1, -1)), (anchor.shape[0], rows - 1, table.shape[1]))
    block = xp.concat([xp.expand_dims(first, axis=1), below], axis=1)
    return block, None if codes is None else take_rows(codes, anchor) * codes.shape[-1] ** 0.5


@operation
def round_uniforms(table: Array, generated: Array, count: int) -> Array:
    """Uniforms of the next `count` output positions, float32 [3, B, count] (lanes as in `common.sampling`): table float32
    [B, P, 3], generated int [B] positions before them. Beyond the table the last position's are repeated."""
    check_round_uniforms(table, generated)
    xp = array_namespace(table, generated)
    rows = xp.clip(xp.expand_dims(astype(generated, xp.int32), axis=1) + arange(table, count), None, table.shape[1] - 1)
    wide = xp.broadcast_to(xp.expand_dims(rows, axis=-1), (*rows.shape, table.shape[2]))
    return xp.permute_dims(take_along(table, wide, axis=1), (2, 0, 1))


@operation
def round_limits(remaining: Array, finite: Array, w: int, limits: Array | None = None) -> tuple[Array, Array]:
    """(live, limit) int32 [B] of a round that verifies w tokens: rows that count, and drafts that may be accepted, none of a
    draft that is not finite. remaining int32 [B]: the budget; limits int32 [B]: a cap of each sequence's own."""
    check_round_limits(remaining, finite, w, limits)
    xp = array_namespace(remaining, finite)
    live = xp.clip(remaining, None, w)
    live = live if limits is None else xp.minimum(live, limits)
    return live, xp.where(finite, xp.clip(live - 1, 0, None), xp.zeros_like(live))


@operation
def place_drafts(tokens: Array, finite: Array | None, anchor: Array, block: Array, flags: Array) -> tuple[Array, Array]:
    """A round's block and flags: the anchor, then the drafts (zeros where they are not finite), what stands behind them stays.

    tokens int [B, M] with M < W, finite bool [B] (None: yes), anchor int32 [B], block int32 [B, W], flags bool [B], which
    become `finite`. A kernel writes block and flags in place and returns them, the core's own code returns new ones.
    """
    check_place_drafts(tokens, finite, anchor, block, flags)
    xp = array_namespace(tokens, block)
    drafts = astype(tokens, xp.int32)
    if finite is None:
        finite = xp.ones_like(flags)
    drafts = xp.where(xp.expand_dims(finite, axis=1), drafts, xp.zeros_like(drafts))
    return xp.concat([xp.expand_dims(anchor, axis=1), drafts, block[:, 1 + tokens.shape[1] :]], axis=1), finite


def check_table(where: str, table: Array) -> None:
    """Raise `DSpineError` unless `table` is [V, d]."""
    if len(table.shape) != 2:
        raise DSpineError(f"{where}: the table must have shape [V, d], got {tuple(table.shape)}")


def check_enter_block(table: Array, anchor: Array, fill: Array, rows: int, codes: Array | None) -> None:
    """Raise `DSpineError` where shapes do not fit together."""
    where = "enter_block"
    check_table(where, table)
    if codes is not None:
        check_table(where, codes)
    if len(anchor.shape) != 1 or rows < 1:
        raise DSpineError(f"{where}: anchor must have shape [B] and rows be 1 or more, got {tuple(anchor.shape)} and {rows}")
    if tuple(fill.shape) != (table.shape[1],):
        raise DSpineError(f"{where}: fill must have shape ({table.shape[1]},), got {tuple(fill.shape)}")


def check_round_uniforms(table: Array, generated: Array) -> None:
    """Raise `DSpineError` where shapes do not fit together."""
    if len(table.shape) != 3 or table.shape[2] != 3 or tuple(generated.shape) != (table.shape[0],):
        raise DSpineError(
            f"round_uniforms: table must have shape [B, P, 3] and generated [B], got {tuple(table.shape)} and "
            f"{tuple(generated.shape)}"
        )


def check_round_limits(remaining: Array, finite: Array, w: int, limits: Array | None) -> None:
    """Raise `DSpineError` where shapes do not fit together."""
    given = [remaining, finite, *([] if limits is None else [limits])]
    if len(remaining.shape) != 1 or any(x.shape != remaining.shape for x in given) or w < 1:
        shapes = ", ".join(str(tuple(x.shape)) for x in given)
        raise DSpineError(
            f"round_limits: remaining, finite and limits must have one shape [B] and w be 1 or more, got {shapes}, {w}"
        )


def check_place_drafts(tokens: Array, finite: Array | None, anchor: Array, block: Array, flags: Array) -> None:
    """Raise `DSpineError` where shapes do not fit together."""
    where = "place_drafts"
    if len(block.shape) != 2 or len(tokens.shape) != 2 or tokens.shape[1] >= block.shape[1]:
        raise DSpineError(
            f"{where}: tokens must have shape [B, M] and block [B, W] with M below W, got {tuple(tokens.shape)} and "
            f"{tuple(block.shape)}"
        )
    for name, x in {"tokens": tokens[:, :0], "finite": finite, "anchor": anchor, "flags": flags}.items():
        if x is not None and tuple(x.shape[:1]) != (block.shape[0],):
            raise DSpineError(f"{where}: {name} must be of {block.shape[0]} sequences, got shape {tuple(x.shape)}")
