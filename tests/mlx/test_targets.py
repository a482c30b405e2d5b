"""Targets on MLX against mlx-lm's own loop: tokens, features, rollback, quantised weights, refusals."""

from __future__ import annotations

import logging
from itertools import cycle

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import mamba2

from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.protocols import ArrayOps, Target
from dspine_mlx.targets import load, load_target, wrap_model
from tests.mlx.goldens import ids
from tests.mlx.toys import LAYERS, VOCAB, save_model, toy_model, toy_target

PROMPT = [3, 5, 7, 11, 13, 17, 19]
FAMILIES = ("llama", "qwen3", "qwen2", "gemma", "granite")


def third_party_greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]


def speculate(target, text: list[int], count: int, widths=range(2, 17), chunk: int = 3):
    """Decode `count` tokens through begin/finish/commit. Drafts are the right tokens, with every fourth one wrong, so that
    every round commits a part of its block. Returns tokens, features [T, F] of all processed tokens, and the cache."""
    cache = target.make_cache(len(PROMPT) + count + 16)
    first = target.prefill(cache, ids([PROMPT]), chunk=chunk)
    out, features, width = [int(mx.argmax(first.logits[0]))], [first.features], cycle(widths)
    while len(out) < count:
        w = next(width)
        draft = [(t + (i % 4 == 3)) % VOCAB for i, t in enumerate((text[len(out) :] + [0] * w)[: w - 1], start=len(out))]
        stage = target.begin(cache, ids([[out[-1], *draft]]))
        verification = target.finish(cache, stage, w)
        choice = [int(t) for t in target.arrays.to_host(mx.argmax(verification.logits[0], axis=-1))[0]]
        accepted = next((i for i, token in enumerate(draft) if token != choice[i]), len(draft))
        target.commit(cache, verification, accepted + 1)
        features.append(verification.features[:, : accepted + 1])
        out += [*draft[:accepted], choice[accepted]]
    return out[:count], mx.concatenate(features, axis=1)[0], cache


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_equals_mlx_lm(kind):
    """S3, tier 1: token for token in float32, over widths 2..16 with partial rollback; features as one plain run gives them."""
    model, config = toy_model(kind)
    text = third_party_greedy(model, PROMPT, 160)
    assert len(set(text)) > 5
    target = wrap_model(model, config, name=kind)
    assert isinstance(target, Target) and isinstance(target.arrays, ArrayOps)
    target.bind_features([3, 1])
    out, features, cache = speculate(target, text, 160)
    assert out == text
    assert cache.length == features.shape[0] and all(layer.offset == cache.length for layer in cache.layers)
    whole = target.prefill(target.make_cache(400), ids([(PROMPT + text)[: cache.length]]), chunk=400)
    np.testing.assert_allclose(np.array(features), np.array(whole.features[0]), atol=2e-5, rtol=2e-5)


def test_chunks_do_not_matter():
    target = toy_target("qwen3")
    target.bind_features([0])
    runs = [target.prefill(target.make_cache(64), ids([PROMPT]), chunk=chunk) for chunk in (1, 2, 7, 64)]
    for run in runs[1:]:
        np.testing.assert_allclose(np.array(run.logits), np.array(runs[0].logits), atol=1e-5)
        np.testing.assert_allclose(np.array(run.features), np.array(runs[0].features), atol=1e-5)
    assert runs[0].logits.dtype == mx.float32


class Adds(nn.Module):
    """A layer that adds 10^i to the residual stream."""

    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount, self.use_sliding = amount, False

    def __call__(self, hidden, mask=None, cache=None):
        cache.update_and_fetch(hidden[:, None], hidden[:, None])
        return hidden + self.amount


@pytest.fixture
def adding_target():
    model, config = toy_model("llama")
    model.model.layers = [Adds(10.0**i) for i in range(LAYERS)]
    for name in ("embed_tokens", "norm"):
        part = getattr(model.model, name)
        part.weight = mx.zeros_like(part.weight)
    return wrap_model(model, config, name="adds")


