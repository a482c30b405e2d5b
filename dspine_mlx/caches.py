"""K/V of a target: explicit objects, one set a sequence, rolled back by trimming."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_lm.models.cache import KVCache

from dspine.common.errors import DSpineError


@dataclass
class TargetCache:
    """K/V of every target layer. `length` counts committed tokens; `pending` verified tokens that wait for `commit`."""

    layers: list[KVCache]
    capacity: int
    length: int = 0
    pending: int = 0

    def room_for(self, count: int) -> None:
        """Raise where `count` more tokens do not fit, or where an earlier block was never committed."""
        if self.pending:
            raise DSpineError(f"target cache: {self.pending} verified tokens wait for commit; do that before the next block")
        if self.length + count > self.capacity:
            raise DSpineError(f"target cache: {self.length} + {count} tokens exceed its capacity of {self.capacity}")

    def keep(self, count: int) -> None:
        """Keep the first `count` of the pending tokens in every layer; drop the rest."""
        if not 0 <= count <= self.pending:
            raise DSpineError(f"target cache: commit of {count} tokens, expected 0..{self.pending} (the verified block)")
        for layer in self.layers:
            layer.trim(self.pending - count)
        self.length, self.pending = self.length + count, 0
