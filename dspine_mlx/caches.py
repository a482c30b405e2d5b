"""Caches of a target: explicit objects, one set a sequence. K/V are rolled back by trimming, the states of linear-attention
layers by never having been changed: `commit` builds the accepted ones from compact factors."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dspine.common.errors import DSpineError
from dspine_mlx.kv import LayerKV, export_layer, reaches, restore_layer


@dataclass
class TargetCache:
    """K/V of every target layer. `length` counts committed tokens; `pending` verified tokens that wait for `commit`."""

    layers: list[LayerKV]
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

    @property
    def nbytes(self) -> int:
        """Bytes held between rounds."""
        return sum(layer.nbytes for layer in self.layers if not layer.empty())

    def reaches(self, length: int) -> bool:
        """Whether the state after `length` tokens is still there."""
        return not self.pending and length <= self.length and all(reaches(layer, length) for layer in self.layers)

    def export(self, length: int) -> tuple[dict[str, mx.array], dict[str, int]]:
        """(everything that the first `length` tokens left, by name; numbers that belong to it). Arrays are parts of buffers."""
        if not self.reaches(length):
            raise DSpineError(f"target cache: the state after {length} tokens is gone; it holds {self.length}")
        arrays, facts = {}, {}
        for i, layer in enumerate(self.layers):
            rows, numbers = export_layer(layer, length)
            arrays |= {f"kv.{i}.{name}": array for name, array in rows.items()}
            facts |= {f"kv.{i}.{name}": number for name, number in numbers.items()}
        return arrays, facts

    def restore(self, arrays: dict[str, mx.array], facts: dict[str, int], length: int) -> None:
        """Put what `export` gave into an empty cache: the state after `length` tokens."""
        if self.length or self.pending or length > self.capacity:
            raise DSpineError(f"target cache: {length} tokens for a cache of {self.capacity} that holds {self.length}")
        for i, layer in enumerate(self.layers):
            start = f"kv.{i}."
            rows = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
            restore_layer(layer, rows, {n.removeprefix(start): v for n, v in facts.items() if n.startswith(start)}, length)
        self.length = length

    def adopt(self, other: TargetCache, length: int) -> None:
        """Take over another cache of this target, cut to `length` tokens; the other is spent."""
        if not other.reaches(length):
            raise DSpineError(f"target cache: the state after {length} tokens is gone; it holds {other.length}")
        for layer in other.layers:
            layer.trim(other.length - length)
        self.layers, self.length, other.layers, other.length = other.layers, length, [], 0


@dataclass
class HybridCache(TargetCache):
    """K/V of the attention layers and the states of all Gated-DeltaNet layers, each found by its layer id.

    `layers[i]` belongs to decoder layer `attention_ids[i]`; row i of states [Lg, B, Hv, Dv, Dk] float32 and windows
    [Lg, B, width-1, C] to `gdn_ids[i]`. Both are None until the first tokens tell the batch. Invariants: states and
    windows are those after `length` tokens, whatever is pending; every K/V offset is `length` + `pending`.
    `begun` counts calls of `begin`.
    """

    attention_ids: tuple[int, ...] = ()
    gdn_ids: tuple[int, ...] = ()
    states: mx.array | None = None
    windows: mx.array | None = None
    begun: int = 0

    def kv(self, layer_id: int) -> LayerKV:
        """K/V of a decoder layer that has attention."""
        return self.layers[self.attention_ids.index(layer_id)]

    def state_of(self, layer_id: int) -> tuple[mx.array, mx.array]:
        """(window [B, width-1, C], state [B, Hv, Dv, Dk]) of a decoder layer that has linear attention."""
        if self.states is None or self.windows is None:
            raise DSpineError("hybrid cache: it has no states yet; expected a call of prefill or begin first")
        row = self.gdn_ids.index(layer_id)
        return self.windows[row], self.states[row]

    @property
    def nbytes(self) -> int:
        """Bytes held between rounds: nothing in it grows with the verified length."""
        fixed = [array.nbytes for array in (self.states, self.windows) if array is not None]
        return sum(fixed) + super().nbytes

    def reaches(self, length: int) -> bool:
        """Only the newest state is there: linear attention cannot go back."""
        return super().reaches(length) and (length == self.length or not self.gdn_ids)

    def export(self, length: int) -> tuple[dict[str, mx.array], dict[str, int]]:
        """K/V, and the states and windows of all linear layers."""
        arrays, facts = super().export(length)
        held = {"states": self.states, "windows": self.windows}
        return arrays | {name: array for name, array in held.items() if array is not None}, facts

    def restore(self, arrays: dict[str, mx.array], facts: dict[str, int], length: int) -> None:
        """Put what `export` gave into an empty cache."""
        super().restore(arrays, facts, length)
        self.states, self.windows = arrays.get("states"), arrays.get("windows")

    def adopt(self, other: TargetCache, length: int) -> None:
        """Take over another cache, which must hold exactly `length` tokens."""
        super().adopt(other, length)
        assert isinstance(other, HybridCache)
        self.states, self.windows, other.states, other.windows = other.states, other.windows, None, None

    def check_integrity(self) -> None:
        """Raise where the layers disagree about what they hold."""
        offsets = {layer.offset for layer in self.layers} - {self.length + self.pending}
        if offsets or not 0 <= self.length <= self.capacity:
            raise DSpineError(
                f"hybrid cache: {self.length} + {self.pending} tokens of {self.capacity}, but attention layers hold {offsets}"
            )
        for name, array in (("states", self.states), ("windows", self.windows)):
            if array is not None and array.shape[0] != len(self.gdn_ids):
                raise DSpineError(f"hybrid cache: {name} of {array.shape[0]} layers, expected {len(self.gdn_ids)}")
