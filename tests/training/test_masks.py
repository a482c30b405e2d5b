"""Visibility in packed rows (TR1): cell by cell, poisoned features, flex against dense."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspine.common.masks import FULL, SLIDING, mask_rule
from dspine_cuda.training.masks import (
    TILE,
    BlockLayout,
    FlexMasks,
    dense_mask,
    document_mask,
    mask_mod,
    used_context,
    visible_tiles,
)
from tests.training.models import features_run, toy_batch, toy_drafter

LENGTH, ROWS = 40, 8


def layout_of(anchors: list[int], documents: np.ndarray | None = None, keep: list[bool] | None = None) -> BlockLayout:
    documents = np.zeros(LENGTH, dtype=np.int64) if documents is None else documents
    keep_row = torch.tensor([keep or [True] * len(anchors)])
    return BlockLayout(torch.tensor([anchors]), keep_row, torch.from_numpy(documents)[None], ROWS)


@pytest.mark.parametrize(
    ("method", "kind", "causal", "window"),
    [("dspine", FULL, None, None), ("dflash", FULL, None, None), ("dspine", SLIDING, None, 6), ("dflash", SLIDING, True, 6)],
)
def test_every_cell(method, kind, causal, window) -> None:
    """TR1: sequence 40, block 8, anchors [5, 9, 30]."""
    anchors = [5, 9, 30]
    mask = dense_mask(mask_rule(method, kind, causal, window), layout_of(anchors))[0, 0].numpy()
    assert mask.shape == (3 * ROWS, LENGTH + 3 * ROWS)
    causal_inside = method == "dspine" or kind == SLIDING
    for q in range(3 * ROWS):
        block, offset = divmod(q, ROWS)
        anchor = anchors[block]
        for kv in range(LENGTH):
            near = window is None or anchor + offset - kv < window
            assert mask[q, kv] == (kv < anchor and near), (q, kv)
        for k in range(3 * ROWS):
            other, j = divmod(k, ROWS)
            inside = other == block and (j <= offset or not causal_inside)
            if method == "dflash" and kind == SLIDING:
                inside = inside and offset - j < window
            assert mask[q, LENGTH + k] == inside, (q, k)


def test_documents_do_not_leak_and_unused_blocks_see_nothing() -> None:
    documents = np.array([0] * 12 + [1] * 20 + [-1] * 8)
    layout = layout_of([5, 14, 0], documents, [True, True, False])
    mask = dense_mask(mask_rule("dspine", FULL, None, None), layout)[0, 0]
    assert mask[ROWS, :LENGTH].nonzero().flatten().tolist() == [12, 13]
    assert not mask[2 * ROWS :, :LENGTH].any()
    assert mask.any(dim=1).all(), "an empty softmax is NaN"
    assert used_context(layout)[0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 12, 13]
    target = document_mask(layout.documents)[0, 0]
    assert target[12].nonzero().flatten().tolist() == [12]
    assert target[15].nonzero().flatten().tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("method", ["dspine", "dflash"])
def test_flex_mask_equals_dense(method: str, window: int | None) -> None:
    rng = np.random.default_rng(3)
    length, blocks, batch = 200, 50, 2
    documents = torch.from_numpy(np.sort(rng.integers(0, 4, (batch, length)), axis=1))
    anchors = torch.from_numpy(np.sort(rng.integers(0, length - 1, (batch, blocks)), axis=1))
    keep = torch.from_numpy(rng.random((batch, blocks)) < 0.8)
    layout = BlockLayout(torch.where(keep, anchors, 0), keep, documents, 6)
    rule = mask_rule(method, SLIDING if window else FULL, None, window)
    dense = dense_mask(rule, layout)[:, 0]
    visible = mask_mod(rule, layout)
    queries, keys = dense.shape[1:]
    q, kv = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    for b in range(batch):
        torch.testing.assert_close(visible(torch.tensor(b), torch.tensor(0), q, kv), dense[b])
    pad = torch.nn.functional.pad(dense, (0, -keys % TILE, 0, -queries % TILE))
    tiles = pad.view(batch, pad.shape[1] // TILE, TILE, -1, TILE).any(dim=4).any(dim=2)
    found = visible_tiles(layout)
    assert found.shape == tiles.shape
    assert bool((found | ~tiles).all()), "a visible tile is missing"
    masks = FlexMasks((rule, rule), layout).update(layout)
    assert list(masks) == [rule]


def test_features_at_and_after_the_anchor_never_reach_the_block() -> None:
    """TR1: features from 9 on are NaN; the blocks at 5 and 9 stay finite, and do not feel any later feature."""
    model = toy_drafter(block_size=ROWS)
    batch = toy_batch(model, anchors=[5, 9], length=LENGTH)
    features = torch.randn(1, LENGTH, model.config.feature_size)
    poisoned = features.clone()
    poisoned[:, 9:] = float("nan")
    clean, sums = features_run(model, batch, features), features_run(model, batch, poisoned)
    assert torch.isfinite(sums.main)
    torch.testing.assert_close(sums.rows["ce"], clean.rows["ce"], rtol=0, atol=0)
    three = toy_batch(model, anchors=[5, 9, 30], length=LENGTH)
    loud = features.clone()
    loud[:, 9:] = 1e3
    rows = 2 * (ROWS - 1)
    before, after = (features_run(model, three, f).rows["ce"] for f in (features, loud))
    torch.testing.assert_close(before[:rows], after[:rows], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(before[rows:], after[rows:])
