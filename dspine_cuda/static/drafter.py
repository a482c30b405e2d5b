"""A drafter's round over fixed shapes: the block behind device-side lengths, injection and transition cache included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspine.common.attention import block_attention
from dspine.common.masks import MaskRule
from dspine.common.protocols import DraftRequest, Proposal
from dspine_cuda.draft_inference import signed_tables
from dspine_cuda.drafter import TorchDrafter
from dspine_cuda.static.arena import Arena
from dspine_cuda.static.steps import append, place_rows


def refusal(drafter: Any) -> str | None:
    """Why this drafter cannot run statically; None where it can."""
    if not isinstance(drafter, TorchDrafter):
        return f"a drafter of class {type(drafter).__name__} has no static form"
    rows = drafter.config.query_rows
    for rule in drafter.rules:
        if not fits(rule, rows):
            return f"its attention rule ({rule}) is not one of block_attention's for {rows} rows"
    return None


def fits(rule: MaskRule, rows: int) -> bool:
    """Whether `block_attention(causal, window)` is this rule for blocks of `rows`: a window that reaches over the whole block
    limits only the context, in the way `MaskRule.context` does it."""
    return rule.window is None or (not rule.anchored and rule.window >= rows)


class StaticDrafter:
    """`propose` and `commit` of a `TorchDrafter` on an arena; nothing is read by the host."""

    def __init__(self, drafter: TorchDrafter, arena: Arena) -> None:
        assert arena.draft_cache is not None
        self.drafter, self.arena, self.config = drafter, arena, drafter.config
        store = arena.draft_cache._store
        self.stores = store.unbind(0)
        self.scrap = store.shape[4] - 1
        self.cos, self.sin = signed_tables(*drafter.model.rope(store.shape[4]))
        self.full = torch.full_like(arena.lengths, self.config.query_rows)
        self.scale = self.config.head_dim**-0.5

    def propose(self, request: DraftRequest) -> Proposal:
        """A block behind the committed tokens of every slot, from the arena's anchors."""
        arena, rows = self.arena, self.config.query_rows
        place = place_rows(arena.lengths, self.full, rows, self.scrap, self.cos, self.sin)

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            store, rule = self.stores[index], self.drafter.rules[index]
            append(store, torch.stack((key, value)), place.rows)
            mixed = block_attention(
                query.transpose(1, 2), store[0], store[1], arena.lengths, self.scale, rule.causal, rule.window
            )
            return mixed.transpose(1, 2)

        states, code = self.drafter.run_block(arena.anchor, place.cos, place.sin, attend)
        return self.drafter.proposal(states, code, arena.anchor, request)

    def commit(self, features: Tensor, m: Tensor) -> None:
        """Context K/V of the first m int32 [B] of features [B, w, F], behind the committed tokens: before lengths move."""
        batch, count = features.shape[:2]
        place = place_rows(self.arena.lengths, m, count, self.scrap, self.cos, self.sin)
        flat = (batch * count, 1, -1)
        made = self.drafter.lean.context(
            features.reshape(1, batch * count, -1).to(self.stores[0].dtype), place.cos.view(flat), place.sin.view(flat)
        )  # [L, 2, 1, Hk, B w, D]
        layers, heads, size = made.shape[0], made.shape[3], made.shape[5]
        rows = made.view(layers, 2, heads, batch, count, size).transpose(2, 3)
        index = place.rows[None, None, :, None, :, None].expand(rows.shape)
        self.arena.draft_cache._store.scatter_(4, index, rows)  # type: ignore[union-attr]
