"""Messages of the injection straight from the readout products: unit norms, the anchor's code, the shift by one row, gate and
message, in one launch.

A row's norm divides its products afterwards, so z is never rounded. The two products of the predecessor are one, of weights
that alternate row by row: products that share an operand would keep the compiler from dealing their columns out to the warps.
A column's inputs may be split over programs, whose last adds the sums of all in their own order; the split depends on the rank
alone, so a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import injection
from dspine.common.injection import InjectionWeights
from dspine.kernels_triton import _launch
from dspine.kernels_triton._choices import choice
from dspine.kernels_triton._launch import (
    FLOATS,
    arrive,
    arrived,
    counters,
    early,
    expect_dtype,
    multiply,
    narrow,
    overlaps,
    power_of_2,
    programs_of,
    sigmoid,
)
from dspine.kernels_triton.injection_gate import check_weights, fetch_part, pair_of

ROWS = 16
LEAST_PART = 128  # inputs of a column that a program takes at least


@dataclass(frozen=True)
class Launch:
    """columns: outputs of a program; step: inputs it reads at a time; stages: of the pipeline; split: programs that share a
    column's inputs; late: 1 where the next launch may start only behind the products."""

    columns: int = 32
    step: int = 64
    num_warps: int = 4
    stages: int = 5
    split: int = 4
    late: int = 1


def choose(rank: int, dtype: torch.dtype) -> Launch:
    """Launch parameters for readouts of this rank; `injection_messages=…` in DSPINE_KERNELS_TRY replaces those of bfloat16."""
    return choice("injection_messages", Launch()) if dtype == torch.bfloat16 else Launch(16, 64, 4, 2, 4)


@triton.jit
def _store_sums(sums, hearing, both, own, other, row, column, pair, total, size, SPLIT: tl.constexpr):
    """This program's sums among those of all: sums float32 [SPLIT, total, size], [SPLIT, total, 2 size], [SPLIT, column blocks,
    2, total]. pair: columns of `both`."""
    area = total.to(tl.int64) * size
    at, part = row.to(tl.int64)[:, None], tl.program_id(2)
    inside = (row < total)[:, None]
    tl.store(sums + part * area + at * size + column[None, :], hearing, mask=inside & (column < size)[None, :])
    two = sums + (SPLIT + 2 * part) * area + at * (2 * size) + pair[None, :]
    tl.store(two, both, mask=inside & (pair < 2 * size)[None, :])
    squares = sums + SPLIT * 3 * area + (part * tl.num_programs(0) + tl.program_id(0)) * 2 * total + row
    tl.store(squares, own, mask=row < total)
    tl.store(squares + total, other, mask=row < total)


@triton.jit
def _finish(
    hearing, both, of_self, of_other, shift, out, heard, row, column, place, total, size, root,
    BN: tl.constexpr, BA: tl.constexpr, HEARD: tl.constexpr,
):  # fmt: skip
    """The whole sums of a tile divided by the norms, then gate, message and product."""
    sending, sent = tl.split(both.reshape(BN, BA, 2))
    own = (root / tl.sqrt(tl.where(of_self > 0, of_self, root * root)))[:, None]  # rows of zeros stay zeros
    theirs = (root / tl.sqrt(tl.where((place > 1) & (of_other > 0), of_other, root * root)))[:, None]  # a code is not divided
    inside = (row < total)[:, None] & (column < size)[None, :]
    to = row.to(tl.int64)[:, None] * size + column[None, :]
    gate = hearing * own
    if HEARD:
        tl.store(heard + to, tl.where((place > 0)[:, None], gate, 0.0), mask=inside)
    gate += sending * theirs
    gate += arrive(shift).to(tl.float32)[None, :]
    gated = tl.where((place > 0)[:, None], sent * theirs * sigmoid(gate), 0.0)
    tl.store(out + to, narrow(gated, out.dtype.element_ty), mask=inside)


