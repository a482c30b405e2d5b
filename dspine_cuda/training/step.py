"""One optimisation step's forward: target features, drafter outputs, loss sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
from dspine_cuda.training.kinds import (
    KindOutputs,
    confidence_loss,
    extra_head,
    joint_chunk,
    joint_loss,
    kind_outputs,
    selector_loss,
)
from dspine_cuda.training.losses import ChunkKernels, LossSums, cosine_alignment, loss_sums, token_alignment
from dspine_cuda.training.masks import document_mask
from dspine_cuda.training.target import FrozenTarget


@dataclass(frozen=True)
class DraftOutputs:
    """Flat proposal rows of every block: hidden and refined [rows, H]; alignment: weighted sum; layers: final-normed, for the
    token ablation; own: what a kind's own parts made."""

    hidden: Tensor
    refined: Tensor | None
    alignment: Tensor | None
    layers: list[Tensor]
    own: KindOutputs


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
    rows = model.config.proposal_rows
    own = kind_outputs(model, states.hidden[:, :, rows], predecessors(batch), embedding)
    hidden = states.hidden[:, :, rows].flatten(0, 2)
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
        layers = [model.norm(h[:, :, rows]).flatten(0, 2) for h in states.layers]
    return DraftOutputs(hidden, refined, alignment, layers, own)


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
        around: Callable[[Callable[..., DraftOutputs]], Callable[..., DraftOutputs]] | None = None,
    ) -> None:
        """around: put around `draft_outputs`, e.g. what gathers sharded weights."""
        self.model, self.target, self.settings = model, target, settings
        self.masks = MaskBuilder(model.config.mask_rules(), attention)
        self.attention = pick_attention(attention, compiled)
        self.replaced = replaced and model.injection is not None
        self.kernels = ChunkKernels(settings.chunk_rows, joint=joint_chunk)
        self.base_share = 0.0  # Domino: the uncorrected output's share of the loss; the trainer moves it
        self._draft = draft_outputs
        if compiled:
            self.kernels = self.kernels.compiled()
            self._draft = torch.compile(draft_outputs, dynamic=False)
            target.compile()
        self._like = model.fc.weight.device, model.fc.weight.dtype  # sharding changes the parameters'
        if around is not None:
            self._draft = around(self._draft)
        self._rope: tuple[Tensor, Tensor] | None = None

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [P, hd] covering `length` positions and a block."""
        size = length + self.model.config.block_size
        if self._rope is None or self._rope[0].shape[0] < size:
            tables = rope_tables(self.model.config.rope, self.model.config.head_dim, size)
            cos, sin = (torch.from_numpy(table).to(*self._like) for table in tables)
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
        if outputs.own.latent is not None:
            return self._corrected(batch, outputs, last_hidden, labels, weights, alignment)
        selector = self.model.config.selector
        top_k = 1 if self.model.config.dspine is None else self.model.config.dspine.top_k
        sums = loss_sums(
            outputs.hidden,
            last_hidden,
            head,
            labels,
            weights,
            outputs.refined,
            alignment,
            settings,
            self.kernels,
            top_k if selector is None else selector.top_k,
            batch.teacher_index.flatten(1),
        )
        own = None
        if selector is not None:
            successor = self.model.candidate_selector.successor_codebook
            candidates = sums.rows["candidates"]
            own = selector_loss(
                outputs.own.context, successor, outputs.hidden, head, candidates, labels, weights, self.kernels
            )  # fmt: skip
        elif outputs.own.confidence is not None:
            own = confidence_loss(outputs.own.confidence, sums.rows["l1"], weights)
        return sums if own is None else dataclasses.replace(sums, head=own[0], head_count=own[1])

    def _corrected(
        self,
        batch: Batch,
        outputs: DraftOutputs,
        last_hidden: Tensor,
        labels: Tensor,
        weights: Tensor,
        alignment: Tensor | None,
    ) -> LossSums:
        """Sums of a kind whose logits are corrected given the predecessors (Domino, DSpark)."""
        head, extra, alpha = self.target.head_matrix, extra_head(self.model), self.settings.alpha
        index, own = batch.teacher_index.flatten(1), outputs.own
        main, ce, l1 = joint_loss(
            outputs.hidden, own.latent, extra, last_hidden, index, head, labels, weights, alpha, self.kernels
        )  # fmt: skip
        zero = torch.zeros((), dtype=main.dtype, device=main.device)
        if self.model.prefix_gru is not None and self.base_share > 0:
            base = loss_sums(
                outputs.hidden, last_hidden, head, labels, weights, None, None, self.settings, self.kernels, 1, index
            )  # fmt: skip
            main = (1.0 - self.base_share) * main + self.base_share * base.main
        own_loss = (None, None) if own.confidence is None else confidence_loss(own.confidence, l1, weights)
        return LossSums(
            main=main, ce=(weights * ce).sum(), l1=(weights * l1).sum(), refined_ce=zero, refined_l1=zero,
            alignment=zero if alignment is None else alignment, weight=weights.sum(), covered=zero, heavy=zero,
            rows={"ce": ce, "l1": l1}, head=own_loss[0], head_count=own_loss[1],
        )  # fmt: skip
