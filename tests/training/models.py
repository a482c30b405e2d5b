"""A tiny random drafter and hand-made batches, for tests of masks and losses without a target model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from dspine.common.configs import DrafterConfig, DSpineConfig, RopeConfig
from dspine.common.masks import FULL
from dspine_cuda.drafter import DrafterModel
from dspine_cuda.training.batches import Batch, block_labels, position_weights
from dspine_cuda.training.config import LossSection
from dspine_cuda.training.export import transfer_space_of
from dspine_cuda.training.losses import LossSums
from dspine_cuda.training.step import LossForward

VOCAB, HIDDEN = 48, 16


def toy_config(block_size: int = 5, injected: bool = True, causal: bool = True, layers: int = 2) -> DrafterConfig:
    dspine = DSpineConfig(transfer_rank=6, message_size=4, top_k=4, replacement_layers=1) if injected else None
    return DrafterConfig(
        method="dspine" if injected else "dflash",
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        block_size=block_size,
        mask_token_id=VOCAB - 1,
        num_target_layers=4,
        target_layer_ids=(1, 3),
        rope=RopeConfig(theta=10000.0),
        layer_types=(FULL,) * layers,
        is_causal=causal,
        dspine=dspine,
    )


def toy_head(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5)).to(dtype)


def toy_drafter(block_size: int = 5, injected: bool = True, dtype: torch.dtype = torch.float32) -> DrafterModel:
    """Random everywhere, the injection's writes included."""
    torch.manual_seed(0)
    model = DrafterModel(toy_config(block_size, injected))
    if injected:
        model.transfer_codes = torch.from_numpy(transfer_space_of(toy_head().numpy(), 6).codes)
    return model.to(dtype)


def toy_batch(model: DrafterModel, anchors: list[int], length: int, rows: int = 1, seed: int = 0) -> Batch:
    """`rows` rows of one document each; everything from token 3 on is supervised; the same anchors in every row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB - 1, (rows, length))
    documents = np.zeros((rows, length), dtype=np.int64)
    supervised = np.broadcast_to(np.arange(length) >= 3, (rows, length))
    placed = np.broadcast_to(np.array(anchors), (rows, len(anchors))).copy()
    keep = np.ones(placed.shape, dtype=bool)
    labels, valid = block_labels(tokens, supervised, documents, placed, keep, model.config.num_proposals)
    positions = np.broadcast_to(np.arange(length), (rows, length)).copy()
    replace = rng.random(placed.shape) < 0.5
    arrays = (tokens, documents, positions, placed, keep, labels, position_weights(valid, 7.0), replace)
    return Batch(*(torch.from_numpy(array) for array in arrays))


def make_forward(model: DrafterModel, settings: LossSection | None = None) -> LossForward:
    head = toy_head(model.fc.weight.dtype)
    target = SimpleNamespace(embedding=head, head_matrix=head)
    return LossForward(model, target, settings or LossSection(chunk_rows=16), attention="sdpa", compiled=False, replaced=True)


def teacher_hidden(batch: Batch, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (*batch.tokens.shape, HIDDEN)
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).to(dtype)


def features_run(model: DrafterModel, batch: Batch, features: torch.Tensor, settings: LossSection | None = None) -> LossSums:
    return make_forward(model, settings).from_states(batch, features, teacher_hidden(batch, model.fc.weight.dtype))
