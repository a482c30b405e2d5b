"""A hybrid target's step over fixed shapes: Gated DeltaNet with deferred commits, attention, and experts that are hit.

`begin(u)` runs layer 0 up to its router and `finish(w)` the rest, as in `targets.hybrid`. Every Gated DeltaNet layer folds the
last round's factors into its state as it reads it (`gdn_verify_deferred`), so a round has no commit launch of its own; the new
factors replace the old ones after the layer has read them, because a kernel may still read g of another head while one writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.attention import block_attention
from dspine.common.experts import routed_experts
from dspine.common.gdn import MAX_TOKENS, GdnFactors, gdn_inputs, gdn_verify_deferred
from dspine_cuda.static.arena import Arena
from dspine_cuda.static.dense import StaticOutput
from dspine_cuda.static.steps import Place, append, place_rows
from dspine_cuda.targets.hybrid import HybridLayer, HybridTarget
from dspine_cuda.targets.layers import rotate_
from dspine_cuda.targets.mixers import AttentionMixer, GdnMixer
from dspine_cuda.targets.moe import Routed, SparseMlp


@dataclass(frozen=True)
class StaticStage:
    """Layer 0 at the router boundary, for u tokens a slot: tokens int [B, u], residual and normed rows [B, u, H], the router's
    results [B, u, ...] each (None without a router: nothing has run), and the convolution's inputs [B, u, C] (None where layer
    0 is attention)."""

    tokens: Tensor
    residual: Tensor | None = None
    normed: Tensor | None = None
    routed: Routed | None = None
    inputs: Tensor | None = None

    @property
    def picks(self) -> Tensor | None:
        """Layer 0's experts, int [B, u, k]."""
        return None if self.routed is None else self.routed.picks


class StaticHybrid:
    """`begin`, `finish` and `commit` of a `HybridTarget` on an arena; nothing is read by the host."""

    def __init__(self, target: HybridTarget, arena: Arena) -> None:
        self.target, self.arena, self.cache = target, arena, arena.cache
        self.experts = {layer.index: expert_stacks(layer.mlp) for layer in target.layers if isinstance(layer.mlp, SparseMlp)}
        self.stops_at_router = isinstance(target.layers[0].mlp, SparseMlp)
        self._inputs: list[Tensor] = []
        self._fresh: list[tuple[Tensor, Tensor]] = []  # (where factors go, new factors) of layers that have run

    def begin(self, tokens: Tensor, live: Tensor) -> StaticStage:
        """Layer 0 of tokens int [B, u] up to its router; where layer 0 has no experts, nothing."""
        first = self.target.layers[0]
        if not isinstance(first.mlp, SparseMlp):
            return StaticStage(tokens)
        place = self._place(tokens.shape[1], live)
        h, inputs = self._mix(first, self._rows(tokens), place)
        normed = first.mlp_norm(h)
        routed = first.mlp.route(normed)
        shape = (*tokens.shape, -1)
        self._keep_factors()
        parts = Routed(*(x.view(shape) for x in (routed.entry, routed.picks, routed.weights)))
        return StaticStage(tokens, h.view(shape), normed.view(shape), parts, inputs)

    def finish(self, stage: StaticStage, w: int, live: Tensor) -> StaticOutput:
        """The first w tokens of each slot, of which live int32 [B] count; what `commit` needs stays behind."""
        target = self.target
        place = self._place(w, live)
        inputs: list[Tensor] = []
        captured: dict[int, Tensor] = {}
        x = self._rows(stage.tokens[:, :w]) if stage.routed is None else None
        for layer in target.layers:
            if layer.index == 0 and stage.routed is not None:
                x = self._resume(layer, stage, w)
                left = None if stage.inputs is None else stage.inputs[:, :w]
            else:
                h, left = self._mix(layer, x, place)  # type: ignore[arg-type]
                x = self._expand(layer, h)
            if left is not None:
                inputs.append(left)
            if layer.index in target.taps:
                captured[layer.index] = x
        self._keep_factors()
        self._inputs = inputs
        shape = (place.batch, w, -1)
        features = torch.cat([captured[i] for i in target.taps], dim=-1).view(shape) if target.taps else None
        return StaticOutput(target.head(target.norm(x)).view(shape), features)

    def commit(self, m: Tensor) -> None:
        """m int32 [B] tokens of the last `finish` stay: windows move on now, states when they are read next."""
        if not self._inputs:
            return
        windows = self.cache.windows
        joined = torch.cat((windows, torch.stack(self._inputs)), dim=2)
        rows = m.to(torch.int64)[:, None] + torch.arange(windows.shape[2], device=m.device)
        windows.copy_(joined.gather(2, rows[None, :, :, None].expand(windows.shape)))
        self.arena.pending_m.copy_(m)

    def _keep_factors(self) -> None:
        """New factors of [B, w, ...] over the first w rows of the old ones: one launch a dtype, not three a layer."""
        groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for kept, new in self._fresh:
            places, values = groups.setdefault(new.dtype, ([], []))
            places += [row[: new.shape[1]] for row in kept]
            values += [row.to(kept.dtype).contiguous() for row in new]
        for places, values in groups.values():
            torch._foreach_copy_(places, values)
        self._fresh = []

    def _place(self, count: int, live: Tensor) -> Place:
        arena = self.arena
        return place_rows(arena.lengths, live, count, arena.scrap, arena.cos, arena.sin)

    def _rows(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens.reshape(-1), self.target.embedding)

    def _mix(self, layer: HybridLayer, x: Tensor, place: Place) -> tuple[Tensor, Tensor | None]:
        """x [N, H] -> (h [N, H], the convolution's inputs [B, w, C] of a Gated DeltaNet layer)."""
        normed = layer.input_norm(x)
        if isinstance(layer.mixer, AttentionMixer):
            store = self.arena.kv.store[self.cache.kv_index[layer.index]]
            return attend(layer.mixer, normed, store, place).add_(x), None
        mixed, inputs = self._gdn(layer.mixer, self.cache.gdn_index[layer.index], normed, place)
        return mixed.add_(x), inputs

    def _gdn(self, mixer: GdnMixer, index: int, x: Tensor, place: Place) -> tuple[Tensor, Tensor]:
        cache, held = self.cache, self.arena.pending
        made = mixer.project(x).view(place.batch, place.count, -1)
        inputs, z, b, a = made.split_with_sizes(mixer.sections, 2)
        tokens = gdn_inputs(inputs, cache.windows[index], a, b, mixer.weights, mixer.layout)
        past = GdnFactors(held.z[index], held.k[index], held.g[index])
        mixed, factors, state = gdn_verify_deferred(
            tokens.q, tokens.k, tokens.v, tokens.log_decay, tokens.beta, cache.states[index], past, self.arena.pending_m,
            place.live,
        )  # fmt: skip
        if state.data_ptr() != cache.states[index].data_ptr():  # the core's own code writes nothing in place
            cache.states[index].copy_(state)
        self._fresh += [(past.z, factors.z), (past.g, factors.g), (past.k, factors.k)]
        return mixer._out(mixed, z, place.count), inputs

    def _expand(self, layer: HybridLayer, h: Tensor) -> Tensor:
        normed = layer.mlp_norm(h)
        if not isinstance(layer.mlp, SparseMlp):
            return layer.mlp.run(normed).add_(h)
        return self._experts(layer, normed, layer.mlp.route(normed)).add_(h)

    def _resume(self, layer: HybridLayer, stage: StaticStage, w: int) -> Tensor:
        """Layer 0's experts for the first w tokens of each slot."""

        def cut(x: Tensor) -> Tensor:
            return x[:, :w].reshape(-1, x.shape[-1])

        routed = Routed(*(cut(x) for x in (stage.routed.entry, stage.routed.picks, stage.routed.weights)))  # type: ignore[union-attr]
        return self._experts(layer, cut(stage.normed), routed).add_(cut(stage.residual))  # type: ignore[arg-type]

    def _experts(self, layer: HybridLayer, x: Tensor, routed: Routed) -> Tensor:
        """Routed experts by the operation for few rows, then the shared one."""
        mlp: SparseMlp = layer.mlp
        if x.shape[0] > MAX_TOKENS:  # several slots: the eager form, which reads nothing on CUDA either
            return mlp.run(x, routed)
        gate_up, down = self.experts[layer.index]
        out = routed_experts(x, routed.picks, routed.weights.to(torch.float32), gate_up, down)
        if mlp.shared:
            gate, up = routed.entry[:, mlp.experts + 1 :].chunk(2, dim=-1)
            amount = routed.entry[:, mlp.experts : mlp.experts + 1].sigmoid()
            out = out.addcmul(mlp.shared_down(F.silu(gate) * up), amount)
        return out


