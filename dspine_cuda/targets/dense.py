"""Lean dense decoders (Llama, Qwen3): one forward for plain steps, verification and prefill.

A step is `T` tokens at positions [length, length + T) of every sequence of the batch. All arrays are [B, T, ...];
sequences of one batch have equal lengths. Nothing in `begin`, `finish` and `commit` reads the device.

`prefill` and `finish` run in inference mode (6 % of a step on the CPU): clone their outputs before autograd saves them.
`embed`, `head` and `head_rows` follow the caller's mode.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.protocols import Prefill, StageZero, TargetInfo, Verification
from dspine_cuda.arrays import TorchArrays
from dspine_cuda.caches import KVCache
from dspine_cuda.targets.checkpoint import TargetTensors
from dspine_cuda.targets.config import DecoderConfig
from dspine_cuda.targets.layers import Linear, Norm, RotaryTables, make_linear, make_norm, rotate_


def check_layer_ids(layer_ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Ids of decoder layers whose OUTPUT is captured: 0..num_layers-1, in any order, at least one."""
    ids = tuple(int(i) for i in layer_ids)
    wrong = [i for i in ids if not 0 <= i < num_layers]
    if wrong or not ids:
        raise DSpineError(
            f"target layer ids {list(ids)} out of range: the target has layers 0..{num_layers - 1}, at least one is needed"
        )
    return ids


ROWS = 16  # verification rows of one attention call on the CPU


