"""A drafter before its first step: its shape from the target's, its weights from the target's last layers or at random."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dspine.common.checkpoints import DraftTensors, expected_tensors
from dspine.common.configs import DrafterConfig, DSpineConfig, load_drafter_config
from dspine.common.draft_cards import ConvConfig, DominoConfig, DSparkConfig, SelectorConfig
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.masks import FULL, SLIDING
from dspine.common.models import resolve_draft
from dspine.common.tokenizer import load_tokenizer
from dspine_cuda.drafter import DrafterModel, DraftMLP
from dspine_cuda.training.config import TrainConfig
from dspine_cuda.training.data import Conversation
from dspine_cuda.training.export import TransferSpace, transfer_space_from, transfer_space_of
from dspine_cuda.training.hybrid_target import HYBRID_FAMILIES
from dspine_cuda.training.kinds import TrainableConv, start_heads
from dspine_cuda.training.schedules import warmup_steps
from dspine_cuda.training.target import FrozenTarget, TargetShape

RANDOM_STD = 0.02
HEAD_NORM_START = 2.0  # q/k norm weights where the target has none
_SIZES = ("method", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "attention_bias")
FC_STD = 0.01  # with the identity on the last tap: all taps together then add about 0.3 of it on SmolLM2


def choose_mask_token(folder: Path, conversations: Sequence[Conversation], vocab_size: int) -> int:
    """A token id for the empty rows of a block: the tokenizer's mask token, the first id behind its words where the embedding
    is longer, else the highest ordinary id that occurs nowhere in the data."""
    taken: set[int] = set()
    try:
        tokenizer = load_tokenizer(folder)
    except CheckpointError:  # data of token ids needs no tokenizer
        tokenizer = None
    if tokenizer is not None:
        mask, size = tokenizer.backend.mask_token_id, len(tokenizer.backend)
        if mask is not None and mask < vocab_size:
            return int(mask)
        if size < vocab_size:
            return size
        taken = set(tokenizer.stop_ids | tokenizer.special_ids)
    used = np.zeros(vocab_size, dtype=bool)
    for conversation in conversations:
        used[conversation.tokens] = True
    free = [int(i) for i in np.flatnonzero(~used) if int(i) not in taken]
    if not free:
        raise DSpineError("every token id of the target occurs in the data: choose one with model.mask_token_id")
    return free[-1]


def drafter_config(config: TrainConfig, target: TargetShape, mask_token: int | None = None) -> DrafterConfig:
    """The drafter's card: what the config leaves out is the target's own. mask_token: where the config names none."""
    model, schedule = config.model, config.schedule
    taps = model.taps or _spread_taps(model.num_layers, target.num_layers)
    wrong = [tap for tap in taps if not 0 <= tap < target.num_layers]
    if wrong:
        raise DSpineError(f"model.taps {wrong} out of range: the target has layers 0..{target.num_layers - 1}")
    mask_token = model.mask_token_id if model.mask_token_id is not None else mask_token
    if mask_token is None:
        raise DSpineError("model.mask_token_id is missing, and there is no data to choose it from")
    if mask_token >= target.vocab_size:
        raise DSpineError(f"model.mask_token_id {mask_token} is not below the target's vocabulary {target.vocab_size}")
    dspine = None
    if model.injected:
        if model.transfer_rank > min(target.hidden_size, target.vocab_size - 1):
            raise DSpineError(
                f"model.transfer_rank {model.transfer_rank} is above the target's hidden size {target.hidden_size}"
            )
        dspine = DSpineConfig(
            transfer_rank=model.transfer_rank,
            message_size=model.message_size,
            top_k=model.top_k,
            ce_weight=config.loss.alpha,
            alignment_weight=config.loss.alignment_weight,
            alignment_warmup_steps=schedule.beta_warmup_steps or (warmup_steps(schedule) if schedule.max_steps else 1),
            replacement_layers=schedule.replacement_layers,
            replacement_probability=schedule.replacement_probability,
            replacement_hold_ratio=schedule.replacement_hold_ratio,
            replacement_end_ratio=schedule.replacement_end_ratio,
            candidate_mass_threshold=config.loss.mass_threshold,
            hops=model.hops,
            refined_layers=model.refined_layers,
        )
    method = model.method if model.method != "dspine" or dspine is not None else "dflash"
    parts = _own_parts(config, target.hidden_size)
    shifted = model.method == "dspark" or (model.method == "domino" and config.heads.shift_label)
    return DrafterConfig(
        method=method,
        first_row=0 if shifted else 1,
        hidden_size=target.hidden_size,
        intermediate_size=model.intermediate_size or target.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads or target.num_heads,
        num_kv_heads=model.num_kv_heads or target.num_kv_heads,
        head_dim=model.head_dim or target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        block_size=model.block_size,
        mask_token_id=mask_token,
        num_target_layers=target.num_layers,
        target_layer_ids=tuple(taps),
        rope=target.rope,
        layer_types=tuple(SLIDING if layer in model.sliding_layers else FULL for layer in range(model.num_layers)),
        sliding_window=model.sliding_window,
        is_causal=True if model.method == "dspine" else bool(model.is_causal),
        dspine=dspine,
        **parts,
    )


def _own_parts(config: TrainConfig, hidden: int) -> dict[str, Any]:
    """The settings of the method's own parts, by the field of `DrafterConfig` they fill."""
    heads, method = config.heads, config.model.method
    if method == "dflash2":
        if hidden % heads.conv_group_size:
            raise DSpineError(f"heads.conv_group_size {heads.conv_group_size} does not divide the hidden size {hidden}")
        conv = ConvConfig(heads.conv_kernel_size, heads.conv_group_size)
        return {"conv": conv, "selector": SelectorConfig(heads.selector_rank, config.model.top_k)}
    if method == "domino":
        return {"domino": DominoConfig(heads.gru_hidden_dim, heads.emb_dim, heads.shift_label)}
    if method == "dspark":
        with_markov = heads.confidence and heads.confidence_with_markov
        return {"dspark": DSparkConfig(heads.markov_rank, heads.markov_head_type, heads.confidence, with_markov)}
    return {}


