"""From packed rows to one training step's arrays: anchors, labels, weights, the curriculum's draws.

Everything is drawn for the whole global batch from generators keyed by (seed, step), then sliced: the same step for any
number of micro-batches or ranks, and after any resumption.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspine_cuda.training.data import PackedRows
from dspine_cuda.training.masks import BlockLayout


@dataclass(frozen=True)
class Batch:
    """B rows of S tokens with N blocks of 1 + M rows each.

    tokens, documents, positions int [B, S]; anchors int [B, N], keep bool [B, N]; labels int [B, N, M] (0 where
    unsupervised); weights float32 [B, N, M]: supervised (prefix-cumulative, own document) x exp(-(t-1)/gamma); replace
    bool [B, N]: correct-predecessor draw; states [B, S, F + H]: the target's features and final hidden states where they come
    from a cache. Rows of a block stand at the anchor's position and after it, one a row.
    """

    tokens: Tensor
    documents: Tensor
    positions: Tensor
    anchors: Tensor
    keep: Tensor
    labels: Tensor
    weights: Tensor
    replace: Tensor
    states: Tensor | None = None
    query_rows: int = 0  # rows of a block's forward; 0: the anchor and a row for each label

    @property
    def rows_of_block(self) -> int:
        return self.query_rows or self.labels.shape[2] + 1

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.anchors, self.keep, self.documents, self.rows_of_block)

    @property
    def anchor_tokens(self) -> Tensor:
        """int [B, N]."""
        return self.tokens.gather(1, self.anchors)

    @property
    def block_positions(self) -> Tensor:
        """Absolute positions of the block rows in their document, int [B, N*R]."""
        offsets = torch.arange(self.rows_of_block, device=self.anchors.device)
        return (self.positions.gather(1, self.anchors)[:, :, None] + offsets).flatten(1)

    @property
    def teacher_index(self) -> Tensor:
        """Row index of the target's hidden state that predicts each label (label position - 1), int [B, N, M]."""
        offsets = torch.arange(self.labels.shape[2], device=self.anchors.device)
        return (self.anchors[:, :, None] + offsets).clamp(max=self.tokens.shape[1] - 1)

    def rows(self, start: int, stop: int, step: int = 1) -> Batch:
        """A slice of the rows (a micro-batch, or one rank's share)."""
        return self._map(lambda tensor: tensor[start:stop:step])

    def pin(self) -> Batch:
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def _map(self, function) -> Batch:  # noqa: ANN001
        held = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Batch(**{name: function(value) if isinstance(value, Tensor) else value for name, value in held.items()})


def draw_anchors(
    supervised: np.ndarray, documents: np.ndarray, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A random subset of at most `count` positions p a row where p and p+1 are supervised, in one document; sorted.

    supervised bool [B, S], documents int [B, S] -> (anchors int64 [B, count], 0 on padding; keep bool [B, count]).
    """
    batch, length = supervised.shape
    eligible = np.zeros((batch, length), dtype=bool)
    eligible[:, :-1] = supervised[:, :-1] & supervised[:, 1:] & (documents[:, :-1] == documents[:, 1:])
    keys = np.where(eligible, rng.random((batch, length)), 2.0)
    size = min(count, length)
    picked = np.argpartition(keys, size - 1, axis=1)[:, :size]
    chosen = np.where(np.take_along_axis(eligible, picked, axis=1), picked, length)
    chosen = np.sort(chosen, axis=1)
    keep = np.zeros((batch, count), dtype=bool)
    keep[:, :size] = chosen < length
    anchors = np.zeros((batch, count), dtype=np.int64)
    anchors[:, :size] = np.where(chosen < length, chosen, 0)
    return anchors, keep


def block_labels(
    tokens: np.ndarray, supervised: np.ndarray, documents: np.ndarray, anchors: np.ndarray, keep: np.ndarray, proposals: int
) -> tuple[np.ndarray, np.ndarray]:
    """Labels int64 [B, N, M] and supervised bool [B, N, M]: the M tokens after each anchor, up to the first that is not
    supervised, outside the row or of another document."""
    batch, length = tokens.shape
    index = anchors[:, :, None] + np.arange(1, proposals + 1)
    inside = index < length
    index = np.minimum(index, length - 1)
    row = np.arange(batch)[:, None, None]
    same = documents[row, index] == np.take_along_axis(documents, anchors, axis=1)[:, :, None]
    valid = np.cumprod(inside & same & supervised[row, index] & keep[:, :, None], axis=2).astype(bool)
    return np.where(valid, tokens[row, index], 0), valid


def position_weights(supervised: np.ndarray, gamma: float) -> np.ndarray:
    """w = supervised * exp(-(t - 1) / gamma), float32 [..., M]."""
    return (supervised * np.exp(-np.arange(supervised.shape[-1]) / gamma)).astype(np.float32)


def make_batch(
    rows: PackedRows,
    *,
    num_anchors: int,
    proposals: int,
    gamma: float,
    replacement: float,
    seed: int,
    step: int,
    states: Tensor | None = None,
    query_rows: int = 0,
) -> Batch:
    """One global batch. `replacement`: the curriculum's probability at this step; `states`: cached features."""
    anchors, keep = draw_anchors(rows.supervised, rows.documents, num_anchors, np.random.default_rng([seed, 1, step]))
    labels, supervised = block_labels(rows.tokens, rows.supervised, rows.documents, anchors, keep, proposals)
    replace = np.random.default_rng([seed, 2, step]).random(anchors.shape) < replacement
    arrays = (rows.tokens, rows.documents, rows.positions, anchors, keep, labels, position_weights(supervised, gamma), replace)
    return Batch(*(torch.from_numpy(array) for array in arrays), states, query_rows)
