"""The whole loop on torch: greedy text equal to transformers', sampling, and the public API from folders."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from dspine.common.decoding import DecodingParams, decode
from dspine.common.sampling import SamplingParams
from dspine_cuda.drafter import load_drafter
from dspine_cuda.targets.load import load_target
from tests.helpers.drafters import Prompted, drafter_folder
from tests.helpers.models import greedy_reference, one_thread, save_tiny

PROMPT = [3, 5, 7, 11, 13]
COUNT = 256


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny products gain nothing from threads, and lose much where other work runs beside the tests."""
    with one_thread():
        yield


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request, tmp_path_factory):
    """A target and transformers' greedy text after PROMPT."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiny(folder, request.param)
    text = greedy_reference(model, torch.tensor([PROMPT]), COUNT + 16)
    assert len(set(text)) > 10
    return load_target(folder, device="cpu", dtype="float32"), text


def tokens_of(target: Any, drafter: Any, count: int = COUNT, **options: Any) -> list[int]:
    params = DecodingParams(max_tokens=count, break_even=0.0, prefill_chunk=3, **options)
    return [event.token for event in decode(target, drafter, PROMPT, params)]


def drafter_of(target: Any, folder: Any, method: str, block: int, **changes: Any) -> Any:
    return load_drafter(drafter_folder(folder / "d", method, block, target.head_weight(), 5, **changes), target)


@pytest.mark.parametrize("method", ["dspine", "dflash"])
@pytest.mark.parametrize("block", range(2, 17))
def test_s3_greedy_is_transformers(pair, method, block, tmp_path):
    """Tier 1: float32, 256 tokens, every block size, both drafters."""
    target, text = pair
    drafter = drafter_of(target, tmp_path, method, block)
    assert tokens_of(target, Prompted(drafter, PROMPT, text, wrong_every=5)) == text[:COUNT]


@pytest.mark.parametrize("method", ["dspine", "dflash"])
def test_random_drafts_change_nothing(pair, method, tmp_path):
    """Sliding layers and both methods, with the drafter's own (mostly wrong) drafts; and no drafter at all."""
    target, text = pair
    drafter = drafter_of(target, tmp_path, method, 5, layer_types=["sliding_attention", "full_attention"], sliding_window=6)
    assert tokens_of(target, drafter, 40) == text[:40]
    assert tokens_of(target, None, 40) == text[:40]


@pytest.mark.parametrize("method, rule", [("dspine", "rejection"), ("dspine", "point-mass"), ("dflash", "rejection")])
def test_sampling_runs_and_repeats(pair, method, rule, tmp_path):
    """Same seed, same tokens; another seed, other tokens; and every draw lies in the target's top 5."""
    target, _ = pair
    drafter = drafter_of(target, tmp_path, method, 5)

    def sample(seed: int) -> list[int]:
        return tokens_of(target, drafter, 24, acceptance=rule, sampling=SamplingParams(1.0, top_k=5, seed=seed))

    first = sample(1)
    assert sample(1) == first and sample(2) != first
    cache = target.make_cache(64)
    target.prefill(cache, torch.tensor([PROMPT]), chunk=64)
    block = torch.tensor([first])
    rows = target.finish(cache, target.begin(cache, block), len(first)).logits[0]
    top = np.argsort(-rows.numpy(), axis=-1)[:, :5]
    assert all(token in row for token, row in zip(first[1:], top, strict=False))


def test_q1_non_finite_drafts_decode_plainly(pair, tmp_path, caplog):
    target, text = pair
    folder = drafter_folder(tmp_path / "d", "dspine", 5, target.head_weight(), 5)
    drafter = load_drafter(folder, target)
    drafter.lean.norm = lambda x: x * float("inf")
    with caplog.at_level(logging.WARNING, "dspine"):
        events = list(decode(target, drafter, PROMPT, DecodingParams(max_tokens=20)))
    assert [event.token for event in events] == text[:20]
    assert events[-1].stats.non_finite_drafts > 5 and not any(event.drafted for event in events)
    assert len(caplog.records) == 1 and "not finite" in caplog.text


def test_inference_layers_equal_the_training_module(pair, tmp_path):
    """`LeanDraft` and `DrafterModel.forward_block` are two spellings of one drafter, float32."""
    target, _ = pair
    for changes in (
        {},
        {"attention_bias": True},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    ):
        drafter = drafter_of(target, tmp_path, "dspine", 6, **changes)
        model = drafter.model
        cache = drafter.make_cache(32)
        features = torch.randn(1, 9, drafter.config.feature_size, generator=torch.Generator().manual_seed(1))
        drafter.commit(cache, features)
        anchor = torch.tensor([4])
        states, code = drafter._run(cache, anchor)
        cos, sin = model.rope(15)
        context = model.context(features)

        def attend(index, query, key, value, model=model, context=context, drafter=drafter, cos=cos, sin=sin):
            past = model.layers[index].self_attn.key_value(context, cos[:, :9], sin[:, :9])
            keys, values = (torch.cat(both, dim=2) for both in zip(past, (key, value), strict=True))
            return torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=drafter._mask(index, 9), enable_gqa=True
            )

        ids = torch.tensor([[4] + [drafter.config.mask_token_id] * 5])
        with torch.inference_mode():
            want = model.forward_block(target.embed(ids)[:, None], cos[:, 9:15], sin[:, 9:15], attend, code[:, None])
        torch.testing.assert_close(states.hidden, want.hidden, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states.pre_injection, want.pre_injection, atol=1e-5, rtol=1e-5)
