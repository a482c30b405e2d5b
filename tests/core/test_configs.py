"""Drafter cards: both spellings give one object (C1), layer ids (C2), rope from the drafter's own card (C3)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dspine.common.configs import RopeConfig, load_drafter_config, parse_drafter_config
from dspine.common.errors import CheckpointError
from dspine.common.masks import mask_rule
from dspine.common.rope import rope_tables
from tests.helpers.goldens import golden_arrays

BASE = {
    "architectures": ["DFlashDraftModel"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "num_target_layers": 36,
}
FLAT = {"rope_theta": 1e7, "block_size": 16, "mask_token_id": 60, "target_layer_ids": [1, 2]}
NESTED = {
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    "dflash_config": {"block_size": 16, "mask_token_id": 60, "target_layer_ids": [1, 2]},
}
THETA_ON_TOP = {**NESTED, "rope_parameters": {"rope_type": "default"}, "rope_theta": 1e7}


@pytest.mark.parametrize("spelling", [FLAT, NESTED, {**FLAT, **NESTED}, THETA_ON_TOP, {"config": {**BASE, **NESTED}}])
def test_c1_spellings_agree(spelling):
    assert parse_drafter_config({**BASE, **spelling}) == parse_drafter_config({**BASE, **FLAT})


@pytest.mark.parametrize(
    "changes, words",
    [
        ({**FLAT, **NESTED, "block_size": 8}, "block_size is 8 at the top level but 16"),
        ({**FLAT, **NESTED, "rope_theta": 1e4}, "rope_theta is 10000.0"),
        ({k: v for k, v in FLAT.items() if k != "block_size"}, "block_size is missing"),
        ({k: v for k, v in FLAT.items() if k != "rope_theta"}, "rope_theta is missing"),
        ({k: v for k, v in FLAT.items() if k != "mask_token_id"}, "mask_token_id is missing"),
        ({**FLAT, "block_size": 1}, "block_size must be an integer of at least 2, got 1"),
        ({**FLAT, "block_size": "16"}, "got '16'"),
        ({**FLAT, "mask_token_id": 128}, "mask_token_id 128 is not below vocab_size 128"),
        ({**FLAT, "target_layer_ids": [1, 36]}, r"\[36\] out of range: the target has layers 0..35"),
        ({**FLAT, "target_layer_ids": [-1]}, "out of range"),
        ({**FLAT, "target_layer_ids": []}, "non-empty list"),
        ({**FLAT, "rope_scaling": {"rope_type": "longrope", "factor": 4}}, "'longrope' is unknown"),
        ({**FLAT, "rope_scaling": {"rope_type": "yarn"}}, "needs a factor"),
        ({**FLAT, "layer_types": ["full_attention"]}, "layer_types must list 2"),
        ({**FLAT, "layer_types": ["sliding_attention"] * 2}, "sliding_window must be a positive integer"),
        ({**FLAT, "architectures": ["LlamaForCausalLM"]}, "'LlamaForCausalLM' is not a drafter"),
        ({**FLAT, "hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({**FLAT, "architectures": ["DSpineDraftModel"]}, "without dspine_config"),
        ({**FLAT, "dspine_config": {"transfer_rank": 65}}, "transfer_rank must be 1..64"),
        ({**FLAT, "dspine_config": {"transfer_rang": 6}}, "unknown keys"),
        ({**FLAT, "dspine_config": {"transfer_rank": 8}, "is_causal": False}, "block-causal; is_causal is false"),
        ({**FLAT, "dflash_config": {"selected_prefix_code_bridge": True}}, "official tensor layout is not"),
        ({**FLAT, "dflash_config": {"conv_kernel_size": 2}}, "conv_group_size is missing"),
    ],
)
def test_contradictions_and_gaps_name_the_field(changes, words):
    with pytest.raises(CheckpointError, match=words) as error:
        parse_drafter_config({**BASE, **changes}, where="card.json")
    assert str(error.value).startswith("card.json: ") and "\n" not in str(error.value)


def test_c2_default_and_published_layer_ids():
    ids = [1, 9, 17, 25, 33]
    default = parse_drafter_config({**BASE, **FLAT, "num_hidden_layers": 5, "target_layer_ids": None})
    assert list(default.target_layer_ids) == ids
    assert list(parse_drafter_config({**BASE, **FLAT, "target_layer_ids": ids}).target_layer_ids) == ids
    assert parse_drafter_config({**BASE, **FLAT, "target_layer_ids": [35]}).target_layer_ids == (35,)
    one = parse_drafter_config({**BASE, **FLAT, "num_hidden_layers": 1, "target_layer_ids": None})
    assert one.target_layer_ids == (18,)


def test_c3_rope_is_the_drafters_own():
    card = parse_drafter_config({**BASE, **FLAT, "rope_theta": 1e6, "rope_scaling": None})
    assert card.rope == RopeConfig(theta=1e6)
    cos, sin = rope_tables(card.rope, 16, 4096)
    for position in (0, 1, 4095):
        for i in range(8):
            angle = position * 1e6 ** (-2 * i / 16)
            for column in (i, i + 8):  # half-split: both halves share the angle
                assert cos[position, column] == pytest.approx(np.cos(angle), abs=1e-6)
                assert sin[position, column] == pytest.approx(np.sin(angle), abs=1e-6)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 0.7},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2},
        {"type": "linear", "factor": 3.0},
    ],
)
def test_c3_scaled_rope_equals_transformers(scaling):
    torch = pytest.importorskip("torch", reason="transformers' rope needs torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    card = {**BASE, **FLAT, "rope_theta": 1e4, "rope_scaling": scaling, "max_position_embeddings": 4096}
    cos, sin = rope_tables(parse_drafter_config(card).rope, 16, 4096)
    parameters = {"rope_theta": 1e4, "rope_type": scaling.get("rope_type") or scaling["type"], **scaling}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=4096, rope_parameters=parameters
    )
    reference = LlamaRotaryEmbedding(config)
    positions = torch.tensor([[0, 1, 2, 700]])
    want_cos, want_sin = reference(torch.zeros(1, 4, 16), positions)
    np.testing.assert_allclose(cos[positions[0]], want_cos[0].numpy(), atol=2e-4)  # theirs are float32 angles
    np.testing.assert_allclose(sin[positions[0]], want_sin[0].numpy(), atol=2e-4)


def packed_mask(rule, anchors, block, context):
    """Rows of all blocks against context and all blocks' keys, from the rule alone."""
    rows = []
    for b, anchor in enumerate(anchors):
        for o in range(block):
            own = rule.context(np.array(o), np.array(anchor), np.arange(context))
            keys = [rule.block(np.array(o), np.arange(block)) if j == b else np.zeros(block, bool) for j in range(len(anchors))]
            rows.append(np.concatenate([own, *keys]))
    return np.stack(rows)


