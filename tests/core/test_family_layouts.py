"""Every published layout, at full size and without data: it loads, or is refused with the right words."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from dspine.common.checkpoints import DraftTensors, check_pair, read_header
from dspine.common.configs import load_drafter_config, parse_drafter_config
from dspine.common.errors import CheckpointError
from tests.helpers.layouts import SLIDING5, published, write_header, write_layout

PUBLISHED = published()


def opened(folder):
    config = load_drafter_config(folder)
    DraftTensors(folder, config)
    return config


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_load(name, tmp_path, caplog):
    data, shapes, method = PUBLISHED[name]
    with caplog.at_level(logging.WARNING, logger="dspine"):
        config = opened(write_layout(tmp_path, data, shapes))
    assert config.method == method and not caplog.records, "no field of a published card is unknown"
    assert config.feature_size == shapes["fc.weight"][1]
    hidden, vocab = shapes["fc.weight"][0], data["vocab_size"]
    info = SimpleNamespace(
        name="target", hidden_size=hidden, vocab_size=vocab, num_layers=config.num_target_layers, model_type="qwen3",
        eos_token_ids=frozenset({151645}),
    )  # fmt: skip
    check_pair(config, info, "drafter")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_are_read_strictly(name, tmp_path):
    """One tensor away, one more, one of another shape, one of integers: each is named."""
    data, shapes, _ = PUBLISHED[name]
    victim = "layers.4.mlp.up_proj.weight"
    own = sorted(set(shapes) - set(PUBLISHED["Qwen3-8B-DFlash-b16"][1]) - {"transfer_ready", "transfer_codes"})
    for gone in [victim, *(n for n in own[-1:] if "embed_tokens" not in n and "lm_head" not in n)]:
        with pytest.raises(CheckpointError, match=f"missing: .*{gone.removeprefix('logit_head.')}"):
            opened(write_layout(tmp_path, data, {k: v for k, v in shapes.items() if k != gone}))
    with pytest.raises(CheckpointError, match="unexpected: bridge.gate"):
        opened(write_layout(tmp_path, data, shapes | {"bridge.gate": (4,)}))
    with pytest.raises(CheckpointError, match=rf"{victim} has shape \[7, 7\]"):
        opened(write_layout(tmp_path, data, shapes | {victim: (7, 7)}))
    with pytest.raises(CheckpointError, match=f"{victim} has dtype I8"):
        opened(write_layout(tmp_path, data, shapes, {victim: "I8"}))
    with pytest.raises(CheckpointError, match=f"{victim} has dtype F8_E4M3"):
        opened(write_layout(tmp_path, data, shapes, {victim: "F8_E4M3"}))


def test_rows_of_every_kind():
    """(query rows, first proposing row, proposals, verify window)."""
    want = {
        "Qwen3-8B-DFlash-b16": (16, 1, 15, 16),
        "Qwen3.6-27B-DFlash2": (8, 1, 7, 8),
        "Qwen3-8B-Domino": (16, 0, 15, 16),
        "DSpark-block7 (DeepSpec)": (7, 0, 7, 8),
        "dflash_qwen3_8b_block7 (DeepSpec, rank 0)": (7, 0, 7, 8),
        "Qwen3-8B-DSpark (SpecForge)": (16, 0, 16, 17),
        "Qwen3-8B-DSpine (SpecForge)": (16, 1, 15, 16),
    }
    for name, rows in want.items():
        config = parse_drafter_config(PUBLISHED[name][0])
        assert (config.query_rows, config.first_row, config.num_proposals, config.block_size) == rows, name
    data = dict(PUBLISHED["Qwen3-8B-Domino"][0])
    data["dflash_config"] = data["dflash_config"] | {"shift_label": False}
    assert parse_drafter_config(data).first_row == 1
    data = dict(PUBLISHED["DSpark-block7 (DeepSpec)"][0]) | {"sample_from_anchor": False}
    config = parse_drafter_config(data)
    assert (config.query_rows, config.first_row, config.num_proposals) == (8, 1, 7)


def test_settings_of_every_kind():
    muse = parse_drafter_config(PUBLISHED["Muse-DFlash2"][0])
    assert muse.scales_logits and (muse.final_logit_softcapping, muse.rms_norm_eps, muse.rope.theta) == (20.0, 1e-5, 5e5)
    assert (muse.conv.kernel_size, muse.conv.group_size, muse.selector.rank, muse.selector.top_k) == (2, 16, 256, 16)
    assert all(rule.window == 2048 and not rule.causal for rule in muse.mask_rules())
    plain = parse_drafter_config(PUBLISHED["Qwen3.6-27B-DFlash2"][0])
    assert not plain.scales_logits and plain.target_layer_ids == (5, 19, 33, 47, 61)
    mixed = parse_drafter_config(PUBLISHED["Qwen3.6-27B-DFlash"][0]).mask_rules()
    assert [(rule.causal, rule.window) for rule in mixed] == [(True, 2048)] * 4 + [(False, None)]
    spark = parse_drafter_config(PUBLISHED["DSpark, dspark_config beside dflash_config"][0]).dspark
    assert (spark.markov_rank, spark.confidence, spark.confidence_with_markov) == (256, True, True)
    bare = parse_drafter_config(PUBLISHED["dflash_qwen3_8b_block7 (DeepSpec, rank 0)"][0]).dspark
    assert (bare.markov_rank, bare.confidence) == (0, False)
    data = PUBLISHED["Qwen3-8B-DSpark (SpecForge)"][0] | {"is_causal": True}
    assert all(rule.causal for rule in parse_drafter_config(data).mask_rules())


def speculators_card(kind, **changes):
    layers = {key: value for key, value in PUBLISHED["Qwen3-8B-DFlash-b16"][0].items()
              if key not in ("architectures", "auto_map", "dflash_config", "block_size", "num_target_layers")}  # fmt: skip
    return {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind, "transformer_layer_config": layers, "draft_vocab_size": 151936, "block_size": 8,
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34], "mask_token_id": 151669, "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind}, **changes,
    }  # fmt: skip


def test_speculators_layout(tmp_path, caplog):
    """Tap ids count the embedding as 0; a DFlash block wastes the anchor's row, a DSpark block does not."""
    bones = PUBLISHED["Qwen3-8B-DFlash-b16"][1]
    config = opened(write_layout(tmp_path, speculators_card("dflash"), bones))
    assert config.target_layer_ids == (1, 9, 17, 25, 33) and config.num_target_layers == 0
    assert (config.query_rows, config.first_row, config.num_proposals) == (8, 1, 7)
    spark = speculators_card("dspark", markov_rank=256, markov_head_type="vanilla", enable_confidence_head=True)
    shapes = {name.removeprefix("logit_head."): shape for name, shape in PUBLISHED["Qwen3-8B-DSpark (SpecForge)"][1].items()}
    config = opened(write_layout(tmp_path, spark, shapes))
    assert (config.method, config.query_rows, config.first_row, config.num_proposals) == ("dspark", 8, 0, 8)
    assert opened(write_layout(tmp_path, speculators_card("dspark"), shapes)).dspark == config.dspark, "their defaults"
    config = parse_drafter_config(speculators_card("dspark", sample_from_anchor=False))
    assert (config.query_rows, config.first_row, config.num_proposals) == (8, 1, 7)
    assert not caplog.records
    layers = speculators_card("dflash")["transformer_layer_config"] | {"layer_types": SLIDING5, "sliding_window": 4}
    for changes, causal in (({}, True), ({"sliding_window_non_causal": True}, False)):
        rule = parse_drafter_config(speculators_card("dflash", transformer_layer_config=layers, **changes)).mask_rules()[0]
        assert (rule.anchored, rule.causal, rule.window_in_block, rule.window) == (True, causal, False, 4)
    with pytest.raises(CheckpointError, match="'eagle3' is not run"):
        parse_drafter_config(speculators_card("eagle3"))
    with pytest.raises(CheckpointError, match="aux_hidden_state_layer_ids must list"):
        parse_drafter_config(speculators_card("dflash", aux_hidden_state_layer_ids=[0, 3]))


