"""Training of the other kinds' own parts: DFlash2's convolutions and selector, Domino's GRU, DSpark's two heads.

The maths is `common.draft_heads`', spelled here in plain torch for all rows at once, given the correct predecessors (tests
compare the two). Domino and DSpark add `latent @ extra_head^T` to the ordinary logits; DFlash2 scores its candidates anew.
Losses of the outputs are the family's (`losses.py`), so that drafters of different kinds differ in their parts only; what a
kind's own training adds (SpecForge) is here: DFlash2's selector cross-entropy over the unary top-K, Domino's share of the
uncorrected output, falling linearly to 0, DSpark's confidence against 1 - l1 / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspine_cuda.draft_heads import GroupedConv
from dspine_cuda.drafter import DrafterModel
from dspine_cuda.training.losses import ChunkKernels, chunk_slices, row_losses, teacher_chunks


class TrainableConv(GroupedConv):
    """The same convolution in operations that torch.compile traces."""

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kernels = self.kernel_projection(x)
        kernels = kernels.unflatten(-1, (2, self.taps, -1))
        return _convolve(x, kernels[..., 0, :, :], self.base_kernel[0]), kernels[..., 1, :, :]

    def finish(self, x: Tensor, kernel: Tensor) -> Tensor:
        return _convolve(x, kernel, self.base_kernel[1])


def _convolve(x: Tensor, delta: Tensor, base: Tensor) -> Tensor:
    """y_t = sum_j (base_j + delta_t,j of the channel's group) x_{t-j}: x [..., R, H], delta [..., R, taps, groups]."""
    groups, total = delta.shape[-1], torch.zeros_like(x)
    for tap in range(min(delta.shape[-2], x.shape[-2])):
        kernel = base[tap].unflatten(-1, (groups, -1)) + delta[..., tap, :].unsqueeze(-1)
        shifted = F.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :]
        total = total + (kernel * shifted.unflatten(-1, (groups, -1))).flatten(-2)
    return total


@dataclass(frozen=True)
class KindOutputs:
    """latent [rows, e]: what `extra_head` [V, e] is applied to (Domino, DSpark); context [rows, r]: A[p] * (W h) (DFlash2);
    confidence [rows]: logits (DSpark)."""

    latent: Tensor | None = None
    context: Tensor | None = None
    confidence: Tensor | None = None


def kind_outputs(model: DrafterModel, hidden: Tensor, before: Tensor, embedding: Tensor) -> KindOutputs:
    """hidden [B, N, M, H] final-normed proposal rows, before int [B, N, M]: the correct token before each."""
    if model.candidate_selector is not None:
        selector = model.candidate_selector
        context = F.embedding(before, selector.predecessor_codebook) * selector.hidden_projection(hidden)
        return KindOutputs(context=context.flatten(0, 2))
    if model.prefix_gru is not None:
        return KindOutputs(latent=_domino_latent(model, hidden, before, embedding).flatten(0, 2))
    latent = confidence = table = None
    if model.markov_head is not None:
        table = model.markov_head.markov_w1(before)
        latent = _markov_latent(model.markov_head, hidden, table).flatten(0, 2)
    if model.confidence_head is not None:
        mixed = model.config.dspark is not None and model.config.dspark.confidence_with_markov
        features = torch.cat([hidden, table], dim=-1) if mixed and table is not None else hidden
        confidence = model.confidence_head.proj(features).squeeze(-1).flatten()
    return KindOutputs(latent=latent, confidence=confidence)


def _markov_latent(head: nn.Module, hidden: Tensor, before: Tensor) -> Tensor:
    """What DSpark's W2 is applied to, for every step: hidden [B, N, M, H], before = W1[x_{t-1}] [B, N, M, r]."""
    if head.kind == "vanilla":
        return before
    if head.kind == "gated":
        return torch.sigmoid(head.gate_proj(torch.cat([hidden, before], dim=-1))) * before
    state, steps = torch.zeros_like(before[..., 0, :]), []
    for step in range(hidden.shape[-2]):
        mixed = head.joint_proj(torch.cat([state, before[..., step, :], hidden[..., step, :]], dim=-1))
        gate, new, out = mixed.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(new)
        steps.append(torch.tanh(out))
    return torch.stack(steps, dim=-2)


def _domino_latent(model: DrafterModel, hidden: Tensor, before: Tensor, embedding: Tensor) -> Tensor:
    """silu(E0 [z_t; s_t]), zero for the first proposal (it is never corrected); s_t: the GRU after [anchor, y_1 .. y_t]."""
    gru, down = model.prefix_gru, model.embed_proj[0]
    words = embedding[before].to(hidden.dtype)
    state, steps = None, []
    for step in range(hidden.shape[-2]):
        left = F.linear(words[..., step, :], gru.weight_ih_l0)
        reset, keep, new = left.chunk(3, dim=-1)
        if state is None:
            state = (1 - torch.sigmoid(keep)) * torch.tanh(new)
        else:
            own_reset, own_keep, own_new = F.linear(state, gru.weight_hh_l0).chunk(3, dim=-1)
            keep = torch.sigmoid(keep + own_keep)
            state = (1 - keep) * torch.tanh(new + torch.sigmoid(reset + own_reset) * own_new) + keep * state
        inner = F.silu(down(torch.cat([hidden[..., step, :], state], dim=-1)))
        steps.append(torch.zeros_like(inner) if step == 0 else inner)
    return torch.stack(steps, dim=-2)


