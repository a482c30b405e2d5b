"""A Gated-DeltaNet layer of mlx-lm, driven through the core's operations: projections and output are the loaded modules',
the recurrence is ours. Letters as in `common/gdn`.

Two ways through a layer: a block of up to 16 tokens that may be rolled back (`project`, then `gdn_verify`, compact factors
kept), and a prompt, where nothing is rolled back (`prefill`: a state goes in and comes out).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.gated_delta import gated_delta_kernel

from dspine.common.gdn import GdnFactors, GdnInputWeights, GdnLayout, GdnTokens, gdn_inputs, gdn_verify
from dspine_mlx.arrays import device_name

_BLOCK = 16  # tokens solved at once in a prompt


@dataclass(frozen=True)
class GdnLayer:
    """One layer: mlx-lm's module, its head layout, and its small weights as the core wants them."""

    module: Any
    layout: GdnLayout
    weights: GdnInputWeights

    @property
    def window(self) -> int:
        """Rows of the convolution window: its width less one."""
        return self.weights.conv.shape[1] - 1


@dataclass(frozen=True)
class BlockTrace:
    """What one layer leaves of a block: its compact factors and its pre-convolution inputs [B, w, C]."""

    factors: GdnFactors
    inputs: mx.array

    def first(self, count: int) -> BlockTrace:
        """The first `count` tokens."""
        z, k, g = (x[:, :count] for x in (self.factors.z, self.factors.k, self.factors.g))
        return BlockTrace(GdnFactors(z, k, g), self.inputs[:, :count])


def wrap_gdn(module: Any) -> GdnLayer:
    """`linear_attn` of a decoder layer. The convolution is kept as [C, width]: a view of [C, width, 1]."""
    layout = GdnLayout(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)
    conv = mx.squeeze(module.conv1d.weight, axis=-1)
    weights = GdnInputWeights(conv, module.A_log, module.dt_bias, module.conv1d.get("bias"))
    mx.eval([x for x in (conv, weights.decay_log, weights.dt_bias, weights.conv_bias) if x is not None])
    return GdnLayer(module, layout, weights)


def verify(layer: GdnLayer, x: mx.array, window: mx.array, state: mx.array) -> tuple[mx.array, BlockTrace]:
    """w = 1..16 tokens, x [B, w, H] normed: the layer's output [B, w, H] and the trace; window and state are only read."""
    inputs, z, a, b = _project(layer, x)
    tokens = gdn_inputs(inputs, window, a, b, layer.weights, layer.layout)
    out, factors = gdn_verify(tokens.q, tokens.k, tokens.v, tokens.log_decay, tokens.beta, state)
    return _output(layer, out, z), BlockTrace(factors, inputs)


