"""Token mixers of the hybrid decoders: gated attention over K/V, and Gated DeltaNet over a state and a short window."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.gdn import GdnFactors, gdn_inputs, gdn_verify
from dspine.common.gdn_prefill import gdn_prefill
from dspine_cuda.cpu_gdn import PreparedInputWeights
from dspine_cuda.hybrid_cache import HybridCache
from dspine_cuda.targets.dense import ROWS, RowFrame, causal_mask
from dspine_cuda.targets.exact import make_exact_linear, make_wide_norm
from dspine_cuda.targets.hybrid_config import HybridConfig
from dspine_cuda.targets.hybrid_tensors import HybridTensors
from dspine_cuda.targets.layers import RotaryTables, rotate_


@dataclass(frozen=True)
class Kept:
    """What a GDN layer leaves of a block: factors ([B, w, ...]) and the inputs of the convolution [B, w, C]."""

    factors: GdnFactors
    inputs: Tensor

    def first(self, w: int) -> Kept:
        """Of the first `w` tokens."""
        if w == self.inputs.shape[1]:
            return self
        z, k, g = (x[:, :w] for x in (self.factors.z, self.factors.k, self.factors.g))
        return Kept(GdnFactors(z, k, g), self.inputs[:, :w])


class Block:
    """`count` tokens behind the committed ones of `cache` (already reserved), and what all layers share about them."""

    def __init__(self, cache: HybridCache, config: HybridConfig, rotary: RotaryTables, count: int, dtype: torch.dtype) -> None:
        self.cache, self.config, self.count, self.dtype = cache, config, count, dtype
        self.batch, self.past, self.device = cache.batch, cache.length, cache.states.device
        self.rotary = rotary
        self.framed = self.device.type == "cpu" and count <= ROWS
        self.causal = not self.framed and self.past == 0 and count > 1

    @property
    def longest(self) -> int:
        """Rows of the rectangle that a commit may want."""
        return self.count

    @cached_property
    def angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin [count, 1, rotary_dim]."""
        return self.rotary.rows(self.past, self.count)

    @cached_property
    def rows(self) -> tuple[Tensor, ...]:
        """Where K/V of the block go, an attention layer at a time."""
        return self.cache.kv.pending_rows()

    @cached_property
    def visible(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """K and V of everything up to the block's end, an attention layer at a time."""
        return self.cache.kv.visible(whole_tiles=self.framed)

    @cached_property
    def mask(self) -> Tensor | None:
        """Additive mask of attention outside a frame."""
        return None if self.framed or self.causal else causal_mask(self.past, self.count, self.dtype, self.device)

    @cached_property
    def frame(self) -> RowFrame | None:
        """The CPU's fixed frame of rows (`dense.RowFrame`); None where attention runs without one."""
        if not self.framed:
            return None
        config, keys = self.config, self.visible[0][0].shape[2]
        return RowFrame(self.past, self.count, keys, self.batch, config.num_heads, config.head_dim, self.dtype)

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> Tensor:
        """Write K/V of the block ([B, T, kv_heads, hd]) into attention layer `index` of the cache and attend to everything up
        to the block's end: query [B, T, heads, hd] -> the same shape."""
        rows = self.rows[index]
        rows[0].copy_(key.transpose(1, 2))
        rows[1].copy_(value.transpose(1, 2))
        query, (keys, values) = query.transpose(1, 2), (side[index] for side in self.visible)
        if self.frame is not None:
            mixed = self.frame.attend(query, keys, values, grouped)
        else:
            mixed = F.scaled_dot_product_attention(query, keys, values, self.mask, 0.0, self.causal, enable_gqa=grouped)
        return mixed.transpose(1, 2)

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """Window [B, width-1, C] and state [B, Hv, Dv, Dk] of a GDN layer."""
        index = self.cache.gdn_index[layer]
        return self.cache.windows[index], self.cache.states[index]

    def rectangle(self, made: Tensor) -> Tensor:
        """Rows [N, C] as [B, T, C], T at least `count`. On the CPU T is 16, so that a row's bits and the calls' shapes do not
        depend on the count: rows behind the block hold nothing of use, and no row before them reads them."""
        made = made.view(self.batch, self.count, -1)
        return F.pad(made, (0, 0, 0, ROWS - self.count)) if self.framed and self.count < ROWS else made

    def flat(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [N, C]: the rows of the block."""
        return (x[:, : self.count] if self.count < x.shape[1] else x).reshape(self.batch * self.count, -1)


class AttentionMixer:
    """o(sigmoid(gate) * attend(rotate(norm(q)), rotate(norm(k)), v)); only the first `rotary_dim` of a head are rotated."""

    def __init__(
        self, config: HybridConfig, tensors: HybridTensors, layer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layer, self.heads, self.kv_heads, self.size = layer, config.num_heads, config.num_kv_heads, config.head_dim
        self.turned, self.gated = config.rotary_dim, config.gated_attention
        self.grouped = self.heads != self.kv_heads
        prefix = f"model.layers.{layer}.self_attn."

        def read(name: str) -> Tensor:
            return tensors.read(f"{prefix}{name}.weight")

        query = read("q_proj").to(dtype)
        parts = [query, read("k_proj").to(dtype), read("v_proj").to(dtype)]
        if self.gated:  # q_proj holds a query and a gate for each head in turn
            query, gate = query.view(self.heads, 2, self.size, -1).unbind(1)
            parts = [query.flatten(0, 1), *parts[1:], gate.flatten(0, 1)]
        self.project = make_exact_linear(torch.cat(parts).to(device))
        self.output = make_exact_linear(read("o_proj").to(dtype).to(device))
        norms = [read(name).to(torch.float32) + config.centred_norms for name in ("q_norm", "k_norm")]
        rows = torch.cat([norms[0].expand(self.heads, -1), norms[1].expand(self.kv_heads, -1)]).to(device)
        self.norm = make_wide_norm(rows, config.rms_norm_eps, dtype)

    def forward(self, x: Tensor, block: Block) -> Tensor:
        """x [N, H], normed -> [N, H]; writes the block's K/V into the cache."""
        batch, count, index = block.batch, block.count, block.cache.kv_index[self.layer]
        made = self.project(x).view(batch, count, -1, self.size)
        turned = self.heads + self.kv_heads
        both = self.norm(made[:, :, :turned])
        rotate_(both if self.turned == self.size else both[..., : self.turned], *block.angles)
        query, key, value = both[:, :, : self.heads], both[:, :, self.heads :], made[:, :, turned : turned + self.kv_heads]
        mixed = block.attend(index, query, key, value, self.grouped)
        if self.gated:
            mixed = mixed * made[:, :, turned + self.kv_heads :].sigmoid()
        return self.output(mixed.reshape(batch * count, -1))


class GdnMixer:
    """out(silu(z) * norm(gated delta rule(conv(qkv), a, b)))."""

    def __init__(
        self, config: HybridConfig, tensors: HybridTensors, layer: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layer, self.layout, self.dtype = layer, config.gdn, dtype
        prefix = f"model.layers.{layer}.linear_attn."

        def read(name: str) -> Tensor:
            return tensors.read(prefix + name)

        parts = _grouped_rows(read, config) if config.grouped_projections else [
            read(f"in_proj_{name}.weight") for name in ("qkv", "z", "b", "a")
        ]  # fmt: skip
        self.project = make_exact_linear(torch.cat([part.to(dtype) for part in parts]).to(device))
        layout = config.gdn
        values = layout.value_heads * layout.value_dim  # type: ignore[union-attr]
        self.sections = (layout.channels, values, layout.value_heads, layout.value_heads)  # type: ignore[union-attr]
        self.weights = PreparedInputWeights.make(
            conv=read("conv1d.weight").squeeze(1).to(dtype).to(device).contiguous(),
            decay_log=read("A_log").to(torch.float32).to(device),
            dt_bias=read("dt_bias").to(torch.float32).to(device),
        )
        weight = read("norm.weight").to(torch.float32).to(device)
        self.norm = make_wide_norm(weight, config.rms_norm_eps, torch.float32, half=dtype != torch.float32)
        self.output = make_exact_linear(read("out_proj.weight").to(dtype).to(device))

    def forward(self, x: Tensor, block: Block) -> tuple[Tensor, Kept]:
        """x [N, H], normed -> ([N, H], what a commit needs); reads the cache and changes nothing."""
        inputs, z, b, a = block.rectangle(self.project(x)).split_with_sizes(self.sections, 2)
        window, state = block.memory(self.layer)
        tokens = gdn_inputs(inputs, window, a, b, self.weights, self.layout)
        mixed, factors = gdn_verify(tokens.q, tokens.k, tokens.v, tokens.log_decay, tokens.beta, state)
        normed = block.flat(self._gated(mixed, z))
        return self.output(normed.to(self.dtype)), Kept(factors, inputs).first(block.longest)

    def prefill(self, x: Tensor, block: Block) -> Tensor:
        """The same for committed tokens: state and window of the cache move on."""
        cache, index = block.cache, block.cache.gdn_index[self.layer]
        out, cache.windows[index], cache.states[index] = self.read(x, cache.windows[index], cache.states[index])
        return out

    def read(self, x: Tensor, window: Tensor, state: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H], normed, N = B T tokens behind window [B, width-1, C] and state [B, Hv, Dv, Dk] -> ([N, H], window and state
        after them). live int [B]: rows from there on are padding, which may hold anything; window and state end before."""
        (batch, width), count = window.shape[:2], x.shape[0] // window.shape[0]
        inputs, z, b, a = self.project(x).view(batch, count, -1).split_with_sizes(self.sections, 2)
        tokens = gdn_inputs(inputs, window, a, b, self.weights, self.layout)
        parts = [tokens.q, tokens.k, tokens.v, tokens.log_decay, tokens.beta]
        joined = torch.cat((window, inputs), dim=1)
        if live is None:
            after = joined[:, -width:]
        else:  # without decay and write strength a row leaves the state as it was
            rows = torch.arange(count, device=x.device) < live[:, None]
            parts = [torch.where(rows.view(batch, count, *(1,) * (part.dim() - 2)), part, 0) for part in parts]
            last = (live[:, None] + torch.arange(width, device=x.device)).to(torch.int64)
            after = joined.gather(1, last[:, :, None].expand(-1, -1, joined.shape[2]))
        mixed, state = gdn_prefill(*parts, state, chunk=64 if count > 32 else 16)
        return self._out(mixed, z, count), after, state

    def _gated(self, mixed: Tensor, z: Tensor) -> Tensor:
        """Gated norm in float32: mixed [B, T, Hv, Dv], z [B, T, Hv Dv] -> [B, T, Hv, Dv]."""
        return self.norm(mixed).mul_(F.silu(z.to(torch.float32)).view(mixed.shape))

    def _out(self, mixed: Tensor, z: Tensor, count: int) -> Tensor:
        """Gated norm, then the output projection of the first `count` rows -> [N, H]."""
        normed = self._gated(mixed, z)
        if count < normed.shape[1]:
            normed = normed[:, :count]
        return self.output(normed.to(self.dtype).reshape(mixed.shape[0] * count, -1))


def _grouped_rows(read: object, config: HybridConfig) -> list[Tensor]:
    """Qwen3-Next's in_proj_qkvz and in_proj_ba, a key head at a time, as rows of q, k, v, z, b, a behind one another."""
    layout = config.gdn
    keys, values = layout.key_heads, layout.value_heads // layout.key_heads * layout.value_dim  # type: ignore[union-attr]
    wide = read("in_proj_qkvz.weight")  # type: ignore[operator]
    qkvz = wide.view(keys, -1, config.hidden_size).split([layout.key_dim] * 2 + [values] * 2, dim=1)  # type: ignore[union-attr]
    ba = read("in_proj_ba.weight").view(keys, 2, -1, config.hidden_size).unbind(1)  # type: ignore[operator]
    return [part.reshape(-1, config.hidden_size) for part in (*qkvz, *ba)]
