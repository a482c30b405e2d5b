"""Drafters of the DFlash family in MLX (`algorithms` 1, `docs/formats.md`).

Names of modules are the checkpoint's. A block is [B, R, H]: R = block_size rows, the anchor first. Attention is handed
in, because only the caller knows where context K/V live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn

from dspine.common.checkpoints import DraftTensors, check_pair, expected_tensors
from dspine.common.conditioning import conditioned_scores, inject_hops
from dspine.common.configs import DrafterConfig, load_drafter_config
from dspine.common.errors import DSpineError
from dspine.common.injection import InjectionWeights
from dspine.common.mask_embedding import read_mask_embedding
from dspine.common.proposing import make_proposal, own_scale, restricted, scale_logits
from dspine.common.protocols import DraftRequest, Proposal
from dspine.common.rope import rope_tables
from dspine.common.transfer_space import known_token
from dspine.common.transition import refine, transition_scores
from dspine_mlx import ops
from dspine_mlx.compiled import COMMIT_LENGTHS, Parts, compiling_pays
from dspine_mlx.draft_cache import DraftCache
from dspine_mlx.draft_heads import GroupedConv, add_heads, draft_parts
from dspine_mlx.packed import pack_linears

Attend = Callable[[int, mx.array, mx.array, mx.array], mx.array]
Mask = mx.array | str | None


class DraftAttention(nn.Module):
    """Projections of one layer; q and k are normalised per head, then rotated."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, head, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, head
        self.q_proj = nn.Linear(hidden, self.heads * head, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * head, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * head, bias=bias)
        self.o_proj = nn.Linear(self.heads * head, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(head, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head, config.rms_norm_eps)

    def query(self, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
        """[B, T, H] -> rotated [B, heads, T, hd]; cos/sin [T, hd]."""
        q = self.q_norm(mx.unflatten(self.q_proj(x), -1, (self.heads, self.head_dim)))
        return rotate(mx.swapaxes(q, 1, 2), cos, sin)

    def key_value(self, x: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, mx.array]:
        """[B, T, H] -> rotated keys and values [B, kv_heads, T, hd]; x is a normed layer input or the context c."""
        k = self.k_norm(mx.unflatten(self.k_proj(x), -1, (self.kv_heads, self.head_dim)))
        v = mx.unflatten(self.v_proj(x), -1, (self.kv_heads, self.head_dim))
        return rotate(mx.swapaxes(k, 1, 2), cos, sin), mx.swapaxes(v, 1, 2)


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Half-split rotary embedding: x [B, heads, T, hd], cos/sin float32 [T, hd]; computed in float32, returned as x."""
    half = x.shape[-1] // 2
    turned = mx.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    return (x * cos + turned * sin).astype(x.dtype)


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One pre-norm layer over block rows."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.attention_conv = GroupedConv(config) if config.conv is not None else None
        self.mlp_conv = GroupedConv(config) if config.conv is not None else None


class Injection(nn.Module):
    """Parameters of the transfer space's readouts and of the gated write-back."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        assert config.dspine is not None
        rank, message, hidden = config.dspine.transfer_rank, config.dspine.message_size, config.hidden_size
        self.readouts = [nn.Linear(hidden, rank, bias=False) for _ in range(config.num_layers)]
        self.writes = [nn.Linear(message, hidden, bias=False) for _ in range(config.num_layers)]
        self.message = nn.Linear(rank, message, bias=False)
        self.receiver_gate = nn.Linear(rank, message, bias=False)
        self.predecessor_gate = nn.Linear(rank, message, bias=False)
        self.bias = mx.zeros(message)
        self.second = mx.zeros(message) if config.dspine.hops == 2 else None

    def layer(self, index: int) -> InjectionWeights:
        """The weights of one layer as the core's functions take them."""
        return InjectionWeights(
            readout=self.readouts[index].weight,
            write=self.writes[index].weight,
            message=self.message.weight,
            receiver_gate=self.receiver_gate.weight,
            predecessor_gate=self.predecessor_gate.weight,
            bias=self.bias,
        )


@dataclass(frozen=True)
class BlockStates:
    """hidden: norm(h_L); pre_injection: u_L of the last layer; layers: (u_l, h_l) of every layer where asked for; [B, R, H].
    With two refined layers pre_injection is [u_L, u_{L-1}] side by side, [B, R, 2H]."""

    hidden: mx.array
    pre_injection: mx.array
    layers: list[tuple[mx.array, mx.array]]


class DrafterModel(nn.Module):
    """The drafter's own weights; embedding and LM head are the target's and are handed in."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = [DraftLayer(config) for _ in range(config.num_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.injection = Injection(config) if config.dspine is not None else None
        add_heads(self, config)
        self._transfer_codes: mx.array | None = None
        self._draft_tokens: Any = None  # target ids it may propose, NumPy; None: all
        self._rope: tuple[mx.array, mx.array] | None = None

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of weights and activations."""
        return self.hidden_norm.weight.dtype

    @property
    def transfer_codes(self) -> mx.array:
        """C [V, r] in the dtype of the weights."""
        assert self._transfer_codes is not None
        return self._transfer_codes

    def bind_codes(self, codes: Any) -> None:
        """Keep C [V, r], cast now: only this thread could do it later."""
        self._transfer_codes = mx.array(codes).astype(self.dtype)
        mx.eval(self._transfer_codes)

    def context(self, features: mx.array) -> mx.array:
        """c = hidden_norm(fc(f)): [B, T, F] -> [B, T, H]; the same for every layer."""
        return self.hidden_norm(self.fc(features))

    def rope(self, length: int) -> tuple[mx.array, mx.array]:
        """cos and sin float32 [>= length, hd], grown by doubling; made from NumPy, so any thread may use them."""
        tables = self._rope
        if tables is None or tables[0].shape[0] < length:
            size = max(1024, 1 << (length - 1).bit_length())
            cos, sin = (mx.array(table) for table in rope_tables(self.config.rope, self.config.head_dim, size))
            tables = self._rope = (cos, sin)
        return tables

    def forward_block(
        self,
        embeddings: mx.array,
        cos: mx.array,
        sin: mx.array,
        attend: Attend,
        anchor_code: mx.array | None = None,
        replacement: tuple[mx.array, mx.array] | None = None,
        collect: bool = False,
        parts: Parts | None = None,
    ) -> BlockStates:
        """All layers over one block.

        embeddings [B, R, H] of [anchor, mask, ...]; cos/sin [R, hd] at the rows' absolute positions; `attend(layer, q, k,
        v)` gets q [B, heads, R, hd] and the block's own k, v [B, kv_heads, R, hd], returns [B, heads, R, hd]; anchor_code
        sqrt(r) C_x0 [B, r] (DSpine); replacement as `injection.inject` takes it, in layers below `replacement_layers`.
        """
        parts = parts or Parts(False)
        h = pre = earlier = embeddings
        codes = () if anchor_code is None else (anchor_code,)
        collected = []
        for index in range(len(self.layers)):
            entered = parts.run(("enter", index), lambda i=index: partial(self.enter, i), h, cos, sin)
            mixed, kernel = attend(index, *entered[:3]), entered[3:]
            replaced = replacement if self.injection is not None and index < self.config.dspine.replacement_layers else None  # type: ignore[union-attr]
            earlier = pre
            if replaced is None:
                pre, h = parts.run(("leave", index), lambda i=index: partial(self.leave, i), h, mixed, *kernel, *codes)
            else:
                pre, h = self.leave(index, h, mixed, anchor_code, replaced)
            if collect:
                collected.append((pre, h))
        if self.config.dspine is not None and self.config.dspine.refined_layers == 2:
            pre = mx.concatenate([pre, earlier], axis=-1)
        return BlockStates(self.norm(h), pre, collected)

    def enter(self, index: int, h: mx.array, cos: mx.array, sin: mx.array) -> tuple[mx.array, ...]:
        """Layer `index` up to its attention: h [B, R, H] -> q [B, heads, R, hd], k and v [B, kv_heads, R, hd], and in DFlash2
        the kernel of the convolution behind it."""
        layer = self.layers[index]
        normed, kernel = layer.input_layernorm(h), ()
        if layer.attention_conv is not None:
            normed, after = layer.attention_conv.prepare(normed)
            kernel = (after,)
        return layer.self_attn.query(normed, cos, sin), *layer.self_attn.key_value(normed, cos, sin), *kernel

    def leave(
        self,
        index: int,
        h: mx.array,
        mixed: mx.array,
        extra: mx.array | None = None,
        replacement: tuple[mx.array, mx.array] | None = None,
    ) -> tuple[mx.array, mx.array]:
        """Layer `index` from its attention on: mixed [B, heads, R, hd] -> (u, h) [B, R, H]; equal without injection. `extra`:
        sqrt(r) C_x0 [B, r] in DSpine, the kernel of the convolution behind the attention in DFlash2."""
        layer = self.layers[index]
        mixed = layer.self_attn.o_proj(mx.flatten(mx.swapaxes(mixed, 1, 2), -2))
        if layer.attention_conv is not None:
            mixed = layer.attention_conv.finish(mixed, extra)
        h = h + mixed
        normed, kernel = layer.post_attention_layernorm(h), None
        if layer.mlp_conv is not None:
            normed, kernel = layer.mlp_conv.prepare(normed)
        inner = layer.mlp(normed)
        pre = h + (inner if kernel is None else layer.mlp_conv.finish(inner, kernel))
        if self.injection is None:
            return pre, pre
        return pre, inject_hops(pre, extra, self.injection.layer(index), replacement, self.injection.second)

    def context_rows(self, features: mx.array, cos: mx.array, sin: mx.array) -> list[mx.array]:
        """Context K/V of new tokens: features [B, T, F] -> k, v of layer 0, k, v of layer 1, ... [B, kv_heads, T, hd]."""
        context = self.context(features.astype(self.dtype))
        return [rows for layer in self.layers for rows in layer.self_attn.key_value(context, cos, sin)]

    def refine(self, pre_injection: mx.array, predecessor_code: mx.array) -> mx.array:
        """norm(write(u_L; predecessor code)) of rows 1..M: [..., H], [..., r] -> [..., H]."""
        assert self.injection is not None
        return refine(pre_injection, predecessor_code, self.injection.layer(self.config.num_layers - 1), self.norm)


class MlxDrafter:
    """`protocols.Drafter` on MLX: a `DrafterModel` bound to a target's embedding and LM head.

    `propose` starts the computation before it returns, so the loop asks for the next draft before it shows the text of this
    round (`queues_ahead`). compiled: put the parts of fixed shape under `mx.compile`; None: where that pays.
    """

    queues_ahead = True

    def __init__(self, model: DrafterModel, target: Any, info: dict[str, Any], *, compiled: bool | None = None) -> None:
        self.model, self.target, self.info = model, target, info
        self.config = model.config
        self.rules = self.config.mask_rules()
        parts = draft_parts(model, target)
        self.heads = restricted(parts, model._draft_tokens, self.config.vocab_size, mx.array)
        self._mask_embedding: mx.array | None = None
        self._own_scale = own_scale(self.config, target, mx.arange(min(64, self.config.vocab_size)))
        self.parts = Parts(compiling_pays() if compiled is None else compiled)

    def use_mask_embedding(self, row: mx.array) -> None:
        """Replace the target's embedding of the mask token by a trained one [H] (`mask_embedding.pt`)."""
        self._mask_embedding = row.astype(self.model.dtype)
        mx.eval(self._mask_embedding)

    def make_cache(self, capacity: int, batch: int = 1) -> DraftCache:
        """Context K/V for up to `capacity` tokens, and room for one block behind them."""
        return DraftCache(self.config, capacity, self.model.dtype, batch)

    def commit(self, cache: DraftCache, features: mx.array) -> None:
        """Append context K/V of newly committed tokens; features [B, T, F]."""
        start, stop = cache.length, cache.length + features.shape[1]
        if stop == start:
            return
        cos, sin = (table[start:stop] for table in self.model.rope(stop))
        if stop - start <= COMMIT_LENGTHS:
            rows = self.parts.run("commit", lambda: self.model.context_rows, features, cos, sin)
        else:
            rows = self.model.context_rows(features, cos, sin)
        for index in range(self.config.num_layers):
            cache.write(index, start, rows[2 * index], rows[2 * index + 1])
        cache.advance(stop - start)

    def propose(self, cache: DraftCache, anchor: mx.array, request: DraftRequest) -> Proposal:
        """anchor int [B] at position `cache.length`; see `protocols.Drafter.propose`."""
        states, code = self.run_block(cache, anchor)
        inputs = [states.hidden, anchor, *([] if code is None else [states.pre_injection, code])]
        sampled = request.temperature > 0.0
        key = ("close", request.signals, request.temperature, sampled)
        if sampled:
            inputs.append(request.uniforms)
        outputs = self.parts.run(key, lambda: partial(self._close, request), *inputs)
        mx.async_eval(*outputs)
        named = dict(zip(self._output_names(request), outputs, strict=True))
        return Proposal(**named)

    def _output_names(self, request: DraftRequest) -> tuple[str, ...]:
        """Fields of `Proposal` in the order of what `_close` returns."""
        whole = self.config.domino is not None or self.config.dspark is not None  # drawn from the whole vocabulary
        sampled = () if request.temperature == 0.0 else (("q",) if whole else ("candidates", "q"))
        return ("tokens", "finite", *sampled, *(("confidence", "entropy") if request.signals else ()))

    def _close(self, request: DraftRequest, hidden: mx.array, anchor: mx.array, *rest: mx.array) -> list[mx.array]:
        """From the final-normed block [B, R, H] (and u_L, sqrt(r) C_x0 in DSpine, and uniforms) to the fields of a proposal."""
        rows, parts = self.config.proposal_rows, self.heads
        hidden = hidden[:, rows]
        logits = self.target.head(hidden)
        logits = scale_logits(logits, self.config) if self._own_scale else logits
        if self.model.injection is not None:
            parts = replace(parts, transition=partial(self.transition, rest[0][:, rows], rest[1]))
        request = replace(request, uniforms=rest[-1] if request.temperature > 0.0 else None)
        proposal = make_proposal(self.config, parts, hidden, logits, anchor, request)
        proposal = replace(proposal, tokens=proposal.tokens.astype(mx.int32))
        return [getattr(proposal, name) for name in self._output_names(request)]

    def transition(self, pre_injection: mx.array, anchor_code: mx.array, candidates: mx.array) -> mx.array:
        """The transition cache: u_L of rows 1..M [B, M, H], sqrt(r) C_x0 [B, r], candidates [B, M, K] -> [B, M, K, K]."""
        assert self.model.injection is not None
        codes = known_token(self.model.transfer_codes, candidates[:, :-1])
        first = mx.broadcast_to(anchor_code[:, None, None, :], (codes.shape[0], 1, *codes.shape[2:]))
        injection, last, norm = self.model.injection, self.config.num_layers - 1, self.model.norm
        weights, codes = injection.layer(last), mx.concatenate([first, codes], axis=1)
        rows = self.target.head_rows(candidates)
        if self.config.dspine.hops == self.config.dspine.refined_layers == 1:
            return transition_scores(pre_injection, codes, rows, weights, norm)
        earlier = injection.layer(last - 1) if self.config.dspine.refined_layers == 2 else None
        return conditioned_scores(pre_injection, anchor_code, codes, rows, weights, norm, injection.second, earlier)

    def run_block(self, cache: DraftCache, anchor: mx.array, collect: bool = False) -> tuple[BlockStates, mx.array | None]:
        """The backbone over [anchor, mask, ...] at positions length..length+R-1, and sqrt(r) C_x0 [B, r] (None in DFlash)."""
        rows = self.config.query_rows
        opened = self.parts.run("open", lambda: self._open, anchor)
        embeddings, code = opened[0], opened[1] if len(opened) > 1 else None
        start, stop = cache.length, cache.length + rows
        cos, sin = (table[start:stop] for table in self.model.rope(stop))
        seen = {rule: self._visible(rule, start) for rule in set(self.rules)}
        scale = self.config.head_dim**-0.5

        def attend(index: int, query: mx.array, key: mx.array, value: mx.array) -> mx.array:
            cache.write(index, start, key, value)  # behind the context; overwritten by the next commit
            first, mask = seen[self.rules[index]]
            keys, values = cache.read(index, first, stop)
            return mx.fast.scaled_dot_product_attention(query, keys, values, scale=scale, mask=mask)

        return self.model.forward_block(embeddings, cos, sin, attend, code, collect=collect, parts=self.parts), code

    def _open(self, anchor: mx.array) -> list[mx.array]:
        """anchor int [B] -> embeddings [B, R, H] of [anchor, mask, ...], and sqrt(r) C_x0 [B, r] in DSpine."""
        masks = mx.full((anchor.shape[0], self.config.query_rows - 1), self.config.mask_token_id, dtype=anchor.dtype)
        embeddings = self.target.embed(mx.concatenate([anchor[:, None], masks], axis=1)).astype(self.model.dtype)
        if self.config.input_embedding_scale != 1.0:
            embeddings = embeddings * self.config.input_embedding_scale
        if self._mask_embedding is not None:
            trained = mx.broadcast_to(self._mask_embedding, embeddings[:, 1:].shape)
            embeddings = mx.concatenate([embeddings[:, :1], trained], axis=1)
        return [embeddings] if self.model.injection is None else [embeddings, known_token(self.model.transfer_codes, anchor)]

    def _visible(self, rule: Any, start: int) -> tuple[int, Mask]:
        """First context row that any block row sees, and the mask over [that row .. block's end): bool [R, keys], or
        "causal" (keys end with the block, so it means all context and block rows <= t), or None where all is seen."""
        if rule.window is None:
            return 0, (None if rule.sees_whole_block else "causal")
        first = max(0, start - rule.reach)
        rows = self.config.query_rows
        offsets = mx.arange(rows)
        context = rule.context(offsets[:, None], start, mx.arange(first, start)[None, :])
        block = mx.broadcast_to(rule.block(offsets[:, None], offsets[None, :]), (rows, rows))
        return first, mx.concatenate([mx.broadcast_to(context, (rows, start - first)), block], axis=1)


def load_drafter(folder: Path, target: Any, *, packed: bool | None = None) -> MlxDrafter:
    """Read a drafter folder strictly and bind it to `target`; runs in the target's dtype (bfloat16 or float32).

    packed: leave quantised matrices packed in memory and in the products; None: where that pays, on a GPU. Activations keep
    the target's dtype either way.
    """
    ops.register()
    config = load_drafter_config(folder)
    check_pair(config, target.info, str(folder))
    if target.info.dtype not in ("bfloat16", "float32"):
        raise DSpineError(f"drafters run in bfloat16 or float32, not {target.info.dtype}: their residual overflows float16")
    dtype = getattr(mx, target.info.dtype)
    model = DrafterModel(config)
    tensors = DraftTensors(Path(folder), config)
    left = pack_linears(model, tensors) if (compiling_pays() if packed is None else packed) else {}
    state: dict[str, mx.array] = {}
    for name in expected_tensors(config):
        if name in left:
            words, scales, biases = tensors.packed(name)
            stem = name.removesuffix(".weight")
            state[name] = mx.array(words)
            state[f"{stem}.scales"], state[f"{stem}.biases"] = (mx.array(part).astype(dtype) for part in (scales, biases))
        else:
            words = tensors.words(name)
            stored = mx.array(tensors.read(name)) if words is None else mx.view(mx.array(words), mx.bfloat16)
            state[name] = stored.astype(dtype)
            del words, stored
        mx.eval(state)  # now: the copy of one tensor lives no longer than this
    model.load_weights(list(state.items()), strict=True)
    model.eval()
    mx.eval(model.parameters())
    if config.dspine is not None:
        model.bind_codes(tensors.transfer_codes(target.head_weight))
    model._draft_tokens = tensors.draft_tokens()
    tensors.finish()
    model.rope(1024)
    target.bind_features(config.target_layer_ids)
    drafter = MlxDrafter(model, target, {"method": config.method, "block_size": config.block_size, "folder": str(folder)})
    row = read_mask_embedding(Path(folder), config)
    if row is not None:
        drafter.use_mask_embedding(mx.array(row))
        drafter.info["mask_embedding"] = "trained"
    return drafter
