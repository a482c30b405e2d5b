"""The end of a round on the device: what a verdict emits, and how every sequence's counters go on (`architecture`, one round).

Letters: B sequences, w verified tokens, W tokens of the longest block, S stop tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import arange, array_namespace, astype, row_at
from dspine.common.errors import DSpineError
from dspine.common.registry import operation

Array = Any
REPORT_HEAD = 4  # emitted, accepted, verified, finite; then the block and the emitted tokens, W each


@dataclass(frozen=True)
class Counters:
    """int32 [B] each: committed tokens; the newest token, not yet processed; tokens still to be emitted; tokens emitted."""

    lengths: Array
    anchor: Array
    remaining: Array
    generated: Array


@dataclass(frozen=True)
class Settled:
    """m int32 [B] tokens that are emitted and committed; `before` int32 [B], the lengths without them; counters and report as
    they are now."""

    m: Array
    before: Array
    counters: Counters
    report: Array


@operation
def settle_round(
    accepted: Array, next_token: Array, block: Array, finite: Array, counters: Counters, stops: Array, report: Array, w: int
) -> Settled:
    """Emit the accepted drafts and the token behind them, cut at a stop token and at the budget.

    accepted int [B] <= w - 1, next_token int [B]; block int32 [B, W]: the anchor, then drafts, of which w - 1 were verified;
    finite bool [B] (only reported); stops int32 [S], -1 where unused; report int32 [B, 4 + 2 W]. A sequence without budget
    emits nothing and stays as it is; a stop token among the emitted ones takes the whole budget. Report: m, accepted,
    min(remaining, w), finite, the block, the w emitted tokens (m of them count; what stood behind them stays).
    A kernel writes counters and report in place and returns them, the core's own code returns new ones.
    """
    xp = array_namespace(accepted, block)
    check_settle_round(accepted, next_token, block, finite, counters, stops, report, w)
    rows = block.shape[1]
    live = xp.clip(counters.remaining, None, w)
    count = astype(accepted, xp.int32)
    token = xp.expand_dims(astype(next_token, xp.int32), axis=1)
    index = xp.expand_dims(arange(block, w, xp.int32), axis=0)
    drafts = xp.concat([block[:, 1:w], token], axis=1)
    emitted = xp.where(index < xp.expand_dims(count, axis=1), drafts, xp.broadcast_to(token, tuple(drafts.shape)))
    ends = xp.any(xp.expand_dims(emitted, axis=-1) == xp.reshape(stops, (1, 1, -1)), axis=-1)
    ends = ends & (index <= xp.expand_dims(count, axis=1))
    first = xp.min(xp.where(ends, index, xp.full_like(emitted, w)), axis=1)
    m = xp.minimum(xp.minimum(count + 1, first + 1), live)
    stopped = (first < m) & (live > 0)
    last = row_at(emitted, xp.clip(m - 1, 0, None))
    head = xp.stack([m, count, live, astype(finite, xp.int32)], axis=1)
    after = report[:, REPORT_HEAD + rows + w :]
    found = Counters(
        counters.lengths + m,
        xp.where(m > 0, last, counters.anchor),
        xp.where(stopped, xp.zeros_like(m), counters.remaining - m),
        counters.generated + m,
    )
    return Settled(m, counters.lengths + xp.zeros_like(m), found, xp.concat([head, block, emitted, after], axis=1))


def check_settle_round(
    accepted: Array, next_token: Array, block: Array, finite: Array, counters: Counters, stops: Array, report: Array, w: int
) -> None:
    """Raise `DSpineError` where shapes or dtypes do not fit together."""
    where = "settle_round"
    if len(block.shape) != 2 or not 1 <= w <= block.shape[1]:
        raise DSpineError(f"{where}: block must have shape [B, W] with W >= w = {w} >= 1, got {tuple(block.shape)}")
    batch, rows = block.shape
    of_batch = {"accepted": accepted, "next_token": next_token, "finite": finite, **vars(counters)}
    for name, x in of_batch.items():
        if tuple(x.shape) != (batch,):
            raise DSpineError(f"{where}: {name} must have shape ({batch},), got {tuple(x.shape)}")
    if tuple(report.shape) != (batch, REPORT_HEAD + 2 * rows):
        raise DSpineError(f"{where}: report must have shape {(batch, REPORT_HEAD + 2 * rows)}, got {tuple(report.shape)}")
    if len(stops.shape) != 1 or not stops.shape[0]:
        raise DSpineError(f"{where}: stops must have shape [S] with S >= 1, got {tuple(stops.shape)}")
    for name, x in {"block": block, "stops": stops, "report": report, **vars(counters)}.items():
        if "int32" not in str(x.dtype):
            raise DSpineError(f"{where}: {name} must be int32, got {x.dtype}")
