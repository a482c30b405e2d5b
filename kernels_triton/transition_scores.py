"""All K x K transition scores of every position (`algorithms` 1): last-layer write for every predecessor candidate, final
norm, and the K candidates' rows of the LM head only.

The norm divides by a number of the whole row, so it can come last: the hidden size is split over programs, each leaves its
part of (w o h) E^T and of sum h^2, and a last small launch adds and divides. h is never rounded nor written out.

What bounds these launches is not memory but what programs read again out of the second-level cache: every tile of pairs reads
all weights, every tile of columns all pairs. So tiles are large (64 pairs), and what the K pairs of a position share, the
receiver's half of the gate, is found once (here by a product of its own, in `candidate_scores` by the layer's messages).
Every launch may start under the one in front of it; those with weights ask the cache for them before they wait.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common.injection import InjectionWeights
from dspine.kernels_triton import _launch, injection_gate, linear_rows
from dspine.kernels_triton._choices import choice
from dspine.kernels_triton._launch import (
    FLOATS,
    arrive,
    contiguous,
    early,
    expect_dtype,
    expect_shape,
    fetch,
    multiply,
    narrow,
    overlaps,
    power_of_2,
    programs_of,
    sigmoid,
    thirds,
)
from dspine.kernels_triton.injection_gate import fetch_part, pair_of
from dspine.kernels_triton.injection_write import readable_norm

RECEIVERS = linear_rows.Launch(16, 256, 2, 4, 512, 2)  # few columns: their inputs split over programs


@dataclass(frozen=True)
class Gate:
    """pairs and columns of a program's tile; step: inputs it reads at a time; stages: of the pipeline; late: 1 where the next
    launch may start only behind the products."""

    pairs: int = 64
    columns: int = 32
    step: int = 128
    num_warps: int = 4
    stages: int = 4
    late: int = 0


@dataclass(frozen=True)
class Part:
    """columns: of the hidden size, of a program; pairs: of its tile (whole rows of the block); step: message entries it reads
    at a time; stages and late as in `Gate`."""

    columns: int = 64
    pairs: int = 64
    step: int = 128
    num_warps: int = 4
    stages: int = 3
    late: int = 0


def gate_choice(dtype: torch.dtype) -> Gate:
    """Launch parameters of gate and message; `transition_gate=…` in DSPINE_KERNELS_TRY replaces those of bfloat16."""
    return choice("transition_gate", Gate()) if dtype == torch.bfloat16 else Gate(16, 16, 64, 4, 2)


def part_choice(dtype: torch.dtype) -> Part:
    """Launch parameters of the scores' parts; `transition_part=…` in DSPINE_KERNELS_TRY replaces those of bfloat16."""
    return choice("transition_part", Part()) if dtype == torch.bfloat16 else Part(64, 32, 32, 4, 2)


def _product_choice(chosen: linear_rows.Launch, dtype: torch.dtype, columns: int) -> linear_rows.Launch | None:
    return None if dtype == torch.float32 else replace(chosen, columns=programs_of(columns, chosen.columns))


