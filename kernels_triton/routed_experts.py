"""The experts of 1..16 tokens: only experts that are hit are read, each once; the shared one, the residual and the next norm
come in the same three launches.

One program a (token, pick) pair and slice of the outputs. It works only where its pair is the first that names the expert,
and then for every token that does: 16 rows whatever N is, so a token's numbers do not depend on the tokens beside it.
Which rows those are is read off the picks themselves; there is no sorting and no host read. The last row of programs is the
shared expert's, for all tokens. The sums over a token's experts run in the order of its picks, the shared one last: the
result is deterministic.

The first launch lets the second begin once it has the picks itself: so the second reads the picks, and asks the cache for its
weights, while the first still runs. Where the first leaves no room for that and all outer weights fit the second-level cache
(one token's experts), its programs ask for them themselves as they end (`experts_ahead=0` in `DSPINE_KERNELS_TRY`: not).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import experts
from dspine.common.experts import SharedExpert
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import (
    FLOATS,
    contiguous,
    early,
    fetch,
    multiply,
    multiply_terms,
    narrow,
    overlaps,
    power_of_2,
    programs_of,
    sigmoid,
    variant,
)

MAX_TOKENS = 16
LARGEST_ROW = 16384  # of the last launch: one program holds a row
CACHED = 24 * 2**20  # bytes of outer weights that the first launch asks for, at most: half the cache of a Hopper GPU


@dataclass(frozen=True)
class Launch:
    """columns: outputs of a program; step: inputs it reads at a time; stages: of the pipeline; fetch: inputs of each column
    that the second launch asks for before it waits (0: none)."""

    columns: int
    step: int
    num_warps: int
    stages: int
    fetch: int = 512


# One token's 8 experts of Qwen3.6-35B-A3B: 256 and 288 programs of 96 and 64 KiB in flight each; the first was the fastest of
# `benchmarks.kernels.decode --tune` at one token (24.8 us, with 128 inputs at a time 31), none is better at 16
INNER, OUTER = Launch(16, 512, 4, 3), Launch(64, 128, 4, 4)


def whole(chosen: Launch, columns: int, size: int) -> Launch:
    """`chosen`, or larger programs where the interpreter runs."""
    columns, step = (programs_of(min(n, 512), least) for n, least in ((columns, chosen.columns), (size, chosen.step)))
    return replace(chosen, columns=columns, step=step)


@triton.jit
def _rows_of(picks, pair, tokens, k, K_PAD: tl.constexpr):
    """Of the pair's expert: (expert, whether this pair is the first with it, tokens [16] that picked it, at which place)."""
    expert = tl.load(picks + pair, cache_modifier=".cg")  # past the first-level cache, which an early start may find stale
    token, place = tl.arange(0, 16), tl.arange(0, K_PAD)
    at = token[:, None] * k + place[None, :]
    inside = (token < tokens)[:, None] & (place < k)[None, :]
    same = inside & (tl.load(picks + at, mask=inside, other=-1, cache_modifier=".cg") == expert)
    first = tl.min(tl.min(tl.where(same, at, 16 * K_PAD), 1), 0)
    return expert, first == pair, tl.max(same.to(tl.int32), 1) > 0, tl.sum(tl.where(same, place[None, :], 0), 1)


