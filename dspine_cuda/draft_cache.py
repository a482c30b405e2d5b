"""Context K/V of a drafter: one preallocated buffer a layer, room for one block behind the committed tokens."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from dspine.common.configs import DrafterConfig
from dspine.common.errors import DSpineError


class DraftCache:
    """Invariant: rows [0, length) of every layer are context K/V; rows from `length` on are scratch (the current block)."""

    def __init__(self, config: DrafterConfig, capacity: int, dtype: torch.dtype, device: torch.device, batch: int = 1) -> None:
        self.length, self.capacity, self.block = 0, capacity, config.block_size
        shape = (config.num_layers, 2, batch, config.num_kv_heads, capacity + config.block_size, config.head_dim)
        self._store = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._store.numel() * self._store.element_size()

    def part(self, first: int, count: int) -> DraftCache:
        """An empty cache over the memory of sequences [first, first + count) of this one."""
        found = copy(self)
        found._store, found.length = self._store.narrow(2, first, count), 0
        return found

    def write(self, layer: int, start: int, key: Tensor, value: Tensor) -> None:
        """Place rows [start, start + T) of one layer: key and value [B, kv_heads, T, hd]."""
        stop = start + key.shape[2]
        self._store[layer, 0, :, :, start:stop] = key
        self._store[layer, 1, :, :, start:stop] = value

    def write_all(self, start: int, rows: Tensor) -> None:
        """Place rows [start, start + T) of every layer: [L, 2, B, kv_heads, T, hd]."""
        self._store[..., start : start + rows.shape[-2], :] = rows

    def read(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Views of rows [0, stop)."""
        return self._store[layer, 0, :, :, :stop], self._store[layer, 1, :, :, :stop]

    def rows(self, stop: int) -> Tensor:
        """View of rows [0, stop) of every layer: [L, 2, B, kv_heads, stop, hd]."""
        return self._store[..., :stop, :]

    def advance(self, count: int) -> None:
        """`count` more rows have become context."""
        self.length += count
        self.check_integrity()

    def check_integrity(self) -> None:
        """Raise if the committed length is outside the buffer."""
        if not 0 <= self.length <= self.capacity:
            raise DSpineError(f"draft cache holds {self.length} tokens, its capacity is {self.capacity}")
