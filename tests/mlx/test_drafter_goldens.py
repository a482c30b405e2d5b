"""The MLX drafter against arrays made by the authors' own code."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dspine.common.arrays import top_k
from dspine.common.protocols import Drafter, DraftRequest
from dspine.common.transfer_space import known_token, read_prediction
from dspine.common.transition import path_walk
from tests.helpers.goldens import assert_golden, golden_arrays
from tests.mlx.goldens import ids, load_case


def with_context(drafter, features, pieces=1):
    """A cache that holds these context features, fed in `pieces` commits."""
    cache = drafter.make_cache(64)
    for part in np.array_split(features, pieces):
        drafter.commit(cache, mx.array(part)[None])
    return cache


def blocks(drafter, io):
    """Every block of a DSpine case on its own context, as inference runs it."""
    for b, anchor in enumerate(io["anchor_positions"]):
        cache = with_context(drafter, io["features"][:anchor], pieces=1 + b)
        yield b, *drafter.run_block(cache, ids(io["block_token_ids"][b, :1]), collect=True)


def test_dspine_golden_states(tmp_path):
    drafter, io = load_case("dspine", tmp_path), golden_arrays("dspine")
    assert isinstance(drafter, Drafter)
    for b, states, code in blocks(drafter, io):
        assert_golden(states.hidden[0], io["hidden"][b], f"hidden of block {b}")
        assert_golden(states.pre_injection[0], io["pre_injection_last"][b], f"u_L of block {b}")
        for layer, (pre, post) in enumerate(states.layers):
            assert_golden(pre[0], io["layer_pre_injection"][layer, b], f"u_{layer} of block {b}")
            assert_golden(post[0], io["layer_post_injection"][layer, b], f"h_{layer} of block {b}")
            z = read_prediction(post[0], drafter.model.injection.readouts[layer].weight)
            assert_golden(z, io["layer_features"][layer, b], f"f_{layer} of block {b}")
        logits = drafter.target.head(states.hidden[0])
        assert_golden(logits, io["logits"][b], "logits")
        candidates = top_k(logits[1:], 4)[1]
        assert_golden(candidates, io["candidates"][b], "candidates")
        scores = drafter.transition(states.pre_injection[:, 1:], code, candidates[None])
        assert_golden(scores[0], io["transition_scores"][b], "transition scores")
        assert_golden(path_walk(scores, candidates[None])[0], io["greedy_path"][b], "greedy path")
        predecessors = known_token(drafter.model.transfer_codes, ids(io["block_token_ids"][b, :-1]))
        assert_golden(drafter.model.refine(states.pre_injection[0, 1:], predecessors), io["refined_true"][b], "refined")


def test_dspine_golden_propose(tmp_path):
    drafter, io = load_case("dspine", tmp_path), golden_arrays("dspine")
    for b, anchor in enumerate(io["anchor_positions"]):
        cache = with_context(drafter, io["features"][:anchor], pieces=3)
        for _ in range(2):  # proposing changes nothing
            proposal = drafter.propose(cache, ids(io["block_token_ids"][b, :1]), DraftRequest())
            assert_golden(proposal.tokens[0], io["greedy_path"][b], f"proposal of block {b}")
            assert np.array(proposal.finite).all() and proposal.q is None and proposal.confidence is None


def test_dspine_golden_replacement(tmp_path):
    """The correct-predecessor run: the same forward that training uses."""
    drafter, io = load_case("dspine", tmp_path), golden_arrays("dspine")
    forward = drafter.model.forward_block
    for b, anchor in enumerate(io["anchor_positions"]):
        cache = with_context(drafter, io["features"][:anchor])
        true = known_token(drafter.model.transfer_codes, ids(io["block_token_ids"][b, :-1])[None])
        replacement = (mx.array(bool(io["replace_mask"][b])), true)
        tokens = ids([[io["block_token_ids"][b, 0], *[drafter.config.mask_token_id] * 5]])
        cos, sin = (table[anchor : anchor + 6] for table in drafter.model.rope(int(anchor) + 6))

        def attend(index, query, key, value, cache=cache, start=int(anchor)):
            cache.write(index, start, key, value)
            keys, values = cache.read(index, 0, start + 6)
            return mx.fast.scaled_dot_product_attention(query, keys, values, scale=0.25, mask="causal")

        states = forward(drafter.target.embed(tokens), cos, sin, attend, true[:, 0], replacement)
        assert_golden(states.hidden[0], io["hidden_replaced"][b], "hidden, replaced run")
        assert_golden(states.pre_injection[0], io["pre_injection_last_replaced"][b], "u_L, replaced run")


@pytest.mark.parametrize(
    "array, mask, changes",
    [
        ("hidden_w4_causal_true", "mask_sliding_w4_causal_true", {}),
        ("hidden_w4_causal_absent", "mask_sliding_w4_causal_absent", {"is_causal": None}),
        ("hidden_w8", "mask_sliding_w8", {"sliding_window": 8}),
    ],
)
def test_dspine_golden_sliding(array, mask, changes, tmp_path):
    drafter, io, sliding = (
        load_case("dspine_sliding", tmp_path, **changes),
        golden_arrays("dspine"),
        golden_arrays("dspine_sliding"),
    )
    for b, states, _ in blocks(drafter, io):
        assert_golden(states.hidden[0], sliding[array][b], f"{array} of block {b}")
        anchor = int(io["anchor_positions"][b])
        first, visible = drafter._visible(drafter.rules[0], anchor)
        rows = sliding[mask][b * 6 : b * 6 + 6]
        assert not rows[:, :first].any() and not rows[:, anchor:24].any()
        np.testing.assert_array_equal(
            np.array(visible), np.concatenate([rows[:, first:anchor], rows[:, 24 + b * 6 : 30 + b * 6]], axis=1)
        )


@pytest.mark.parametrize("case", ["dflash", "dflash_sliding", "dflash_sliding_noncausal"])
def test_dflash_golden_rounds(case, tmp_path):
    """Four rounds, context K/V kept, block K/V dropped."""
    drafter, io = load_case(case, tmp_path), golden_arrays(case)
    cache, done = drafter.make_cache(64), 0
    for r, start in enumerate(io["starts"]):
        drafter.commit(cache, mx.array(io["features"][None, done:start]))
        done = int(start)
        anchor = ids(io["anchors"][r : r + 1])
        states, code = drafter.run_block(cache, anchor, collect=True)
        assert code is None
        for layer, (_, post) in enumerate(states.layers):
            assert_golden(post[0], io["layer_outputs"][r, layer], f"layer {layer} of round {r}")
        assert_golden(states.hidden[0], io["hidden"][r], f"hidden of round {r}")
        assert_golden(drafter.target.head(states.hidden[0]), io["logits"][r], f"logits of round {r}")
        assert_golden(drafter.propose(cache, anchor, DraftRequest()).tokens[0], io["proposals"][r], f"proposals of round {r}")
        if case == "dflash" and r == 2:
            for layer in (0, 2):
                keys, values = cache.read(layer, 0, done)
                assert_golden(keys[0], io[f"ctx_keys_l{layer}"], "context keys")
                assert_golden(values[0], io[f"ctx_values_l{layer}"], "context values")