@triton.jit
def _readout_kernel(
    raw, hidden, z, rms, rank, columns, scale, BR: tl.constexpr, BH: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """z = sqrt(r) normalize(raw) and RMS(u) of one row."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BR)
    x = tl.load(raw + row * rank + lane, mask=lane < rank, other=0.0)
    norm = tl.sqrt(tl.sum(x * x, 0))
    unit = x / tl.where(norm > 0.0, norm, 1.0) * scale
    tl.store(z + row * rank + lane, narrow(unit, z.dtype.element_ty), mask=lane < rank)
    lane = tl.arange(0, BH)
    u = tl.load(hidden + row * columns + lane, mask=lane < columns, other=0.0).to(tl.float32)
    tl.store(rms + row, tl.sqrt(tl.sum(u * u, 0) / columns))


@triton.jit
def _gate_kernel(
    heard, anchor, codes, ids, of_predecessor, message, bias, hidden, gated, rms, pairs, size, rank, columns, vocabulary,
    heard_stride, hidden_stride, root,
    M: tl.constexpr, K: tl.constexpr, TABLE: tl.constexpr, BN: tl.constexpr, BA: tl.constexpr, BR: tl.constexpr,
    RANK_PAD: tl.constexpr, BH: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Gate x message of every pair (position, predecessor candidate), from what positions hear (float32, without the bias).

    TABLE: codes is the table [V, r] of unit rows, whose rows are those of the candidates `ids` of the position before, the
    anchor's in front of the first; the factor sqrt(r) comes last. Else codes are the pairs' own, as they are. Where TABLE,
    programs behind the last columns find RMS(u), one row each. Blocks of M positions lie `heard_stride` and `hidden_stride`
    apart."""
    if OVERLAP:
        if not LATE:
            gdc_launch_dependents()
    block = tl.program_id(0)
    blocks = tl.cdiv(size, BA)
    if block >= blocks:
        if OVERLAP:
            gdc_wait()
        one = (block - blocks) * tl.num_programs(1) + tl.program_id(1)
        if one < pairs // K:
            whole = tl.arange(0, BH)
            begin = (one // M).to(tl.int64) * hidden_stride + (one % M) * columns
            u = tl.load(hidden + begin + whole, mask=whole < columns, other=0.0).to(tl.float32)
            tl.store(rms + one, tl.sqrt(tl.sum(u * u, 0) / columns))
    else:
        pair = tl.program_id(1) * BN + tl.arange(0, BN)
        column = block * BA + tl.arange(0, BA)
        position = tl.minimum(pair, pairs - 1) // K
        known_row, known_column = (pair < pairs)[:, None], (column < size)[None, :]
        if OVERLAP:
            if tl.program_id(1) == 0:
                fetch_part(of_predecessor, column, 0, size, rank, FETCH)
                fetch_part(message, column, 0, size, rank, FETCH)
            gdc_wait()
        if TABLE:
            first = position % M == 0
            token = tl.load(ids + tl.maximum(pair - K, 0), mask=(pair < pairs) & (position % M > 0), other=0)
            token = tl.minimum(tl.maximum(token.to(tl.int64), 0), vocabulary - 1)  # an idle slot's may be anything
            source = tl.where(first, anchor + (position // M).to(tl.int64) * rank, codes + token * rank)
            factor = tl.where(first, 1.0, root)[:, None]
        else:
            source = codes + tl.minimum(pair, pairs - 1).to(tl.int64) * rank
        weights, of_pair = pair_of(of_predecessor, message, block * BA, BA, rank)
        # asked for now, used behind the products
        inside = known_row & known_column
        at = (position // M).to(tl.int64) * heard_stride + (position % M) * size
        own = tl.load(heard + at[:, None] + column[None, :], mask=inside, other=0.0)
        shift = tl.load(bias + column, mask=column < size, other=0.0)
        both = tl.zeros([BN, 2 * BA], tl.float32)
        for start in range(0, RANK_PAD, BR):
            lane = start + tl.arange(0, BR)
            before = tl.load(source[:, None] + lane[None, :], mask=known_row & (lane < rank)[None, :], other=0.0)
            of_weight = (of_pair < size)[None, :] & (lane < rank)[:, None]
            both += multiply(before, tl.load(weights[None, :] + lane[:, None], mask=of_weight, other=0.0))
        gate, sent = tl.split(both.reshape(BN, BA, 2))
        if OVERLAP and LATE:
            gdc_launch_dependents()
        if TABLE:
            gate, sent = gate * factor, sent * factor
        made = sent * sigmoid(arrive(own) + arrive(shift).to(tl.float32)[None, :] + gate)
        tl.store(gated + pair.to(tl.int64)[:, None] * size + column[None, :], narrow(made, gated.dtype.element_ty), mask=inside)


@triton.jit
def _part_kernel(
    hidden, rms, gated, write, norm, head, ids, products, squares, rows, columns, size, parts, vocabulary,
    hidden_stride,
    M: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, EACH: tl.constexpr, TABLE: tl.constexpr, BH: tl.constexpr,
    SIZE_PAD: tl.constexpr, BA: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """This part's (w o h) E^T [predecessor, successor], and sum h^2 of every predecessor. EACH: rows of a program, which share
    its part of `write`. FETCH: the power of two above `size`. TABLE: head is [V, H], with the candidates `ids`; else the rows
    of every pair. Blocks of M positions of `hidden` lie `hidden_stride` apart."""
    part, entry = tl.program_id(0), tl.arange(0, EACH * KP)
    candidate = entry % KP
    row = tl.program_id(1) * EACH + entry // KP
    known_row = (row < rows)[:, None]
    real = (row < rows) & (candidate < K)
    column = part * BH + tl.arange(0, BH)
    known_column = (column < columns)[None, :]
    if OVERLAP:
        if not LATE:
            gdc_launch_dependents()
        if tl.program_id(1) == 0:
            line = tl.minimum(tl.arange(0, FETCH // 64) * 64, size - 1)
            fetch(write + tl.minimum(column, columns - 1).to(tl.int64)[:, None] * size + line[None, :])
        gdc_wait()
    pair = row * K + candidate
    token = pair.to(tl.int64)
    if TABLE:
        token = tl.minimum(tl.maximum(tl.load(ids + pair, mask=real, other=0).to(tl.int64), 0), vocabulary - 1)
    of_head = tl.load(head + (token * columns)[:, None] + column[None, :], mask=real[:, None] & known_column, other=0.0)
    # what a row's pairs share; asked for now, used behind the products
    own = tl.program_id(1) * EACH + tl.arange(0, EACH)
    at_own = (own // M).to(tl.int64) * hidden_stride + (own % M) * columns
    own_u = tl.load(hidden + at_own[:, None] + column[None, :], mask=(own < rows)[:, None] & known_column, other=0.0)
    own_rms = tl.load(rms + own, mask=own < rows, other=0.0)
    scale = tl.load(norm + column, mask=column < columns, other=0.0)
    message = tl.zeros([EACH * KP, BH], dtype=tl.float32)
    for start in range(0, SIZE_PAD, BA):
        lane = start + tl.arange(0, BA)
        at = (pair.to(tl.int64) * size)[:, None] + lane[None, :]
        left = tl.load(gated + at, mask=real[:, None] & (lane < size)[None, :], other=0.0)
        of_weight = known_column & (lane < size)[:, None]
        right = tl.load(write + column.to(tl.int64)[None, :] * size + lane[:, None], mask=of_weight, other=0.0)
        message += multiply(left, right)
    if OVERLAP and LATE:
        gdc_launch_dependents()
    u = arrive(own_u).to(tl.float32)
    h = tl.reshape(message, [EACH, KP, BH]) * arrive(own_rms)[:, None, None] + u[:, None, :]
    place = row.to(tl.int64) * parts + part
    tl.store(squares + place * KP + candidate, tl.reshape(tl.sum(h * h, 2), [EACH * KP]), mask=row < rows)
    h = tl.reshape(h * arrive(scale).to(tl.float32)[None, None, :], [EACH * KP, BH])
    rows_of_head = tl.trans(arrive(of_head))
    at = ((place * KP + candidate) * KP)[:, None] + candidate[None, :]
    paired = known_row & ((entry // KP)[:, None] == (entry // KP)[None, :])  # predecessors and successors of one row
    SPLIT: tl.constexpr = rows_of_head.dtype == tl.bfloat16
    if SPLIT:
        high, middle, low = thirds(h, SPLIT)
        score = multiply(low, rows_of_head) + multiply(middle, rows_of_head) + multiply(high, rows_of_head)
    else:
        score = tl.dot(h, rows_of_head, input_precision="ieee")
    tl.store(products + at, score, mask=paired)


@triton.jit
def _join_kernel(
    products, squares, scores, columns, eps, parts, K: tl.constexpr, KP: tl.constexpr, PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row and predecessor."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, predecessor = tl.program_id(1).to(tl.int64), tl.program_id(0)
    part, successor = tl.arange(0, PARTS), tl.arange(0, KP)
    at = (row * parts + part) * KP + predecessor
    total = tl.sum(tl.load(products + at[:, None] * KP + successor[None, :], mask=(part < parts)[:, None], other=0.0), 0)
    square = tl.sum(tl.load(squares + at, mask=part < parts, other=0.0), 0)
    score = total / tl.sqrt(square / columns + eps)
    tl.store(scores + (row * K + predecessor) * K + successor, score, mask=successor < K)


@dataclass(frozen=True)
class Operands:
    """What both operations hand to the last three launches; all contiguous but `hidden` and `heard`, whose blocks of M rows may
    lie apart. hidden [B, M, H], heard float32 [B, M, a]. With ids [B, M, K]: codes [V, r], head [V, H] and anchor_code [B, r];
    without: codes [B, M, K, r] and head [B, M, K, H]."""

    hidden: Tensor
    heard: Tensor
    codes: Tensor
    head: Tensor
    k: int
    ids: Tensor | None = None
    anchor_code: Tensor | None = None


def launch_gate(of: Operands, weights: InjectionWeights, gated: Tensor, rms: Tensor) -> None:
    """gated [B M K, a]; with ids also rms float32 [B M]."""
    (batch, count, columns), (size, rank) = of.hidden.shape, weights.message.shape
    chosen, table = gate_choice(of.hidden.dtype), of.ids is not None
    pairs, wide = batch * count * of.k, programs_of(size, chosen.columns)
    step, row_blocks = min(chosen.step, power_of_2(rank, 16)), triton.cdiv(pairs, chosen.pairs)
    blocks = triton.cdiv(size, wide) + (triton.cdiv(batch * count, row_blocks) if table else 0)
    _gate_kernel[(blocks, row_blocks)](
        of.heard, of.anchor_code if table else of.codes, of.codes, of.ids if table else of.codes, weights.predecessor_gate,
        weights.message, weights.bias, of.hidden, gated, rms, pairs, size, rank, columns, of.codes.shape[0],
        of.heard.stride(0), of.hidden.stride(0), rank**0.5, M=count, K=of.k, TABLE=table, BN=chosen.pairs, BA=wide, BR=step,
        RANK_PAD=triton.cdiv(rank, step) * step, BH=power_of_2(columns), FETCH=power_of_2(rank, 64),
        LATE=bool(chosen.late), num_warps=chosen.num_warps, num_stages=chosen.stages, **early(overlaps(of.hidden)),
    )  # fmt: skip


def launch_part(
    of: Operands, weights: InjectionWeights, norm: Any, gated: Tensor, rms: Tensor, products: Tensor, squares: Tensor
) -> None:
    """products float32 [B M, parts, KP, KP], squares [B M, parts, KP]."""
    batch, count, columns = of.hidden.shape
    size, parts, padded = gated.shape[1], products.shape[1], products.shape[2]
    chosen, table = part_choice(of.hidden.dtype), of.ids is not None
    each = max(1, chosen.pairs // padded)
    step = min(chosen.step, power_of_2(size, 16))
    _part_kernel[(parts, triton.cdiv(batch * count, each))](
        of.hidden, rms, gated, weights.write, norm.weight.detach().contiguous(), of.head, of.ids if table else of.codes,
        products, squares, batch * count, columns, size, parts, of.head.shape[0],
        of.hidden.stride(0), M=count, K=of.k, KP=padded, EACH=each,
        TABLE=table, BH=chosen.columns, SIZE_PAD=triton.cdiv(size, step) * step, BA=step, FETCH=power_of_2(size, 64),
        LATE=bool(chosen.late), num_warps=chosen.num_warps, num_stages=chosen.stages, **early(overlaps(of.hidden)),
    )  # fmt: skip


def score(of: Operands, weights: InjectionWeights, norm: Any, rms: Tensor, scores: Tensor) -> Tensor:
    """The last three launches: fill scores float32 [B, M, K, K]. With ids, rms float32 [B M] is found here too."""
    u, k = of.hidden, of.k
    rows, columns = u.shape[0] * u.shape[1], u.shape[2]
    gated = torch.empty((rows * k, weights.message.shape[0]), dtype=u.dtype, device=u.device)
    parts, padded = triton.cdiv(columns, part_choice(u.dtype).columns), power_of_2(k, 16)
    products = torch.empty((rows, parts, padded, padded), dtype=torch.float32, device=u.device)
    squares = torch.empty((rows, parts, padded), dtype=torch.float32, device=u.device)
    launch_gate(of, weights, gated, rms)
    launch_part(of, weights, norm, gated, rms, products, squares)
    _join_kernel[(k, rows)](
        products, squares, scores, columns, norm.eps, parts, K=k, KP=padded, PARTS=power_of_2(parts), num_warps=1,
        **early(overlaps(u)),
    )  # fmt: skip
    return scores


def supports(hidden: Tensor, predecessor_codes: Tensor, candidate_rows: Tensor, weights: InjectionWeights, norm: Any) -> bool:
    """bfloat16 or float32, one dtype for hidden, weights and LM-head rows; a norm whose weight and eps can be read."""
    dtypes = {hidden.dtype, candidate_rows.dtype, *(getattr(weights, name).dtype for name in _WEIGHTS)}
    return len(dtypes) == 1 and hidden.dtype in FLOATS and readable_norm(norm, hidden) and candidate_rows.shape[-2] <= 64


_WEIGHTS = ("readout", "write", "message", "receiver_gate", "predecessor_gate")


def _check(hidden: Tensor, codes: Tensor, rows: Tensor, weights: InjectionWeights) -> None:
    where = "transition_scores"
    expect_dtype(where, "hidden", hidden, *FLOATS)
    size, rank, k = weights.message.shape[0], weights.readout.shape[0], codes.shape[-2]
    expect_shape(where, "predecessor_codes", codes, (*hidden.shape[:-1], k, rank))
    expect_shape(where, "candidate_rows", rows, (*hidden.shape[:-1], k, hidden.shape[-1]))
    expect_dtype(where, "candidate_rows", rows, hidden.dtype)
    expect_shape(where, "weights.readout", weights.readout, (rank, hidden.shape[-1]))
    expect_shape(where, "weights.write", weights.write, (hidden.shape[-1], size))
    for name in ("readout", "write"):
        expect_dtype(where, f"weights.{name}", getattr(weights, name), hidden.dtype)
    contiguous(where, readout=weights.readout, write=weights.write)
    injection_gate.check_weights(where, weights, rank, hidden.dtype)


def transition_scores(
    hidden: Tensor, predecessor_codes: Tensor, candidate_rows: Tensor, weights: InjectionWeights, norm: Any
) -> Tensor:
    """`common.transition.transition_scores`: hidden [..., M, H], codes [..., M, K, r], rows [..., M, K, H] -> float32
    [..., M, K, K]. `norm` must have `weight` [H] and `eps`."""
    _check(hidden, predecessor_codes, candidate_rows, weights)
    columns, (k, rank), size = hidden.shape[-1], predecessor_codes.shape[-2:], weights.message.shape[0]
    u = hidden.reshape(1, -1, columns).contiguous()
    rows, device = u.shape[1], u.device
    scores = torch.empty((*hidden.shape[:-1], k, k), dtype=torch.float32, device=device)
    if not rows:
        return scores

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    raw, rms, heard = floats(rows, rank), floats(rows), floats(1, rows, size)
    z = torch.empty((rows, rank), dtype=u.dtype, device=device)
    linear_rows.launch(u[0], weights.readout, raw)
    _readout_kernel[(rows,)](
        raw, u, z, rms, rank, columns, rank**0.5, BR=power_of_2(rank), BH=power_of_2(columns), num_warps=8,
        **early(overlaps(u)),
    )  # fmt: skip
    linear_rows.launch(z, weights.receiver_gate, heard[0], _product_choice(RECEIVERS, u.dtype, size))
    codes = predecessor_codes.reshape(rows * k, rank).to(u.dtype).contiguous()
    return score(
        Operands(u, heard, codes, candidate_rows.reshape(rows * k, columns).contiguous(), k), weights, norm, rms, scores
    )


def register() -> None:
    """Tell the core about `transition_scores` on CUDA."""
    _launch.register(transition_scores, supports)
