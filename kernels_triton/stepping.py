"""The small steps of a round, one launch each: rows of tables, uniforms, limits, the block and its lengths. Those that do not
begin a graph start under the launch in front, but for `round_limits`: what it writes is read early (`_launch.early`)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import stepping
from dspine.common.selection import lengths as core_lengths
from dspine.common.selection.lengths import RoundLengths
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, contiguous, early, expect_dtype, narrow, overlaps, power_of_2

PIECE = 2048  # columns of a row that a program copies
LONGEST, MOST = 64, 1024  # tokens of a block; sequences
INTS = (torch.int32, torch.int64)


@triton.jit
def _table_rows_kernel(
    table, ids, out, width, height, count, step, PIECE: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    token = tl.load(ids + (row // count) * step + row % count).to(tl.int64)
    lane = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    known = (token >= 0) & (token < height)  # an id outside is the caller's fault, and reads nothing
    x = tl.load(table + token * width + lane, mask=known & (lane < width), other=0.0)
    tl.store(out + row.to(tl.int64) * width + lane, x, mask=lane < width)


@triton.jit
def _enter_block_kernel(
    table, anchor, fill, codes, block, code, width, rank, height, scale, code_scale, rows, PIECE: tl.constexpr
):  # fmt: skip
    """Rows 0..rows-1 of a block, and its code as row `rows`."""
    batch, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    token = tl.load(anchor + batch).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), height - 1)  # an id outside is the caller's fault, and reads the nearest row
    if row == rows:
        x = tl.load(codes + token * rank + lane, mask=lane < rank, other=0.0).to(tl.float32) * code_scale
        tl.store(code + batch * rank + lane, narrow(x, code.dtype.element_ty), mask=lane < rank)
    else:
        source = table + token * width
        if row > 0:
            source = fill
        x = tl.load(source + lane, mask=lane < width, other=0.0).to(tl.float32)
        x = tl.where(row == 0, x * scale, x)
        tl.store(block + (batch * rows + row) * width + lane, narrow(x, block.dtype.element_ty), mask=lane < width)


@triton.jit
def _uniforms_kernel(table, generated, out, positions, count, LANES: tl.constexpr, PAD: tl.constexpr):
    batch, lanes = tl.program_id(0), tl.num_programs(0)
    i = tl.arange(0, PAD)
    at = tl.minimum(tl.load(generated + batch).to(tl.int32) + i, positions - 1)
    for lane in tl.static_range(LANES):
        x = tl.load(table + (batch.to(tl.int64) * positions + at) * LANES + lane, mask=i < count, other=0.0)
        tl.store(out + (lane * lanes + batch) * count + i, x, mask=i < count)


@triton.jit
def _limits_kernel(remaining, finite, limits, live, limit, batch, w, CAPPED: tl.constexpr, PAD: tl.constexpr):
    b = tl.arange(0, PAD)
    held = b < batch
    rows = tl.minimum(tl.load(remaining + b, mask=held, other=0), w)
    if CAPPED:
        rows = tl.minimum(rows, tl.load(limits + b, mask=held, other=0))
    is_finite = tl.load(finite + b, mask=held, other=0).to(tl.int32) != 0
    tl.store(live + b, rows, mask=held)
    tl.store(limit + b, tl.where(is_finite, tl.maximum(rows - 1, 0), 0), mask=held)


@triton.jit
def _place_drafts_kernel(
    tokens, finite, anchor, block, flags, count, rows, CHECKED: tl.constexpr, PAD: tl.constexpr, OVERLAP: tl.constexpr
):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    batch = tl.program_id(0)
    i = tl.arange(0, PAD)
    is_finite = tl.full([], 1, tl.int32)
    if CHECKED:
        is_finite = tl.load(finite + batch).to(tl.int32)
    x = tl.load(tokens + batch * count + i, mask=i < count, other=0).to(tl.int32)
    tl.store(block + batch * rows + 1 + i, tl.where(is_finite != 0, x, 0), mask=i < count)
    tl.store(block + batch * rows, tl.load(anchor + batch))
    tl.store(flags + batch, is_finite != 0)


@triton.jit
def _bound_lengths_kernel(
    length, stage_zero, survival, finite, remaining, nominal, upper, chosen, kept, rows, drafts, step,
    CORRECTED: tl.constexpr, PAD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    batch = tl.program_id(0)
    i = tl.arange(0, PAD)
    found = tl.load(length + batch).to(tl.int32)
    is_finite = tl.load(finite + batch).to(tl.int32) != 0
    most = tl.maximum(tl.where(is_finite, tl.minimum(tl.load(remaining + batch), rows), 1), 1)
    reach = found
    if CORRECTED:
        reach = tl.load(stage_zero + batch).to(tl.int32)
    tl.store(nominal + batch, found)
    tl.store(upper + batch, tl.minimum(reach, most))
    tl.store(chosen + batch, tl.minimum(found, most))
    tl.store(kept + batch * step + i, tl.load(survival + batch * drafts + i, mask=i < drafts, other=0.0), mask=i < drafts)


def supports_rows(table: Tensor, ids: Tensor) -> bool:
    """bfloat16 and float32 tables."""
    return table.dtype in FLOATS and table.dim() == 2 and table.is_contiguous()


def table_rows(table: Tensor, ids: Tensor) -> Tensor:
    """`common.stepping.table_rows`: table [V, d] contiguous, ids int [...] (rows perhaps apart) -> [..., d]."""
    stepping.check_table("table_rows", table)
    expect_dtype("table_rows", "table", table, *FLOATS)
    expect_dtype("table_rows", "ids", ids, *INTS)
    contiguous("table_rows", table=table)
    count, width = math.prod(ids.shape), table.shape[1]
    out = torch.empty((*ids.shape, width), dtype=table.dtype, device=table.device)
    if not ids.is_contiguous() and not (ids.dim() == 2 and ids.stride(1) == 1):
        ids = ids.contiguous()
    each, step = (ids.shape[1], ids.stride(0)) if ids.dim() == 2 else (count, count)
    if count:
        piece = min(PIECE, power_of_2(width))
        _table_rows_kernel[(count, triton.cdiv(width, piece))](
            table, ids, out, width, table.shape[0], each, step, PIECE=piece, num_warps=4, **early(overlaps(table))
        )
    return out


def supports_block(table: Tensor, anchor: Tensor, fill: Tensor, rows: int, codes: Tensor | None, scale: float = 1.0) -> bool:
    """One dtype, bfloat16 or float32; contiguous tables."""
    given = [table, fill] if codes is None else [table, fill, codes]
    return table.dtype in FLOATS and all(x.dtype == table.dtype and x.is_contiguous() for x in given)


def enter_block(
    table: Tensor, anchor: Tensor, fill: Tensor, rows: int, codes: Tensor | None, scale: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """`common.stepping.enter_block`."""
    stepping.check_enter_block(table, anchor, fill, rows, codes)
    expect_dtype("enter_block", "table", table, *FLOATS)
    expect_dtype("enter_block", "fill", fill, table.dtype)
    expect_dtype("enter_block", "anchor", anchor, *INTS)
    contiguous("enter_block", table=table, fill=fill, **({} if codes is None else {"codes": codes}))
    (batch,), width = anchor.shape, table.shape[1]
    rank, height = (0, table.shape[0]) if codes is None else (codes.shape[1], min(table.shape[0], codes.shape[0]))
    block = torch.empty((batch, rows, width), dtype=table.dtype, device=table.device)
    code = None if codes is None else torch.empty((batch, rank), dtype=codes.dtype, device=table.device)
    if batch:
        piece = min(PIECE, power_of_2(max(width, rank)))
        _enter_block_kernel[(batch, rows + (codes is not None), triton.cdiv(max(width, rank), piece))](
            table, anchor.contiguous(), fill, fill if codes is None else codes, block, block if code is None else code, width,
            rank, height, float(scale), float(rank) ** 0.5, rows, PIECE=piece, num_warps=4,
        )  # fmt: skip
    return block, code


def supports_uniforms(table: Tensor, generated: Tensor, count: int) -> bool:
    """float32, up to 64 positions."""
    return table.dtype == torch.float32 and table.is_contiguous() and 0 < count <= LONGEST


def round_uniforms(table: Tensor, generated: Tensor, count: int) -> Tensor:
    """`common.stepping.round_uniforms`: table float32 [B, P, 3] contiguous -> [3, B, count]."""
    stepping.check_round_uniforms(table, generated)
    expect_dtype("round_uniforms", "table", table, torch.float32)
    expect_dtype("round_uniforms", "generated", generated, *INTS)
    contiguous("round_uniforms", table=table)
    batch, positions, lanes = table.shape
    out = torch.empty((lanes, batch, count), dtype=torch.float32, device=table.device)
    if batch and count:
        _uniforms_kernel[(batch,)](
            table, generated.contiguous(), out, positions, count, LANES=lanes, PAD=power_of_2(count), num_warps=1
        )
    return out


def supports_limits(remaining: Tensor, finite: Tensor, w: int, limits: Tensor | None = None) -> bool:
    """Up to 1,024 sequences."""
    return remaining.dtype == torch.int32 and remaining.shape[0] <= MOST


def round_limits(remaining: Tensor, finite: Tensor, w: int, limits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`common.stepping.round_limits`: int32 and bool [B]."""
    stepping.check_round_limits(remaining, finite, w, limits)
    expect_dtype("round_limits", "remaining", remaining, torch.int32)
    expect_dtype("round_limits", "finite", finite, torch.bool, *INTS)
    live, limit = torch.empty_like(remaining), torch.empty_like(remaining)
    batch = remaining.shape[0]
    if batch:
        given = [remaining.contiguous(), finite.contiguous()]
        given.append(given[0] if limits is None else limits.contiguous())
        _limits_kernel[(1,)](*given, live, limit, batch, w, CAPPED=limits is not None, PAD=power_of_2(batch), num_warps=1)
    return live, limit


