"""Rounds of speculative decoding on texts that the target has already written, many prompts at once.

Verification is lossless, so a text drawn from the target is distributed as the output of a speculative run. Given such a
text x, what is left open is how far each round gets, and that has a closed form:

- greedy: a draft is accepted exactly as far as it spells the text;
- rejection rule: min(p, q) of the joint mass lies on "accepted, and it is x", so P(accepted | x) = min(1, q(x) / p(x));
- point-mass rule with drawn drafts: the draft is accepted where it equals x: P(accepted | x) = q(x).

q is the drafter's distribution given that its earlier drafts were accepted, that is, given the text. What is drafted is
decided by the inference code (`make_proposal`, `TorchDrafter.transition`); the hidden states come from the trainer's packed
forward, or, slowly and for tests, from `TorchDrafter` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dspine.common.draft_heads import Draws, domino_walk, markov_walk, selector_lattice
from dspine.common.errors import DSpineError
from dspine.common.proposing import INDEPENDENT_CANDIDATES, DraftParts, make_proposal, scale_logits
from dspine.common.protocols import DraftRequest
from dspine_cuda.draft_cache import DraftCache
from dspine_cuda.drafter import TorchDrafter
from dspine_cuda.training.batches import Batch
from dspine_cuda.training.forward import MaskBuilder, block_states, codes_of, pick_attention
from dspine_cuda.training.masks import NO_DOCUMENT, document_mask
from dspine_cuda.training.target import FrozenTarget

BATCH, PACKED_BATCH = 128, 8  # texts at a time
HEAD_BLOCKS = 512  # blocks whose draft logits exist at one time
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
    batch: int | None = None,
    independent: bool = False,
    draft_temperature: float | None = None,
    packed: bool = True,
) -> list[Rounds]:
    """The rounds of every text, as generation would take them: anchors follow one another, an end token or the limit of
    tokens ends the last round. independent: each position on its own from the ordinary output (an ablation of DSpine);
    draft_temperature: the drafter's own, where it is not the target's (the rejection rule stays lossless). packed: all anchors
    of a text in one forward of the trainer; else one at a time by the inference code (slow; tests compare the two)."""
    if rule not in RULES:
        raise DSpineError(f"acceptance rule must be one of {', '.join(RULES)}, got {rule!r}")
    ask = _Question(temperature, draft_temperature or temperature, rule, seed, independent)
    packed = packed and drafter._mask_embedding is None  # the trainer's blocks are made of the target's own mask row
    size = batch or (PACKED_BATCH if packed else BATCH)
    order = sorted(range(len(texts)), key=lambda i: (texts[i].start, len(texts[i].tokens)))
    results: dict[int, Rounds] = {}
    for first in range(0, len(order), size):
        members = order[first : first + size]
        chosen = [texts[i] for i in members]
        accepted = (_all_at_once if packed else _one_by_one)(drafter, target, chosen, ask)
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


@dataclass(frozen=True)
class _Question:
    """What is asked of every draft: the target's and the drafter's temperature, the rule, seed, independence."""

    temperature: float
    draft_temperature: float
    rule: str
    seed: int
    independent: bool


@dataclass(frozen=True)
class DraftStates:
    """A draft before its head, n of them: anchor int [n]; hidden (final-normed) and pre_injection (u_L) of the proposal rows
    [n, M, H]; code sqrt(r) C of the anchor [n, r] (DSpine)."""

    anchor: Tensor
    hidden: Tensor
    pre_injection: Tensor
    code: Tensor | None


def _ids(texts: list[Text], width: int, device: torch.device) -> Tensor:
    """int64 [B, W], -1 behind each text."""
    ids = np.full((len(texts), width), -1, dtype=np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text.tokens)] = text.tokens
    return torch.from_numpy(ids).to(device)


def _kept(drafter: TorchDrafter, states: DraftStates, following: Tensor, draws: Tensor, p: Tensor, ask: _Question) -> Tensor:
    """Drafts accepted in a row from the first, int [n]: following int [n, M] (-1 behind the text), draws and p [n, M]."""
    if ask.temperature == 0.0:
        kept = greedy_drafts(drafter, states, ask.independent) == following
    else:
        q = text_probability(drafter, states, following.clamp(min=0), ask.draft_temperature, ask.independent)
        kept = (draws < acceptance_chance(q, p, ask.rule)) & (following >= 0)
    return kept.long().cumprod(dim=1).sum(dim=1)


def _one_by_one(drafter: TorchDrafter, target: FrozenTarget, texts: list[Text], ask: _Question) -> np.ndarray:
    """Accepted drafts int [B, W] at every anchor (0 elsewhere), drafted by the inference code: context K/V of a text serve all
    of its anchors, from the last to the first."""
    proposals, device = drafter.config.num_proposals, target.device
    width = max(len(text.tokens) for text in texts) + drafter.config.block_size
    truth = _ids(texts, width, device)
    tokens = truth.clamp(min=0)
    cache, likely = _filled(drafter, target, tokens, ask.temperature)
    draws = torch.from_numpy(_draws(texts, width, proposals, ask)).to(device)
    result = torch.zeros((len(texts), width), dtype=torch.int64, device=device)
    for anchor in reversed(range(min(t.start for t in texts), max(len(t.tokens) for t in texts) - 1)):
        cache.length = anchor
        states = inference_states(drafter, cache, tokens[:, anchor])
        place = slice(anchor, anchor + proposals)  # position i holds p of token i + 1
        following = truth[:, anchor + 1 : anchor + 1 + proposals]
        result[:, anchor] = _kept(drafter, states, following, draws[:, anchor], likely[:, place], ask)
    return result.cpu().numpy()


def inference_states(drafter: TorchDrafter, cache: DraftCache, anchor: Tensor) -> DraftStates:
    """anchor int [B] at position `cache.length`, by the inference code."""
    states, code = drafter._run(cache, anchor)
    rows = drafter.config.proposal_rows
    return DraftStates(anchor, states.hidden[:, 0, rows], states.pre_injection[:, 0, rows], code)


def _all_at_once(drafter: TorchDrafter, target: FrozenTarget, texts: list[Text], ask: _Question) -> np.ndarray:
    """The same by the trainer's packed forward: every anchor of a text is a block of one row."""
    model, config, device = drafter.model, drafter.config, target.device
    proposals, width = config.num_proposals, max(len(text.tokens) for text in texts)
    truth = _ids(texts, width + config.block_size, device)
    tokens, documents = truth[:, :width].clamp(min=0), torch.where(truth[:, :width] >= 0, 0, NO_DOCUMENT)
    steps = torch.arange(max(1, *(len(t.tokens) - 1 - t.start for t in texts)), device=device)
    starts, ends = (torch.tensor(values, device=device)[:, None] for values in zip(*((t.start, len(t.tokens)) for t in texts)))  # noqa: B905
    keep = starts + steps < ends - 1
    anchors = torch.where(keep, starts + steps, 0)
    index = anchors[:, :, None] + torch.arange(1, proposals + 1, device=device)
    following = truth.gather(1, index.flatten(1)).view_as(index)
    positions = torch.arange(width, device=device).expand(len(texts), -1)
    features, last = target.eager_features(tokens, positions, document_mask(documents), config.target_layer_ids)
    batch = Batch(
        tokens, documents, positions, anchors, keep, following.clamp(min=0), torch.zeros_like(index, dtype=torch.float32),
        torch.zeros_like(keep), None, config.query_rows,
    )  # fmt: skip
    rope = tuple(table[0] for table in model.rope(width + config.block_size))
    masks = MaskBuilder(config.mask_rules(), "sdpa")(batch)
    states = block_states(model, batch, features, target.embedding, masks, pick_attention("sdpa", False), rope, False)
    hidden, pre = (part[:, :, config.proposal_rows][keep] for part in (states.hidden, states.pre_injection))
    anchor = batch.anchor_tokens[keep]
    code = None if model.injection is None else codes_of(model, anchor).to(hidden.dtype)
    p = _next_probability(target, last, tokens, ask.temperature)
    p = torch.nn.functional.pad(p, (0, config.block_size)).gather(1, (index - 1).flatten(1)).view_as(index)[keep]
    draws = torch.from_numpy(_draws(texts, width, proposals, ask)).to(device)
    draws = draws.gather(1, anchors[:, :, None].expand(-1, -1, proposals))[keep]
    kept, result = [], torch.zeros((len(texts), width), dtype=torch.int64, device=device)
    for first in range(0, len(anchor), HEAD_BLOCKS):
        part = slice(first, first + HEAD_BLOCKS)
        some = DraftStates(anchor[part], hidden[part], pre[part], None if code is None else code[part])
        kept.append(_kept(drafter, some, following[keep][part], draws[part], p[part], ask))
    result[torch.nonzero(keep)[:, 0], anchors[keep]] = torch.cat(kept)
    return result.cpu().numpy()