def test_c2_ids_mean_layer_outputs(adding_target):
    """ids [0, 3] are the OUTPUTS of layers 0 and 3, before the final norm, in that order."""
    for layer_ids, want in (([0, 3], [1, 1111]), ([3, 0], [1111, 1]), ([1], [11]), ([LAYERS - 1], [1111])):
        adding_target.bind_features(layer_ids)
        run = adding_target.prefill(adding_target.make_cache(8), ids([[4, 5]]), chunk=8)
        got = np.array(run.features).reshape(2, len(layer_ids), -1)
        assert (got == np.array(want)[None, :, None]).all()


@pytest.mark.parametrize("layer_ids", [[LAYERS], [-1], [0, 99]])
def test_c2_ids_out_of_range(adding_target, layer_ids):
    with pytest.raises(CheckpointError, match=r"out of range, expected 0\.\.3"):
        adding_target.bind_features(layer_ids)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_head_and_quantised_targets(tied, bits):
    """Quantised weights run as mlx-lm runs them; head rows are what the head multiplies with."""
    model, config = toy_model("qwen3", tie_word_embeddings=tied)
    if bits:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    target = wrap_model(model, config, name="toy")
    assert target.info.quantization == (f"{bits}-bit, groups of 32" if bits else None)
    target.bind_features([0])
    text = third_party_greedy(model, PROMPT, 48)
    assert speculate(target, text, 48)[0] == text
    hidden = mx.random.normal((2, 3, 32), key=mx.random.key(1))
    logits = np.array(target.head(hidden))
    weight = target.head_weight()
    assert weight.dtype == np.float32 and weight.shape == (VOCAB, 32)
    np.testing.assert_allclose(logits, np.array(hidden) @ weight.T, atol=1e-4)
    picked = ids([[3, 0], [95, 3]])
    np.testing.assert_array_equal(np.array(target.head_rows(picked)), weight[np.array(picked)])


def test_granite_and_gemma_scales():
    """The family's scales: embeddings as the first layer sees them, logits as the model gives them."""
    gemma, granite = toy_target("gemma"), toy_target("granite")
    tokens = ids([[1, 2]])
    np.testing.assert_allclose(np.array(gemma.embed(tokens)), np.array(gemma.decoder.embed_tokens(tokens)) * 32**0.5, rtol=1e-6)
    np.testing.assert_allclose(np.array(granite.embed(tokens)), np.array(granite.decoder.embed_tokens(tokens)) * 2.0, rtol=1e-6)
    hidden = mx.ones((1, 32))
    np.testing.assert_allclose(np.array(granite.head(hidden)) * 3.0, np.array(granite.model.lm_head(hidden)), rtol=1e-5)


# -- cache discipline ------------------------------------------------------------------------------------------------


def test_rollback_leaves_no_trace():
    """Rejected tokens of a wide block change nothing in what follows; commit of 0 undoes a block."""
    target = toy_target("llama")
    logits = []
    for wrong in ([], [9, 8, 7, 6, 5], [1] * 15):
        cache = target.make_cache(64)
        target.prefill(cache, ids([PROMPT]), chunk=64)
        verification = target.finish(cache, target.begin(cache, ids([[4, *wrong]])), 1 + len(wrong))
        target.commit(cache, verification, 0)
        verification = target.finish(cache, target.begin(cache, ids([[4, *wrong]])), 1 + len(wrong))
        target.commit(cache, verification, 1)
        assert cache.length == len(PROMPT) + 1
        logits.append(np.array(target.finish(cache, target.begin(cache, ids([[21]])), 1).logits))
    for other in logits[1:]:
        np.testing.assert_allclose(other, logits[0], atol=1e-5)


def test_finish_takes_the_first_w():
    target = toy_target("llama")
    cache = target.make_cache(32)
    target.prefill(cache, ids([PROMPT]), chunk=64)
    verification = target.finish(cache, target.begin(cache, ids([[4, 5, 6, 7]])), 2)
    assert verification.logits.shape == (1, 2, VOCAB) and verification.features is None
    target.commit(cache, verification, 2)
    assert cache.length == len(PROMPT) + 2


def test_two_sequences_share_one_target():
    target = toy_target("llama")
    texts = [third_party_greedy(target.model, prompt, 12) for prompt in (PROMPT, PROMPT[::-1])]
    caches = [target.make_cache(64) for _ in texts]
    outs = []
    for cache, prompt in zip(caches, (PROMPT, PROMPT[::-1]), strict=True):
        outs.append([int(mx.argmax(target.prefill(cache, ids([prompt]), chunk=4).logits[0]))])
    for _ in range(11):
        for cache, out in zip(caches, outs, strict=True):
            verification = target.finish(cache, target.begin(cache, ids([[out[-1]]])), 1)
            target.commit(cache, verification, 1)
            out.append(int(mx.argmax(verification.logits[0, 0])))
    assert outs == texts


