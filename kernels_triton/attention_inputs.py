"""From a layer's projection to attention over the cache, in one launch: norm of q and k, rotation, K and V into the cache.

One program makes one head of one token: a row's numbers do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import attention
from dspine.common.norms import RMSNorm
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, contiguous, early, narrow, overlaps, power_of_2, programs_of

TOKENS = 1  # of one program
LARGEST_HEAD = 256


@triton.jit
def _attention_inputs_kernel(
    projected, cos, sin, lengths, live, keys, values, weight, query, count, stride, capacity, positions, eps,
    layer_stride, batches,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr,
    BT: tl.constexpr, HAS_NORM: tl.constexpr, LAYERS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """LAYERS above 1: programs of all layers, the rows of one behind those of the last, caches `layer_stride` apart."""
    if OVERLAP:
        gdc_launch_dependents()
    head, batch = tl.program_id(0), tl.program_id(2)
    if LAYERS > 1:
        layer = batch // batches
        batch = batch % batches
        projected += layer * (HQ + 2 * HK) * D
        weight += layer * (HQ + HK) * D
        keys += layer.to(tl.int64) * layer_stride
        values += layer.to(tl.int64) * layer_stride
    token, lane = tl.program_id(1) * BT + tl.arange(0, BT), tl.arange(0, D_PAD)
    of_row = (token < count)[:, None] & (lane < D)[None, :]
    DTYPE: tl.constexpr = query.dtype.element_ty
    # past the first-level cache: of a commit both were written in this round
    place = tl.load(lengths + batch, cache_modifier=".cg").to(tl.int32) + token
    place = tl.where(token < tl.load(live + batch, cache_modifier=".cg").to(tl.int32), place, capacity - 1)
    is_value = head >= HQ + HK
    partner = tl.where(lane < R // 2, lane + R // 2, tl.where(lane < R, lane - R // 2, lane))
    turns = of_row & ((lane < R) & (head < HQ + HK))[None, :]
    angle = tl.minimum(tl.maximum(place, 0), positions - 1)[:, None] * R + lane[None, :]
    c = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
    if HAS_NORM:
        normed = (lane < D) & (head < HQ + HK)
        own = tl.load(weight + head * D + lane, mask=normed, other=1.0)
        other = tl.load(weight + head * D + partner, mask=normed, other=1.0)
    if OVERLAP:
        gdc_wait()
    row = (batch.to(tl.int64) * count + token)[:, None]
    at = row * stride + head * D
    x = tl.load(projected + at + lane[None, :], mask=of_row, other=0.0).to(tl.float32)
    y = tl.load(projected + at + partner[None, :], mask=of_row, other=0.0).to(tl.float32)
    out = x
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x, y = x * scale, y * scale
        if own.dtype == DTYPE:  # the quotient is rounded before a weight of its own dtype, not before a wider one
            x, y = narrow(x, DTYPE).to(tl.float32), narrow(y, DTYPE).to(tl.float32)
        x = narrow(x * own.to(tl.float32)[None, :], DTYPE).to(tl.float32)
        y = narrow(y * other.to(tl.float32)[None, :], DTYPE).to(tl.float32)
    turned = narrow(x * c, DTYPE).to(tl.float32) + y * s
    out = narrow(tl.where(is_value, out, tl.where(turns, turned, x)), DTYPE)
    if head < HQ:
        tl.store(query + (row * HQ + head) * D + lane[None, :], out, mask=of_row)
    else:
        key_head = tl.where(is_value, head - HQ - HK, head - HQ)
        to = ((batch.to(tl.int64) * HK + key_head) * capacity + place)[:, None] * D + lane[None, :]
        inside = of_row & ((place >= 0) & (place < capacity))[:, None]
        if is_value:
            tl.store(values + to, out, mask=inside)
        else:
            tl.store(keys + to, out, mask=inside)


def supports(
    projected: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, live: Tensor, keys: Tensor, values: Tensor, heads: int,
    norm: Any | None = None,
) -> bool:  # fmt: skip
    """Heads of up to 256, one dtype out of bfloat16 and float32, contiguous caches; a norm whose weight and eps can be read."""
    one = projected.dtype == keys.dtype == values.dtype and projected.dtype in FLOATS
    readable = norm is None or (isinstance(getattr(norm, "weight", None), Tensor) and isinstance(norm.eps, float))
    return one and readable and projected.shape[-1] <= LARGEST_HEAD and keys.is_contiguous() and values.is_contiguous()


def launch(
    projected: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, live: Tensor, keys: Tensor, values: Tensor, query: Tensor,
    weight: Tensor | None, eps: float, layers: int = 1, layer_stride: int = 0,
) -> None:  # fmt: skip
    """Launch into `query`, `keys` and `values`; all contiguous (rows of `projected` may stand apart), none checked. `lengths`,
    `live`, the tables and the weight are read before the launch in front has ended (`_launch.early`: who may write them).
    layers: `projected`, `keys`, `values` and the weight are the first's, see the kernel."""
    batch, count, _, size = projected.shape
    heads, key_heads, tokens = query.shape[2], keys.shape[1], programs_of(count, TOKENS)
    _attention_inputs_kernel[(heads + 2 * key_heads, triton.cdiv(count, tokens), batch * layers)](
        projected, cos, sin, lengths, live, keys, values, projected if weight is None else weight, query, count,
        projected.stride(1), keys.shape[2], cos.shape[0], eps, layer_stride, batch, HQ=heads, HK=key_heads, D=size,
        D_PAD=power_of_2(size, 16), R=cos.shape[1], BT=tokens, HAS_NORM=weight is not None, LAYERS=layers, num_warps=1,
        **early(overlaps(projected)),
    )  # fmt: skip


