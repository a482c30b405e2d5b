"""The lean decoders against `transformers`, in float32: logits, features, greedy text, rollback."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dspine.common.errors import DSpineError
from dspine_cuda.targets.dense import DenseTarget
from dspine_cuda.targets.layers import can_pack
from dspine_cuda.targets.load import load_target
from tests.helpers.models import VOCAB, edit_config, greedy_reference, greedy_target, one_thread, prompt, save_tiny


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny products gain nothing from threads, and lose much where other work runs beside the tests."""
    with one_thread():
        yield


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama sharded": ("llama", {"shards": True}),
    "llama mha, odd head": ("llama", {"num_key_value_heads": 4, "head_dim": 10}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}}),
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied, sharded": ("qwen3", {"tie_word_embeddings": True, "shards": True}),
    "qwen3 biases": ("qwen3", {"attention_bias": True}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN | {"beta_fast": 16.0, "attention_factor": 1.3}}),
}


def load(folder, dtype="float32") -> DenseTarget:
    target = load_target(folder, device="cpu", dtype=dtype)
    assert isinstance(target, DenseTarget)
    return target


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def pair(request, tmp_path_factory):
    """(model of transformers, lean target) of one variant."""
    family, changes = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp("tiny")
    model = save_tiny(folder, family, **changes)
    if changes.get("shards"):
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    return model, load(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    return save_tiny(folder, "qwen3"), load(folder)


def reference(model, ids) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits [B, T, V], and every layer's output as a hook sees it: the residual stream, before the final norm."""
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(
            lambda module, inputs, output: outputs.append(output if torch.is_tensor(output) else output[0])
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        result = model(ids, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    for index in range(len(outputs) - 1):  # hidden_states[i + 1] is layer i's output, but for the last, which is normed
        torch.testing.assert_close(outputs[index], result.hidden_states[index + 1])
    return result.logits, outputs


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=1e-4)


def test_logits_and_features_of_chunked_prefill(pair):
    model, target = pair
    ids = prompt(23)
    logits, outputs = reference(model, ids)
    taps = [4, 0, 2]
    target.bind_features(taps)
    for chunk in (1, 3, 7, 23, 64):
        cache = target.make_cache(30)
        prefill = target.prefill(cache, ids, chunk=chunk)
        assert prefill.logits.shape == (1, VOCAB) and prefill.logits.dtype == torch.float32
        close(prefill.logits, logits[:, -1])
        close(prefill.features, torch.cat([outputs[i] for i in taps], dim=-1))
        assert cache.length == 23
        cache.check_integrity()


def test_verification_rows_are_those_of_the_whole_sequence(pair):
    model, target = pair
    ids = prompt(30, seed=2)
    logits, outputs = reference(model, ids)
    target.bind_features([1])
    cache = target.make_cache(30)
    target.prefill(cache, ids[:, :14], chunk=5)
    got = target.finish(cache, target.begin(cache, ids[:, 14:]), 16)
    close(got.logits, logits[:, 14:])
    close(got.features, outputs[1][:, 14:])


def test_greedy_256_tokens_equal_transformers(pair):
    """Every one of 256 greedy tokens is the one that `transformers` picks after the same tokens, without a cache."""
    model, target = pair
    ids = prompt(9, seed=3)
    tokens = greedy_target(target, ids, 256)
    with torch.no_grad():
        choice = model(torch.cat([ids, torch.tensor([tokens[:-1]])], dim=1)).logits[0, 8:].argmax(dim=-1)
    assert tokens == choice.tolist()
    assert len(set(tokens)) > 3


def test_greedy_equals_generate(qwen):
    model, target = qwen
    ids = prompt(9, seed=3)
    assert greedy_target(target, ids, 48) == greedy_reference(model, ids, 48)


def test_head_embed_rows(pair):
    model, target = pair
    ids = prompt(6, seed=4)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    torch.testing.assert_close(target.embed(ids), embedding[ids], atol=0, rtol=0)
    torch.testing.assert_close(target.head_rows(ids[:, :, None]), head[ids[:, :, None]], atol=0, rtol=0)
    np.testing.assert_array_equal(target.head_weight(), head.numpy())
    hidden = torch.randn(2, 3, 48)
    close(target.head(hidden), hidden @ head.T)
    assert target.head_weight().dtype == np.float32 and target.head(hidden).dtype == torch.float32


def test_batch_rows_equal_single_runs(qwen):
    model, target = qwen
    target.bind_features([0, 4])
    ids = prompt(20, seed=5, batch=3)
    cache = target.make_cache(20, batch=3)
    together = target.prefill(cache, ids[:, :13], chunk=6)
    block = target.finish(cache, target.begin(cache, ids[:, 13:]), 7)
    for b in range(3):
        alone = target.make_cache(20)
        prefill = target.prefill(alone, ids[b : b + 1, :13], chunk=13)
        close(together.logits[b : b + 1], prefill.logits)
        close(together.features[b : b + 1], prefill.features)
        close(block.logits[b : b + 1], target.finish(alone, target.begin(alone, ids[b : b + 1, 13:]), 7).logits)


@pytest.mark.parametrize("w", range(1, 17))
def test_rollback_equals_a_cold_run(qwen, w):
    model, target = qwen
    target.bind_features([1, 3])
    text = prompt(40, seed=6)
    for m in sorted({1, (w + 1) // 2, w}):
        wrong = (text[:, 11 : 11 + w] + torch.arange(w).ge(m)) % VOCAB  # the first m tokens right, the rest not
        cache = target.make_cache(40)
        target.prefill(cache, text[:, :11], chunk=8)
        verification = target.finish(cache, target.begin(cache, wrong), w)
        target.commit(cache, verification, m)
        cache.check_integrity()
        assert cache.length == 11 + m
        cold = target.make_cache(40)
        target.prefill(cold, text[:, : 11 + m], chunk=40)
        close(cache.store[:, :, :, :, : 11 + m], cold.store[:, :, :, :, : 11 + m])
        rest = text[:, 11 + m : 11 + m + 9]
        after, fresh = (target.finish(c, target.begin(c, rest), 9) for c in (cache, cold))
        close(after.logits, fresh.logits)
        close(after.features, fresh.features)


def test_two_rejected_suffixes_leave_the_same_cache(qwen):
    model, target = qwen
    text = prompt(20, seed=7)
    for m in range(1, 8):
        stores = []
        for shift in (1, 2):
            block = (text[:, 10:18] + shift * torch.arange(8).ge(m)) % VOCAB
            cache = target.make_cache(20)
            target.prefill(cache, text[:, :10], chunk=10)
            target.commit(cache, target.finish(cache, target.begin(cache, block), 8), m)
            stores.append(cache.store[:, :, :, :, : cache.length].clone())
        torch.testing.assert_close(stores[0], stores[1], atol=0, rtol=0)


def test_finish_may_run_fewer_tokens_than_begin_was_given(qwen):
    model, target = qwen
    ids = prompt(20, seed=8)
    cache = target.make_cache(20)
    target.prefill(cache, ids[:, :10], chunk=10)
    stage = target.begin(cache, ids[:, 10:20])
    assert stage.router_picks is None
    whole, part = target.finish(cache, stage, 10), target.finish(cache, stage, 4)
    assert part.logits.shape == (1, 4, VOCAB) and cache.pending == 4
    close(part.logits, whole.logits[:, :4])
    for w in (0, 11):
        with pytest.raises(DSpineError, match=f"verification of {w} tokens, but the block holds 10"):
            target.finish(cache, stage, w)


def test_target_layer_ids_mean_the_output_of_the_layer(tmp_path):
    """C2: layer L adds 10^L to the residual; ids [0, 3] capture 1 and 1111, before the final norm."""
    save_tiny(tmp_path, "llama", num_hidden_layers=4, mlp_bias=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "o_proj.weight", "down_proj.weight", "up_proj.bias", "gate_proj.bias")):
            tensor.zero_()
        if name.endswith("down_proj.bias"):
            tensor.fill_(10.0 ** int(name.split(".")[2]))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    target = load(tmp_path)
    target.bind_features([0, 3])
    features = target.prefill(target.make_cache(8), prompt(5), chunk=2).features
    torch.testing.assert_close(features, torch.cat([torch.full((1, 5, 48), 1.0), torch.full((1, 5, 48), 1111.0)], dim=-1))
    target.bind_features([3])  # num_layers - 1 works
    for wrong in ([4], [-1], [0, 4], []):
        with pytest.raises(DSpineError, match=r"out of range: the target has layers 0\.\.3"):
            target.bind_features(wrong)
    target.bind_features([2, 2])  # twice the same is what the list says
    assert target.prefill(target.make_cache(8), prompt(5), chunk=5).features.shape == (1, 5, 96)


def test_no_taps_no_features(qwen, tmp_path):
    save_tiny(tmp_path, "llama")
    target = load(tmp_path)
    cache = target.make_cache(8)
    assert target.prefill(cache, prompt(4), chunk=4).features is None
    assert target.finish(cache, target.begin(cache, prompt(2)), 2).features is None


@pytest.mark.parametrize(
    "rope",
    [LLAMA3, YARN, {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}, {"rope_type": "default", "rope_theta": 77.0}],
)
def test_both_rope_spellings_give_one_model(tmp_path, rope):
    save_tiny(tmp_path, "qwen3", rope_parameters=rope)
    ids = prompt(50)
    new = load(tmp_path)
    scaling = {("type" if key == "rope_type" else key): value for key, value in rope.items() if key != "rope_theta"}
    edit_config(tmp_path, "rope_parameters", rope_theta=rope["rope_theta"], rope_scaling=scaling)
    old = load(tmp_path)
    torch.testing.assert_close(
        old.prefill(old.make_cache(50), ids, chunk=50).logits,
        new.prefill(new.make_cache(50), ids, chunk=50).logits,
        atol=0,
        rtol=0,
    )


def test_bfloat16_is_as_close_as_transformers_in_bfloat16(tmp_path):
    model = save_tiny(tmp_path, "qwen3", hidden_size=64)
    target = load(tmp_path, "bfloat16")
    target.bind_features([0, 4])
    ids = prompt(24, seed=9)
    logits, outputs = reference(model, ids)
    cache = target.make_cache(24)
    prefill = target.prefill(cache, ids[:, :8], chunk=8)
    block = target.finish(cache, target.begin(cache, ids[:, 8:]), 16)
    assert prefill.features.dtype == torch.bfloat16 and block.logits.dtype == torch.float32
    coarse_logits, coarse_outputs = reference(model.to(torch.bfloat16), ids)

    def error(got, want):
        return float((got.float() - want).norm() / want.norm())

    assert 1e-4 < error(block.logits, logits[:, 8:]) < 1.5 * error(coarse_logits[:, 8:], logits[:, 8:])
    assert error(block.features[..., 64:], outputs[4][:, 8:]) < 1.5 * error(coarse_outputs[4][:, 8:], outputs[4][:, 8:])


def test_a_large_residual_stays_finite(tmp_path):
    """Q1: a residual stream of 7e4 overflows float16; by default nothing runs in float16."""
    save_tiny(tmp_path, "llama", dtype="float16", mlp_bias=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("down_proj.bias"):
            tensor.fill_(2.0e4)
    save_file(
        {name: tensor.half() for name, tensor in tensors.items()}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    edit_config(tmp_path, dtype="float16", torch_dtype="float16")
    target = load(tmp_path, "auto")
    assert target.info.dtype in ("bfloat16", "float32") and target.info.dtype in target.info.adapter
    target.bind_features([4])
    prefill = target.prefill(target.make_cache(8), prompt(8), chunk=8)
    assert float(prefill.features.float().abs().max()) > 7e4
    assert bool(torch.isfinite(prefill.features).all()) and bool(torch.isfinite(prefill.logits).all())


def test_prompt_and_capacity_limits_are_one_line(qwen):
    model, target = qwen
    cache = target.make_cache(8)
    with pytest.raises(DSpineError, match="0 tokens committed and 9 more asked for, its capacity is 8"):
        target.prefill(cache, prompt(9), chunk=9)
    with pytest.raises(DSpineError, match="at least 1 token, got 4 and 0"):
        target.prefill(cache, prompt(9)[:, :0], chunk=4)
    with pytest.raises(DSpineError, match="tokens of 2 sequences, but the cache holds 1"):
        target.prefill(cache, prompt(3, batch=2), chunk=4)


def test_bfloat16_rows_are_bit_identical_alone_and_in_a_block(tmp_path):
    """Greedy verification equals plain decoding in bfloat16 on CPUs that pack weights: every row, every width, bit for bit."""
    if not can_pack(torch.bfloat16, torch.device("cpu")):
        pytest.skip("this CPU has no packed bfloat16 products: rows may differ by rounding (README, losslessness)")
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    save_tiny(tmp_path, "llama", num_hidden_layers=2, initializer_range=0.05, **shape)  # SmolLM2's layers
    target = load(tmp_path, "bfloat16")
    ids = prompt(61)
    start = 29  # rows 29..44 cross a key tile
    cache = target.make_cache(96)
    target.prefill(cache, ids[:, :start], chunk=64)
    alone = []
    for position in range(start, start + 16):
        verification = target.finish(cache, target.begin(cache, ids[:, position : position + 1]), 1)
        alone.append(verification.logits[0, 0].clone())
        target.commit(cache, verification, 1)
    for w in range(2, 17):
        cache = target.make_cache(96)
        target.prefill(cache, ids[:, :start], chunk=64)
        verification = target.finish(cache, target.begin(cache, ids[:, start : start + w]), w)
        for row in range(w):
            assert torch.equal(verification.logits[0, row], alone[row]), f"row {row} of {w}"
