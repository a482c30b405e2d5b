"""What the server gets from torch: rounds of several sequences at once, and kept prefixes.

Sequences are not padded into a rectangle. The rows of all blocks lie behind one another in one [N, H] matrix, so every
product reads the weights once for all sequences; attention runs sequence by sequence on that sequence's own cache. So a
sequence may have any length and verify any number of tokens, joins and leaves without copying, and no row of it can write
into another's cache (case R8).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine.common.protocols import DraftRequest, Proposal, ServingSupport, Verification
from dspine_cuda.caches import KVCache
from dspine_cuda.draft_cache import DraftCache
from dspine_cuda.drafter import BlockStates, TorchDrafter
from dspine_cuda.hybrid_cache import HybridCache
from dspine_cuda.targets.dense import ROWS, DenseLayer, DenseTarget, RowFrame, causal_mask
from dspine_cuda.targets.hybrid import HybridTarget
from dspine_cuda.targets.layers import rotate_


def support(target: Any, drafter: Any) -> ServingSupport:
    """Batching and prefixes where target and drafter allow them."""
    if drafter is not None and not isinstance(drafter, TorchDrafter):
        return ServingSupport(None, None, f"drafters of type {type(drafter).__name__} draft one sequence at a time")
    turns = "sequences take turns, round by round"
    if isinstance(target, HybridTarget):
        return ServingSupport(None, HybridPrefixes(), f"hybrid decoder: {turns}")
    if not isinstance(target, DenseTarget):
        return ServingSupport(None, None, f"{target.info.adapter}: {turns}, no kept prefixes")
    return ServingSupport(TorchBatcher(target, drafter), TorchPrefixes(), "rounds of several sequences run as one batch")


class _Part:
    """One sequence's rows [start, stop) of the batch, and its attention."""

    def __init__(self, target: DenseTarget, cache: KVCache, start: int, count: int) -> None:
        self.start, self.stop = start, start + count
        cache.reserve(count)
        past, config = cache.length, target.config
        self.frame, self.mask = None, None
        framed = target.device.type == "cpu" and count <= ROWS
        self.rows = cache.pending_rows()
        self.keys, self.values = cache.visible(whole_tiles=framed)
        if framed:
            keys = self.keys[0].shape[2]
            self.frame = RowFrame(past, count, keys, 1, config.num_heads, config.head_dim, target.dtype)
        else:
            self.mask = causal_mask(past, count, target.dtype, target.device)

    def attend(self, layer: DenseLayer, index: int, query: Tensor) -> Tensor:
        """query [1, heads, w, hd] -> [w, heads * hd]."""
        keys, values = self.keys[index], self.values[index]
        if self.frame is not None:
            mixed = self.frame.attend(query, keys, values, layer.grouped)
        else:
            mixed = F.scaled_dot_product_attention(query, keys, values, self.mask, enable_gqa=layer.grouped)
        return mixed[0].transpose(0, 1).reshape(self.stop - self.start, -1)


