"""Hybrid folders on disk: as `transformers` saves them, in the official layout with a vision tower, and in mlx-lm's own."""

from __future__ import annotations

import json
import logging

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model, save_model
from safetensors.numpy import save_file

from dspine.common.errors import CheckpointError
from dspine_mlx.targets import HybridTarget, load_target
from dspine_mlx.targets.layouts import load_options
from tests.mlx.goldens import ids
from tests.mlx.hybrids import hybrid_model, started, verify

TOKENS = [3, 5, 7, 11, 13, 17, 19, 2, 4, 8, 16, 32, 64, 21, 42, 84, 1, 90, 33, 6, 12, 24]
CLOSE = {"atol": 3e-4, "rtol": 3e-4}


TEXT_KINDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3_moe")


def text_folder(folder, kind):
    """A random text model saved by `transformers`; its logits [T, V] and layer outputs [layers][T, H]."""
    pytest.importorskip("torch", reason="transformers needs torch to run a model")
    from tests.helpers.hybrids import save_hybrid

    return outputs_of(save_hybrid(folder, kind))


def vision_folder(folder, kind):
    """The same with a vision tower, as the official cards have it."""
    pytest.importorskip("torch", reason="transformers needs torch to run a model")
    from transformers import AutoConfig, AutoModelForImageTextToText

    from tests.helpers.hybrids import hybrid_config as text_config
    from tests.helpers.hybrids import hybrid_model as text_model

    tower = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
        "out_hidden_size": 32, "num_position_embeddings": 16,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, text_config=text_config(f"{kind}_text").to_dict(), vision_config=tower)
    model, text = AutoModelForImageTextToText.from_config(config).float().eval(), text_model(f"{kind}_text")
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(folder)
    return outputs_of(text)


def outputs_of(model):
    import torch

    with torch.no_grad():
        result = model(input_ids=torch.tensor([TOKENS]), output_hidden_states=True)
    return result.logits[0].numpy(), [hidden[0].numpy() for hidden in result.hidden_states[1:]]


def assert_runs(target, logits, outputs):
    """A prompt, a block and a step of `target` against a third party's logits and layer outputs."""
    assert isinstance(target, HybridTarget)
    target.bind_features([0, 1, 2])  # the last one of `transformers` is already normed
    cache = target.make_cache(64)
    first = target.prefill(cache, ids([TOKENS[:7]]), chunk=4)
    block = verify(target, cache, TOKENS[7:21])
    target.commit(cache, block, 14)
    last = verify(target, cache, TOKENS[21:])
    got = np.concatenate([np.array(first.logits), np.array(block.logits[0]), np.array(last.logits[0])])
    np.testing.assert_allclose(got, logits[6:], **CLOSE)
    features = np.concatenate([np.array(part.features[0]) for part in (first, block, last)])
    np.testing.assert_allclose(features, np.concatenate(outputs[:3], axis=-1), **CLOSE)


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_folders_of_transformers(kind, tmp_path):
    """Text-only, as save_pretrained leaves them: own model types, one tensor an expert, nested rotary facts."""
    logits, outputs = text_folder(tmp_path, kind)
    target = load_target(tmp_path)
    assert_runs(target, logits, outputs)
    assert target.info.dtype == "float32" and target.info.context_length == 512 and "vision" not in target.info.adapter


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_official_layout_with_a_vision_tower(kind, fused, tmp_path):
    """`model.language_model.` in front, `model.visual.` and `mtp.` beside it: the text model is loaded, the rest skipped."""
    logits, outputs = vision_folder(tmp_path, kind)
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save

    from tests.helpers.hybrids import MOE, fused_experts

    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors)
    if fused:
        tensors = fused_experts(tensors, MOE["num_experts"])
    assert any(name.endswith("experts.gate_up_proj") for name in tensors) == (fused and kind == "qwen3_5_moe")
    tensors["mtp.fc.weight"] = torch.zeros(4, 4)
    save(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    target = load_target(tmp_path)
    assert_runs(target, logits, outputs)
    assert "vision tower left out" in target.info.adapter


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_the_torch_runtime_agrees(kind, tmp_path):
    """One folder on both runtimes: logits, layer outputs and the router's picks of a prompt and a block."""
    torch = pytest.importorskip("torch", reason="the torch runtime needs torch")
    from dspine_cuda.runtime import RUNTIME

    text_folder(tmp_path, kind)
    results = []
    for target in (load_target(tmp_path), RUNTIME.load_target(tmp_path, device="cpu", dtype="float32")):
        target.bind_features([0, 3])
        target.record_routing = True
        cache = target.make_cache(64)
        tokens = np.array([TOKENS], dtype=np.int32)
        first = target.prefill(cache, target.arrays.to_device(tokens[:, :6]), chunk=4)
        with torch.no_grad():
            verification = target.finish(cache, target.begin(cache, target.arrays.to_device(tokens[:, 6:17])), 9)
            target.commit(cache, verification, 4)
            after = target.finish(cache, target.begin(cache, target.arrays.to_device(tokens[:, 10:12])), 2)
        parts = [first.logits, first.features, verification.logits, verification.features, after.logits]
        parts += [] if verification.router_picks is None else [verification.router_picks, after.router_picks]
        results.append(target.arrays.to_host(*parts))
    assert len(results[0]) == len(results[1]) == (5 if kind == "qwen3_5_text" else 7)
    for got, want in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, **CLOSE)


