"""A dense target's step over fixed shapes: the weights and layers of `targets.dense`, lengths read on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.norms import add_rms_norm
from dspine.common.stepping import table_rows
from dspine_cuda.static.arena import Arena
from dspine_cuda.static.steps import Where, feed_forward, few_rows, place_inputs
from dspine_cuda.targets.dense import DenseLayer, DenseTarget


@dataclass(frozen=True)
class StaticOutput:
    """logits [B, w, V], float32 or the model's dtype; features [B, w, F] or None."""

    logits: Tensor
    features: Tensor | None


class StaticDense:
    """`begin`, `finish` and `commit` of a `DenseTarget` on an arena; nothing is read by the host."""

    def __init__(self, target: DenseTarget, arena: Arena, *, pad_rows: int = 0) -> None:
        """pad_rows: products take at least this many rows, the missing ones zeros (0: as many as there are). Only where they
        are the vendor's (`few_rows`): those may sum in another order for another number of rows, and with 16, plain steps and
        verification run the same ones. It costs one small launch a layer and one a step."""
        self.target, self.arena, self.pad_rows = target, arena, pad_rows
        self.stores = arena.kv.store.unbind(0)

    def begin(self, tokens: Tensor, live: Tensor) -> Tensor:
        """Dense: nothing runs before the length is known. tokens int [B, u]."""
        return tokens

    def finish(self, stage: Tensor, w: int, live: Tensor) -> StaticOutput:
        """The first w tokens of each slot, of which live int32 [B] count; K/V go behind the committed ones."""
        arena = self.arena
        where = Where(arena.lengths, live, arena.cos[:, 0], arena.sin[:, 0], w)
        normed, features = self.run(stage[:, :w], where)
        logits = few_rows(self.target._head, normed)[: where.batch * w]  # greedy acceptance needs no wider copy
        return StaticOutput(logits.view(where.batch, w, -1), features)

    def run(self, tokens: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        """All layers over tokens int [B, w]: their rows after the last norm [at least B w, H], and the features [B, w, F].

        Every residual sum runs with the norm behind it, so a layer leaves its update for the next one to add.
        """
        target = self.target
        residual = self._padded(table_rows(target.embedding, tokens).view(where.batch * where.count, -1))
        update: Tensor | None = None
        outputs: list[Tensor] = []  # of the layers so far
        for layer, store in zip(target.layers, self.stores, strict=True):
            entry, normed = add_rms_norm(residual, update, layer.input_norm)
            outputs.append(entry)
            mixed = self._padded(attend(layer, few_rows(layer.qkv, normed), store, where))
            residual, update = feed_forward(layer, entry, mixed)
        last, normed = add_rms_norm(residual, update, target.norm)
        outputs = [*outputs[1:], last]
        rows, shape = where.batch * where.count, (where.batch, where.count, -1)
        features = torch.cat([outputs[i][:rows] for i in target.taps], dim=-1).view(shape) if target.taps else None
        return normed, features

    def commit(self, m: Tensor) -> None:
        """K/V rows behind the new length are scratch; the lengths are the round's business."""

    def _padded(self, x: Tensor) -> Tensor:
        """x [N, H] with rows of zeros behind, at least `pad_rows` of them in all."""
        missing = self.pad_rows - x.shape[0]
        return x if missing <= 0 else F.pad(x, (0, 0, 0, missing))


def attend(layer: DenseLayer, qkv: Tensor, store: Tensor, where: Where) -> Tensor:
    """qkv [at least N, (Hq + 2 Hk) D], N = B w -> mixed [N, Hq D]; the block's K/V go into store [2, B, Hk, C, D]."""
    rows = where.batch * where.count
    projected = qkv[:rows].view(where.batch, where.count, -1, layer.head_dim)
    query = place_inputs(projected, store, where, layer.heads, layer.qk_norm)
    return where.attend(query, store, layer.head_dim**-0.5).reshape(rows, -1)
