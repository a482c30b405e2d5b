"""A hybrid target's step over fixed shapes: Gated DeltaNet with deferred commits, attention, and experts that are hit.

`begin(u)` runs layer 0 up to its router and `finish(w)` the rest, as in `targets.hybrid`. Every Gated DeltaNet layer folds the
last round's factors into its state as it reads it (`gdn_round`), so a round has one commit launch for all layers (`gdn_keep`),
which copies what was accepted and no state.

A layer on CUDA (launches): projection, `gdn_round` (3) or `attention_inputs`, `block_attention` (2) and `sigmoid_mul`,
output projection, `add_rms_norm`, router's product, `pick_experts`, `routed_experts` (3, the shared expert, the residual and
the next layer's norm included): 11, or 12 with attention. Nearly all may start under the launch in front of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.experts import SharedExpert, pick_experts, routed_experts
from dspine.common.gating import sigmoid_mul
from dspine.common.gdn import MAX_TOKENS, GdnFactors
from dspine.common.gdn_rounds import GdnKept, GdnLayerWeights, gdn_keep, gdn_round
from dspine.common.norms import add_rms_norm
from dspine.common.stepping import table_rows
from dspine_cuda.static.arena import Arena
from dspine_cuda.static.dense import StaticOutput
from dspine_cuda.static.steps import Where, few_rows, gated, place_inputs, put
from dspine_cuda.targets.hybrid import HybridLayer, HybridTarget
from dspine_cuda.targets.mixers import AttentionMixer, GdnMixer
from dspine_cuda.targets.moe import Routed, SparseMlp


@dataclass(frozen=True)
class StaticStage:
    """Layer 0 at the router boundary, for u tokens a slot: tokens int [B, u], residual and normed rows [B, u, H], the router's
    results [B, u, ...] each (None without a router: nothing has run)."""

    tokens: Tensor
    residual: Tensor | None = None
    normed: Tensor | None = None
    routed: Routed | None = None

    @property
    def picks(self) -> Tensor | None:
        """Layer 0's experts, int [B, u, k]."""
        return None if self.routed is None else self.routed.picks


