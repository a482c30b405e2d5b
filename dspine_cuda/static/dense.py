"""A dense target's step over fixed shapes: the weights and layers of `targets.dense`, lengths read on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.attention import block_attention
from dspine_cuda.static.arena import Arena
from dspine_cuda.static.steps import Place, append, place_rows
from dspine_cuda.targets.dense import DenseLayer, DenseTarget
from dspine_cuda.targets.layers import rotate_


@dataclass(frozen=True)
class StaticOutput:
    """logits float32 [B, w, V]; features [B, w, F] or None."""

    logits: Tensor
    features: Tensor | None


class StaticDense:
    """`begin`, `finish` and `commit` of a `DenseTarget` on an arena; nothing is read by the host."""

    def __init__(self, target: DenseTarget, arena: Arena) -> None:
        self.target, self.arena = target, arena
        self.stores = arena.kv.store.unbind(0)

    def begin(self, tokens: Tensor, live: Tensor) -> Tensor:
        """Dense: nothing runs before the length is known. tokens int [B, u]."""
        return tokens

    def finish(self, stage: Tensor, w: int, live: Tensor) -> StaticOutput:
        """The first w tokens of each slot, of which live int32 [B] count; K/V go behind the committed ones."""
        target, arena = self.target, self.arena
        place = place_rows(arena.lengths, live, w, arena.scrap, arena.cos, arena.sin)
        x = F.embedding(stage[:, :w].reshape(-1), target.embedding)
        captured: dict[int, Tensor] = {}
        for index, (layer, store) in enumerate(zip(target.layers, self.stores, strict=True)):
            x = dense_layer(layer, x, store, place)
            if index in target.taps:
                captured[index] = x
        shape = (place.batch, w, -1)
        features = torch.cat([captured[i] for i in target.taps], dim=-1).view(shape) if target.taps else None
        return StaticOutput(target.head(target.norm(x)).view(shape), features)

    def commit(self, m: Tensor) -> None:
        """K/V rows behind the new length are scratch; the lengths are the round's business."""


def dense_layer(layer: DenseLayer, x: Tensor, store: Tensor, place: Place) -> Tensor:
    """x [N, H], N = B w -> [N, H]; the block's K/V go into store [2, B, Hk, C, D]."""
    batch, count = place.batch, place.count
    qkv = layer.qkv(layer.input_norm(x)).view(batch, count, -1, layer.head_dim)
    rotated = qkv.narrow(2, 0, layer.rotated)
    query, new = qkv.split_with_sizes(layer.sections, 2)
    if layer.qk_norm is not None:
        rotated.copy_(layer.qk_norm(rotated))
    rotate_(rotated, place.cos, place.sin)
    append(store, new.view(batch, count, 2, layer.kv_heads, layer.head_dim).permute(2, 0, 3, 1, 4), place.rows)
    mixed = block_attention(query, store[0], store[1], place.lengths, layer.head_dim**-0.5)
    h = layer.output(mixed.reshape(batch * count, -1)).add_(x)
    gate, up = layer.gate_up(layer.mlp_norm(h)).chunk(2, dim=-1)
    return layer.down(F.silu(gate, inplace=True) * up).add_(h)
