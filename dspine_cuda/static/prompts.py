"""A piece of a prompt read into a slot as device work only: one program serves every slot, every start and every length.

The slot, the token in front of the piece and how many rows count lie on the device (`PromptSteps.send`). A program has a fixed
number of rows and a fixed context: it copies the slot's K/V up to there, runs the layers of the static steps over them, and
copies the new rows, states and windows back. Rows behind the piece write to scrap and leave states and windows as they are;
nothing of another slot is read or written, and K/V behind the committed tokens (which may hold anything) are read as zeros.

Nothing here reads the device, so `read` can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dspine_cuda.caches import KEY_TILE
from dspine_cuda.hybrid_cache import HybridCache
from dspine_cuda.static.arena import ArenaShape, arena_bytes
from dspine_cuda.static.dense import StaticDense
from dspine_cuda.static.hybrid import StaticHybrid, StaticStage
from dspine_cuda.static.slots import SlotArena
from dspine_cuda.static.steps import Where
from dspine_cuda.targets.dense import DenseTarget
from dspine_cuda.targets.hybrid import HybridLayer, HybridTarget

ROWS = (32, 64, 128, 256, 512)  # of a program
LEAST_CONTEXT = 256  # tokens that a program's attention reaches at least
_HEAD = 4  # ints between two counters: each at a multiple of 16 bytes, as kernels like their arguments
_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # those that take a mask without asking for plans


@dataclass(frozen=True)
class Program:
    """rows: tokens of a piece at most; context: K/V rows of the slot that its attention reaches."""

    rows: int
    context: int


def prompt_bytes(target: Any, drafter: Any | None, shape: ArenaShape) -> int:
    """Bytes that the longest context of an arena takes while a piece is read: a slot's K/V twice (copied out, then with room
    behind), its states and windows twice, and the mask. The rows' own, up to 512 of each activation, come on top."""
    slot = arena_bytes(target, drafter, replace(shape, batch=1))
    copies = sum(slot.get(part, 0) for part in ("kv", "states", "windows"))
    return 2 * copies + ROWS[-1] * shape.store * target.dtype.itemsize