def test_batch_of_two_equals_one_by_one():
    target = toy_target("qwen3")
    rows = [PROMPT, PROMPT[::-1]]
    together = target.prefill(target.make_cache(32), ids(rows), chunk=4).logits
    for row, got in zip(rows, together, strict=True):
        alone = target.prefill(target.make_cache(32), ids([row]), chunk=4).logits
        np.testing.assert_allclose(np.array(got), np.array(alone[0]), atol=1e-5)


def test_cache_misuse_is_refused():
    target = toy_target("llama")
    cache = target.make_cache(10)
    with pytest.raises(DSpineError, match="no tokens"):
        target.prefill(cache, mx.zeros((1, 0), dtype=mx.int32), chunk=4)
    with pytest.raises(DSpineError, match=r"0 \+ 11 tokens exceed its capacity of 10"):
        target.prefill(cache, ids([list(range(11))]), chunk=4)
    target.prefill(cache, ids([PROMPT]), chunk=4)
    verification = target.finish(cache, target.begin(cache, ids([[1, 2]])), 2)
    with pytest.raises(DSpineError, match="2 verified tokens wait for commit"):
        target.finish(cache, target.begin(cache, ids([[1]])), 1)
    with pytest.raises(DSpineError, match=r"commit of 3 tokens, expected 0\.\.2"):
        target.commit(cache, verification, 3)


# -- refusals --------------------------------------------------------------------------------------------------------


def one_line(error: pytest.ExceptionInfo) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 500
    return text


def test_sliding_windows_of_an_unknown_family_are_refused():
    model, config = toy_model("gemma3_text", sliding_window=8, sliding_window_pattern=2)
    with pytest.raises(DSpineError, match="RotatingKVCache") as error:
        wrap_model(model, config, name="toy")
    assert "cannot roll back" in one_line(error)


def test_recurrent_target_is_refused():
    """A state-space model keeps states that cannot be trimmed."""
    config = {
        "model_type": "mamba2", "num_heads": 4, "head_dim": 8, "vocab_size": VOCAB, "hidden_size": 32, "state_size": 8,
        "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5, "conv_kernel": 4, "n_groups": 1, "use_bias": False,
        "use_conv_bias": True, "tie_word_embeddings": True, "time_step_limit": (0.0, 1.0), "time_step_rank": "auto",
        "max_position_embeddings": 512, "expand": 1, "intermediate_size": 32,
    }  # fmt: skip
    model = mamba2.Model(mamba2.ModelArgs.from_dict(config))
    model.model = model.backbone
    model.model.embed_tokens, model.model.norm = model.backbone.embeddings, model.backbone.norm_f
    with pytest.raises(DSpineError, match="ArraysCache") as error:
        wrap_model(model, config, name="toy")
    one_line(error)


def test_a_family_that_does_more_is_refused():
    """Gemma without its adapter: embeddings unscaled, other logits. The check at load sees it."""
    model, config = toy_model("gemma")
    with pytest.raises(DSpineError, match="gives other logits than its own call") as error:
        wrap_model(model, config | {"model_type": "unheard-of"}, name="toy")
    one_line(error)


def test_no_plain_decoder_is_refused():
    model, config = toy_model("llama")
    del model.model.norm
    with pytest.raises(DSpineError, match="is no plain decoder") as error:
        wrap_model(model, config, name="toy")
    one_line(error)


# -- loading ---------------------------------------------------------------------------------------------------------


def test_load_target_reads_a_folder(tmp_path):
    model, config = toy_model("llama", eos_token_id=[2, 5])
    folder = save_model(tmp_path / "toy", model, config)
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    target = load_target(folder)
    assert (target.info.name, target.info.model_type, target.info.num_layers) == ("toy", "llama", LAYERS)
    assert (target.info.hidden_size, target.info.vocab_size, target.info.context_length) == (32, VOCAB, 1024)
    assert target.info.eos_token_ids == {2, 5, 7}
    assert target.info.dtype == "float32" and "mlx_lm.models.llama" in target.info.adapter
    run = target.prefill(target.make_cache(16), ids([PROMPT]), chunk=16)
    np.testing.assert_allclose(np.array(run.logits), np.array(model(mx.array([PROMPT]))[:, -1]), atol=1e-5)


