"""Rounds of speculative decoding on texts that the target has already written, many prompts at once.

Verification is lossless, so a text drawn from the target is distributed as the output of a speculative run. Given such a
text x, what is left open is how far each round gets, and that has a closed form:

- greedy: a draft is accepted exactly as far as it spells the text;
- rejection rule: min(p, q) of the joint mass lies on "accepted, and it is x", so P(accepted | x) = min(1, q(x) / p(x));
- point-mass rule with drawn drafts: the draft is accepted where it equals x: P(accepted | x) = q(x).

q is the drafter's distribution given that its earlier drafts were accepted, that is, given the text. Drafts come from the
inference code (`TorchDrafter`); context K/V of a text serve all of its anchors, from the last to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspine.common.draft_heads import Draws, domino_walk, markov_walk, selector_lattice
from dspine.common.errors import DSpineError
from dspine.common.proposing import INDEPENDENT_CANDIDATES, scale_logits
from dspine.common.protocols import DraftRequest
from dspine_cuda.draft_cache import DraftCache
from dspine_cuda.drafter import TorchDrafter
from dspine_cuda.training.masks import document_mask
from dspine_cuda.training.target import FrozenTarget

BATCH = 128
HEAD_ROWS = 4096  # positions whose target logits exist at one time
RULES = ("rejection", "point-mass")


@dataclass(frozen=True)
class Text:
    """tokens int [T]: prompt and answer; start: index of the answer's first token (the prefill emits it); number keys draws."""

    tokens: np.ndarray
    start: int
    number: int = 0


@dataclass(frozen=True)
class Rounds:
    """accepted int [rounds]: drafts accepted in each round (those that were emitted); emitted: tokens by rounds."""

    accepted: np.ndarray
    emitted: int


@torch.inference_mode()
def simulate(
    drafter: TorchDrafter,
    target: FrozenTarget,
    texts: Sequence[Text],
    *,
    temperature: float = 0.0,
    rule: str = "rejection",
    seed: int = 0,
    batch: int = BATCH,
    independent: bool = False,
    draft_temperature: float | None = None,
) -> list[Rounds]:
    """The rounds of every text, as generation would take them: anchors follow one another, an end token or the limit of
    tokens ends the last round. independent: each position on its own from the ordinary output (an ablation of DSpine);
    draft_temperature: the drafter's own, where it is not the target's (the rejection rule stays lossless)."""
    if rule not in RULES:
        raise DSpineError(f"acceptance rule must be one of {', '.join(RULES)}, got {rule!r}")
    order = sorted(range(len(texts)), key=lambda i: (texts[i].start, len(texts[i].tokens)))
    results: dict[int, Rounds] = {}
    for first in range(0, len(order), batch):
        members = order[first : first + batch]
        chosen = [texts[i] for i in members]
        accepted = _accepted_everywhere(
            drafter, target, chosen, temperature, rule, seed, independent, draft_temperature or temperature
        )  # fmt: skip
        for i, text, row in zip(members, chosen, accepted, strict=True):
            results[i] = _walk(row, text)
    return [results[i] for i in range(len(texts))]


def _walk(accepted: np.ndarray, text: Text) -> Rounds:
    """Rounds of one text: accepted int [T] at every anchor, never beyond the text's end."""
    anchor, last, lengths = text.start, len(text.tokens) - 1, []
    while anchor < last:
        lengths.append(int(accepted[anchor]))
        anchor += lengths[-1] + 1
    return Rounds(np.array(lengths, dtype=np.int64), max(0, last - text.start))


