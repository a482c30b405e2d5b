"""`dspine doctor` and memory plans: what is shown, what is a problem, and the numbers."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from dspine.common.checkpoints import expected_tensors
from dspine.common.cli import doctor as command
from dspine.common.configs import load_drafter_config
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.memory import (
    CacheOptions,
    DeviceMemory,
    MemoryPlan,
    cache_parts,
    draft_context_bytes,
    host_memory,
    layer_shape,
    plan_memory,
    plan_on,
    stored_bytes,
)
from tests.helpers.drafters import drafter_folder
from tests.packaging.tree import ROOT

CARD = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 96, "intermediate_size": 64, "eos_token_id": 2,
}  # fmt: skip
HEAD = np.random.default_rng(0).normal(size=(96, 32))


@pytest.fixture
def pair(toy):
    """A model folder and a drafter folder with weights, as small as they go."""
    (toy / "model" / "config.json").write_text(json.dumps(CARD))
    save_file({"a": np.zeros((96, 32), np.float32), "b": np.zeros(10, np.uint32)}, toy / "model" / "model.safetensors")
    return toy / "model", drafter_folder(toy / "fitting", "dspine", 5, HEAD, 4)


def ask(dspine, *arguments):
    run = dspine("doctor", "--json", *arguments)
    assert run.out.count("\n") == 1
    return run.code, json.loads(run.out)


def test_tested_versions_are_the_constraints():
    rows = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    rows = {name.lower().replace("_", "-"): version for name, version in rows.items()}
    assert {name: rows[name] for name in command.TESTED} == command.TESTED


def test_a_pair_that_fits(pair, dspine):
    model, draft = pair
    code, found = ask(dspine, "--model", model, "--draft-model", draft, "--tokens", "100")
    assert code == 0 and found["problems"] == []
    assert {row["name"]: row["ok"] for row in found["runtimes"]} == {"toy": True, "gone": False}
    assert "gone_framework" in next(row["reason"] for row in found["runtimes"] if row["name"] == "gone")
    assert found["auto"].startswith("toy (") and found["pair"]["matches"] is True and found["pair"]["fits"] is True
    assert found["pair"]["plan"]["bytes"]["weights"] == 96 * 32 * 4 + 40
    assert found["pair"]["plan"]["bytes"]["K/V"] == 2 * 4 * 2 * 8 * 100 * 4
    assert found["memory"][0]["device"] == "host" and 0 < found["memory"][0]["usable"] <= found["memory"][0]["total"]


def test_the_screen(pair, dspine):
    model, draft = pair
    run = dspine("doctor", "--model", model, "--draft-model", draft)
    flat = " ".join(run.out.split())
    assert run.code == 0 and "no problems found" in flat
    for part in ("Versions", "Backends", "Memory", "Kernels", "Pair", "match yes", "gone_framework", "fits cpu"):
        assert part in flat


def test_a_drafter_for_another_target(pair, dspine, toy):
    model, _ = pair
    other = drafter_folder(toy / "other", "dspine", 5, HEAD, 7)
    code, found = ask(dspine, "--model", model, "--draft-model", other)
    assert code == 1 and found["pair"]["matches"] is False
    assert "made for another target: its number of target layers is 7" in found["problems"][0]


def test_a_model_that_does_not_fit(pair, dspine, monkeypatch):
    model, _ = pair
    monkeypatch.setattr(command, "device_memory", lambda runtime, device: DeviceMemory(10, 10, "a toy machine"))
    code, found = ask(dspine, "--model", model)
    assert code == 1 and found["pair"]["fits"] is False
    assert "does not fit" in found["problems"][0] and "a toy machine" in found["problems"][0]


def test_a_backend_that_is_not_there(pair, dspine):
    code, found = ask(dspine, "--model", pair[0], "--backend", "gone")
    assert code == 1 and "not available" in found["problems"][0]


def test_caches_that_this_runtime_does_not_keep(pair, dspine):
    code, found = ask(dspine, "--model", pair[0], "--kv-bits", "8")
    assert code == 1 and found["problems"][0].startswith("kv_bits: the toy runtime keeps whole K/V in full precision only")


def test_no_drafter_is_no_mismatch(pair, dspine):
    """Weights that are gone: a problem, and nothing is said of a match where no drafter is known."""
    (pair[0] / "model.safetensors").unlink()
    code, found = ask(dspine, "--model", pair[0])
    assert code == 1 and found["pair"]["matches"] is None and "holds no .safetensors file" in found["problems"][0]


def test_a_device_that_is_not_there(pair, dspine):
    code, found = ask(dspine, "--model", pair[0], "--device", "metall")
    assert code == 1 and found["problems"] == ["device 'metall' is not there for toy; here: cpu; or leave --device at auto"]


def test_names_that_are_not_here(toy, dspine):
    code, found = ask(dspine, "--model", "nothing/at-all")
    assert code == 0 and "dspine prepare nothing/at-all" in found["pair"]["state"]
    code, found = ask(dspine, "--model", "nothing")
    assert code == 1 and "unknown model" in found["problems"][0]


def test_versions_that_differ(pair, dspine, monkeypatch):
    here = {**command.TESTED, "numpy": "1.26.4", "tokenizers": "not installed"}
    monkeypatch.setattr(command, "installed_version", lambda package: here[package])
    code, found = ask(dspine, "--model", pair[0])
    states = {row["package"]: row["state"] for row in found["versions"]}
    assert code == 1 and states["numpy"].startswith("outside >=2.0") and states["tokenizers"] == "missing"
    assert states["mlx"] == "as tested" and len(found["problems"]) == 2


# -- memory plans ------------------------------------------------------------------------------------------------------------


def test_m3_only_layers_with_attention_hold_kv():
    """40 layers, every fourth with attention, 65,536 tokens: ten layers' worth, and states that do not grow."""
    card = {
        "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
        "full_attention_interval": 4, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    parts = dict(cache_parts({"text_config": card}, 65_536, 2, CacheOptions()))
    assert parts["K/V"] == 10 * 2 * 2 * 256 * 65_536 * 2
    assert parts["linear-attention states"] == 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    listed = card | {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10}
    assert layer_shape(listed) == layer_shape(card)


def test_kv_options_change_the_plan():
    card = CARD | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": 16, "head_dim": 64}
    one = 2 * 2 * 64
    assert dict(cache_parts(card, 100, 4, CacheOptions()))["K/V"] == one * 4 * (100 + 3 * 16)
    assert dict(cache_parts(card, 100, 4, CacheOptions(max_kv_size=20)))["K/V"] == one * 4 * (20 + 3 * 16)
    eight = dict(cache_parts(card, 100, 2, CacheOptions(kv_bits=8)))["K/V"]
    assert eight == one * (100 + 3 * 16) * (1 + 2 * 2 / 64)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_kv_size": 7}, "at least 8"),
        ({"kv_bits": 3}, "4 or 8, got 3"),
        ({"kv_bits": 8, "kv_group_size": 48}, "got 48"),
        ({"kv_bits": 8, "max_kv_size": 64}, "do not go together"),
    ],
)
def test_cache_options_that_cannot_be(options, message):
    with pytest.raises(DSpineError, match=message):
        CacheOptions(**options)


