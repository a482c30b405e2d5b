"""The heads of the core, in NumPy, against the code of sglang, specforge and speculators (`tests/goldens/heads`)."""

from __future__ import annotations

import numpy as np
import pytest

from dspine.common.draft_heads import (
    DominoWeights,
    Draws,
    MarkovWeights,
    SelectorWeights,
    confidence_logits,
    conv_kernels,
    domino_walk,
    grouped_conv,
    markov_walk,
    selector_lattice,
)
from dspine.common.masks import FULL, SLIDING, mask_rule
from dspine.common.transition import path_walk, path_walk_sampled
from tests.helpers.goldens import assert_golden, golden_arrays

ARRAYS = golden_arrays("heads")
PREVIOUS = ARRAYS["previous"]
HIDDEN, BASE = ARRAYS["hidden"], ARRAYS["base"]


def linear(name, bias=True):
    weight = ARRAYS[f"{name}.weight"]
    offset = ARRAYS[f"{name}.bias"] if bias else 0.0
    return lambda x: x @ weight.T + offset


def rows(name):
    return lambda ids: ARRAYS[name][ids]


class Given(Draws):
    """Draws that follow given tokens."""

    def __init__(self, tokens):
        super().__init__()
        object.__setattr__(self, "tokens", tokens)

    def pick(self, logits, step):
        return self.tokens[:, step], None


def markov_weights(kind):
    mix = {"vanilla": None, "gated": "gate_proj", "rnn": "joint_proj"}[kind]
    name = f"markov_{kind}"
    return MarkovWeights(
        kind,
        rows(f"{name}/markov_w1.weight"),
        linear(f"{name}/markov_w2", bias=False),
        None if mix is None else linear(f"{name}/{mix}"),
    )


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_markov_heads(kind):
    weights, following = markov_weights(kind), np.concatenate([PREVIOUS[:, 1:], PREVIOUS[:, :1]], axis=1)
    forced = markov_walk(np.zeros_like(BASE), HIDDEN, PREVIOUS[:, 0], weights, Given(following))
    for package in ("sglang", "specforge", "speculators"):
        assert_golden(forced.logits, ARRAYS[f"markov_{kind}/bias_{package}"], f"bias by {package}")
    greedy = markov_walk(BASE, HIDDEN, PREVIOUS[:, 0], weights, Draws())
    assert_golden(greedy.tokens, ARRAYS[f"markov_{kind}/greedy_specforge"], "greedy tokens")
    assert_golden(greedy.logits, ARRAYS[f"markov_{kind}/corrected_specforge"], "corrected logits")


def test_confidence_head():
    drafts = np.concatenate([PREVIOUS[:, 1:], PREVIOUS[:, :1]], axis=1)
    embed = rows("markov_rnn/markov_w1.weight")
    logits = confidence_logits(HIDDEN, PREVIOUS[:, 0], drafts, linear("confidence/proj"), embed)
    assert_golden(1 / (1 + np.exp(-logits)), ARRAYS["confidence/sglang"], "confidence")


@pytest.mark.parametrize("name, first", [("shift", 0), ("own", 1)])
def test_domino_rollout(name, first):
    gru = "domino/gru/{}_l0"
    weights = DominoWeights(
        input=lambda x: x @ ARRAYS[gru.format("weight_ih")].T,
        state=lambda s: s @ ARRAYS[gru.format("weight_hh")].T,
        down=linear("domino/embed_proj/0", bias=False),
        up=linear("domino/embed_proj/2", bias=False),
        embed=rows("domino/embed"),
    )
    hidden = ARRAYS["domino/rows"][:, first : first + BASE.shape[1]]
    base = hidden @ ARRAYS["domino/lm_head"].T
    got = domino_walk(base, hidden, PREVIOUS[:, 0], weights, Draws())
    assert_golden(got.tokens, ARRAYS[f"domino/tokens_{name}"], "rollout")
    assert not np.array_equal(got.tokens, base.argmax(-1)), "the correction decides some of them"


SELECTOR = SelectorWeights(
    rows("selector/predecessor_codebook"),
    rows("selector/successor_codebook"),
    linear("selector/hidden_projection", bias=False),
)


def test_selector_lattice_and_walks():
    unary, candidates = ARRAYS["selector/unary"], ARRAYS["selector/candidates"]
    lattice = selector_lattice(HIDDEN, unary, candidates, PREVIOUS[:, 0], SELECTOR)
    assert_golden(lattice, ARRAYS["selector/lattice"], "lattice")
    assert_golden(path_walk(lattice, candidates), ARRAYS["selector/greedy"], "greedy walk")
    tokens, q = path_walk_sampled(lattice, candidates, ARRAYS["selector/uniforms"], 0.7)
    assert_golden(tokens, ARRAYS["selector/tokens"], "sampled walk")
    assert_golden(q, ARRAYS["selector/q"], "q of the walk")


def test_selector_scores_of_speculators():
    """Their training scores follow the true predecessor: one row of the lattice a position."""
    candidates, want = ARRAYS["selector/candidates_speculators"], ARRAYS["selector/scores_speculators"]
    unary = np.take_along_axis(BASE, candidates, axis=-1)
    for t in range(BASE.shape[1]):
        row = slice(t, t + 1)
        got = selector_lattice(HIDDEN[:, row], unary[:, row], candidates[:, row], PREVIOUS[:, t], SELECTOR)
        assert_golden(got[:, 0, 0], want[:, t], f"scores of position {t}")


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_convolution_of_speculators(taps):
    """Their blocks lie packed side by side; ours on an axis of their own."""
    name = f"conv_{taps}"
    base = ARRAYS[f"{name}/base_kernel"]
    first, second = conv_kernels(HIDDEN, linear(f"{name}/kernel_projection", bias=False), taps)
    assert_golden(grouped_conv(HIDDEN, first, base[0]), ARRAYS[f"{name}/prepared"], "side 0")
    assert_golden(grouped_conv(HIDDEN[..., ::-1], second, base[1]), ARRAYS[f"{name}/finished"], "side 1")


def visible(rule):
    """The rule over the goldens' grid: 6 rows behind an anchor at 9, 12 context tokens, the block's own keys."""
    offsets = np.arange(6)
    context = rule.context(offsets[:, None], 9, np.arange(12)[None, :])
    block = rule.block(offsets[:, None], offsets[None, :])
    return np.concatenate([np.broadcast_to(context, (6, 12)), np.broadcast_to(block, (6, 6))], axis=1)


@pytest.mark.parametrize("window", [None, 3, 8])
def test_masks_of_specforge_and_speculators(window):
    kind = FULL if window is None else SLIDING
    for method in ("domino", "dspark"):
        np.testing.assert_array_equal(visible(mask_rule(method, kind, None, window)), ARRAYS[f"mask/specforge_{window}"])
    for whole in (False, True):  # their `sliding_window_non_causal`
        rule = mask_rule("dflash", kind, False if whole else None, window, anchored=True)
        np.testing.assert_array_equal(visible(rule), ARRAYS[f"mask/speculators_{window}_{whole}"])
