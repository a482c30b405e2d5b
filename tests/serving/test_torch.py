"""Batched rounds and kept prefixes on torch: the bits of a sequence do not depend on its company (cases V2, R4, R8, M2)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.protocols import DraftRequest, Engine
from dspine.common.sampling import SamplingParams
from dspine.common.selection.policies import StaticPolicy
from dspine.common.serving.lengths import CostTable
from dspine.common.serving.prefixes import PrefixCache
from dspine.common.serving.rounds import BatchRounds, measure_costs
from dspine_cuda.drafter import load_drafter
from dspine_cuda.serving import TorchBatcher, TorchPrefixes, support
from dspine_cuda.targets.layers import can_pack
from dspine_cuda.targets.load import load_target
from tests.helpers.drafters import drafter_folder
from tests.helpers.models import save_tiny
from tests.serving.batches import PROMPTS, PrimedBatcher, make_loop, primed_loops, run_batched, texts_alone


@pytest.fixture(scope="module", params=[("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32")], ids="-".join)
def pair(request, tmp_path_factory):
    """(target, drafter, batcher)"""
    family, dtype = request.param
    folder = tmp_path_factory.mktemp("pair")
    model = save_tiny(folder / "target", family)
    head = model.lm_head.weight.detach().numpy().astype(np.float32)
    target = load_target(folder / "target", device="cpu", dtype=dtype)
    drafter = load_drafter(drafter_folder(folder / "draft", "dspine", 6, head, 5), target)
    return target, drafter, TorchBatcher(target, drafter)


@pytest.mark.parametrize("joins", [(), (0, 3, 5, 0)], ids=["together", "one after another"])
def test_batched_text_is_the_text_alone(pair, joins):
    target, drafter, batcher = pair
    alone = texts_alone(target)
    loops, primed = primed_loops(target, drafter, alone)
    engine = Engine(target, primed, None, "torch", "", "", None)
    sizes = run_batched(engine, PrimedBatcher(batcher, primed), loops, joins)
    assert [loop.output for loop in loops] == alone and max(sizes) >= 3
    lengths = [loop.stats.accepted_at for loop in loops]
    assert all(sum(at) > 0 for at in lengths) and len({tuple(at) for at in lengths}) > 1  # they accept different counts


def test_rows_have_the_same_bits_in_company(pair):
    """Logits, features, K/V and drafts of one sequence, alone and in a batch of different lengths and widths."""
    target, drafter, batcher = pair

    def prepared():
        caches = [(target.make_cache(96), drafter.make_cache(96)) for _ in PROMPTS]
        for (cache, draft), prompt in zip(caches, PROMPTS, strict=True):
            read = target.prefill(cache, torch.tensor([prompt]), chunk=16)
            drafter.commit(draft, read.features)
        return caches

    widths = (1, 6, 3, 2)
    blocks = [torch.tensor([PROMPTS[i][:1] * width], dtype=torch.int32) for i, width in enumerate(widths)]
    together, alone = prepared(), prepared()
    got = batcher.verify([cache for cache, _ in together], blocks)
    proposals = batcher.propose([draft for _, draft in together], [7, 8, 9, 10], [DraftRequest()] * 4)
    batcher.commit_drafts([draft for _, draft in together], [v.features[:, :1] for v in got])
    exact = can_pack(target.dtype, target.device)  # products that give a row the same bits whatever rows are beside it
    for i, ((cache, draft), block) in enumerate(zip(alone, blocks, strict=True)):
        proposal = drafter.propose(draft, torch.tensor([7 + i], dtype=torch.int32), DraftRequest())
        verification = target.finish(cache, target.begin(cache, block), block.shape[1])
        drafter.commit(draft, verification.features[:, :1])
        limit = {"float32": 2e-5, "bfloat16": 0.05}[target.info.dtype]
        assert torch.equal(got[i].logits, verification.logits) or not exact
        assert torch.allclose(got[i].logits, verification.logits, atol=limit, rtol=0)
        assert torch.allclose(got[i].features.float(), verification.features.float(), atol=limit * 4, rtol=0)
        assert torch.equal(proposals[i].tokens, proposal.tokens)
        rows = together[i][1].rows(draft.length).float()
        assert torch.allclose(rows, draft.rows(draft.length).float(), atol=limit * 4, rtol=0)


def test_r8_nothing_is_written_outside(pair):
    """A round of a batch leaves the rows behind each block, and every other cache, untouched: they are poisoned here."""
    target, drafter, batcher = pair
    caches = [target.make_cache(64) for _ in range(5)]
    for cache, prompt in zip(caches, PROMPTS, strict=False):
        target.prefill(cache, torch.tensor([prompt]), chunk=64)
    idle = caches[4]
    idle.store.fill_(3.0)
    before = [cache.store.clone() for cache in caches]
    widths = (2, 1, 6, 4)
    batcher.verify(caches[:4], [torch.ones((1, width), dtype=torch.int32) for width in widths])
    assert torch.equal(idle.store, before[4])
    for cache, old, width in zip(caches, before, widths, strict=False):
        start = cache.length
        assert torch.equal(cache.store[..., :start, :], old[..., :start, :])
        assert torch.equal(cache.store[..., start + width :, :], old[..., start + width :, :])
        assert not torch.equal(cache.store[..., start : start + width, :], old[..., start : start + width, :])
        target.commit(cache, None, 0)
        cache.check_integrity()


def test_sampled_rows_keep_their_own_draws(pair):
    """Different temperatures and seeds in one batch: each row is its solo run (rejection rule, real drafts)."""
    target, drafter, batcher = pair
    kinds = [{"temperature": 0.7, "seed": 1}, {}, {"temperature": 1.1, "seed": 2}, {"temperature": 0.7, "seed": 3, "top_k": 5}]

    def loops():
        made = []
        for prompt, kind in zip(PROMPTS, kinds, strict=True):
            params = DecodingParams(max_tokens=16, sampling=SamplingParams(**kind), break_even=0)
            made.append(DecodingLoop(target, drafter, prompt, params, StaticPolicy()))
        return made

    alone, together = loops(), loops()
    for loop in alone:
        list(loop.run())
    run_batched(Engine(target, drafter, None, "torch", "", "", None), batcher, together)
    if target.info.dtype == "float32":
        assert [loop.output for loop in together] == [loop.output for loop in alone]
    assert {loop.rule for loop in together} == {"greedy", "rejection"}


def test_kept_prefix_equals_a_cold_run(pair):
    """Case R4 on real caches, bit for bit, also in bfloat16: another request in between, then the same K/V, drafts and text."""
    target, drafter, _ = pair
    shared, first, second = PROMPTS[2], [5, 6, 7], [8, 9, 10, 11] * 3
    prefixes = PrefixCache(TorchPrefixes(), 10**7, grain=12)

    def run(prompt, fill):
        params = DecodingParams(max_tokens=16, break_even=0, prefill_chunk=12)
        loop = DecodingLoop(target, drafter, prompt, params, StaticPolicy())
        reused = prefixes.fill(loop) if fill else 0
        list(loop.run())
        prefixes.keep(np.asarray([*loop.prompt, *loop.output], dtype=np.int32)[: loop.committed], loop)
        return loop, reused

    run(PROMPTS[1], False)
    run([*shared, *first], False)
    warm, reused = run([*shared, *second], True)
    prefixes.clear()
    cold, _ = run([*shared, *second], False)
    assert reused == 36 and warm.stats.cached_tokens == 36  # whole grains of the 40 that are shared
    assert warm.output == cold.output
    assert warm.stats.verified_lengths == cold.stats.verified_lengths and warm.stats.accepted_at == cold.stats.accepted_at
    assert torch.equal(warm.draft_cache.rows(warm.committed), cold.draft_cache.rows(warm.committed))
    assert torch.equal(warm.cache.store.narrow(4, 0, warm.committed), cold.cache.store.narrow(4, 0, warm.committed))


def test_bytes_of_kept_prefixes_are_counted(pair):
    target, drafter, _ = pair
    ops, loop = TorchPrefixes(), make_loop(target, drafter, PROMPTS[2], 8)
    list(loop.run())
    saved = ops.save(loop.cache, loop.draft_cache, 30)
    assert ops.nbytes(loop.cache, loop.draft_cache, 30) == sum(part.untyped_storage().nbytes() for part in saved)
    prefixes = PrefixCache(ops, ops.nbytes(loop.cache, loop.draft_cache, 20))
    assert prefixes.keep(np.arange(30, dtype=np.int32), loop) and prefixes.nbytes == prefixes.limit  # what fits is kept
    tiny = PrefixCache(ops, ops.nbytes(loop.cache, loop.draft_cache, 3))
    assert not tiny.keep(np.arange(30, dtype=np.int32), loop) and tiny.nbytes == 0


def test_what_follows_the_verdict_is_the_hosts_share(pair, monkeypatch):
    """A clock that goes on by one at each look, and by a hundred while a round is committed."""
    target, drafter, batcher = pair
    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    def commit(*rest):
        now[0] += 100.0
        return batcher.commit(*rest)

    loops = [make_loop(target, drafter, prompt) for prompt in PROMPTS[:2]]
    for loop in loops:
        loop.step()
    slow = SimpleNamespace(
        verify=batcher.verify, propose=batcher.propose, commit=commit, commit_drafts=batcher.commit_drafts, shares_length=False
    )
    rounds = BatchRounds(Engine(target, drafter, None, "torch", "", "", None), slow, CostTable({(2, 1): 1.0, (2, 8): 1.0}, {}))
    monkeypatch.setattr("dspine.common.serving.rounds.perf_counter", clock)
    rounds.run(loops)
    assert rounds.lengths.costs.host == 101.0 and not rounds.lengths.costs.overlaps


def test_costs_are_measured_on_scratch_caches(pair):
    target, drafter, batcher = pair
    table = measure_costs(Engine(target, drafter, None, "torch", "", "", None), batcher, 4)
    assert {batch for batch, _ in table.verify} == {2, 4} == set(table.draft)
    assert {width for _, width in table.verify} == {1, 4, 6} and min(table.verify.values()) > 0


def test_support_says_why_not(pair):
    target, drafter, _ = pair

    class Other:
        info = target.info

    found = support(Other(), None)
    assert found.batcher is None and found.prefixes is None and "take turns" in found.reason
    assert support(target, drafter).batcher is not None