def supports_drafts(tokens: Tensor, finite: Tensor | None, anchor: Tensor, block: Tensor, flags: Tensor) -> bool:
    """Blocks of up to 64 tokens, contiguous."""
    return block.shape[-1] <= LONGEST and all(x.is_contiguous() for x in (block, flags))


def place_drafts(tokens: Tensor, finite: Tensor | None, anchor: Tensor, block: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
    """`common.stepping.place_drafts`: writes block int32 [B, W] and flags bool [B], which must be contiguous."""
    stepping.check_place_drafts(tokens, finite, anchor, block, flags)
    expect_dtype("place_drafts", "block", block, torch.int32)
    expect_dtype("place_drafts", "anchor", anchor, torch.int32)
    expect_dtype("place_drafts", "tokens", tokens, *INTS)
    contiguous("place_drafts", block=block, flags=flags)
    (batch, count), rows = tokens.shape, block.shape[1]
    if batch:
        tokens, anchor = tokens.contiguous(), anchor.contiguous()
        _place_drafts_kernel[(batch,)](
            tokens if count else anchor, flags if finite is None else finite.contiguous(), anchor, block, flags, count, rows,
            CHECKED=finite is not None, PAD=power_of_2(max(count, 1)), num_warps=1,
            **early(finite is not None and overlaps(block)),  # an anchor alone begins a graph
        )  # fmt: skip
    return block, flags


def supports_lengths(
    length: Tensor, stage_zero: Tensor, survival: Tensor, finite: Tensor, remaining: Tensor, room: RoundLengths, rows: int,
    corrected: bool,
) -> bool:  # fmt: skip
    """Up to 256 drafts, float32 survival, contiguous room."""
    held = vars(room).values()
    return survival.dtype == torch.float32 and survival.shape[-1] <= 256 and all(x.is_contiguous() for x in held)


def bound_lengths(
    length: Tensor, stage_zero: Tensor, survival: Tensor, finite: Tensor, remaining: Tensor, room: RoundLengths, rows: int,
    corrected: bool,
) -> RoundLengths:  # fmt: skip
    """`common.selection.lengths.bound_lengths`: writes `room`, which must be contiguous."""
    core_lengths.check_bound_lengths(length, stage_zero, survival, finite, remaining, room, rows)
    contiguous("bound_lengths", **vars(room))
    batch, drafts = survival.shape
    if batch:
        given = [x.contiguous() for x in (length, stage_zero, survival, finite, remaining)]
        _bound_lengths_kernel[(batch,)](
            *given, *vars(room).values(), rows, drafts, room.survival.shape[1], CORRECTED=corrected, PAD=power_of_2(drafts),
            num_warps=1, **early(overlaps(survival)),
        )  # fmt: skip
    return room


def register() -> None:
    """Tell the core about these steps on CUDA."""
    for function, supports in (
        (table_rows, supports_rows),
        (enter_block, supports_block),
        (round_uniforms, supports_uniforms),
        (round_limits, supports_limits),
        (place_drafts, supports_drafts),
        (bound_lengths, supports_lengths),
    ):
        _launch.register(function, supports)