def _rows(projected: Tensor) -> Tensor:
    """Itself where rows [S, D] are contiguous and stand at equal distances (a layer's part of a wider product), else a copy."""
    batch, count, _, size = projected.shape
    apart = projected.stride(3) == 1 and projected.stride(2) == size
    return projected if apart and (batch == 1 or projected.stride(0) == count * projected.stride(1)) else projected.contiguous()


def attention_inputs(
    projected: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, live: Tensor, keys: Tensor, values: Tensor, heads: int,
    norm: Any | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`common.attention.attention_inputs`: the same arguments, results and errors; writes into `keys` and `values`, which must
    be contiguous."""
    attention.check_attention_inputs(projected, cos, sin, lengths, live, keys, values, heads, norm)
    contiguous("attention_inputs", keys=keys, values=values)
    batch, count, _, size = projected.shape
    query = torch.empty((batch, count, heads, size), dtype=projected.dtype, device=projected.device)
    weight, eps = (None, 0.0) if norm is None else (norm.weight.detach().contiguous(), norm.eps)
    tables = cos.contiguous(), sin.contiguous()
    if batch:
        launch(_rows(projected), *tables, lengths.contiguous(), live.contiguous(), keys, values, query, weight, eps)
    return query, keys, values


def supports_context(
    projected: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, live: Tensor, store: Tensor, weight: Tensor, eps: float
) -> bool:
    """Heads of up to 256, one dtype out of bfloat16 and float32; a layer's keys and values contiguous each."""
    one = projected.dtype == store.dtype and projected.dtype in FLOATS and projected.dim() == 5 and store.dim() == 6
    return one and projected.shape[-1] <= LARGEST_HEAD and store.numel() > 0 and store[0, 0].is_contiguous()


def context_inputs(
    projected: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, live: Tensor, store: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """`common.attention.context_inputs`: writes into `store`, of which store[i, j] must be contiguous."""
    attention.check_context_inputs(projected, store, weight)
    rows, (keys, values) = projected.contiguous(), store[0]
    first, norm = rows[:, :, 0], RMSNorm(weight[0], eps)
    attention.check_attention_inputs(first, cos, sin, lengths, live, keys, values, 0, norm)
    contiguous("context_inputs", keys=keys, values=values)
    batch, count, layers, _, size = rows.shape
    if batch:
        query = torch.empty((batch, count, 0, size), dtype=rows.dtype, device=rows.device)
        given = cos.contiguous(), sin.contiguous(), lengths.contiguous(), live.contiguous(), keys, values, query
        launch(first, *given, weight.contiguous(), float(eps), layers, store.stride(0))
    return store


def register() -> None:
    """Tell the core about `attention_inputs` and `context_inputs` on CUDA."""
    _launch.register(attention_inputs, supports)
    _launch.register(context_inputs, supports_context)
