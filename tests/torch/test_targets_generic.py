"""The adapter over `transformers`: families without a lean decoder, and what it refuses to run."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.protocols import Target
from dspine_cuda.targets.generic import GenericTarget
from dspine_cuda.targets.load import load_target
from tests.helpers.models import VOCAB, edit_config, greedy_target, one_thread, prompt, save_tiny


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny products gain nothing from threads, and lose much where other work runs beside the tests."""
    with one_thread():
        yield


FAMILIES = {
    "qwen2": {},
    "qwen2 tied, sharded": {"tie_word_embeddings": True, "shards": True},
    "mistral without window": {"sliding_window": None},
    "gpt_neox": {},
    "gpt2": {"n_positions": 512, "n_embd": 48, "n_layer": 5, "n_head": 4, "tie_word_embeddings": True},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    "llama with dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
}


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda name: name.replace(" ", "-"))
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generic")
    model = save_tiny(folder, request.param.split()[0], **FAMILIES[request.param])
    target = load_target(folder, device="cpu", dtype="float32")
    assert isinstance(target, GenericTarget) and isinstance(target, Target)
    assert target.info.adapter.startswith("transformers adapter: ") and target.info.adapter.endswith("; float32 as asked")
    return model, target


def close(got, want):
    torch.testing.assert_close(got, want, atol=1e-4 * max(float(want.abs().max()), 1.0), rtol=1e-4)


def reference(model, ids):
    """Logits, and the outputs of the layers; the last one is seen by a hook, before the final norm."""
    last: list[torch.Tensor] = []
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 5)
    hook = layers[-1].register_forward_hook(lambda module, inputs, out: last.append(out if torch.is_tensor(out) else out[0]))
    with torch.no_grad():
        result = model(ids, output_hidden_states=True)
    hook.remove()
    return result.logits, [*result.hidden_states[1:-1], last[0]], result.hidden_states


def test_prefill_features_and_verification(pair):
    model, target = pair
    ids = prompt(24)
    logits, outputs, _ = reference(model, ids)
    target.bind_features([3, 4, 0])
    want = torch.cat([outputs[i] for i in (3, 4, 0)], dim=-1)
    for chunk in (1, 5, 30):
        cache = target.make_cache(24)
        prefill = target.prefill(cache, ids[:, :14], chunk=chunk)
        close(prefill.logits, logits[:, 13])
        close(prefill.features, want[:, :14])
        block = target.finish(cache, target.begin(cache, ids[:, 14:]), 10)
        close(block.logits, logits[:, 14:])
        close(block.features, want[:, 14:])
        cache.check_integrity()


def test_greedy_equals_transformers(pair):
    model, target = pair
    ids = prompt(7, seed=3)
    tokens = greedy_target(target, ids, 64)
    with torch.no_grad():
        choice = model(torch.cat([ids, torch.tensor([tokens[:-1]])], dim=1)).logits[0, 6:].argmax(dim=-1)
    assert tokens == choice.tolist()


def test_rollback_equals_a_cold_run(pair):
    model, target = pair
    target.bind_features([1])
    text = prompt(40, seed=6)
    for w, m in ((1, 1), (5, 1), (8, 3), (8, 8), (16, 1), (16, 11)):
        wrong = (text[:, 11 : 11 + w] + torch.arange(w).ge(m)) % VOCAB
        cache, cold = target.make_cache(40), target.make_cache(40)
        target.prefill(cache, text[:, :11], chunk=8)
        target.commit(cache, target.finish(cache, target.begin(cache, wrong), w), m)
        cache.check_integrity()
        target.prefill(cold, text[:, : 11 + m], chunk=40)
        rest = text[:, 11 + m : 11 + m + 9]
        after, fresh = (target.finish(c, target.begin(c, rest), 9) for c in (cache, cold))
        close(after.logits, fresh.logits)
        close(after.features, fresh.features)


def test_embed_head_rows(pair):
    model, target = pair
    ids = prompt(6, seed=4)
    logits, outputs, states = reference(model, ids)
    close(target.head(states[-1]), logits)
    close(target.head_rows(ids), model.get_output_embeddings().weight[ids])
    assert target.head_weight().shape == (VOCAB, 48)
    if model.config.model_type == "gpt2":  # learned positions are added behind the embedding
        close(target.embed(ids), model.get_input_embeddings().weight[ids])
    else:
        close(target.embed(ids), states[0])


def test_hooks_sit_on_this_instance_only(pair):
    model, target = pair
    target._unbind()
    before = [len(layer._forward_hooks) for layer in target._layers]  # transformers keeps hooks of its own there
    target.bind_features([0])
    target.bind_features([2, 2])
    assert [len(layer._forward_hooks) - n for layer, n in zip(target._layers, before, strict=True)] == [0, 0, 1, 0, 0]
    assert not [hook for m in model.modules() for hook in m._forward_hooks.values() if hook.__module__.startswith("dspine")]
    assert target.prefill(target.make_cache(4), prompt(4), chunk=4).features.shape == (1, 4, 96)
    for wrong in ([5], [-1], []):
        with pytest.raises(DSpineError, match=r"the target has layers 0\.\.4"):
            target.bind_features(wrong)


REFUSED = [
    ("mistral", {"sliding_window": 16}, "DynamicSlidingWindowLayer"),
    ("gemma2", {"head_dim": 16, "sliding_window": 16}, "DynamicSlidingWindowLayer"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, "DynamicSlidingWindowLayer"),
    ("mamba", {"state_size": 4}, "cannot be removed|cannot be rolled back|transformers cannot"),
    ("t5", {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}, "is an encoder-decoder"),
]


@pytest.mark.parametrize(("family", "changes", "match"), REFUSED, ids=[entry[0] for entry in REFUSED])
def test_models_that_cannot_be_rolled_back_are_refused(tmp_path, family, changes, match):
    if family == "t5":
        from transformers import T5Config, T5ForConditionalGeneration

        T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **changes)).save_pretrained(tmp_path)
    else:
        save_tiny(tmp_path, family, **changes)
    with pytest.raises(CheckpointError, match=match) as caught:
        load_target(tmp_path, device="cpu", dtype="float32")
    assert "\n" not in str(caught.value)


def test_wrong_tensors_are_named(tmp_path):
    save_tiny(tmp_path, "qwen2")
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    cases = [
        (
            {k: v for k, v in whole.items() if "layers.1.mlp.up_proj" not in k},
            r"missing: model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (whole | {"stray.weight": torch.zeros(2)}, r"unexpected: stray\.weight"),
        (whole | {"model.norm.weight": torch.ones(5)}, r"model\.norm\.weight"),
    ]
    for tensors, match in cases:
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=match) as caught:
            load_target(tmp_path, device="cpu", dtype="float32")
        assert "\n" not in str(caught.value)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match="missing or damaged safetensors file"):
        load_target(tmp_path, device="cpu", dtype="float32")
    edit_config(tmp_path, model_type="llama", architectures=["LlamaForCausalLM"])
    with pytest.raises(CheckpointError, match="missing or damaged safetensors file"):
        load_target(tmp_path, device="cpu", dtype="float32")
