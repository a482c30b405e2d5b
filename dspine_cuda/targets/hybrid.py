"""Lean hybrid decoders (Qwen3.5, Qwen3.5-MoE, Qwen3-Next) and Qwen3-MoE: verification in two parts, rollback by factors.

`begin(u)` runs the embedding, layer 0's mixer and layer 0's router, and stops; `finish(w)` resumes at layer 0's experts with
the first w of those rows and recomputes nothing. GDN states stay as they are until `commit`, which rebuilds the accepted ones
of all layers from compact factors. All arrays are [B, T, ...]; sequences of one batch have equal lengths. On CUDA nothing in
`begin`, `finish` and `commit` reads the device; on the CPU the routers' picks are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine.common.gdn import GdnFactors
from dspine.common.protocols import Prefill, StageZero, TargetInfo, Verification
from dspine_cuda.arrays import TorchArrays
from dspine_cuda.hybrid_cache import BlockFactors, HybridCache
from dspine_cuda.targets.dense import LeanTarget
from dspine_cuda.targets.exact import make_exact_linear, make_wide_norm
from dspine_cuda.targets.hybrid_config import FULL, HybridConfig
from dspine_cuda.targets.hybrid_tensors import HybridTensors, refuse_surplus
from dspine_cuda.targets.layers import RotaryTables
from dspine_cuda.targets.mixers import AttentionMixer, Block, GdnMixer, Kept
from dspine_cuda.targets.moe import DenseMlp, Routed, SparseMlp


@dataclass(frozen=True)
class Resume:
    """Layer 0 at the router boundary, for u tokens of a cache at `length`: residual and normed rows [B, u, H], the router's
    results, and what its mixer left (None where layer 0 is attention)."""

    length: int
    residual: Tensor
    normed: Tensor
    routed: Routed
    kept: Kept | None

    def first(self, w: int) -> Resume:
        """Of the first `w` tokens; no value of a later one is reachable from it."""
        batch, u = self.residual.shape[:2]
        if w == u:
            return self

        def cut(x: Tensor) -> Tensor:
            return x.view(batch, u, -1)[:, :w].reshape(batch * w, -1)

        routed = Routed(*(cut(x) for x in (self.routed.entry, self.routed.picks, self.routed.weights)))
        kept = self.kept.first(w) if self.kept is not None else None
        return Resume(self.length, self.residual[:, :w], self.normed[:, :w], routed, kept)


class HybridLayer:
    """h = x + mixer(norm(x)), x' = h + mlp(norm(h))."""

    def __init__(
        self, config: HybridConfig, tensors: HybridTensors, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.index = index
        mixer = AttentionMixer if config.kinds[index] == FULL else GdnMixer
        self.mixer = mixer(config, tensors, index, dtype, device)
        self.mlp = (SparseMlp if config.sparse[index] else DenseMlp)(config, tensors, index, dtype, device)
        self.input_norm, self.mlp_norm = (
            make_norm(config, tensors, f"model.layers.{index}.{name}.weight", dtype, device)
            for name in ("input_layernorm", "post_attention_layernorm")
        )

    def mix(self, x: Tensor, block: Block) -> tuple[Tensor, Kept | None]:
        """x [N, H] -> h [N, H]."""
        if isinstance(self.mixer, AttentionMixer):
            return self.mixer.forward(self.input_norm(x), block).add_(x), None
        mixed, kept = self.mixer.forward(self.input_norm(x), block)
        return mixed.add_(x), kept

    def prefill(self, x: Tensor, block: Block) -> Tensor:
        """x [N, H] -> x' [N, H]; the cache's state moves on."""
        run = self.mixer.forward if isinstance(self.mixer, AttentionMixer) else self.mixer.prefill
        return self.expand(run(self.input_norm(x), block).add_(x))[0]

    def expand(self, h: Tensor) -> tuple[Tensor, Routed | None]:
        """h [N, H] -> x' [N, H], and the router's results."""
        normed = self.mlp_norm(h)
        if isinstance(self.mlp, DenseMlp):
            return self.mlp.run(normed).add_(h), None
        routed = self.mlp.route(normed)
        return self.mlp.run(normed, routed).add_(h), routed


def make_norm(config: HybridConfig, tensors: HybridTensors, name: str, dtype: torch.dtype, device: torch.device):  # noqa: ANN201
    """A layer norm, of weight `1 + w` where the family has it so."""
    weight = tensors.read(name).to(torch.float32) + config.centred_norms
    return make_wide_norm(weight.to(device), config.rms_norm_eps, dtype)


class HybridTarget(LeanTarget):
    """`protocols.Target` on a lean hybrid or mixture-of-experts decoder."""

    def __init__(self, folder: Path, config: HybridConfig, info: TargetInfo, tensors: HybridTensors) -> None:
        self.config, self.info = config, info
        self.dtype, self.device = getattr(torch, info.dtype), torch.device(info.device)
        self.arrays = TorchArrays(self.device)
        self.taps: tuple[int, ...] = ()
        self.record_routing = False
        tied = config.tied if config.tied is not None else "lm_head.weight" not in tensors.shapes
        tensors.check_hybrid(config, tied)
        refuse_surplus(tensors, tied)
        with torch.no_grad():
            self._load(tensors, tied)

    def _load(self, tensors: HybridTensors, tied: bool) -> None:
        config, place = self.config, (self.dtype, self.device)
        self.embedding = tensors.read_as("model.embed_tokens.weight", *place)
        self.head_matrix = self.embedding if tied else tensors.read_as("lm_head.weight", *place)
        self._head = make_exact_linear(self.head_matrix, keep=True)
        self.layers = [HybridLayer(config, tensors, index, *place) for index in range(config.num_layers)]
        self.norm = make_norm(config, tensors, "model.norm.weight", *place)
        frequencies, factor = config.frequencies()
        self.rotary = RotaryTables(torch.from_numpy(frequencies), factor, *place)

    def make_cache(self, capacity: int, batch: int = 1) -> HybridCache:
        """Empty cache for `batch` sequences of up to `capacity` tokens (committed plus one block)."""
        self.rotary.grow(capacity)
        return HybridCache(self.config, capacity, self.dtype, self.device, batch)

    @torch.inference_mode()
    def prefill(self, cache: HybridCache, tokens: Tensor, *, chunk: int) -> Prefill:
        """Append tokens [B, T], `chunk` at a time; see `protocols.Prefill`. Only the last row meets the LM head."""
        if chunk < 1 or tokens.shape[1] < 1:
            raise DSpineError(f"prefill needs a chunk and a prompt of at least 1 token, got {chunk} and {tokens.shape[1]}")
        if cache.length + tokens.shape[1] > cache.capacity:  # before a state has moved
            cache.reserve(tokens.shape[1])
        pieces: list[Tensor] = []
        x = tokens
        for piece in tokens.split(chunk, dim=1):
            block = self._block(cache, piece)
            x, captured = self._rows(piece), {}
            for layer in self.layers:
                x = layer.prefill(x, block)
                captured[layer.index] = x if layer.index in self.taps else None
            cache.commit(block.count)
            x = x.view(block.batch, block.count, -1)
            if self.taps:
                pieces.append(self._features(captured, block))
        return Prefill(self.head(self.norm(x[:, -1])), torch.cat(pieces, dim=1) if pieces else None)

    @torch.inference_mode()
    def begin(self, cache: HybridCache, tokens: Tensor) -> StageZero:
        """Layer 0 of tokens int [B, u] up to its router; where layer 0 has no experts, nothing."""
        first = self.layers[0]
        if not isinstance(first.mlp, SparseMlp):
            return StageZero(tokens, None)
        block = self._block(cache, tokens)
        h, kept = first.mix(self._rows(tokens), block)
        normed = first.mlp_norm(h)
        routed = first.mlp.route(normed)
        shape = (block.batch, block.count, -1)
        resume = Resume(cache.length, h.view(shape), normed.view(shape), routed, kept)
        return StageZero(tokens, resume, routed.picks.view(shape))

    @torch.inference_mode()
    def finish(self, cache: HybridCache, stage: StageZero, w: int) -> Verification:
        """Run the first `w` tokens behind the committed ones; they are pending until `commit`."""
        if not 1 <= w <= stage.tokens.shape[1]:
            raise DSpineError(f"verification of {w} tokens, but the block holds {stage.tokens.shape[1]}")
        resume = stage.resume
        if resume is not None and resume.length != cache.length:
            raise DSpineError(f"stage of a cache of {resume.length} tokens, but it holds {cache.length}: begin again")
        block = self._block(cache, stage.tokens[:, :w])
        x, kept, picks, captured = self._run(block, None if resume is not None else self._rows(stage.tokens[:, :w]), resume)
        logits = self.head(self.norm(x)).view(block.batch, w, -1)
        features = self._features(captured, block) if self.taps else None
        return Verification(logits, features, stack_factors(kept), torch.stack(picks, dim=2) if picks else None)

    def verify_rows(self, block: Block, tokens: Tensor) -> tuple[Tensor, Tensor | None, BlockFactors | None]:
        """Blocks of several sequences at once: tokens int [N], all behind one another, and a block that knows whose they are.
        Returns logits float32 [N, V], features [N, F], and the factors in the block's own rectangle."""
        x, kept, _, captured = self._run(block, self._rows(tokens), None)
        features = torch.cat([captured[i] for i in self.taps], dim=-1) if self.taps else None  # type: ignore[misc]
        return self.head(self.norm(x)), features, stack_factors(kept)

    def _run(
        self, block: Block, x: Tensor | None, resume: Resume | None
    ) -> tuple[Tensor, list[Kept], list[Tensor], dict[int, Tensor | None]]:
        """All layers over rows [N, H], or from layer 0's experts on: the last layer's rows, what the mixers left, the routers'
        picks where they are recorded, and the taps."""
        kept: list[Kept] = []
        picks: list[Tensor] = []
        captured: dict[int, Tensor | None] = {}
        for layer in self.layers:
            if layer.index == 0 and resume is not None:
                part = resume.first(block.count)
                left, routed = part.kept, part.routed
                flat = (block.batch * block.count, -1)
                x = layer.mlp.run(part.normed.reshape(flat), routed).add_(part.residual.reshape(flat))  # type: ignore[union-attr,call-arg]
            else:
                h, left = layer.mix(x, block)  # type: ignore[arg-type]
                x, routed = layer.expand(h)
            if left is not None:
                kept.append(left)
            if routed is not None and self.record_routing:
                picks.append(routed.picks.view(block.batch, block.count, -1))
            captured[layer.index] = x if layer.index in self.taps else None
        return x, kept, picks, captured  # type: ignore[return-value]

    @torch.inference_mode()
    def commit(self, cache: HybridCache, verification: Verification, m: int) -> None:
        """Keep the first `m` tokens of the block; states and windows are rebuilt for them, K/V rows behind are scratch."""
        if verification.factors is None and cache.gdn_index:
            raise DSpineError("commit needs the factors of the verified block, got none: pass what `finish` returned")
        cache.commit(m, verification.factors)

    def _block(self, cache: HybridCache, tokens: Tensor) -> Block:
        if tokens.shape[0] != cache.batch:
            raise DSpineError(f"tokens of {tokens.shape[0]} sequences, but the cache holds {cache.batch}")
        cache.reserve(tokens.shape[1])
        return Block(cache, self.config, self.rotary, tokens.shape[1], self.dtype)

    def _rows(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens.reshape(-1), self.embedding)

    def _features(self, captured: dict[int, Tensor | None], block: Block) -> Tensor:
        return torch.cat([captured[i] for i in self.taps], dim=-1).view(block.batch, block.count, -1)  # type: ignore[misc]


def stack_factors(kept: list[Kept]) -> BlockFactors | None:
    """Factors of all GDN layers behind one another, in the order of their layers; None without such layers."""
    if not kept:
        return None
    z, k, g = (torch.stack([getattr(x.factors, name) for x in kept]) for name in ("z", "k", "g"))
    return BlockFactors(GdnFactors(z, k, g), torch.stack([x.inputs for x in kept]))
