"""Hybrids against mlx-lm's own models: logits of prompts, steps and blocks, greedy text, features, what the target says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from dspine.common.decoding import DecodingParams, decode
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.gdn import GdnTokens, gdn_recurrence
from dspine.common.protocols import ArrayOps, Target
from dspine.common.sampling import SamplingParams
from dspine_mlx.drafter import load_drafter
from dspine_mlx.targets import gdn, hybrid, load, moe, wrap_model
from dspine_mlx.targets.gdn import blocks
from dspine_mlx.targets.load import cast, choose_dtype
from tests.helpers import drafters
from tests.mlx.goldens import ids
from tests.mlx.hybrids import (
    EXPERTS,
    FAMILIES,
    HIDDEN,
    LAYERS,
    MOE,
    PICKS,
    PROMPT,
    VOCAB,
    hybrid_model,
    hybrid_target,
    third_party_greedy,
    verify,
)

CLOSE = {"atol": 2e-4, "rtol": 2e-4}
TEXT = [(7 * i * i + 3 * i + 5) % VOCAB for i in range(70)]


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_are_mlx_lms(kind, bits):
    """Prompts in chunks, single steps, and blocks of every width, against one plain call of the model."""
    target = hybrid_target(kind, bits=bits)
    if bits and kind in MOE:
        assert isinstance(target.decoder.layers[0].mlp.switch_mlp.up_proj, QuantizedSwitchLinear)
    want = np.array(target.model(mx.array([TEXT])))[0]
    cache = target.make_cache(len(TEXT))
    got = [np.array(target.prefill(cache, ids([TEXT[:5]]), chunk=3).logits)]
    got += [np.array(target.prefill(cache, ids([TEXT[5:24]]), chunk=64).logits)]
    np.testing.assert_allclose(np.concatenate(got), want[[4, 23]], **CLOSE)
    at = 24
    for w in (1, 1, 16, 3, 9, 2, 7, 1):
        verification = verify(target, cache, TEXT[at : at + w])
        np.testing.assert_allclose(np.array(verification.logits[0]), want[at : at + w], **CLOSE)
        target.commit(cache, verification, w)
        at += w
    cache.check_integrity()
    assert cache.length == at


@pytest.mark.parametrize("kind, block", [(kind, block) for kind in FAMILIES for block in (2, 5, 16)])
def test_s3_greedy_is_mlx_lms(kind, block, tmp_path):
    """Token for token in float32 through the real loop, with partly wrong drafts; and without a drafter."""
    target = hybrid_target(kind)
    text = third_party_greedy(target.model, PROMPT, 80)
    assert len(set(text)) > 10
    folder = drafters.drafter_folder(tmp_path / "d", "dspine", block, target.head_weight(), LAYERS)
    drafter = drafters.Prompted(load_drafter(folder, target), PROMPT, text, wrong_every=5)
    for draft in (drafter, None):
        params = DecodingParams(max_tokens=64, break_even=0.0, prefill_chunk=3, sampling=SamplingParams())
        events = list(decode(target, draft, PROMPT, params))
        assert [event.token for event in events] == text[:64]
    assert events[-1].stats.generated_tokens == 64


def test_v1_each_token_from_another_thread(tmp_path):
    """Loaded here, decoded by a pool: states, windows and K/V of a round are computed by the thread that made them."""
    target = hybrid_target("qwen3_5_moe")
    text = third_party_greedy(target.model, PROMPT, 40)
    folder = drafters.drafter_folder(tmp_path / "d", "dspine", 6, target.head_weight(), LAYERS)
    drafter = drafters.Prompted(load_drafter(folder, target), PROMPT, text, wrong_every=4)
    events = decode(target, drafter, PROMPT, DecodingParams(max_tokens=24, break_even=0.0))
    tokens = []
    for _ in range(24):
        with ThreadPoolExecutor(1) as pool:
            tokens.append(pool.submit(next, events).result(60).token)
    assert tokens == text[:24]


@pytest.mark.parametrize("kind", FAMILIES)
def test_features_are_layer_outputs(kind):
    """The raw residual after each layer, in the order asked for, from prompts and blocks alike."""
    target = hybrid_target(kind)
    target.bind_features([2, 0, 3])
    hidden, want = target.model.model.embed_tokens(mx.array([TEXT[:20]])), {}
    for i, layer in enumerate(target.decoder.layers):
        mask = None if "linear_attn" in layer else "causal"
        hidden = want[i] = layer(hidden, mask, None)
    want = np.array(mx.concatenate([want[i] for i in (2, 0, 3)], axis=-1))
    cache = target.make_cache(32)
    first = target.prefill(cache, ids([TEXT[:9]]), chunk=4)
    verification = verify(target, cache, TEXT[9:20])
    got = np.array(mx.concatenate([first.features, verification.features], axis=1))
    assert got.shape == (1, 20, 3 * HIDDEN)
    np.testing.assert_allclose(got, want, **CLOSE)
    with pytest.raises(CheckpointError, match=r"out of range, expected 0\.\.3"):
        target.bind_features([LAYERS])


def test_batch_of_two_equals_one_by_one():
    target = hybrid_target("qwen3_5_moe")
    rows = [PROMPT, PROMPT[::-1]]
    cache = target.make_cache(32)
    target.prefill(cache, ids(rows), chunk=4)
    together = verify_rows(target, cache, [[1, 2, 3], [4, 5, 6]], 2)
    for row, block, got in zip(rows, [[1, 2, 3], [4, 5, 6]], together, strict=True):
        alone = target.make_cache(32)
        target.prefill(alone, ids([row]), chunk=4)
        np.testing.assert_allclose(got, verify_rows(target, alone, [block], 2)[0], **CLOSE)


def verify_rows(target, cache, rows, m):
    """Logits of the block, then of one token after `m` of it were kept."""
    verification = target.finish(cache, target.begin(cache, ids(rows)), len(rows[0]))
    target.commit(cache, verification, m)
    after = target.finish(cache, target.begin(cache, ids([[9]] * len(rows))), 1)
    return np.array(mx.concatenate([verification.logits, after.logits], axis=1))


@pytest.mark.parametrize("tied", [True, False])
def test_head_of_a_wrapped_model(tied):
    """Qwen3.5's LM head lies below `language_model`: it is found there, and the embedding where it is tied."""
    target = hybrid_target("qwen3_5", tie_word_embeddings=tied)
    weight, text = target.head_weight(), target.model.language_model
    np.testing.assert_array_equal(weight, np.array((text.model.embed_tokens if tied else text.lm_head).weight))
    hidden = mx.random.normal((1, 3, HIDDEN), key=mx.random.key(1))
    np.testing.assert_allclose(np.array(target.head(hidden))[0], np.array(hidden)[0] @ weight.T, atol=1e-4)


