"""Any plain decoder of mlx-lm as a `Target`: embedding, layers, final norm, head, with features captured on the way.

The modules are driven from outside, layer by layer: nothing is patched or replaced. Whether that gives what the model's
own call gives is checked once at load (`check`), which also computes every lazily made table on the loading thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.memory import CacheOptions
from dspine.common.protocols import Prefill, StageZero, TargetInfo, Verification
from dspine_mlx.arrays import MlxArrays, release_buffers
from dspine_mlx.caches import TargetCache
from dspine_mlx.kv import LayerKV, layer_kv

PROBE = 5  # tokens of the check at load
_TOLERANCE = 1e-2
# families with sliding-window layers whose long texts the tests hold against mlx-lm's own caches
SLIDING = ("llama", "olmo3", "exaone4")


class PlainTarget:
    """`model.model.embed_tokens / layers / norm`, head tied or `lm_head`. Subclasses add a family's scales."""

    reason = "plain decoder"
    record_routing = False  # no routers here

    def __init__(self, model: nn.Module, info: TargetInfo) -> None:
        self.info = info
        self.arrays = MlxArrays()
        self.model = model
        self.decoder = find_decoder(model, info.name)
        self.head_module = find_head(model, self.decoder)
        self.layer_ids: tuple[int, ...] = ()
        self.cache_options = CacheOptions()

    @classmethod
    def describe(cls, model: nn.Module) -> str:
        """What of the model this adapter takes account of: the part of `TargetInfo.adapter` in brackets."""
        return cls.reason

    # -- a family's scales ---------------------------------------------------------------------------------------

    def scale_embedding(self, hidden: mx.array) -> mx.array:
        """What the family does to an embedding before the first layer."""
        return hidden

    def scale_logits(self, logits: mx.array) -> mx.array:
        """What the family does to logits after the LM head."""
        return logits

    # -- protocol ------------------------------------------------------------------------------------------------

    def bind_features(self, layer_ids: Sequence[int]) -> None:
        """Capture the OUTPUT of these 0-based layers (raw residual stream), concatenated in this order."""
        wrong = [i for i in layer_ids if not 0 <= i < self.info.num_layers]
        if wrong:
            raise CheckpointError(
                f"{self.info.name}: feature layers {wrong} out of range, expected 0..{self.info.num_layers - 1}"
            )
        self.layer_ids = tuple(layer_ids)

    def embed(self, tokens: mx.array) -> mx.array:
        """int [B, T] -> [B, T, H]."""
        return self.scale_embedding(self.decoder.embed_tokens(tokens))

    def head(self, hidden: mx.array) -> mx.array:
        """Final-normed [..., H] -> logits float32 [..., V]."""
        lm_head = self.head_module
        raw = lm_head.as_linear(hidden) if isinstance(lm_head, nn.Embedding | nn.QuantizedEmbedding) else lm_head(hidden)
        return self.scale_logits(raw).astype(mx.float32)

    def head_rows(self, ids: mx.array) -> mx.array:
        """LM-head rows of `ids` int [...] -> [..., H], dequantised; rows only, so a large head is never widened."""
        lm_head = self.head_module
        flat = mx.reshape(ids, (-1,))
        parts = [mx.take(lm_head[name], flat, axis=0) for name in ("weight", "scales", "biases") if name in lm_head]
        rows = _dequantize(lm_head, parts) if len(parts) > 1 else parts[0]
        return mx.reshape(rows, (*ids.shape, rows.shape[-1]))

    def head_weight(self) -> np.ndarray:
        """LM head as float32 NumPy [V, H] (dequantised), in slices that keep the device's peak low."""
        step = 16_384
        ids = [mx.arange(start, min(start + step, self.info.vocab_size)) for start in range(0, self.info.vocab_size, step)]
        return np.concatenate([self.arrays.to_host(self.head_rows(part).astype(mx.float32))[0] for part in ids])

    def make_cache(self, capacity: int) -> TargetCache:
        """Empty K/V caches for up to `capacity` tokens."""
        return TargetCache(self.new_kv(), capacity)

    def new_kv(self) -> list[LayerKV]:
        """Empty K/V of every layer that mlx-lm gives K/V, of the kind that `cache_options` asks for."""
        made = [cache for cache in make_prompt_cache(self.model) if not isinstance(cache, ArraysCache)]
        return [layer_kv(cache, self.cache_options) for cache in made]

    def use_cache_options(self, options: CacheOptions) -> None:
        """Keep K/V this way from now on. DSpineError where this model, or its adapter, cannot: at start-up, on every path."""
        facts = self.head_dim()
        if options.kv_bits is not None and facts is not None and facts % options.kv_group_size:
            raise DSpineError(
                f"{self.info.name}: kv_bits needs heads of a multiple of kv_group_size {options.kv_group_size}, they have "
                f"{facts}; try another of 32, 64, 128, or drop kv_bits"
            )
        early = getattr(self, "stops_at_router", False) and 0 in getattr(self, "attention_ids", ())
        if options.max_kv_size is not None and early:
            raise DSpineError(
                f"{self.info.name}: max_kv_size needs a layer 0 without attention where a router follows it: its rows are "
                "written before the block's length is known; drop max_kv_size"
            )
        before, self.cache_options = self.cache_options, options
        try:
            wanted = [type(layer) for layer in self.new_kv()]
            made = [type(layer) for layer in self.make_cache(16).layers]
        except DSpineError as error:
            self.cache_options = before
            raise DSpineError(f"{self.info.name}: {error}") from error
        if made != wanted:
            self.cache_options = before
            raise DSpineError(f"{self.info.name}: {type(self).__name__} keeps plain K/V only: drop max_kv_size and kv_bits")

    def head_dim(self) -> int | None:
        """Size of an attention head, where the model's card says it."""
        args = getattr(self.model, "args", None)
        facts = getattr(args, "text_config", None) or vars(args or object())
        size, heads, hidden = (facts.get(key) for key in ("head_dim", "num_attention_heads", "hidden_size"))
        return size or (hidden // heads if hidden and heads else None)

    def prefill(self, cache: TargetCache, tokens: mx.array, *, chunk: int) -> Prefill:
        """tokens int [B, T] in pieces of `chunk`, each computed before the next, so that activations stay bounded."""
        if tokens.shape[1] == 0:
            raise DSpineError("prefill: the prompt has no tokens; expected at least one")
        cache.room_for(tokens.shape[1])
        features, hidden = [], None
        for start in range(0, tokens.shape[1], chunk):
            hidden, taps = self._forward(tokens[:, start : start + chunk], cache.layers)
            mx.eval(hidden, *([taps] if taps is not None else []), [layer.state for layer in cache.layers])
            if taps is not None:
                features.append(taps)
            release_buffers(chunk)
        cache.length += tokens.shape[1]
        logits = self.head(hidden[:, -1])
        joined = mx.concatenate(features, axis=1) if features else None
        return Prefill(logits, joined)

    def begin(self, cache: TargetCache, tokens: mx.array) -> StageZero:
        """A dense target has no router: everything is handed on."""
        return StageZero(tokens, None)

    def finish(self, cache: TargetCache, stage: StageZero, w: int) -> Verification:
        """Logits and features of the first `w` tokens; they stay pending until `commit`."""
        cache.room_for(w)
        hidden, taps = self._forward(stage.tokens[:, :w], cache.layers)
        cache.pending = w
        return Verification(self.head(hidden), taps)

    def commit(self, cache: TargetCache, verification: Verification, m: int) -> None:
        """Keep the first `m` verified tokens in every layer."""
        cache.keep(m)

    def start(self, verification: Verification, *arrays: mx.array) -> None:
        """Begin to compute a verified block, and `arrays`, in the background; see `DecodingLoop.step`."""
        mx.async_eval(*arrays, verification.logits)

    # -- internals -----------------------------------------------------------------------------------------------

    def _forward(self, tokens: mx.array, caches: Sequence[Any]) -> tuple[mx.array, mx.array | None]:
        """int [B, T] -> (final-normed [B, T, H], features [B, T, F] or None)."""
        hidden = self.embed(tokens)
        masks: dict[Any, Any] = {}
        taps: dict[int, mx.array] = {}
        for i, (layer, cache) in enumerate(zip(self.decoder.layers, caches, strict=True)):
            kind = getattr(cache, "max_size", None)
            if kind not in masks:
                masks[kind] = create_attention_mask(hidden, cache)
            hidden = layer(hidden, masks[kind], cache)
            if i in self.layer_ids:
                taps[i] = hidden
        features = mx.concatenate([taps[i] for i in self.layer_ids], axis=-1) if taps else None
        return self.decoder.norm(hidden), features

    def check(self) -> None:
        """Refuse a model whose caches cannot be rolled back, or whose own call gives other logits than this adapter."""
        name, kind = self.info.name, self.info.model_type
        known = {"KVCache", "RotatingKVCache"} if kind in SLIDING else {"KVCache"}
        foreign = sorted({type(cache).__name__ for cache in make_prompt_cache(self.model)} - known)
        if foreign:
            raise DSpineError(
                f"{name}: {kind} keeps {', '.join(foreign)} (recurrent, rotating or sliding-window layers), which the MLX "
                "runtime cannot roll back; expected plain K/V caches; choose another target, or use --backend torch"
            )
        self._check_logits(lambda tokens: self.head(self._forward(tokens, self.new_kv())[0]), _TOLERANCE)

    def _check_logits(self, drive: Callable[[mx.array], mx.array], tolerance: float) -> None:
        """Raise where `drive` (tokens int [1, T] -> logits [1, T, V]) is further from the model's own call than
        `tolerance`, relative, in the Frobenius norm."""
        tokens = mx.arange(1, 1 + min(PROBE, self.info.vocab_size - 1))[None]
        wanted = self.model(tokens, cache=make_prompt_cache(self.model)).astype(mx.float32)
        norms = mx.linalg.norm(wanted - drive(tokens)), mx.linalg.norm(wanted)
        difference, size = (float(norm) for norm in self.arrays.to_host(*norms))
        if not difference <= tolerance * max(1.0, size):
            raise DSpineError(
                f"{self.info.name}: driven layer by layer, {self.info.model_type} gives other logits than its own call "
                f"(relative difference {difference / max(1.0, size):.3g}, expected rounding); it needs an adapter of its own, "
                "or use --backend torch"
            )


def find_decoder(model: nn.Module, name: str) -> nn.Module:
    """The module with `embed_tokens`, `layers` and `norm`: `model.model`, or that of a wrapped language model."""
    for holder in (model, getattr(model, "language_model", None)):
        decoder = getattr(holder, "model", None)
        if decoder is not None and all(hasattr(decoder, part) for part in ("embed_tokens", "layers", "norm")):
            return decoder
    raise DSpineError(
        f"{name}: {type(model).__module__.rpartition('.')[2]} is no plain decoder: expected model.embed_tokens, model.layers "
        "and model.norm; it needs an adapter in dspine_mlx/targets, or use --backend torch"
    )


def find_head(model: nn.Module, decoder: nn.Module) -> nn.Module:
    """The LM head of the model, or of a wrapped language model; the embedding where it is tied."""
    for holder in (model, model.get("language_model")):
        if holder is not None and holder.get("lm_head") is not None:
            return holder["lm_head"]
    return decoder.embed_tokens


def _dequantize(module: Any, parts: list[mx.array]) -> mx.array:
    rows = mx.dequantize(*parts, group_size=module.group_size, bits=module.bits, mode=module.mode)
    return rows
