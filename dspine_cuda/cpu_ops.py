"""Core operations on CPU tensors where the call overhead of many small array API steps would cost more than the arithmetic."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common import attention, norms, signals
from dspine.common.arrays import top_k
from dspine.common.injection import InjectionWeights
from dspine.common.norms import row_norm
from dspine.common.signals import DraftSignals
from dspine_cuda.targets.layers import Norm, rotate_


def transition_scores(
    hidden: Tensor, predecessor_codes: Tensor, candidate_rows: Tensor, weights: InjectionWeights, norm: Any
) -> Tensor:
    """`common.transition.transition_scores`: [..., M, H], [..., M, K, r], [..., M, K, H] -> float32 [..., M, K, K].

    float32 inside: on a CPU these small products cost no more than in bfloat16, and nothing is rounded before the scores.
    """
    wide, codes = hidden.float(), predecessor_codes.float()
    z = F.linear(wide, weights.readout.float())
    size = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    z.mul_(z.shape[-1] ** 0.5 / torch.where(size > 0, size, 1.0))
    receiver = F.linear(z, weights.receiver_gate.float(), weights.bias.float()).unsqueeze(-2)
    gated = F.linear(codes, weights.predecessor_gate.float()).add_(receiver).sigmoid_()
    gated.mul_(F.linear(codes, weights.message.float()))
    wide = wide.unsqueeze(-2)
    rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).mul_(hidden.shape[-1] ** -0.5)
    written = torch.addcmul(wide, rms, F.linear(gated, weights.write.float()))
    normed = F.rms_norm(written, norm.weight.shape, norm.weight.float(), norm.eps)
    return normed @ candidate_rows.float().transpose(-1, -2)


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


def on_cpu_in_half(hidden: Tensor, codes: Tensor, rows: Tensor, weights: InjectionWeights, norm: Any) -> bool:
    """bfloat16 only: in float32 and float64 the core's own order of operations is kept, so that both runtimes agree."""
    return hidden.dtype == torch.bfloat16 and hasattr(norm, "weight") and hasattr(norm, "eps")


def draft_signals(logits: Tensor, k: int) -> DraftSignals:
    """`common.signals.draft_signals` with fewer passes over the vocabulary."""
    if not 1 <= k <= logits.shape[-1]:
        return signals.draft_signals.reference(logits, k)
    values, ids = top_k(logits, k)
    values = values.to(torch.float32)
    # below -200 a weight is exactly 0 in float32, and 0 * -inf would be NaN
    shifted = logits.to(torch.float32).sub(values[..., :1]).clamp_(min=-200.0)
    weights = shifted.exp()
    total = weights.sum(dim=-1)
    entropy = total.log() - weights.mul_(shifted).sum(dim=-1) / total
    return DraftSignals(values, ids, 1 / total, entropy, signals.rows_finite(logits.to(torch.float32)))


def attention_inputs(
    projected: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, live: Tensor, keys: Tensor, values: Tensor, heads: int,
    norm: Any | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`common.attention.attention_inputs` in place, by the steps (and with the bits) of the eager decoders."""
    attention.check_attention_inputs(projected, cos, sin, lengths, live, keys, values, heads, norm)
    key_heads, capacity, size = keys.shape[1:]
    turned = heads + key_heads
    offsets = torch.arange(projected.shape[1], dtype=torch.int32)
    place = torch.where(offsets < live[:, None], lengths[:, None] + offsets, capacity - 1).to(torch.int64)
    angles = (table[place.clamp(0, cos.shape[0] - 1)].unsqueeze(2) for table in (cos, sin))
    both = projected[:, :, :turned]
    both = both.clone() if norm is None else norm(both) if isinstance(norm, Norm) else row_norm(both, norm)
    rotate_(both if cos.shape[1] == size else both[..., : cos.shape[1]], *angles)
    for cache, rows in ((keys, both[:, :, heads:]), (values, projected[:, :, turned : turned + key_heads])):
        rows = rows.transpose(1, 2)
        cache.scatter_(2, place[:, None, :, None].expand(rows.shape), rows)
    return both[:, :, :heads], keys, values


def add_rms_norm(x: Tensor, y: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """`common.norms.add_rms_norm` by the eager decoders' own norm."""
    norms.check_add_rms_norm(x, y, norm)
    total = x if y is None else x + y
    return total, norm(total)


def has_own_norm(x: Tensor, y: Tensor | None, norm: Any) -> bool:
    """Norms of the lean decoders; any other takes the core's code."""
    return isinstance(norm, Norm)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`common.gating.silu_mul` in two operations."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