# -- what the target says ----------------------------------------------------------------------------------------------


def test_info_says_what_runs():
    dense, moe, attention = (hybrid_target(kind).info for kind in ("qwen3_5", "qwen3_next", "qwen3_moe"))
    assert dense.adapter.startswith(
        "HybridTarget (2 Gated-DeltaNet and 2 attention layers, rollback by compact factors; no router"
    )
    assert "4 with experts" in moe.adapter and "begin stops at layer 0's router" in moe.adapter
    assert "mlx_lm.models.qwen3_next" in moe.adapter and "0 Gated-DeltaNet" in attention.adapter
    target = hybrid_target("qwen3_5_moe", bits=4)
    assert isinstance(target, Target) and isinstance(target.arrays, ArrayOps) and target.record_routing is False
    assert target.info.quantization == "4-bit, groups of 32"


def test_router_picks_of_every_layer():
    """Only while `record_routing` is true: the experts mlx-lm's own router picks, layer by layer."""
    target = hybrid_target("qwen3_5_moe")
    cache = target.make_cache(32)
    target.prefill(cache, ids([PROMPT]), chunk=64)
    stage = target.begin(cache, ids([[1, 2, 3, 4, 5]]))
    assert stage.router_picks.shape == (1, 5, PICKS)
    assert target.finish(cache, stage, 3).router_picks is None
    cache.keep(0)
    target.record_routing = True
    picks = np.array(target.finish(cache, target.begin(cache, ids([[1, 2, 3, 4, 5]])), 3).router_picks)
    assert picks.shape == (1, 3, LAYERS, PICKS) and picks.min() >= 0 and picks.max() < EXPERTS
    np.testing.assert_array_equal(picks[:, :, 0], np.array(stage.router_picks)[:, :3])
    hidden = target.model.model.embed_tokens(mx.array([[*PROMPT, 1, 2, 3]]))
    for i, layer in enumerate(target.decoder.layers):
        mixed = (layer.linear_attn if i in target.gdn else layer.self_attn)(
            layer.input_layernorm(hidden), None if i in target.gdn else "causal", None
        )
        gates = np.array(layer.mlp.gate(layer.post_attention_layernorm(hidden + mixed)))[0, -3:]
        np.testing.assert_array_equal(np.sort(picks[0, :, i]), np.sort(np.argsort(-gates, axis=-1)[:, :PICKS]))
        hidden = layer(hidden, None if i in target.gdn else "causal", None)
    dense = hybrid_target("qwen3_5")
    dense.record_routing = True
    stage = dense.begin(dense.make_cache(8), ids([[1, 2]]))
    assert stage.router_picks is None and stage.resume is None
    assert dense.finish(dense.make_cache(8), stage, 2).router_picks is None


