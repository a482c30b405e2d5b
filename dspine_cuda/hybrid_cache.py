"""What a hybrid target keeps of one batch of sequences: K/V of its attention layers, a state and a convolution window of its
Gated DeltaNet layers, each found by the id of its layer.

Rollback holds no copy of a state: a block leaves the states as they are, and `commit` rebuilds the accepted ones from the
block's compact factors, for all layers in one call.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine.common.gdn import GdnFactors, gdn_commit
from dspine_cuda.caches import KVCache, RollbackCache
from dspine_cuda.targets.hybrid_config import HybridConfig


@dataclass(frozen=True)
class BlockFactors:
    """Of a block of w tokens, stacked over the GDN layers: compact factors ([Lg, B, w, ...]) and the inputs of the
    convolution [Lg, B, w, C]."""

    gdn: GdnFactors
    inputs: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(x.numel() * x.element_size() for x in (self.gdn.z, self.gdn.k, self.gdn.g, self.inputs))


class HybridCache(RollbackCache):
    """Invariants beside those of `RollbackCache`: `states` float32 [Lg, B, Hv, Dv, Dk] and `windows` [Lg, B, width-1, C] are
    those after the committed tokens, whatever is pending; `kv` holds the same lengths."""

    def __init__(self, config: HybridConfig, capacity: int, dtype: torch.dtype, device: torch.device, batch: int = 1) -> None:
        super().__init__(capacity, batch)
        self.kv_index = {layer: i for i, layer in enumerate(config.attention_layers)}
        self.gdn_index = {layer: i for i, layer in enumerate(config.gdn_layers)}
        self.kv = KVCache(len(self.kv_index), config.num_kv_heads, capacity, config.head_dim, dtype, device, batch)
        layout, count = config.gdn, len(self.gdn_index)
        shapes = [(count, batch, 0, 0, 0), (count, batch, 0, 0)]
        if layout is not None:
            shapes = [
                (count, batch, layout.value_heads, layout.value_dim, layout.key_dim),
                (count, batch, config.conv_width - 1, layout.channels),
            ]
        self.states = torch.zeros(shapes[0], dtype=torch.float32, device=device)
        self.windows = torch.zeros(shapes[1], dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.kv.nbytes + sum(x.numel() * x.element_size() for x in (self.states, self.windows))

    def part(self, first: int, count: int) -> HybridCache:
        """A cache over the memory of sequences [first, first + count) of this one, at length 0; states are left as they are."""
        found = copy(self)
        found.kv, found.batch, found.length, found.pending = self.kv.part(first, count), count, 0, 0
        found.states, found.windows = self.states.narrow(1, first, count), self.windows.narrow(1, first, count)
        return found

    def reserve(self, count: int) -> None:
        """Mark the next `count` rows pending (dropping what was pending before)."""
        super().reserve(count)
        self.kv.reserve(count)

    def commit(self, count: int, factors: BlockFactors | None = None) -> None:
        """Keep the first `count` pending tokens. `factors` of the pending block bring states and windows up to them; None:
        they are there already (prefill), or the model has no GDN layers."""
        if factors is not None and factors.inputs.shape[2] != self.pending:
            raise DSpineError(
                f"commit with the factors of {factors.inputs.shape[2]} tokens, but {self.pending} are pending: "
                "commit the newest block"
            )
        super().commit(count)
        self.kv.commit(count)
        if factors is not None:
            if not self.states.is_contiguous():  # a part of a stack of several sequences: this one goes on alone
                self.states, self.windows = self.states.contiguous(), self.windows.contiguous()
            m = torch.full((self.batch,), count, dtype=torch.int32, device=self.states.device)
            self.states, self.windows = gdn_commit(self.states, factors.gdn, self.windows, factors.inputs, m)

    def check_integrity(self) -> None:
        """Raise where an invariant does not hold (a synchronisation: for tests)."""
        super().check_integrity()
        self.kv.check_integrity()
        if (self.kv.length, self.kv.pending) != (self.length, self.pending):
            raise DSpineError(
                f"cache broken: K/V at {self.kv.length}+{self.kv.pending}, states at {self.length}+{self.pending}"
            )
        for name, x in (("states", self.states), ("windows", self.windows)):
            if not bool(torch.isfinite(x).all()):
                raise DSpineError(f"cache broken: {name} after {self.length} committed tokens are not all finite")
