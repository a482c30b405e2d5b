"""One optimisation step's forward: target features, drafter outputs, loss sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspine.common.rope import rope_tables
from dspine_cuda.drafter import DrafterModel
from dspine_cuda.training.batches import Batch
from dspine_cuda.training.config import LossSection
from dspine_cuda.training.forward import (
    Attention,
    MaskBuilder,
    block_states,
    codes_of,
    pick_attention,
    predecessors,
    readout_unit,
    refine_rows,
)
from dspine_cuda.training.losses import ChunkKernels, LossSums, cosine_alignment, loss_sums, token_alignment
from dspine_cuda.training.masks import document_mask
from dspine_cuda.training.target import FrozenTarget


@dataclass(frozen=True)
class DraftOutputs:
    """Flat rows 1..M of every block: hidden and refined [rows, H]; alignment: weighted sum; layers: final-normed, for the
    token ablation."""

    hidden: Tensor
    refined: Tensor | None
    alignment: Tensor | None
    layers: list[Tensor]


def draft_outputs(
    model: DrafterModel,
    batch: Batch,
    features: Tensor,
    embedding: Tensor,
    masks: list[Any],
    attention: Attention,
    rope: tuple[Tensor, Tensor],
    replaced: bool,
    refinement: bool,
    supervision: str,
) -> DraftOutputs:
    """The drafter over a packed batch, up to what the losses read."""
    states = block_states(model, batch, features, embedding, masks, attention, rope, replaced)
    hidden = states.hidden[:, :, 1:].flatten(0, 2)
    refined = alignment = None
    layers: list[Tensor] = []
    if model.injection is not None:
        if refinement:
            code = codes_of(model, predecessors(batch))
            refined = refine_rows(model, states.pre_injection[:, :, 1:], code).flatten(0, 2)
        if supervision == "cosine":
            readouts = [linear.weight for linear in model.injection.readouts]
            units = [readout_unit(h[:, :, 1:], weight) for h, weight in zip(states.layers, readouts, strict=True)]
            alignment = cosine_alignment(units, model.transfer_codes[batch.labels], batch.weights)
    if supervision == "token":
        layers = [model.norm(h[:, :, 1:]).flatten(0, 2) for h in states.layers]
    return DraftOutputs(hidden, refined, alignment, layers)


class LossForward:
    """Batch -> `LossSums`, with the fast paths chosen once."""

    def __init__(
        self,
        model: DrafterModel,
        target: FrozenTarget,
        settings: LossSection,
        *,
        attention: str,
        compiled: bool,
        replaced: bool,
    ) -> None:
        self.model, self.target, self.settings = model, target, settings
        self.masks = MaskBuilder(model.config.mask_rules(), attention)
        self.attention = pick_attention(attention, compiled)
        self.replaced = replaced and model.injection is not None
        self.kernels = ChunkKernels(settings.chunk_rows)
        self._draft = draft_outputs
        if compiled:
            self.kernels = self.kernels.compiled()
            self._draft = torch.compile(draft_outputs, dynamic=False)
            target.compile()
        self._rope: tuple[Tensor, Tensor] | None = None

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [P, hd] covering `length` positions and a block."""
        size = length + self.model.config.block_size
        if self._rope is None or self._rope[0].shape[0] < size:
            like = self.model.fc.weight
            tables = rope_tables(self.model.config.rope, self.model.config.head_dim, size)
            cos, sin = (torch.from_numpy(table).to(like.device, like.dtype) for table in tables)
            self._rope = (cos, sin)
        return self._rope

    def target_states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Context features [B, S, F] and the target's final-normed hidden [B, S, H]; no gradient."""
        if batch.states is not None:
            width = self.model.config.feature_size
            return batch.states[..., :width], batch.states[..., width:]
        mask = document_mask(batch.documents)
        return self.target.features(batch.tokens, batch.positions, mask, self.model.config.target_layer_ids)

    def __call__(self, batch: Batch) -> LossSums:
        """The whole forward of one share of the batch."""
        features, last_hidden = self.target_states(batch)
        return self.from_states(batch, features, last_hidden)

    def from_states(self, batch: Batch, features: Tensor, last_hidden: Tensor) -> LossSums:
        """The forward after the target: features [B, S, F], last_hidden [B, S, H]."""
        settings, head = self.settings, self.target.head_matrix
        supervision = settings.alignment if settings.alignment_weight * settings.alignment_scale > 0 else "none"
        outputs = self._draft(
            self.model,
            batch,
            features,
            self.target.embedding,
            self.masks(batch),
            self.attention,
            self.rope(batch.tokens.shape[1]),
            self.replaced,
            settings.refinement,
            supervision,
        )
        labels, weights = batch.labels.flatten(), batch.weights.flatten()
        alignment = outputs.alignment
        if supervision == "token":
            alignment = token_alignment(outputs.layers, head, labels, weights, self.kernels)
        top_k = 1 if self.model.config.dspine is None else self.model.config.dspine.top_k
        return loss_sums(
            outputs.hidden,
            last_hidden,
            head,
            labels,
            weights,
            outputs.refined,
            alignment,
            settings,
            self.kernels,
            top_k,
            batch.teacher_index.flatten(1),
        )