@triton.jit
def _inner_kernel(
    x, picks, gate_up, hidden, entry, entry_stride, shared_hidden, down, tokens, k, size, inner, shared_inner,
    K_PAD: tl.constexpr, SIZE_PAD: tl.constexpr, BI: tl.constexpr, BH: tl.constexpr, SHARED: tl.constexpr,
    NEXT: tl.constexpr, LINES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """hidden[n, j, :] = silu(gate) * up of the pair (n, j), and shared_hidden[n, :] of the shared expert's products. NEXT: rows
    of `down`, of LINES times 128 bytes, that a program asks for (0: none)."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()  # not before: whoever starts now finds the picks
    pair = tl.program_id(1)
    token = tl.arange(0, 16)
    column = tl.program_id(0) * BI + tl.arange(0, BI)
    if SHARED and pair == tokens * k:
        inside = (token < tokens)[:, None] & (column < shared_inner)[None, :]
        at = token[:, None] * entry_stride + column[None, :]
        gate = tl.load(entry + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(entry + at + shared_inner, mask=inside, other=0.0).to(tl.float32)
        tl.store(shared_hidden + token[:, None] * shared_inner + column[None, :], gate * sigmoid(gate) * up, mask=inside)
    elif pair < tokens * k:
        expert, first, chosen, place = _rows_of(picks, pair, tokens, k, K_PAD)
        if first:
            # rows of gate and up in turn, so that one product makes both
            both = tl.arange(0, 2 * BI)
            wanted = tl.program_id(0) * BI + both // 2
            base = gate_up + expert.to(tl.int64) * (2 * inner) * size + ((both % 2) * inner + wanted).to(tl.int64) * size
            total = tl.zeros([16, 2 * BI], tl.float32)
            for start in range(0, SIZE_PAD, BH):
                lane = start + tl.arange(0, BH)
                of_row = chosen[:, None] & (lane < size)[None, :]
                of_weight = (lane < size)[:, None] & (wanted < inner)[None, :]
                rows = tl.load(x + token[:, None] * size + lane[None, :], mask=of_row, other=0.0)
                total += multiply(rows, tl.load(base[None, :] + lane[:, None], mask=of_weight, other=0.0))
            if NEXT > 0:
                row = tl.minimum(tl.program_id(0) * NEXT + tl.arange(0, NEXT), size - 1)
                line = tl.minimum(tl.arange(0, LINES) * 64, inner - 1)
                fetch(down + (expert.to(tl.int64) * size + row)[:, None] * inner + line[None, :])
            gate, up = tl.split(tl.reshape(total, [16, BI, 2]))
            at = (token * k + place)[:, None] * inner + column[None, :]
            tl.store(hidden + at, gate * sigmoid(gate) * up, mask=chosen[:, None] & (column < inner)[None, :])


@triton.jit
def _product(
    rows, weight, chosen, column, width, size, PAD: tl.constexpr, BH: tl.constexpr, BI: tl.constexpr, FETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """[16, BH] float32: rows float32 (16 pointers to `width` each) times rows `column` of weight [size, width]."""
    total = tl.zeros([16, BH], tl.float32)
    base = weight + tl.minimum(column, size - 1).to(tl.int64) * width
    if OVERLAP:  # the rows come from the launch in front, the weights do not
        if FETCH > 0:
            fetch(base[:, None] + tl.minimum(tl.arange(0, FETCH // 64) * 64, width - 1)[None, :])
        gdc_wait()
    for start in range(0, PAD, BI):
        lane = start + tl.arange(0, BI)
        left = tl.load(rows[:, None] + lane[None, :], mask=chosen[:, None] & (lane < width)[None, :], other=0.0)
        right = tl.load(base[None, :] + lane[:, None], mask=(lane < width)[:, None] & (column < size)[None, :], other=0.0)
        total += multiply_terms(left, right)
    return total


@triton.jit
def _outer_kernel(
    hidden, picks, weights, down, amount, amount_stride, shared_hidden, shared_down, each, tokens, k, size, inner, shared_inner,
    K_PAD: tl.constexpr, INNER_PAD: tl.constexpr, SHARED_PAD: tl.constexpr, BH: tl.constexpr, BI: tl.constexpr,
    SHARED: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """each[n, j, :] = weight of the pair * down(hidden[n, j]); the shared expert's stands behind the picks."""
    if OVERLAP:
        gdc_launch_dependents()
    pair = tl.program_id(1)
    token = tl.arange(0, 16)
    column = tl.program_id(0) * BH + tl.arange(0, BH)
    slots = k + SHARED
    if SHARED and pair == tokens * k:
        chosen = token < tokens
        rows = shared_hidden + token * shared_inner
        total = _product(rows, shared_down, chosen, column, shared_inner, size, SHARED_PAD, BH, BI, FETCH, OVERLAP)
        share = sigmoid(tl.load(amount + token * amount_stride, mask=chosen, other=0.0).to(tl.float32))
        at = (token * slots + k)[:, None] * size + column[None, :]
        tl.store(each + at, total * share[:, None], mask=chosen[:, None] & (column < size)[None, :])
    elif pair < tokens * k:
        expert, first, chosen, place = _rows_of(picks, pair, tokens, k, K_PAD)
        if first:
            pairs = token * k + place
            base = down + expert.to(tl.int64) * size * inner
            total = _product(hidden + pairs * inner, base, chosen, column, inner, size, INNER_PAD, BH, BI, FETCH, OVERLAP)
            share = tl.load(weights + pairs, mask=chosen, other=0.0)
            at = (token * slots + place)[:, None] * size + column[None, :]
            tl.store(each + at, total * share[:, None], mask=chosen[:, None] & (column < size)[None, :])
        elif OVERLAP:
            gdc_wait()  # whoever waits for this launch relies on the one in front being done as well


@triton.jit
def _sum_kernel(
    each, residual, norm, out, normed, size, eps, SLOTS: tl.constexpr, BH: tl.constexpr, ADDS: tl.constexpr,
    HAS_NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """out[n] = sum_j each[n, j] (+ residual), and its norm: one program a row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BH)
    inside = column < size
    if HAS_NORM:
        weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BH], tl.float32)
    for j in tl.static_range(SLOTS):
        total += tl.load(each + (row * SLOTS + j) * size + column, mask=inside, other=0.0)
    if ADDS:
        total += tl.load(residual + row * size + column, mask=inside, other=0.0).to(tl.float32)
    rounded = narrow(total, out.dtype.element_ty)
    tl.store(out + row * size + column, rounded, mask=inside)
    if HAS_NORM:
        total = rounded.to(tl.float32)
        scale = tl.rsqrt(tl.sum(total * total, 0) / size + eps)
        tl.store(normed + row * size + column, narrow(weight * (total * scale), normed.dtype.element_ty), mask=inside)


def supports(
    x: Tensor, picks: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    shared: SharedExpert | None = None, residual: Tensor | None = None, norm: Any | None = None,
) -> bool:  # fmt: skip
    """At most 16 tokens; one dtype out of bfloat16 and float32; contiguous weights; a norm whose weight and eps are read."""
    one = x.dtype == gate_up.dtype == down.dtype and x.dtype in FLOATS and weights.dtype == torch.float32
    fine = shared is None or (shared.down.is_contiguous() and shared.gate_up.stride(-1) == 1)
    readable = norm is None or (isinstance(norm.weight, Tensor) and isinstance(norm.eps, float))
    rows = 1 <= x.shape[0] <= MAX_TOKENS and x.shape[1] <= LARGEST_ROW
    return one and fine and readable and rows and gate_up.is_contiguous() and down.is_contiguous()


@dataclass(frozen=True)
class Room:
    """What the launches write: hidden float32 [N k, I], shared float32 [N, Is], each float32 [N (k + 1), H] (k without a shared
    expert), out and normed [N, H]."""

    hidden: Tensor
    shared: Tensor
    each: Tensor
    out: Tensor
    normed: Tensor


def room_of(x: Tensor, picks: Tensor, down: Tensor, shared: SharedExpert | None, has_norm: bool) -> Room:
    """Uninitialised memory for a call; `normed` is `out` without a norm."""
    (count, k), (size, inner) = picks.shape, down.shape[1:]
    width, slots = (0, k) if shared is None else (shared.down.shape[1], k + 1)

    def wide(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    out = torch.empty((count, size), dtype=x.dtype, device=x.device)
    hidden = wide(count * k, inner)
    return Room(
        hidden, wide(count, width) if shared is not None else hidden, wide(count * slots, size), out,
        torch.empty_like(out) if has_norm else out,
    )  # fmt: skip


def launch(
    x: Tensor, picks: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, room: Room,
    shared: SharedExpert | None = None, residual: Tensor | None = None, norm: Any | None = None,
    parameters: tuple[Launch, Launch] | None = None,
) -> None:  # fmt: skip
    """Launch into `room`; contiguous but for the shared expert's rows, none checked. Only the norm's weight is read before
    the launch in front has ended."""
    (tokens, k), (size, inner) = picks.shape, down.shape[1:]
    first, second = parameters or (whole(INNER, inner, size), whole(OUTER, size, inner))
    overlap = overlaps(x)
    later = early(overlap)
    k_pad, has_shared = power_of_2(k), shared is not None
    width = shared.down.shape[1] if shared is not None else 0
    entry, amount, shared_down = (shared.gate_up, shared.amount, shared.down) if shared is not None else (x, x, down)
    rows, programs = tokens * k + has_shared, triton.cdiv(max(inner, width), first.columns)
    fits = tokens * k * size * inner * down.element_size() <= CACHED
    ahead = overlap and fits and variant("experts_ahead", True)
    _inner_kernel[(programs, rows)](
        x, picks, gate_up, room.hidden, entry, entry.stride(0), room.shared, down, tokens, k, size, inner, width, K_PAD=k_pad,
        SIZE_PAD=triton.cdiv(size, first.step) * first.step, BI=first.columns, BH=first.step, SHARED=has_shared,
        NEXT=power_of_2(triton.cdiv(size, programs)) if ahead else 0, LINES=power_of_2(triton.cdiv(inner, 64)),
        num_warps=first.num_warps, num_stages=first.stages, **later,
    )  # fmt: skip
    _outer_kernel[(triton.cdiv(size, second.columns), rows)](
        room.hidden, picks, weights, down, amount, amount.stride(0), room.shared, shared_down, room.each, tokens, k, size,
        inner, width, K_PAD=k_pad, INNER_PAD=triton.cdiv(inner, second.step) * second.step,
        SHARED_PAD=triton.cdiv(width, second.step) * second.step, BH=second.columns, BI=second.step, SHARED=has_shared,
        FETCH=power_of_2(min(second.fetch, inner), 64) if second.fetch else 0, num_warps=second.num_warps,
        num_stages=second.stages, **later,
    )  # fmt: skip
    weight, eps = (x, 0.0) if norm is None else (norm.weight, norm.eps)
    _sum_kernel[(tokens,)](
        room.each, x if residual is None else residual, weight, room.out, room.normed, size, eps, SLOTS=k + has_shared,
        BH=power_of_2(size), ADDS=residual is not None, HAS_NORM=norm is not None, num_warps=8, **later,
    )  # fmt: skip


def routed_experts(
    x: Tensor, picks: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor,
    shared: SharedExpert | None = None, residual: Tensor | None = None, norm: Any | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`common.experts.routed_experts`: the same arguments, results and errors; the weights must be contiguous."""
    experts.check_experts(x, picks, weights, gate_up, down, shared, residual, norm)
    contiguous("routed_experts", gate_up=gate_up, down=down)
    if shared is not None:
        contiguous("routed_experts", **{"shared.down": shared.down})
    room = room_of(x, picks, down, shared, norm is not None)
    left = None if residual is None else residual.contiguous()
    launch(x.contiguous(), picks.contiguous(), weights.contiguous(), gate_up, down, room, shared, left, norm)
    return room.out if norm is None else (room.out, room.normed)


def register() -> None:
    """Tell the core about `routed_experts` on CUDA."""
    _launch.register(routed_experts, supports)
