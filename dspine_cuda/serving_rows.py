"""What batched rounds of every kind of target share: a sequence's own attention, and drafting for several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine.common.protocols import DraftRequest, Proposal
from dspine_cuda.caches import KVCache
from dspine_cuda.draft_cache import DraftCache
from dspine_cuda.drafter import BlockStates, TorchDrafter
from dspine_cuda.targets.dense import ROWS, RowFrame, causal_mask


class Part:
    """One sequence's rows [start, stop) of the batch, and its attention."""

    def __init__(self, target: Any, cache: KVCache, start: int, count: int) -> None:
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

    def attend(self, grouped: bool, index: int, query: Tensor) -> Tensor:
        """query [1, heads, w, hd] -> [w, heads * hd]."""
        keys, values = self.keys[index], self.values[index]
        if self.frame is not None:
            mixed = self.frame.attend(query, keys, values, grouped)
        else:
            mixed = F.scaled_dot_product_attention(query, keys, values, self.mask, enable_gqa=grouped)
        return mixed[0].transpose(0, 1).reshape(self.stop - self.start, -1)


class DraftBatcher:
    """The drafter's half of `protocols.Batcher`."""

    def __init__(self, target: Any, drafter: TorchDrafter | None) -> None:
        self.target, self.drafter = target, drafter

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