def causal_mask(past: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Additive mask [count, past + count]: row i sees columns 0..past+i; None where every row sees everything."""
    if count == 1:
        return None
    return torch.full((count, past + count), -math.inf, dtype=dtype, device=device).triu_(past + 1)


class RowFrame:
    """A fixed frame of 16 query rows and whole key tiles for CPU attention.

    The CPU's attention kernel sums a row in an order that depends on how many rows and keys it is given, which flips near
    ties in bfloat16. In a frame of fixed rows and whole tiles a row gets the same bits alone and in a block, so greedy
    verification equals plain decoding token for token in bfloat16 too. It costs 4 % of a plain step (docs/results.md).
    """

    def __init__(self, past: int, count: int, keys: int, batch: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.count = count
        self.mask = torch.full((ROWS, keys), -math.inf, dtype=dtype).triu_(past + 1)
        self.mask[count:] = 0.0  # rows without a token: any finite result, dropped
        self.query = torch.zeros((batch, heads, ROWS, head_dim), dtype=dtype)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, grouped: bool) -> Tensor:
        """query [B, heads, T, hd] -> [B, heads, T, hd]."""
        self.query[:, :, : self.count] = query
        mixed = F.scaled_dot_product_attention(self.query, keys, values, self.mask, 0.0, False, enable_gqa=grouped)
        return mixed[:, :, : self.count]


class DenseLayer:
    """One decoder layer: h = x + o(attend(rotate(qkv(norm(x))))), x' = h + down(silu(gate(norm(h))) * up(norm(h)))."""

    def __init__(
        self, config: DecoderConfig, tensors: TargetTensors, index: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        prefix = f"model.layers.{index}."
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.sections = (config.num_heads, 2 * config.num_kv_heads)
        self.rotated = config.num_heads + config.num_kv_heads
        self.grouped = config.num_heads != config.num_kv_heads

        def stacked(names: tuple[str, ...], has_bias: bool) -> Linear:
            def read(part: str) -> Tensor:
                return torch.cat([tensors.read(f"{prefix}{name}.{part}").to(dtype) for name in names]).to(device)

            return make_linear(read("weight"), read("bias") if has_bias else None)

        def norm(name: str) -> Norm:
            return make_norm(tensors.read_as(f"{prefix}{name}.weight", dtype, device), config.rms_norm_eps)

        self.qkv = stacked(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.attention_bias)
        self.output = stacked(("self_attn.o_proj",), config.attention_bias)
        self.gate_up = stacked(("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias)
        self.down = stacked(("mlp.down_proj",), config.mlp_bias)
        self.input_norm, self.mlp_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        self.qk_norm: Norm | None = None
        if config.qk_norm:
            query, key = (tensors.read_as(f"{prefix}self_attn.{name}.weight", dtype, device) for name in ("q_norm", "k_norm"))
            rows = torch.cat([query.expand(self.heads, -1), key.expand(self.kv_heads, -1)])
            self.qk_norm = make_norm(rows, config.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rows: Tensor,
        keys: Tensor,
        values: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        causal: bool,
        frame: RowFrame | None,
    ) -> Tensor:
        """x [N, H] with N = B * T -> [N, H]. `rows` [2, B, kv_heads, T, hd] takes the new K/V, which are also the last T
        rows of `keys` and `values` [B, kv_heads, n + T, hd] (whole tiles with a `frame`); mask [T, n + T] or None."""
        batch, count = rows.shape[1], rows.shape[3]
        qkv = self.qkv(self.input_norm(x)).view(batch, count, -1, self.head_dim)
        rotated = qkv.narrow(2, 0, self.rotated)
        query, new = qkv.split_with_sizes(self.sections, 2)
        if self.qk_norm is not None:
            rotated.copy_(self.qk_norm(rotated))
        rotate_(rotated, cos, sin)
        rows.copy_(new.view(batch, count, 2, self.kv_heads, self.head_dim).permute(2, 0, 3, 1, 4))
        query = query.transpose(1, 2)
        if frame is None:
            mixed = F.scaled_dot_product_attention(query, keys, values, mask, 0.0, causal, enable_gqa=self.grouped)
        else:
            mixed = frame.attend(query, keys, values, self.grouped)
        h = self.output(mixed.transpose(1, 2).reshape(batch * count, -1)).add_(x)
        gate, up = self.gate_up(self.mlp_norm(h)).chunk(2, dim=-1)
        return self.down(F.silu(gate, inplace=True) * up).add_(h)


class LeanTarget:
    """What every lean decoder does with its embedding, its LM head and its taps."""

    config: Any
    embedding: Tensor
    head_matrix: Tensor
    _head: Linear
    taps: tuple[int, ...]

    def bind_features(self, layer_ids: Sequence[int]) -> None:
        """Capture the residual stream after these layers, concatenated in this order."""
        self.taps = check_layer_ids(layer_ids, self.config.num_layers)

    def embed(self, tokens: Tensor) -> Tensor:
        """int [B, T] -> [B, T, H]."""
        return F.embedding(tokens, self.embedding)

    def head(self, hidden: Tensor) -> Tensor:
        """Final-normed [..., H] -> logits float32 [..., V]."""
        return self._head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1).to(torch.float32)

    def narrow_head(self, hidden: Tensor) -> Tensor:
        """`head` in the model's own dtype, for readers that widen what they read."""
        return self._head(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], -1)

    def head_rows(self, ids: Tensor) -> Tensor:
        """LM-head rows of ids int [...] -> [..., H]."""
        return F.embedding(ids, self.head_matrix)

    def head_weight(self) -> np.ndarray:
        """LM head, float32 [V, H]."""
        return self.head_matrix.to("cpu", torch.float32).numpy()


class DenseTarget(LeanTarget):
    """`protocols.Target` on a lean decoder."""

    record_routing = False  # no routers here

    def __init__(self, folder: Path, config: DecoderConfig, info: TargetInfo, tensors: TargetTensors | None = None) -> None:
        self.config, self.info = config, info
        self.dtype, self.device = getattr(torch, info.dtype), torch.device(info.device)
        self.arrays = TorchArrays(self.device)
        self.taps: tuple[int, ...] = ()
        tensors = tensors or TargetTensors(folder)
        tensors.check(config.tensors(), optional=frozenset({"lm_head.weight"}) if config.tied else frozenset())
        with torch.no_grad():
            self._load(tensors)

    def _load(self, tensors: TargetTensors) -> None:
        config = self.config
        self.embedding = tensors.read_as("model.embed_tokens.weight", self.dtype, self.device)
        if not config.tied:
            self.head_matrix = tensors.read_as("lm_head.weight", self.dtype, self.device)
        else:
            self.head_matrix = self.embedding
            if "lm_head.weight" in tensors.shapes and not torch.equal(
                tensors.read("lm_head.weight"), tensors.read("model.embed_tokens.weight")
            ):
                raise CheckpointError(
                    f"{tensors.folder}: config.json ties the LM head to the embedding, but lm_head.weight differs from it; "
                    "set tie_word_embeddings to false or drop the tensor"
                )
        self._head = make_linear(self.head_matrix)
        self.layers = [DenseLayer(config, tensors, index, self.dtype, self.device) for index in range(config.num_layers)]
        self.norm = make_norm(tensors.read_as("model.norm.weight", self.dtype, self.device), config.rms_norm_eps)
        frequencies, factor = config.frequencies()
        self.rotary = RotaryTables(torch.from_numpy(frequencies), factor, self.dtype, self.device)

    def make_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """Empty cache for `batch` sequences of up to `capacity` tokens (committed plus one block)."""
        config = self.config
        self.rotary.grow(capacity)
        return KVCache(config.num_layers, config.num_kv_heads, capacity, config.head_dim, self.dtype, self.device, batch)

    @torch.inference_mode()
    def prefill(self, cache: KVCache, tokens: Tensor, *, chunk: int) -> Prefill:
        """Append tokens [B, T], `chunk` at a time; see `protocols.Prefill`. Only the last row meets the LM head."""
        if chunk < 1 or tokens.shape[1] < 1:
            raise DSpineError(f"prefill needs a chunk and a prompt of at least 1 token, got {chunk} and {tokens.shape[1]}")
        pieces: list[Tensor] = []
        hidden = tokens
        for piece in tokens.split(chunk, dim=1):
            hidden, features = self._forward(cache, piece)
            cache.commit(piece.shape[1])
            if features is not None:
                pieces.append(features)
        logits = self.head(self.norm(hidden[:, -1]))
        return Prefill(logits, torch.cat(pieces, dim=1) if pieces else None)

    def begin(self, cache: KVCache, tokens: Tensor) -> StageZero:
        """Dense: nothing to run before the length is known."""
        return StageZero(tokens, None)

    @torch.inference_mode()
    def finish(self, cache: KVCache, stage: StageZero, w: int) -> Verification:
        """Run the first `w` tokens behind the committed ones; they are pending until `commit`."""
        if not 1 <= w <= stage.tokens.shape[1]:
            raise DSpineError(f"verification of {w} tokens, but the block holds {stage.tokens.shape[1]}")
        hidden, features = self._forward(cache, stage.tokens[:, :w])
        return Verification(self.head(self.norm(hidden)), features)

    def commit(self, cache: KVCache, verification: Any, m: int) -> None:
        """Keep the first `m` tokens of the block; the rest is scratch that the next block overwrites."""
        cache.commit(m)

    def _forward(self, cache: KVCache, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """tokens [B, T] behind the committed ones -> residual stream [B, T, H] after the last layer, and the features."""
        batch, count = tokens.shape
        if batch != cache.batch:
            raise DSpineError(f"tokens of {batch} sequences, but the cache holds {cache.batch}")
        cache.reserve(count)
        past = cache.length
        cos, sin = self.rotary.rows(past, count)
        framed = self.device.type == "cpu" and count <= ROWS
        causal = not framed and past == 0 and count > 1  # the whole context is this piece: no mask to build
        mask = None if causal or framed else causal_mask(past, count, self.dtype, self.device)
        keys, values = cache.visible(whole_tiles=framed)
        frame = None
        if framed:
            config = self.config
            frame = RowFrame(past, count, keys[0].shape[2], batch, config.num_heads, config.head_dim, self.dtype)
        x = F.embedding(tokens.reshape(-1), self.embedding)
        captured: dict[int, Tensor] = {}
        for index, (layer, rows, key, value) in enumerate(zip(self.layers, cache.pending_rows(), keys, values, strict=True)):
            x = layer.forward(x, rows, key, value, cos, sin, mask, causal, frame)
            if index in self.taps:
                captured[index] = x
        features = torch.cat([captured[i] for i in self.taps], dim=-1).view(batch, count, -1) if self.taps else None
        return x.view(batch, count, -1), features
