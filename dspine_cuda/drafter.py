"""Drafters of the DFlash family in torch: one module for training and inference (`algorithms` 1, `docs/formats.md`).

Names of modules are the checkpoint's. A block is [B, N, R, H]: B sequences, N blocks a sequence (1 in inference), R =
block_size rows, the anchor first. Attention is handed in, because only the caller knows where context K/V live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspine.common.checkpoints import DraftTensors, check_pair, expected_tensors
from dspine.common.conditioning import conditioned_scores, inject_hops
from dspine.common.configs import DrafterConfig, load_drafter_config
from dspine.common.errors import DSpineError
from dspine.common.injection import InjectionWeights
from dspine.common.mask_embedding import read_mask_embedding
from dspine.common.proposing import make_proposal, own_scale, restricted, scale_logits
from dspine.common.protocols import DraftRequest, Proposal
from dspine.common.registry import find_kernel
from dspine.common.rope import rope_tables
from dspine.common.signals import draft_candidates
from dspine.common.transition import candidate_scores, refine, transition_scores
from dspine_cuda.draft_cache import DraftCache
from dspine_cuda.draft_heads import GroupedConv, add_heads, draft_parts
from dspine_cuda.draft_inference import LeanDraft, signed_tables

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """weight * x / rms(x); statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


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
        self.q_norm = RMSNorm(head, config.rms_norm_eps)
        self.k_norm = RMSNorm(head, config.rms_norm_eps)

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, T, H] -> rotated [B, heads, T, hd]; cos/sin [B or 1, T, hd]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)))
        return rotate(q.transpose(1, 2), cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, H] -> rotated keys and values [B, kv_heads, T, hd]; x is a normed layer input or the context c."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        return rotate(k.transpose(1, 2), cos, sin), v.transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotary embedding: x [B, heads, T, hd], cos/sin [B or 1, T, hd]."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One pre-norm layer over block rows."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
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
        self.readouts = nn.ModuleList(nn.Linear(hidden, rank, bias=False) for _ in range(config.num_layers))
        self.writes = nn.ModuleList(nn.Linear(message, hidden, bias=False) for _ in range(config.num_layers))
        self.message = nn.Linear(rank, message, bias=False)
        self.receiver_gate = nn.Linear(rank, message, bias=False)
        self.predecessor_gate = nn.Linear(rank, message, bias=False)
        self.bias = nn.Parameter(torch.zeros(message))
        self.second = nn.Parameter(torch.zeros(message)) if config.dspine.hops == 2 else None

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
    """hidden: norm(h_L); pre_injection: u_L of the last layer; layers: h_l of every layer where asked for; all [B, N, R, H].
    With two refined layers pre_injection is [u_L, u_{L-1}] side by side, [B, N, R, 2H]. heard: what the last injection's rows
    heard of themselves, float32 [B, N, R, a], where a round has kept it."""

    hidden: Tensor
    pre_injection: Tensor
    layers: list[Tensor]
    heard: Tensor | None = None


