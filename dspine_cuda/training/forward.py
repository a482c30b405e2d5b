"""The drafter's training forward: many blocks of a packed row in one pass, on the modules of `dspine_cuda.drafter`.

Injection and refinement are spelled here in plain torch: same equations as `common.injection` and `common.conditioning`
(tests compare them), but traceable by torch.compile, never dispatched to an inference kernel without gradients, and with
finite gradients at zero (the derivative of a plain norm is not defined there).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.injection import InjectionWeights
from dspine.common.masks import MaskRule
from dspine_cuda.drafter import BlockStates, DrafterModel
from dspine_cuda.training.batches import Batch
from dspine_cuda.training.masks import FlexMasks, dense_mask, used_context
from dspine_cuda.training.target import masked_attention

Attention = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def safe_unit(x: Tensor) -> Tensor:
    """x / |x| over the last axis in at least float32; zero stays zero, with a finite gradient."""
    wide = x if x.dtype == torch.float64 else x.float()
    square = (wide * wide).sum(dim=-1, keepdim=True)
    return wide * torch.rsqrt(torch.where(square > 0, square, 1.0))


def readout_unit(hidden: Tensor, weight: Tensor) -> Tensor:
    """normalize(R u), at least float32: [..., H], [r, H] -> [..., r]."""
    return safe_unit(F.linear(hidden, weight))


def readout(hidden: Tensor, weight: Tensor) -> Tensor:
    """z = sqrt(r) normalize(R u), in the dtype of `hidden`."""
    return (readout_unit(hidden, weight) * weight.shape[0] ** 0.5).to(hidden.dtype)


def gated_message(receiver: Tensor, predecessor: Tensor, weights: InjectionWeights) -> Tensor:
    """g * m: [..., r] twice -> [..., a]."""
    gate = F.linear(receiver, weights.receiver_gate, weights.bias) + F.linear(predecessor, weights.predecessor_gate)
    return torch.sigmoid(gate) * F.linear(predecessor, weights.message)


def shifted(rows: Tensor, first: Tensor) -> Tensor:
    """[first, row_1, ..., row_{M-1}] of rows [..., M, r], first [..., r]."""
    return torch.cat([first.to(rows.dtype).unsqueeze(-2), rows[..., :-1, :]], dim=-2)


def message_of(
    receiver: Tensor, predecessor: Tensor, weights: InjectionWeights, second: Tensor | None, ordinary: Tensor | None = None
) -> Tensor:
    """g * m, and with `second` (s) that of the predecessor's own predecessor. `ordinary`: what rows hear without the known
    tokens, where `predecessor` holds those; the second hop always reads it."""
    gated = gated_message(receiver, predecessor, weights)
    if second is None:
        return gated
    heard = predecessor if ordinary is None else ordinary
    return gated + second * gated_message(receiver, shifted(heard, torch.zeros_like(heard[..., 0, :])), weights)


def rms_of(hidden: Tensor) -> Tensor:
    """RMS [..., 1] in the dtype of `hidden`, with a finite gradient at zero."""
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    square = (wide * wide).mean(dim=-1, keepdim=True)
    return torch.where(square > 0, torch.sqrt(torch.where(square > 0, square, 1.0)), 0.0).to(hidden.dtype)


def write_back(hidden: Tensor, gated: Tensor, weights: InjectionWeights) -> Tensor:
    """h = u + RMS(u) W (g * m)."""
    return hidden + rms_of(hidden) * F.linear(gated, weights.write)


def inject_rows(
    hidden: Tensor,
    anchor_code: Tensor,
    weights: InjectionWeights,
    replacement: tuple[Tensor, Tensor] | None = None,
    second: Tensor | None = None,
) -> Tensor:
    """`common.conditioning.inject_hops` in torch: hidden [B, N, 1+M, H], anchor_code [B, N, r]."""
    z = readout(hidden[..., 1:, :], weights.readout)
    predecessor = shifted(z, anchor_code)
    if replacement is not None:
        mask, codes = replacement
        predecessor = torch.where(mask, codes.to(hidden.dtype), predecessor)
    gated = message_of(z, predecessor, weights, second)
    return torch.cat([hidden[..., :1, :], write_back(hidden[..., 1:, :], gated, weights)], dim=-2)


def refine_rows(model: DrafterModel, pre_injection: Tensor, predecessor_code: Tensor) -> Tensor:
    """norm(write(u_L; correct predecessor)): [B, N, M, H] (two refined layers: [u_L, u_{L-1}], 2H), codes [B, N, M, r] of the
    correct predecessors, the anchor's first -> [B, N, M, H]. `common.conditioning.refined_rows` in torch."""
    injection, last, size = model.injection, model.config.num_layers - 1, model.config.hidden_size
    assert injection is not None
    weights, code = injection.layer(last), predecessor_code.to(pre_injection.dtype)
    hidden, before = pre_injection[..., :size], pre_injection[..., size:]
    receiver = readout(hidden, weights.readout)
    ordinary = shifted(receiver, code[..., 0, :])
    gated = message_of(receiver, code, weights, injection.second, ordinary)
    if before.shape[-1]:
        earlier = injection.layer(last - 1)
        own = readout(before, earlier.readout)
        change = gated_message(own, code, earlier) - gated_message(own, shifted(own, code[..., 0, :]), earlier)
        hidden = hidden + rms_of(before) * F.linear(change, earlier.write)
    return model.norm(write_back(hidden, gated, weights))