def greedy_drafts(drafter: TorchDrafter, states: DraftStates, independent: bool) -> Tensor:
    """int [n, M], by the function that drafts in generation."""
    logits = _logits(drafter, states)
    if independent:
        return logits.argmax(dim=-1)
    parts = drafter.parts
    if states.code is not None:
        parts = DraftParts(transition=partial(drafter.transition, states.pre_injection, states.code))
    return make_proposal(drafter.config, parts, states.hidden, logits, states.anchor, DraftRequest()).tokens


def _logits(drafter: TorchDrafter, states: DraftStates) -> Tensor:
    logits = drafter.target.head(states.hidden)
    return scale_logits(logits, drafter.config) if drafter._own_scale else logits


def acceptance_chance(q: Tensor, p: Tensor, rule: str) -> Tensor:
    """P(draft accepted | the target's token is x), from the drafter's and the target's probability of x, any shape."""
    return q if rule == "point-mass" else (q / p).clamp(max=1.0)


def _draws(texts: list[Text], width: int, proposals: int, ask: _Question) -> np.ndarray:
    """Uniforms float32 [B, W, M], keyed by (seed, text); nothing is drawn for greedy drafts."""
    if ask.temperature == 0.0:
        return np.zeros((len(texts), width, proposals), dtype=np.float32)
    rows = [np.random.default_rng([ask.seed, text.number]).random((width, proposals), dtype=np.float32) for text in texts]
    return np.stack(rows)


