"""Hybrids behind the server: snapshots of states at chosen places, bit for bit a cold run (case R11)."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.errors import DSpineError
from dspine.common.selection.policies import StaticPolicy
from dspine.common.serving.prefixes import PrefixCache
from dspine_cuda.drafter import load_drafter
from dspine_cuda.serving import HybridPrefixes, support
from dspine_cuda.targets.load import load_target
from tests.helpers.drafters import drafter_folder
from tests.helpers.hybrids import save_hybrid
from tests.helpers.models import VOCAB

GRAIN = 8
SHARED, ONE, TWO, THREE = (np.random.default_rng(i).integers(3, VOCAB, size=n).tolist() for i, n in enumerate((20, 15, 9, 12)))


@pytest.fixture(scope="module", params=["qwen3_5_text", "qwen3_5_moe_text"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    model = save_hybrid(folder / "target", request.param)
    head = model.get_output_embeddings().weight.detach().numpy().astype(np.float32)
    target = load_target(folder / "target", device="cpu", dtype="float32")
    return target, load_drafter(drafter_folder(folder / "draft", "dspine", 6, head, 5), target)


def run(pair, prompt, prefixes=None, draft=True):
    """(loop after its answer, tokens reused)"""
    target, drafter = pair
    params = DecodingParams(max_tokens=10, break_even=0, prefill_chunk=GRAIN)
    loop = DecodingLoop(target, drafter if draft else None, prompt, params, StaticPolicy())
    reused = prefixes.fill(loop) if prefixes is not None else 0
    while loop.finish_reason is None:
        loop.step()
        if prefixes is not None:
            prefixes.passed(loop)
    if prefixes is not None:
        assert not prefixes.keep(np.asarray(loop.output, dtype=np.int32), loop)  # states are past the prompt
    return loop, reused


def equal(pair, warm, cold):
    assert warm.output == cold.output and warm.stats.verified_lengths == cold.stats.verified_lengths
    for name in ("states", "windows"):
        assert torch.equal(getattr(warm.cache, name), getattr(cold.cache, name))
    size = warm.committed
    assert torch.equal(warm.cache.kv.store.narrow(4, 0, size), cold.cache.kv.store.narrow(4, 0, size))
    assert torch.equal(warm.draft_cache.rows(size), cold.draft_cache.rows(size))
    warm.cache.check_integrity()


def test_next_turn_goes_on_from_the_last_grain(pair):
    prefixes = PrefixCache(HybridPrefixes(), 10**7, grain=GRAIN)
    first, reused = run(pair, SHARED, prefixes)
    assert reused == 0 and len(prefixes) == 1
    turn = [*SHARED, *first.output, *ONE]
    warm, reused = run(pair, turn, prefixes)
    assert reused == 16 == warm.stats.cached_tokens
    equal(pair, warm, run(pair, turn)[0])


def test_shared_beginning_is_found_at_the_second_prompt(pair):
    prefixes = PrefixCache(HybridPrefixes(), 10**7, grain=GRAIN)
    run(pair, [*SHARED, *ONE], prefixes)
    _, reused = run(pair, [*SHARED, *TWO], prefixes)
    assert reused == 0  # the snapshot of the first lies behind what they share; now one is taken where they part
    warm, reused = run(pair, [*SHARED, *THREE], prefixes)
    assert reused == 16
    equal(pair, warm, run(pair, [*SHARED, *THREE])[0])
    assert prefixes.nbytes == sum(part.numel() * part.element_size() for e in prefixes._entries for part in e.saved)


def test_snapshots_without_the_drafter_serve_plain_requests(pair):
    prefixes = PrefixCache(HybridPrefixes(), 10**7, grain=GRAIN)
    run(pair, SHARED, prefixes, draft=False)
    assert run(pair, [*SHARED, 5], prefixes)[1] == 0
    assert run(pair, [*SHARED, 6], prefixes, draft=False)[1] == 16


def test_byte_limit(pair):
    one = PrefixCache(HybridPrefixes(), 10**7, grain=GRAIN)
    run(pair, SHARED, one)
    prefixes = PrefixCache(HybridPrefixes(), one.nbytes, grain=GRAIN)
    for prompt in (SHARED, TWO + SHARED[:11], [*THREE, *ONE]):
        run(pair, prompt, prefixes)
        assert prefixes.nbytes <= prefixes.limit and len(prefixes) <= 1
    none = PrefixCache(HybridPrefixes(), one.nbytes - 1, grain=GRAIN)
    run(pair, SHARED, none)
    assert none.nbytes == 0


def test_a_state_cannot_be_cut(pair):
    loop, _ = run(pair, SHARED)
    ops = support(*pair).prefixes
    with pytest.raises(DSpineError, match="snapshot of 16 tokens"):
        ops.save(loop.cache, loop.draft_cache, 16)
    saved = ops.save(loop.cache, loop.draft_cache, loop.committed)
    fresh = pair[0].make_cache(64)
    places = fresh.states.data_ptr(), fresh.windows.data_ptr()
    ops.load(saved[:3], fresh, None, loop.committed)
    assert (fresh.states.data_ptr(), fresh.windows.data_ptr()) == places  # graphs know caches by their addresses
    assert torch.equal(fresh.states, loop.cache.states)
    with pytest.raises(DSpineError, match="cannot start"):
        ops.load(saved, pair[0].make_cache(64), None, 16)
    with pytest.raises(DSpineError, match="cannot be cut"):
        ops.copy(loop.cache, None, pair[0].make_cache(64), None, 16)
    assert support(*pair).batcher.shares_length and "share one length" in support(*pair).reason