def test_a_part_of_the_vocabulary(tmp_path):
    """speculators and SpecForge with 32,000 draft tokens: the Markov bias and the head narrow, t2d and d2t say which ids."""
    shapes = {name.removeprefix("logit_head."): shape for name, shape in PUBLISHED["Qwen3-8B-DSpark (SpecForge)"][1].items()}
    shapes |= {"markov_head.markov_w2.weight": (32000, 256), "lm_head.weight": (32000, 4096), "t2d": (151936,), "d2t": (32000,)}
    dtypes = {"t2d": "BOOL", "d2t": "I64"}
    whole = PUBLISHED["Qwen3-8B-DSpark (SpecForge)"][0]
    for data in (speculators_card("dspark", draft_vocab_size=32000), whole | {"draft_vocab_size": 32000}):
        assert opened(write_layout(tmp_path, data, shapes, dtypes)).draft_vocab_size == 32000
    with pytest.raises(CheckpointError, match="no t2d says which"):
        opened(write_layout(tmp_path, data, {k: v for k, v in shapes.items() if k != "t2d"}, dtypes))
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \[31999, 4096\]"):
        opened(write_layout(tmp_path, data, shapes | {"lm_head.weight": (31999, 4096)}, dtypes))
    with pytest.raises(CheckpointError, match=r"lm_head.weight has shape \[32000, 4096\]"):
        opened(write_layout(tmp_path, whole, shapes, dtypes))


