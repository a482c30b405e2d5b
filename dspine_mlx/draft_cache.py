"""Context K/V of a drafter: one buffer a layer that grows in steps, with room for one block behind the committed tokens."""

from __future__ import annotations

import mlx.core as mx

from dspine.common.configs import DrafterConfig
from dspine.common.errors import DSpineError

STEP = 256  # rows that a buffer grows by


class DraftCache:
    """Invariant: rows [0, length) of every layer are context K/V; rows from `length` on are scratch (the current block).

    `capacity` is the most tokens it may hold; memory follows what it does hold.
    """

    def __init__(self, config: DrafterConfig, capacity: int, dtype: mx.Dtype, batch: int = 1) -> None:
        self.length, self.capacity, self.block = 0, capacity, max(config.block_size, config.query_rows)
        self._shape, self._dtype = (batch, config.num_kv_heads, config.head_dim), dtype
        self._keys = [self._zeros(self.block) for _ in range(config.num_layers)]
        self._values = [self._zeros(self.block) for _ in range(config.num_layers)]
        mx.eval(self._keys, self._values)  # now: only this thread could compute them later

    def _zeros(self, rows: int) -> mx.array:
        batch, heads, size = self._shape
        return mx.zeros((batch, heads, rows, size), dtype=self._dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self._keys + self._values)

    def write(self, layer: int, start: int, key: mx.array, value: mx.array) -> None:
        """Place rows [start, start + T) of one layer: key and value [B, kv_heads, T, hd]."""
        stop = start + key.shape[2]
        for arrays, new in ((self._keys, key), (self._values, value)):
            if stop > arrays[layer].shape[2]:
                self._grow(arrays, layer, stop)
            arrays[layer][:, :, start:stop] = new

    def _grow(self, arrays: list[mx.array], layer: int, rows: int) -> None:
        most = self.capacity + self.block
        if rows > most:
            raise DSpineError(
                f"draft cache: row {rows - 1} asked for, its capacity is {self.capacity} and a block of {self.block}"
            )
        size = min(most, -(-(rows + self.block) // STEP) * STEP)
        arrays[layer] = mx.concatenate([arrays[layer], self._zeros(size - arrays[layer].shape[2])], axis=2)

    def read(self, layer: int, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """Rows [start, stop)."""
        return self._keys[layer][:, :, start:stop], self._values[layer][:, :, start:stop]

    def advance(self, count: int) -> None:
        """`count` more rows have become context. Their computation starts now: only the thread that made an array may
        still compute it, and the next round may run on another one."""
        self.length += count
        self.check_integrity()
        mx.async_eval(self._keys, self._values)

    def export(self, length: int) -> dict[str, mx.array]:
        """The first `length` rows by name, as parts of the buffers."""
        if length > self.length:
            raise DSpineError(f"draft cache: {length} tokens asked for, it holds {self.length}")
        named = {f"keys.{i}": array for i, array in enumerate(self._keys)}
        named |= {f"values.{i}": array for i, array in enumerate(self._values)}
        return {name: array[:, :, :length] for name, array in named.items()}

    def restore(self, arrays: dict[str, mx.array], length: int) -> None:
        """Take the first `length` rows of what `export` gave; the cache must be empty."""
        if self.length or length > self.capacity:
            raise DSpineError(f"draft cache: {length} tokens for a cache of {self.capacity} that holds {self.length}")
        for layer in range(len(self._keys)):
            self.write(layer, 0, arrays[f"keys.{layer}"][:, :, :length], arrays[f"values.{layer}"][:, :, :length])
        self.advance(length)

    def adopt(self, other: DraftCache, length: int) -> None:
        """Take over the buffers of another cache of this drafter, cut to `length` tokens; the other is spent."""
        if length > other.length:
            raise DSpineError(f"draft cache: {length} tokens asked for, the other holds {other.length}")
        self._keys, self._values, self.length = other._keys, other._values, length
        other._keys, other._values, other.length = [], [], 0
        self.check_integrity()

    def check_integrity(self) -> None:
        """Raise if the committed length is outside the buffer."""
        if not 0 <= self.length <= self.capacity:
            raise DSpineError(f"draft cache holds {self.length} tokens, its capacity is {self.capacity}")
