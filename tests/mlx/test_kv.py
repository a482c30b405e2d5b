"""K/V under rollback: windows, limited sizes, 4 and 8 bits; against mlx-lm's own caches one token at a time."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from dspine.common.decoding import DecodingParams, decode
from dspine.common.errors import DSpineError
from dspine.common.memory import CacheOptions
from dspine_mlx import kv
from dspine_mlx.caches import TargetCache
from dspine_mlx.drafter import load_drafter
from dspine_mlx.kv import WindowKV
from tests.helpers.drafters import Prompted
from tests.mlx.hybrids import hybrid_target
from tests.mlx.test_generation import in_thread
from tests.mlx.toys import drafter_folder, toy_target

PROMPT = [3, 5, 7, 11, 13, 17]
COUNT = 120
SLIDING = {
    "llama": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7},
    "olmo3": {"sliding_window": 7},
    "exaone4": {"sliding_window": 7, "sliding_window_pattern": "LLLG", "rope_scaling": None},
}


@pytest.fixture
def small_slack(monkeypatch):
    """Old rows are dropped every few tokens instead of every few hundred."""
    monkeypatch.setattr(kv, "SLACK", 5)


def visible(cache: WindowKV, count: int) -> list[list[int]]:
    """Write the next `count` tokens, token t as the number t; returns what each of them sees."""
    mask = cache.make_mask(count)
    new = mx.arange(cache.offset, cache.offset + count).astype(mx.float32)[None, None, :, None]
    rows = np.array(cache.update_and_fetch(new, new)[0])[0, 0, :, 0].astype(int)
    if mask is None or isinstance(mask, str):
        mask = np.tril(np.ones((count, len(rows)), bool), k=len(rows) - count)
    return [sorted(rows[np.array(row)].tolist()) for row in np.array(mask)]


def expected(token: int, max_size: int, keep: int) -> list[int]:
    return sorted({*range(min(keep, token + 1)), *range(max(0, token - (max_size - keep) + 1), token + 1)})


@pytest.mark.parametrize("keep", [0, 4])
@pytest.mark.parametrize("max_size", [8, 9, 17])
@pytest.mark.parametrize("slack", [1, 5, 256])
def test_every_token_sees_its_window(max_size, keep, slack):
    """Blocks of 1..16, and of a chunk, each rolled back to a random length; buffers stay bounded."""
    rng = np.random.default_rng(max_size + keep)
    cache, length = WindowKV(max_size, keep, slack), 0
    for step in range(120):
        count = 40 if step % 37 == 5 else int(rng.integers(1, 17))
        assert visible(cache, count) == [expected(t, max_size, keep) for t in range(length, length + count)]
        kept = int(rng.integers(0, count + 1))
        assert cache.reaches(length + kept) and cache.trim(count - kept) == count - kept
        length += kept
        assert cache.offset == length and cache.keys.shape[2] <= max_size - 1 + 40 + max(slack, 16) + 40
        assert cache.size() == min(length, max_size)


@pytest.mark.parametrize("keep", [0, 4])
def test_one_token_at_a_time_is_mlx_lms(keep):
    """The rows that mlx-lm's rotating cache holds after each token."""
    ours, theirs = WindowKV(9, keep, slack=3), RotatingKVCache(9, keep)
    for token in range(60):
        new = mx.full((1, 1, 1, 1), float(token))
        held = np.array(theirs.update_and_fetch(new, new)[0]).ravel().astype(int).tolist()
        assert visible(ours, 1) == [sorted(held)]


def test_going_back_too_far_is_refused():
    cache = WindowKV(8, slack=2)
    for _ in range(10):
        visible(cache, 4)
    cache.trim(4)
    before = cache.offset
    assert not cache.reaches(10) and cache.reaches(before)
    with pytest.raises(DSpineError, match="cannot go back 26 from 36"):
        cache.trim(26)
    assert cache.offset == before
    with pytest.raises(DSpineError, match="the model asks for one of 4"):
        cache.make_mask(2, window_size=4)
    with pytest.raises(DSpineError, match="cannot keep 8"):
        WindowKV(8, 8)


def mlx_lm_text(target, count=COUNT + 16, **options) -> list[int]:
    return [int(t) for t, _ in generate_step(mx.array(PROMPT), target.model, max_tokens=count, **options)]


def speculated(target, text, tmp_path, method="dspine", block=6, **options) -> list[int]:
    drafter = load_drafter(drafter_folder(tmp_path / method, method, block, target.head_weight()), target)
    params = DecodingParams(max_tokens=COUNT, break_even=0.0, prefill_chunk=4)
    return [e.token for e in decode(target, Prompted(drafter, PROMPT, text, wrong_every=4), PROMPT, params, **options)]


@pytest.mark.parametrize("kind", SLIDING)
def test_sliding_layers_under_drafts(kind, small_slack, tmp_path):
    """17 windows of text, dropped rows included: mlx-lm's own greedy text."""
    target = toy_target(kind, seed=3, **SLIDING[kind])
    assert {type(layer) for layer in target.new_kv()} >= {WindowKV}
    text = mlx_lm_text(target)
    assert len(set(text)) > 10 and speculated(target, text, tmp_path) == text[:COUNT]


def test_max_kv_size_under_drafts(small_slack, tmp_path):
    target = toy_target("qwen3")
    target.use_cache_options(CacheOptions(max_kv_size=20))
    text = mlx_lm_text(target, max_kv_size=20)
    assert speculated(target, text, tmp_path) == text[:COUNT] != mlx_lm_text(target)[:COUNT]


