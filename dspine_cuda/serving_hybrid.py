"""Rounds of several sequences at once on hybrid targets, and their kept prefixes.

As on dense targets, the rows of all blocks lie behind one another in one matrix for every product and expert, and attention
runs on each sequence's own cache. Gated DeltaNet wants a rectangle: its operations run over [B, T, ...], a block shorter than
the longest followed by rows that nothing reads. The states of the sequences lie side by side in one stack, of which every
cache holds its own part: they are copied together only when a sequence has joined or left. One commit launch then brings
every sequence to its own number of accepted tokens (`gdn_commit` with m per row).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine.common.gdn import gdn_commit
from dspine.common.protocols import Verification
from dspine_cuda.draft_cache import DraftCache
from dspine_cuda.drafter import TorchDrafter
from dspine_cuda.hybrid_cache import BlockFactors, HybridCache
from dspine_cuda.serving_rows import DraftBatcher, Part
from dspine_cuda.targets.dense import ROWS
from dspine_cuda.targets.hybrid import HybridTarget
from dspine_cuda.targets.mixers import Block


@dataclass
class StateStack:
    """States float32 [Lg, B, Hv, Dv, Dk] and windows [Lg, B, width-1, C] of B sequences. `parts`: the views of them that the
    caches hold; a cache that holds another tensor by now (it went on alone) is not of this stack any more."""

    states: Tensor
    windows: Tensor
    parts: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, caches: Sequence[HybridCache]) -> StateStack:
        """Copy the caches' own together, and give each its part."""
        states = torch.cat([cache.states for cache in caches], dim=1)
        windows = torch.cat([cache.windows for cache in caches], dim=1)
        parts = [(states[:, i : i + 1], windows[:, i : i + 1]) for i in range(len(caches))]
        for cache, (state, window) in zip(caches, parts, strict=True):
            cache.states, cache.windows = state, window
        return cls(states, windows, parts)

    def holds(self, caches: Sequence[HybridCache]) -> bool:
        """Whether it is exactly these sequences', in this order."""
        return len(caches) == len(self.parts) and all(
            cache.states is state and cache.windows is window for cache, (state, window) in zip(caches, self.parts, strict=True)
        )


class RowsBlock(Block):
    """Blocks of `counts` tokens of several caches (reserved here), one behind another. To the mixers it is one block of N
    rows; `rectangle` and `flat` translate between those and [B, T, C]."""

    def __init__(self, target: HybridTarget, caches: Sequence[HybridCache], counts: Sequence[int], stack: StateStack) -> None:
        self.caches, self.counts, self.stack, self.target = caches, list(counts), stack, target
        self.cache, self.config, self.dtype, self.device = caches[0], target.config, target.dtype, target.device
        self.batch, self.count = 1, sum(counts)
        starts = [sum(self.counts[:i]) for i in range(len(self.counts))]
        for cache, count in zip(caches, counts, strict=True):
            cache.reserve(count)
        self.parts = [Part(target, cache.kv, start, count) for cache, start, count in zip(caches, starts, counts, strict=True)]
        self.width = ROWS if self.device.type == "cpu" and max(counts) <= ROWS else max(counts)

    @property
    def longest(self) -> int:
        """`Block.longest`."""
        return max(self.counts)

    @cached_property
    def angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, rotary_dim]."""
        tables = [self.target.rotary.rows(cache.length, n) for cache, n in zip(self.caches, self.counts, strict=True)]
        cos, sin = (torch.cat([table[i] for table in tables]) for i in (0, 1))
        return cos, sin

    @cached_property
    def places(self) -> Tensor | None:
        """int64 [N]: where each row stands in [B * T]; None where the rows are the rectangle already."""
        if all(count == self.width for count in self.counts):
            return None
        found = [row * self.width + i for row, count in enumerate(self.counts) for i in range(count)]
        return torch.tensor(found, device=self.device)

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> Tensor:
        """`Block.attend`, [1, N, ...]: every part on its own cache."""
        new = torch.stack((key, value)).transpose(2, 3)  # [2, 1, kv_heads, N, hd]
        query = query.transpose(1, 2)
        mixed = []
        for part in self.parts:
            part.rows[index].copy_(new[:, :, :, part.start : part.stop])
            mixed.append(part.attend(grouped, index, query[:, :, part.start : part.stop]))
        return torch.cat(mixed).view(1, self.count, *query.shape[1::2])

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """Windows and states of a GDN layer, [B, ...]."""
        index = self.cache.gdn_index[layer]
        return self.stack.windows[index], self.stack.states[index]

    def rectangle(self, made: Tensor) -> Tensor:
        """[N, C] -> [B, T, C]."""
        if self.places is not None:
            wide = made.new_zeros((len(self.counts) * self.width, made.shape[1]))
            made = wide.index_copy_(0, self.places, made)
        return made.view(len(self.counts), self.width, -1)

    def flat(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, C]."""
        x = x.reshape(len(self.counts) * self.width, -1)
        return x if self.places is None else x.index_select(0, self.places)