def codes_of(model: DrafterModel, tokens: Tensor) -> Tensor:
    """sqrt(r) C_x: int [...] -> [..., r]."""
    return model.transfer_codes[tokens] * model.transfer_codes.shape[1] ** 0.5


def pick_attention(kind: str, compiled: bool) -> Attention:
    """`sdpa` with a dense boolean mask, or `flex` with a BlockMask. flex without compilation would hold all scores, so it
    is compiled here, unless the caller compiles everything around it."""
    if kind == "sdpa":
        return masked_attention
    from torch.nn.attention.flex_attention import flex_attention

    function = flex_attention if compiled else torch.compile(flex_attention, dynamic=False)

    def attention(query: Tensor, key: Tensor, value: Tensor, mask: Any) -> Tensor:
        return function(query, key, value, block_mask=mask, enable_gqa=True)

    return attention


class MaskBuilder:
    """Masks of a batch, one for every distinct rule: dense, or flex BlockMasks over buffers that are kept."""

    def __init__(self, rules: tuple[MaskRule, ...], kind: str) -> None:
        self.rules, self.kind = rules, kind
        self._flex: FlexMasks | None = None

    def __call__(self, batch: Batch) -> list[Any]:
        """The mask of every layer."""
        layout = batch.layout
        if self.kind == "flex":
            if self._flex is None or self._flex.shape != tuple(layout.anchors.shape):
                self._flex = FlexMasks(self.rules, layout)
            masks = self._flex.update(layout)
        else:
            masks = {rule: dense_mask(rule, layout) for rule in dict.fromkeys(self.rules)}
        return [masks[rule] for rule in self.rules]


def block_states(
    model: DrafterModel,
    batch: Batch,
    features: Tensor,
    embedding: Tensor,
    masks: list[Any],
    attention: Attention,
    rope: tuple[Tensor, Tensor],
    replaced: bool,
) -> BlockStates:
    """All blocks of a packed batch.

    features [B, S, F]: context features (row-major with tokens); embedding [V, H]; masks: one a layer; rope: cos and sin
    [P, hd]; replaced: whether the curriculum is active at all. Returns states [B, N, R, H], every layer collected.
    """
    config = model.config
    used = used_context(batch.layout).unsqueeze(-1)  # a feature no block may see must not reach it, not even as 0 * NaN
    context = model.context(torch.where(used, features, 0).to(model.fc.weight.dtype))
    cos, sin = rope
    context_cos, context_sin = cos[batch.positions], sin[batch.positions]
    block_cos, block_sin = cos[batch.block_positions], sin[batch.block_positions]
    anchor_ids = batch.anchor_tokens.unsqueeze(-1)
    mask_ids = torch.full_like(anchor_ids, config.mask_token_id).expand(-1, -1, config.query_rows - 1)
    ids = torch.cat([anchor_ids, mask_ids], dim=-1)

    def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        context_key, context_value = model.layers[index].self_attn.key_value(context, context_cos, context_sin)
        keys, values = torch.cat([context_key, key], dim=2), torch.cat([context_value, value], dim=2)
        return attention(query, keys, values, masks[index])

    anchor_code, replacement = None, None
    if model.injection is not None:
        anchor_code = codes_of(model, batch.anchor_tokens)
        if replaced:
            replacement = (batch.replace[:, :, None, None], codes_of(model, predecessors(batch)))
    embeddings = embedding[ids].to(model.fc.weight.dtype)
    return model.forward_block(embeddings, block_cos, block_sin, attend, anchor_code, replacement, True, inject_rows)


def predecessors(batch: Batch) -> Tensor:
    """The correct token before every label: [anchor, y_1, ..., y_{M-1}], int [B, N, M]."""
    return torch.cat([batch.anchor_tokens.unsqueeze(-1), batch.labels[..., :-1]], dim=-1)