def test_no_router_in_layer_0():
    """Qwen3-Next may have a dense first layer: `begin` hands on, later routers still count."""
    target = hybrid_target("qwen3_next", mlp_only_layers=[0])
    assert "no router in layer 0" in target.info.adapter
    target.record_routing = True
    cache = target.make_cache(32)
    target.prefill(cache, ids([TEXT[:9]]), chunk=64)
    stage = target.begin(cache, ids([TEXT[9:15]]))
    assert stage.router_picks is None
    verification = target.finish(cache, stage, 4)
    assert verification.router_picks.shape == (1, 4, LAYERS - 1, PICKS)
    np.testing.assert_allclose(np.array(verification.logits[0]), np.array(target.model(mx.array([TEXT[:13]])))[0, 9:], **CLOSE)


# -- the prompt's recurrence -------------------------------------------------------------------------------------------


def random_tokens(count: int, parallel: bool = False, decay: float = 0.5, size: int = 8) -> tuple[GdnTokens, mx.array]:
    rng = np.random.default_rng(count)
    shape = {"q": (2, count, 2, size), "k": (2, count, 2, size), "v": (2, count, 4, 16)}
    q, k, v = (rng.normal(size=shape[name]) for name in "qkv")
    k = k[:, :1] + np.zeros_like(k) if parallel else k
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    log_decay, beta = -decay * rng.uniform(size=(2, count, 4)), rng.uniform(0.3, 0.999, size=(2, count, 4))
    state = rng.normal(size=(2, 4, 16, size))
    parts = [mx.array(x.astype(np.float32)) for x in (q, k, v, log_decay, beta, state)]
    return GdnTokens(*parts[:5]), parts[5]


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 50])
@pytest.mark.parametrize("parallel, decay", [(False, 0.5), (True, 1e-3), (False, 400.0)])
def test_prompt_blocks(count, parallel, decay):
    """Against the recurrence in NumPy float64, and against mlx-lm's; n1: one key over and over; n2: decays that vanish."""
    tokens, state = random_tokens(count, parallel, decay)
    out, last = (np.array(x) for x in blocks(tokens, state))
    wide = [np.array(x).astype(np.float64) for x in (tokens.q, tokens.k, tokens.v, tokens.log_decay, tokens.beta, state)]
    want_out, _, _, want_state = gdn_recurrence(*wide)
    np.testing.assert_allclose(out, want_out, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(last, want_state, atol=1e-4, rtol=1e-4)
    theirs = gated_delta_ops(tokens.q, tokens.k, tokens.v, mx.exp(tokens.log_decay), tokens.beta, state)
    np.testing.assert_allclose(out, np.array(theirs[0]), atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(last, np.array(theirs[1]), atol=1e-4, rtol=1e-4)


def test_prompts_on_metal_take_mlx_lms_kernel(monkeypatch):
    """The same tokens and the same state layout go to it; heads it cannot take go through the blocks."""
    calls = []

    def kernel(q, k, v, decay, beta, state):
        calls.append(decay.dtype)
        return gated_delta_ops(q, k, v, decay, beta, state)

    monkeypatch.setattr(gdn, "device_name", lambda: "metal")
    monkeypatch.setattr(gdn, "gated_delta_kernel", kernel)
    tokens, state = random_tokens(9, size=32)
    got, want = gdn.recurrence(tokens, state), blocks(tokens, state)
    assert calls == [mx.float32]
    for left, right in zip(got, want, strict=True):
        np.testing.assert_allclose(np.array(left), np.array(right), atol=1e-4, rtol=1e-4)
    gdn.recurrence(*random_tokens(9))
    assert len(calls) == 1


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_block_lengths_are_checked():
    target = hybrid_target("qwen3_5_moe")
    cache = target.make_cache(40)
    with pytest.raises(DSpineError, match=r"1\.\.16 tokens \(anchor included\), got 17"):
        target.begin(cache, ids([list(range(17))]))
    with pytest.raises(DSpineError, match="has 1..16 tokens"):
        target.begin(cache, mx.zeros((1, 0), dtype=mx.int32))
    stage = target.begin(cache, ids([[1, 2, 3]]))
    for w in (0, 4):
        with pytest.raises(DSpineError, match=rf"finish of {w} tokens, expected 1\.\.3"):
            target.finish(cache, stage, w)
    target.begin(cache, ids([[4, 5, 6]]))
    with pytest.raises(DSpineError, match="finish of begin number 1, but the cache has seen 2"):
        target.finish(cache, stage, 2)
    with pytest.raises(DSpineError, match="no tokens"):
        target.prefill(cache, mx.zeros((1, 0), dtype=mx.int32), chunk=4)
    with pytest.raises(DSpineError, match="exceed its capacity of 40"):
        target.prefill(cache, ids([list(range(41))]), chunk=4)


def test_commit_fits_the_block():
    target = hybrid_target("qwen3_5_moe")
    cache = target.make_cache(40)
    old = verify(target, cache, [1, 2, 3])
    with pytest.raises(DSpineError, match="3 verified tokens wait for commit"):
        target.begin(cache, ids([[1]]))
    with pytest.raises(DSpineError, match=r"commit of 4 tokens, expected 0\.\.3"):
        target.commit(cache, old, 4)
    target.commit(cache, old, 3)
    verify(target, cache, [4, 5])
    with pytest.raises(DSpineError, match="factors of 3 tokens, but 2 are pending"):
        target.commit(cache, old, 1)


def test_a_wrong_adapter_is_seen_at_load(monkeypatch):
    """What the check at load is for: a router that picks other experts, a layer of an unknown kind."""
    model, config = hybrid_model("qwen3_next")
    with monkeypatch.context() as patch:
        patch.setattr(hybrid, "experts", lambda block, x, routing: block.shared_expert(x))
        with pytest.raises(DSpineError, match="gives other logits than its own call"):
            wrap_model(model, config, name="toy")
        scale = 1 + 0.01 * mx.ones(HIDDEN)
        patch.setattr(hybrid, "experts", lambda block, x, routing: moe.experts(block, x * scale, routing))
        with pytest.raises(DSpineError, match=r"(layers \[.*\] of qwen3_next give other outputs|gives other logits)"):
            wrap_model(model, config, name="toy")
    layer = model.model.layers[1]
    layer.strange_attn = layer.self_attn
    del layer.self_attn
    with pytest.raises(DSpineError, match=r"unknown mixers in layers \[1\]"):
        wrap_model(model, config, name="toy")


class WrongSorted(SwitchLinear):
    """A gather that is right for few rows and wrong for those that come sorted by expert."""

    def __call__(self, x, indices, sorted_indices=False):
        right = super().__call__(x, indices, sorted_indices)
        return right * 1.05 if sorted_indices else right


@pytest.mark.parametrize("bits, place", [(None, 0), (None, -1), (4, 0), (8, 0)])
@pytest.mark.parametrize("kind", MOE)
def test_gathered_products_of_experts(kind, bits, place):
    """Gathers are what one expert after another gives; a device whose gathers are wrong is refused."""
    model, config = hybrid_model(kind, bits=bits)
    target = wrap_model(model, config, name="toy")
    block = target.decoder.layers[target.moe_ids[place]].mlp
    error = moe.gather_error(block.switch_mlp, mx.float32)
    assert error is not None and error < 1e-5
    if bits is None:
        part = block.switch_mlp.down_proj
        wrong = WrongSorted(part.input_dims, part.output_dims, part.num_experts, bias=False)
        wrong.weight = part.weight
        block.switch_mlp.down_proj = wrong
        with pytest.raises(DSpineError, match=r"gathered products of the experts are wrong .*difference 0.0[45]"):
            wrap_model(model, config, name="toy")


@pytest.mark.parametrize("kind, bits", [("qwen3_5", None), ("qwen3_5_moe", 8)])
def test_bfloat16_states_stay_float32(kind, bits):
    """Residual and windows in bfloat16, states in float32, and logits about as near to float32 as mlx-lm's."""
    model, config = hybrid_model(kind, bits=bits)
    cast(model, mx.bfloat16)
    assert model.model.layers[0].linear_attn.A_log.dtype == mx.float32
    target = wrap_model(model, config, name="toy")
    cache = target.make_cache(64)
    run = target.prefill(cache, ids([TEXT[:30]]), chunk=16)
    assert (cache.states.dtype, cache.windows.dtype, cache.layers[0].keys.dtype) == (mx.float32, mx.bfloat16, mx.bfloat16)
    assert run.logits.dtype == mx.float32 and target.info.dtype == "bfloat16"
    verification = verify(target, cache, TEXT[30:37])
    target.commit(cache, verification, 2)
    assert (cache.states.dtype, cache.windows.dtype) == (mx.float32, mx.bfloat16)
    exact = np.array(hybrid_target(kind, bits=bits).model(mx.array([TEXT[:37]])))[0, 29:]
    theirs = np.array(model(mx.array([TEXT[:37]])).astype(mx.float32))[0, 29:]
    ours = np.concatenate([np.array(run.logits), np.array(verification.logits[0])])
    assert np.linalg.norm(ours - exact) < 1.25 * np.linalg.norm(theirs - exact)


def test_experts_on_the_cpu_are_float32():
    """MLX's `gather_mm` has nothing else there: `auto` runs so and says it, an explicit bfloat16 is refused."""
    model, config = hybrid_model("qwen3_next")
    cast(model, mx.bfloat16)
    if load.device_name() != "cpu":
        pytest.skip("MLX runs on an accelerator here, where experts run in bfloat16")
    with pytest.raises(DSpineError, match="experts in bfloat16 cannot run on the CPU"):
        wrap_model(model, config, name="toy")
    dtype, note = choose_dtype("auto", mx.bfloat16, experts=True)
    assert dtype == mx.float32 and "experts on the CPU" in note
    assert choose_dtype("auto", mx.bfloat16) == (mx.bfloat16, "")
