"""From a layer's projections to the recurrence's inputs, in one launch: short convolution over the kept window, SiLU,
split, l2 norm of q and k, decay and write strength (`algorithms` 3).

One program makes one head (of q, k or v) for a few tokens; the last ones make decay and write strength of all heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import gdn
from dspine.common.errors import DSpineError
from dspine.common.gdn import GdnInputWeights, GdnLayout, GdnTokens
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, contiguous, early, expect_dtype, narrow, power_of_2, programs_of, sigmoid

TOKENS = 4  # of one program


@triton.jit
def _log_one_plus(x):
    """log(1 + x) for x in [0, 1], also where 1 + x rounds."""
    near = 1.0 + x
    exact = near == 1.0
    return tl.where(exact, x, tl.log(near) * (x / tl.where(exact, 1.0, near - 1.0)))


@triton.jit
def _gates(
    a, b, decay_log, dt_bias, log_decay, beta, count, a_stride, b_stride, HV: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    token, heads = tl.program_id(1) * BT + tl.arange(0, BT), tl.arange(0, BH)
    inside = (token < count)[:, None] & (heads < HV)[None, :]
    row = (tl.program_id(2).to(tl.int64) * count + token)[:, None]
    at = row * HV + heads[None, :]
    x = tl.load(a + row * a_stride + heads[None, :], mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_bias + heads, mask=heads < HV, other=0.0).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(decay_log + heads, mask=heads < HV, other=0.0).to(tl.float32))[None, :]
    softplus = tl.maximum(x, 0.0) + _log_one_plus(tl.exp(-tl.abs(x)))
    tl.store(log_decay + at, -rate * softplus, mask=inside)
    x = tl.load(b + row * b_stride + heads[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(beta + at, sigmoid(x), mask=inside)


@triton.jit
def _head(
    projected, window, conv, conv_bias, q, k, v, kept, count, row_stride, kept_rows,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    token = tl.program_id(1) * BT + tl.arange(0, BT)
    CHANNELS: tl.constexpr = 2 * HK * DK + HV * DV
    is_value = head >= 2 * HK
    size = tl.where(is_value, DV, DK)
    lane = tl.arange(0, BD)
    channel = tl.where(is_value, 2 * HK * DK + (head - 2 * HK) * DV, head * DK) + lane
    inside = (token < count)[:, None] & (lane < size)[None, :]
    mixed = tl.zeros([BT, BD], dtype=tl.float32)
    for j in tl.static_range(WIDTH):
        row = token - (WIDTH - 1) + j
        tap = tl.load(conv + channel * WIDTH + j, mask=lane < size, other=0.0).to(tl.float32)
        now = (batch * count + row)[:, None] * row_stride + channel[None, :]
        newest = tl.load(projected + now, mask=inside & (row >= 0)[:, None], other=0.0)
        if KEEPS and j == WIDTH - 1:
            tl.store(kept + (batch * kept_rows + token)[:, None] * CHANNELS + channel[None, :], newest, mask=inside)
        x = newest.to(tl.float32)
        before = (batch * (WIDTH - 1) + row + (WIDTH - 1))[:, None] * CHANNELS + channel[None, :]
        y = tl.load(window + before, mask=inside & (row < 0)[:, None], other=0.0).to(tl.float32)
        y = narrow(y, projected.dtype.element_ty).to(tl.float32)
        mixed += tl.where((row < 0)[:, None], y, x) * tap[None, :]
    if HAS_BIAS:
        mixed += tl.load(conv_bias + channel, mask=lane < size, other=0.0).to(tl.float32)[None, :]
    mixed *= sigmoid(mixed)
    scale = 1.0 / tl.sqrt(tl.sum(tl.where(inside, mixed * mixed, 0.0), 1) + EPS)[:, None]
    of_value = ((batch * count + token) * HV + head - 2 * HK)[:, None] * DV + lane[None, :]
    of_key = ((batch * count + token) * HK + head % HK)[:, None] * DK + lane[None, :]
    kept_key = ((batch * kept_rows + token) * HK + head % HK)[:, None] * DK + lane[None, :]
    tl.store(v + of_value, narrow(mixed, v.dtype.element_ty), mask=inside & is_value)
    tl.store(k + kept_key, narrow(mixed * scale, k.dtype.element_ty), mask=inside & (head >= HK) & (head < 2 * HK))
    tl.store(q + of_key, narrow(mixed * scale * SCALE, q.dtype.element_ty), mask=inside & (head < HK))


@triton.jit
def _gdn_inputs_kernel(
    projected, window, a, b, conv, conv_bias, decay_log, dt_bias, q, k, v, log_decay, beta, kept, count, row_stride, a_stride,
    b_stride, kept_rows,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, BH: tl.constexpr, EPS: tl.constexpr, SCALE: tl.constexpr, KEEPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if tl.program_id(0) < 2 * HK + HV:
        _head(
            projected, window, conv, conv_bias, q, k, v, kept, count, row_stride, kept_rows,
            HK, HV, DK, DV, WIDTH, HAS_BIAS, BT, BD, EPS, SCALE, KEEPS,
        )  # fmt: skip
    else:
        _gates(a, b, decay_log, dt_bias, log_decay, beta, count, a_stride, b_stride, HV, BT, BH)


def supports(projected: Tensor, *_: object, **__: object) -> bool:
    """bfloat16 and float32 projections."""
    return projected.dtype in FLOATS


def launch(
    projected: Tensor, window: Tensor, a: Tensor, b: Tensor, weights: GdnInputWeights, layout: GdnLayout, tokens: GdnTokens,
    kept: Tensor | None = None, overlap: bool = False,
) -> None:  # fmt: skip
    """Launch into given outputs; none checked. Rows of projected, a and b may lie apart (sequences behind one another); what is
    written is contiguous. kept [B, n, C]: takes the rows of `projected`, and then `tokens.k` is [B, n, Hk, Dk] too, n at least
    T. `overlap`: it may start, and wait, while the launch in front still runs."""
    batch, count, _ = projected.shape
    bias, tokens_each = weights.conv_bias, programs_of(count, TOKENS)
    kept_rows = count if kept is None else kept.shape[1]
    _gdn_inputs_kernel[(2 * layout.key_heads + layout.value_heads + 1, triton.cdiv(count, tokens_each), batch)](
        projected, window, a, b, weights.conv, weights.conv if bias is None else bias, weights.decay_log, weights.dt_bias,
        tokens.q, tokens.k, tokens.v, tokens.log_decay, tokens.beta, projected if kept is None else kept, count,
        projected.stride(1), a.stride(1), b.stride(1), kept_rows,
        HK=layout.key_heads, HV=layout.value_heads, DK=layout.key_dim, DV=layout.value_dim,
        WIDTH=weights.conv.shape[1], HAS_BIAS=bias is not None, BT=tokens_each,
        BD=power_of_2(max(layout.key_dim, layout.value_dim)),
        BH=power_of_2(layout.value_heads), EPS=gdn.NORM_EPS, SCALE=layout.key_dim**-0.5, KEEPS=kept is not None,
        num_warps=4, **early(overlap),
    )  # fmt: skip


def gdn_inputs(
    projected: Tensor, window: Tensor, a: Tensor, b: Tensor, weights: GdnInputWeights, layout: GdnLayout
) -> GdnTokens:
    """`common.gdn.gdn_inputs`: the same arguments, results and errors; weights must be contiguous."""
    gdn._check_inputs(projected, window, a, b, weights, layout)
    for name, x in (("projected", projected), ("window", window), ("a", a), ("b", b)):
        expect_dtype("gdn_inputs", name, x, *FLOATS)
    if weights.conv_bias is not None and tuple(weights.conv_bias.shape) != (layout.channels,):
        raise DSpineError(f"gdn_inputs: weights.conv_bias must have shape ({layout.channels},), got {weights.conv_bias.shape}")
    contiguous("gdn_inputs", conv=weights.conv, decay_log=weights.decay_log, dt_bias=weights.dt_bias)
    batch, count, _ = projected.shape

    def empty(heads: int, *size: int, dtype: torch.dtype = projected.dtype) -> Tensor:
        return torch.empty((batch, count, heads, *size), dtype=dtype, device=projected.device)

    key, value = (layout.key_heads, layout.key_dim), (layout.value_heads, layout.value_dim)
    gates = [empty(layout.value_heads, dtype=torch.float32) for _ in range(2)]
    tokens = GdnTokens(empty(*key), empty(*key), empty(*value), *gates)
    if count and batch:
        inputs = [x.contiguous() for x in (projected, window, a, b)]
        launch(*inputs, weights, layout, tokens)
    return tokens


def register() -> None:
    """Tell the core about `gdn_inputs` on CUDA."""
    _launch.register(gdn_inputs, supports)