@pytest.mark.parametrize("bits", [8, 4])
def test_q3_quantised_kv_under_drafts(bits, tmp_path):
    """Thirty rounds and more equal mlx-lm with the same quantised K/V, token for token."""
    target = toy_target("qwen3", head_dim=64)
    target.use_cache_options(CacheOptions(kv_bits=bits))
    cache = [QuantizedKVCache(64, bits) for _ in make_prompt_cache(target.model)]
    text = mlx_lm_text(target, prompt_cache=cache, prefill_step_size=4)
    assert speculated(target, text, tmp_path) == text[:COUNT]


def test_v1_limited_caches_on_worker_threads(small_slack, tmp_path):
    """Loaded on the main thread; two workers, then the main thread; and one generator driven from many (mlx-lm 1256)."""
    target = toy_target("llama", seed=3, **SLIDING["llama"])
    text = mlx_lm_text(target, 60)
    drafter = load_drafter(drafter_folder(tmp_path / "d", "dspine", 6, target.head_weight()), target)
    params = DecodingParams(max_tokens=40, break_even=0.0, prefill_chunk=4)

    def whole() -> list[int]:
        return [event.token for event in decode(target, drafter, PROMPT, params)]

    assert in_thread(whole) == in_thread(whole) == whole() == text[:40]
    events = decode(target, drafter, PROMPT, params)
    assert [in_thread(lambda: next(events)).token for _ in range(40)] == text[:40]


def test_q3_trimmed_rows_leave_nothing(tmp_path):
    """w = 6, A = 2 for 30 rounds, then trims of 1..5: the packed rows are those of a run without drafts."""
    target = toy_target("qwen3", head_dim=64)
    target.use_cache_options(CacheOptions(kv_bits=8))
    rng = np.random.default_rng(0)
    text = rng.integers(0, 96, 90)
    cache, plain = target.make_cache(128), target.make_cache(128)

    def verify(into, block, kept):
        stage = target.begin(into, mx.array(block[None].astype(np.int32)))
        target.commit(into, target.finish(into, stage, len(block)), kept)

    for r in range(30):
        block = np.concatenate([text[3 * r : 3 * r + 3], rng.integers(0, 96, 3)])
        verify(cache, block, 3)
    for at in range(0, 90, 3):
        target.commit(
            plain, target.finish(plain, target.begin(plain, mx.array(text[None, at : at + 3].astype(np.int32))), 3), 3
        )
    for cut in range(6):
        for ours, theirs in zip(cache.layers, plain.layers, strict=True):
            ours.trim(min(cut, 1))
            theirs.trim(min(cut, 1))
            assert ours.offset == theirs.offset == 90 - cut
            for a, b in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
                assert np.array_equal(np.array(a[:, :, : ours.offset]), np.array(b[:, :, : ours.offset]))


# -- refusals at start-up ----------------------------------------------------------------------------------------------------


def test_quantised_kv_needs_heads_that_fit():
    target = toy_target("qwen3")
    with pytest.raises(DSpineError, match="multiple of kv_group_size 64, they have 8"):
        target.use_cache_options(CacheOptions(kv_bits=8))
    assert target.cache_options == CacheOptions()


def test_quantised_kv_and_sliding_layers():
    target = toy_target("llama", head_dim=64, **SLIDING["llama"])
    with pytest.raises(DSpineError, match="sliding-window layers, whose K/V are not quantised"):
        target.use_cache_options(CacheOptions(kv_bits=8))
    assert target.make_cache(4).layers


def test_sliding_families_that_nobody_checked():
    with pytest.raises(DSpineError, match="cannot roll back"):
        toy_target("gemma3_text", sliding_window=4, sliding_window_pattern=2)


def test_adapters_without_the_options_say_so(monkeypatch):
    target = toy_target("qwen3", head_dim=64)
    monkeypatch.setattr(target, "make_cache", lambda capacity: TargetCache([KVCache() for _ in range(4)], capacity))
    with pytest.raises(DSpineError, match="keeps plain K/V only"):
        target.use_cache_options(CacheOptions(kv_bits=8))
    assert target.cache_options == CacheOptions()


def test_attention_before_a_router_and_limited_sizes():
    with pytest.raises(DSpineError, match="max_kv_size needs a layer 0 without attention"):
        hybrid_target("qwen3_moe").use_cache_options(CacheOptions(max_kv_size=16))


# -- hybrids -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_moe"])
def test_q3_quantised_kv_of_hybrids(kind, tmp_path):
    target = hybrid_target(kind, head_dim=64)
    target.use_cache_options(CacheOptions(kv_bits=8))
    cache = [QuantizedKVCache(64, 8) if isinstance(c, KVCache) else c for c in make_prompt_cache(target.model)]
    text = mlx_lm_text(target, 60, prompt_cache=cache, prefill_step_size=4)
    assert speculated(target, text, tmp_path)[:40] == text[:40]


def test_limited_kv_of_hybrids(small_slack, tmp_path):
    """Drafts change nothing; the limit does (mlx-lm has none for these models)."""
    target = hybrid_target("qwen3_5_moe")
    whole = mlx_lm_text(target, 60)
    target.use_cache_options(CacheOptions(max_kv_size=12))
    params = DecodingParams(max_tokens=COUNT + 8, break_even=0.0, prefill_chunk=4)
    text = [event.token for event in decode(target, None, PROMPT, params)]
    assert speculated(target, text, tmp_path)[:COUNT] == text[:COUNT] and text[:60] != whole
