"""The torch drafter against arrays made by the authors' own code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dspine.common.protocols import DraftRequest, TargetInfo
from dspine.common.transfer_space import known_token, read_prediction
from dspine.common.transition import path_walk
from dspine_cuda.drafter import TorchDrafter, load_drafter
from tests.helpers.goldens import assert_golden, golden_arrays, golden_folder, golden_target


def golden_model_target(case: str, dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """Embedding and LM head of the golden target behind the `Target` protocol's names."""
    arrays = {name: torch.from_numpy(array).to(dtype) for name, array in golden_target(case).items()}
    embed, head = arrays["embed_tokens"], arrays["lm_head"]
    vocab, hidden = embed.shape
    info = TargetInfo("golden", "toy", 8, hidden, vocab, 512, frozenset(), str(dtype).removeprefix("torch."), "cpu", "toy")
    return SimpleNamespace(
        info=info,
        embed=lambda ids: embed[ids],
        head=lambda hidden: (hidden @ head.T).float() if dtype is torch.bfloat16 else hidden @ head.T,
        head_rows=lambda ids: head[ids],
        head_weight=lambda: golden_target(case)["lm_head"],
        bind_features=lambda ids: None,
    )


def load_case(case: str, tmp_path, **changes) -> TorchDrafter:
    return load_drafter(golden_folder(case, tmp_path, **changes), golden_model_target(case))


def packed_run(drafter: TorchDrafter, case: str, replacement_of: str | None = None):
    """Every block of the case on its own context, as inference runs it; states stacked over blocks."""
    io = golden_arrays("dspine")
    model, config = drafter.model, drafter.config
    outputs = []
    for b, anchor in enumerate(io["anchor_positions"]):
        cache = drafter.make_cache(64)
        drafter.commit(cache, torch.from_numpy(io["features"][None, :anchor]))
        ids = torch.full((1, config.block_size), config.mask_token_id)
        ids[0, 0] = int(io["block_token_ids"][b, 0])
        start, stop = cache.length, cache.length + config.block_size
        cos, sin = model.rope(stop)
        code = known_token(model.transfer_codes, ids[:, 0])
        replacement = None
        if replacement_of is not None:
            true = torch.from_numpy(io["block_token_ids"][b][None, None, :-1]).long()
            mask = torch.tensor(bool(io[replacement_of][b])).reshape(1, 1, 1, 1)
            replacement = (mask, known_token(model.transfer_codes, true))

        def attend(index, query, key, value, cache=cache, start=start, stop=stop):
            cache.write(index, start, key, value)
            keys, values = cache.read(index, stop)
            return torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=drafter._mask(index, start), enable_gqa=True
            )

        with torch.inference_mode():
            outputs.append(
                model.forward_block(
                    drafter.target.embed(ids)[:, None],
                    cos[:, start:stop],
                    sin[:, start:stop],
                    attend,
                    code[:, None],
                    replacement,
                    True,
                )
            )
    return outputs, io


def test_dspine_golden_states(tmp_path):
    drafter = load_case("dspine", tmp_path)
    outputs, io = packed_run(drafter, "dspine")
    for b, states in enumerate(outputs):
        assert_golden(states.hidden[0, 0], io["hidden"][b], f"hidden of block {b}")
        assert_golden(states.pre_injection[0, 0], io["pre_injection_last"][b], f"u_L of block {b}")
        for layer, h in enumerate(states.layers):
            assert_golden(h[0, 0], io["layer_post_injection"][layer, b], f"h_{layer} of block {b}")
            z = read_prediction(h[0, 0], drafter.model.injection.readouts[layer].weight)
            assert_golden(z, io["layer_features"][layer, b], f"f_{layer} of block {b}")
        logits = drafter.target.head(states.hidden[0, 0])
        assert_golden(logits, io["logits"][b], "logits")
        code = known_token(drafter.model.transfer_codes, torch.from_numpy(io["block_token_ids"][b, :1]))
        candidates = torch.topk(logits[1:], 4).indices
        assert_golden(candidates, io["candidates"][b], "candidates")
        scores = drafter.transition(states.pre_injection[:, 0, 1:], code, candidates[None])
        assert_golden(scores[0], io["transition_scores"][b], "transition scores")
        assert_golden(path_walk(scores, candidates[None])[0], io["greedy_path"][b], "greedy path")
        predecessors = known_token(drafter.model.transfer_codes, torch.from_numpy(io["block_token_ids"][b, :-1]))
        assert_golden(drafter.model.refine(states.pre_injection[0, 0, 1:], predecessors), io["refined_true"][b], "refined")


def test_dspine_golden_propose(tmp_path):
    drafter = load_case("dspine", tmp_path)
    io = golden_arrays("dspine")
    for b, anchor in enumerate(io["anchor_positions"]):
        cache = drafter.make_cache(64)
        drafter.commit(cache, torch.from_numpy(io["features"][None, :anchor]))
        proposal = drafter.propose(cache, torch.from_numpy(io["block_token_ids"][b, :1]).long(), DraftRequest())
        assert_golden(proposal.tokens[0], io["greedy_path"][b], f"proposal of block {b}")
        assert bool(proposal.finite.all())


def test_dspine_golden_replacement(tmp_path):
    drafter = load_case("dspine", tmp_path)
    outputs, io = packed_run(drafter, "dspine", replacement_of="replace_mask")
    for b, states in enumerate(outputs):
        assert_golden(states.hidden[0, 0], io["hidden_replaced"][b], "hidden, replaced run")
        assert_golden(states.pre_injection[0, 0], io["pre_injection_last_replaced"][b], "u_L, replaced run")


@pytest.mark.parametrize(
    "array, changes",
    [
        ("hidden_w4_causal_true", {}),
        ("hidden_w4_causal_absent", {"is_causal": None}),
        ("hidden_w8", {"sliding_window": 8}),
    ],
)
def test_dspine_golden_sliding(array, changes, tmp_path):
    drafter = load_case("dspine_sliding", tmp_path, **changes)
    outputs, _ = packed_run(drafter, "dspine_sliding")
    want = golden_arrays("dspine_sliding")[array]
    for b, states in enumerate(outputs):
        assert_golden(states.hidden[0, 0], want[b], f"{array} of block {b}")


@pytest.mark.parametrize("case", ["dflash", "dflash_sliding", "dflash_sliding_noncausal"])
def test_dflash_golden_rounds(case, tmp_path):
    """Four rounds, context K/V kept, block K/V dropped."""
    drafter, io = load_case(case, tmp_path), golden_arrays(case)
    cache, done = drafter.make_cache(64), 0
    for r, start in enumerate(io["starts"]):
        drafter.commit(cache, torch.from_numpy(io["features"][None, done:start]))
        done = int(start)
        anchor = torch.from_numpy(io["anchors"][r : r + 1]).long()
        states, _ = drafter._run(cache, anchor)
        assert_golden(states.hidden[0, 0].detach(), io["hidden"][r], f"hidden of round {r}")
        assert_golden(drafter.target.head(states.hidden[0, 0]).detach(), io["logits"][r], f"logits of round {r}")
        assert_golden(drafter.propose(cache, anchor, DraftRequest()).tokens[0], io["proposals"][r], f"proposals of round {r}")
        if case == "dflash" and r == 2:
            for layer in (0, 2):
                keys, values = cache.read(layer, done)
                assert_golden(keys[0], io[f"ctx_keys_l{layer}"], "context keys")
                assert_golden(values[0], io[f"ctx_values_l{layer}"], "context values")
