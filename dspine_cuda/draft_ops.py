"""Small torch helpers over draft logits."""

from __future__ import annotations

import torch
from torch import Tensor

from dspine.common.arrays import softmax
from dspine.common.sampling import sample_index


def draft_signals(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Top-1 probability and entropy (nats) of each row: logits [..., V] -> two float32 [...]."""
    log_p = torch.log_softmax(logits.float(), dim=-1)
    p = log_p.exp()
    return p.amax(dim=-1), -(p * log_p).sum(dim=-1)


def sample_independent(logits: Tensor, uniforms: Tensor, temperature: float, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each row draws on its own within its top `count`: tokens [B, M], candidates [B, M, K], q [B, M, K]."""
    values, candidates = torch.topk(logits, count, dim=-1)
    q = softmax(values / temperature)
    picks = sample_index(q, uniforms)
    return candidates.gather(-1, picks.unsqueeze(-1).long()).squeeze(-1), candidates, q
