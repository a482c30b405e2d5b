"""K/V caches of targets: lengths are Python ints, rollback is a smaller length.

A round is `finish` (writes w rows behind the committed ones and marks them pending) and `commit(m)` (keeps the first m).
Rejected rows stay in memory as scratch and are overwritten by the next round; no one reads rows at or past
`length + pending`.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor

from dspine.common.errors import DSpineError

KEY_TILE = 16  # CPU attention over whole tiles of keys gives a row the same bits whatever rows are beside it


class RollbackCache:
    """Committed and pending rows of one batch of sequences of equal length.

    Invariants: 0 <= length, 0 <= pending, length + pending <= capacity. Rows [0, length) are committed, rows
    [length, length + pending) belong to the block being verified.
    """

    def __init__(self, capacity: int, batch: int = 1) -> None:
        if capacity < 1 or batch < 1:
            raise DSpineError(f"a cache needs a capacity and a batch of at least 1, got {capacity} and {batch}")
        self.capacity, self.batch, self.length, self.pending = capacity, batch, 0, 0

    def reserve(self, count: int) -> None:
        """Mark the next `count` rows pending (dropping what was pending before)."""
        if self.length + count > self.capacity:
            raise DSpineError(
                f"cache is full: {self.length} tokens committed and {count} more asked for, its capacity is {self.capacity}; "
                "make a larger cache"
            )
        self.pending = count

    def commit(self, count: int) -> None:
        """Keep the first `count` pending rows and drop the rest."""
        if not 0 <= count <= self.pending:
            raise DSpineError(f"commit of {count} tokens, but {self.pending} are pending: verify them first")
        self.length, self.pending = self.length + count, 0

    def check_integrity(self) -> None:
        """Raise where an invariant does not hold."""
        if self.length < 0 or self.pending < 0 or self.length + self.pending > self.capacity:
            raise DSpineError(f"cache broken: length {self.length}, pending {self.pending}, capacity {self.capacity}")


class KVCache(RollbackCache):
    """Preallocated K/V of every layer: one tensor [layers, 2 (K, V), B, kv_heads, capacity, head_dim].

    Further invariants: rows [0, length + pending) of every layer hold K (rotated) and V of the tokens at those positions;
    every row is finite (the store starts as zeros), so that attention may read masked rows behind them. The store has room
    for a whole number of `KEY_TILE` rows.
    """

    def __init__(
        self, layers: int, kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device, batch: int = 1
    ) -> None:
        super().__init__(capacity, batch)
        room = -(-capacity // KEY_TILE) * KEY_TILE
        self.store = torch.zeros((layers, 2, batch, kv_heads, room, head_dim), dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.store.numel() * self.store.element_size()

    def part(self, first: int, count: int) -> KVCache:
        """An empty cache over the memory of sequences [first, first + count) of this one."""
        found = copy(self)
        found.store, found.batch, found.length, found.pending = self.store.narrow(2, first, count), count, 0, 0
        return found

    def pending_rows(self) -> tuple[Tensor, ...]:
        """A layer at a time, where K/V of the pending rows go: views [2, B, kv_heads, pending, head_dim]."""
        return self.store.narrow(4, self.length, self.pending).unbind(0)

    def visible(self, whole_tiles: bool = False) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """A layer at a time, committed and pending rows: views of K and of V, [B, kv_heads, length + pending, head_dim];
        `whole_tiles` rounds the row count up to `KEY_TILE`."""
        rows = self.length + self.pending
        rows = -(-rows // KEY_TILE) * KEY_TILE if whole_tiles else rows
        keys, values = self.store.narrow(4, 0, rows).unbind(1)
        return keys.unbind(0), values.unbind(0)

    def check_integrity(self) -> None:
        """Raise where an invariant does not hold; committed rows must be finite (a synchronisation: for tests)."""
        super().check_integrity()
        if self.store.shape[2] != self.batch or self.store.shape[4] < self.capacity:
            raise DSpineError(f"cache broken: store {list(self.store.shape)}, batch {self.batch}, capacity {self.capacity}")
        if not bool(torch.isfinite(self.store.narrow(4, 0, self.length)).all()):
            raise DSpineError(f"cache broken: K/V of {self.length} committed tokens are not all finite")


class TransformersCache(RollbackCache):
    """A `transformers` DynamicCache that follows the same rules: it holds exactly length + pending rows.

    `past` grows by concatenation, so dropping rows crops it at once.
    """

    def __init__(self, past: Any, capacity: int, batch: int = 1) -> None:
        super().__init__(capacity, batch)
        self.past = past

    def reserve(self, count: int) -> None:
        """Mark the next `count` rows pending; rows pending before are cropped away."""
        self._crop(self.pending)
        self.pending = 0
        super().reserve(count)

    def commit(self, count: int) -> None:
        """Keep the first `count` pending rows and crop the rest."""
        dropped = self.pending - count
        super().commit(count)
        self._crop(dropped)

    def _crop(self, count: int) -> None:
        if count > 0:  # crop(0) empties the cache in some versions
            self.past.crop(-count)

    def check_integrity(self) -> None:
        """Raise where an invariant does not hold, in any layer."""
        super().check_integrity()
        held = [layer.get_seq_length() for layer in self.past.layers]
        if any(count != self.length + self.pending for count in held):
            raise DSpineError(f"cache broken: layers hold {held} rows, expected {self.length + self.pending}")
