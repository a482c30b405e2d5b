"""DFlash2, Domino and DSpark on torch against arrays made by their authors' own code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspine.common.draft_heads import Draws, domino_walk, markov_walk, selector_lattice, walk
from dspine.common.proposing import scale_logits
from dspine.common.protocols import DraftRequest
from tests.helpers.goldens import assert_golden, golden_arrays
from tests.torch.test_drafter_goldens import load_case

pytestmark = pytest.mark.usefixtures("no_grad")
DSPARK = ("dspark_vanilla", "dspark_gated", "dspark_rnn")


@pytest.fixture
def no_grad():
    with torch.inference_mode():
        yield


def rounds(drafter, io):
    """(round, cache, anchor) with the context of each round committed, block K/V never kept."""
    cache, done = drafter.make_cache(64), 0
    for r, start in enumerate(io["starts"]):
        drafter.commit(cache, torch.from_numpy(io["features"][None, done:start]))
        done = int(start)
        yield r, cache, torch.from_numpy(io["anchors"][r : r + 1]).long()


class Forced(Draws):
    """Draws that are given, to follow the reference's teacher-forced run."""

    def __init__(self, tokens: np.ndarray) -> None:
        super().__init__()
        object.__setattr__(self, "tokens", torch.from_numpy(tokens).long())

    def pick(self, logits, step):
        return self.tokens[step : step + 1], None


def test_dflash2_golden(tmp_path):
    drafter, io = load_case("dflash2", tmp_path), golden_arrays("dflash2")
    assert (drafter.config.method, drafter.config.block_size, drafter.config.num_proposals) == ("dflash2", 6, 5)
    for r, cache, anchor in rounds(drafter, io):
        states, code = drafter._run(cache, anchor)
        assert code is None
        assert_golden(states.hidden[0, 0], io["hidden"][r], "hidden")
        assert_golden(states.pre_injection[0, 0], io["layer_outputs"][r, -1], "last layer")
        proposal = drafter.propose(cache, anchor, DraftRequest())
        assert_golden(proposal.tokens[0], io["greedy_path"][r], "greedy path")
        unary, candidates = (torch.from_numpy(io[name][r : r + 1]) for name in ("unary", "candidates"))
        hidden = states.hidden[:, 0, 1:]
        lattice = selector_lattice(hidden, unary, candidates.long(), anchor, drafter.parts.selector)
        assert_golden(lattice[0], io["lattice"][r], "lattice")
        sampled = drafter.propose(cache, anchor, DraftRequest(1.0, torch.full((1, 5), 0.5)))
        assert_golden(sampled.candidates[0], io["candidates"][r], "candidates")
        first = torch.softmax(torch.from_numpy(io["lattice"][r, 0, 0]), dim=-1)
        torch.testing.assert_close(sampled.q[0, 0], first, atol=1e-5, rtol=1e-4)


def test_dflash2_golden_convolutions(tmp_path):
    """Each stage of the convolution on the reference's own inputs."""
    drafter, io = load_case("dflash2", tmp_path), golden_arrays("dflash2")
    layer = drafter.model.layers[0]
    for name, conv in (("attention_conv", layer.attention_conv), ("mlp_conv", layer.mlp_conv)):
        prepared, kernel = conv.prepare(torch.from_numpy(io[f"{name}_l0_in"]))
        assert_golden(prepared, io[f"{name}_l0_side0"], "side 0")
        assert_golden(kernel.flatten(-2), io[f"{name}_l0_delta1"], "kernel of side 1")
        assert_golden(conv.finish(torch.from_numpy(io[f"{name}_l0_sub"]), kernel), io[f"{name}_l0_side1"], "side 1")


@pytest.mark.parametrize("case", ["domino_shift", "domino_noshift"])
def test_domino_golden(case, tmp_path):
    drafter, io = load_case(case, tmp_path), golden_arrays(case)
    config = drafter.config
    assert (config.method, config.query_rows, config.num_proposals) == ("domino", 6, 5)
    assert config.first_row == (0 if case == "domino_shift" else 1)
    cache = drafter.make_cache(64)
    drafter.commit(cache, torch.from_numpy(io["features"][None]))
    anchor = torch.from_numpy(io["anchor"]).long()
    states, _ = drafter._run(cache, anchor)
    assert_golden(states.hidden[0, 0], io["hidden"], "hidden")
    assert_golden(drafter.target.head(states.hidden[0, 0]), io["base_logits"], "base logits")
    assert_golden(drafter.propose(cache, anchor, DraftRequest()).tokens[0], io["proposals"], "proposals")
    hidden = states.hidden[:, 0, config.proposal_rows]
    base = drafter.target.head(hidden)
    greedy = domino_walk(base, hidden, anchor, drafter.parts.domino, Draws())
    assert_golden(greedy.logits[0], io["corrected_greedy"][config.proposal_rows], "corrected, greedy")
    forced = domino_walk(base, hidden, anchor, drafter.parts.domino, Forced(io["true_block"][1:]))
    assert_golden(forced.logits[0], io["corrected_teacher"][config.proposal_rows], "corrected, teacher-forced")


