"""Floating-point work of one training step, counted from shapes: what the model asks for, not what is run again.

A product of [n, a] by [a, b] is 2 n a b. A trained product costs three of its size (forward, and a gradient for input and
weight), one on frozen inputs two, the frozen LM head two for the drafter (forward, input gradient) and one for the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dspine.common.configs import DrafterConfig
from dspine_cuda.training.batches import Batch

# dense bfloat16 peak, from the vendors' data sheets
_PEAKS = {"H200": 989e12, "H100": 989e12, "GH200": 989e12, "H20": 148e12, "B200": 2250e12, "B100": 1750e12, "A100": 312e12,
          "A800": 312e12, "L40S": 362e12, "RTX 4090": 165e12, "RTX 5090": 210e12}  # fmt: skip


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Dense peak of the device in this dtype, where it is known."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in sorted(_PEAKS.items(), key=lambda item: -len(item[0])) if key in name), None)


@dataclass(frozen=True)
class StepFlops:
    """drafter: forward and backward of what is trained; target: the frozen target's forward (0 with cached features) and its
    logits."""

    drafter: float
    target: float


def layer_weights(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Matrix entries of one decoder layer."""
    return hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner


def visible_context(batch: Batch) -> int:
    """Context tokens seen by all blocks of a (host) batch: the anchors' positions in their documents."""
    return int((batch.positions.gather(1, batch.anchors) * batch.keep).sum())


def document_pairs(batch: Batch) -> int:
    """Pairs (query, key) of the target's own attention: causal within documents."""
    return int(((batch.positions + 1) * (batch.documents >= 0)).sum())


def step_flops(
    config: DrafterConfig, target: Any, batch: Batch, *, refinement: bool, alignment: str, cached: bool
) -> StepFlops:
    """Work of one step on a whole (host) batch. target: a `TargetShape`."""
    tokens, blocks = batch.tokens.numel(), batch.anchors.numel()
    rows, labels = blocks * config.query_rows, batch.labels.numel()
    hidden, vocab, layers, head = config.hidden_size, config.vocab_size, config.num_layers, config.head_dim
    weights = layer_weights(hidden, config.intermediate_size, config.num_heads, config.num_kv_heads, head)
    drafter = 3 * 2 * rows * layers * weights
    drafter += 2 * 2 * tokens * config.feature_size * hidden + 3 * 2 * tokens * layers * 2 * hidden * config.num_kv_heads * head
    inside = blocks * (config.block_size * (config.block_size + 1) // 2 if config.is_causal else config.block_size**2)
    drafter += 3 * layers * 4 * config.num_heads * head * (config.query_rows * visible_context(batch) + inside)
    drafter += 2 * 2 * labels * hidden * vocab
    if config.dspine is not None:
        rank, message = config.dspine.transfer_rank, config.dspine.message_size
        injection = hidden * rank + 3 * rank * message + message * hidden
        read_again = hidden * rank if alignment == "cosine" else 0
        drafter += 3 * 2 * labels * (layers * (injection + read_again) + (injection if refinement else 0))
    if alignment == "token":
        drafter += 2 * 2 * labels * layers * hidden * vocab
    shared = min(tokens, labels)  # one position's logits serve every block that reaches it
    frozen = 2 * shared * hidden * vocab
    if not cached:
        size = layer_weights(hidden, target.intermediate_size, target.num_heads, target.num_kv_heads, target.head_dim)
        pairs = 4 * target.num_heads * target.head_dim * document_pairs(batch)
        frozen += target.num_layers * (2 * tokens * size + pairs)
    return StepFlops(float(drafter), float(frozen))