def extra_head(model: DrafterModel) -> Tensor | None:
    """The trained [V, e] beside the LM head."""
    if model.prefix_gru is not None:
        return model.embed_proj[2].weight
    return None if model.markov_head is None else model.markov_head.markov_w2.weight


def joint_chunk(
    hidden: Tensor, latent: Tensor, teacher: Tensor, index: Tensor | None, head: Tensor, extra: Tensor, labels: Tensor,
    weights: Tensor, alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`losses.vocabulary_chunk` for logits hidden head^T + latent extra^T: row CE, row l1, and the weighted gradients of hidden
    [rows, H], latent [rows, e] and extra [V, e] (float32)."""
    loss = row_losses(hidden @ head.T + latent @ extra.T, teacher @ head.T, index, labels, alpha)
    slope = (weights.unsqueeze(1) * loss.slope).to(hidden.dtype)
    return loss.ce, loss.l1, slope @ head, slope @ extra, (slope.T @ latent).float()


class _JointLoss(torch.autograd.Function):
    """Sum of w [alpha CE + (1 - alpha) l1] of the corrected logits."""

    @staticmethod
    def forward(ctx, hidden, latent, extra, teacher, index, head, labels, weights, alpha, kernels):  # noqa: ANN001, ANN205
        ces, l1s, to_hidden, to_latent, to_extra = [], [], [], [], torch.zeros_like(extra, dtype=torch.float32)
        for rows, states, places in teacher_chunks(hidden.shape[0], teacher, index, kernels.chunk_rows):
            ce, l1, first, second, third = kernels.joint(
                hidden[rows], latent[rows], states, places, head, extra, labels[rows], weights[rows], alpha
            )
            ces.append(ce), l1s.append(l1), to_hidden.append(first), to_latent.append(second)
            to_extra += third
        ce, l1 = torch.cat(ces), torch.cat(l1s)
        ctx.save_for_backward(torch.cat(to_hidden), torch.cat(to_latent), to_extra.to(extra.dtype))
        ctx.mark_non_differentiable(ce, l1)
        return (weights * (alpha * ce + (1.0 - alpha) * l1)).sum(), ce, l1

    @staticmethod
    def backward(ctx, grad, *_):  # noqa: ANN001, ANN205
        return *(saved * grad.to(saved.dtype) for saved in ctx.saved_tensors), *[None] * 7


def joint_loss(
    hidden: Tensor, latent: Tensor, extra: Tensor, teacher: Tensor, index: Tensor | None, head: Tensor, labels: Tensor,
    weights: Tensor, alpha: float, kernels: ChunkKernels,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(weighted sum, row CE, row l1) of the corrected output."""
    return _JointLoss.apply(hidden, latent, extra, teacher, index, head, labels, weights, alpha, kernels)


def selector_loss(
    context: Tensor, successor: Tensor, hidden: Tensor, head: Tensor, candidates: Tensor, labels: Tensor, weights: Tensor,
    kernels: ChunkKernels,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """DFlash2's selector: (sum of w CE over the K candidates, sum of w) of rows whose label is one of them.

    context [rows, r], successor B [V, r], hidden [rows, H] (its logits enter without gradient), candidates int [rows, K].
    """
    with torch.no_grad():
        parts = chunk_slices(hidden.shape[0], kernels.chunk_rows)
        unary = torch.cat([(hidden[r].unsqueeze(1) * head[candidates[r]]).sum(dim=-1, dtype=torch.float32) for r in parts])
    pair = (context.unsqueeze(1) * F.embedding(candidates, successor)).sum(dim=-1, dtype=torch.float32)
    hit = (candidates == labels.unsqueeze(1)).float()
    ce = -(torch.log_softmax(unary + pair, dim=-1) * hit).sum(dim=-1)
    return (weights * ce).sum(), (weights * hit.sum(dim=-1)).sum()


def confidence_loss(logits: Tensor, l1: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """DSpark's confidence: (sum of w BCE against 1 - l1 / 2, sum of w); the label carries no gradient."""
    wanted = (1.0 - 0.5 * l1.detach()).clamp(0.0, 1.0)
    bce = F.binary_cross_entropy_with_logits(logits.to(wanted.dtype), wanted, reduction="none")
    return (weights * bce).sum(), weights.sum()


@torch.no_grad()
def start_heads(model: DrafterModel, generator: torch.Generator) -> None:
    """Every correction starts at nothing: W2, E2 and B zero, convolutions the identity; the tables before them random."""
    for layer in model.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            if conv is not None:
                conv.kernel_projection.weight.zero_()
                conv.base_kernel.zero_()
                conv.base_kernel[:, 0] = 1.0
    if model.candidate_selector is not None:
        table = model.candidate_selector.predecessor_codebook
        table.normal_(std=table.shape[1] ** -0.5, generator=generator)
        model.candidate_selector.successor_codebook.zero_()
    if model.prefix_gru is not None:
        bound = model.prefix_gru.weight_hh_l0.shape[1] ** -0.5
        for weight in (model.prefix_gru.weight_ih_l0, model.prefix_gru.weight_hh_l0):
            weight.uniform_(-bound, bound, generator=generator)
        model.embed_proj[2].weight.zero_()
    if model.markov_head is not None:
        table = model.markov_head.markov_w1.weight
        table.normal_(std=table.shape[1] ** -0.5, generator=generator)
        model.markov_head.markov_w2.weight.zero_()
    if model.confidence_head is not None:
        model.confidence_head.proj.weight.zero_()
