"""Drafters over a part of the target's vocabulary: the drafts are the whole drafter's, with the other tokens struck out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspine.common.convert import convert_drafter
from dspine.common.draft_heads import Draws, markov_walk
from dspine.common.errors import CheckpointError
from dspine.common.protocols import DraftRequest
from dspine_cuda.drafter import load_drafter
from tests.helpers.checkpoints import change_config, change_tensors
from tests.helpers.goldens import golden_arrays, golden_folder, golden_target
from tests.torch.test_drafter_goldens import golden_model_target

TOKENS = np.array(sorted(np.random.default_rng(5).choice(127, size=40, replace=False)))


def narrow(case, tmp_path):
    """The golden drafter, cut down to TOKENS the way `speculators` writes it."""

    def cut(tensors):
        marks = np.zeros(128, dtype=np.bool_)
        marks[TOKENS] = True
        tensors["t2d"], tensors["d2t"] = marks, (TOKENS - np.arange(len(TOKENS))).astype(np.int64)
        tensors["lm_head.weight"] = golden_target(case)["lm_head"][TOKENS].copy()
        name = "markov_head.markov_w2.weight"
        if name in tensors:
            tensors[name] = tensors[name][TOKENS].copy()

    return change_tensors(change_config(golden_folder(case, tmp_path), draft_vocab_size=len(TOKENS)), cut)


def started(folder, case):
    io, drafter = golden_arrays(case), load_drafter(folder, golden_model_target(case))
    cache = drafter.make_cache(64)
    drafter.commit(cache, torch.from_numpy(io["features"][None, :14]))
    return drafter, cache, torch.from_numpy(io["anchors"][:1]).long()


@pytest.mark.parametrize("case", ["dspark_vanilla", "dspark_gated", "dspark_rnn"])
def test_dspark_proposes_the_best_of_its_tokens(case, tmp_path):
    whole, cache, anchor = started(golden_folder(case, tmp_path), case)
    with torch.inference_mode():
        hidden = whole._run(cache, anchor)[0].hidden[:, 0]
        struck = torch.full((128,), -1e30)
        struck[torch.from_numpy(TOKENS)] = 0.0
        want = markov_walk(whole.target.head(hidden) + struck, hidden, anchor, whole.parts.markov, Draws())
    part, cache, anchor = started(narrow(case, tmp_path), case)
    proposal = part.propose(cache, anchor, DraftRequest(signals=True))
    assert torch.equal(proposal.tokens, want.tokens) and bool(proposal.finite.all())
    assert np.isin(proposal.tokens.numpy(), TOKENS).all() and (proposal.entropy <= np.log(len(TOKENS)) + 1e-5).all()
    sampled = part.propose(cache, anchor, DraftRequest(1.5, torch.full((1, 5), 0.7)))
    outside = torch.from_numpy(np.setdiff1d(np.arange(128), TOKENS))
    assert sampled.q[..., outside].abs().max() == 0.0
    torch.testing.assert_close(sampled.q.sum(-1), torch.ones(1, 5))


@pytest.mark.parametrize("case", ["dflash", "dflash2"])
def test_candidates_stay_inside(case, tmp_path):
    part, cache, anchor = started(narrow(case, tmp_path), case)
    sampled = part.propose(cache, anchor, DraftRequest(1.0, torch.full((1, 5), 0.5)))
    assert np.isin(sampled.candidates.numpy(), TOKENS).all()
    assert np.isin(part.propose(cache, anchor, DraftRequest()).tokens.numpy(), TOKENS).all()


def test_convert_keeps_the_choice(tmp_path):
    folder = narrow("dspark_gated", tmp_path)
    report = convert_drafter(folder, tmp_path / "out", form="specforge")
    assert "proposes 40 of 128 tokens" in report.notes
    for each in (folder, tmp_path / "out"):
        assert np.array_equal(started(each, "dspark_gated")[0].model.draft_tokens, TOKENS)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t["t2d"].__setitem__(int(TOKENS[0]), False), "with 39 tokens|39 tokens, expected 40 of 128"),
        (lambda t: t.update({"t2d": t["t2d"][:100].copy()}), "expected 40 of 128"),
        (lambda t: t["d2t"].__setitem__(3, 99), "do not name the same tokens"),
        (lambda t: t.update({"d2t": t["d2t"][:5].copy()}), "do not name the same tokens"),
    ],
)
def test_maps_that_contradict(change, words, tmp_path):
    folder = change_tensors(narrow("dspark_gated", tmp_path), change)
    with pytest.raises(CheckpointError, match=words):
        load_drafter(folder, golden_model_target("dspark_gated"))