@pytest.mark.parametrize(
    "method, case, array, is_causal, window, kind, context",
    [
        ("dspine", "dspine", "attn_mask", True, None, "full_attention", 24),
        ("dspine", "dspine_sliding", "mask_sliding_w4_causal_true", True, 4, "sliding_attention", 24),
        ("dspine", "dspine_sliding", "mask_sliding_w4_causal_absent", None, 4, "sliding_attention", 24),
        ("dspine", "dspine_sliding", "mask_sliding_w8", True, 8, "sliding_attention", 24),
        ("dflash", "dflash_sliding", "mask_sliding", None, 8, "sliding_attention", 30),
        ("dflash", "dflash_sliding", "mask_full", None, 8, "full_attention", 30),
        ("dflash", "dflash_sliding_noncausal", "mask_sliding", False, 4, "sliding_attention", 30),
        ("dflash", "dflash_sliding_noncausal", "mask_full", False, 4, "full_attention", 30),
    ],
)
def test_golden_masks(method, case, array, is_causal, window, kind, context):
    anchors = golden_arrays("dspine")["anchor_positions"] if method == "dspine" else golden_arrays(case)["starts"]
    got = packed_mask(mask_rule(method, kind, is_causal, window), anchors, 6, context)
    np.testing.assert_array_equal(got, golden_arrays(case)[array])


def test_damaged_config_file(tmp_path):
    with pytest.raises(CheckpointError, match="no config.json"):
        load_drafter_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_drafter_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="expected a JSON object"):
        load_drafter_config(tmp_path)
