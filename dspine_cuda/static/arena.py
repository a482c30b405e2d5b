"""The arena: everything that a round reads or writes, allocated once, at addresses that never change.

The K/V, states and windows are those of the eager caches (`caches`, `hybrid_cache`, `draft_cache`), so prefill is the eager
one, and a request may go on eagerly after graphs. What the host counts there as Python ints stands here as device integers.

Letters: B slots, W rows of the longest block, C rows of a K/V store, Lg Gated DeltaNet layers. The last row of every K/V store
is scrap: rows at or beyond a slot's live count are written there, and no length ever reaches it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine.common.gdn import MAX_TOKENS, GdnFactors, gdn_commit
from dspine.common.gdn_rounds import GdnKept
from dspine.common.settling import REPORT_HEAD, Counters
from dspine_cuda.caches import KEY_TILE, KVCache
from dspine_cuda.draft_cache import DraftCache
from dspine_cuda.hybrid_cache import HybridCache

GIB = 2**30
STOP_IDS = 16  # stop tokens that the device compares with
UNIFORM_LANES = 3


@dataclass(frozen=True)
class ArenaShape:
    """tokens: committed tokens a slot holds at most; rows: of the longest block (1 without a drafter)."""

    tokens: int
    batch: int
    rows: int

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.batch < 1 or not 1 <= self.rows <= MAX_TOKENS:
            raise DSpineError(
                f"an arena needs at least 1 token and 1 slot, and blocks of 1 to {MAX_TOKENS} rows, got {self.tokens}, "
                f"{self.batch} and {self.rows}"
            )

    @property
    def capacity(self) -> int:
        """Rows of K/V that may be addressed, the scrap row included: a block may stand behind the last committed token."""
        return self.tokens + self.rows + 1

    @property
    def store(self) -> int:
        """C of the target's store."""
        return -(-self.capacity // KEY_TILE) * KEY_TILE


def arena_bytes(target: Any, drafter: Any | None, shape: ArenaShape) -> dict[str, int]:
    """Bytes of every part of an arena, before anything is allocated.

    kv: layers x 2 x B x Hk x C x D; states 4 Lg B Hv Dv Dk; factors: z and g in float32 and k in the model's dtype, twice (of
    the last round and of this one), the inputs once, W rows each; round: uniforms, and logits 4 B W V and features B W F, which
    lie in the graphs' pool.
    """
    config, size, batch, rows = target.config, target.dtype.itemsize, shape.batch, shape.rows
    layout = getattr(config, "gdn", None)
    attention = len(config.attention_layers) if hasattr(config, "attention_layers") else config.num_layers
    parts = {"kv": attention * 2 * batch * config.num_kv_heads * shape.store * config.head_dim * size}
    if layout is not None:
        count, channels = len(config.gdn_layers), layout.channels
        values, keys = layout.value_heads * layout.value_dim, layout.key_heads * layout.key_dim
        parts["states"] = 4 * count * batch * values * layout.key_dim
        parts["windows"] = count * batch * (config.conv_width - 1) * channels * size
        factors = 4 * values + 4 * layout.value_heads + keys * size
        parts["factors"] = count * batch * rows * (2 * factors + channels * size)
    if drafter is not None:
        own = drafter.config
        depth = shape.capacity + own.block_size
        parts["drafter"] = own.num_layers * 2 * batch * own.num_kv_heads * depth * own.head_dim * size
    width = len(target.taps) * config.hidden_size
    parts["round"] = batch * rows * (4 * config.vocab_size + width * size) + 4 * batch * (shape.tokens + rows) * UNIFORM_LANES
    return parts


def check_room(parts: dict[str, int], device: torch.device, free: int | None = None) -> None:
    """DSpineError where the arena does not fit the device's free memory (read here on CUDA; `free` for tests)."""
    if free is None:
        if device.type != "cuda":
            return
        free = torch.cuda.mem_get_info(device)[0]
    asked = sum(parts.values())
    if asked > free:
        detail = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
        raise DSpineError(
            f"graphs: the arena asks for {asked / GIB:.2f} GiB ({detail}) and {free / GIB:.2f} GiB are free on {device}; "
            "ask for fewer tokens, a smaller batch, or decode with graphs off"
        )


class Arena:
    """Device state of B sequences.

    Invariants, in the order of a round: `lengths` int32 [B] committed tokens; `anchor` int32 [B] the newest emitted token, not
    yet processed; `remaining` int32 [B] tokens that may still be emitted, 0: the slot does nothing; `generated` int32 [B]
    tokens emitted. Hybrids: `states` are those BEFORE the last round, `pending` its factors and `pending_m` int32 [B] how many
    of them count; windows are up to date. `fresh` is what the running round leaves until its commit: never `pending` itself,
    which other programs may still read.
    """

    is_shared = False  # whether a slot may be idle while others run, and its caches be written by someone else

    def __init__(self, target: Any, drafter: Any | None, shape: ArenaShape) -> None:
        self.shape, self.device, self.dtype = shape, target.device, target.dtype
        self.parts = arena_bytes(target, drafter, shape)
        check_room(self.parts, self.device)
        config, batch, rows = target.config, shape.batch, shape.rows
        target.rotary.grow(shape.store)
        self.cos, self.sin = target.rotary.cos, target.rotary.sin  # kept: a longer context elsewhere makes new tables
        self.cache = target.make_cache(shape.capacity, batch)
        self.kv: KVCache = getattr(self.cache, "kv", self.cache)
        self._states = (self.cache.states, self.cache.windows) if isinstance(self.cache, HybridCache) else None
        self.draft_cache: DraftCache | None = None
        if drafter is not None:
            self.draft_cache = DraftCache(drafter.config, shape.capacity, self.dtype, self.device, batch)
        self.lengths, self.anchor, self.remaining, self.generated, self.pending_m = (self._ints(batch) for _ in range(5))
        self.counters = Counters(self.lengths, self.anchor, self.remaining, self.generated)
        self.nominal, self.upper, self.chosen = (self._ints(batch) for _ in range(3))
        self.stops = torch.full((STOP_IDS,), -1, dtype=torch.int32, device=self.device)
        self.uniforms = torch.zeros((batch, shape.tokens + rows, UNIFORM_LANES), device=self.device)
        self.block = self._ints(batch, rows)
        self.finite = torch.ones(batch, dtype=torch.bool, device=self.device)
        self.survival = torch.zeros((batch, max(rows - 1, 1)), device=self.device)
        self.report = self._ints(batch, REPORT_HEAD + 2 * rows)
        self.pending: GdnFactors | None = None
        self.fresh: GdnKept | None = None
        if isinstance(self.cache, HybridCache) and self.cache.gdn_index:
            count = len(self.cache.gdn_index)
            self.pending = self._factors(config.gdn, count)
            inputs = torch.zeros((count, batch, rows, config.gdn.channels), dtype=self.dtype, device=self.device)
            self.fresh = GdnKept(self._factors(config.gdn, count), inputs)

    @property
    def whole(self) -> Arena:
        """All slots; of a part of an arena (`slots.SlotView`) what it is a part of."""
        return self

    def _factors(self, layout: Any, count: int) -> GdnFactors:
        """Zeros for the factors of `count` layers, W rows each."""
        lead = (count, self.shape.batch, self.shape.rows)
        return GdnFactors(
            torch.zeros((*lead, layout.value_heads, layout.value_dim), device=self.device),
            torch.zeros((*lead, layout.key_heads, layout.key_dim), dtype=self.dtype, device=self.device),
            torch.zeros((*lead, layout.value_heads), device=self.device),
        )

    def _ints(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def start(
        self, lengths: list[int], anchors: list[int], remaining: list[int], stop_ids: frozenset[int], uniforms: Any | None
    ) -> None:
        """Begin decoding behind prefilled caches: per slot the committed tokens, the anchor and the budget. uniforms float32
        [B, n, 3] of output positions 0..n-1, the anchor being position 0 (None: greedy)."""
        for length, budget in zip(lengths, remaining, strict=True):
            if length + budget > self.shape.tokens:
                raise DSpineError(
                    f"context overflow: {length} tokens and {budget} to come, but the arena holds {self.shape.tokens} a slot; "
                    "make a larger arena"
                )
        if len(lengths) != self.shape.batch:
            raise DSpineError(f"{len(lengths)} sequences for an arena of {self.shape.batch} slots: start as many as it has")
        if len(stop_ids) > STOP_IDS:
            raise DSpineError(f"at most {STOP_IDS} stop tokens fit, got {len(stop_ids)}")
        for place, values in ((self.lengths, lengths), (self.anchor, anchors), (self.remaining, remaining)):
            place.copy_(torch.tensor(values, dtype=torch.int32))
        self.generated.fill_(1)
        self.pending_m.zero_()
        ids = sorted(stop_ids) + [-1] * (STOP_IDS - len(stop_ids))
        self.stops.copy_(torch.tensor(ids, dtype=torch.int32))
        if uniforms is not None:
            self.uniforms[:, : uniforms.shape[1]].copy_(torch.as_tensor(uniforms))

    def rewind(self) -> None:
        """Empty caches for the next request: nothing of the last one can be reached."""
        for cache in (self.cache, self.kv):
            cache.length = cache.pending = 0
        if self.draft_cache is not None:
            self.draft_cache.length = 0
        if isinstance(self.cache, HybridCache):
            self.cache.states, self.cache.windows = self._states  # type: ignore[misc]  # an eager commit may have replaced them
            self.cache.states.zero_()
            self.cache.windows.zero_()
        for place in (self.lengths, self.remaining, self.pending_m):
            place.zero_()

    def hand_back(self, length: int) -> None:
        """Make the eager caches stand at `length` committed tokens, the device's own count: pending factors are folded in."""
        if self.pending is not None:
            cache = self.cache
            inputs = cache.windows.new_zeros((*cache.windows.shape[:2], self.shape.rows, cache.windows.shape[3]))
            states, _ = gdn_commit(cache.states, self.pending, cache.windows.clone(), inputs, self.pending_m)
            if states.data_ptr() != cache.states.data_ptr():
                cache.states.copy_(states)
            self.pending_m.zero_()
        for cache in (self.cache, self.kv):
            cache.length, cache.pending = length, 0
        if self.draft_cache is not None:
            self.draft_cache.length = length