def test_alias_and_prefix_forms(tmp_path):
    """SGLang's `model.` prefix, Muse's encoder names, PyPI dflash's codebook names, stored rotary tables."""
    data, shapes, _ = PUBLISHED["Muse-DFlash2"]
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
        "candidate_selector.predecessor_codebook": "candidate_selector.predecessor_codebook.weight",
    }
    other = {f"model.{names.get(name, name)}": shape for name, shape in shapes.items()} | {"rotary_emb.inv_freq": (64,)}
    opened(write_layout(tmp_path, data, other))
    with pytest.raises(CheckpointError, match="fc.weight is stored twice"):
        opened(write_layout(tmp_path, data, other | {"fc.weight": shapes["fc.weight"]}))


def test_shards(tmp_path):
    data, shapes, _ = PUBLISHED["Qwen3-8B-DFlash-b16"]
    write_layout(tmp_path, data, {k: v for k, v in shapes.items() if k < "layers.2"})
    write_header(tmp_path / "model-00002-of-00002.safetensors", {k: v for k, v in shapes.items() if k >= "layers.2"})
    opened(tmp_path)


def test_a_file_of_another_kind_says_which(tmp_path):
    cards = {method: data for data, _, method in PUBLISHED.values()}
    files = {method: (name, shapes) for name, (_, shapes, method) in PUBLISHED.items() if "8B" in name}
    for method, data in cards.items():
        for kind, (_, shapes) in files.items():
            if kind != method and kind != "dflash":
                with pytest.raises(CheckpointError, match=f"(?i){kind} drafter"):
                    opened(write_layout(tmp_path, data, shapes))