def _around(conv: GroupedConv | None, normed: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """A sublayer on its normed input [B, N, R, H], between DFlash2's two convolutions where there are any."""
    if conv is None:
        return sublayer(normed)
    prepared, kernel = conv.prepare(normed)
    return conv.finish(sublayer(prepared), kernel)


class DrafterModel(nn.Module):
    """The drafter's own weights; embedding and LM head are the target's and are handed in."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.injection = Injection(config) if config.dspine is not None else None
        add_heads(self, config)
        self.draft_tokens: Any = None  # target ids it may propose, NumPy; None: all
        codes = torch.zeros(0) if config.dspine is None else torch.zeros(config.vocab_size, config.dspine.transfer_rank)
        self.register_buffer("transfer_codes", codes, persistent=False)
        self._rope: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def context(self, features: Tensor) -> Tensor:
        """c = hidden_norm(fc(f)): [B, T, F] -> [B, T, H]; the same for every layer."""
        return self.hidden_norm(self.fc(features))

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [1, >= length, hd] in the dtype and on the device of the weights; grown in steps of 1,024."""
        like = self.fc.weight
        size = -(-length // 1024) * 1024
        key = (size, like.dtype, like.device)
        if key not in self._rope:
            cos, sin = rope_tables(self.config.rope, self.config.head_dim, size)
            self._rope = {key: tuple(torch.from_numpy(t).to(like.device, like.dtype).unsqueeze(0) for t in (cos, sin))}  # type: ignore[dict-item]
        return self._rope[key]

    def forward_block(
        self,
        embeddings: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        anchor_code: Tensor | None = None,
        replacement: tuple[Tensor, Tensor] | None = None,
        collect: bool = False,
        inject_with: Callable[..., Tensor] = inject_hops,
    ) -> BlockStates:
        """All layers over the blocks.

        embeddings [B, N, R, H] of [anchor, mask, ...]; cos/sin [B or 1, N*R, hd] at the rows' absolute positions;
        `attend(layer, q, k, v)` gets q [B, heads, N*R, hd] and the block's own k, v [B, kv_heads, N*R, hd], returns
        [B, heads, N*R, hd]; anchor_code sqrt(r) C_x0 [B, N, r] (DSpine); replacement (mask [B, N, 1, 1], codes
        [B, N, M, r]) acts in layers below `replacement_layers`; `inject_with` stands in for `common.injection.inject` (training
        has a traceable one).
        """
        h = embeddings
        earlier = pre = h
        collected = []
        for index, layer in enumerate(self.layers):

            def mix(normed: Tensor, index: int = index, layer: DraftLayer = layer) -> Tensor:
                rows = normed.flatten(1, 2)
                query = layer.self_attn.query(rows, cos, sin)
                key, value = layer.self_attn.key_value(rows, cos, sin)
                mixed = attend(index, query, key, value).transpose(1, 2).flatten(-2)
                return layer.self_attn.o_proj(mixed).view_as(normed)

            h = h + _around(layer.attention_conv, layer.input_layernorm(h), mix)
            earlier, pre = pre, h + _around(layer.mlp_conv, layer.post_attention_layernorm(h), layer.mlp)
            h = pre
            if self.injection is not None:
                replaced = replacement if index < self.config.dspine.replacement_layers else None  # type: ignore[union-attr]
                h = inject_with(pre, anchor_code, self.injection.layer(index), replaced, self.injection.second)
            if collect:
                collected.append(h)
        if self.config.dspine is not None and self.config.dspine.refined_layers == 2:
            pre = torch.cat([pre, earlier], dim=-1)
        return BlockStates(self.norm(h), pre, collected)

    def refine(self, pre_injection: Tensor, predecessor_code: Tensor) -> Tensor:
        """norm(write(u_L; predecessor code)) of rows 1..M: [..., H], [..., r] -> [..., H]."""
        assert self.injection is not None
        return refine(pre_injection, predecessor_code, self.injection.layer(self.config.num_layers - 1), self.norm)


class TorchDrafter:
    """`protocols.Drafter` on torch: a `DrafterModel` bound to a target's embedding and LM head."""

    def __init__(self, model: DrafterModel, target: Any, info: dict[str, Any], *, share: bool = False) -> None:
        """share: the model's large weights may become views, or empty, see `LeanDraft`."""
        self.model, self.target, self.info = model.eval(), target, info
        self.config = model.config
        self.lean = LeanDraft(model, share=share)
        self._tables: tuple[Tensor, Tensor] | None = None
        self.rules = self.config.mask_rules()
        self.parts = restricted(
            draft_parts(model, target),
            model.draft_tokens,
            self.config.vocab_size,
            lambda array: torch.from_numpy(array).to(model.fc.weight.device),
        )
        rows = self.config.query_rows
        offsets = torch.arange(rows, device=model.fc.weight.device)
        self._block_masks = [rule.block(offsets[:, None], offsets[None, :]) for rule in self.rules]
        self._mask_row = torch.full((1, rows - 1), self.config.mask_token_id, device=offsets.device)
        self._mask_embedding: Tensor | None = None
        self._own_scale = own_scale(self.config, target, offsets.new_tensor(range(min(64, self.config.vocab_size))))

    def use_mask_embedding(self, row: Tensor) -> None:
        """Replace the target's embedding of the mask token by a trained one [H] (`mask_embedding.pt`)."""
        self._mask_embedding = row.to(self._mask_row.device, self.model.fc.weight.dtype)

    def make_cache(self, capacity: int) -> DraftCache:
        """Context K/V for up to `capacity` tokens, and room for one block behind them."""
        return DraftCache(self.config, capacity, self.model.fc.weight.dtype, self.model.fc.weight.device)

    def tables(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rotary tables of positions [start, stop): [T, 1, hd] each."""
        if self._tables is None or self._tables[0].shape[0] < stop:
            self._tables = signed_tables(*self.model.rope(stop))
        return self._tables[0][start:stop], self._tables[1][start:stop]

    @torch.inference_mode()
    def commit(self, cache: DraftCache, features: Tensor) -> None:
        """Append context K/V of newly committed tokens; features [B, T, F]."""
        start, count = cache.length, features.shape[1]
        cos, sin = self.tables(start, start + count)
        cache.write_all(start, self.lean.context(features.to(self.model.fc.weight.dtype), cos, sin))
        cache.advance(count)

    @torch.inference_mode()
    def propose(self, cache: DraftCache, anchor: Tensor, request: DraftRequest) -> Proposal:
        """anchor int [B] at position `cache.length`; see `protocols.Drafter.propose`."""
        return self.proposal(*self._run(cache, anchor), anchor, request)

    def proposal(self, states: BlockStates, code: Tensor | None, anchor: Tensor, request: DraftRequest) -> Proposal:
        """What the block's states [B, 1, R, H] propose; `code` [B, r] of the anchors (DSpine)."""
        rows = self.config.proposal_rows
        hidden, parts = states.hidden[:, 0, rows], self.parts
        logits = self._logits(hidden)
        if code is not None:
            heard = None if states.heard is None else states.heard[:, 0, rows]
            parts = replace(parts, transition=partial(self.transition, states.pre_injection[:, 0, rows], code, heard=heard))
        return make_proposal(self.config, parts, hidden, logits, anchor, request)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of final-normed rows; in the model's dtype where nothing but a kernel that widens them reads them."""
        alone = self.parts.domino is None and self.config.dspark is None and not self._own_scale
        if alone and hasattr(self.target, "narrow_head") and find_kernel(draft_candidates.__name__, hidden) is not None:
            return self.target.narrow_head(hidden)
        logits = self.target.head(hidden)
        return scale_logits(logits, self.config) if self._own_scale else logits

    def transition(self, pre_injection: Tensor, anchor_code: Tensor, candidates: Tensor, heard: Tensor | None = None) -> Tensor:
        """The transition cache: u_L of rows 1..M [B, M, H], sqrt(r) C_x0 [B, r], candidates [B, M, K] -> [B, M, K, K]. With
        `heard` [B, M, a] (`BlockStates`) straight from the tables."""
        assert self.model.injection is not None
        injection, last, norm = self.model.injection, self.config.num_layers - 1, self.model.norm
        weights = injection.layer(last)
        if heard is not None:
            tables = self.model.transfer_codes, self.target.head_matrix
            return candidate_scores(pre_injection, heard, anchor_code, candidates, *tables, weights, norm)
        codes = self.known(candidates[:, :-1])
        first = anchor_code[:, None, None, :].expand(-1, 1, candidates.shape[-1], -1)
        codes = torch.cat([first, codes], dim=1)
        rows = self.target.head_rows(candidates)
        if self.config.dspine.hops == self.config.dspine.refined_layers == 1:  # type: ignore[union-attr]
            return transition_scores(pre_injection, codes, rows, weights, norm)
        earlier = injection.layer(last - 1) if self.config.dspine.refined_layers == 2 else None  # type: ignore[union-attr]
        return conditioned_scores(pre_injection, anchor_code, codes, rows, weights, norm, injection.second, earlier)

    def _run(self, cache: DraftCache, anchor: Tensor) -> tuple[BlockStates, Tensor | None]:
        start, stop = cache.length, cache.length + self.config.query_rows
        cos, sin = self.tables(start, stop)
        masks = self.masks(start)

        def attend(index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            cache.write(index, start, key, value)  # behind the context; overwritten by the next commit
            keys, values = cache.read(index, stop)
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=masks[self.rules[index]], enable_gqa=True)

        return self.run_block(anchor, cos, sin, attend)

    def run_block(self, anchor: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[BlockStates, Tensor | None]:
        """The layers over the blocks of `anchor` [B]; tables [R, 1, hd]."""
        embeddings, code = self.embed_block(anchor)
        hidden, pre = self.lean.block(embeddings, cos, sin, attend, code)
        return BlockStates(hidden[:, None], pre[:, None], []), code

    def embed_block(self, anchor: Tensor) -> tuple[Tensor, Tensor | None]:
        """Input rows [B, R, H] of the blocks of `anchor` [B], and its known-token code [B, r] (DSpine)."""
        ids = torch.cat([anchor[:, None], self._mask_row.expand(anchor.shape[0], -1)], dim=1)
        embeddings = self.target.embed(ids).to(self.model.fc.weight.dtype)
        if self.config.input_embedding_scale != 1.0:
            embeddings = embeddings * self.config.input_embedding_scale
        if self._mask_embedding is not None:
            embeddings[:, 1:] = self._mask_embedding
        return embeddings, None if self.model.injection is None else self.known(anchor)

    @property
    def known_codes(self) -> Tensor | None:
        """C [V, r] (DSpine); `known` of a token is its row times sqrt(r)."""
        return None if self.model.injection is None else self.model.transfer_codes

    def known(self, tokens: Tensor) -> Tensor:
        """`transfer_space.known_token` of int [...] -> [..., r], in two operations."""
        codes = self.model.transfer_codes
        return F.embedding(tokens, codes) * codes.shape[-1] ** 0.5

    def masks(self, start: int) -> dict[Any, Tensor | None]:
        """Attention mask of each layer rule for a block at position `start`."""
        return {rule: self._mask(index, start) for index, rule in enumerate(self.rules)}

    def _mask(self, index: int, start: int) -> Tensor | None:
        """Additive mask [R, start + R]; None where every key is visible."""
        rule, block = self.rules[index], self._block_masks[index]
        if rule.window is None and rule.sees_whole_block:
            return None
        rows = self.config.query_rows
        if rule.window is None:
            context = block.new_ones(1, 1).expand(rows, start)
        else:
            offsets = torch.arange(rows, device=block.device)[:, None]
            context = rule.context(offsets, start, torch.arange(start, device=block.device)[None, :])
        visible = torch.cat([context, block], dim=1)
        return torch.zeros(visible.shape, dtype=self.model.fc.weight.dtype, device=block.device).masked_fill_(
            ~visible, float("-inf")
        )


def _stored(tensors: DraftTensors, name: str) -> Tensor:
    """One tensor as it is stored where that is bfloat16, without a wide copy; else float32."""
    words = tensors.words(name)
    if words is None:
        return torch.from_numpy(tensors.read(name))
    return torch.from_numpy(words.view(np.int16)).view(torch.bfloat16)


def load_drafter(folder: Path, target: Any, *, whole: bool = False) -> TorchDrafter:
    """Read a drafter folder strictly and bind it to `target`; runs in the target's dtype (bfloat16 or float32). whole: its
    modules keep weights of their own, for whoever runs them (the trainer's forward) and not only rounds."""
    config = load_drafter_config(folder)
    check_pair(config, target.info, str(folder))
    dtype, device = getattr(torch, target.info.dtype), torch.device(target.info.device)
    if dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise DSpineError(f"drafters run in bfloat16 or float32, not {target.info.dtype}: their residual overflows float16")
    with torch.device("meta"):
        model = DrafterModel(config)
    tensors = DraftTensors(Path(folder), config)
    state = {name: _stored(tensors, name).to(device, dtype) for name in expected_tensors(config)}
    model.load_state_dict(state, strict=True, assign=True)
    del state  # the modules alone hold the weights now, so they can give them up one by one
    codes = torch.zeros(0) if config.dspine is None else torch.from_numpy(tensors.transfer_codes(target.head_weight))
    model.transfer_codes = codes.to(device, dtype)
    model.draft_tokens = tensors.draft_tokens()
    tensors.finish()
    model.requires_grad_(False)
    target.bind_features(config.target_layer_ids)
    info = {"method": config.method, "block_size": config.block_size, "folder": str(folder)}
    drafter = TorchDrafter(model, target, info, share=not whole)
    row = read_mask_embedding(Path(folder), config)
    if row is not None:
        drafter.use_mask_embedding(torch.from_numpy(row))
        drafter.info["mask_embedding"] = "trained"
    return drafter
