"""The lean hybrid decoders against `transformers`: logits, features, greedy text, every family; and in two parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspine.common.errors import DSpineError
from dspine.common.protocols import Target
from dspine_cuda.runtime import RUNTIME
from dspine_cuda.targets import moe as moe_module
from dspine_cuda.targets.exact import rows_exact
from dspine_cuda.targets.hybrid import HybridTarget
from tests.helpers.hybrids import FAMILIES, reference, save_hybrid
from tests.helpers.models import VOCAB, greedy_target, one_thread, prompt


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny products gain nothing from threads, and lose much where other work runs beside the tests."""
    with one_thread():
        yield


YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "partial_rotary_factor": 0.5, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS = {
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5 tied, sharded": ("qwen3_5_text", {"tie_word_embeddings": True, "shards": True}),
    "qwen3.5 yarn": ("qwen3_5_text", {"rope_parameters": YARN}),
    "qwen3.5 odd heads": (
        "qwen3_5_text", {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_value_head_dim": 11}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {}),
    "qwen3.5-moe attention first": (
        "qwen3_5_moe_text", {"layer_types": ["full_attention", "linear_attention"] * 2 + ["full_attention"]}),
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-next unnormalised, dense layers": ("qwen3_next", {"norm_topk_prob": False, "mlp_only_layers": [0, 3]}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen3-moe normalised, every other": ("qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2}),
}  # fmt: skip


def load(folder, dtype: str = "float32") -> HybridTarget:
    target = RUNTIME.load_target(folder, device="cpu", dtype=dtype)
    assert isinstance(target, HybridTarget) and isinstance(target, Target)
    return target


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def pair(request, tmp_path_factory):
    """(model of transformers, lean target) of one variant."""
    family, changes = VARIANTS[request.param]
    folder = tmp_path_factory.mktemp("tiny")
    return save_hybrid(folder, family, **changes), load(folder)


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    return save_hybrid(folder, "qwen3_5_moe_text"), load(folder)


def close(got: torch.Tensor, want: torch.Tensor, bound: float = 5e-5) -> None:
    """Relative error over all entries, and no single entry far off."""
    assert got.shape == want.shape
    assert float((got - want).norm() / want.norm()) < bound
    torch.testing.assert_close(got, want, atol=20 * bound * float(want.abs().max()), rtol=0)


def test_logits_and_features_of_chunked_prefill(pair):
    model, target = pair
    ids = prompt(90)
    logits, outputs = reference(model, ids)
    taps = [4, 0, 2]
    target.bind_features(taps)
    for chunk in (1, 17, 64, 90, 128):
        cache = target.make_cache(90)
        prefill = target.prefill(cache, ids, chunk=chunk)
        assert prefill.logits.shape == (1, VOCAB) and prefill.logits.dtype == torch.float32
        close(prefill.logits, logits[:, -1])
        close(prefill.features, torch.cat([outputs[i] for i in taps], dim=-1))
        assert cache.length == 90
        cache.check_integrity()


@pytest.mark.parametrize("length", [1, 2, 3, 14])
def test_verification_rows_are_those_of_the_whole_sequence(pair, length):
    """R2: also after prompts shorter than the convolution's window."""
    model, target = pair
    ids = prompt(length + 16, seed=2)
    logits, outputs = reference(model, ids)
    target.bind_features([1])
    for w in (1, 2, 16):
        cache = target.make_cache(30)
        target.prefill(cache, ids[:, :length], chunk=5)
        got = target.finish(cache, target.begin(cache, ids[:, length : length + w]), w)
        close(got.logits, logits[:, length : length + w])
        close(got.features, outputs[1][:, length : length + w])


def test_greedy_text_equals_transformers(pair):
    """Every one of 96 greedy tokens is the one that `transformers` picks after the same tokens, without a cache."""
    model, target = pair
    ids = prompt(9, seed=3)
    tokens = greedy_target(target, ids, 96)
    choice = reference(model, torch.cat([ids, torch.tensor([tokens[:-1]])], dim=1))[0][0, 8:].argmax(dim=-1)
    assert tokens == choice.tolist()
    assert len(set(tokens)) > 3


def test_head_embed_rows(pair):
    model, target = pair
    ids = prompt(6, seed=4)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    torch.testing.assert_close(target.embed(ids), embedding[ids], atol=0, rtol=0)
    torch.testing.assert_close(target.head_rows(ids[:, :, None]), head[ids[:, :, None]], atol=0, rtol=0)
    np.testing.assert_array_equal(target.head_weight(), head.numpy())
    close(target.head(torch.ones(2, 3, 32)), torch.ones(2, 3, 32) @ head.T)


def test_batch_rows_equal_single_runs(pair):
    _, target = pair
    target.bind_features([0, 4])
    ids = prompt(24, seed=5, batch=3)
    cache = target.make_cache(24, batch=3)
    together = target.prefill(cache, ids[:, :9], chunk=6)
    first = target.finish(cache, target.begin(cache, ids[:, 9:16]), 5)
    target.commit(cache, first, 4)
    second = target.finish(cache, target.begin(cache, ids[:, 13:20]), 7)
    for b in range(3):
        alone, row = target.make_cache(24), ids[b : b + 1]
        prefill = target.prefill(alone, row[:, :9], chunk=9)
        close(together.logits[b : b + 1], prefill.logits)
        close(together.features[b : b + 1], prefill.features)
        part = target.finish(alone, target.begin(alone, row[:, 9:16]), 5)
        close(first.logits[b : b + 1], part.logits)
        target.commit(alone, part, 4)
        close(second.logits[b : b + 1], target.finish(alone, target.begin(alone, row[:, 13:20]), 7).logits)


def test_stage_zero_stops_at_the_router(moe):
    model, target = moe
    ids = prompt(30, seed=6)
    cache = target.make_cache(40)
    target.prefill(cache, ids[:, :14], chunk=64)
    states = cache.states.clone()
    stage = target.begin(cache, ids[:, 14:])
    assert stage.router_picks.shape == (1, 16, 3) and stage.router_picks.dtype == torch.int64
    target.record_routing = True
    for w in (1, 5, 16):
        verification = target.finish(cache, stage, w)
        assert verification.router_picks.shape == (1, w, 5, 3)
        torch.testing.assert_close(verification.router_picks[:, :, 0], stage.router_picks[:, :w], atol=0, rtol=0)
    target.record_routing = False
    assert target.finish(cache, stage, 2).router_picks is None
    torch.testing.assert_close(cache.states, states, atol=0, rtol=0)  # nothing moves before the commit
    model.set_experts_implementation("eager")
    picked: list[torch.Tensor] = []
    hooks = [layer.mlp.gate.register_forward_hook(lambda m, i, out: picked.append(out[2])) for layer in model.model.layers]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    target.record_routing = True
    ours = target.finish(cache, stage, 16).router_picks[0]
    target.record_routing = False
    theirs = torch.stack(picked, dim=1)[14:]
    torch.testing.assert_close(ours.sort(dim=-1).values, theirs.sort(dim=-1).values, atol=0, rtol=0)


def products_keep_rows_exact() -> bool:
    """Whether this CPU's float32 products give a row the same bits for any number of rows from 2 up (`exact`)."""
    x, matrix = torch.randn(16, 32), torch.randn(32, 161)
    return all(torch.equal(x[:n].mm(matrix), x.mm(matrix)[:n]) for n in range(2, 17))


@pytest.mark.parametrize("u", range(1, 17))
@torch.inference_mode()
def test_stage_zero_and_one_equal_the_unsplit_run_bit_for_bit(moe, u):
    """Rows beyond w are run by Stage 0 and dropped: the first w come out as if they had never been there."""
    _, target = moe
    target.bind_features([0, 4])
    ids = prompt(40, seed=7)
    for w in range(1, u + 1):
        results = []
        for count in (w, u):
            cache = target.make_cache(48)
            target.prefill(cache, ids[:, :11], chunk=64)
            stage = target.begin(cache, ids[:, 11 : 11 + count])
            if count > w:  # overwriting what is retained beyond w changes nothing
                resume = stage.resume
                for rows in (resume.residual, resume.normed, *(x.view(1, count, -1) for x in vars(resume.routed).values())):
                    rows[:, w:] = 0 if rows.dtype == torch.int64 else torch.nan
                for rows in (*vars(resume.kept.factors).values(), resume.kept.inputs):
                    rows[:, w:] = torch.nan
            verification = target.finish(cache, stage, w)
            target.commit(cache, verification, (w + 1) // 2)
            results.append((verification.logits, verification.features, cache.states, cache.windows))
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want) if products_keep_rows_exact() else torch.allclose(got, want, rtol=1e-3, atol=1e-4)


def test_rows_are_bit_identical_alone_and_in_a_block(moe):
    """From one state, the first row of a block has the same bits for every width (where float32 products are in this form)."""
    _, target = moe
    assert rows_exact(torch.float32, torch.device("cpu"))
    if not products_keep_rows_exact():
        pytest.skip("this CPU's float32 products depend on the number of rows: rows may differ by rounding")
    ids = prompt(40, seed=8)
    cache = target.make_cache(48)
    target.prefill(cache, ids[:, :11], chunk=64)
    blocks = [target.finish(cache, target.begin(cache, ids[:, 11 : 11 + w]), w).logits for w in range(1, 17)]
    for w, block in enumerate(blocks, start=1):
        assert torch.equal(block, blocks[-1][:, :w]), f"width {w}"


def test_bfloat16_is_as_close_as_transformers_in_bfloat16(tmp_path):
    model = save_hybrid(tmp_path, "qwen3_5_text", hidden_size=64)
    target = load(tmp_path, "bfloat16")
    target.bind_features([0, 4])
    ids = prompt(24, seed=9)
    logits, outputs = reference(model, ids)
    cache = target.make_cache(24)
    prefill = target.prefill(cache, ids[:, :8], chunk=8)
    block = target.finish(cache, target.begin(cache, ids[:, 8:]), 16)
    assert prefill.features.dtype == torch.bfloat16 and block.logits.dtype == torch.float32
    assert cache.states.dtype == torch.float32 and cache.windows.dtype == torch.bfloat16
    with torch.no_grad():
        coarse = model.to(torch.bfloat16)(ids).logits.float()

    def error(got, want):
        return float((got.float() - want).norm() / want.norm())

    assert 1e-4 < error(block.logits, logits[:, 8:]) < 1.5 * error(coarse[:, 8:], logits[:, 8:])
    assert error(block.features[..., 64:], outputs[4][:, 8:]) < 0.1


def test_bfloat16_moe_runs_on_packed_experts(tmp_path):
    """Coarse on purpose: a bfloat16 router may pick another expert where two are close."""
    model = save_hybrid(tmp_path, "qwen3_5_moe_text", hidden_size=64)
    target = load(tmp_path, "bfloat16")
    ids = prompt(100, seed=9)
    logits, _ = reference(model, ids)
    cache = target.make_cache(120)
    target.prefill(cache, ids[:, :84], chunk=100)
    block = target.finish(cache, target.begin(cache, ids[:, 84:]), 16).logits
    error = (block - logits[:, 84:]).norm(dim=-1) / logits[:, 84:].norm(dim=-1)
    assert float(error.median()) < 0.1


def test_auto_is_float32_on_the_cpu_for_small_models(tmp_path):
    save_hybrid(tmp_path, "qwen3_5_moe_text")
    info = load(tmp_path, "auto").info
    assert info.dtype == "float32"
    assert info.adapter == (
        "lean hybrid decoder, qwen3_5_moe_text family (4 GDN and 1 attention layers, 5 with experts); "
        "float32: faster than bfloat16 on the CPU for a hidden size of 32"
    )


def test_limits_are_one_line(moe):
    _, target = moe
    cache = target.make_cache(8)
    with pytest.raises(DSpineError, match="0 tokens committed and 9 more asked for, its capacity is 8"):
        target.prefill(cache, prompt(9), chunk=3)
    assert not bool(cache.states.any())  # refused before a state moved
    with pytest.raises(DSpineError, match="at least 1 token, got 4 and 0"):
        target.prefill(cache, prompt(9)[:, :0], chunk=4)
    with pytest.raises(DSpineError, match="tokens of 2 sequences, but the cache holds 1"):
        target.prefill(cache, prompt(3, batch=2), chunk=4)
    stage = target.begin(cache, prompt(4))
    for w in (0, 5):
        with pytest.raises(DSpineError, match=f"verification of {w} tokens, but the block holds 4"):
            target.finish(cache, stage, w)
    verification = target.finish(cache, stage, 3)
    with pytest.raises(DSpineError, match="commit of 4 tokens, but 3 are pending"):
        target.commit(cache, verification, 4)
    target.commit(cache, verification, 2)
    with pytest.raises(DSpineError, match="stage of a cache of 0 tokens, but it holds 2: begin again"):
        target.finish(cache, stage, 3)
    newer = target.finish(cache, target.begin(cache, prompt(2)), 2)
    with pytest.raises(DSpineError, match="factors of 3 tokens, but 2 are pending: commit the newest block"):
        target.commit(cache, verification, 1)
    with pytest.raises(DSpineError, match="commit needs the factors"):
        target.commit(cache, type(newer)(newer.logits, None), 1)


def test_families_are_all_here():
    assert set(FAMILIES) == {family for family, _ in VARIANTS.values()}


@pytest.mark.parametrize("count", [1, 7, 40])
def test_the_experts_of_cuda_on_cpu_tensors(moe, count, monkeypatch):
    """The forms without a host read (grouped, gathered) and the loop of long prefills, against the CPU's own form."""
    model, target = moe
    mlp = target.layers[2].mlp
    experts = model.model.layers[2].mlp.experts
    monkeypatch.setattr(mlp, "gate_up", experts.gate_up_proj.data, raising=False)
    monkeypatch.setattr(mlp, "down", experts.down_proj.data, raising=False)
    x = torch.randn(count, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        picks = mlp.route(x).picks
        want = mlp._on_cpu(x, picks)
        close(mlp._on_cuda(x, picks), want)
        monkeypatch.setattr(moe_module, "_GATHERED", 3 * mlp.gate_up[0].numel())
        close(mlp._on_cuda(x, picks), want)
        monkeypatch.setattr(moe_module, "_LOOPED", 1)
        close(mlp._on_cuda(x, picks), want)
        monkeypatch.setattr(moe_module, "can_group", lambda weight: True)
        close(mlp._on_cuda(x, picks), want)