def test_dtypes_of_the_plan(pair):
    model, draft = pair
    assert stored_bytes(model) == {"F32": 96 * 32 * 4, "U32": 40}
    half = plan_memory(model, draft, tokens=10, dtype="bfloat16")
    assert dict(half.parts)["weights"] == 96 * 32 * 2 + 40
    assert dict(half.parts)["drafter context"] * 2 == dict(plan_memory(model, draft, tokens=10).parts)["drafter context"]


def test_a_drafter_is_planned_as_it_will_lie_in_memory(pair, toy, dspine):
    """Packed matrices stay packed only where the runtime says so; else every number is whole, whatever the file holds."""
    model, draft = pair
    eight = toy / "eight"
    assert dspine("convert", draft, eight, "--bits", "8", "--group-size", "32").code == 0
    sizes = {packed: dict(plan_memory(model, eight, tokens=10, packed=packed).parts)["drafter"] for packed in (True, False)}
    whole = {packed: dict(plan_memory(model, draft, tokens=10, packed=packed).parts)["drafter"] for packed in (True, False)}
    config = load_drafter_config(draft)
    numbers = sum(int(np.prod(shape)) for shape in expected_tensors(config).values())
    assert sizes[False] == whole[False] == (numbers + config.vocab_size * config.dspine.transfer_rank) * 4
    assert sizes[True] < 0.6 * sizes[False]


class Choosy:
    """A runtime that runs models with experts in float32 on its CPU, and leaves drafters packed elsewhere."""

    def runs_wide(self, card, device):
        return device == "cpu" and "num_experts" in card

    def packs_drafters(self, device):
        return device != "cpu"


def test_the_plan_asks_the_runtime(pair):
    model, draft = pair
    save_file({"a": np.zeros((96, 32), np.float16)}, model / "model.safetensors")
    weights = {}
    for device in ("cpu", "gpu"):
        for experts in (0, 4):
            (model / "config.json").write_text(json.dumps(CARD | ({"num_experts": 4} if experts else {})))
            for dtype in ("auto", "bfloat16"):
                plan = plan_on(Choosy(), device, model, draft, tokens=10, dtype=dtype)
                weights[device, experts, dtype] = dict(plan.parts)["weights"]
    wide = {key for key, size in weights.items() if size == 96 * 32 * 4}
    assert wide == {("cpu", 4, "auto")} and set(weights.values()) == {96 * 32 * 4, 96 * 32 * 2}
    assert plan_on(object(), "cpu", model, draft, tokens=10).total == plan_memory(model, draft, tokens=10).total


def test_damaged_weights(pair):
    model, _ = pair
    (model / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(CheckpointError, match="cut off"):
        stored_bytes(model)
    (model / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"nope")
    with pytest.raises(CheckpointError, match="no safetensors file"):
        stored_bytes(model)


def test_plan_numbers():
    plan = MemoryPlan(8, (("weights", 3 << 30), ("K/V", 1 << 30)))
    assert plan.line() == "weights 3.00 + K/V 1.00 = 4.00 GiB for 8 tokens"
    plan.check(DeviceMemory(4 << 30, 4 << 30, "here"), "it")
    with pytest.raises(DSpineError, match=r"4.00 GiB for 8 tokens, but 3.99 GiB are usable \(here\)"):
        plan.check(DeviceMemory(4 << 30, (4 << 30) - (1 << 23), "here"), "it")
    assert 0 < host_memory().usable <= host_memory().total


def test_m3_a_sliding_drafter_holds_its_window(toy):
    sizes = {}
    for name, kinds in (("full", ["full_attention"] * 2), ("half", ["sliding_attention", "full_attention"])):
        changes = {"layer_types": kinds, "sliding_window": 9}
        config = load_drafter_config(drafter_folder(toy / name, "dspine", 5, HEAD, 4, **changes))
        sizes[name] = draft_context_bytes(config, 100, 4)
    one = 2 * 2 * 8 * 4
    assert sizes == {"full": 2 * one * 105, "half": one * (105 + 8 + 5)}