class TorchBatcher:
    """`protocols.Batcher` over a lean dense target and its drafter."""

    def __init__(self, target: DenseTarget, drafter: TorchDrafter | None) -> None:
        self.target, self.drafter = target, drafter

    @torch.inference_mode()
    def verify(self, caches: Sequence[KVCache], blocks: Sequence[Tensor]) -> list[Verification]:
        """blocks int [1, w_i]; their tokens are pending in `caches` until `Target.commit`."""
        target = self.target
        counts = [block.shape[1] for block in blocks]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        parts = [_Part(target, cache, start, count) for cache, start, count in zip(caches, starts, counts, strict=True)]
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
    def _layer(layer: DenseLayer, index: int, x: Tensor, cos: Tensor, sin: Tensor, parts: list[_Part]) -> Tensor:
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
            mixed.append(part.attend(layer, index, query[:, :, part.start : part.stop]))
        h = layer.output(torch.cat(mixed)).add_(x)
        gate, up = layer.gate_up(layer.mlp_norm(h)).chunk(2, dim=-1)
        return layer.down(F.silu(gate, inplace=True) * up).add_(h)

    @torch.inference_mode()
    def propose(self, caches: Sequence[DraftCache], anchors: Sequence[int], requests: Sequence[DraftRequest]) -> list[Proposal]:
        """One block a sequence; the layers run over all blocks at once, each block attends to its own context."""
        drafter = self._drafter()
        anchor = torch.tensor(list(anchors), dtype=torch.int32, device=self.target.device)
        rows, starts = drafter.config.query_rows, [cache.length for cache in caches]
        tables = [drafter.tables(start, start + rows) for start in starts]
        cos, sin = (torch.stack([table[i] for table in tables]) for i in (0, 1))
        masks = [drafter.masks(start) for start in starts]

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mixed = []
            for i, (cache, start) in enumerate(zip(caches, starts, strict=True)):
                one = slice(i, i + 1)
                cache.write(index, start, key[one], value[one])
                keys, values = cache.read(index, start + rows)
                mask = masks[i][drafter.rules[index]]
                mixed.append(F.scaled_dot_product_attention(query[one], keys, values, attn_mask=mask, enable_gqa=True))
            return torch.cat(mixed)

        states, code = drafter.run_block(anchor, cos, sin, attend)
        proposals: list[Proposal | None] = [None] * len(caches)
        for temperature, signals in {(request.temperature, request.signals) for request in requests}:
            picks = [i for i, r in enumerate(requests) if (r.temperature, r.signals) == (temperature, signals)]
            draws = None if temperature == 0 else torch.cat([requests[i].uniforms for i in picks])  # type: ignore[misc]
            some = states if len(picks) == len(caches) else BlockStates(states.hidden[picks], states.pre_injection[picks], [])
            part = code if code is None or len(picks) == len(caches) else code[picks]
            made = drafter.proposal(some, part, anchor[picks], DraftRequest(temperature, draws, signals))
            for row, i in enumerate(picks):
                proposals[i] = _row(made, row)
        return proposals  # type: ignore[return-value]

    @torch.inference_mode()
    def commit_drafts(self, caches: Sequence[DraftCache], features: Sequence[Tensor]) -> None:
        """Context K/V of newly committed tokens, projected for all sequences at once."""
        drafter = self._drafter()
        counts = [part.shape[1] for part in features]
        tables = [drafter.tables(cache.length, cache.length + n) for cache, n in zip(caches, counts, strict=True)]
        cos, sin = (torch.cat([table[i] for table in tables]) for i in (0, 1))
        rows = drafter.lean.context(torch.cat(list(features), dim=1).to(drafter.model.fc.weight.dtype), cos, sin)
        start = 0
        for cache, count in zip(caches, counts, strict=True):
            cache.write_all(cache.length, rows[..., start : start + count, :])
            cache.advance(count)
            start += count

    def _drafter(self) -> TorchDrafter:
        if self.drafter is None:
            raise DSpineError("this engine was loaded without a drafter: nothing can be drafted")
        return self.drafter


def _row(proposal: Proposal, row: int) -> Proposal:
    one = slice(row, row + 1)
    parts = (proposal.tokens, proposal.finite, proposal.candidates, proposal.q, proposal.confidence, proposal.entropy)
    return Proposal(*(None if part is None else part[one] for part in parts))


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


class HybridPrefixes:
    """`protocols.PrefixOps` for hybrids: K/V rows, states and convolution windows after exactly the saved tokens."""

    cuts = False

    def nbytes(self, cache: HybridCache, draft_cache: DraftCache | None, length: int) -> int:
        """Bytes of a snapshot."""
        return sum(part.numel() * part.element_size() for part in self._parts(cache, draft_cache, length))

    def save(self, cache: HybridCache, draft_cache: DraftCache | None, length: int) -> tuple[Tensor, ...]:
        """Copies of everything after the committed tokens."""
        return tuple(part.clone(memory_format=torch.contiguous_format) for part in self._parts(cache, draft_cache, length))

    def load(self, saved: tuple[Tensor, ...], cache: HybridCache, draft_cache: DraftCache | None, length: int) -> None:
        """A snapshot into two empty caches."""
        if length != saved[0].shape[4] or (draft_cache is not None and len(saved) != 4):
            raise DSpineError(
                f"a snapshot of {saved[0].shape[4]} tokens cannot start a sequence at {length} tokens that drafts"
            )
        cache.reserve(length)
        cache.kv.store.narrow(4, 0, length).copy_(saved[0])
        cache.states, cache.windows = saved[1].clone(), saved[2].clone()
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