def attend(mixer: AttentionMixer, x: Tensor, store: Tensor, place: Place) -> Tensor:
    """Gated attention: x [N, H], normed -> [N, H]; the block's K/V go into store [2, B, Hk, C, D]."""
    batch, count = place.batch, place.count
    made = mixer.project(x).view(batch, count, -1, mixer.size)
    turned, heads = mixer.heads + mixer.kv_heads, mixer.heads
    both = mixer.norm(made[:, :, :turned])
    rotate_(both if mixer.turned == mixer.size else both[..., : mixer.turned], place.cos, place.sin)
    rows = torch.stack((both[:, :, heads:], made[:, :, turned : turned + mixer.kv_heads])).transpose(2, 3)
    append(store, rows, place.rows)
    mixed = block_attention(both[:, :, :heads], store[0], store[1], place.lengths, mixer.size**-0.5)
    if mixer.gated:
        mixed = mixed * made[:, :, turned + mixer.kv_heads :].sigmoid()
    return mixer.output(mixed.reshape(batch * count, -1))


def expert_stacks(mlp: SparseMlp) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I] as the operation takes them. The CPU keeps them packed for its own products: in
    float32 they are put together again (tests run there); in bfloat16 they cannot be."""
    if hasattr(mlp, "gate_up"):
        return mlp.gate_up, mlp.down
    gate_up, down = torch.stack(list(mlp.ups)), torch.stack(list(mlp.downs))
    return gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()


def saved_stage(stage: StaticStage, rows: int) -> StaticStage:
    """Room for a stage of `rows` tokens, shaped like `stage`: a graph of one length writes it, a graph of another reads it."""

    def room(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.new_zeros((x.shape[0], rows, *x.shape[2:]))

    routed = None if stage.routed is None else Routed(*(room(x) for x in vars(stage.routed).values()))  # type: ignore[arg-type]
    return StaticStage(room(stage.tokens), room(stage.residual), room(stage.normed), routed, room(stage.inputs))  # type: ignore[arg-type]


def save_stage(place: StaticStage, stage: StaticStage) -> None:
    """Copy the u rows of `stage` into the first u rows of `place`."""
    u = stage.tokens.shape[1]
    pairs = [(place.tokens, stage.tokens), (place.residual, stage.residual), (place.normed, stage.normed)]
    pairs.append((place.inputs, stage.inputs))
    if place.routed is not None and stage.routed is not None:
        pairs += zip(vars(place.routed).values(), vars(stage.routed).values(), strict=True)
    for kept, new in pairs:
        if kept is not None and new is not None:
            kept[:, :u].copy_(new)
