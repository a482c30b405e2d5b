"""Core operations on CPU tensors where the call overhead of many small array API steps would cost more than the arithmetic."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.injection import InjectionWeights


def transition_scores(
    hidden: Tensor, predecessor_codes: Tensor, candidate_rows: Tensor, weights: InjectionWeights, norm: Any
) -> Tensor:
    """`common.transition.transition_scores`: [..., M, H], [..., M, K, r], [..., M, K, H] -> float32 [..., M, K, K]."""
    z = F.linear(hidden, weights.readout).float()
    size = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    z = z.mul_(z.shape[-1] ** 0.5 / torch.where(size > 0, size, 1.0)).to(hidden.dtype)
    receiver = F.linear(z, weights.receiver_gate, weights.bias).unsqueeze(-2)
    codes = predecessor_codes.to(hidden.dtype)
    gated = F.linear(codes, weights.predecessor_gate).add_(receiver).sigmoid_().mul_(F.linear(codes, weights.message))
    wide = hidden.unsqueeze(-2).float()
    rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).mul_(hidden.shape[-1] ** -0.5)
    written = torch.addcmul(wide, rms, F.linear(gated, weights.write).float()).to(hidden.dtype)
    return norm(written).float() @ candidate_rows.float().transpose(-1, -2)


def path_walk(scores: Tensor, candidates: Tensor) -> Tensor:
    """`common.transition.path_walk` by look-ups in host memory: scores [..., M, K, K], candidates [..., M, K] -> [..., M]."""
    best = scores.argmax(dim=-1)  # every predecessor's successor, before the walk knows which one it needs
    steps = best.reshape(-1, *best.shape[-2:]).tolist()
    picks = []
    for rows in steps:
        index, path = 0, []
        for row in rows:
            index = row[index]
            path.append(index)
        picks.append(path)
    walked = torch.tensor(picks, dtype=torch.int64).view(*candidates.shape[:-1], 1)
    return candidates.gather(-1, walked).squeeze(-1)


def on_cpu_in_half(hidden: Tensor, *_: Any) -> bool:
    """bfloat16 only: in float32 and float64 the core's own order of operations is kept, so that both runtimes agree."""
    return hidden.dtype == torch.bfloat16
