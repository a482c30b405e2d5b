"""Loading a target: devices, dtypes, end tokens, and one clear line for every kind of damaged checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspine.common.errors import BackendError, CheckpointError, DSpineError
from dspine.common.protocols import Runtime, Target
from dspine_cuda.runtime import RUNTIME
from dspine_cuda.targets.load import choose_dtype, load_target
from tests.helpers.models import edit_config, one_thread, prompt, save_tiny


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny products gain nothing from threads, and lose much where other work runs beside the tests."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_tiny(folder, "llama", num_hidden_layers=2)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy that a test may damage."""
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refused(folder: Path, match: str, error: type[DSpineError] = CheckpointError, **options) -> None:
    with pytest.raises(error, match=match) as caught:
        load_target(folder, **({"device": "cpu", "dtype": "float32"} | options))
    assert "\n" not in str(caught.value)


def test_info_and_protocol(folder):
    target = RUNTIME.load_target(folder, device="cpu", dtype="float32")
    assert isinstance(target, Target)
    info = target.info
    assert (info.name, info.model_type, info.num_layers, info.hidden_size, info.vocab_size) == ("model", "llama", 2, 48, 97)
    assert (info.context_length, info.dtype, info.device, info.quantization) == (512, "float32", "cpu", None)
    assert info.adapter == "lean decoder, llama family; float32 as asked"


def test_end_tokens_of_both_files(folder):
    edit_config(folder, eos_token_id=[5, 7])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert load_target(folder, device="cpu").info.eos_token_ids == {5, 7, 9}
    (folder / "generation_config.json").unlink()
    edit_config(folder, eos_token_id=None)
    assert load_target(folder, device="cpu").info.eos_token_ids == frozenset()
    edit_config(folder, eos_token_id="</s>")
    refused(folder, "eos_token_id must be an integer or a list")


def test_dtype_is_never_float16_unless_asked(folder):
    edit_config(folder, dtype="float16")
    info = load_target(folder, device="cpu").info
    assert info.dtype in ("bfloat16", "float32") and f"{info.dtype}: " in info.adapter
    assert load_target(folder, device="cpu", dtype="float16").info.dtype == "float16"
    assert choose_dtype("auto", torch.device("cuda"))[0] is torch.bfloat16
    refused(folder, "dtype must be one of auto, bfloat16, float32, float16, got 'int8'", DSpineError, dtype="int8")


def test_absent_devices(folder):
    refused(folder, "device must be auto, cpu, cuda or cuda:N for the torch runtime, got 'tpu'", BackendError, device="tpu")
    refused(folder, "got 'cuda:x'", BackendError, device="cuda:x")
    refused(folder, "device 'cuda:99' asked for, but torch .* sees: cpu", BackendError, device="cuda:99")
    if not torch.cuda.is_available():
        refused(folder, "sees: cpu; for CUDA install", BackendError, device="cuda")
        assert load_target(folder, device="auto").info.device == "cpu"


def test_runtime_names_its_devices():
    runtime: Runtime = RUNTIME
    found = runtime.availability()
    assert found.ok and "cpu" in found.devices and torch.__version__ in found.reason


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"missing: model\.layers\.1\.mlp\.up_proj\.weight; unused: none",
        ),
        (lambda t: t.update(stray=torch.zeros(2)), "missing: none; unused: stray"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(2)}), r"unused: model\.layers\.2\."),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(47)}),
            r"model\.norm\.weight is \[47\], config\.json asks for \[48\]",
        ),
        (lambda t: t.pop("lm_head.weight"), r"missing: lm_head\.weight"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), r"unused: .*q_proj\.bias"),
    ],
)
def test_wrong_tensors_are_named(folder, change, match):
    change_tensors(folder, change)
    refused(folder, match)


def test_rotary_buffers_of_old_files_are_no_stray_tensors(folder):
    change_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    load_target(folder, device="cpu", dtype="float32")


def test_tied_head_beside_a_stored_one(folder):
    edit_config(folder, tie_word_embeddings=True)
    refused(folder, "ties the LM head to the embedding, but lm_head.weight differs")
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_target(folder, device="cpu", dtype="float32")


def test_damaged_files(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for cut in (0, 5, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refused(folder, "missing or damaged safetensors file")
    path.unlink()
    refused(folder, r"expected model\.safetensors or model\.safetensors\.index\.json, found weight files: none")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    refused(folder, r"found weight files: pytorch_model\.bin")


def test_damaged_index(tmp_path):
    save_tiny(tmp_path, "llama", shards=True, num_hidden_layers=2)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    shard = sorted(set(good["weight_map"].values()))[1]
    content = (tmp_path / shard).read_bytes()
    (tmp_path / shard).unlink()
    refused(tmp_path, f"shards that .* names are missing: {shard}")
    (tmp_path / shard).write_bytes(content[:-3])
    refused(tmp_path, f"{shard}: missing or damaged safetensors file")
    (tmp_path / shard).write_bytes(content)
    name = next(iter(good["weight_map"]))
    other = next(file for file in good["weight_map"].values() if file != good["weight_map"][name])
    index.write_text(json.dumps({"weight_map": good["weight_map"] | {name: other}}))
    refused(tmp_path, f"places tensors in shards that lack them: {name}")
    index.write_text(json.dumps({"weight_map": good["weight_map"] | {name: "../outside.safetensors"}}))
    refused(tmp_path, "must name files of this folder")
    for text in ("{", "[]", "{}", '{"weight_map": []}'):
        index.write_text(text)
        refused(tmp_path, "expected JSON with a weight_map|must name files")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be an integer"),
        ({"num_key_value_heads": 3}, "4 heads over 3 K/V heads"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object or null"),
        ({"rope_theta": 5.0}, r"contradictory rope settings: rope_theta is 5\.0 and, in rope_parameters"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "contradictory rope settings: rope_type"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor must be a positive number, got None"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor must be a positive number"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised weights \(gptq\) are not read"),
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": "no-such-family"}, "transformers does not know this model"),
        ({"num_hidden_layers": 3}, r"missing: model\.layers\.2\."),
        ({"attention_bias": True}, r"missing: model\.layers\.0\.self_attn\.k_proj\.bias"),
    ],
)
def test_bad_configs_name_the_field(folder, changes, match):
    edit_config(folder, **changes)
    refused(folder, match)


def test_absent_or_broken_config(folder):
    (folder / "config.json").write_text("{")
    refused(folder, "not valid JSON")
    (folder / "config.json").unlink()
    refused(folder, "no config.json there")


def test_llama_without_a_rope_base_uses_the_family_default(folder):
    """Llama 2 cards name no base; `transformers` then takes 10000."""
    from transformers import AutoModelForCausalLM

    edit_config(folder, "rope_parameters")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target = load_target(folder, device="cpu", dtype="float32")
    ids = prompt(30)
    with torch.no_grad():
        want = model(ids).logits[:, -1]
    torch.testing.assert_close(target.prefill(target.make_cache(30), ids, chunk=30).logits, want, atol=1e-4, rtol=1e-4)
