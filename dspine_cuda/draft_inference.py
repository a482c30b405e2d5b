"""The drafter's layers as inference runs them: fused weights, packed once, injection in place.

Same equations as `DrafterModel.forward_block` and `common.injection` (tests compare them); here the products of one input
are one product (q, k, v; gate and up; G_q, G_p and A; K/V of all layers for the context), and on CPUs the weights lie in
oneDNN's own order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspine_cuda.targets.layers import can_pack, make_linear, make_norm, rotate_

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def _stacked(linears: list[Any], share: bool = False) -> Any:
    """One product for several `nn.Linear`s of the same input. share: keep one copy of the weights, see `_share`."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([linear.bias.detach() for linear in linears])
    if share:
        _share(linears, weight)  # first: the product may make a copy of its own
    return make_linear(weight, bias)


def _single(linear: Any, share: bool = False) -> Any:
    weight = linear.weight.detach()
    if share:
        _share([linear], weight)
    return make_linear(weight, None if linear.bias is None else linear.bias.detach())


def _share(linears: list[Any], weight: Tensor) -> None:
    """The modules' weights become views of the stacked one; where the product keeps a reordered copy (CPU, bfloat16), they
    become empty: the module then has its dtype and device, and runs only through the products."""
    packed, start = can_pack(weight.dtype, weight.device), 0
    for linear in linears:
        stop = start + linear.weight.shape[0]
        linear.weight = nn.Parameter(weight.new_empty(0) if packed else weight[start:stop], requires_grad=False)
        start = stop


def _norm(norm: Any) -> Any:
    return make_norm(norm.weight.detach(), norm.eps)


