"""Hybrids of Gated DeltaNet and attention, dense or with experts, as `Target`s over mlx-lm's modules.

The decoder is driven from outside, mixer by mixer; nothing is patched. Verifying w tokens changes no state: each layer
leaves compact factors, and `commit(m)` builds the states after m tokens for all layers in ONE launch (`algorithms` 3).
With a router in layer 0, `begin` stops there, and `finish` resumes at layer 0's experts and recomputes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from dspine.common.errors import DSpineError
from dspine.common.gdn import MAX_TOKENS, GdnFactors, gdn_commit
from dspine.common.protocols import Prefill, StageZero, TargetInfo, Verification
from dspine_mlx.arrays import release_buffers
from dspine_mlx.caches import HybridCache
from dspine_mlx.targets import gdn
from dspine_mlx.targets.gdn import BlockTrace
from dspine_mlx.targets.moe import Routing, experts, is_moe, route
from dspine_mlx.targets.plain import PROBE, PlainTarget, find_decoder

# of the checks at load, relative: of each layer by itself, and of the logits. In bfloat16 routers pick other experts where
# two are nearly equal, and that spreads; mlx-lm is then as far from its own float32
_TOLERANCE = {"float32": (1e-3, 1e-2), "bfloat16": (0.2, 0.8)}
Mixer = Callable[[int, mx.array], mx.array]  # (layer id, normed hidden [B, T, H]) -> what is added to the residual


@dataclass(frozen=True)
class Resume:
    """Layer 0 up to its router, over u tokens: residual and post-attention-normed hidden [B, u, H], the routing, and the
    trace of its linear attention (None where layer 0 has attention). `ticket` names the call of `begin`."""

    residual: mx.array
    normed: mx.array
    routing: Routing
    trace: BlockTrace | None
    ticket: int

    def first(self, count: int) -> Resume:
        """The first `count` tokens."""
        trace = self.trace.first(count) if self.trace is not None else None
        residual, normed = self.residual[:, :count], self.normed[:, :count]
        return replace(self, residual=residual, normed=normed, routing=self.routing.first(count), trace=trace)


class HybridTarget(PlainTarget):
    """Any decoder whose layers have `linear_attn` or `self_attn`, and an `mlp` that is dense or has a router."""

    def __init__(self, model: nn.Module, info: TargetInfo) -> None:
        super().__init__(model, info)
        self.record_routing = False
        layers = self.decoder.layers
        self.gdn = {i: gdn.wrap_gdn(layer.linear_attn) for i, layer in enumerate(layers) if "linear_attn" in layer}
        self.attention_ids = tuple(i for i in range(len(layers)) if i not in self.gdn)
        self.moe_ids = tuple(i for i, layer in enumerate(layers) if is_moe(layer.mlp))
        self.stops_at_router = 0 in self.moe_ids

    @classmethod
    def describe(cls, model: nn.Module) -> str:
        """What the layers are, and where `begin` stops."""
        layers = find_decoder(model, "model").layers
        linear = sum("linear_attn" in layer for layer in layers)
        routers = sum(is_moe(layer.mlp) for layer in layers)
        begin = "begin stops at layer 0's router" if is_moe(layers[0].mlp) else "no router in layer 0: begin hands on"
        parts = [f"{linear} Gated-DeltaNet and {len(layers) - linear} attention layers"]
        parts += [f"{routers} with experts"] if routers else []
        return ", ".join([*parts, "rollback by compact factors" if linear else "rollback by trimming"]) + f"; {begin}"

    # -- protocol ------------------------------------------------------------------------------------------------

    def make_cache(self, capacity: int) -> HybridCache:
        """Empty cache: K/V of the attention layers only, states of the others; room for `capacity` tokens."""
        return HybridCache(self.new_kv(), capacity, 0, 0, self.attention_ids, tuple(self.gdn))

    def prefill(self, cache: HybridCache, tokens: mx.array, *, chunk: int) -> Prefill:
        """tokens int [B, T] in pieces of `chunk`, each computed before the next, so that activations stay bounded."""
        if tokens.shape[1] == 0:
            raise DSpineError("prefill: the prompt has no tokens; expected at least one")
        cache.room_for(tokens.shape[1])
        features, hidden = [], None
        for start in range(0, tokens.shape[1], chunk):
            part = tokens[:, start : start + chunk]
            hidden, taps = self._prompt(part, cache)
            cache.length += part.shape[1]
            held = [array for array in (taps, cache.states, cache.windows) if array is not None]
            mx.eval(hidden, *held, [layer.state for layer in cache.layers])
            if taps is not None:
                features.append(taps)
            release_buffers(part.shape[1])
        return Prefill(self.head(hidden[:, -1]), mx.concatenate(features, axis=1) if features else None)

    def begin(self, cache: HybridCache, tokens: mx.array) -> StageZero:
        """tokens int [B, u], u = 1..16: layer 0 up to its router (router_picks int [B, u, k]). The cache stays as it is."""
        count = tokens.shape[1]
        if not 1 <= count <= MAX_TOKENS:
            raise DSpineError(f"{self.info.name}: a block has 1..{MAX_TOKENS} tokens (anchor included), got {count}")
        cache.room_for(count)
        if not self.stops_at_router:
            return StageZero(tokens, None)
        cache.begun += 1
        hidden = self._start(tokens, cache)
        traces: dict[int, BlockTrace] = {}
        residual, normed = self._mix(0, hidden, self._verifier(cache, hidden, traces))
        if 0 in cache.attention_ids:
            cache.kv(0).trim(count)  # rows stay where they are; `finish` counts those it keeps
        routing = route(self.decoder.layers[0].mlp, normed)
        return StageZero(tokens, Resume(residual, normed, routing, traces.get(0), cache.begun), routing.picks)

    def finish(self, cache: HybridCache, stage: StageZero, w: int) -> Verification:
        """Logits and features of the first `w` tokens; compact factors wait for `commit`."""
        if not 1 <= w <= stage.tokens.shape[1]:
            raise DSpineError(f"{self.info.name}: finish of {w} tokens, expected 1..{stage.tokens.shape[1]} (what begin saw)")
        cache.room_for(w)
        traces: dict[int, BlockTrace] = {}
        resume: Resume | None = None
        if stage.resume is None:
            hidden = self._start(stage.tokens[:, :w], cache)
            mixer = self._verifier(cache, hidden, traces)
        else:
            resume = stage.resume.first(w)
            hidden, mixer = resume.residual, self._verifier(cache, resume.residual, traces)
            if resume.ticket != cache.begun:
                raise DSpineError(
                    f"{self.info.name}: finish of begin number {resume.ticket}, but the cache has seen {cache.begun}; "
                    "finish the newest one"
                )
            if resume.trace is not None:
                traces[0] = resume.trace
            else:
                cache.kv(0).offset += w
        picks: list[mx.array] | None = [] if self.record_routing and self.moe_ids else None
        hidden, taps = self._layers(hidden, mixer, resume, picks)
        cache.pending = w
        routed = mx.stack(picks, axis=2) if picks else None
        return Verification(self.head(hidden), taps, [traces[i] for i in cache.gdn_ids], routed)

    def commit(self, cache: HybridCache, verification: Verification, m: int) -> None:
        """Keep the first `m` verified tokens: states and windows of ALL layers in one launch, K/V by their length."""
        pending = cache.pending
        cache.keep(m)
        traces: list[BlockTrace] = verification.factors
        if not traces or m == 0:  # nothing to move: a block that was begun early and is dropped
            return
        if traces[0].inputs.shape[1] != pending:
            raise DSpineError(f"commit: factors of {traces[0].inputs.shape[1]} tokens, but {pending} are pending")
        z, k, g = (mx.stack([getattr(trace.factors, name) for trace in traces]) for name in ("z", "k", "g"))
        inputs = mx.stack([trace.inputs for trace in traces])
        count = mx.full((inputs.shape[1],), m, dtype=mx.int32)
        cache.states, cache.windows = gdn_commit(cache.states, GdnFactors(z, k, g), cache.windows, inputs, count)
        mx.async_eval(cache.states, cache.windows)  # now: only this thread may, and nothing of the block outlives it

    def start(self, verification: Verification, *arrays: mx.array) -> None:
        """As of plain targets, with all that `commit` will need: it may come on another thread, which cannot compute these."""
        traces: list[BlockTrace] = verification.factors
        parts = [x for trace in traces for x in (trace.factors.z, trace.factors.k, trace.factors.g, trace.inputs)]
        mx.async_eval(*arrays, verification.logits, *parts)

    # -- internals -----------------------------------------------------------------------------------------------

    def _start(self, tokens: mx.array, cache: HybridCache) -> mx.array:
        """Embedding [B, T, H]; the first tokens of a cache also make its zero states."""
        hidden = self.embed(tokens)
        if cache.states is None and self.gdn:
            layer = next(iter(self.gdn.values()))
            rows, layout = (len(self.gdn), tokens.shape[0]), layer.layout
            cache.states = mx.zeros((*rows, layout.value_heads, layout.value_dim, layout.key_dim), dtype=mx.float32)
            cache.windows = mx.zeros((*rows, layer.window, layout.channels), dtype=hidden.dtype)
        return hidden

    def _mix(self, i: int, hidden: mx.array, mixer: Mixer) -> tuple[mx.array, mx.array]:
        """First half of layer i: (residual, what its `mlp` reads), both [B, T, H]."""
        layer = self.decoder.layers[i]
        residual = hidden + mixer(i, layer.input_layernorm(hidden))
        return residual, layer.post_attention_layernorm(residual)

    def _layers(
        self, hidden: mx.array, mixer: Mixer, resume: Resume | None = None, picks: list[mx.array] | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """All layers, or from layer 0's experts on: final-normed [B, T, H] and features. `picks` collects the routing."""
        taps: dict[int, mx.array] = {}
        for i, layer in enumerate(self.decoder.layers):
            routing = None
            if i == 0 and resume is not None:
                residual, normed, routing = resume.residual, resume.normed, resume.routing
            else:
                residual, normed = self._mix(i, hidden, mixer)
                if i in self.moe_ids:
                    routing = route(layer.mlp, normed)
            if routing is not None and picks is not None:
                picks.append(routing.picks)
            hidden = residual + (layer.mlp(normed) if routing is None else experts(layer.mlp, normed, routing))
            if i in self.layer_ids:
                taps[i] = hidden
        features = mx.concatenate([taps[i] for i in self.layer_ids], axis=-1) if taps else None
        return self.decoder.norm(hidden), features

    def _verifier(self, cache: HybridCache, hidden: mx.array, traces: dict[int, BlockTrace]) -> Mixer:
        """Mixers of a block that may be rolled back; `traces` collects what linear attention leaves, by layer id."""
        mask = self._mask(cache, hidden)

        def mix(i: int, normed: mx.array) -> mx.array:
            if i not in self.gdn:
                return self.decoder.layers[i].self_attn(normed, mask, cache.kv(i))
            out, traces[i] = gdn.verify(self.gdn[i], normed, *cache.state_of(i))
            return out

        return mix

    def _prompt(self, tokens: mx.array, cache: HybridCache) -> tuple[mx.array, mx.array | None]:
        """A piece of a prompt through all layers; states and windows of the cache move on."""
        hidden = self._start(tokens, cache)
        mask = self._mask(cache, hidden)
        moved: list[tuple[mx.array, mx.array]] = []

        def mix(i: int, normed: mx.array) -> mx.array:
            if i not in self.gdn:
                return self.decoder.layers[i].self_attn(normed, mask, cache.kv(i))
            out, *after = gdn.prefill(self.gdn[i], normed, *cache.state_of(i))
            moved.append((after[0], after[1]))
            return out

        result = self._layers(hidden, mix)
        if moved:
            cache.windows, cache.states = (mx.stack(rows) for rows in zip(*moved, strict=True))
        return result

    def _mask(self, cache: HybridCache, hidden: mx.array) -> Any:
        """Causal over the K/V and the block; None for one token, and where no layer has attention."""
        return create_attention_mask(hidden, cache.layers[0]) if cache.layers else None

    def check(self) -> None:
        """Refuse layers that this adapter does not know, and a model whose own call gives other logits."""
        name, kind = self.info.name, self.info.model_type
        foreign = sorted({type(cache).__name__ for cache in make_prompt_cache(self.model)} - {"KVCache", "ArraysCache"})
        odd = [i for i in self.attention_ids if "self_attn" not in self.decoder.layers[i]]
        if foreign or odd:
            raise DSpineError(
                f"{name}: {kind} has {f'caches of kind {foreign}' if foreign else f'unknown mixers in layers {odd}'}; "
                f"expected linear_attn with {ArraysCache.__name__} or self_attn with {KVCache.__name__}; choose another target"
            )
        tolerance, cascade = _TOLERANCE[self.info.dtype]
        self._check_logits(self._probe, cascade)
        self._check_layers(tolerance)

    def _probe(self, tokens: mx.array) -> mx.array:
        """Logits of int [1, T] by way of every path: a prompt of two, then a block of the rest."""
        cache = self.make_cache(tokens.shape[1])
        hidden, _ = self._prompt(tokens[:, :2], cache)
        cache.length = 2
        rest = self.finish(cache, self.begin(cache, tokens[:, 2:]), tokens.shape[1] - 2)
        return mx.concatenate([self.head(hidden), rest.logits], axis=1)

    def _check_layers(self, tolerance: float) -> None:
        """Each layer against mlx-lm's own call of it ON THE SAME INPUT, so that rounding and a router's choice between
        near-ties in one layer are not taken for a fault of the next."""
        tokens = mx.arange(1, 1 + PROBE)[None] % self.info.vocab_size
        self.bind_features(range(self.info.num_layers))
        _, features = self._prompt(tokens, self.make_cache(PROBE))
        self.bind_features(())
        hidden, differences = self.embed(tokens), []
        for i, (layer, got) in enumerate(zip(self.decoder.layers, mx.split(features, self.info.num_layers, -1), strict=True)):
            wanted = layer(hidden, None if i in self.gdn else "causal", None).astype(mx.float32)
            differences.append(mx.linalg.norm(wanted - got) / mx.maximum(mx.linalg.norm(wanted), 1e-6))
            hidden = got
        found = [float(x) for x in self.arrays.to_host(mx.stack(differences))[0]]
        wrong = [i for i, difference in enumerate(found) if not difference <= tolerance]
        if wrong:
            raise DSpineError(
                f"{self.info.name}: layers {wrong[:8]} of {self.info.model_type} give other outputs than their own call "
                f"(relative difference up to {max(found[i] for i in wrong):.3g}, expected rounding); this version of mlx-lm "
                "is not the one this adapter knows; use --backend torch"
            )
