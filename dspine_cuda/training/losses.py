"""Training losses (`algorithms` 1, Training): two outputs against the target's distribution, and layer supervision.

Vocabulary losses never hold the logits of all rows: rows go in chunks, and each chunk's gradient with respect to its
hidden states is made inside the forward (the head is frozen, so nothing else needs one). Sums come out undivided; `combine`
divides by GLOBAL denominators, so any split over micro-batches or ranks gives one and the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine_cuda.training.config import LossSection

GROUP = 64  # vocabulary entries a group in the two-stage top-k


def chunk_slices(rows: int, limit: int) -> list[slice]:
    """At most `limit` rows a chunk, equal chunks where a divisor is near (one compiled shape), else a shorter last one."""
    count = max(1, -(-rows // limit))
    for equal in range(count, min(4 * count, rows) + 1):
        if rows % equal == 0:
            count = equal
            break
    size = max(1, -(-rows // count))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def top_candidates(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits, descending: [rows, V] -> int [rows, count].

    Two stages: the top entries lie in the `count` groups with the largest maxima, so only those are sorted.
    """
    rows, vocab = logits.shape
    groups = vocab // GROUP
    if vocab % GROUP or groups < 4 * count:
        return logits.topk(count, dim=-1).indices
    grouped = logits.view(rows, groups, GROUP)
    best = grouped.amax(dim=-1).topk(count, dim=-1).indices
    inside = grouped.gather(1, best.unsqueeze(-1).expand(-1, -1, GROUP)).flatten(1).topk(count, dim=-1).indices
    return best.gather(1, inside // GROUP) * GROUP + inside % GROUP


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class RowLosses(NamedTuple):
    """ce, l1 [rows]; slope [rows, V]: gradient of alpha CE + (1 - alpha) l1 in the logits; the teacher's logits [rows, V] and
    their normaliser [rows, 1]."""

    ce: Tensor
    l1: Tensor
    slope: Tensor
    teacher: Tensor
    teacher_normalizer: Tensor


def row_losses(logits: Tensor, teacher_logits: Tensor, index: Tensor | None, labels: Tensor, alpha: float) -> RowLosses:
    """Cross-entropy and |q - p|_1 of every row: logits [rows, V], teacher_logits [positions, V] (index int [rows] or None).

    With z the logits and s = sign(q - p): d CE = q - onehot, d l1 = q (s - <q, s>).
    """
    z = _wide(logits)
    normalizer = torch.logsumexp(z, dim=-1, keepdim=True)
    q = torch.exp(z - normalizer)
    teacher_normalizer = torch.logsumexp(_wide(teacher_logits), dim=-1, keepdim=True)
    if index is not None:  # blocks overlap: one position's logits serve every block that reaches it
        teacher_logits, teacher_normalizer = teacher_logits[index], teacher_normalizer[index]
    teacher = _wide(teacher_logits)
    difference = q - torch.exp(teacher - teacher_normalizer)
    sign = torch.sign(difference)
    l1 = difference.abs().sum(dim=-1)
    inner = (q * sign).sum(dim=-1, keepdim=True)
    ce = (normalizer - z.gather(1, labels.unsqueeze(1))).squeeze(1)
    onehot = torch.arange(logits.shape[-1], device=logits.device).unsqueeze(0) == labels.unsqueeze(1)
    slope = alpha * (q - onehot.to(q.dtype)) + (1.0 - alpha) * q * (sign - inner)
    return RowLosses(ce, l1, slope, teacher, teacher_normalizer)


def vocabulary_chunk(
    hidden: Tensor,
    teacher: Tensor,
    index: Tensor | None,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    alpha: float,
    count: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One chunk of the backbone output's loss w [alpha CE + (1 - alpha) |q - p|_1].

    hidden [rows, H] and teacher [positions, H] final-normed; index int [rows]: the teacher's position of each row (None: they
    are the rows); head [V, H]; labels int [rows]; weights [rows]. Returns row CE, row l1 (unweighted), the gradient [rows, H]
    of the weighted sum, the top `count` ids, the teacher's probability of each.
    """
    logits = hidden @ head.T
    loss = row_losses(logits, teacher @ head.T, index, labels, alpha)
    gradient = (weights.unsqueeze(1) * loss.slope).to(hidden.dtype) @ head
    candidates = top_candidates(logits, count)
    mass = torch.exp(loss.teacher.gather(1, candidates) - loss.teacher_normalizer)
    return loss.ce, loss.l1, gradient, candidates, mass


def token_chunk(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Plain cross-entropy of one chunk: row CE and the gradient of the weighted sum."""
    z = _wide(hidden @ head.T)
    normalizer = torch.logsumexp(z, dim=-1, keepdim=True)
    ce = (normalizer - z.gather(1, labels.unsqueeze(1))).squeeze(1)
    onehot = torch.arange(head.shape[0], device=head.device).unsqueeze(0) == labels.unsqueeze(1)
    slope = torch.exp(z - normalizer) - onehot.to(z.dtype)
    return ce, (weights.unsqueeze(1) * slope).to(hidden.dtype) @ head


def refined_chunk(
    refined: Tensor, rows: Tensor, candidates: Tensor, mass: Tensor, labels: Tensor, weights: Tensor, threshold: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One chunk of the refined output's losses over the K candidates.

    refined [rows, H], rows (LM-head rows) [rows, K, H], candidates int, mass (teacher's probabilities) [rows, K]. Returns
    row CE (0 where the label is no candidate), row l1 (0 where the candidates hold at most `threshold`), the two
    weighted gradients [rows, H], and the two row indicators.
    """
    wide_rows = _wide(rows)
    scores = (_wide(refined).unsqueeze(1) * wide_rows).sum(dim=-1)
    log_q = torch.log_softmax(scores, dim=-1)
    q = log_q.exp()
    hit = (candidates == labels.unsqueeze(1)).to(q.dtype)
    covered = hit.sum(dim=-1)
    total = mass.sum(dim=-1, keepdim=True)
    heavy = (total > threshold).to(q.dtype).squeeze(1)
    difference = q - mass / torch.where(total > 0, total, 1.0)
    sign = torch.sign(difference)
    ce = -(log_q * hit).sum(dim=-1)
    l1 = difference.abs().sum(dim=-1) * heavy
    ce_slope = (weights * covered).unsqueeze(1) * (q - hit)
    l1_slope = (weights * heavy).unsqueeze(1) * q * (sign - (q * sign).sum(dim=-1, keepdim=True))
    ce_gradient = (ce_slope.unsqueeze(-1) * wide_rows).sum(dim=1).to(refined.dtype)
    l1_gradient = (l1_slope.unsqueeze(-1) * wide_rows).sum(dim=1).to(refined.dtype)
    return ce, l1, ce_gradient, l1_gradient, covered, heavy


@dataclass(frozen=True)
class ChunkKernels:
    """The chunk functions, compiled or not, and the chunk size. `joint`: of the kinds with a trained head (`kinds.py`)."""

    chunk_rows: int
    vocabulary: Callable[..., tuple[Tensor, ...]] = vocabulary_chunk
    refined: Callable[..., tuple[Tensor, ...]] = refined_chunk
    token: Callable[..., tuple[Tensor, ...]] = token_chunk
    joint: Callable[..., tuple[Tensor, ...]] | None = None

    def compiled(self) -> ChunkKernels:
        """The same under torch.compile."""
        functions = (self.vocabulary, self.refined, self.token, self.joint)
        return ChunkKernels(self.chunk_rows, *(None if f is None else torch.compile(f, dynamic=False) for f in functions))


def teacher_chunks(
    rows: int, teacher: Tensor, index: Tensor | None, limit: int
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """(rows, the teacher's hidden states they need, their index there): teacher [rows, H] without `index`, else [B, S, H] and
    index int [B, rows / B]. Whole packed rows share their positions' logits where that is less work, and where one fits."""
    if index is None:
        for part in chunk_slices(rows, limit):
            yield part, teacher[part], None
        return
    batch, each = index.shape
    length = teacher.shape[1]
    if each > limit or length >= each:
        gathered = teacher.gather(1, index.unsqueeze(-1).expand(-1, -1, teacher.shape[-1])).flatten(0, 1)
        yield from teacher_chunks(rows, gathered, None, limit)
        return
    for part in chunk_slices(batch, limit // each):
        offsets = length * torch.arange(part.stop - part.start, device=index.device)
        yield (
            slice(part.start * each, part.stop * each),
            teacher[part].flatten(0, 1),
            (index[part] + offsets[:, None]).flatten(),
        )


class _VocabularyLoss(torch.autograd.Function):
    """Sum of w [alpha CE + (1 - alpha) l1]; see `vocabulary_chunk`."""

    @staticmethod
    def forward(ctx, hidden, teacher, index, head, labels, weights, alpha, count, kernels):  # noqa: ANN001, ANN205
        parts = [
            kernels.vocabulary(hidden[rows], states, places, head, labels[rows], weights[rows], alpha, count)
            for rows, states, places in teacher_chunks(hidden.shape[0], teacher, index, kernels.chunk_rows)
        ]
        ce, l1, gradient, candidates, mass = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(ce, l1, candidates, mass)
        return (weights * (alpha * ce + (1.0 - alpha) * l1)).sum(), ce, l1, candidates, mass

    @staticmethod
    def backward(ctx, grad, *_):  # noqa: ANN001, ANN205
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), *[None] * 8


class _TokenLoss(torch.autograd.Function):
    """Sum of w CE; see `token_chunk`."""

    @staticmethod
    def forward(ctx, hidden, head, labels, weights, kernels):  # noqa: ANN001, ANN205
        parts = [
            kernels.token(hidden[rows], head, labels[rows], weights[rows])
            for rows in chunk_slices(hidden.shape[0], kernels.chunk_rows)
        ]
        ce, gradient = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(gradient)
        return (weights * ce).sum()

    @staticmethod
    def backward(ctx, grad):  # noqa: ANN001, ANN205
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None, None


class _RefinedLoss(torch.autograd.Function):
    """Sums of w CE and of w l1 over the candidates, apart, because their denominators differ; see `refined_chunk`."""

    @staticmethod
    def forward(ctx, refined, head, candidates, mass, labels, weights, threshold, kernels):  # noqa: ANN001, ANN205
        parts = []
        for r in chunk_slices(refined.shape[0], kernels.chunk_rows):
            rows = head[candidates[r]]
            parts.append(kernels.refined(refined[r], rows, candidates[r], mass[r], labels[r], weights[r], threshold))
        ce, l1, ce_gradient, l1_gradient, covered, heavy = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(ce_gradient, l1_gradient)
        ctx.mark_non_differentiable(ce, l1, covered, heavy)
        return (weights * ce).sum(), (weights * l1).sum(), ce, l1, covered, heavy

    @staticmethod
    def backward(ctx, grad_ce, grad_l1, *_):  # noqa: ANN001, ANN205
        ce_gradient, l1_gradient = ctx.saved_tensors
        gradient = ce_gradient * grad_ce.to(ce_gradient.dtype) + l1_gradient * grad_l1.to(l1_gradient.dtype)
        return gradient, *[None] * 7


@dataclass(frozen=True)
class LossSums:
    """Undivided weighted sums of one share of the batch (scalars; `main`, `refined_*`, `alignment` carry gradients).

    weight: sum of w; covered: sum of w over rows whose label is a candidate; heavy: over rows whose candidates hold
    enough of the target's mass. `rows`: per-row terms, for tests and metrics. head, head_count: the sum of a kind's own
    loss (selector, confidence) and of the w it is over.
    """

    main: Tensor
    ce: Tensor
    l1: Tensor
    refined_ce: Tensor
    refined_l1: Tensor
    alignment: Tensor
    weight: Tensor
    covered: Tensor
    heavy: Tensor
    rows: dict[str, Tensor]
    head: Tensor | None = None
    head_count: Tensor | None = None

    NAMES = ("ce", "l1", "refined_ce", "refined_l1", "alignment", "weight", "covered", "heavy", "head", "head_count")

    def totals(self) -> Tensor:
        """The detached sums in the order of NAMES, float32 [10]: what is added over micro-batches and ranks."""
        zero = torch.zeros((), device=self.weight.device)
        sums = [getattr(self, name) for name in self.NAMES]
        return torch.stack([zero if value is None else value.detach().float() for value in sums])


def loss_sums(
    hidden: Tensor,
    teacher: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    refined: Tensor | None,
    alignment: Tensor | None,
    settings: LossSection,
    kernels: ChunkKernels,
    top_k: int,
    teacher_index: Tensor | None = None,
) -> LossSums:
    """All terms over flat rows: hidden, teacher [rows, H]; labels, weights [rows]; refined [rows, H] or None; alignment:
    its weighted sum (a scalar with gradient) or None. With `teacher_index` int [B, rows / B], teacher is [B, S, H] and the
    index says which position predicts each row's label."""
    zero = torch.zeros((), dtype=_wide(hidden[:0]).dtype, device=hidden.device)
    main, ce, l1, candidates, mass = _VocabularyLoss.apply(
        hidden, teacher, teacher_index, head, labels, weights, settings.alpha, top_k, kernels
    )
    rows = {"ce": ce, "l1": l1, "candidates": candidates, "candidate_mass": mass.sum(dim=-1)}
    refined_ce = refined_l1 = covered = heavy = zero
    if refined is not None:
        refined_ce, refined_l1, row_ce, row_l1, is_covered, is_heavy = _RefinedLoss.apply(
            refined, head, candidates, mass, labels, weights, settings.mass_threshold, kernels
        )
        covered, heavy = (weights * is_covered).sum(), (weights * is_heavy).sum()
        rows |= {"refined_ce": row_ce, "refined_l1": row_l1, "covered": is_covered}
    return LossSums(
        main=main,
        ce=(weights * ce).sum(),
        l1=(weights * l1).sum(),
        refined_ce=refined_ce,
        refined_l1=refined_l1,
        alignment=zero if alignment is None else alignment,
        weight=weights.sum(),
        covered=covered,
        heavy=heavy,
        rows=rows,
        head=zero,
        head_count=zero,
    )


def token_alignment(layers: list[Tensor], head: Tensor, labels: Tensor, weights: Tensor, kernels: ChunkKernels) -> Tensor:
    """The ablation's layer supervision: sum over layers of w CE of a layer's own token output; final-normed [rows, H]."""
    return torch.stack([_TokenLoss.apply(layer, head, labels, weights, kernels) for layer in layers]).sum()


@dataclass(frozen=True)
class Denominators:
    """Factors on the sums, from global totals: main on CE and l1, refined ones and a kind's own apart, mean CE for lambda."""

    main: Tensor
    refined_ce: Tensor
    refined_l1: Tensor
    mean_ce: Tensor
    head: Tensor


def denominators(totals: Tensor, normalization: str) -> Denominators:
    """`own`: refined CE and l1 by their own weighted counts (no such row: 0), the rest by the sum of w. `shared`: all by
    max(sum of w, 1), as SpecForge's first code."""
    named = dict(zip(LossSums.NAMES, totals.unbind(), strict=True))
    if normalization == "shared":
        factor = 1.0 / named["weight"].clamp(min=1.0)
        return Denominators(factor, factor, factor, named["ce"] * factor, factor)
    main, covered, heavy, head = (
        torch.where(named[name] > 0, 1.0 / torch.where(named[name] > 0, named[name], 1.0), 0.0)
        for name in ("weight", "covered", "heavy", "head_count")
    )
    return Denominators(main, covered, heavy, named["ce"] * main, head)


def combine(sums: LossSums, totals: Tensor, settings: LossSection, beta: Tensor | float) -> Tensor:
    """This share's part of the loss: parts of all shares add up to the loss of the whole batch.

    lambda = beta * alignment_scale * stop_grad(mean CE of the backbone output).
    """
    factors = denominators(totals, settings.normalization)
    refined = (
        settings.alpha * factors.refined_ce * sums.refined_ce + (1.0 - settings.alpha) * factors.refined_l1 * sums.refined_l1
    )
    strength = beta * settings.alignment_scale * factors.mean_ce
    loss = factors.main * sums.main + refined + strength * factors.main * sums.alignment
    return loss if sums.head is None else loss + settings.head_weight * factors.head * sums.head


def cosine_alignment(units: list[Tensor], codes: Tensor, weights: Tensor) -> Tensor:
    """Sum over layers and rows of w [1 - cos(f_l(h_l), C_y)]: units (unit vectors) and codes [..., r], weights [...]."""
    wide = F.normalize(_wide(codes), dim=-1)
    return torch.stack([(weights * (1.0 - (unit * wide).sum(dim=-1))).sum() for unit in units]).sum()