def _accepted_everywhere(
    drafter: TorchDrafter,
    target: FrozenTarget,
    texts: list[Text],
    temperature: float,
    rule: str,
    seed: int,
    independent: bool,
    draft_temperature: float,
) -> np.ndarray:
    """Accepted drafts int [B, W] at every anchor of every text (0 elsewhere)."""
    proposals, device = drafter.config.num_proposals, target.device
    width = max(len(text.tokens) for text in texts) + drafter.config.block_size
    ids = np.full((len(texts), width), -1, dtype=np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = text.tokens
    truth = torch.from_numpy(ids).to(device)
    tokens = truth.clamp(min=0)
    cache, likely = _filled(drafter, target, tokens, temperature)
    draws = None if temperature == 0.0 else torch.from_numpy(_draws(texts, width, proposals, seed)).to(device)
    result = torch.zeros((len(texts), width), dtype=torch.int64, device=device)
    for anchor in reversed(range(min(t.start for t in texts), max(len(t.tokens) for t in texts) - 1)):
        cache.length = anchor
        following = truth[:, anchor + 1 : anchor + 1 + proposals]
        if draws is None:
            drafted = _greedy(drafter, cache, tokens[:, anchor], independent)
            kept = drafted == following
        else:
            q = text_probability(drafter, cache, tokens[:, anchor], following.clamp(min=0), draft_temperature, independent)
            chance = acceptance_chance(q, likely[:, anchor : anchor + proposals], rule)  # position i holds p of token i + 1
            kept = (draws[:, anchor] < chance) & (following >= 0)
        result[:, anchor] = kept.long().cumprod(dim=1).sum(dim=1)
    return result.cpu().numpy()


def _greedy(drafter: TorchDrafter, cache: DraftCache, anchor: Tensor, independent: bool) -> Tensor:
    if not independent:
        return drafter.propose(cache, anchor, DraftRequest()).tokens
    states, _ = drafter._run(cache, anchor)
    return drafter.target.head(states.hidden[:, 0, drafter.config.proposal_rows]).argmax(dim=-1)


def acceptance_chance(q: Tensor, p: Tensor, rule: str) -> Tensor:
    """P(draft accepted | the target's token is x), from the drafter's and the target's probability of x, any shape."""
    return q if rule == "point-mass" else (q / p).clamp(max=1.0)


def _draws(texts: list[Text], width: int, proposals: int, seed: int) -> np.ndarray:
    """Uniforms float32 [B, W, M], keyed by (seed, text)."""
    rows = [np.random.default_rng([seed, text.number]).random((width, proposals), dtype=np.float32) for text in texts]
    return np.stack(rows)


def _filled(
    drafter: TorchDrafter, target: FrozenTarget, tokens: Tensor, temperature: float
) -> tuple[DraftCache, Tensor | None]:
    """Context K/V of every position, and at temperature > 0 the target's probability of each next token [B, W]."""
    batch, width = tokens.shape
    weights = drafter.model.fc.weight
    cache = DraftCache(drafter.config, width, weights.dtype, weights.device, batch=batch)
    positions = torch.arange(width, device=tokens.device).expand(batch, -1)
    mask = document_mask(torch.zeros_like(tokens[:1]))
    features, last = target.eager_features(tokens, positions, mask, drafter.config.target_layer_ids)
    drafter.commit(cache, features)
    if temperature == 0.0:
        return cache, None
    following = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1).flatten()
    flat, parts = last.flatten(0, 1), []
    for start in range(0, flat.shape[0], HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        log_p = torch.log_softmax(target.head(flat[rows]) / temperature, dim=-1)
        parts.append(log_p.gather(1, following[rows, None])[:, 0].exp())
    return cache, torch.cat(parts).view(batch, width).clamp(min=1e-30)


@dataclass(frozen=True)
class _Spelled(Draws):
    """Stands in for draws: every step takes the text's token and reports the distribution it would have drawn from."""

    following: Tensor | None = None

    def pick(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        assert self.following is not None
        return self.following[:, step], torch.softmax(logits / self.temperature, dim=-1)


def text_probability(
    drafter: TorchDrafter,
    cache: DraftCache,
    anchor: Tensor,
    following: Tensor,
    temperature: float,
    independent: bool = False,
) -> Tensor:
    """q of the text's own tokens, each given the ones before it: anchor int [B], following int [B, M] -> float32 [B, M].

    A token that is no candidate has 0, and so has what follows it (as drafts, they cannot be reached).
    """
    states, code = drafter._run(cache, anchor)
    config, parts, rows = drafter.config, drafter.parts, drafter.config.proposal_rows
    hidden = states.hidden[:, 0, rows]
    logits = drafter.target.head(hidden)
    logits = scale_logits(logits, config) if drafter._own_scale else logits
    spelled = _Spelled(temperature, following=following)
    if independent:
        return _along(*_unconditional(logits), following, temperature)
    if parts.domino is not None:
        return _at(domino_walk(logits, hidden, anchor, parts.domino, spelled).q, following)
    if config.dspark is not None:
        return _at(markov_walk(logits, hidden, anchor, parts.markov, spelled).q, following)
    if parts.selector is not None:
        values, candidates = logits.topk(config.selector.top_k, dim=-1)  # type: ignore[union-attr]
        scores = selector_lattice(hidden, values, candidates, anchor, parts.selector)
    elif code is not None:
        candidates = logits.topk(config.dspine.top_k, dim=-1).indices  # type: ignore[union-attr]
        scores = drafter.transition(states.pre_injection[:, 0, rows], code, candidates)
    else:
        scores, candidates = _unconditional(logits)
    return _along(scores, candidates, following, temperature)


def _unconditional(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Scores [B, M, K, K] that do not depend on the predecessor, and candidates [B, M, K]."""
    values, candidates = logits.topk(min(INDEPENDENT_CANDIDATES, logits.shape[-1]), dim=-1)
    return values[:, :, None, :].expand(-1, -1, values.shape[-1], -1), candidates


def _at(q: Tensor, following: Tensor) -> Tensor:
    return q.gather(2, following.unsqueeze(-1))[..., 0]


def _along(scores: Tensor, candidates: Tensor, following: Tensor, temperature: float) -> Tensor:
    """scores float32 [B, M, K, K] (row: predecessor), candidates int [B, M, K] -> [B, M]."""
    hit = candidates == following.unsqueeze(-1)
    place, inside = hit.int().argmax(dim=-1), hit.any(dim=-1)
    before = torch.cat([torch.zeros_like(place[:, :1]), place[:, :-1]], dim=1)
    row = scores.gather(2, before[:, :, None, None].expand(-1, -1, 1, scores.shape[-1]))[:, :, 0]
    q = torch.softmax(row.float() / temperature, dim=-1).gather(2, place.unsqueeze(-1))[..., 0]
    return torch.where(inside.int().cumprod(dim=1).bool(), q, 0.0)