def _filled(drafter: TorchDrafter, target: FrozenTarget, tokens: Tensor, temperature: float) -> tuple[DraftCache, Tensor]:
    """Context K/V of every position, and `_next_probability`."""
    batch, width = tokens.shape
    weights = drafter.model.fc.weight
    cache = DraftCache(drafter.config, width, weights.dtype, weights.device, batch=batch)
    positions = torch.arange(width, device=tokens.device).expand(batch, -1)
    mask = document_mask(torch.zeros_like(tokens[:1]))
    features, last = target.eager_features(tokens, positions, mask, drafter.config.target_layer_ids)
    drafter.commit(cache, features)
    return cache, _next_probability(target, last, tokens, temperature)


def _next_probability(target: FrozenTarget, last: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """The target's probability of each next token of the text, float32 [B, W] (at temperature 0: ones, they are not read)."""
    if temperature == 0.0:
        return torch.ones(tokens.shape, device=tokens.device)
    following = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1).flatten()
    flat, parts = last.flatten(0, 1), []
    for start in range(0, flat.shape[0], HEAD_ROWS):
        rows = slice(start, start + HEAD_ROWS)
        log_p = torch.log_softmax(target.head(flat[rows]) / temperature, dim=-1)
        parts.append(log_p.gather(1, following[rows, None])[:, 0].exp())
    return torch.cat(parts).view(tokens.shape).clamp(min=1e-30)


@dataclass(frozen=True)
class _Spelled(Draws):
    """Stands in for draws: every step takes the text's token and reports the distribution it would have drawn from."""

    following: Tensor | None = None

    def pick(self, logits: Tensor, step: int) -> tuple[Tensor, Tensor]:
        assert self.following is not None
        return self.following[:, step], torch.softmax(logits / self.temperature, dim=-1)


def text_probability(
    drafter: TorchDrafter, states: DraftStates, following: Tensor, temperature: float, independent: bool = False
) -> Tensor:
    """q of the text's own tokens, each given the ones before it: following int [n, M] -> float32 [n, M].

    A token that is no candidate has 0, and so has what follows it (as drafts, they cannot be reached).
    """
    config, parts = drafter.config, drafter.parts
    hidden, anchor, logits = states.hidden, states.anchor, _logits(drafter, states)
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
    elif states.code is not None:
        candidates = logits.topk(config.dspine.top_k, dim=-1).indices  # type: ignore[union-attr]
        scores = drafter.transition(states.pre_injection, states.code, candidates)
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
