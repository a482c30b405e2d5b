"""Slots of one arena that come and go on their own: the server's rounds of several sequences.

A sequence takes a slot, is read into it (`prompts`; or by the eager prefill: `Arena` keeps the eager caches' layout, and a slot
is a view of one of their rows), begins, and leaves; nobody else's slot is touched. A round runs over the first n slots
(`SlotView`): their memory is a leading part of every array, so a graph over few of them does the work of few. `limits` says how
many tokens every slot verifies in the next round at most; a slot with 0 is parked: its budget is put aside for the round, so it
writes to scrap only, emits nothing, and (hybrids) has its pending factors folded into its state as the others have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from dspine.common.gdn import GdnFactors
from dspine.common.gdn_rounds import GdnKept
from dspine.common.settling import Counters
from dspine_cuda.hybrid_cache import HybridCache
from dspine_cuda.static.arena import Arena, ArenaShape
from dspine_cuda.static.round import RoundRules, StaticRound

_COUNTS = ("lengths", "anchor", "remaining", "generated")
_ROWS = (
    *_COUNTS,
    "pending_m",
    "nominal",
    "upper",
    "chosen",
    "uniforms",
    "block",
    "finite",
    "survival",
    "report",
    "limits",
    "held",
)


class SlotArena(Arena):
    """An arena whose slots begin and end on their own. limits, held int32 [B]: see above. No slot has stop tokens on the
    device: the host sees every token before the slot's next round but one."""

    is_shared = True

    def __init__(self, target: Any, drafter: Any | None, shape: ArenaShape) -> None:
        super().__init__(target, drafter, shape)
        self.limits, self.held = self._ints(shape.batch), self._ints(shape.batch)

    def caches(self, slot: int, drafting: bool) -> tuple[Any, Any | None]:
        """Empty eager caches (the target's, the drafter's) over a slot that is idle. States start at zero; K/V rows of
        the last sequence stay until they are written over, no length reaches them."""
        if isinstance(self.cache, HybridCache):
            self.cache.states[:, slot].zero_()
            self.cache.windows[:, slot].zero_()
        return self._views(slot, drafting)

    def _views(self, slot: int, drafting: bool) -> tuple[Any, Any | None]:
        return self.cache.part(slot, 1), self.draft_cache.part(slot, 1) if drafting and self.draft_cache is not None else None

    @torch.inference_mode()
    def move(self, slot: int, to: int, length: int, drafting: bool) -> tuple[Any, Any | None]:
        """Everything of a sequence of at most `length` tokens, into a slot that is idle; views of that slot."""
        stores = [self.kv.store] if self.draft_cache is None else [self.kv.store, self.draft_cache._store]
        for store in stores:
            store[:, :, to, :, :length].copy_(store[:, :, slot, :, :length])
        by_layer = [] if self.pending is None else [*(getattr(self.pending, name) for name in ("z", "k", "g"))]
        by_layer += [self.cache.states, self.cache.windows] if isinstance(self.cache, HybridCache) else []
        for kept in by_layer:
            kept[:, to].copy_(kept[:, slot])
        for name in (*_COUNTS, "pending_m", "uniforms"):
            getattr(self, name)[to].copy_(getattr(self, name)[slot])
        self.end(slot)
        return self._views(to, drafting)

    @torch.inference_mode()
    def begin(self, slot: int, length: int, anchor: int, remaining: int, uniforms: Any | None) -> None:
        """A slot whose caches hold `length` tokens starts decoding. uniforms float32 [n, 3] from output position 0 on (None:
        greedy)."""
        if uniforms is not None:
            table = torch.as_tensor(uniforms)
            self.uniforms[slot, : len(table)].copy_(
                table.pin_memory() if self.device.type == "cuda" else table, non_blocking=True
            )
        self.pending_m[slot] = 0
        self.lengths[slot], self.anchor[slot], self.generated[slot] = length, anchor, 1
        self.remaining[slot] = remaining

    @torch.inference_mode()
    def end(self, slot: int) -> None:
        """The slot is idle from the next round on: its attention reads no context, its rows go to scrap."""
        for place in (self.remaining, self.lengths, self.pending_m, self.held):
            place[slot] = 0

    @torch.inference_mode()
    def limit(self, limits: list[int]) -> None:
        """Tokens that each slot verifies in the next round at most, 0: it is parked; slots behind the list are parked."""
        row = torch.tensor(limits + [0] * (self.shape.batch - len(limits)), dtype=torch.int32)
        self.limits.copy_(row.pin_memory() if self.device.type == "cuda" else row, non_blocking=True)


class SlotView:
    """The first n slots of a `SlotArena`, as rounds take an arena."""

    is_shared = True

    def __init__(self, arena: SlotArena, count: int) -> None:
        self.whole, self.shape = arena, replace(arena.shape, batch=count)
        self.device, self.dtype, self.cos, self.sin, self.stops = arena.device, arena.dtype, arena.cos, arena.sin, arena.stops
        self.parts = arena.parts
        for name in _ROWS:
            setattr(self, name, getattr(arena, name)[:count])
        self.counters = Counters(*(getattr(self, name) for name in _COUNTS))
        self.cache = arena.cache.part(0, count)
        self.kv = getattr(self.cache, "kv", self.cache)
        self.draft_cache = None if arena.draft_cache is None else arena.draft_cache.part(0, count)
        self.pending = self.fresh = None
        if arena.pending is not None and arena.fresh is not None:
            self.pending = _first(arena.pending, count)
            self.fresh = GdnKept(_first(arena.fresh.factors, count), arena.fresh.inputs[:, :count])


def _first(factors: GdnFactors, count: int) -> GdnFactors:
    return GdnFactors(*(getattr(factors, name)[:, :count] for name in ("z", "k", "g")))


class SlotRound(StaticRound):
    """Rounds over the first slots, each within its limit. `drafted(1)` drafts nothing but takes the drafter's context along."""

    def __init__(self, target: Any, drafter: Any | None, view: SlotView, rules: RoundRules | None = None) -> None:
        super().__init__(target, drafter, view, rules)  # type: ignore[arg-type]
        self._drafts = drafter is not None

    def drafted(self, w: int) -> None:
        """Draft, verify w tokens, accept, commit."""
        with self._parked():
            if w == 1:
                self.anchor_only()
            else:
                self.draft()
            self.verify(w, drafting=self._drafts)

    def plain(self) -> None:
        """A block of one, the drafter's context left behind: for rounds of sequences that never draft."""
        with self._parked():
            self.anchor_only()
            self.verify(1, drafting=False)

    @contextmanager
    def _parked(self) -> Iterator[None]:
        """The budgets of parked slots put aside."""
        arena: Any = self.arena
        arena.held.copy_(torch.where(arena.limits > 0, 0, arena.remaining))
        arena.remaining.sub_(arena.held)
        yield
        arena.remaining.add_(arena.held)
