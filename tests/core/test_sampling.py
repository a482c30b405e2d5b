"""Filters against transformers' own warpers; uniforms that do not depend on rounds or batches."""

from __future__ import annotations

import numpy as np
import pytest

from dspine.common.errors import DSpineError
from dspine.common.sampling import LEAST_TEMPERATURE, SamplingParams, penalise, token_probabilities, uniforms

RNG = np.random.default_rng(4)


def test_uniforms_belong_to_positions():
    whole = uniforms(7, 3, 0, 64)
    assert whole.dtype == np.float32 and whole.shape == (64, 3)
    for start in (0, 1, 5, 17, 63):
        for count in (1, 2, 8):
            np.testing.assert_array_equal(uniforms(7, 3, start, count)[: 64 - start], whole[start : start + count])
    assert not np.array_equal(uniforms(8, 3, 0, 64), whole) and not np.array_equal(uniforms(7, 4, 0, 64), whole)
    assert whole.min() >= 0 and whole.max() < 1
    big = uniforms(1, 0, 0, 20_000)
    np.testing.assert_allclose(big.mean(axis=0), 0.5, atol=0.01)
    assert abs(np.corrcoef(big[:, 0], big[:, 1])[0, 1]) < 0.03


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.6},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.0, "top_k": 500},
        {"temperature": 2.0, "top_p": 1e-6},
    ],
)
def test_filters_equal_transformers(params):
    torch = pytest.importorskip("torch", reason="transformers' warpers need torch")
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = (RNG.normal(size=(20, 97)) * 3).astype(np.float32)
    scores = torch.from_numpy(logits)
    scores = TemperatureLogitsWarper(params["temperature"])(None, scores)
    if params.get("top_k"):
        scores = TopKLogitsWarper(params["top_k"])(None, scores)
    if params.get("top_p"):
        scores = TopPLogitsWarper(params["top_p"])(None, scores)
    if params.get("min_p"):
        scores = MinPLogitsWarper(params["min_p"])(None, scores)
    got = token_probabilities(logits, SamplingParams(**params))
    np.testing.assert_allclose(got, torch.softmax(scores, -1).numpy(), atol=2e-6)


def test_repetition_penalty_equals_transformers():
    torch = pytest.importorskip("torch", reason="transformers' processor needs torch")
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    vocab, context, block = 50, [3, 4, 4, 9], [9, 17, 3]
    logits = RNG.normal(size=(1, 3, vocab)).astype(np.float32)
    counts = np.bincount(context, minlength=vocab).astype(np.float32)[None]
    got = penalise(logits, np.array([block]), counts, counts * 0, SamplingParams(repetition_penalty=1.3))
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    for i in range(3):
        seen = torch.tensor([context + block[1 : i + 1]])
        want = processor(seen, torch.from_numpy(logits[:, i].copy()))
        np.testing.assert_allclose(got[:, i], want.numpy(), rtol=1e-6)


def test_the_coldest_temperature_is_a_temperature():
    """Below it a division leaves float32's range and no draw means anything, so it is refused; at it the largest logit wins."""
    logits = np.array([[-50.0, 300.0, 299.5, 0.0]], dtype=np.float32)
    np.testing.assert_array_equal(token_probabilities(logits, SamplingParams(temperature=LEAST_TEMPERATURE)), [[0, 1.0, 0, 0]])
    for refused in (1e-40, LEAST_TEMPERATURE / 2, -1e-3, 101.0, float("nan"), float("inf")):
        with pytest.raises(DSpineError, match=r"temperature must be 0 \(greedy\) or 1e-06..100, got"):
            SamplingParams(temperature=refused)
    assert SamplingParams(temperature=0.0).greedy and not SamplingParams(temperature=LEAST_TEMPERATURE).greedy


def test_extreme_logits_stay_probabilities():
    logits = np.array([[1e4, -1e4, 0.0, np.float32(-np.inf)]], dtype=np.float32)
    p = token_probabilities(logits, SamplingParams(temperature=0.01, top_k=2, top_p=0.5, min_p=0.5))
    np.testing.assert_array_equal(p, [[1.0, 0, 0, 0]])