@dataclass(frozen=True)
class SharedFactors:
    """Factors of one batched block, which belong to all its verifications: `whole` None where the model has no GDN layers."""

    stack: StateStack
    whole: BlockFactors | None


class HybridBatcher(DraftBatcher):
    """`protocols.Batcher` over a lean hybrid target and its drafter: unlike a dense one it wants one length for all."""

    shares_length = True

    def __init__(self, target: HybridTarget, drafter: TorchDrafter | None) -> None:
        super().__init__(target, drafter)
        self.target: HybridTarget = target
        self._stack: StateStack | None = None

    @torch.inference_mode()
    def verify(self, caches: Sequence[HybridCache], blocks: Sequence[Tensor]) -> list[Verification]:
        """blocks int [1, w_i]; their tokens are pending in `caches` until `commit`."""
        counts = [block.shape[1] for block in blocks]
        if self._stack is None or not self._stack.holds(caches):
            self._stack = None  # the old one goes before the new one is there, as far as no cache holds it
            self._stack = StateStack.of(caches)
        block = RowsBlock(self.target, caches, counts, self._stack)
        logits, features, factors = self.target.verify_rows(block, torch.cat([tokens[0] for tokens in blocks]))
        shared = SharedFactors(self._stack, factors)
        return [
            Verification(
                logits[part.start : part.stop][None],
                None if features is None else features[part.start : part.stop][None],
                shared,
            )
            for part in block.parts
        ]

    @torch.inference_mode()
    def commit(self, caches: Sequence[HybridCache], verifications: Sequence[Verification], counts: Sequence[int]) -> None:
        """Keep the first counts[i] tokens of every sequence's block: one launch for all sequences and layers."""
        shared: Any = verifications[0].factors
        same = all(verification.factors is shared for verification in verifications)
        if not isinstance(shared, SharedFactors) or not same or not shared.stack.holds(caches):
            raise DSpineError("a batch is committed as it was verified: the same sequences in the same order, each once")
        stack, whole = shared.stack, shared.whole
        for cache, count in zip(caches, counts, strict=True):
            cache.commit(count)
        if whole is None or not any(counts):
            return
        m = torch.tensor(list(counts), dtype=torch.int32, device=stack.states.device)
        states, windows = gdn_commit(stack.states, whole.gdn, stack.windows, whole.inputs, m)
        if states is not stack.states:  # an operation that does not write in place
            stack.states.copy_(states)
            stack.windows.copy_(windows)


class HybridPrefixes:
    """`protocols.PrefixOps` for hybrids: K/V rows, states and convolution windows after exactly the saved tokens."""

    cuts = False

    def nbytes(self, cache: HybridCache, draft_cache: DraftCache | None, length: int) -> int:
        """Bytes of a snapshot."""
        return sum(part.numel() * part.element_size() for part in self._parts(cache, draft_cache, length))

    def save(self, cache: HybridCache, draft_cache: DraftCache | None, length: int) -> tuple[Tensor, ...]:
        """Copies of everything after the committed tokens."""
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in self._parts(cache, draft_cache, length))

    @torch.inference_mode()
    def load(self, saved: tuple[Tensor, ...], cache: HybridCache, draft_cache: DraftCache | None, length: int) -> None:
        """A snapshot into two empty caches, in place: graphs know them by their addresses."""
        if length != saved[0].shape[4] or (draft_cache is not None and len(saved) != 4):
            raise DSpineError(
                f"a snapshot of {saved[0].shape[4]} tokens cannot start a sequence at {length} tokens that drafts"
            )
        cache.reserve(length)
        cache.kv.store.narrow(4, 0, length).copy_(saved[0])
        cache.states.copy_(saved[1])
        cache.windows.copy_(saved[2])
        cache.commit(length)
        if draft_cache is not None:
            draft_cache.write_all(0, saved[3])
            draft_cache.advance(length)

    def copy(self, *caches: Any) -> None:
        """Not for states: a running sequence is past the prefix."""
        raise DSpineError("states of linear attention cannot be cut to a prefix")

    @staticmethod
    def _parts(cache: HybridCache, draft_cache: DraftCache | None, length: int) -> list[Tensor]:
        if length != cache.length or (draft_cache is not None and length != draft_cache.length):
            raise DSpineError(f"snapshot of {length} tokens asked for, but the states are those after {cache.length}")
        parts = [cache.kv.store.narrow(4, 0, length), cache.states, cache.windows]
        return parts if draft_cache is None else [*parts, draft_cache.rows(length)]