@pytest.mark.parametrize("case", DSPARK)
def test_dspark_golden(case, tmp_path):
    drafter, io = load_case(case, tmp_path), golden_arrays(case)
    config = drafter.config
    assert (config.method, config.query_rows, config.first_row, config.num_proposals, config.block_size) == (
        "dspark",
        5,
        0,
        5,
        6,
    )
    for r, cache, anchor in rounds(drafter, io):
        states, _ = drafter._run(cache, anchor)
        hidden = states.hidden[:, 0]
        assert_golden(hidden[0], io["hidden"][r], "hidden")
        base = drafter.target.head(hidden)
        assert_golden(base[0], io["base_logits"][r], "base logits")
        proposal = drafter.propose(cache, anchor, DraftRequest(signals=True))
        assert_golden(proposal.tokens[0], io["proposals"][r], "proposals")
        assert_golden(proposal.confidence[0], io["confidence"][r], "confidence")
        greedy = markov_walk(base, hidden, anchor, drafter.parts.markov, Draws())
        assert_golden(greedy.logits[0], io["corrected_greedy"][r], "corrected, greedy")
        assert_golden(greedy.logits[0] - base[0], io["bias_greedy"][r], "bias")
        forced = markov_walk(base, hidden, anchor, drafter.parts.markov, Forced(io["true_tokens"][r]))
        assert_golden(forced.logits[0], io["corrected_teacher"][r], "corrected, teacher-forced")


@pytest.mark.parametrize("case", [*DSPARK, "domino_shift", "dflash2"])
def test_sampled_drafts_carry_their_q(case, tmp_path):
    """Cold draws are the greedy ones; warm draws come from the q that is handed on."""
    drafter, io = load_case(case, tmp_path), golden_arrays(case)
    cache = drafter.make_cache(64)
    drafter.commit(cache, torch.from_numpy(io["features"][None, :14]))
    anchor = torch.tensor([int(np.ravel(io["anchors"] if "anchors" in io else io["anchor"])[0])])
    uniforms = torch.rand(1, drafter.config.num_proposals, generator=torch.Generator().manual_seed(1))
    greedy = drafter.propose(cache, anchor, DraftRequest(signals=True))
    assert greedy.q is None and greedy.candidates is None
    cold = drafter.propose(cache, anchor, DraftRequest(1e-4, uniforms))
    assert torch.equal(cold.tokens, greedy.tokens)
    warm = drafter.propose(cache, anchor, DraftRequest(0.9, uniforms, signals=True))
    torch.testing.assert_close(warm.q.sum(-1), torch.ones(1, drafter.config.num_proposals))
    if case == "dflash2":
        assert warm.candidates.shape == warm.q.shape
    else:
        assert warm.candidates is None and warm.q.shape[-1] == drafter.config.vocab_size
        running = warm.q.cumsum(-1)
        for t, token in enumerate(warm.tokens[0].tolist()):  # the token that holds the uniform of its position
            low = running[0, t, token] - warm.q[0, t, token]
            assert low - 1e-5 <= uniforms[0, t] <= running[0, t, token] + 1e-5
    assert ((warm.confidence > 0) & (warm.confidence <= 1)).all() and (warm.entropy >= 0).all()


@pytest.mark.parametrize("case", ["pypi_yarn", "pypi_mixed", "pypi_narrow2", "pypi_open2"])
def test_pypi_dflash_golden(case, tmp_path):
    """The `dflash` package's torch model, four rounds: yarn, mixed layers, windows below and above the block."""
    drafter, io = load_case(case, tmp_path), golden_arrays(case)
    for r, cache, anchor in rounds(drafter, io):
        states, _ = drafter._run(cache, anchor)
        assert_golden(states.hidden[0, 0], io["hidden"][r], f"hidden of round {r}")
        if "hidden_mlx" in io and (case == "pypi_yarn" or r != 1):
            assert_golden(states.hidden[0, 0], io["hidden_mlx"][r], f"hidden of round {r}, their MLX model")
        logits = scale_logits(drafter.target.head(states.hidden[:, 0, 1:]), drafter.config)
        assert_golden(logits[0], io["logits"][r], f"logits of round {r}")
        greedy = drafter.propose(cache, anchor, DraftRequest()).tokens[0]
        assert_golden(greedy, io["greedy_path"][r] if "greedy_path" in io else io["logits"][r].argmax(-1), "tokens")
        if "sampled_q" in io:
            assert_sampled_rows(drafter, io, r, states.hidden[:, 0, 1:], logits, anchor)


def assert_sampled_rows(drafter, io, r, hidden, logits, anchor):
    """Their draw at temperature 0.8: its q are the lattice's rows along its path, in whatever order they list candidates."""
    values, candidates = torch.topk(logits, 4, dim=-1)
    lattice = selector_lattice(hidden, values, candidates, anchor, drafter.parts.selector)[0]
    index = 0
    for t, token in enumerate(io["sampled_path"][r].tolist()):
        q = torch.softmax(lattice[t, index] / 0.8, dim=-1)
        theirs = dict(zip(io["sampled_candidates"][r, t].tolist(), io["sampled_q"][r, t].tolist(), strict=True))
        assert {int(c): pytest.approx(float(x), abs=1e-5) for c, x in zip(candidates[0, t], q, strict=True)} == theirs
        index = candidates[0, t].tolist().index(token)


def test_walk_without_corrections_is_argmax():
    base = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    result = walk(base, torch.tensor([0, 1]), Draws(), lambda step, previous: None)
    assert torch.equal(result.tokens, base.argmax(-1)) and result.q is None
