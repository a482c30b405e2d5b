"""Read-out accuracy of a frozen drafter: a low-rank probe a layer, fitted on training texts, measured on evaluation texts.

q_l = softmax(E [n(h_l) + U_l V_l n(h_l) + b_l]), E the frozen LM head, n an RMS norm without weights, U V of rank 64: the
article's probe. Fitted on 500 greedy conversations of the held-out end of the training data, chosen on 100 more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.paper.one import load_pair, texts_at, train_settings
from benchmarks.paper.options import Options
from benchmarks.paper.variants import VARIANTS
from dspine_cuda.training.batches import make_batch
from dspine_cuda.training.data import Conversation, load_split, pack_rows
from dspine_cuda.training.forward import MaskBuilder, block_states, pick_attention
from dspine_cuda.training.intervals import RESAMPLES
from dspine_cuda.training.masks import document_mask

RANK, FIT, SELECT = 64, 500, 100
ANCHORS, ROWS = 48, 4  # anchors a conversation; conversations at a time
EPOCHS, BATCH, RATE = 4, 4096, 1e-3


@dataclass(frozen=True)
class States:
    """hidden [L, rows, H] after each layer, labels int [rows], position int [rows] (1..M), text int [rows]: whose row it is."""

    hidden: Tensor
    labels: Tensor
    position: Tensor
    text: Tensor


class Probe(nn.Module):
    """n(h) + U V n(h) + b, for all layers at once: [L, rows, H] -> the same."""

    def __init__(self, layers: int, hidden: int, rank: int, device: torch.device) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(layers, hidden, rank, device=device) * hidden**-0.5)
        self.up = nn.Parameter(torch.zeros(layers, rank, hidden, device=device))
        self.bias = nn.Parameter(torch.zeros(layers, 1, hidden, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        normed = F.rms_norm(hidden.float(), (hidden.shape[-1],))
        return normed + normed @ self.down @ self.up + self.bias


@torch.no_grad()
def collect_states(drafter: Any, target: Any, conversations: list[Conversation], seed: int) -> States:
    """States of all drafter layers at random anchors of the conversations' answers."""
    model, config = drafter.model, drafter.config
    attention, masks = pick_attention("sdpa", False), MaskBuilder(config.mask_rules(), "sdpa")
    hidden, labels, positions, owners = [], [], [], []
    for start in range(0, len(conversations), ROWS):
        part = conversations[start : start + ROWS]
        length = max(len(c.tokens) for c in part)
        rows = pack_rows(part, [[i] for i in range(len(part))], length)
        batch = make_batch(
            rows, num_anchors=ANCHORS, proposals=config.num_proposals, gamma=1e9, replacement=0.0, seed=seed, step=start
        ).to(target.device)
        features, _ = target.eager_features(
            batch.tokens, batch.positions, document_mask(batch.documents), config.target_layer_ids
        )
        cos, sin = (table[0] for table in model.rope(length + config.block_size))
        states = block_states(model, batch, features, target.embedding, masks(batch), attention, (cos, sin), False)
        chosen = batch.weights > 0
        hidden.append(torch.stack([h[:, :, 1:][chosen] for h in states.layers]))
        labels.append(batch.labels[chosen])
        places = torch.arange(1, config.num_proposals + 1, device=target.device).expand_as(batch.labels)
        positions.append(places[chosen])
        owners.append(start + torch.nonzero(chosen)[:, 0])
    return States(torch.cat(hidden, dim=1), *(torch.cat(parts) for parts in (labels, positions, owners)))


def fit_probe(states: States, select: States, head: Tensor, seed: int, epochs: int = EPOCHS) -> Probe:
    """Adam on the cross-entropy of all layers; the epoch with the best accuracy on `select` is kept."""
    torch.manual_seed(seed)
    layers, rows, size = states.hidden.shape
    probe = Probe(layers, size, RANK, head.device)
    optimizer = torch.optim.Adam(probe.parameters(), lr=RATE)
    best, kept = -1.0, {k: v.clone() for k, v in probe.state_dict().items()}
    for _ in range(epochs):
        order = torch.randperm(rows, device=head.device)
        for start in range(0, rows, BATCH):
            picked = order[start : start + BATCH]
            read = probe(states.hidden[:, picked])
            for layer in range(layers):  # one layer's logits at a time
                logits = (read[layer].to(head.dtype) @ head.T).float()
                F.cross_entropy(logits, states.labels[picked]).backward(retain_graph=layer + 1 < layers)
            optimizer.step()
            optimizer.zero_grad()
        score = float(np.mean([np.mean(row) for row in accuracy(probe, select, head, [(1, int(select.position.max()))])]))
        if score > best:
            best, kept = score, {k: v.clone() for k, v in probe.state_dict().items()}
    probe.load_state_dict(kept)
    return probe


