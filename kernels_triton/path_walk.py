"""The walk over the transition cache: first every row's choice at once, then M look-ups in a small table.

The table (which candidate follows candidate i at position t) is made in parallel, so the sequential part reads nothing
from memory. Sampling uses the same uniform for all rows of a position; the rows not visited are dropped.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import early, expect_dtype, expect_shape, overlaps, power_of_2


@triton.jit
def _follow(table, M: tl.constexpr, MP: tl.constexpr, KP: tl.constexpr):
    """table int [MP * KP] -> (picks [MP], the pick before each [MP])."""
    entry = tl.arange(0, MP * KP)
    position = tl.arange(0, MP)
    picks = tl.zeros([MP], dtype=tl.int32)
    before = tl.zeros([MP], dtype=tl.int32)
    current = tl.sum(tl.where(entry == 0, table, 0), 0)
    picks = tl.where(position == 0, current, picks)
    for t in tl.static_range(1, M):
        before = tl.where(position == t, current, before)
        current = tl.sum(tl.where(entry == t * KP + current, table, 0), 0)
        picks = tl.where(position == t, current, picks)
    return picks, before


@triton.jit
def _follow_packed(table, M: tl.constexpr, MP: tl.constexpr, KP: tl.constexpr):
    """`_follow` for up to 16 candidates: a position's row is one number of four bits each, so a step is a shift, and what
    fetches the numbers out of their lanes does not wait for the step before."""
    place = tl.arange(0, KP).to(tl.int64) * 4
    packed = tl.sum(tl.reshape(table, [MP, KP]).to(tl.int64) << place[None, :], 1)
    position = tl.arange(0, MP)
    picks = tl.zeros([MP], dtype=tl.int32)
    before = tl.zeros([MP], dtype=tl.int32)
    current = tl.full([], 0, tl.int32)
    for t in tl.static_range(M):
        row = tl.sum(tl.where(position == t, packed, 0), 0)
        before = tl.where(position == t, current, before)
        current = ((row >> (current * 4).to(tl.int64)) & 15).to(tl.int32)
        picks = tl.where(position == t, current, picks)
    return picks, before


@triton.jit
def _draw(weights, threshold, lane):
    """First index whose running sum exceeds `threshold` [N], clamped to positive weights: [N, KP] -> [N]."""
    running = tl.cumsum(weights, 1)
    positive = weights > 0.0
    last = tl.max(tl.where(positive, lane, 0), 1)
    hit = positive & (running > threshold[:, None])
    return tl.min(tl.where(hit, lane, last[:, None]), 1)


@triton.jit
def _softmax(x):
    """Softmax over the last axis; -inf entries have weight 0."""
    weights = tl.exp(x - tl.max(x, 1)[:, None])
    return weights / tl.sum(weights, 1)[:, None]


@triton.jit
def _walk_kernel(
    scores, candidates, uniforms, tokens, q, temperature,
    M: tl.constexpr, K: tl.constexpr, MP: tl.constexpr, KP: tl.constexpr, SAMPLED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    batch = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, MP * KP)
    position, predecessor = entry // KP, entry % KP
    lane = tl.arange(0, KP)[None, :]
    real = (position < M) & (predecessor < K)
    at = ((batch * M + position) * K + predecessor)[:, None] * K + lane
    x = tl.load(scores + at, mask=real[:, None] & (lane < K), other=float("-inf")).to(tl.float32)
    if SAMPLED:
        weights = _softmax(tl.where(real[:, None], x, 0.0) / temperature)
        u = tl.load(uniforms + batch * M + position, mask=position < M, other=0.0)
        choice = _draw(weights, u * tl.sum(weights, 1), lane)
    else:
        choice = tl.argmax(x, 1).to(tl.int32)
    if KP <= 16:
        picks, before = _follow_packed(choice, M, MP, KP)
    else:
        picks, before = _follow(choice, M, MP, KP)
    row = tl.arange(0, MP)
    picks = tl.minimum(picks, K - 1)  # of scores that are not numbers the maximum may be any lane
    found = tl.load(candidates + (batch * M + row) * K + picks, mask=row < M, other=0)
    tl.store(tokens + batch * M + row, found, mask=row < M)
    if SAMPLED:
        inside = (row < M)[:, None] & (lane < K)
        at = ((batch * M + row) * K + before)[:, None] * K + lane
        x = tl.load(scores + at, mask=inside, other=float("-inf")).to(tl.float32)
        weights = _softmax(tl.where((row < M)[:, None], x, 0.0) / temperature)
        tl.store(q + (batch * M + row)[:, None] * K + lane, weights, mask=inside)


def supports(scores: Tensor, candidates: Tensor, *_: object, **__: object) -> bool:
    """float32 scores; what one program can hold: M x K of at most 1,024."""
    held = power_of_2(scores.shape[-3]) * power_of_2(scores.shape[-1]) if scores.dim() >= 3 else 0
    return scores.dtype == torch.float32 and 0 < held <= 1024 and scores.shape[-1] <= 64


def _walk(where: str, scores: Tensor, candidates: Tensor, uniforms: Tensor | None, temperature: float) -> tuple:
    expect_dtype(where, "scores", scores, torch.float32)
    expect_dtype(where, "candidates", candidates, torch.int32, torch.int64)
    count, size = candidates.shape[-2:]
    expect_shape(where, "scores", scores, (*candidates.shape, size))
    shape = candidates.shape[:-1]
    if uniforms is not None:
        expect_dtype(where, "uniforms", uniforms, torch.float32)
        expect_shape(where, "uniforms", uniforms, tuple(shape))
    tokens = torch.empty(shape, dtype=candidates.dtype, device=scores.device)
    q = torch.empty(candidates.shape if uniforms is not None else (0,), dtype=torch.float32, device=scores.device)
    batch = math.prod(shape[:-1])
    if batch and count:
        flat = scores.contiguous()
        _walk_kernel[(batch,)](
            flat, candidates.contiguous(), flat if uniforms is None else uniforms.contiguous(), tokens, q, temperature,
            M=count, K=size, MP=power_of_2(count), KP=power_of_2(size), SAMPLED=uniforms is not None,
            num_warps=2 if size <= 16 else 4, **early(overlaps(scores)),
        )  # fmt: skip
    return tokens, q


def path_walk(scores: Tensor, candidates: Tensor) -> Tensor:
    """`common.transition.path_walk`: scores float32 [..., M, K, K], candidates int [..., M, K] -> tokens [..., M]."""
    return _walk("path_walk", scores, candidates, None, 1.0)[0]


def path_walk_sampled(scores: Tensor, candidates: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """`common.transition.path_walk_sampled`: uniforms float32 [..., M] -> (tokens [..., M], q float32 [..., M, K])."""
    return _walk("path_walk_sampled", scores, candidates, uniforms, float(temperature))


def register() -> None:
    """Tell the core about `path_walk` and `path_walk_sampled` on CUDA."""
    _launch.register(path_walk, supports)
    _launch.register(path_walk_sampled, supports)