def _spread_taps(layers: int, target_layers: int) -> tuple[int, ...]:
    """DFlash's own spread (`docs/formats.md`)."""
    if layers == 1:
        return (target_layers // 2,)
    return tuple(int(round(1 + i * (target_layers - 4) / (layers - 1))) for i in range(layers))


class RecomputedMLP(DraftMLP):
    """The same layer; its inner activations are not kept but made again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self._inner(x)
        return checkpoint(self._inner, x, use_reentrant=False, preserve_rng_state=False)

    def _inner(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def starting_model(
    config: TrainConfig, shape: DrafterConfig, target: FrozenTarget
) -> tuple[DrafterModel, TransferSpace | None]:
    """The model before its first step, and its transfer space: new, or from `model.start_from`."""
    if config.model.start_from is not None:
        return _from_drafter(config, shape, target)
    rank = None if shape.dspine is None else shape.dspine.transfer_rank
    space = None if rank is None else transfer_space_of(target.head_weight(), rank)
    return initial_model(config, shape, target, space), space


def _sizes(config: DrafterConfig) -> dict[str, object]:
    """What two drafters must share for one to go on from the other's weights."""
    sizes = {name: getattr(config, name) for name in _SIZES} | {"taps": list(config.target_layer_ids)}
    if config.dspine is not None:
        sizes |= {"transfer_rank": config.dspine.transfer_rank, "message_size": config.dspine.message_size}
    return sizes


def _from_drafter(config: TrainConfig, shape: DrafterConfig, target: FrozenTarget) -> tuple[DrafterModel, TransferSpace | None]:
    """Weights and transfer space of an exported drafter (its readouts fit that very basis)."""
    folder = resolve_draft(config.model.start_from or "", config.model.target)
    assert folder is not None
    stored = load_drafter_config(folder)
    ours, theirs = _sizes(shape), _sizes(stored)
    if ours != theirs:
        names = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
        wrong = [f"{name}: {theirs.get(name)!r} there, {ours.get(name)!r} here" for name in names]
        raise DSpineError(f"model.start_from {folder}: another drafter ({'; '.join(wrong)}); set model.* to its shape")
    tensors, model = DraftTensors(folder, stored), new_model(config, shape)
    state = {name: torch.from_numpy(tensors.read(name).copy()) for name in expected_tensors(stored)}
    if shape.dspine is not None and stored.dspine is not None:
        if stored.dspine.hops > shape.dspine.hops:
            raise DSpineError(f"model.start_from {folder}: a drafter of two hops cannot go on as one of one; set model.hops=2")
        if stored.dspine.hops < shape.dspine.hops:  # a second hop of strength 0 is none: the start is the stored drafter
            state["injection.second"] = torch.zeros(shape.dspine.message_size)
    model.load_state_dict(state, strict=True)
    basis = tensors.transfer_basis()
    space = None if basis is None else transfer_space_from(target.head_weight(), basis)
    if shape.dspine is not None and space is None:
        raise DSpineError(
            f"model.start_from {folder}: it stores codes but no basis of its transfer space: cannot go on from it"
        )
    if space is not None:
        model.transfer_codes = torch.from_numpy(space.codes)
    _freeze(config, model)
    return model, space


def new_model(config: TrainConfig, shape: DrafterConfig) -> DrafterModel:
    """Modules without meaningful weights."""
    model = DrafterModel(shape)
    for layer in model.layers:
        if config.run.recompute == "mlp":
            layer.mlp = RecomputedMLP(shape)
        if shape.conv is not None:
            layer.attention_conv, layer.mlp_conv = TrainableConv(shape), TrainableConv(shape)
    return model


def _freeze(config: TrainConfig, model: DrafterModel) -> None:
    """Layers without messages: their write stays zero, which is no injection at all."""
    chosen = config.model.injection_layers
    if chosen is None or model.injection is None:
        return
    for index, linear in enumerate(model.injection.writes):
        if index not in chosen:
            with torch.no_grad():
                linear.weight.zero_()
            linear.weight.requires_grad_(False)


def initial_model(config: TrainConfig, shape: DrafterConfig, target: FrozenTarget, space: TransferSpace | None) -> DrafterModel:
    """A float32 model on the CPU, its codes set; the same for a given seed on any device."""
    generator = torch.Generator().manual_seed(config.run.seed)
    model = new_model(config, shape)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=RANDOM_STD, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    if config.model.init == "target":
        _from_target(model, target, generator)
    if model.injection is not None:
        assert space is not None
        _start_injection(model, space, generator)
        _freeze(config, model)
    start_heads(model, generator)
    return model


def _start_injection(model: DrafterModel, space: TransferSpace, generator: torch.Generator) -> None:
    """R_l = P_r^T; A and G_q uniform in +-1/sqrt(r); W_l, G_p, b zero: the untrained DSpine is its DFlash backbone."""
    injection = model.injection
    assert injection is not None
    bound = space.codes.shape[1] ** -0.5
    with torch.no_grad():
        for linear in injection.readouts:
            linear.weight.copy_(torch.from_numpy(space.basis.eigenvectors))
        for linear in injection.writes:
            linear.weight.zero_()
        injection.predecessor_gate.weight.zero_()
        injection.bias.zero_()
        for linear in (injection.message, injection.receiver_gate):
            nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
    model.transfer_codes = torch.from_numpy(space.codes)


def _from_target(model: DrafterModel, target: FrozenTarget, generator: torch.Generator) -> None:
    """Attention, MLP and norms of the target's last layers; the context enters as the last tap's features."""
    shape, source = model.config, target.shape
    if source.model_type in HYBRID_FAMILIES:
        raise DSpineError(f"model.init=target copies dense decoder layers, a {source.model_type} target has none: use random")
    first = source.num_layers - shape.num_layers
    ours = (shape.intermediate_size, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    theirs = (source.intermediate_size, source.num_heads, source.num_kv_heads, source.head_dim)
    if ours != theirs or first < 0 or shape.attention_bias != source.attention_bias:
        raise DSpineError(
            f"model.init=target copies the target's last {shape.num_layers} layers, but inner size, heads, K/V heads and head "
            f"size are {ours} in the drafter and {theirs} in a target of {source.num_layers} layers; use model.init=random"
        )
    norms = [f"layers.{first + i}.input_layernorm.weight" for i in range(shape.num_layers)]
    _check_weights(target, [*norms, "norm.weight"])
    used = tuple(f"layers.{first + i}." for i in range(shape.num_layers))
    weights = {name: tensor.float().cpu() for name, tensor in target.weights.items() if name.startswith((*used, "norm."))}
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            for name, parameter in layer.named_parameters():
                stored = weights.get(f"layers.{first + index}.{name}")
                if stored is not None:
                    parameter.copy_(stored)
                elif name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
                    parameter.fill_(HEAD_NORM_START)
        model.hidden_norm.weight.copy_(torch.stack([weights[name] for name in norms]).mean(dim=0))
        model.norm.weight.copy_(weights["norm.weight"])
        nn.init.normal_(model.fc.weight, std=FC_STD, generator=generator)
        model.fc.weight[:, -shape.hidden_size :] += torch.eye(shape.hidden_size)


def _check_weights(target: FrozenTarget, names: list[str]) -> None:
    gone = [name for name in names if name not in target.weights]
    if gone:
        raise DSpineError(
            f"model.init=target copies the target's last layers, but {target.info.model_type} has no {gone[0]}; use "
            f"model.init=random"
        )


def state_arrays(model: DrafterModel, masters: dict[str, Tensor]) -> dict[str, object]:
    """Trained tensors by checkpoint name, float32 NumPy, from the master weights."""
    return {name: masters[name].detach().float().cpu().numpy() for name, _ in model.named_parameters()}
