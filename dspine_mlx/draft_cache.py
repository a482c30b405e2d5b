"""Context K/V of a drafter: one buffer a layer that grows in steps, with room for one block behind the committed tokens.

A sliding-window layer keeps what its window reaches: older rows are dropped whenever its buffer would have to grow.
"""

from __future__ import annotations

import mlx.core as mx

from dspine.common.configs import DrafterConfig
from dspine.common.errors import DSpineError

STEP = 256  # rows that a buffer grows by


class DraftCache:
    """Invariant: of every layer the rows of tokens [dropped, length) are context K/V, from `length` on there is scratch (the
    current block); `dropped` is 0 but in sliding-window layers, where it leaves at least the window's reach.

    `capacity` is the most tokens it may hold; memory follows what it does hold.
    """

    def __init__(self, config: DrafterConfig, capacity: int, dtype: mx.Dtype, batch: int = 1) -> None:
        self.length, self.capacity, self.block = 0, capacity, max(config.block_size, config.query_rows)
        self._reach = [rule.reach for rule in config.mask_rules()]
        self._dropped = [0] * config.num_layers
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
        """Place the rows of tokens [start, start + T) of one layer: key and value [B, kv_heads, T, hd]."""
        stop = start + key.shape[2]
        if stop - self._dropped[layer] > self._keys[layer].shape[2]:
            self._grow(layer, start, stop)
        base = self._dropped[layer]
        for arrays, new in ((self._keys, key), (self._values, value)):
            arrays[layer][:, :, start - base : stop - base] = new

    def _grow(self, layer: int, start: int, stop: int) -> None:
        """Room for tokens up to `stop`, without those before `start` that no row sees any more."""
        most = self.capacity + self.block
        if stop > most:
            raise DSpineError(
                f"draft cache: row {stop - 1} asked for, its capacity is {self.capacity} and a block of {self.block}"
            )
        base, reach = self._dropped[layer], self._reach[layer]
        self._dropped[layer] = first = base if reach is None else max(base, start - reach)
        size = min(most - first, -(-(stop - first + self.block) // STEP) * STEP)
        for arrays in (self._keys, self._values):
            kept = arrays[layer][:, :, first - base : start - base]
            arrays[layer] = mx.concatenate([kept, self._zeros(size - kept.shape[2])], axis=2)

    def read(self, layer: int, start: int, stop: int) -> tuple[mx.array, mx.array]:
        """The rows of tokens [start, stop)."""
        base = self._dropped[layer]
        return self._keys[layer][:, :, start - base : stop - base], self._values[layer][:, :, start - base : stop - base]

    def reaches(self, length: int) -> bool:
        """Whether everything that is seen after `length` tokens is still there."""
        windows = zip(self._dropped, self._reach, strict=True)
        return length <= self.length and all(reach is None or base <= max(0, length - reach) for base, reach in windows)

    def advance(self, count: int) -> None:
        """`count` more rows have become context. Their computation starts now: only the thread that made an array may
        still compute it, and the next round may run on another one."""
        self.length += count
        self.check_integrity()
        mx.async_eval(self._keys, self._values)

    def export(self, length: int) -> dict[str, mx.array]:
        """The rows of the first `length` tokens by name, as parts of the buffers; the last ones only in sliding layers."""
        if not self.reaches(length):
            raise DSpineError(f"draft cache: {length} tokens asked for, it holds {self.length}, and older rows may be gone")
        named = {f"keys.{i}": array[:, :, : length - self._dropped[i]] for i, array in enumerate(self._keys)}
        return named | {f"values.{i}": array[:, :, : length - self._dropped[i]] for i, array in enumerate(self._values)}

    def restore(self, arrays: dict[str, mx.array], length: int, saved: int | None = None) -> None:
        """The first `length` tokens of what `export(saved)` gave (`saved` None: of exactly these); the cache must be empty."""
        saved = length if saved is None else saved
        if self.length or length > self.capacity:
            raise DSpineError(f"draft cache: {length} tokens for a cache of {self.capacity} that holds {self.length}")
        for layer, reach in enumerate(self._reach):
            keys, values = arrays[f"keys.{layer}"], arrays[f"values.{layer}"]
            self._dropped[layer] = base = saved - keys.shape[2]
            if base > (0 if reach is None else max(0, length - reach)):
                raise DSpineError(
                    f"draft cache: the rows before token {base} of layer {layer} are gone; {length} tokens need them"
                )
            self.write(layer, base, keys[:, :, : length - base], values[:, :, : length - base])
        self.advance(length)

    def adopt(self, other: DraftCache, length: int) -> None:
        """Take over the buffers of another cache of this drafter, cut to `length` tokens; the other is spent."""
        if not other.reaches(length):
            raise DSpineError(
                f"draft cache: {length} tokens asked for, the other holds {other.length}, and older rows may be gone"
            )
        self._keys, self._values, self._dropped, self.length = other._keys, other._values, other._dropped, length
        other._keys, other._values, other.length = [], [], 0
        self.check_integrity()

    def check_integrity(self) -> None:
        """Raise if the committed length is outside the buffer."""
        if not 0 <= self.length <= self.capacity:
            raise DSpineError(f"draft cache holds {self.length} tokens, its capacity is {self.capacity}")
