"""Acceptance on held-out text, drafted by the INFERENCE code (`TorchDrafter`).

Greedy acceptance needs no target run where the text is the target's own greedy answer: a draft is accepted exactly as far
as it spells that text. Context K/V do not depend on what follows, so one cache serves every anchor of a conversation when
anchors go from the last to the first: a block's scratch rows lie beyond everything an earlier anchor reads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine.common.models import resolve_model
from dspine.common.protocols import DraftRequest
from dspine_cuda.draft_cache import DraftCache
from dspine_cuda.drafter import TorchDrafter, load_drafter
from dspine_cuda.training.data import Conversation, load_conversations, split_holdout
from dspine_cuda.training.masks import document_mask
from dspine_cuda.training.target import FrozenTarget, load_frozen_target, load_tokenizer

BATCH = 128


@dataclass(frozen=True)
class Acceptance:
    """tau: mean tokens emitted a round (accepted drafts + 1). by_position[t-1]: share of rounds that accepted at least t.
    exact: rounds follow one another as in generation; else anchors lie on a grid. greedy_text: the text is greedy answers."""

    tau: float
    by_position: list[float]
    rounds: int
    exact: bool
    greedy_text: bool

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def held_out_greedy(conversations: list[Conversation], count: int, proposals: int) -> tuple[list[Conversation], bool]:
    """The first `count` greedy conversations with room for a block; all kinds, flagged, where none is marked greedy."""
    room = [c for c in conversations if c.supervised.any() and len(c.tokens) > c.prompt_length + proposals]
    greedy = [c for c in room if c.greedy]
    chosen = (greedy or room)[:count]
    if not chosen:
        raise DSpineError(
            f"no held-out conversation has an answer longer than a block of {proposals} proposals; raise data.holdout (or "
            f"set it to 0: nothing is evaluated)"
        )
    return chosen, bool(greedy)


@torch.inference_mode()
def simulated_acceptance(
    drafter: TorchDrafter,
    target: FrozenTarget,
    conversations: list[Conversation],
    *,
    stride: int = 24,
    exact: bool = False,
    independent: bool = False,
    max_length: int = 1024,
) -> Acceptance:
    """Draft at anchors every `stride` positions (or at all, then walk as generation does: `exact`).

    independent: read the backbone's argmax instead of the walk (an ablation of DSpine).
    """
    proposals = drafter.config.num_proposals
    kept, greedy = held_out_greedy(conversations, len(conversations), proposals)
    kept = sorted(kept, key=lambda c: min(len(c.tokens), max_length))
    counts, rounds = np.zeros(proposals), 0
    for start in range(0, len(kept), BATCH):
        accepted, first, last = _accepted(
            drafter, target, kept[start : start + BATCH], 1 if exact else stride, independent, max_length
        )
        for row, low, high in zip(accepted, first, last, strict=True):
            lengths = _walk(row, low, high) if exact else row[low:high][row[low:high] >= 0]
            counts += (lengths[:, None] > np.arange(proposals)).sum(axis=0)
            rounds += len(lengths)
    if rounds == 0:
        raise DSpineError(
            f"no anchor fell into a held-out answer; lower run.eval_stride ({stride}) or raise run.eval_conversations"
        )
    by_position = (counts / rounds).tolist()
    return Acceptance(1.0 + sum(by_position), by_position, rounds, exact, greedy)


def _walk(accepted: np.ndarray, low: int, high: int) -> np.ndarray:
    """Accepted lengths of successive rounds: anchor p, then p + accepted + 1."""
    lengths = []
    while low < high:
        lengths.append(int(accepted[low]))
        low += lengths[-1] + 1
    return np.array(lengths, dtype=np.int64)


def _accepted(
    drafter: TorchDrafter, target: FrozenTarget, batch: list[Conversation], stride: int, independent: bool, max_length: int
) -> tuple[np.ndarray, list[int], list[int]]:
    """Accepted drafts at every anchor tried, int [B, T] (-1 elsewhere), and the range of anchors of every conversation:
    from the first answer token, while a whole block of text follows."""
    config, device = drafter.config, target.device
    lengths = [min(len(c.tokens), max_length) for c in batch]
    width = max(lengths) + config.block_size
    ids = np.zeros((len(batch), width), dtype=np.int64)
    for row, (conversation, length) in enumerate(zip(batch, lengths, strict=True)):
        ids[row, :length] = conversation.tokens[:length]
    first = [c.prompt_length for c in batch]
    last = [length - config.num_proposals for length in lengths]
    tokens = torch.from_numpy(ids).to(device)
    cache = _filled_cache(drafter, target, tokens)
    result = torch.full((len(batch), width), -1, dtype=torch.int64, device=device)
    for anchor in reversed(range(min(first), max(last), stride)):
        cache.length = anchor
        drafted = _draft(drafter, cache, tokens[:, anchor], independent)
        truth = tokens[:, anchor + 1 : anchor + 1 + config.num_proposals]
        result[:, anchor] = (drafted == truth).long().cumprod(dim=1).sum(dim=1)
    return result.cpu().numpy(), first, last


def _filled_cache(drafter: TorchDrafter, target: FrozenTarget, tokens: Tensor) -> DraftCache:
    """Context K/V of every position of `tokens` [B, T]."""
    batch, width = tokens.shape
    weights = drafter.model.fc.weight
    cache = DraftCache(drafter.config, width, weights.dtype, weights.device, batch=batch)
    positions = torch.arange(width, device=tokens.device).expand(batch, -1)
    mask = document_mask(torch.zeros_like(tokens[:1]))
    features, _ = target.eager_features(tokens, positions, mask, drafter.config.target_layer_ids)
    drafter.commit(cache, features)
    return cache


def _draft(drafter: TorchDrafter, cache: DraftCache, anchor: Tensor, independent: bool) -> Tensor:
    if independent:
        states, _ = drafter._run(cache, anchor)
        return drafter.target.head(states.hidden[:, 0, drafter.config.proposal_rows]).argmax(dim=-1)
    return drafter.propose(cache, anchor, DraftRequest()).tokens


def evaluate_folder(
    folder: Path,
    data: Path,
    model: str,
    *,
    holdout: int,
    count: int,
    stride: int,
    exact: bool,
    independent: bool,
    device: str,
    dtype: str,
) -> dict[str, object]:
    """Acceptance of an exported drafter on the last `holdout` conversations of `data`."""
    from dspine_cuda.training.devices import pick_device

    if dtype not in ("bfloat16", "float32"):
        raise DSpineError(f"--dtype must be bfloat16 or float32, got {dtype!r}")
    target_folder = resolve_model(model)
    target = load_frozen_target(target_folder, pick_device(device), getattr(torch, dtype))
    drafter = load_drafter(Path(folder), target, whole=True)
    _, held_out = split_holdout(load_conversations(data, lambda: load_tokenizer(target_folder)), holdout)
    chosen, _ = held_out_greedy(held_out, count, drafter.config.num_proposals)
    result = simulated_acceptance(drafter, target, chosen, stride=stride, exact=exact, independent=independent)
    return {
        "drafter": str(folder),
        "model": model,
        "conversations": len(chosen),
        "independent": independent,
        **result.as_dict(),
    }