def prefill(layer: GdnLayer, x: mx.array, window: mx.array, state: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Any number of prompt tokens, x [B, T, H] normed: (output [B, T, H], window, state) after all of them."""
    inputs, z, a, b = _project(layer, x)
    tokens = gdn_inputs(inputs, window, a, b, layer.weights, layer.layout)
    out, state = recurrence(tokens, state)
    joined = mx.concatenate([window, inputs], axis=1)
    return _output(layer, out, z), joined[:, joined.shape[1] - layer.window :], state


def recurrence(tokens: GdnTokens, state: mx.array) -> tuple[mx.array, mx.array]:
    """Outputs [B, T, Hv, Dv] and the last state [B, Hv, Dv, Dk] of T tokens: mlx-lm's kernel on Metal, where it can, else
    blocks of 16. Both have the state in one layout, and both take decay and write strength in float32."""
    if device_name() == "metal" and tokens.k.shape[-1] % 32 == 0:
        return gated_delta_kernel(tokens.q, tokens.k, tokens.v, mx.exp(tokens.log_decay), tokens.beta, state)
    return blocks(tokens, state)


def blocks(tokens: GdnTokens, state: mx.array) -> tuple[mx.array, mx.array]:
    """The same by blocks of 16 tokens (`algorithms` 3, equations 3, 10 and 7): H is solved for all blocks at once, against
    the values and against the decayed keys; then only four products a block follow the state. Computed in float32."""
    count, value_heads = tokens.v.shape[1:3]
    q, k, v = (_in_blocks(x.astype(mx.float32), value_heads) for x in (tokens.q, tokens.k, tokens.v))  # [B, Hv, n, 16, D]
    log_decay, beta = (_in_blocks(x[..., None], value_heads) for x in (tokens.log_decay, tokens.beta))  # [B, Hv, n, 16, 1]
    g = mx.cumsum(log_decay, axis=-2)
    between = _decay_between(g[..., 0])
    decay = mx.exp(g)
    solved = _substitute(beta * between * (k @ k.swapaxes(-1, -2)), beta * mx.concatenate([v, decay * k], axis=-1))
    mixing, queries = between * (q @ k.swapaxes(-1, -2)), decay * q
    last = g[..., -1:, :]
    kept, carry = mx.exp(last - g) * k, mx.exp(last)
    outs = []
    for i in range(q.shape[2]):
        values, keys = solved[:, :, i, :, : v.shape[-1]], solved[:, :, i, :, v.shape[-1] :]
        z = values - keys @ state.swapaxes(-1, -2)
        outs.append(queries[:, :, i] @ state.swapaxes(-1, -2) + mixing[:, :, i] @ z)
        state = carry[:, :, i] * state + z.swapaxes(-1, -2) @ kept[:, :, i]
    out = mx.concatenate(outs, axis=2)[:, :, :count]
    return out.swapaxes(1, 2).astype(tokens.v.dtype), state


def _project(layer: GdnLayer, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """(pre-convolution inputs [B, T, C], output gate z [B, T, Hv, Dv], a, b [B, T, Hv]): separate projections in Qwen3.5,
    fused ones in Qwen3-Next."""
    module, (batch, count, _) = layer.module, x.shape
    if "in_proj_qkvz" in module:
        q, k, v, z, b, a = module.fix_query_key_value_ordering(module.in_proj_qkvz(x), module.in_proj_ba(x))
        return mx.concatenate([mx.reshape(part, (batch, count, -1)) for part in (q, k, v)], axis=-1), z, a, b
    z = mx.reshape(module.in_proj_z(x), (batch, count, layer.layout.value_heads, layer.layout.value_dim))
    return module.in_proj_qkv(x), z, module.in_proj_a(x), module.in_proj_b(x)


def _output(layer: GdnLayer, out: mx.array, z: mx.array) -> mx.array:
    """out, z [B, T, Hv, Dv] -> [B, T, H]: gated norm and output projection of the module."""
    return layer.module.out_proj(mx.reshape(layer.module.norm(out, z), (*out.shape[:2], -1)))


def _in_blocks(x: mx.array, value_heads: int) -> mx.array:
    """[B, T, heads, D] -> [B, Hv, n, 16, D]: key heads repeated, the end padded with zeros (no decay, nothing written)."""
    batch, count, heads, size = x.shape
    x = mx.pad(x, [(0, 0), (0, -count % _BLOCK), (0, 0), (0, 0)])
    x = mx.repeat(x, value_heads // heads, axis=2) if heads != value_heads else x
    return mx.reshape(x, (batch, -1, _BLOCK, value_heads, size)).transpose(0, 3, 1, 2, 4)


def _decay_between(g: mx.array) -> mx.array:
    """e^{g_i - g_j} for j <= i, else 0: [..., 16] -> [..., 16, 16]; masked before the exponential, which may overflow."""
    lower = mx.tri(_BLOCK, dtype=mx.float32) > 0
    difference = mx.where(lower, g[..., :, None] - g[..., None, :], 0.0)
    return mx.where(lower, mx.exp(difference), 0.0)


def _substitute(matrix: mx.array, right: mx.array) -> mx.array:
    """Solve (I + strict lower part of `matrix` [..., 16, 16]) Z = `right` [..., 16, D], one row after another."""
    solved = right[..., :1, :]
    for i in range(1, _BLOCK):
        row = right[..., i : i + 1, :] - matrix[..., i : i + 1, :i] @ solved
        solved = mx.concatenate([solved, row], axis=-2)
    return solved
