"""Attention of 1..16 new tokens over a long cache, split over its rows, lengths read on the device.

Every program takes one chunk of the cache for all query heads of a key head; chunks behind the sequence's end leave at
once. A second launch joins the chunks. Chunks have fixed borders and a row's place in a tile does not depend on w, so a
token's numbers are the same alone and in a block.

Both launches read the lengths, and the first asks for its rows of the cache, before they wait for the launch in front; the
second lets the next one begin at once, so the product behind attention fetches its weights under it (`attention_ahead=0` in
`DSPINE_KERNELS_TRY`: neither).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import attention
from dspine.kernels_triton import _launch
from dspine.kernels_triton._choices import choice
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
    variant,
)

MAX_TOKENS, ROWS = 16, 64  # rows: of a tile of queries
PARTS = 64  # chunks of a full cache, at most


@dataclass(frozen=True)
class Launch:
    """chunk: rows of the cache of a program, at least; tile: of them at a time; stages: tiles in flight (with three, two
    programs no longer fit a multiprocessor, and heads of 256 not even one)."""

    chunk: int = 128
    tile: int = 64
    num_warps: int = 4
    stages: int = 2


def choose(size: int) -> Launch:
    """For heads of `size`; `attention=chunk,tile,warps,stages` in DSPINE_KERNELS_TRY replaces it."""
    chosen = choice("attention", Launch() if size <= 128 else Launch(num_warps=8))
    return replace(chosen, chunk=programs_of(256, chosen.chunk))


def chunk_of(capacity: int, size: int) -> int:
    """Rows of the cache that one program takes: a power of two, the same for every length and w."""
    return max(choose(size).chunk, power_of_2(triton.cdiv(capacity, PARTS)))


@triton.jit
def _chunk_kernel(
    query, keys, values, lengths, mixed, top, total, scale, capacity,
    HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, W: tl.constexpr, BR: tl.constexpr,
    CHUNK: tl.constexpr, BT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, OVERLAP: tl.constexpr,
    AHEAD: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """AHEAD: the length is read, and what stands in the cache already is asked for, before the wait. LINES: of 128 bytes
    in a row of it."""
    if OVERLAP:
        gdc_launch_dependents()
    part, pair = tl.program_id(0), tl.program_id(1)  # pair: batch x key head
    batch, key_head = pair // HK, pair % HK
    start = part * CHUNK
    if OVERLAP and not AHEAD:
        gdc_wait()
    length = tl.load(lengths + batch).to(tl.int32)
    if AHEAD:
        if start < length:
            row = tl.minimum(start + tl.arange(0, CHUNK), length - 1)
            line = tl.minimum(tl.arange(0, LINES) * (D_PAD // LINES), D - 1)
            at = pair.to(tl.int64) * capacity * D + row[:, None] * D + line[None, :]
            fetch(keys + at)
            fetch(values + at)
        gdc_wait()
    end = length + W
    rows = tl.program_id(2) * BR + tl.arange(0, BR)
    token = rows // G
    place = length + token
    if WINDOW > 0:
        reached = start + CHUNK > length - WINDOW  # the first token's window
    else:
        reached = True
    if (start < end) & reached:
        live = token < W
        dim = tl.arange(0, D_PAD)
        of_row = live[:, None] & (dim < D)[None, :]
        head = key_head * G + rows % G
        q = tl.load(
            query + ((batch * W + token)[:, None] * (HK * G) + head[:, None]) * D + dim[None, :], mask=of_row, other=0.0
        )
        first = pair.to(tl.int64) * capacity * D
        largest = tl.full([BR], -float("inf"), tl.float32)
        weights = tl.zeros([BR], tl.float32)
        out = tl.zeros([BR, D_PAD], tl.float32)
        for step in range(0, CHUNK, BT):
            column = start + step + tl.arange(0, BT)
            inside = column < end
            k = tl.load(keys + first + column[None, :] * D + dim[:, None], mask=inside[None, :] & (dim < D)[:, None], other=0.0)
            v = tl.load(
                values + first + column[:, None] * D + dim[None, :], mask=inside[:, None] & (dim < D)[None, :], other=0.0
            )
            score = multiply(q, k) * scale
            seen = inside[None, :] & live[:, None]
            if CAUSAL:
                seen = seen & (column[None, :] <= place[:, None])
            if WINDOW > 0:
                seen = seen & (column[None, :] > place[:, None] - WINDOW)
            score = tl.where(seen, score, -float("inf"))
            new = tl.maximum(largest, tl.max(score, 1))
            safe = tl.where(new > -float("inf"), new, 0.0)
            kept = tl.exp(largest - safe)
            weight = tl.exp(score - safe[:, None])
            weights = weights * kept + tl.sum(weight, 1)
            out = out * kept[:, None] + multiply_terms(weight, v)
            largest = new
        at = (pair.to(tl.int64) * tl.num_programs(0) + part) * (W * G) + rows
        tl.store(top + at, largest, mask=live)
        tl.store(total + at, weights, mask=live)
        tl.store(mixed + at[:, None] * D + dim[None, :], out, mask=of_row)


@triton.jit
def _join_kernel(
    mixed, top, total, lengths, out, parts,
    HK: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, W: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, OVERLAP: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    if AHEAD:
        gdc_launch_dependents()
    row, pair = tl.program_id(0), tl.program_id(1)  # row: token x head of the group
    batch, key_head = pair // HK, pair % HK
    if OVERLAP and not AHEAD:
        gdc_wait()
    length = tl.load(lengths + batch).to(tl.int32)
    if AHEAD:
        gdc_wait()
    dim, part = tl.arange(0, D_PAD), tl.arange(0, PARTS)
    live = part * CHUNK < length + W
    if WINDOW > 0:
        live = live & (part * CHUNK + CHUNK > length - WINDOW)
    at = (pair.to(tl.int64) * parts + part) * (W * G) + row
    largest = tl.load(top + at, mask=live, other=-float("inf"))
    weight = tl.exp(largest - tl.max(largest, 0))
    whole = tl.sum(weight * tl.load(total + at, mask=live, other=0.0), 0)
    inside = live[:, None] & (dim < D)[None, :]
    joined = tl.sum(weight[:, None] * tl.load(mixed + at[:, None] * D + dim[None, :], mask=inside, other=0.0), 0) / whole
    place = (batch * W + row // G) * (HK * G) + key_head * G + row % G
    tl.store(out + place.to(tl.int64) * D + dim, narrow(joined, out.dtype.element_ty), mask=dim < D)


def supports(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, *_: object, **__: object) -> bool:
    """At most 16 tokens, heads of 16 to 256, one dtype out of bfloat16 and float32, contiguous caches."""
    one = query.dtype == keys.dtype == values.dtype and query.dtype in FLOATS
    return one and 1 <= query.shape[1] <= MAX_TOKENS and 16 <= query.shape[-1] <= 256 and keys.is_contiguous()


def launch(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, out: Tensor, scratch: tuple[Tensor, Tensor, Tensor],
    scale: float, causal: bool, window: int | None,
) -> None:  # fmt: skip
    """Launch into `out`; scratch as `scratch_of` makes it. All contiguous, none checked. `lengths` may be read before the
    launch in front has ended (`_launch.early`: who may write them)."""
    batch, count, heads, size = query.shape
    key_heads, capacity = keys.shape[1], keys.shape[2]
    group, chunk, chosen = heads // key_heads, chunk_of(capacity, size), choose(size)
    parts = triton.cdiv(capacity, chunk)
    shape = {"HK": key_heads, "G": group, "D": size, "D_PAD": power_of_2(size, 16), "W": count, "CHUNK": chunk}
    overlap = overlaps(query)
    shape |= {"WINDOW": window or 0, "AHEAD": overlap and variant("attention_ahead", True), **early(overlap)}
    rows = min(ROWS, power_of_2(MAX_TOKENS * group, 16))
    mixed, top, total = scratch
    _chunk_kernel[(parts, batch * key_heads, triton.cdiv(count * group, rows))](
        query, keys, values, lengths, mixed, top, total, scale, capacity, BR=rows, BT=chosen.tile, CAUSAL=causal,
        LINES=max(1, shape["D_PAD"] * query.element_size() // 128), num_warps=chosen.num_warps, num_stages=chosen.stages,
        **shape,
    )  # fmt: skip
    _join_kernel[(count * group, batch * key_heads)](
        mixed, top, total, lengths, out, parts, PARTS=power_of_2(parts, 16), num_warps=4, **shape
    )


def scratch_of(query: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for the chunks' results: mixed float32 [B * Hk * parts * w * G, D] and two float32 vectors."""
    batch, count, heads, size = query.shape
    entries = batch * heads * count * triton.cdiv(capacity, chunk_of(capacity, size))
    kind = {"dtype": torch.float32, "device": query.device}
    return torch.empty((entries, size), **kind), torch.empty(entries, **kind), torch.empty(entries, **kind)


def block_attention(
    query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """`common.attention.block_attention`: the same arguments, results and errors; keys and values must be contiguous."""
    attention.check_block_attention(query, keys, values, lengths, window)
    contiguous("block_attention", keys=keys, values=values)
    query = query.contiguous()
    out = torch.empty_like(query)
    launch(query, keys, values, lengths, out, scratch_of(query, keys.shape[2]), scale, causal, window)
    return out


def register() -> None:
    """Tell the core about `block_attention` on CUDA."""
    _launch.register(block_attention, supports)
