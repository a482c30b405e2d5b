"""K/V of one attention layer that can be rolled back exactly: whole (mlx-lm's own), quantised (mlx-lm's own), or windowed.

mlx-lm's rotating cache overwrites the oldest row in place, so rows that a rejected draft pushed out are gone.
`WindowKV` keeps the rows in order with room behind them and drops old ones only when room is needed, before a block
is written; a rollback then is a shorter count. What a token sees is what it sees in mlx-lm's cache when it comes alone.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from dspine.common.errors import DSpineError
from dspine.common.memory import CacheOptions

KEEP = 4  # first tokens that a cache of limited size never drops, as mlx_lm keeps them
SLACK = 256  # rows of room behind a window: old rows are moved once in so many tokens


class WindowKV:
    """K/V of the first `keep` tokens and the newest, `max_size` in all for each token that looks; it sees itself and the
    `max_size - keep - 1` tokens before it.

    Rows [0, stored) of the buffers [B, heads, rows, hd] are in the order of the text: row r holds token r below `keep`, and
    token r + `dropped` from there on. Invariant: stored = offset - dropped; `offset` counts the tokens written.
    """

    def __init__(self, max_size: int, keep: int = 0, slack: int | None = None) -> None:
        if not 0 <= keep < max_size:
            raise DSpineError(f"a window of {max_size} tokens cannot keep {keep}: expected 0..{max_size - 1}")
        self.max_size, self.keep, self.slack = max_size, keep, SLACK if slack is None else slack
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = self.dropped = 0

    @property
    def stored(self) -> int:
        """Rows in use."""
        return self.offset - self.dropped

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes

    def empty(self) -> bool:
        """Whether nothing was ever written."""
        return self.keys is None

    def size(self) -> int:
        """Tokens that the next one can see."""
        return min(self.offset, self.max_size)

    def _after(self, count: int) -> tuple[int, int]:
        """(rows dropped in all, rows left of those stored) once `count` more tokens have been given room."""
        room = 0 if self.keys is None else self.keys.shape[2]
        left = self.stored if self.stored + count <= room else min(self.stored, self.max_size - 1)
        return self.dropped + self.stored - left, left

    def make_mask(self, count: int, window_size: int | None = None, return_array: bool = False) -> Any:
        """What `count` tokens that are written next may see: None, "causal", or bool [count, rows]."""
        if window_size is not None and window_size != self.max_size:
            raise DSpineError(f"a window of {self.max_size} tokens was made, the model asks for one of {window_size}")
        dropped, left = self._after(count)
        if self.offset + count <= self.max_size and not return_array:
            return None if count == 1 else "causal"
        rows = mx.arange(left + count)
        token = mx.where(rows < self.keep, rows, rows + dropped)
        query = mx.arange(self.offset, self.offset + count)[:, None]
        near = token > query - (self.max_size - self.keep)
        return (token <= query) & (near | (rows < self.keep)) if self.keep else (token <= query) & near

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [B, heads, T, hd] behind what is there; returns all rows, which `make_mask` (asked before) speaks of."""
        count, stored = keys.shape[2], self.stored
        dropped, left = self._after(count)
        self.keys = self._written(self.keys, keys, stored, left)
        self.values = self._written(self.values, values, stored, left)
        self.offset, self.dropped = self.offset + count, dropped
        return self.keys[:, :, : left + count], self.values[:, :, : left + count]

    def _written(self, buffer: mx.array | None, new: mx.array, stored: int, left: int) -> mx.array:
        """`new` behind the `left` rows that stay of `stored`: in place where there is room, else in a new buffer."""
        count = new.shape[2]
        if buffer is None or stored + count > buffer.shape[2]:
            room = mx.zeros((*new.shape[:2], count + self.slack, new.shape[3]), dtype=new.dtype)
            first = min(self.keep, left)
            old = [] if buffer is None else [buffer[:, :, :first], buffer[:, :, stored - left + first : stored]]
            buffer = mx.concatenate([*old, room], axis=2)
        buffer[:, :, left : left + count] = new
        return buffer

    def is_trimmable(self) -> bool:
        """Whether the newest block can be taken back: always; `trim` refuses what lies further back."""
        return True

    def trim(self, count: int) -> int:
        """Take back the newest `count` tokens. DSpineError where rows that are then in view have been dropped."""
        count = min(count, self.offset)
        if self.dropped and self.offset - count < self.dropped + self.max_size - 1:
            raise DSpineError(
                f"a window of {self.max_size} tokens cannot go back {count} from {self.offset}: its oldest rows are gone"
            )
        self.offset -= count
        return count

    def reaches(self, length: int) -> bool:
        """Whether `trim` can go back to `length` tokens."""
        return length <= self.offset and (not self.dropped or length >= self.dropped + self.max_size - 1)

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        """The buffers."""
        return self.keys, self.values