class StaticHybrid:
    """`begin`, `finish` and `commit` of a `HybridTarget` on an arena; nothing is read by the host."""

    def __init__(self, target: HybridTarget, arena: Arena) -> None:
        self.target, self.arena, self.cache, self.stores = target, arena, arena.cache, arena.kv.store.unbind(0)
        sparse = {layer.index: layer.mlp for layer in target.layers if isinstance(layer.mlp, SparseMlp)}
        self.experts = {index: stacks for index, mlp in sparse.items() if (stacks := expert_stacks(mlp)) is not None}
        self.shared = {
            i: sparse[i].shared_down.weight.contiguous() for i in self.experts if sparse[i].shared
        }  # no copy on CUDA
        self.stops_at_router = isinstance(target.layers[0].mlp, SparseMlp)
        self.between = {
            layer.index: GdnLayerWeights(layer.mixer.weights, layer.mixer.norm, layer.mixer.layout)
            for layer in target.layers
            if isinstance(layer.mixer, GdnMixer)
        }

    def begin(self, tokens: Tensor, live: Tensor) -> StaticStage:
        """Layer 0 of tokens int [B, u] up to its router; where layer 0 has no experts, nothing."""
        first = self.target.layers[0]
        if not isinstance(first.mlp, SparseMlp):
            return StaticStage(tokens)
        h, normed = self._mix(first, *self._enter(tokens), self._where(tokens.shape[1], live))
        shape = (*tokens.shape, -1)
        parts = Routed(*(x.view(shape) for x in vars(route(first.mlp, normed)).values()))
        return StaticStage(tokens, h.view(shape), normed.view(shape), parts)

    def finish(self, stage: StaticStage, w: int, live: Tensor) -> StaticOutput:
        """The first w tokens of each slot, of which live int32 [B] count; what `commit` needs stays behind."""
        normed, features = self.run(stage, self._where(w, live))
        # in the model's dtype: acceptance widens what it reads
        return StaticOutput(self.target.narrow_head(normed).view(self.arena.shape.batch, w, -1), features)

    def run(self, stage: StaticStage, where: Where) -> tuple[Tensor, Tensor | None]:
        """All layers over the first w tokens of each slot: their rows after the last norm [B w, H], and the features [B, w, F].

        Every sum with the residual runs with the norm behind it: a layer hands on its output, and that output normed for the
        next layer.
        """
        target, w = self.target, where.count
        captured: dict[int, Tensor] = {}
        x, normed = self._enter(stage.tokens[:, :w]) if stage.routed is None else (None, None)
        norms = [*(layer.input_norm for layer in target.layers[1:]), target.norm]
        for layer, following in zip(target.layers, norms, strict=True):
            if layer.index == 0 and stage.routed is not None:
                h, normed, routed = resumed(stage, w)
            else:
                h, normed = self._mix(layer, x, normed, where)  # type: ignore[arg-type]
                routed = route(layer.mlp, normed) if isinstance(layer.mlp, SparseMlp) else None
            x, normed = self._expand(layer, h, normed, routed, following)
            if layer.index in target.taps:
                captured[layer.index] = x
        shape = (where.batch, w, -1)
        features = torch.cat([captured[i] for i in target.taps], dim=-1).view(shape) if target.taps else None
        return normed, features  # type: ignore[return-value]

    def commit(self, m: Tensor) -> None:
        """m int32 [B] tokens of the last `finish` stay: windows move on now, states when they are read next."""
        arena = self.arena.whole  # all slots: the operation wants them side by side, and those behind these have m = 0
        windows, missing = arena.cache.windows, arena.shape.batch - m.shape[0]
        if arena.pending is None or arena.fresh is None:
            return
        counts, m = m, F.pad(m, (0, missing)) if missing else m
        moved, kept = gdn_keep(windows, arena.pending, arena.fresh, m)
        put((windows, moved), *zip(vars(arena.pending).values(), vars(kept).values(), strict=True))
        self.arena.pending_m.copy_(counts)

    def _where(self, count: int, live: Tensor) -> Where:
        arena = self.arena
        return Where(arena.lengths, live, arena.cos[:, 0], arena.sin[:, 0], count)

    def _enter(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embedded rows [N, H] of tokens int [B, w], and the same normed for layer 0."""
        rows = table_rows(self.target.embedding, tokens)
        return add_rms_norm(rows.view(-1, rows.shape[-1]), None, self.target.layers[0].input_norm)

    def _mix(self, layer: HybridLayer, x: Tensor, normed: Tensor, where: Where) -> tuple[Tensor, Tensor]:
        """x [N, H] and the same normed -> h = x + mixer [N, H], and h normed for the layer's MLP."""
        if isinstance(layer.mixer, AttentionMixer):
            mixed = attend(layer.mixer, normed, self.stores[self.cache.kv_index[layer.index]], where)
        else:
            mixed = self._gdn(layer, normed, where)
        return add_rms_norm(x, mixed, layer.mlp_norm)

    def _gdn(self, layer: HybridLayer, normed: Tensor, where: Where) -> Tensor:
        arena, cache, index, mixer = self.arena, self.cache, self.cache.gdn_index[layer.index], layer.mixer
        past, fresh = (GdnFactors(f.z[index], f.k[index], f.g[index]) for f in (arena.pending, arena.fresh.factors))  # type: ignore[union-attr]
        room = GdnKept(fresh, arena.fresh.inputs[index])  # type: ignore[union-attr]
        projected = few_rows(mixer.project, normed).view(where.batch, where.count, -1)
        rows, kept, state = gdn_round(
            projected, cache.windows[index], cache.states[index], past, arena.pending_m, room, self.between[layer.index],
            where.live,
        )  # fmt: skip
        new = kept.factors
        put((cache.states[index], state), (room.inputs, kept.inputs), (fresh.z, new.z), (fresh.k, new.k), (fresh.g, new.g))
        return few_rows(mixer.output, rows.view(normed.shape[0], -1))

    def _expand(
        self, layer: HybridLayer, h: Tensor, normed: Tensor, routed: Routed | None, following: Any
    ) -> tuple[Tensor, Tensor]:
        """h [N, H] and the same normed -> h + MLP [N, H], and that normed by `following`."""
        mlp = layer.mlp
        if not isinstance(mlp, SparseMlp) or routed is None:
            return add_rms_norm(h, few_rows(mlp.down, gated(mlp.gate_up, normed)), following)
        stacks = self.experts.get(layer.index)
        if stacks is None or normed.shape[0] > MAX_TOKENS:  # several slots: the eager form, which reads nothing on CUDA either
            weights = routed.weights.to(normed.dtype)
            return add_rms_norm(h, mlp.run(normed, Routed(routed.entry, routed.picks, weights)), following)
        shared = None
        if mlp.shared:
            amount, gate_up = routed.entry[:, mlp.experts : mlp.experts + 1], routed.entry[:, mlp.experts + 1 :]
            shared = SharedExpert(amount, gate_up, self.shared[layer.index])
        return routed_experts(normed, routed.picks, routed.weights, *stacks, shared, h, following)  # type: ignore[return-value]


def route(mlp: SparseMlp, normed: Tensor) -> Routed:
    """`SparseMlp.route` in two launches, weights float32."""
    entry = few_rows(mlp.entry, normed)
    return Routed(entry, *pick_experts(entry[:, : mlp.experts], mlp.top_k, mlp.normalised))


def resumed(stage: StaticStage, w: int) -> tuple[Tensor, Tensor, Routed]:
    """Layer 0's residual and normed rows [N, H] and router's results, of the first w tokens of each slot."""

    def cut(x: Tensor) -> Tensor:
        return x[:, :w].reshape(-1, x.shape[-1])

    routed = Routed(*(cut(x) for x in vars(stage.routed).values()))
    return cut(stage.residual), cut(stage.normed), routed  # type: ignore[arg-type]


def attend(mixer: AttentionMixer, normed: Tensor, store: Tensor, where: Where) -> Tensor:
    """Gated attention of normed [N, H] -> [N, H]; the block's K/V go into store [2, B, Hk, C, D]."""
    projected = few_rows(mixer.project, normed).view(where.batch, where.count, -1, mixer.size)
    query = place_inputs(projected, store, where, mixer.heads, mixer.norm)
    mixed = where.attend(query, store, mixer.size**-0.5)
    if mixer.gated:
        mixed = sigmoid_mul(mixed, projected[:, :, mixer.heads + 2 * mixer.kv_heads :])
    return few_rows(mixer.output, mixed.reshape(normed.shape[0], -1))


def expert_stacks(mlp: SparseMlp) -> tuple[Tensor, Tensor] | None:
    """gate_up [E, 2I, H] and down [E, H, I] as the operation takes them. The CPU keeps them packed for its own products: in
    float32 they are put together again (tests run there); None in bfloat16, where they cannot be."""
    if hasattr(mlp, "gate_up"):
        return mlp.gate_up, mlp.down
    if not mlp.exact:
        return None
    gate_up, down = torch.stack(list(mlp.ups)), torch.stack(list(mlp.downs))
    return gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()


def saved_stage(stage: StaticStage, rows: int) -> StaticStage:
    """Room for a stage of `rows` tokens, shaped like `stage`: a graph of one length writes it, a graph of another reads it."""

    def room(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.new_zeros((x.shape[0], rows, *x.shape[2:]))

    routed = None if stage.routed is None else Routed(*(room(x) for x in vars(stage.routed).values()))  # type: ignore[arg-type]
    return StaticStage(room(stage.tokens), room(stage.residual), room(stage.normed), routed)  # type: ignore[arg-type]


def save_stage(place: StaticStage, stage: StaticStage) -> None:
    """Copy the u rows of `stage` into the first u rows of `place`."""
    u = stage.tokens.shape[1]
    pairs = [(place.tokens, stage.tokens), (place.residual, stage.residual), (place.normed, stage.normed)]
    if place.routed is not None and stage.routed is not None:
        pairs += zip(vars(place.routed).values(), vars(stage.routed).values(), strict=True)
    for kept, new in pairs:
        if kept is not None and new is not None:
            kept[:, :u].copy_(new)
