"""What all static steps share: products of few rows, and K/V appended at device-side lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dspine.common.attention import attention_inputs, block_attention
from dspine.common.gating import gated_rows, silu_mul
from dspine.common.gdn import MAX_TOKENS
from dspine.common.linear_rows import linear_rows
from dspine.common.norms import add_rms_norm
from dspine.common.registry import find_kernel
from dspine_cuda.targets.layers import Linear


@dataclass(frozen=True)
class Where:
    """Where `count` rows of each slot stand: behind lengths int32 [B]; of them live int32 [B] count, the others write to scrap
    only. cos and sin [positions, R]: the whole tables."""

    lengths: Tensor
    live: Tensor
    cos: Tensor
    sin: Tensor
    count: int

    @property
    def batch(self) -> int:
        """B."""
        return self.lengths.shape[0]

    def attend(self, query: Tensor, store: Tensor, scale: float) -> Tensor:
        """query [B, w, Hq, D] over store [2, B, Hk, C, D], which holds the rows' own K/V too -> [B, w, Hq, D]."""
        return block_attention(query, store[0], store[1], self.lengths, scale)


def few_rows(linear: Linear, x: Tensor) -> Tensor:
    """x [N, in] -> [N, out], rows perhaps apart: for up to 16 rows by `linear_rows`, where it has a kernel and the weight can
    be read. A row's bits then do not depend on the others."""
    weight = linear.weight
    if weight is None or not weight.is_contiguous() or x.shape[0] > MAX_TOKENS or find_kernel(linear_rows.__name__, x) is None:
        return linear(x)
    return linear_rows(x, weight)


def gated(linear: Linear, x: Tensor) -> Tensor:
    """silu(gate) * up of x [N, in] -> [N, I], `linear` being gate and up: in one launch where `gated_rows` has a kernel."""
    known = all(find_kernel(op.__name__, x) is not None for op in (linear_rows, gated_rows))
    if not known or linear.weight is None or not linear.weight.is_contiguous() or x.shape[0] > MAX_TOKENS:
        return silu_mul(few_rows(linear, x))
    return gated_rows(x, linear.weight)


def feed_forward(layer: Any, entry: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
    """The rest of a layer (`output`, `mlp_norm`, `gate_up`, `down`) behind its attention: entry [N, H], mixed [N, Hq D] ->
    (stream, update) [N, H] each, whose sum is the layer's output: it runs with the norm behind it."""
    stream, normed = add_rms_norm(entry, few_rows(layer.output, mixed), layer.mlp_norm)
    return stream, few_rows(layer.down, gated(layer.gate_up, normed))


def place_inputs(projected: Tensor, store: Tensor, where: Where, heads: int, norm: Any | None) -> Tensor:
    """`attention_inputs` of projected [B, w, S, D] into store [2, B, Hk, C, D]; the query [B, w, heads, D]."""
    keys, values = store.unbind(0)
    query, *made = attention_inputs(projected, where.cos, where.sin, where.lengths, where.live, keys, values, heads, norm)
    put(*zip((keys, values), made, strict=True))
    return query


def put(*pairs: tuple[Tensor, Tensor]) -> None:
    """(place, new) each: copy `new` over the first rows of `place`, unless a kernel has written it there."""
    for place, new in pairs:
        if new.data_ptr() != place.data_ptr():  # the core's own code writes nothing in place
            (place if new.shape == place.shape else place[:, : new.shape[1]]).copy_(new)