@torch.no_grad()
def right(probe: Probe, states: States, head: Tensor) -> Tensor:
    """bool [L, rows]: the probe's argmax is the label."""
    hits = torch.zeros(states.hidden.shape[0], len(states.labels), dtype=torch.bool, device=head.device)
    for start in range(0, len(states.labels), BATCH):
        part = slice(start, start + BATCH)
        for layer, read in enumerate(probe(states.hidden[:, part])):
            hits[layer, part] = (read.to(head.dtype) @ head.T).argmax(dim=-1) == states.labels[part]
    return hits


def accuracy(probe: Probe, states: States, head: Tensor, groups: list[tuple[int, int]]) -> list[list[float]]:
    """Share of right argmaxes: a row a layer, a column a group of block positions (first, last)."""
    hits = right(probe, states, head)
    return [[float(row[mask].float().mean()) for mask in _inside(states, groups)] for row in hits]


def _inside(states: States, groups: list[tuple[int, int]]) -> list[Tensor]:
    return [(states.position >= first) & (states.position <= last) for first, last in groups]


def interval_table(
    hits: Tensor, states: States, groups: list[tuple[int, int]], resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, Any]:
    """95 % bootstrap intervals over texts, from `right`'s hits: `groups` [L][G] of every accuracy, `early_over_late` [L] of the
    first group's over the last's, `depth` [G] of the last layer's over the first's; each (low, high)."""
    owner = states.text.cpu().numpy()
    texts, place = np.unique(owner, return_inverse=True)
    counts = []  # [groups, 1 + L, texts]: rows, right ones by layer
    for mask in _inside(states, groups):
        inside = mask.cpu().numpy()
        rows = [inside, *(hits.cpu().numpy() & inside)]
        counts.append([np.bincount(place, weights=row, minlength=len(texts)) for row in rows])
    draws = np.random.default_rng(seed).multinomial(len(texts), np.full(len(texts), 1 / len(texts)), resamples)
    sums = np.einsum("glt,rt->rgl", np.array(counts), draws)
    shares = sums[:, :, 1:] / np.maximum(sums[:, :, :1], 1)  # [resamples, G, L]

    def bounds(values: np.ndarray) -> list[Any]:
        return np.quantile(values, [0.025, 0.975], axis=0).T.tolist()

    return {
        "groups": [bounds(shares[:, :, layer]) for layer in range(shares.shape[2])],
        "early_over_late": bounds(shares[:, 0] - shares[:, -1]),
        "depth": bounds(shares[:, :, -1] - shares[:, :, 0]),
    }


def position_groups(proposals: int) -> list[tuple[int, int]]:
    """Early, middle and late thirds as the article cuts 15 positions: 1-4, 5-8, 9-15."""
    first, second = max(1, round(proposals * 4 / 15)), max(2, round(proposals * 8 / 15))
    return [(1, first), (first + 1, second), (second + 1, proposals)]


def probe_variant(name: str, options: Options, epochs: int = EPOCHS) -> dict[str, Any]:
    """Accuracy by layer and position group of one trained variant."""
    settings = train_settings(VARIANTS[name], options, None)
    drafter, target = load_pair(VARIANTS[name], options, settings.model.target)
    _, held = load_split(settings.data.paths, max(settings.data.holdout, 1))
    greedy = [c for c in held if c.greedy] or held
    cut = len(greedy) * FIT // (FIT + SELECT) if len(greedy) < FIT + SELECT else FIT
    fit = collect_states(drafter, target, greedy[:cut], options.seed)
    select = collect_states(drafter, target, greedy[cut : cut + SELECT], options.seed + 1)
    texts = texts_at(options, target, settings.model.target, 0.0)
    test_conversations = [
        Conversation(t.text.tokens, np.arange(len(t.text.tokens)) >= t.text.start, True)
        for t in texts
        if len(t.text.tokens) > t.text.start + 2
    ]
    test = collect_states(drafter, target, test_conversations, options.seed + 2)
    groups = position_groups(drafter.config.num_proposals)
    probe = fit_probe(fit, select, target.head_matrix, options.seed, epochs)
    hits = right(probe, test, target.head_matrix)
    return {
        "variant": name, "groups": groups, "accuracy": accuracy(probe, test, target.head_matrix, groups),
        "intervals": interval_table(hits, test, groups),
        "rows": {"fit": len(fit.labels), "select": len(select.labels), "test": len(test.labels)},
    }  # fmt: skip