@dataclass(frozen=True)
class PieceWhere(Where):
    """A piece behind `lengths` tokens; mask [w, context], added to the scores."""

    mask: Tensor

    def attend(self, query: Tensor, store: Tensor, scale: float) -> Tensor:
        """`Where.attend` by the library's attention: [1, w, Hq, D] over the context. The heads of one K/V head lie side by side
        and share it without a copy."""
        rows, heads, size = query.shape[1:]
        keys, values = store.narrow(3, 0, self.mask.shape[1]).transpose(1, 2).unbind(0)  # [Hk, 1, context, D]
        group = (keys.shape[0], heads // keys.shape[0])
        keys, values = (x.expand(*group, *x.shape[2:]) for x in (keys, values))
        query = query.view(rows, *group, size).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(query, keys, values, self.mask, scale=scale)
        return mixed.permute(2, 0, 1, 3).reshape(1, rows, heads, size)


class PieceDense(StaticDense):
    """A dense target's layers over one piece. stores: its K/V [L, 2, 1, Hk, C, D]."""

    def __init__(self, target: DenseTarget, stores: Tensor) -> None:
        self.target, self.pad_rows, self.stores = target, 0, stores.unbind(0)

    def rows(self, tokens: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        """tokens int [1, w] -> rows after the last norm [w, H] and features [1, w, F]."""
        return self.run(tokens, where)


class PieceHybrid(StaticHybrid):
    """A hybrid target's layers over one piece. states [Lg, 1, Hv, Dv, Dk] and windows [Lg, 1, width-1, C] are those in front of
    it; those behind it are found in `after`."""

    def __init__(self, target: HybridTarget, cache: HybridCache, stores: Tensor, states: Tensor, windows: Tensor) -> None:
        self.target, self.cache, self.stores = target, cache, stores.unbind(0)
        self.states, self.windows = states, windows
        self.after: list[tuple[Tensor, Tensor]] = []  # (window, state) a layer
        self.experts: dict[int, Any] = {}  # many rows: the eager form of the experts

    def rows(self, tokens: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        """tokens int [1, w] -> rows after the last norm [w, H] and features [1, w, F]."""
        return self.run(StaticStage(tokens), where)

    def _gdn(self, layer: HybridLayer, normed: Tensor, where: Where) -> Tensor:
        index = self.cache.gdn_index[layer.index]
        out, window, state = layer.mixer.read(normed, self.windows[index], self.states[index], where.live)  # type: ignore[union-attr]
        self.after.append((window, state))
        return out


class PromptSteps:
    """Pieces of prompts for the slots of one arena. logits float32 [1, V]: of the last token of the newest piece."""

    def __init__(self, target: Any, drafter: Any | None, arena: SlotArena, longest: int = ROWS[-1]) -> None:
        """longest: tokens of a piece at most."""
        self.target, self.drafter, self.arena = target, drafter, arena
        longest = min(longest, arena.shape.tokens)
        self.sizes = [size for i, size in enumerate(ROWS) if i == 0 or ROWS[i - 1] < longest]
        self.longest = min(longest, self.sizes[-1])
        self.inputs = torch.zeros(3 * _HEAD + self.sizes[-1], dtype=torch.int32, device=arena.device)
        self.logits = torch.zeros((1, target.info.vocab_size), device=arena.device)
        if drafter is not None:
            self.tables = drafter.tables(0, arena.draft_cache._store.shape[4])  # type: ignore[union-attr]

    def program(self, start: int, count: int) -> Program:
        """The one that reads `count` tokens behind `start` others: the same for a prompt read anew and for one whose start was
        kept, so that equal rows have equal bits."""
        rows = next(size for size in self.sizes if size >= count)
        wanted = max(LEAST_CONTEXT, 1 << (start + rows - 1).bit_length())
        return Program(rows, min(wanted, self.arena.shape.store))

    def programs(self, piece: int, context: int) -> list[Program]:
        """All that prompts of up to `context` tokens (at least `LEAST_CONTEXT`) ask for, read in pieces of up to `piece`."""
        ends = [LEAST_CONTEXT << i for i in range(context.bit_length()) if i == 0 or LEAST_CONTEXT << i <= context]
        largest = next((size for size in self.sizes if size >= piece), self.sizes[-1])
        sizes = [size for size in self.sizes if size <= largest]
        return list(dict.fromkeys(self.program(max(end - size, 0), size) for size in sizes for end in ends))

    @torch.inference_mode()
    def send(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """What the next program reads: `tokens` behind the `start` committed ones of `slot`; no tokens: nothing changes."""
        row = torch.zeros(self.inputs.shape[0], dtype=torch.int32)
        row[0], row[_HEAD], row[2 * _HEAD] = slot, start, len(tokens)
        row[3 * _HEAD : 3 * _HEAD + len(tokens)] = torch.as_tensor(tokens, dtype=torch.int32)
        self.inputs.copy_(row.pin_memory() if self.arena.device.type == "cuda" else row, non_blocking=True)

    @torch.inference_mode()
    def read(self, program: Program) -> None:
        """Run one program on what was sent."""
        with sdpa_kernel(_BACKENDS) if self.arena.device.type == "cuda" else nullcontext():
            self._read(program)

    def _read(self, program: Program) -> None:
        arena, rows, context, inputs = self.arena, program.rows, program.context, self.inputs
        slot = inputs[:1].to(torch.int64)
        start, live = inputs[_HEAD : _HEAD + 1], inputs[2 * _HEAD : 2 * _HEAD + 1]
        tokens = inputs[None, 3 * _HEAD : 3 * _HEAD + rows]
        offset = torch.arange(rows, dtype=torch.int32, device=arena.device)
        place = (start + offset).to(torch.int64)  # [w]
        column = torch.arange(context, dtype=torch.int32, device=arena.device)
        mask = torch.zeros((rows, context), dtype=arena.dtype, device=arena.device)
        mask = mask.masked_fill_(column > place[:, None], -torch.inf)
        where = PieceWhere(start, live, arena.cos[:, 0], arena.sin[:, 0], rows, mask)
        stores = self._context(slot, column >= start, rows)
        steps = self._steps(slot, stores)
        normed, features = steps.rows(tokens, where)
        self.logits.copy_(self.target.head(normed.index_select(0, (live - 1).clamp(min=0))))
        own = torch.where(offset < live, place, stores.shape[4] - 1)
        made = stores.index_select(4, own)
        self._put(arena.kv.store, made, slot, place, offset < live)
        if isinstance(steps, PieceHybrid) and steps.after:
            windows, states = (torch.stack(parts) for parts in zip(*steps.after, strict=True))
            arena.cache.states.index_copy_(1, slot, states)
            arena.cache.windows.index_copy_(1, slot, windows)
        if self.drafter is not None and features is not None:
            self._draft(slot, place, offset < live, features)

    def _context(self, slot: Tensor, behind: Tensor, rows: int) -> Tensor:
        """K/V of the slot up to the context, [L, 2, 1, Hk, C, D], those `behind` the committed tokens zeros; more rows follow,
        the last of them is scrap."""
        count = behind.shape[0]
        held = self.arena.kv.store.narrow(4, 0, count).index_select(2, slot)
        held.masked_fill_(behind[:, None], 0)
        return F.pad(held, (0, 0, 0, max(rows - count, 0) + KEY_TILE))

    def _steps(self, slot: Tensor, stores: Tensor) -> PieceDense | PieceHybrid:
        if isinstance(self.target, DenseTarget):
            return PieceDense(self.target, stores)
        cache = self.arena.cache
        return PieceHybrid(self.target, cache, stores, cache.states.index_select(1, slot), cache.windows.index_select(1, slot))

    def _draft(self, slot: Tensor, place: Tensor, counts: Tensor, features: Tensor) -> None:
        """The drafter's context of the piece."""
        store = self.arena.draft_cache._store  # type: ignore[union-attr]
        cos, sin = (table.index_select(0, place.clamp(max=table.shape[0] - 1)) for table in self.tables)
        made = self.drafter.lean.context(features.to(store.dtype), cos, sin)  # type: ignore[union-attr]
        self._put(store, made, slot, place, counts)

    @staticmethod
    def _put(store: Tensor, made: Tensor, slot: Tensor, place: Tensor, counts: Tensor) -> None:
        """Rows made [L, 2, 1, Hk, w, D] into store [L, 2, B, Hk, C, D] at `place` of the slot, those that do not count into the
        scrap row."""
        to = torch.where(counts, place, store.shape[4] - 1)
        store[:, :, slot, :, to] = made[:, :, 0].permute(3, 0, 1, 2, 4)
