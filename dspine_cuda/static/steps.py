"""What all static steps share: positions and live rows from device-side lengths, and appending K/V at them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspine.common.attention import attention_inputs
from dspine.common.gdn import MAX_TOKENS
from dspine.common.linear_rows import linear_rows
from dspine.common.registry import find_kernel
from dspine_cuda.targets.layers import Linear


@dataclass(frozen=True)
class Place:
    """Where `count` rows of each slot stand: lengths int32 [B], live int32 [B] (rows at or beyond it write to scrap only),
    rows int64 [B, count] of a K/V store, cos and sin [B, count, 1, size]."""

    lengths: Tensor
    live: Tensor
    rows: Tensor
    cos: Tensor
    sin: Tensor
    count: int

    @property
    def batch(self) -> int:
        """B."""
        return self.lengths.shape[0]


@dataclass(frozen=True)
class Where:
    """The same for `attention_inputs`, which finds positions itself: lengths and live int32 [B], whole tables cos and sin
    [positions, R], `count` rows a slot."""

    lengths: Tensor
    live: Tensor
    cos: Tensor
    sin: Tensor
    count: int

    @property
    def batch(self) -> int:
        """B."""
        return self.lengths.shape[0]


def few_rows(linear: Linear, x: Tensor) -> Tensor:
    """x [N, in] -> [N, out], rows perhaps apart: for up to 16 rows by `linear_rows`, where it has a kernel and the weight can
    be read. A row's bits then do not depend on the others."""
    weight = linear.weight
    if weight is None or not weight.is_contiguous() or x.shape[0] > MAX_TOKENS or find_kernel(linear_rows.__name__, x) is None:
        return linear(x)
    return linear_rows(x, weight)


def place_inputs(projected: Tensor, store: Tensor, where: Where, heads: int, norm: Any | None) -> Tensor:
    """`attention_inputs` of projected [B, w, S, D] into store [2, B, Hk, C, D]; the query [B, w, heads, D]."""
    keys, values = store.unbind(0)
    query, *made = attention_inputs(projected, where.cos, where.sin, where.lengths, where.live, keys, values, heads, norm)
    for place, new in zip((keys, values), made, strict=True):
        if new.data_ptr() != place.data_ptr():  # the core's own code writes nothing in place
            place.copy_(new)
    return query


def place_rows(lengths: Tensor, live: Tensor, count: int, scrap: int, cos: Tensor, sin: Tensor) -> Place:
    """Row i of slot b at position lengths[b] + i, or at `scrap` where i >= live[b]. Tables [positions, 1, size]."""
    offsets = torch.arange(count, dtype=torch.int32, device=lengths.device)
    position = torch.where(offsets < live[:, None], lengths[:, None] + offsets, scrap).to(torch.int64)
    flat = position.clamp(max=cos.shape[0] - 1).view(-1)
    shape = (*position.shape, *cos.shape[1:])
    return Place(lengths, live, position, cos.index_select(0, flat).view(shape), sin.index_select(0, flat).view(shape), count)


def append(store: Tensor, rows: Tensor, place: Tensor) -> None:
    """store [2, B, Hk, C, D] takes rows [2, B, Hk, w, D] (K above V) at rows `place` int64 [B, w]: one launch."""
    index = place[None, :, None, :, None].expand(rows.shape)
    store.scatter_(3, index, rows)
