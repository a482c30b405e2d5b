"""A mixture-of-experts block of mlx-lm in two halves: which experts (the router), and what they say.

The halves meet where HybridSpec stops and resumes. Router weights, experts (`SwitchGLU`, quantised or not) and the
shared expert are the loaded modules; only the choice of the top k is ours, because `mx.argpartition` breaks ties as it
likes, and a tie broken one way for one row and another way for sixteen changes the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dspine.common.arrays import top_k


@dataclass(frozen=True)
class Routing:
    """picks int32 [B, T, k], best first, of equal ones the lower id; scores [B, T, k] in the dtype of the block's input."""

    picks: mx.array
    scores: mx.array

    def first(self, count: int) -> Routing:
        """The first `count` tokens."""
        return Routing(self.picks[:, :count], self.scores[:, :count])


def is_moe(mlp: Any) -> bool:
    """Whether a layer's `mlp` is a block with a router."""
    return all(name in mlp for name in ("gate", "switch_mlp"))


def route(block: Any, x: mx.array) -> Routing:
    """Router of `block` on post-attention-normed x [B, T, H]: softmax over all experts in float32, the top k, renormalised
    where the model does so. The choice is made on the logits, so that two of them never tie by the softmax's rounding."""
    logits = block.gate(x).astype(mx.float32)
    _, picks = top_k(logits, block.top_k)
    scores = mx.take_along_axis(mx.softmax(logits, axis=-1), picks, axis=-1)
    if block.norm_topk_prob:
        scores = scores / mx.sum(scores, axis=-1, keepdims=True)
    return Routing(picks.astype(mx.int32), scores.astype(x.dtype))


def experts(block: Any, x: mx.array, routing: Routing) -> mx.array:
    """Output [B, T, H] of the picked experts of `block`, weighted, plus the shared expert where there is one."""
    out = mx.sum(block.switch_mlp(x, routing.picks) * routing.scores[..., None], axis=-2)
    if "shared_expert" in block:
        out = out + mx.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    return out.astype(x.dtype)