def test_official_dspine_mark(tmp_path):
    """Unknown names are listed with what is missing; SpecForge's names under the mark give the sizes."""
    data, shapes, _ = PUBLISHED["Qwen3-8B-DSpine (SpecForge)"]
    data = {k: v for k, v in data.items() if k != "dspine_config"} | {"architectures": ["DFlashDraftModel"]}
    data["dflash_config"] = data["dflash_config"] | {"selected_prefix_code_bridge": {"version": 1}}
    config = opened(write_layout(tmp_path, data, shapes))
    assert (config.method, config.dspine.transfer_rank, config.dspine.message_size, config.dspine.top_k) == (
        "dspine",
        1024,
        512,
        16,
    )
    bones = PUBLISHED["Qwen3-8B-DFlash-b16"][1]
    unknown = {"bridge.codes": (151936, 1024), "bridge.layers.0.gate.weight": (512, 1024)}
    with pytest.raises(
        CheckpointError, match="bridge.codes, bridge.layers.0.gate.weight; missing: injection.readouts"
    ) as error:
        opened(write_layout(tmp_path, data, bones | unknown))
    assert "\n" not in str(error.value) and "'version': 1" in str(error.value)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma-shaped"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "EAGLE-style"),
        ({"draft_vocab_size": 200000}, "draft_vocab_size 200000 is above"),
        ({"draft_vocab_size": 32000, "dspine_config": {}}, "is not defined for a dspine drafter"),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, "'compressed-tensors' is unknown"),
        ({"attention_value_scale": 0.5}, "attention_value_scale is 0.5"),
        ({"dflash_config": {"attention_sink_bias": True}}, "dflash_config.attention_sink_bias is True"),
        ({"dflash_config": {"use_swa": True}}, "dflash_config.use_swa is True"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style is False"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"hidden_act": "swigluoai"}, "hidden_act must be 'silu'"),
        ({"dflash_config": {"projector_type": "mlp"}}, "projector_type 'mlp' is not supported"),
        ({"dflash_config": {"output_multiplier": 0}}, "output_multiplier must be above 0"),
        ({"dflash_config": {"output_multiplier": "1"}}, "output_multiplier must be a number"),
    ],
)
def test_cards_that_are_refused(changes, words):
    data = dict(PUBLISHED["Qwen3-8B-DFlash-b16"][0])
    nested = data["dflash_config"] | changes.get("dflash_config", {})
    with pytest.raises(CheckpointError, match=words) as error:
        parse_drafter_config(data | changes | {"dflash_config": nested}, where="card.json")
    assert str(error.value).startswith("card.json: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("Qwen3.6-27B-DFlash2", {"selector_rank": None}, "selector_rank is missing"),
        ("Qwen3.6-27B-DFlash2", {"conv_group_size": 24}, "conv_group_size must divide"),
        ("Qwen3.6-27B-DFlash2", {"selector_top_k": 10**6}, "selector_top_k is above"),
        ("Qwen3-8B-Domino", {"shift_label": None}, "needs shift_label"),
        ("Qwen3-8B-Domino", {"pure_draft_prefix_len": 2}, "pure_draft_prefix_len 1 only, got 2"),
        ("Qwen3-8B-Domino", {"emb_dim": 128}, "emb_dim is 256 at the top level but 128"),
        ("Qwen3-8B-DSpark (SpecForge)", {"markov_head_type": "lstm"}, "'lstm' is unknown"),
        ("Qwen3-8B-DSpark (SpecForge)", {"markov_head_type": None}, "markov_head_type is needed"),
        ("Qwen3-8B-DSpark (SpecForge)", {"markov_rank": 0, "markov_head_type": None}, "no Markov embedding"),
        ("Qwen3-8B-DSpark (SpecForge)", {"projector_type": "domino"}, "contradicts architecture 'DSparkDraftModel'"),
    ],
)
def test_method_settings_that_are_refused(name, changes, words):
    data = dict(PUBLISHED[name][0])
    data["dflash_config"] = {k: v for k, v in (data["dflash_config"] | changes).items() if v is not None}
    with pytest.raises(CheckpointError, match=words):
        parse_drafter_config(data)


def test_deepspec_embedding_tap_is_refused():
    data = PUBLISHED["DSpark-block7 (DeepSpec)"][0] | {"target_layer_ids": [-1, 9, 17]}
    with pytest.raises(CheckpointError, match="the embedding's output"):
        parse_drafter_config(data)