@pytest.mark.parametrize("prefix", ["language_model.", ""])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_mlx_lms_own_folders(prefix, bits, tmp_path):
    """Converted folders, quantised experts included; `language_model.` in front or not, a vision tower to be skipped."""
    model, config = hybrid_model("qwen3_5_moe", bits=bits)
    want = np.array(model(mx.array([TOKENS])))[0]
    save_model(tmp_path, model)
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors = {
        name.replace("language_model.", prefix, 1): value
        for name, value in mx.load(str(tmp_path / "model.safetensors")).items()
    }
    tensors["vision_tower.blocks.0.weight"] = mx.zeros((2, 2))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors, {"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_model(tmp_path)  # mlx-lm reads the folder too
    target = load_target(tmp_path)
    assert target.info.quantization == (f"{bits}-bit, groups of 32" if bits else None)
    cache = started(target, TOKENS[:5])
    np.testing.assert_allclose(np.array(verify(target, cache, TOKENS[5:17]).logits[0]), want[5:17], **CLOSE)


def test_half_precision_folders(tmp_path, caplog):
    """Q1: stored in float16 or bfloat16, experts run in float32 on the CPU and say so; the decay is never narrowed."""
    model, config = hybrid_model("qwen3_next")
    for dtype in (mx.float16, mx.bfloat16):
        folder = tmp_path / str(dtype).rpartition(".")[2]
        folder.mkdir()
        model.set_dtype(dtype)
        save_model(folder, model)
        (folder / "config.json").write_text(json.dumps(config))
        with caplog.at_level(logging.WARNING, "dspine"):
            target = load_target(folder)
        if target.info.device == "cpu":
            assert target.info.dtype == "float32" and "experts on the CPU" in target.info.adapter
            assert "experts on the CPU" in caplog.text
        assert target.decoder.layers[0].linear_attn.A_log.dtype == mx.float32
        assert target.info.dtype != "float16"


def test_a_dense_hybrid_in_bfloat16(tmp_path):
    model, config = hybrid_model("qwen3_5")
    save_model(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = load_target(tmp_path, dtype="bfloat16")
    assert target.info.dtype == "bfloat16"
    layer = target.decoder.layers[0].linear_attn
    assert layer.A_log.dtype == mx.float32 and layer.conv1d.weight.dtype == mx.bfloat16


def test_a_folder_that_does_not_fit_is_refused(tmp_path):
    """A missing expert, a layer that is missing: one line that names the folder."""
    model, config = hybrid_model("qwen3_5_moe")
    save_model(tmp_path, model)
    config["text_config"]["num_hidden_layers"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="mlx-lm cannot load this folder"):
        load_target(tmp_path)
    tensors = {"model.layers.0.mlp.experts.1.gate_proj.weight": np.zeros((32, 64), dtype=np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="mlx-lm cannot load this folder") as error:
        load_target(tmp_path)
    assert "\n" not in str(error.value)


def test_load_options():
    """Only what mlx-lm needs changed is changed."""
    assert load_options({"model_type": "llama"}) == {}
    assert load_options({"model_type": "qwen3_5_text"}) == {"model_config": {"model_type": "qwen3_5"}}
    assert load_options({"model_type": "qwen3_next", "rope_theta": 5.0, "partial_rotary_factor": 0.5}) == {}
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 7.0}
    changed = load_options({"model_type": "qwen3_next", "rope_parameters": rope, "partial_rotary_factor": 0.5})
    assert changed == {"model_config": {"rope_theta": 7.0, "rope_scaling": rope}}
    assert load_options({"model_type": "qwen3_moe", "num_local_experts": 4}) == {"model_config": {"num_experts": 4}}
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(CheckpointError, match="rotary scaling 'yarn' of a qwen3_moe model"):
            load_options({"model_type": "qwen3_moe", key: rope})
