"""Which adapter drives which family; and the families that differ from a plain decoder by a scale."""

from __future__ import annotations

import mlx.core as mx

from dspine_mlx.targets.hybrid import HybridTarget
from dspine_mlx.targets.plain import PlainTarget


class GemmaTarget(PlainTarget):
    """Embeddings are scaled by sqrt(hidden size)."""

    reason = "Gemma: scaled embeddings"

    def scale_embedding(self, hidden: mx.array) -> mx.array:
        """hidden [..., H] times sqrt(H)."""
        return hidden * self.info.hidden_size**0.5


class GraniteTarget(PlainTarget):
    """A multiplier on the embeddings and a divisor on the logits, both from the model's card."""

    reason = "Granite: scaled embeddings and logits"

    def scale_embedding(self, hidden: mx.array) -> mx.array:
        """hidden [..., H] times `embedding_multiplier`."""
        return hidden * self.model.args.embedding_multiplier

    def scale_logits(self, logits: mx.array) -> mx.array:
        """logits [..., V] over `logits_scaling`."""
        return logits / self.model.args.logits_scaling


HYBRIDS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen3_moe")
FAMILIES: dict[str, type[PlainTarget]] = {
    "gemma": GemmaTarget,
    "granite": GraniteTarget,
    **dict.fromkeys(HYBRIDS, HybridTarget),
}
