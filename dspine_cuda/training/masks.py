"""Visibility in a packed training row: dense (tests, CPU) and as a flex_attention mask, both from one `MaskRule`.

Queries are N blocks of R rows; keys are the S context tokens of the row, then the N*R block rows. A block row sees
context at positions before its anchor, of the anchor's own document, and rows of its own block (`common.masks`). What
matters is the position of the anchor, never the block's index: blocks overlap. Unused blocks (keep 0) see no context and
only their own rows, so no softmax is empty; their loss weight is zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dspine.common.masks import MaskRule

TILE = 128
NO_DOCUMENT = -1


@dataclass(frozen=True)
class BlockLayout:
    """Where blocks stand: anchors int [B, N] (index in the row), keep bool [B, N], documents int [B, S]
    (NO_DOCUMENT on padding), block_size R."""

    anchors: Tensor
    keep: Tensor
    documents: Tensor
    block_size: int

    @property
    def anchor_documents(self) -> Tensor:
        """Document of every anchor [B, N]; unused blocks get -2, which matches nothing."""
        return torch.where(self.keep, self.documents.gather(1, self.anchors.long()), -2)


def dense_mask(rule: MaskRule, layout: BlockLayout) -> Tensor:
    """Bool [B, 1, N*R, S + N*R], True = visible."""
    batch, blocks = layout.anchors.shape
    device, rows, length = layout.anchors.device, layout.block_size, layout.documents.shape[1]
    offset = torch.arange(rows, device=device)
    position = torch.arange(length, device=device)
    anchor = layout.anchors[:, :, None, None]
    context = rule.context(offset[None, None, :, None], anchor, position[None, None, None, :])
    context = context & (layout.documents[:, None, None, :] == layout.anchor_documents[:, :, None, None])
    context = context.expand(batch, blocks, rows, length).flatten(1, 2)
    inside = rule.block(offset[:, None], offset[None, :]).expand(rows, rows)
    own = torch.eye(blocks, dtype=torch.bool, device=device)
    block = (own[:, None, :, None] & inside[None, :, None, :]).reshape(blocks * rows, blocks * rows)
    return torch.cat([context, block.expand(batch, -1, -1)], dim=2).unsqueeze(1)


def document_mask(documents: Tensor) -> Tensor:
    """The target's own mask in a packed row: causal within one document. int [B, S] -> bool [B, 1, S, S]."""
    same = documents[:, :, None] == documents[:, None, :]
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return (same & causal).unsqueeze(1)


def used_context(layout: BlockLayout) -> Tensor:
    """Bool [B, S]: the token is before some block's anchor in its document, so some block reads its features."""
    position = torch.arange(layout.documents.shape[1], device=layout.anchors.device)
    before = position[None, None, :] < layout.anchors[:, :, None]
    same = layout.documents[:, None, :] == layout.anchor_documents[:, :, None]
    return (before & same).any(dim=1)


def mask_mod(rule: MaskRule, layout: BlockLayout) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The same rule as a flex_attention `mask_mod(batch, head, query, key)`; it reads the layout's tensors at run time."""
    anchors, documents, owners = layout.anchors, layout.documents, layout.anchor_documents
    rows, length = layout.block_size, layout.documents.shape[1]

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block, offset = q // rows, q % rows
        in_context = kv < length
        position = torch.where(in_context, kv, 0)
        context = rule.context(offset, anchors[b, block], position) & (documents[b, position] == owners[b, block])
        key = torch.where(in_context, 0, kv - length)
        inside = rule.block(offset, key % rows) & (key // rows == block)
        return torch.where(in_context, context, inside)

    return visible


class FlexMasks:
    """BlockMasks of the current batch. The tensors behind `mask_mod` are kept and overwritten, so that one compiled kernel
    serves every step; the tiles are a cheap superset (bounds of anchors and documents), the `mask_mod` is exact."""

    def __init__(self, rules: tuple[MaskRule, ...], layout: BlockLayout) -> None:
        owners = layout.anchor_documents
        self._anchors, self._documents, self._owners = layout.anchors.clone(), layout.documents.clone(), owners.clone()
        held = _HeldLayout(self._anchors, layout.keep, self._documents, layout.block_size, self._owners)
        self._mods = {rule: mask_mod(rule, held) for rule in dict.fromkeys(rules)}
        self.shape = tuple(layout.anchors.shape)

    def update(self, layout: BlockLayout) -> dict[MaskRule, object]:
        """BlockMask of every distinct rule for this batch."""
        from torch.nn.attention.flex_attention import BlockMask

        self._anchors.copy_(layout.anchors)
        self._documents.copy_(layout.documents)
        self._owners.copy_(layout.anchor_documents)
        length, queries = layout.documents.shape[1], layout.anchors.shape[1] * layout.block_size
        tiles = visible_tiles(layout)
        counts = tiles.sum(dim=-1, dtype=torch.int32).unsqueeze(1)
        order = tiles.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32).unsqueeze(1)
        lengths = (queries, length + queries)
        return {
            rule: BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=TILE, mask_mod=mod, seq_lengths=lengths)
            for rule, mod in self._mods.items()
        }


@dataclass(frozen=True)
class _HeldLayout(BlockLayout):
    owners: Tensor

    @property
    def anchor_documents(self) -> Tensor:
        return self.owners


def visible_tiles(layout: BlockLayout) -> Tensor:
    """Bool [B, query tiles, key tiles]: True wherever some pair of the tile may be visible (never too few)."""
    length, device = layout.documents.shape[1], layout.anchors.device
    batch, blocks = layout.anchors.shape
    queries = blocks * layout.block_size
    query_tiles, key_tiles = -(-queries // TILE), -(-(length + queries) // TILE)
    position = torch.arange(length, device=device)
    same = layout.documents[:, None, :] == layout.anchor_documents[:, :, None]
    seen = same & (position < layout.anchors[:, :, None])  # [B, N, S]
    pad = key_tiles * TILE - length
    seen = torch.nn.functional.pad(seen, (0, pad)).view(batch, blocks, key_tiles, TILE).any(dim=-1)  # [B, N, key tiles]
    row = torch.arange(query_tiles * TILE, device=device).clamp(max=queries - 1)
    context = seen[:, row // layout.block_size].view(batch, query_tiles, TILE, key_tiles).any(dim=2)
    first = (length + torch.arange(query_tiles, device=device) * TILE - layout.block_size) // TILE
    last = (length + (torch.arange(query_tiles, device=device) + 1) * TILE + layout.block_size) // TILE
    key = torch.arange(key_tiles, device=device)
    own = (key[None, :] >= first[:, None]) & (key[None, :] <= last[:, None])
    return context | own
