"""DFlash2, Domino and DSpark on MLX against arrays made by their authors' own code."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dspine.common.draft_heads import Draws, domino_walk, markov_walk, selector_lattice
from dspine.common.proposing import scale_logits
from dspine.common.protocols import Drafter, DraftRequest
from tests.helpers.goldens import assert_golden, golden_arrays
from tests.mlx.goldens import ids, load_case

DSPARK = ("dspark_vanilla", "dspark_gated", "dspark_rnn")


def rounds(drafter, io):
    """(round, cache, anchor) with the context of each round committed, block K/V never kept."""
    cache, done = drafter.make_cache(64), 0
    for r, start in enumerate(io["starts"]):
        drafter.commit(cache, mx.array(io["features"][None, done:start]))
        done = int(start)
        yield r, cache, ids(io["anchors"][r : r + 1])


class Forced(Draws):
    """Draws that are given, to follow the reference's teacher-forced run."""

    def __init__(self, tokens: np.ndarray) -> None:
        super().__init__()
        object.__setattr__(self, "tokens", ids(tokens))

    def pick(self, logits, step):
        return self.tokens[step : step + 1], None


def test_dflash2_golden(tmp_path):
    drafter, io = load_case("dflash2", tmp_path), golden_arrays("dflash2")
    assert isinstance(drafter, Drafter)
    for r, cache, anchor in rounds(drafter, io):
        states, code = drafter.run_block(cache, anchor, collect=True)
        assert code is None
        assert_golden(states.hidden[0], io["hidden"][r], "hidden")
        for layer, (_, h) in enumerate(states.layers):
            assert_golden(h[0], io["layer_outputs"][r, layer], f"layer {layer}")
        assert_golden(drafter.propose(cache, anchor, DraftRequest()).tokens[0], io["greedy_path"][r], "greedy path")
        unary, candidates = mx.array(io["unary"][r : r + 1]), ids(io["candidates"][r : r + 1])
        lattice = selector_lattice(states.hidden[:, 1:], unary, candidates, anchor, drafter.heads.selector)
        assert_golden(lattice[0], io["lattice"][r], "lattice")
        sampled = drafter.propose(cache, anchor, DraftRequest(1.0, mx.full((1, 5), 0.5)))
        assert_golden(sampled.candidates[0], io["candidates"][r], "candidates")


@pytest.mark.parametrize("case", ["domino_shift", "domino_noshift"])
def test_domino_golden(case, tmp_path):
    drafter, io = load_case(case, tmp_path), golden_arrays(case)
    cache = drafter.make_cache(64)
    drafter.commit(cache, mx.array(io["features"][None]))
    anchor, rows = ids(io["anchor"]), drafter.config.proposal_rows
    states, _ = drafter.run_block(cache, anchor)
    assert_golden(states.hidden[0], io["hidden"], "hidden")
    assert_golden(drafter.propose(cache, anchor, DraftRequest()).tokens[0], io["proposals"], "proposals")
    hidden = states.hidden[:, rows]
    base = drafter.target.head(hidden)
    greedy = domino_walk(base, hidden, anchor, drafter.heads.domino, Draws())
    assert_golden(greedy.logits[0], io["corrected_greedy"][rows], "corrected, greedy")
    forced = domino_walk(base, hidden, anchor, drafter.heads.domino, Forced(io["true_block"][1:]))
    assert_golden(forced.logits[0], io["corrected_teacher"][rows], "corrected, teacher-forced")


@pytest.mark.parametrize("case", DSPARK)
def test_dspark_golden(case, tmp_path):
    drafter, io = load_case(case, tmp_path), golden_arrays(case)
    for r, cache, anchor in rounds(drafter, io):
        hidden = drafter.run_block(cache, anchor)[0].hidden
        assert_golden(hidden[0], io["hidden"][r], "hidden")
        proposal = drafter.propose(cache, anchor, DraftRequest(signals=True))
        assert_golden(proposal.tokens[0], io["proposals"][r], "proposals")
        assert_golden(proposal.confidence[0], io["confidence"][r], "confidence")
        base = drafter.target.head(hidden)
        greedy = markov_walk(base, hidden, anchor, drafter.heads.markov, Draws())
        assert_golden(greedy.logits[0], io["corrected_greedy"][r], "corrected, greedy")
        forced = markov_walk(base, hidden, anchor, drafter.heads.markov, Forced(io["true_tokens"][r]))
        assert_golden(forced.logits[0], io["corrected_teacher"][r], "corrected, teacher-forced")


@pytest.mark.parametrize("case", ["pypi_yarn", "pypi_mixed", "pypi_narrow2", "pypi_open2"])
def test_pypi_dflash_golden(case, tmp_path):
    """The `dflash` package's own models, torch and (where it is in order, see the goldens' README) MLX."""
    drafter, io = load_case(case, tmp_path), golden_arrays(case)
    for r, cache, anchor in rounds(drafter, io):
        states, _ = drafter.run_block(cache, anchor)
        assert_golden(states.hidden[0], io["hidden"][r], f"hidden of round {r}")
        if "hidden_mlx" in io and (case == "pypi_yarn" or r != 1):
            assert_golden(states.hidden[0], io["hidden_mlx"][r], f"hidden of round {r}, their MLX model")
        logits = scale_logits(drafter.target.head(states.hidden[:, 1:]), drafter.config)
        assert_golden(logits[0], io["logits"][r], f"logits of round {r}")
        greedy = drafter.propose(cache, anchor, DraftRequest()).tokens[0]
        assert_golden(greedy, io["greedy_path"][r] if "greedy_path" in io else io["logits"][r].argmax(-1), "tokens")


@pytest.mark.parametrize("case", [*DSPARK, "domino_noshift", "dflash2"])
def test_sampled_drafts_carry_their_q(case, tmp_path):
    drafter, io = load_case(case, tmp_path), golden_arrays(case)
    cache, count = drafter.make_cache(64), drafter.config.num_proposals
    drafter.commit(cache, mx.array(io["features"][None, :14]))
    anchor = ids([int(np.ravel(io["anchors"] if "anchors" in io else io["anchor"])[0])])
    uniforms = mx.array(np.random.default_rng(1).random((1, count)), dtype=mx.float32)
    greedy = drafter.propose(cache, anchor, DraftRequest(signals=True))
    cold = drafter.propose(cache, anchor, DraftRequest(1e-4, uniforms))
    assert greedy.q is None and np.array_equal(np.array(cold.tokens), np.array(greedy.tokens))
    warm = drafter.propose(cache, anchor, DraftRequest(0.9, uniforms, signals=True))
    q, tokens = np.array(warm.q), np.array(warm.tokens)
    np.testing.assert_allclose(q.sum(-1), 1.0, atol=1e-5)
    if case == "dflash2":
        assert warm.candidates.shape == warm.q.shape
    else:
        assert warm.candidates is None and q.shape[-1] == drafter.config.vocab_size
        assert all(q[0, t, token] > 0 for t, token in enumerate(tokens[0]))
    confidence, entropy = np.array(warm.confidence), np.array(warm.entropy)
    assert ((confidence > 0) & (confidence <= 1)).all() and (entropy >= 0).all()
