"""Context K/V of a drafter: one preallocated buffer a layer, room for one block behind the committed tokens."""

from __future__ import annotations

import mlx.core as mx

from dspine.common.configs import DrafterConfig
from dspine.common.errors import DSpineError


class DraftCache:
    """Invariant: rows [0, length) of every layer are context K/V; rows from `length` on are scratch (the current block)."""

    def __init__(self, config: DrafterConfig, capacity: int, dtype: mx.Dtype, batch: int = 1) -> None:
        self.length, self.capacity, self.block = 0, capacity, config.block_size
        shape = (batch, config.num_kv_heads, capacity + config.block_size, config.head_dim)
        self._keys = [mx.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]
        self._values = [mx.zeros(shape, dtype=dtype) for _ in range(config.num_layers)]
        mx.eval(self._keys, self._values)  # now: only this thread could compute them later

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self._keys + self._values)

    def write(self, layer: int, start: int, key: mx.array, value: mx.array) -> None:
        """Place rows [start, start + T) of one layer: key and value [B, kv_heads, T, hd]."""
        stop = start + key.shape[2]
        self._keys[layer][:, :, start:stop] = key
        self._values[layer][:, :, start:stop] = value

    def read(self, layer: int, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Rows [start, stop)."""
        return self._keys[layer][:, :, start:stop], self._values[layer][:, :, start:stop]

    def advance(self, count: int) -> None:
        """`count` more rows have become context. Their computation starts now: only the thread that made an array may
        still compute it, and the next round may run on another one."""
        self.length += count
        self.check_integrity()
        mx.async_eval(self._keys, self._values)

    def check_integrity(self) -> None:
        """Raise if the committed length is outside the buffer."""
        if not 0 <= self.length <= self.capacity:
            raise DSpineError(f"draft cache holds {self.length} tokens, its capacity is {self.capacity}")