@triton.jit
def _squares(x):
    wide = arrive(x).to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def _injection_messages_kernel(
    raw, codes, of_receiver, of_predecessor, message, bias, out, heard, sums, counter, total, size, rank, root,
    R: tl.constexpr, BN: tl.constexpr, BA: tl.constexpr, BR: tl.constexpr, PART: tl.constexpr, PART_PAD: tl.constexpr,
    SPLIT: tl.constexpr, HEARD: tl.constexpr, OVERLAP: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """PART: inputs of one program, a multiple of BR; PART_PAD: the power of two above it. sums and counter (`_store_sums`):
    where SPLIT > 1. heard: where HEARD."""
    row = tl.program_id(1) * BN + tl.arange(0, BN)
    column = tl.program_id(0) * BA + tl.arange(0, BA)
    begin = tl.program_id(2) * PART
    place = row % R  # 0: the anchor, 1: hears the anchor's code
    if OVERLAP:
        if not LATE:
            gdc_launch_dependents()
        if tl.program_id(1) == 0:
            fetch_part(of_receiver, column, begin, size, rank, PART_PAD)
            fetch_part(of_predecessor, column, begin, size, rank, PART_PAD)
            fetch_part(message, column, begin, size, rank, PART_PAD)
        gdc_wait()
    known = (row < total)[:, None]
    at = tl.minimum(row, total - 1).to(tl.int64) * rank
    own_row = raw + at
    their_row = tl.where(place == 1, codes + (row // R).to(tl.int64) * rank, raw + tl.maximum(at - rank, 0))
    # for the norms and the gate; asked for now, used behind the products
    shift = tl.load(bias + column, mask=column < size, other=0.0)
    whole = tl.arange(0, PART_PAD)
    of_part = known & ((whole < PART) & (begin + whole < rank))[None, :]
    own_part = tl.load(own_row[:, None] + begin + whole[None, :], mask=of_part, other=0.0)
    their_part = tl.load(their_row[:, None] + begin + whole[None, :], mask=of_part, other=0.0)
    receivers = of_receiver + column.to(tl.int64) * rank
    others, of_pair = pair_of(of_predecessor, message, tl.program_id(0) * BA, BA, rank)
    hearing = tl.zeros([BN, BA], tl.float32)
    both = tl.zeros([BN, 2 * BA], tl.float32)
    for start in range(0, PART, BR):
        lane = begin + start + tl.arange(0, BR)
        of_row, real = known & (lane < rank)[None, :], (lane < rank)[:, None]
        hears = tl.load(own_row[:, None] + lane[None, :], mask=of_row, other=0.0)
        of_own = tl.load(receivers[None, :] + lane[:, None], mask=real & (column < size)[None, :], other=0.0)
        hearing += multiply(hears, of_own)
        before = tl.load(their_row[:, None] + lane[None, :], mask=of_row, other=0.0)
        of_both = tl.load(others[None, :] + lane[:, None], mask=real & (of_pair < size)[None, :], other=0.0)
        both += multiply(before, of_both)
    if OVERLAP and LATE:
        gdc_launch_dependents()
    of_self, of_other = _squares(own_part), _squares(their_part)
    if SPLIT == 1:
        _finish(hearing, both, of_self, of_other, shift, out, heard, row, column, place, total, size, root, BN, BA, HEARD)
    else:
        pair = tl.program_id(0) * 2 * BA + tl.arange(0, 2 * BA)
        _store_sums(sums, hearing, both, of_self, of_other, row, column, pair, total, size, SPLIT)
        if arrived(counter + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), SPLIT):
            area = total.to(tl.int64) * size
            first = row.to(tl.int64)[:, None]
            one, of_one = sums + first * size + column[None, :], known & (column < size)[None, :]
            two, of_two = sums + SPLIT * area + first * (2 * size) + pair[None, :], known & (pair < 2 * size)[None, :]
            squares = sums + SPLIT * 3 * area + tl.program_id(0) * 2 * total + row
            hearing = tl.zeros([BN, BA], tl.float32)
            both = tl.zeros([BN, 2 * BA], tl.float32)
            of_self = tl.zeros([BN], tl.float32)
            of_other = tl.zeros([BN], tl.float32)
            for part in tl.static_range(SPLIT):  # past the first-level cache, which may hold what was there before
                hearing += tl.load(one + part * area, mask=of_one, other=0.0, cache_modifier=".cg")
                both += tl.load(two + part * 2 * area, mask=of_two, other=0.0, cache_modifier=".cg")
                here = squares + part * tl.num_programs(0) * 2 * total
                of_self += tl.load(here, mask=row < total, other=0.0, cache_modifier=".cg")
                of_other += tl.load(here + total, mask=row < total, other=0.0, cache_modifier=".cg")
            _finish(hearing, both, of_self, of_other, shift, out, heard, row, column, place, total, size, root, BN, BA, HEARD)


def supports(raw: Tensor, anchor_code: Tensor, weights: InjectionWeights, heard: bool = False) -> bool:
    """One dtype out of bfloat16 and float32."""
    dtypes = {x.dtype for x in (raw, anchor_code, weights.message, weights.receiver_gate, weights.predecessor_gate)}
    return len(dtypes) == 1 and raw.dtype in FLOATS


def launch(raw: Tensor, anchor_code: Tensor, weights: InjectionWeights, out: Tensor, heard: Tensor | None) -> None:
    """raw [B, R, r], anchor_code [B, r] -> out [B, R, a] and, unless it is None, heard float32 [B, R, a]; all contiguous, none
    checked. The weights may be read before the launch in front has ended."""
    (batch, rows, rank), size = raw.shape, weights.message.shape[0]
    chosen = choose(rank, raw.dtype)
    total, split = batch * rows, max(1, min(chosen.split, rank // LEAST_PART))
    step = min(chosen.step, power_of_2(triton.cdiv(rank, 2 * split), 16))  # a single step would not be pipelined
    part = triton.cdiv(rank, split * step) * step
    columns = programs_of(size, chosen.columns)
    blocks, row_blocks = triton.cdiv(size, columns), triton.cdiv(total, ROWS)
    sums, counter = out, out
    if split > 1:
        sums = torch.empty(split * total * (3 * size + 2 * blocks), dtype=torch.float32, device=raw.device)
        counter = counters(weights.message, blocks * row_blocks)
    _injection_messages_kernel[(blocks, row_blocks, split)](
        raw, anchor_code, weights.receiver_gate, weights.predecessor_gate, weights.message, weights.bias, out,
        out if heard is None else heard, sums, counter, total, size, rank, rank**0.5, R=rows, BN=ROWS, BA=columns, BR=step,
        PART=part, PART_PAD=power_of_2(part, 64), SPLIT=split, HEARD=heard is not None, LATE=bool(chosen.late),
        num_warps=chosen.num_warps, num_stages=chosen.stages, **early(overlaps(raw)),
    )  # fmt: skip


def injection_messages(
    raw: Tensor, anchor_code: Tensor, weights: InjectionWeights, heard: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """`common.injection.injection_messages`: the same arguments, results and errors; weights must be contiguous."""
    where = "injection_messages"
    injection.check_injection_messages(raw, anchor_code, weights)
    expect_dtype(where, "raw", raw, *FLOATS)
    check_weights(where, weights, raw.shape[-1], raw.dtype)
    shape = (*raw.shape[:2], weights.message.shape[0])
    out = torch.empty(shape, dtype=raw.dtype, device=raw.device)
    receivers = torch.empty(shape, dtype=torch.float32, device=raw.device) if heard else None
    if raw.shape[0]:
        launch(raw.contiguous(), anchor_code.contiguous(), weights, out, receivers)
    return out if receivers is None else (out, receivers)


def register() -> None:
    """Tell the core about `injection_messages` on CUDA."""
    _launch.register(injection_messages, supports)
