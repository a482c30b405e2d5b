"""The MLX drafter beyond the goldens: strict loading, every tensor matters, rotary tables, sampling, overflow."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.rope_utils import initialize_rope
from safetensors.numpy import load_file, save_file

from dspine.common.checkpoints import CODES, READY
from dspine.common.configs import parse_drafter_config
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.protocols import DraftRequest
from dspine_mlx.drafter import load_drafter, rotate
from tests.helpers.goldens import GOLDENS, golden_arrays, golden_folder
from tests.mlx.goldens import golden_model_target, ids, load_case
from tests.mlx.toys import drafter_card, drafter_folder, toy_target


def one_line(error: pytest.ExceptionInfo) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def rewrite(folder: Path, **tensors: np.ndarray | None) -> None:
    """Replace, add or (None) drop tensors of a checkpoint."""
    path = folder / "model.safetensors"
    state = load_file(path) | {name: array for name, array in tensors.items() if array is not None}
    save_file({name: array for name, array in state.items() if tensors.get(name, array) is not None}, path)


def outputs(folder: Path, case: str) -> list[np.ndarray]:
    """Draft logits, and transition scores for DSpine, of one block of the case."""
    drafter, io = load_drafter(folder, golden_model_target(case)), golden_arrays(case)
    cache = drafter.make_cache(32)
    drafter.commit(cache, mx.array(io["features"][None, :16]))
    anchor = ids([5])
    states, code = drafter.run_block(cache, anchor)
    logits = drafter.target.head(states.hidden[:, 1:])
    result = [np.array(logits)]
    if code is not None:
        candidates = ids(np.argsort(-result[0], axis=-1)[..., :4])
        result.append(np.array(drafter.transition(states.pre_injection[:, 1:], code, candidates)))
    return result


GOLDEN_TENSORS = [
    (case, name)
    for case in ("dflash", "dspine")
    for name in sorted(load_file(GOLDENS / case / "model.safetensors"))
    if name != READY  # a flag that says the codes are there
]


@pytest.mark.parametrize("case, name", GOLDEN_TENSORS)
def test_c5_every_tensor_matters(case, name, tmp_path):
    folder = golden_folder(case, tmp_path)
    before = outputs(folder, case)
    tensor = load_file(folder / "model.safetensors")[name]
    noise = np.random.default_rng(0).normal(size=tensor.shape) * 0.1 * (np.abs(tensor).mean() + 0.1)
    rewrite(folder, **{name: (tensor + noise).astype(np.float32)})
    after = outputs(folder, case)
    assert max(float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True)) > 1e-4


# -- strict loading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["dflash", "dspine"])
@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "hidden_norm.weight", "layers.2.self_attn.q_norm.weight"])
def test_missing_tensor_is_named(case, name, tmp_path):
    folder = golden_folder(case, tmp_path)
    rewrite(folder, **{name: None})
    with pytest.raises(CheckpointError, match=f"missing: {name}; unexpected: none") as error:
        load_drafter(folder, golden_model_target(case))
    one_line(error)


@pytest.mark.parametrize("case", ["dflash", "dspine"])
def test_extra_tensors_are_named(case, tmp_path):
    folder = golden_folder(case, tmp_path)
    rewrite(folder, **{"layers.3.stray": np.ones(2, np.float32), "another": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"missing: none; unexpected: another, layers\.3\.stray"):
        load_drafter(folder, golden_model_target(case))


def test_wrong_shape_is_named(tmp_path):
    folder = golden_folder("dflash", tmp_path)
    rewrite(folder, **{"fc.weight": np.ones((64, 64), np.float32)})
    with pytest.raises(CheckpointError, match=r"fc\.weight has shape \[64, 64\], the config asks for \[64, 128\]"):
        load_drafter(folder, golden_model_target("dflash"))


def test_c5_a_dspine_file_is_no_dflash(tmp_path):
    folder = golden_folder("dspine", tmp_path, dspine_config=None, architectures=["DFlashDraftModel"])
    with pytest.raises(CheckpointError, match="the file is a DSpine drafter") as error:
        load_drafter(folder, golden_model_target("dspine"))
    one_line(error)


def test_c5_a_dflash_file_is_no_dspine(tmp_path):
    card = json.loads((GOLDENS / "dspine" / "config.json").read_text())
    folder = golden_folder("dflash", tmp_path, dspine_config=card["dspine_config"], architectures=["DSpineDraftModel"])
    with pytest.raises(CheckpointError, match="the file is a plain DFlash drafter") as error:
        load_drafter(folder, golden_model_target("dflash"))
    one_line(error)


@pytest.mark.parametrize(
    "facts, text",
    [
        ({"hidden_size": 128}, "its hidden size is 64, golden has 128"),
        ({"vocab_size": 200}, "its vocabulary is 128, golden has 200"),
        ({"num_layers": 6}, "its number of target layers is 8, golden has 6"),
        ({"dtype": "float16"}, "drafters run in bfloat16 or float32, not float16"),
    ],
)
def test_another_target_is_refused(facts, text, tmp_path):
    target = golden_model_target("dspine", **({k: v for k, v in facts.items() if k != "dtype"}))
    if "dtype" in facts:
        target = golden_model_target("dspine", facts["dtype"])
    with pytest.raises(DSpineError, match=text) as error:
        load_drafter(golden_folder("dspine", tmp_path), target)
    one_line(error)


@pytest.mark.parametrize("layer_ids", [[2, 8], [-1, 5]])
def test_layer_ids_beyond_the_target_are_refused(layer_ids, tmp_path):
    folder = golden_folder("dspine", tmp_path, dflash_config={"mask_token_id": 127, "target_layer_ids": layer_ids})
    with pytest.raises(CheckpointError, match=r"out of range: the target has layers 0\.\.7") as error:
        load_drafter(folder, golden_model_target("dspine"))
    one_line(error)


def test_damaged_file_is_one_line(tmp_path):
    folder = golden_folder("dspine", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="missing or damaged safetensors") as error:
        load_drafter(folder, golden_model_target("dspine"))
    one_line(error)


def test_two_file_reference_form(tmp_path):
    """model.safetensors without the transfer space, codes in a second file, the card under `config`."""
    folder = golden_folder("dspine", tmp_path)
    want = outputs(folder, "dspine")
    codes = load_file(folder / "model.safetensors")[CODES]
    rewrite(folder, **{CODES: None, READY: None})
    with pytest.raises(CheckpointError, match="no transfer space"):
        load_drafter(folder, golden_model_target("dspine"))
    save_file({"codes": codes}, folder / "transfer.safetensors")
    card = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"config": card}))
    for got, expected in zip(outputs(folder, "dspine"), want, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_drafter_quantised_by_mlx(bits, tmp_path):
    """MLX packs the weights (third party), the strict reader unpacks them: same outputs as from `mx.dequantize`."""
    folder = golden_folder("dspine", tmp_path)
    packed, plain = {}, {}
    for name, array in load_file(folder / "model.safetensors").items():
        if name.endswith(("_proj.weight", "fc.weight")):
            stem = name.removesuffix(".weight")
            parts = mx.quantize(mx.array(array), group_size=32, bits=bits)
            packed |= dict(zip((name, f"{stem}.scales", f"{stem}.biases"), map(np.array, parts), strict=True))
            plain[name] = np.array(mx.dequantize(*parts, group_size=32, bits=bits))
        else:
            packed[name] = plain[name] = array
    save_file(plain, folder / "model.safetensors")
    want = outputs(folder, "dspine")
    save_file(packed, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="is quantised, but config.json has no `quantization`"):
        load_drafter(folder, golden_model_target("dspine"))
    card = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(card | {"quantization": {"group_size": 32, "bits": bits}}))
    for got, expected in zip(outputs(folder, "dspine"), want, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_projection_biases(tmp_path):
    """`attention_bias`: zero biases change nothing, others do."""
    target = toy_target("llama")
    plain = drafter_folder(tmp_path / "plain", "dflash", 5, target.head_weight())
    biased = drafter_folder(tmp_path / "biased", "dflash", 5, target.head_weight(), attention_bias=True)
    state = load_file(plain / "model.safetensors")
    biases = {n: t for n, t in load_file(biased / "model.safetensors").items() if n.endswith("_proj.bias")}
    assert len(biases) == 8
    results = []
    for scale in (0.0, 1.0):
        save_file(state | {n: t * np.float32(scale) for n, t in biases.items()}, biased / "model.safetensors")
        results.append(block_hidden(biased, target))
    base = block_hidden(plain, target)
    np.testing.assert_allclose(results[0], base, atol=1e-5)
    assert np.abs(results[1] - base).max() > 1e-2


def block_hidden(folder: Path, target) -> np.ndarray:
    drafter = load_drafter(folder, target)
    cache = drafter.make_cache(16)
    drafter.commit(cache, mx.random.normal((1, 9, 64), key=mx.random.key(3)))
    return np.array(drafter.run_block(cache, ids([4]))[0].hidden)


# -- rotary tables -----------------------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def rope_by_hand(x: np.ndarray, position: int, theta: float, scaling: dict | None) -> np.ndarray:
    """One head vector, pair (i, i + d/2), float64, written from the papers' formulas."""
    d, out = len(x), np.zeros(len(x))
    factor = 1.0
    for i in range(d // 2):
        rate = theta ** (-2 * i / d)
        if scaling is LINEAR:
            rate /= scaling["factor"]
        if scaling is YARN:
            at = [d * np.log(512 / (turns * 2 * np.pi)) / (2 * np.log(theta)) for turns in (32, 1)]
            low, high = max(np.floor(at[0]), 0), min(np.ceil(at[1]), d - 1)
            ramp = min(max((i - low) / (high - low), 0), 1)
            rate = rate * (1 - ramp) + rate / 4.0 * ramp
            factor = 0.1 * np.log(4.0) + 1
        c, s = np.cos(position * rate) * factor, np.sin(position * rate) * factor
        out[i], out[i + d // 2] = x[i] * c - x[i + d // 2] * s, x[i + d // 2] * c + x[i] * s
    return out


@pytest.mark.parametrize("scaling", [None, LINEAR, YARN], ids=["default", "linear", "yarn"])
@pytest.mark.parametrize("spelling", ["old", "new"])
def test_c3_rotation_at_0_1_4095(scaling, spelling, tmp_path):
    """Against the formula, and against mlx-lm's own rope (whose float32 angles allow less)."""
    head, theta = 64, 5e5
    keys = {"rope_theta": theta, "rope_scaling": scaling}
    if spelling == "new":
        keys = {"rope_theta": None, "rope_parameters": {"rope_theta": theta, **(scaling or {"rope_type": "default"})}}
    target = toy_target("llama")
    folder = drafter_folder(tmp_path / "d", "dflash", 4, target.head_weight(), head_dim=head, **keys)
    model = load_drafter(folder, target).model
    x = np.random.default_rng(4).normal(size=head).astype(np.float32)
    cos, sin = model.rope(4096)
    other = initialize_rope(head, theta, False, scaling, 2048)
    for position in (0, 1, 4095):
        got = np.array(
            rotate(mx.array(x)[None, None, None], cos[position : position + 1], sin[position : position + 1])
        ).ravel()
        np.testing.assert_allclose(got, rope_by_hand(x.astype(np.float64), position, theta, scaling), atol=2e-6)
        third = np.array(other(mx.array(x)[None, None, None], offset=position)).ravel()
        np.testing.assert_allclose(got, third, atol=2e-3 if position == 4095 else 1e-5)


def test_c3_the_targets_rope_is_not_inherited(tmp_path):
    """Target with YaRN and interleaved rope; the card says plain: plain half-split tables with the card's own theta."""
    target = toy_target("llama", rope_traditional=True, rope_scaling=YARN, rope_theta=1e6)
    folder = drafter_folder(tmp_path / "d", "dspine", 4, target.head_weight(), rope_scaling=None, rope_theta=777.0)
    cos, _ = load_drafter(folder, target).model.rope(8)
    np.testing.assert_allclose(np.array(cos[5, 1]), np.cos(5 * 777.0 ** (-2 / 8)), atol=1e-6)


def test_c3_unknown_rope_is_an_error():
    with pytest.raises(CheckpointError, match="rope type 'spiral' is unknown"):
        parse_drafter_config(drafter_card("dspine", 4, rope_scaling={"rope_type": "spiral", "factor": 2.0}))


def test_rope_tables_grow_and_keep_their_rows(tmp_path):
    model = load_case("dflash", tmp_path).model
    short = [np.array(table) for table in model.rope(10)]
    long = model.rope(5000)
    assert long[0].shape[0] >= 5000 and model.rope(5000)[0] is long[0]
    for a, b in zip(short, long, strict=True):
        np.testing.assert_array_equal(a, np.array(b[: a.shape[0]]))


# -- proposals -----------------------------------------------------------------------------------------------------------


def context_of(drafter, count: int, batch: int = 1):
    cache = drafter.make_cache(48, batch)
    features = golden_arrays("dspine")["features"][:count]
    drafter.commit(cache, mx.array(np.stack([features[:: (-1) ** b] for b in range(batch)])))
    return cache


@pytest.mark.parametrize("case", ["dspine", "dflash"])
def test_sampled_proposals_hand_out_their_q(case, tmp_path):
    """Tokens follow the uniforms through q, and q is the renormalised distribution of the row they were drawn from."""
    drafter = load_case(case, tmp_path)
    cache = context_of(drafter, 20)
    states, code = drafter.run_block(cache, ids([7]))
    logits = np.array(drafter.target.head(states.hidden[:, 1:]))[0].astype(np.float64)
    uniforms = np.random.default_rng(1).random((1, 5)).astype(np.float32)
    proposal = drafter.propose(cache, ids([7]), DraftRequest(temperature=0.6, uniforms=mx.array(uniforms)))
    tokens, candidates, q = (np.array(a)[0] for a in (proposal.tokens, proposal.candidates, proposal.q))
    count = 4 if case == "dspine" else 16
    np.testing.assert_array_equal(candidates, np.argsort(-logits, axis=-1)[:, :count])
    scores = None if code is None else np.array(drafter.transition(states.pre_injection[:, 1:], code, proposal.candidates))[0]
    previous = 0
    for t in range(5):
        row = logits[t, candidates[t]] if scores is None else scores[t, previous].astype(np.float64)
        weights = np.exp((row - row.max()) / 0.6)
        np.testing.assert_allclose(q[t], weights / weights.sum(), atol=1e-5)
        previous = int(np.nonzero(q[t].cumsum() > uniforms[0, t])[0][0])
        assert tokens[t] == candidates[t, previous]


@pytest.mark.parametrize("case", ["dspine", "dflash"])
def test_signals_only_where_asked_for(case, tmp_path):
    drafter = load_case(case, tmp_path)
    cache = context_of(drafter, 20)
    quiet = drafter.propose(cache, ids([7]), DraftRequest())
    assert quiet.confidence is None and quiet.entropy is None and quiet.tokens.dtype == mx.int32
    loud = drafter.propose(cache, ids([7]), DraftRequest(signals=True))
    logits = np.array(drafter.target.head(drafter.run_block(cache, ids([7]))[0].hidden[:, 1:])).astype(np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.array(loud.confidence), p.max(-1), atol=1e-5)
    np.testing.assert_allclose(np.array(loud.entropy), -(p * np.log(p)).sum(-1), atol=1e-4)
    np.testing.assert_array_equal(np.array(loud.tokens), np.array(quiet.tokens))


@pytest.mark.parametrize("case", ["dspine", "dspine_sliding", "dflash"])
def test_batch_of_two_equals_one_by_one(case, tmp_path):
    drafter = load_case(case, tmp_path)
    pair = context_of(drafter, 20, batch=2)
    together = drafter.propose(pair, ids([7, 9]), DraftRequest()).tokens
    features = golden_arrays("dspine")["features"][:20]
    for row, anchor, part in zip(np.array(together), (7, 9), (features, features[::-1]), strict=True):
        cache = drafter.make_cache(48)
        drafter.commit(cache, mx.array(np.ascontiguousarray(part))[None])
        np.testing.assert_array_equal(np.array(drafter.propose(cache, ids([anchor]), DraftRequest()).tokens)[0], row)


def test_proposing_needs_no_context(tmp_path):
    """An empty context (nothing committed) still proposes: the anchor stands at position 0."""
    for case in ("dspine", "dspine_sliding", "dflash", "dflash_sliding_noncausal"):
        drafter = load_case(case, tmp_path)
        assert np.array(drafter.propose(drafter.make_cache(8), ids([7]), DraftRequest()).finite).all()


def test_cache_overflow_is_an_error(tmp_path):
    drafter = load_case("dflash", tmp_path)
    cache = drafter.make_cache(10)
    row = 3 * 2 * 2 * 16 * 4
    assert cache.nbytes == 6 * row
    drafter.commit(cache, mx.zeros((1, 0, 128)))
    assert cache.length == 0
    drafter.commit(cache, mx.zeros((1, 7, 128)))
    assert cache.nbytes == (10 + 6) * row
    cache.length = 0
    with pytest.raises(DSpineError, match="draft cache holds 11 tokens, its capacity is 10"):
        drafter.commit(cache, mx.zeros((1, 11, 128)))


# -- Q1: overflow ----------------------------------------------------------------------------------------------------------


def hot_folder(tmp_path: Path) -> Path:
    """The golden DSpine with a first layer whose MLP adds more than 7e4 to the residual stream."""
    folder = golden_folder("dspine", tmp_path)
    name = "layers.0.mlp.down_proj.weight"
    rewrite(folder, **{name: load_file(folder / "model.safetensors")[name] * np.float32(1e6)})
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_q1_large_residuals_stay_finite(dtype, tmp_path):
    drafter = load_drafter(hot_folder(tmp_path), golden_model_target("dspine", dtype))
    assert drafter.model.dtype == getattr(mx, dtype)
    cache = context_of(drafter, 20)
    states, _ = drafter.run_block(cache, ids([7]), collect=True)
    assert float(mx.max(mx.abs(states.layers[0][0]))) > 7e4
    proposal = drafter.propose(cache, ids([7]), DraftRequest())
    assert np.array(proposal.finite).all()


def test_q1_non_finite_logits_are_reported(tmp_path):
    """One NaN feature in one sequence of a batch: that sequence says so, the other does not."""
    drafter = load_case("dspine", tmp_path)
    cache = drafter.make_cache(48, batch=2)
    features = np.stack([golden_arrays("dspine")["features"][:20]] * 2)
    features[1, 3, 5] = np.nan
    drafter.commit(cache, mx.array(features))
    assert np.array(drafter.propose(cache, ids([7, 7]), DraftRequest()).finite).tolist() == [True, False]