LayerKV = KVCache | QuantizedKVCache | WindowKV


def layer_kv(model_cache: Any, options: CacheOptions) -> LayerKV:
    """The cache of one layer, given the one that mlx-lm makes for it. DSpineError for kinds that cannot be rolled back."""
    kind = type(model_cache).__name__
    if isinstance(model_cache, RotatingKVCache):
        if options.kv_bits is not None:
            raise DSpineError("kv_bits: this model has sliding-window layers, whose K/V are not quantised; drop kv_bits")
        return WindowKV(model_cache.max_size, model_cache.keep)
    if not isinstance(model_cache, KVCache):
        raise DSpineError(f"K/V of kind {kind} cannot be rolled back")
    if options.kv_bits is not None:
        return QuantizedKVCache(group_size=options.kv_group_size, bits=options.kv_bits)
    if options.max_kv_size is not None:
        return WindowKV(options.max_kv_size, KEEP)
    return KVCache()


def reaches(layer: LayerKV, length: int) -> bool:
    """Whether a cache can be cut back to `length` tokens without loss."""
    return layer.reaches(length) if isinstance(layer, WindowKV) else length <= layer.offset


def export_layer(layer: LayerKV, length: int) -> tuple[dict[str, mx.array], dict[str, int]]:
    """(the rows of the first `length` tokens by name, as parts of the buffers; numbers that belong to them)."""
    if not reaches(layer, length):
        raise DSpineError(f"K/V: {length} tokens asked for, {layer.offset} are held, and older rows may be gone")
    if layer.keys is None:
        return {}, {}
    if isinstance(layer, QuantizedKVCache):
        named = {f"keys.{i}": part for i, part in enumerate(layer.keys)}
        named |= {f"values.{i}": part for i, part in enumerate(layer.values)}
        return {name: part[:, :, :length] for name, part in named.items()}, {}
    dropped = layer.dropped if isinstance(layer, WindowKV) else 0
    rows = {"keys": layer.keys[:, :, : length - dropped], "values": layer.values[:, :, : length - dropped]}
    return rows, {"dropped": dropped} if isinstance(layer, WindowKV) else {}


def restore_layer(layer: LayerKV, arrays: dict[str, mx.array], facts: dict[str, int], length: int) -> None:
    """Put what `export_layer` gave into an empty layer of the same kind."""
    if layer.offset:
        raise DSpineError(f"K/V: an empty layer expected, this one holds {layer.offset} tokens")
    if not arrays:
        return
    dropped = facts.get("dropped", 0)
    if isinstance(layer, QuantizedKVCache):
        parts = [[arrays[f"{side}.{i}"][:, :, :length] for i in range(3)] for side in ("keys", "values")]
        layer.keys, layer.values = tuple(parts[0]), tuple(parts[1])
    else:
        layer.keys, layer.values = (arrays[side][:, :, : length - dropped] for side in ("keys", "values"))
    if isinstance(layer, WindowKV):
        layer.dropped = dropped
    layer.offset = length