def test_q1_float16_is_never_used(tmp_path, caplog):
    """A file stored in float16 runs in bfloat16 or float32 and says so; asking for float16 is refused."""
    model, config = toy_model("llama")
    folder = save_model(tmp_path / "half", model, config, mx.float16)
    with caplog.at_level(logging.WARNING, "dspine"):
        target = load_target(folder)
    dtypes = {str(v.dtype) for _, v in tree_flatten(target.model.parameters())}
    assert dtypes == {"mlx.core.bfloat16"} and "stored as float16" in target.info.adapter
    assert "stored as float16" in caplog.text
    assert load_target(folder, dtype="float32").info.dtype == "float32"
    with pytest.raises(DSpineError, match="dtype must be one of auto, bfloat16, float32, got 'float16'"):
        load_target(folder, dtype="float16")
    model.set_dtype(mx.float16)
    with pytest.raises(DSpineError, match="weights are float16"):
        wrap_model(model, config, name="half")


@pytest.mark.parametrize("device", ["metal", "cpu"])
@pytest.mark.parametrize("quantized", [False, True])
def test_auto_dtype_is_the_stored_one(device, quantized, monkeypatch):
    """Except float16 (never) and quantised weights on the CPU (float32)."""
    monkeypatch.setattr(load, "device_name", lambda: device)
    wide = quantized and device == "cpu"
    for stored, want in ((mx.bfloat16, mx.bfloat16), (mx.float32, mx.float32), (mx.float16, mx.bfloat16)):
        want = mx.float32 if wide else want
        dtype, note = load.choose_dtype("auto", stored, quantized=quantized)
        assert dtype == want and bool(note) == (want != stored)
        assert load.choose_dtype("float32", stored, quantized=quantized) == (mx.float32, "")


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_quantised_folder_loads(dtype, tmp_path):
    """mlx-lm's own 8-bit layout on disk, scales in half precision."""
    model, config = toy_model("llama")
    nn.quantize(model, group_size=32, bits=8)
    config["quantization"] = {"group_size": 32, "bits": 8}
    target = load_target(save_model(tmp_path / "q", model, config, dtype))
    assert target.info.quantization == "8-bit, groups of 32" and target.info.dtype in ("float32", "bfloat16")
    text = third_party_greedy(target.model, PROMPT, 32)
    target.bind_features([0])
    assert speculate(target, text, 32)[0] == text


def test_bfloat16_target_runs():
    model, config = toy_model("llama")
    model.set_dtype(mx.bfloat16)
    target = wrap_model(model, config, name="toy")
    target.bind_features([1])
    run = target.prefill(target.make_cache(16), ids([PROMPT]), chunk=16)
    assert run.logits.dtype == mx.float32 and run.features.dtype == mx.bfloat16
    (features,) = target.arrays.to_host(run.features)
    assert features.dtype == np.float32 and np.isfinite(features).all()


def damaged(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    "harm, text",
    [
        (damaged, "exceeding the size of the file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "No safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no header"), "cannot load"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "nonsense"}'), "nonsense"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 32}'), "cannot load"),
    ],
)
def test_damaged_folders_give_one_line(tmp_path, harm, text):
    folder = save_model(tmp_path / "toy", *toy_model("llama"))
    harm(folder)
    with pytest.raises(CheckpointError, match=text) as error:
        load_target(folder)
    one_line(error)


def test_missing_and_extra_target_tensors_are_refused(tmp_path):
    model, config = toy_model("llama")
    folder = save_model(tmp_path / "toy", model, config)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(weights)  # the file is about to be replaced
    for changed in ({k: v for k, v in weights.items() if "layers.2.mlp" not in k}, weights | {"stray.weight": mx.ones(3)}):
        mx.save_safetensors(str(folder / "model.safetensors"), changed)
        with pytest.raises(CheckpointError, match=r"layers\.2\.mlp|stray\.weight") as error:
            load_target(folder)
        one_line(error)
