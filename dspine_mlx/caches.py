"""Caches of a target: explicit objects, one set a sequence. K/V are rolled back by trimming, the states of linear-attention
layers by never having been changed: `commit` builds the accepted ones from compact factors."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from dspine.common.errors import DSpineError
from dspine_mlx.kv import LayerKV


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
        return sum(layer.nbytes for layer in self.layers)


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
        return sum(fixed) + sum(layer.nbytes for layer in self.layers)

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
