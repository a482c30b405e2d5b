"""A drafter's round over fixed shapes: the block behind device-side lengths, injection and transition cache included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspine.common.attention import block_attention, context_inputs
from dspine.common.injection import injection_messages, injection_write
from dspine.common.masks import MaskRule
from dspine.common.norms import RMSNorm, add_rms_norm
from dspine.common.protocols import DraftRequest, Proposal
from dspine.common.registry import find_kernel
from dspine.common.stepping import enter_block
from dspine.common.transition import candidate_scores
from dspine_cuda.draft_inference import LeanLayer, signed_tables
from dspine_cuda.drafter import BlockStates, TorchDrafter
from dspine_cuda.static.arena import Arena
from dspine_cuda.static.steps import Where, feed_forward, few_rows, gated, place_inputs, put


def refusal(drafter: Any) -> str | None:
    """Why this drafter cannot run statically; None where it can."""
    if not isinstance(drafter, TorchDrafter):
        return f"a drafter of class {type(drafter).__name__} has no static form"
    rows = drafter.config.query_rows
    for rule in drafter.rules:
        if not fits(rule, rows):
            return f"its attention rule ({rule}) is not one of block_attention's for {rows} rows"
    return None


def fits(rule: MaskRule, rows: int) -> bool:
    """Whether `block_attention(causal, window)` is this rule for blocks of `rows`: a window that reaches over the whole block
    limits only the context, in the way `MaskRule.context` does it."""
    return rule.window is None or (not rule.anchored and rule.window >= rows)


class StaticDrafter:
    """`propose` and `commit` of a `TorchDrafter` on an arena; nothing is read by the host.

    The layers are those of `draft_inference`, through the operations of few launches: a residual sum runs with the norm behind
    it, injection included.
    """

    def __init__(self, drafter: TorchDrafter, arena: Arena) -> None:
        assert arena.draft_cache is not None
        self.drafter, self.arena, self.config = drafter, arena, drafter.config
        store = arena.draft_cache._store
        self.stores = store.unbind(0)
        cos, sin = signed_tables(*drafter.model.rope(store.shape[4]))
        self.cos, self.sin = cos[:, 0].contiguous(), sin[:, 0].contiguous()
        # what `embed_block` makes of a mask token, whatever it is scaled by or replaced with
        self.fill = drafter.embed_block(torch.zeros_like(arena.anchor[:1]))[0][0, 1].clone()
        self.table, self.codes = drafter.target.embedding.to(self.fill.dtype), drafter.known_codes
        self.full = torch.full_like(arena.lengths, self.config.query_rows)
        self.scale = self.config.head_dim**-0.5
        lean, injection = drafter.lean, drafter.model.injection
        self.key_norms = [RMSNorm(weight.contiguous(), lean.key_norm.eps) for weight in lean.key_norm.weight]
        self.key_weight = lean.key_norm.weight.contiguous()
        self.injections = [] if injection is None else [injection.layer(index) for index in range(len(lean.layers))]

    def propose(self, request: DraftRequest) -> Proposal:
        """A block behind the committed tokens of every slot, from the arena's anchors."""
        arena, rows = self.arena, self.config.query_rows
        embeddings, code = enter_block(self.table, arena.anchor, self.fill, rows, self.codes, self.config.input_embedding_scale)
        live = self.full * (arena.remaining > 0) if arena.is_shared else self.full  # an idle slot may be reading its prompt
        hidden, pre, heard = self._block(embeddings, Where(arena.lengths, live, self.cos, self.sin, rows), code)
        shape = (arena.shape.batch, 1, rows, -1)
        states = BlockStates(hidden.view(shape), pre.view(shape), [], None if heard is None else heard.view(shape))
        return self.drafter.proposal(states, code, arena.anchor, request)

    def _block(self, embeddings: Tensor, where: Where, code: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(norm(h_L), u_L), both [N, H], of embeddings [B, R, H]; of two refined layers [u_L, u_{L-1}], [N, 2H]. And what the
        last layer's rows heard of themselves, where the transition scores take it."""
        lean = self.drafter.lean
        norms = [*(layer.input_norm for layer in lean.layers[1:]), lean.norm]
        entry, normed = add_rms_norm(embeddings.reshape(-1, embeddings.shape[-1]), None, lean.layers[0].input_norm)
        pre = earlier = entry
        heard = None
        for index, (layer, norm) in enumerate(zip(lean.layers, norms, strict=True)):
            residual, update = self._layer(index, layer, entry, normed, where)
            earlier = pre
            if code is None:
                pre, normed = add_rms_norm(residual, update, norm)
                entry = pre
            else:
                # the sum only; unlike torch's own, this launch may start under the one in front
                pre, _ = add_rms_norm(residual, update, norm)
                entry, normed, heard = self._inject(index, pre, where, code, norm)
        return normed, torch.cat([pre, earlier], dim=-1) if lean.keeps_two else pre, heard

    def _inject(self, index: int, pre: Tensor, where: Where, code: Tensor, norm: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """(h, its norm) of u [N, H]; of the last layer also what rows heard of themselves, if `candidate_scores` has a kernel:
        without one it would gather the rows that `transition_scores` is given."""
        injection, weights = self.drafter.lean.injection, self.injections[index]
        block = (where.batch, where.count, -1)
        if injection.second is not None:  # two hops: the eager steps
            return *add_rms_norm(injection.apply_(index, pre.clone().view(block), code).view(pre.shape), None, norm), None
        raw = few_rows(injection.readouts[index], pre).view(block)
        last = index == len(self.injections) - 1 and not self.drafter.lean.keeps_two
        heard = None
        if last and find_kernel(candidate_scores.__name__, pre) is not None:
            gated, heard = injection_messages(raw, code, weights, True)
        else:
            gated = injection_messages(raw, code, weights)
        return *injection_write(pre, gated.view(pre.shape[0], -1), weights.write, norm), heard

    def _layer(self, index: int, layer: LeanLayer, entry: Tensor, normed: Tensor, where: Where) -> tuple[Tensor, Tensor]:
        """(residual stream before the MLP's sum, the MLP's output), [N, H] each, of the stream [N, H] and its norm."""
        block = (where.batch, where.count, -1)
        normed, after = _prepared(layer.attention_conv, normed, block)
        projected = few_rows(layer.qkv, normed).view(where.batch, where.count, -1, layer.head_dim)
        store, rule = self.stores[index], self.drafter.rules[index]
        query = place_inputs(projected, store, where, layer.heads, layer.qk_norm)
        mixed = block_attention(query, store[0], store[1], where.lengths, self.scale, rule.causal, rule.window)
        mixed = mixed.reshape(entry.shape[0], -1)
        if layer.attention_conv is None and layer.mlp_conv is None:
            return feed_forward(layer, entry, mixed)
        mixed = _finished(layer.attention_conv, few_rows(layer.output, mixed), after, block)
        residual, normed = add_rms_norm(entry, mixed, layer.mlp_norm)
        normed, after = _prepared(layer.mlp_conv, normed, block)
        return residual, _finished(layer.mlp_conv, few_rows(layer.down, gated(layer.gate_up, normed)), after, block)

    def commit(self, features: Tensor, m: Tensor, lengths: Tensor) -> None:
        """Context K/V of the first m int32 [B] of features [B, w, F], behind `lengths` int32 [B] committed tokens."""
        batch, count = features.shape[:2]
        lean, where = self.drafter.lean, Where(lengths, m, self.cos, self.sin, count)
        flat = features.reshape(batch * count, -1).to(self.stores[0].dtype)
        _, normed = add_rms_norm(few_rows(lean.fc, flat), None, lean.hidden_norm)
        rows = few_rows(lean.context_kv, normed)
        rows = rows.view(batch, count, len(lean.layers), 2 * lean.kv_heads, lean.head_dim)
        if find_kernel(context_inputs.__name__, rows) is not None:  # the core's own code would copy the whole store
            store = self.arena.draft_cache._store  # type: ignore[union-attr]
            given = rows, self.cos, self.sin, lengths, m, store, self.key_weight, lean.key_norm.eps
            put((store, context_inputs(*given)))
            return
        for index, (store, norm) in enumerate(zip(self.stores, self.key_norms, strict=True)):
            place_inputs(rows[:, :, index], store, where, 0, norm)


def _prepared(conv: Any, normed: Tensor, block: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """DFlash2's convolution in front of a sublayer, where there is one: [N, H] -> ([N, H], the kernel behind it)."""
    if conv is None:
        return normed, None
    made, after = conv.prepare(normed.view(block))
    return made.reshape(normed.shape), after


def _finished(conv: Any, output: Tensor, after: Tensor | None, block: tuple[int, ...]) -> Tensor:
    """The convolution behind a sublayer's output [N, H]."""
    return output if after is None else conv.finish(output.view(block), after).reshape(output.shape)
