"""Which drafts stay (`algorithms` 2): greedy and the point-mass rule, with per-row limits.

Both split the vocabulary over programs and join in a second, small launch. The draw is the two-level inverse CDF of
`common.sampling.sample_index`: sums of 256 entries, then inside one of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspine.common.acceptance import Verdict
from dspine.common.errors import DSpineError
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, expect_dtype, expect_shape, power_of_2

SLICE = 8192  # logits that a program of the greedy rule reads
BLOCK, BLOCKS = 256, 16  # the draw: entries of a sum, sums of a program


@triton.jit
def _leading(yes, limit, i):
    """How many of `yes` [WP] hold from the start, looking at the first `limit` only."""
    size: tl.constexpr = yes.shape[0]
    return tl.min(tl.where(yes & (i < limit), size, i), 0)


@triton.jit
def _argmax_part_kernel(logits, values, ids, vocabulary, parts, SIZE: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = part * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * vocabulary + lane, mask=lane < vocabulary, other=float("-inf")).to(tl.float32)
    tl.store(values + row * parts + part, tl.max(x, 0))
    tl.store(ids + row * parts + part, part * SIZE + tl.argmax(x, 0).to(tl.int32))


@triton.jit
def _accept_greedy_kernel(
    values, ids, draft, limit, accepted, next_token, parts, W: tl.constexpr, WP: tl.constexpr, PARTS: tl.constexpr
):
    batch = tl.program_id(0).to(tl.int64)
    i, part = tl.arange(0, WP), tl.arange(0, PARTS)
    at = (batch * W + i)[:, None] * parts + part[None, :]
    x = tl.load(values + at, mask=(i < W)[:, None] & (part < parts)[None, :], other=float("-inf"))
    best = tl.argmax(x, 1)
    choice = tl.load(ids + (batch * W + i) * parts + best, mask=i < W, other=-1)
    drafted = tl.load(draft + batch * (W - 1) + i, mask=i < W - 1, other=-2).to(tl.int32)
    count = _leading((choice == drafted) & (i < W - 1), tl.load(limit + batch), i)
    tl.store(accepted + batch, count.to(tl.int32))
    tl.store(next_token + batch, tl.sum(tl.where(i == count, choice, 0), 0).to(tl.int64))


@triton.jit
def _accepted(p, draft, limit, u_accept, batch, vocabulary, W: tl.constexpr, WP: tl.constexpr):
    """(accepted, the draft rejected after them or -1)."""
    i = tl.arange(0, WP)
    inside = i < W - 1
    drafted = tl.load(draft + batch * (W - 1) + i, mask=inside, other=0).to(tl.int32)
    chance = tl.load(p + (batch * W + i) * vocabulary + drafted, mask=inside, other=0.0)
    u = tl.load(u_accept + batch * (W - 1) + i, mask=inside, other=1.0)
    cap = tl.load(limit + batch)
    count = _leading((u < chance) & inside, cap, i)
    rejected = tl.sum(tl.where(i == count, drafted, 0), 0)
    return count, tl.where((count < cap) & (count < W - 1), rejected, -1)


@triton.jit
def _mass_kernel(
    p, draft, limit, u_accept, sums, vocabulary, blocks,
    W: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    count, rejected = _accepted(p, draft, limit, u_accept, batch, vocabulary, W, WP)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    lane = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(p + (batch * W + count) * vocabulary + lane, mask=lane < vocabulary, other=0.0)
    tl.store(sums + batch * blocks + block, tl.sum(tl.where(lane == rejected, 0.0, x), 1), mask=block < blocks)


@triton.jit
def _draw(weights, threshold, lane):
    """First index whose running sum exceeds `threshold`, and the sum before it; clamped to positive weights."""
    running = tl.cumsum(weights, 0)
    positive = weights > 0.0
    last = tl.max(tl.where(positive, lane, 0), 0)
    index = tl.min(tl.where(positive & (running > threshold), lane, last), 0)
    return index, tl.sum(tl.where(lane == index, running - weights, 0.0), 0)


@triton.jit
def _draw_kernel(
    p, draft, limit, u_accept, u_draw, sums, accepted, next_token, vocabulary, blocks,
    W: tl.constexpr, WP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS_PAD: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    count, rejected = _accepted(p, draft, limit, u_accept, batch, vocabulary, W, WP)
    u = tl.load(u_draw + batch * W + count)
    block = tl.arange(0, BLOCKS_PAD)
    mass = tl.load(sums + batch * blocks + block, mask=block < blocks, other=0.0)
    total = tl.sum(mass, 0)
    at, before = _draw(mass, u * total, block)
    lane = tl.arange(0, BLOCK)
    ids = at * BLOCK + lane
    x = tl.load(p + (batch * W + count) * vocabulary + ids, mask=ids < vocabulary, other=0.0)
    inside, _ = _draw(tl.where(ids == rejected, 0.0, x), u * total - before, lane)
    # without mass outside the rejected draft (only rounding can do that) it is the draft itself
    token = tl.where((total > 0.0) | (rejected < 0), at * BLOCK + inside, rejected)
    tl.store(accepted + batch, count.to(tl.int32))
    tl.store(next_token + batch, token.to(tl.int64))


def supports_greedy(logits: Tensor, *_: object, **__: object) -> bool:
    """bfloat16 and float32 logits."""
    return logits.dtype in FLOATS


def supports_point_mass(p: Tensor, *_: object, **__: object) -> bool:
    """float32 probabilities over a vocabulary of up to 2 million."""
    return p.dtype == torch.float32 and p.shape[-1] <= 2**21


def _check(where: str, name: str, p: Tensor, draft: Tensor, limit: Tensor) -> tuple[int, int, int]:
    if p.dim() != 3 or not p.shape[1]:
        raise DSpineError(f"{where}: {name} must have shape [B, w, V] with w of at least 1, got {tuple(p.shape)}")
    batch, count, vocabulary = p.shape
    expect_shape(where, "draft", draft, (batch, count - 1))
    expect_shape(where, "limit", limit, (batch,))
    for what, x in (("draft", draft), ("limit", limit)):
        expect_dtype(where, what, x, torch.int32, torch.int64)
    return batch, count, vocabulary


def _verdict(like: Tensor) -> Verdict:
    accepted = torch.empty(like.shape[0], dtype=torch.int32, device=like.device)
    return Verdict(accepted, torch.empty(like.shape[0], dtype=torch.int64, device=like.device))


def accept_greedy(logits: Tensor, draft: Tensor, limit: Tensor) -> Verdict:
    """`common.acceptance.accept_greedy`: logits [B, w, V], draft int [B, w-1], limit int [B]."""
    where = "accept_greedy"
    batch, count, vocabulary = _check(where, "logits", logits, draft, limit)
    expect_dtype(where, "logits", logits, *FLOATS)
    verdict = _verdict(logits)
    size = min(SLICE, power_of_2(vocabulary))
    parts = triton.cdiv(vocabulary, size)
    values = torch.empty((batch, count, parts), dtype=torch.float32, device=logits.device)
    ids = torch.empty((batch, count, parts), dtype=torch.int32, device=logits.device)
    if batch:
        _argmax_part_kernel[(parts, batch * count)](logits.contiguous(), values, ids, vocabulary, parts, SIZE=size, num_warps=8)
        _accept_greedy_kernel[(batch,)](
            values, ids, draft.contiguous(), limit.contiguous(), verdict.accepted, verdict.next_token, parts,
            W=count, WP=power_of_2(count), PARTS=power_of_2(parts), num_warps=4,
        )  # fmt: skip
    return verdict


def accept_point_mass(p: Tensor, draft: Tensor, limit: Tensor, u_accept: Tensor, u_draw: Tensor) -> Verdict:
    """`common.acceptance.accept_point_mass`: p float32 [B, w, V], u_accept [B, w-1], u_draw [B, w]."""
    where = "accept_point_mass"
    batch, count, vocabulary = _check(where, "p", p, draft, limit)
    for name, x, shape in (("u_accept", u_accept, (batch, count - 1)), ("u_draw", u_draw, (batch, count))):
        expect_shape(where, name, x, shape)
        expect_dtype(where, name, x, torch.float32)
    expect_dtype(where, "p", p, torch.float32)
    verdict = _verdict(p)
    blocks = triton.cdiv(vocabulary, BLOCK)
    sums = torch.empty((batch, blocks), dtype=torch.float32, device=p.device)
    if batch:
        inputs = [x.contiguous() for x in (p, draft, limit, u_accept)]
        padded = power_of_2(count)
        _mass_kernel[(triton.cdiv(blocks, BLOCKS), batch)](
            *inputs, sums, vocabulary, blocks, W=count, WP=padded, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=4
        )
        _draw_kernel[(batch,)](
            *inputs, u_draw.contiguous(), sums, verdict.accepted, verdict.next_token, vocabulary, blocks,
            W=count, WP=padded, BLOCK=BLOCK, BLOCKS_PAD=power_of_2(blocks), num_warps=4,
        )  # fmt: skip
    return verdict


def register() -> None:
    """Tell the core about `accept_greedy` and `accept_point_mass` on CUDA."""
    _launch.register(accept_greedy, supports_greedy)
    _launch.register(accept_point_mass, supports_point_mass)