def test_prefixed_dspark_keys():
    data = {k: v for k, v in PUBLISHED["DSpark-block7 (DeepSpec)"][0].items()
            if k not in ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")}  # fmt: skip
    data |= {
        "dspark_block_size": 7,
        "dspark_noise_token_id": 151669,
        "dspark_target_layer_ids": [1, 9, 17, 25, 33],
        "dspark_markov_rank": 256,
    }
    assert parse_drafter_config(data) == parse_drafter_config(PUBLISHED["DSpark-block7 (DeepSpec)"][0])


def test_unknown_fields_are_named_in_one_warning(caplog):
    data = dict(PUBLISHED["Qwen3-8B-DFlash-b16"][0]) | {"mix_experts": 4}
    data["dflash_config"] = data["dflash_config"] | {"echo": 1}
    with caplog.at_level(logging.WARNING, logger="dspine"):
        config = parse_drafter_config(data, where="card.json")
    (record,) = caplog.records
    assert "card.json" in record.getMessage() and "dflash_config.echo, mix_experts" in record.getMessage()
    assert config == parse_drafter_config(PUBLISHED["Qwen3-8B-DFlash-b16"][0])


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"eos_token_ids": frozenset({151669})}, "mask_token_id 151669 is a stop token"),
        ({"vocab_size": 151669}, "its vocabulary is 151936"),
        ({"num_layers": 40}, "number of target layers is 36"),
    ],
)
def test_pairs_that_are_refused(changes, words):
    config = parse_drafter_config(PUBLISHED["Qwen3-8B-DFlash-b16"][0])
    facts = {"name": "t", "hidden_size": 4096, "vocab_size": 151936, "num_layers": 36, "model_type": "qwen3"}
    info = SimpleNamespace(**(facts | {"eos_token_ids": frozenset()} | changes))
    with pytest.raises(CheckpointError, match=words):
        check_pair(config, info, "drafter")


JUNK = [None, True, -1, 0, 10**12, 1.5, float("nan"), "x", [], ["x"], [None], {}, {"a": 1}, {"rope_theta": "x"}]
EXTRA = ("quantization", "is_causal", "final_logit_softcapping", "sample_from_anchor", "draft_vocab_size", "config",
         "dspark_config", "target_hidden_size", "rope_parameters", "layer_types", "sliding_window",
         "dspark_block_size")  # fmt: skip


@pytest.mark.parametrize("name", [*PUBLISHED, "speculators"])
def test_junk_in_any_field_is_a_plain_error_or_harmless(name):
    """Every field of every card, one level down too, filled with the wrong kind of thing: never another exception."""
    data = speculators_card("dspark") if name == "speculators" else PUBLISHED[name][0]
    logging.getLogger("dspine").disabled = True
    try:
        for key in (*data, *EXTRA):
            for value in JUNK:
                nested = (
                    [data | {key: data[key] | {inner: value}} for inner in data[key]] if isinstance(data.get(key), dict) else []
                )
                for changed in (data | {key: value}, *nested):
                    try:
                        parse_drafter_config(changed).mask_rules()
                    except CheckpointError as error:
                        assert "\n" not in str(error)
    finally:
        logging.getLogger("dspine").disabled = False


def test_no_pickle_and_no_code_is_looked_at(tmp_path):
    """A folder with torch pickles only is refused; `auto_map` and Python files beside the weights change nothing."""
    data, shapes, _ = PUBLISHED["Qwen3-8B-DFlash-b16"]
    (tmp_path / "config.json").write_text(json.dumps(data))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(CheckpointError, match="no pickle is ever opened"):
        opened(tmp_path)
    write_layout(tmp_path, data, shapes)
    (tmp_path / "dflash.py").write_text("raise SystemExit('code of a checkpoint was run')")
    opened(tmp_path)


def test_deeply_nested_json(tmp_path):
    deep = b"[" * 100_000
    (tmp_path / "model.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(CheckpointError, match="damaged safetensors"):
        read_header(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes(deep)
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_drafter_config(tmp_path)


def tensor(**changes):
    return {"fc.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    "header",
    [[], None, 1, {"fc.weight": 1}, {"fc.weight": {}}, tensor(shape=[-2], data_offsets=[0, -8]), tensor(data_offsets=[-8, 0]),
     tensor(shape=[2**40, 2**40], data_offsets=[0, 0]), tensor(shape="x"), tensor(shape=None), tensor(shape=[2.0]),
     tensor(dtype=["F32"]), tensor(dtype="F12"), tensor(data_offsets=[0]), tensor(data_offsets=["0", "8"]),
     tensor(data_offsets=[4, 12]), tensor(shape=[True, 2])],
)  # fmt: skip
def test_hostile_headers(header, tmp_path):
    data = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(8))
    with pytest.raises(CheckpointError, match="damaged safetensors"):
        read_header(tmp_path / "model.safetensors")
