"""What the server gets from torch: rounds of several sequences at once, and kept prefixes.

Sequences are not padded into a rectangle. The rows of all blocks lie behind one another in one [N, H] matrix, so every
product reads the weights once for all sequences; attention runs sequence by sequence on that sequence's own cache. So a
sequence may have any length and verify any number of tokens, joins and leaves without copying, and no row of it can write
into another's cache (case R8). Hybrid targets: `serving_hybrid`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine.common.protocols import ServingSupport, Verification
from dspine_cuda.caches import KVCache
from dspine_cuda.draft_cache import DraftCache
from dspine_cuda.drafter import TorchDrafter
from dspine_cuda.serving_hybrid import HybridBatcher, HybridPrefixes
from dspine_cuda.serving_rows import DraftBatcher, Part
from dspine_cuda.targets.dense import DenseLayer, DenseTarget
from dspine_cuda.targets.hybrid import HybridTarget
from dspine_cuda.targets.layers import rotate_


def support(target: Any, drafter: Any) -> ServingSupport:
    """Batching and prefixes where target and drafter allow them."""
    if drafter is not None and not isinstance(drafter, TorchDrafter):
        return ServingSupport(None, None, f"drafters of type {type(drafter).__name__} draft one sequence at a time")
    if isinstance(target, HybridTarget):
        reason = "rounds of several sequences run as one batch and share one length"
        return ServingSupport(HybridBatcher(target, drafter), HybridPrefixes(), reason)
    if not isinstance(target, DenseTarget):
        return ServingSupport(None, None, f"{target.info.adapter}: sequences take turns, round by round, no kept prefixes")
    return ServingSupport(TorchBatcher(target, drafter), TorchPrefixes(), "rounds of several sequences run as one batch")


class TorchBatcher(DraftBatcher):
    """`protocols.Batcher` over a lean dense target and its drafter: every sequence may verify another number of tokens."""

    shares_length = False
    target: DenseTarget

    @torch.inference_mode()
    def verify(self, caches: Sequence[KVCache], blocks: Sequence[Tensor]) -> list[Verification]:
        """blocks int [1, w_i]; their tokens are pending in `caches` until `commit`."""
        target = self.target
        counts = [block.shape[1] for block in blocks]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        parts = [Part(target, cache, start, count) for cache, start, count in zip(caches, starts, counts, strict=True)]
        tables = [target.rotary.rows(cache.length, count) for cache, count in zip(caches, counts, strict=True)]
        cos, sin = (torch.cat([table[i] for table in tables]) for i in (0, 1))
        x = F.embedding(torch.cat([block[0] for block in blocks]), target.embedding)
        captured: dict[int, Tensor] = {}
        for index, layer in enumerate(target.layers):
            x = self._layer(layer, index, x, cos, sin, parts)
            if index in target.taps:
                captured[index] = x
        logits = target.head(target.norm(x))
        features = torch.cat([captured[i] for i in target.taps], dim=-1) if target.taps else None
        return [
            Verification(
                logits[part.start : part.stop][None], None if features is None else features[part.start : part.stop][None]
            )
            for part in parts
        ]

    @staticmethod
    def _layer(layer: DenseLayer, index: int, x: Tensor, cos: Tensor, sin: Tensor, parts: list[Part]) -> Tensor:
        """`DenseLayer.forward` over rows [N, H] of several sequences; tables [N, 1, hd]."""
        total = x.shape[0]
        qkv = layer.qkv(layer.input_norm(x)).view(1, total, -1, layer.head_dim)
        rotated = qkv.narrow(2, 0, layer.rotated)
        query, new = qkv.split_with_sizes(layer.sections, 2)
        if layer.qk_norm is not None:
            rotated.copy_(layer.qk_norm(rotated))
        rotate_(rotated, cos, sin)
        new = new.view(1, total, 2, layer.kv_heads, layer.head_dim).permute(2, 0, 3, 1, 4)
        query = query.transpose(1, 2)
        mixed = []
        for part in parts:
            part.rows[index].copy_(new[:, :, :, part.start : part.stop])
            mixed.append(part.attend(layer.grouped, index, query[:, :, part.start : part.stop]))
        h = layer.output(torch.cat(mixed)).add_(x)
        gate, up = layer.gate_up(layer.mlp_norm(h)).chunk(2, dim=-1)
        return layer.down(F.silu(gate, inplace=True) * up).add_(h)

    def commit(self, caches: Sequence[KVCache], verifications: Sequence[Verification], counts: Sequence[int]) -> None:
        """Keep the first counts[i] tokens of every sequence's block."""
        for cache, verification, count in zip(caches, verifications, counts, strict=True):
            self.target.commit(cache, verification, count)


class TorchPrefixes:
    """`protocols.PrefixOps` for dense K/V caches: any number of leading rows can be taken over."""

    def nbytes(self, cache: KVCache, draft_cache: DraftCache | None, length: int) -> int:
        """Bytes of the first `length` rows of both."""
        return sum(rows.numel() * rows.element_size() for rows in self._rows(cache, draft_cache, length))

    def save(self, cache: KVCache, draft_cache: DraftCache | None, length: int) -> tuple[Tensor, ...]:
        """Copies of the rows."""
        return tuple(rows.clone(memory_format=torch.contiguous_format) for rows in self._rows(cache, draft_cache, length))

    def load(self, saved: tuple[Tensor, ...], cache: KVCache, draft_cache: DraftCache | None, length: int) -> None:
        """Rows into two empty caches."""
        if draft_cache is not None and len(saved) != 2:
            raise DSpineError("a kept prefix without the drafter's part cannot start a sequence that drafts")
        self._fill(saved, cache, draft_cache, length)

    def copy(self, cache: KVCache, draft_cache: DraftCache | None, to_cache: KVCache, to_draft: Any, length: int) -> None:
        """Rows of live caches into two empty ones."""
        self.load(tuple(self._rows(cache, draft_cache, length)), to_cache, to_draft, length)

    @staticmethod
    def _rows(cache: KVCache, draft_cache: DraftCache | None, length: int) -> list[Tensor]:
        if length > cache.length or (draft_cache is not None and length > draft_cache.length):
            raise DSpineError(f"{length} tokens asked for, but the caches hold {cache.length} committed ones")
        rows = [cache.store.narrow(4, 0, length)]
        return rows if draft_cache is None else [*rows, draft_cache.rows(length)]

    @staticmethod
    def _fill(saved: tuple[Tensor, ...], cache: KVCache, draft_cache: DraftCache | None, length: int) -> None:
        cache.reserve(length)
        cache.store.narrow(4, 0, length).copy_(saved[0].narrow(4, 0, length))
        cache.commit(length)
        if draft_cache is not None:
            draft_cache.write_all(0, saved[1][..., :length, :])
            draft_cache.advance(length)