def signed_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables [1, P, hd] as `rotate_` wants them: [P, 1, hd], the sign of the first half in sin."""
    half = sin.shape[-1] // 2
    signed = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    return cos[0].unsqueeze(1), signed[0].unsqueeze(1)


class LeanLayer:
    """One drafter layer over block rows [B, R, H]."""

    def __init__(self, layer: Any, share: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.heads, self.kv_heads, self.head_dim = attention.heads, attention.kv_heads, attention.head_dim
        self.qkv = _stacked([attention.q_proj, attention.k_proj, attention.v_proj], share)
        self.output, self.down = _single(attention.o_proj, share), _single(mlp.down_proj, share)
        self.gate_up = _stacked([mlp.gate_proj, mlp.up_proj], share)
        self.input_norm, self.mlp_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        query, key = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        rows = torch.cat([query.expand(self.heads, -1), key.expand(self.kv_heads, -1)])
        self.qk_norm = make_norm(rows, attention.q_norm.eps)
        self.attention_conv, self.mlp_conv = layer.attention_conv, layer.mlp_conv

    def forward(self, index: int, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """h [B, R, H] -> u [B, R, H], a new tensor."""
        batch, rows, hidden = h.shape
        flat = h.reshape(-1, hidden)
        normed, after = self.input_norm(flat), None
        if self.attention_conv is not None:
            normed, after = self.attention_conv.prepare(normed.view_as(h))
        qkv = self.qkv(normed.reshape(-1, hidden)).view(batch, rows, -1, self.head_dim)
        rotated = rotate_(self.qk_norm(qkv[:, :, : self.heads + self.kv_heads]), cos, sin).transpose(1, 2)
        value = qkv[:, :, self.heads + self.kv_heads :].transpose(1, 2)
        mixed = attend(index, rotated[:, : self.heads], rotated[:, self.heads :], value)
        mixed = self.output(mixed.transpose(1, 2).reshape(batch * rows, -1))
        if after is not None:
            mixed = self.attention_conv.finish(mixed.view_as(h), after).reshape(-1, hidden)
        flat = mixed.add_(flat)
        normed, after = self.mlp_norm(flat), None
        if self.mlp_conv is not None:
            normed, after = self.mlp_conv.prepare(normed.view_as(h))
        gate, up = self.gate_up(normed.reshape(-1, hidden)).chunk(2, dim=-1)
        down = self.down(F.silu(gate) * up)
        if after is not None:
            down = self.mlp_conv.finish(down.view_as(h), after).reshape(-1, hidden)
        return down.add_(flat).view(batch, rows, hidden)


class LeanInjection:
    """Injection of all layers: z of the rows, then one product for [G_q; G_p; A]."""

    def __init__(self, injection: Any) -> None:
        self.readouts = [_single(linear) for linear in injection.readouts]
        self.writes = [_single(linear) for linear in injection.writes]
        self.gates = _stacked([injection.receiver_gate, injection.predecessor_gate, injection.message])
        self.bias = injection.bias.detach()
        self.size = self.bias.shape[0]
        self.second = None if injection.second is None else injection.second.detach()

    def apply_(self, index: int, u: Tensor, anchor_code: Tensor) -> Tensor:
        """Write into rows 1.. of u [B, R, H] in place; anchor_code sqrt(r) C_x0 [B, r]."""
        batch, rows, hidden = u.shape
        z = self.readouts[index](u.view(-1, hidden)).to(torch.float32)
        norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        z = z.mul_(z.shape[-1] ** 0.5 / torch.where(norm > 0, norm, 1.0)).to(u.dtype).view(batch, rows, -1)
        z[:, 0] = anchor_code  # the anchor sends its known-token form, and receives nothing
        gates = self.gates(z.view(batch * rows, -1)).view(batch, rows, 3 * self.size)
        receiver, predecessor, message = (
            gates[:, 1:, : self.size],
            gates[:, :-1, self.size : -self.size],
            gates[:, :-1, -self.size :],
        )
        gated = torch.sigmoid(receiver + predecessor + self.bias).mul_(message)
        if self.second is not None:  # what the predecessor heard; row 1's predecessor is the anchor, which hears nothing
            again = torch.sigmoid(receiver[:, 1:] + predecessor[:, :-1] + self.bias).mul_(message[:, :-1])
            gated[:, 1:].addcmul_(again, self.second)
        target = u[:, 1:]
        rms = torch.linalg.vector_norm(target.to(torch.float32), dim=-1, keepdim=True).mul_(hidden**-0.5).to(u.dtype)
        written = self.writes[index](gated.reshape(-1, self.size)).view(batch, rows - 1, hidden)
        target.addcmul_(rms, written)
        return u


class LeanDraft:
    """Everything of a `DrafterModel` that a round runs, built once from its weights."""

    def __init__(self, model: Any, *, share: bool = False) -> None:
        """share: this is the model's only user, so its large weights need not lie in memory twice."""
        layers = list(model.layers)
        self.context_kv = _stacked([linear for layer in layers for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj)])
        self.layers = [LeanLayer(layer, share) for layer in layers]
        self.kv_heads, self.head_dim = self.layers[0].kv_heads, self.layers[0].head_dim
        self.injection = LeanInjection(model.injection) if model.injection is not None else None
        self.norm = _norm(model.norm)
        self.keeps_two = model.config.dspine is not None and model.config.dspine.refined_layers == 2
        self.fc, self.hidden_norm = _single(model.fc, share), _norm(model.hidden_norm)
        keys = torch.stack([layer.self_attn.k_norm.weight.detach() for layer in layers])[:, None].expand(-1, self.kv_heads, -1)
        self.key_norm = make_norm(keys, layers[0].self_attn.k_norm.eps)

    def context(self, features: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """K/V of all layers for context tokens: features [B, T, F], tables [T, 1, hd] -> [L, 2, B, kv_heads, T, hd]."""
        batch, count = features.shape[:2]
        context = self.hidden_norm(self.fc(features.reshape(batch * count, -1)))
        both = self.context_kv(context).view(batch, count, len(self.layers), 2, self.kv_heads, self.head_dim)
        keys = rotate_(self.key_norm(both[:, :, :, 0]), cos.unsqueeze(1), sin.unsqueeze(1))
        return torch.stack([keys, both[:, :, :, 1]], dim=3).permute(2, 3, 0, 4, 1, 5)

    def block(
        self, embeddings: Tensor, cos: Tensor, sin: Tensor, attend: Attend, anchor_code: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """embeddings [B, R, H] -> (norm(h_L), u_L), both [B, R, H]; tables [R, 1, hd] at the rows' positions. With two refined
        layers the second is [u_L, u_{L-1}], [B, R, 2H]."""
        h = pre = earlier = embeddings
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            earlier, pre = pre, layer.forward(index, h, cos, sin, attend)
            h = pre
            if self.injection is not None and anchor_code is not None:
                kept = index == last or (self.keeps_two and index == last - 1)
                h = self.injection.apply_(index, h.clone() if kept else h, anchor_code)
        if self.keeps_two:
            pre = torch.cat([pre, earlier], dim=-1)
        return self.norm(h.reshape(-1, h.shape[-1])).view_as(h), pre
