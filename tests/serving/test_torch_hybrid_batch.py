"""Batched rounds of hybrids: float32 rows keep their bits in company, each keeps its own count (cases R1, R8, V2)."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.errors import DSpineError
from dspine.common.gdn import gdn_commit
from dspine.common.protocols import Engine
from dspine.common.sampling import SamplingParams
from dspine.common.selection.policies import StaticPolicy
from dspine.common.serving.rounds import BatchRounds, measure_costs
from dspine_cuda import hybrid_cache, ops, serving_hybrid
from dspine_cuda.drafter import load_drafter
from dspine_cuda.serving import support
from dspine_cuda.targets.load import load_target
from tests.helpers.drafters import drafter_folder
from tests.helpers.hybrids import save_hybrid
from tests.serving.batches import FREE, PROMPTS, PrimedBatcher, make_loop, make_rounds, primed_loops, run_batched, texts_alone

FAMILIES = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3_moe"]
BLOCK = 9


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """(target, drafter, batcher) in float32"""
    ops.register()  # the core's own Gated DeltaNet operations are right too, but not to the bit in company
    folder = tmp_path_factory.mktemp("hybrid")
    model = save_hybrid(folder / "target", request.param)
    head = model.get_output_embeddings().weight.detach().numpy().astype(np.float32)
    target = load_target(folder / "target", device="cpu", dtype="float32")
    drafter = load_drafter(drafter_folder(folder / "draft", "dspine", BLOCK, head, 5), target)
    return target, drafter, support(target, drafter).batcher


def engine_of(target, drafter):
    return Engine(target, drafter, None, "torch", "", "", None)


def filled(target):
    """A cache for each prompt, the prompt read."""
    caches = [target.make_cache(96) for _ in PROMPTS]
    for cache, prompt in zip(caches, PROMPTS, strict=True):
        target.prefill(cache, torch.tensor([prompt]), chunk=16)
    return caches


def blocks_of(widths):
    rng = np.random.default_rng(3)
    return [torch.tensor(rng.integers(3, 60, size=(1, width)), dtype=torch.int32) for width in widths]


@pytest.mark.parametrize(
    ("joins", "leaves"),
    [((), {}), ((0, 3, 5, 0), {}), ((0, 0, 2, 6), {1: 3, 0: 6})],
    ids=["together", "one after another", "two are cancelled"],
)
def test_batched_text_is_the_text_alone(pair, joins, leaves):
    target, drafter, batcher = pair
    alone = texts_alone(target)
    loops, primed = primed_loops(target, drafter, alone)
    sizes = run_batched(engine_of(target, primed), PrimedBatcher(batcher, primed), loops, joins, leaves)
    assert max(sizes) >= 3 and (not leaves or 1 in sizes)
    for i, (loop, text) in enumerate(zip(loops, alone, strict=True)):
        assert loop.output == (text[: len(loop.output)] if i in leaves else text)
    accepted = {tuple(loop.stats.accepted_at) for loop in loops}
    assert all(sum(at) > 0 for at in accepted) and len(accepted) > 1  # they accept different counts
    for loop in loops:  # states after so many rollbacks are those of the committed tokens, read anew
        cold = target.make_cache(128)
        tokens = [*loop.prompt, *loop.output][: loop.committed]
        target.prefill(cold, torch.tensor([tokens]), chunk=16)
        for name in ("states", "windows"):
            assert torch.allclose(getattr(loop.cache, name), getattr(cold, name), atol=2e-5, rtol=1e-4)


def test_rows_states_and_windows_have_the_same_bits_in_company(pair):
    """Unequal lengths, unequal blocks, unequal counts, one of them 0; twice, so that the second block reads what the first
    one's commit left in the stack."""
    target, _, batcher = pair
    together, alone = filled(target), filled(target)
    for widths, counts in (((1, 9, 3, 2), (1, 4, 0, 2)), ((4, 4, 4, 4), (2, 1, 4, 3))):
        blocks = blocks_of(widths)
        got = batcher.verify(together, blocks)
        batcher.commit(together, got, counts)
        for cache, block, count, verification in zip(alone, blocks, counts, got, strict=True):
            wanted = target.finish(cache, target.begin(cache, block), block.shape[1])
            target.commit(cache, wanted, count)
            assert torch.equal(verification.logits, wanted.logits) and torch.equal(verification.features, wanted.features)
        for one, other in zip(together, alone, strict=True):
            assert one.length == other.length and one.pending == 0
            assert torch.equal(one.states, other.states) and torch.equal(one.windows, other.windows)
            size = one.length
            assert torch.equal(one.kv.store.narrow(4, 0, size), other.kv.store.narrow(4, 0, size))
            one.check_integrity()


def test_commit_may_return_other_tensors(pair, monkeypatch):
    """The core's own operation does not write in place: its results must reach the caches all the same."""
    target, _, batcher = pair
    if not target.make_cache(8).gdn_index:
        pytest.skip("no linear attention here")
    found = []
    for function in (gdn_commit, gdn_commit.reference):
        monkeypatch.setattr(serving_hybrid, "gdn_commit", function)
        caches = filled(target)
        batcher.commit(caches, batcher.verify(caches, blocks_of((4, 9, 3, 2))), (1, 4, 0, 2))
        found.append(caches)
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one.states, other.states, atol=1e-6) and torch.equal(one.windows, other.windows)
        assert not torch.equal(one.states, torch.zeros_like(one.states))
    assert not torch.allclose(found[1][1].states, filled(target)[1].states, atol=1e-3)


def test_states_move_only_when_the_company_changes(pair, monkeypatch):
    """One stack for as long as the same sequences run; one that went on alone, or left, takes its states with it, whole:
    kernels want them contiguous."""

    def whole(states, *others):
        assert states.is_contiguous()
        return gdn_commit(states, *others)

    monkeypatch.setattr(hybrid_cache, "gdn_commit", whole)
    target, _, batcher = pair
    caches = filled(target)[:3]
    if not caches[0].gdn_index:
        pytest.skip("no linear attention here")

    def round_of(some):
        got = batcher.verify(some, blocks_of([4] * len(some)))
        batcher.commit(some, got, [2] * len(some))
        return some[0].states.untyped_storage().data_ptr()

    first = round_of(caches)
    assert round_of(caches) == first
    before = [cache.states.clone() for cache in caches]
    verification = target.finish(caches[1], target.begin(caches[1], blocks_of([4])[0]), 4)
    target.commit(caches[1], verification, 3)
    assert caches[1].states.untyped_storage().data_ptr() != first and not torch.equal(caches[1].states, before[1])
    assert torch.equal(caches[0].states, before[0]) and torch.equal(caches[2].states, before[2])
    assert round_of(caches) != first
    assert round_of(caches[:2]) != round_of(caches)


def test_r8_nothing_is_written_outside(pair):
    """Rows behind each block, other caches, and states of a sequence that keeps nothing are untouched."""
    target, _, batcher = pair
    caches = filled(target)
    idle = target.make_cache(64)
    idle.kv.store.fill_(3.0)
    idle.states.fill_(2.0)
    before = [(cache.kv.store.clone(), cache.states.clone(), cache.windows.clone()) for cache in (*caches, idle)]
    widths = (2, 1, 9, 4)
    got = batcher.verify(caches, blocks_of(widths))
    for cache, (_, states, windows) in zip((*caches, idle), before, strict=True):  # verification reads states only
        assert torch.equal(cache.states, states) and torch.equal(cache.windows, windows)
    batcher.commit(caches, got, (0, 0, 5, 0))
    assert torch.equal(idle.kv.store, before[4][0]) and torch.equal(idle.states, before[4][1])
    for cache, (store, states, windows), width in zip(caches, before, widths, strict=False):
        start = cache.length if width != 9 else cache.length - 5
        assert torch.equal(cache.kv.store[..., :start, :], store[..., :start, :])
        assert torch.equal(cache.kv.store[..., start + width :, :], store[..., start + width :, :])
        assert not torch.equal(cache.kv.store[..., start : start + width, :], store[..., start : start + width, :])
        if width != 9:
            assert torch.equal(cache.states, states) and torch.equal(cache.windows, windows)
        cache.check_integrity()


def test_a_batch_is_committed_as_it_was_verified(pair):
    target, _, batcher = pair
    caches = filled(target)
    got = batcher.verify(caches, blocks_of((2, 2, 2, 2)))
    with pytest.raises(DSpineError, match="same order"):
        batcher.commit(caches[::-1], got[::-1], (1, 1, 1, 1))
    stale = got
    got = batcher.verify(caches, blocks_of((2, 2, 2, 2)))
    with pytest.raises(DSpineError, match="as it was verified"):
        batcher.commit(caches, [got[0], stale[1], *got[2:]], (1, 1, 1, 1))
    with pytest.raises(DSpineError, match="commit of 3 tokens"):
        batcher.commit(caches, got, (3, 1, 1, 1))


def test_sampled_rows_keep_their_own_draws(pair):
    """Rejection and point-mass rules, temperatures and seeds side by side; pinned: rounds do not depend on the clock."""
    target, drafter, batcher = pair
    kinds = [
        {"temperature": 0.7, "seed": 1},
        {},
        {"temperature": 1.1, "seed": 2, "top_p": 0.9},
        {"temperature": 0.7, "seed": 3},
    ]

    def loops():
        made = []
        for i, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True)):
            rule = "point-mass" if i == 2 else "auto"
            params = DecodingParams(max_tokens=16, sampling=SamplingParams(**kind), acceptance=rule, break_even=0)
            made.append(DecodingLoop(target, drafter, prompt, params, StaticPolicy()))
        return made

    alone, together = loops(), loops()
    for loop in alone:
        list(loop.run())
    run_batched(engine_of(target, drafter), batcher, together)
    assert [loop.output for loop in together] == [loop.output for loop in alone]
    assert {loop.rule for loop in together} == {"greedy", "rejection", "point-mass"}


def test_drafted_rows_share_one_length(pair):
    """Free rows take one of the paper's lengths, cut by each one's room; a pinned one the whole block."""
    target, drafter, batcher = pair
    loops = [make_loop(target, drafter, prompt, count) for prompt, count in zip(PROMPTS, (24, 24, 24, 4), strict=True)]
    for loop in loops:
        while loop.reading_prompt:
            loop.step()
    seen = []

    class Spy(PrimedBatcher):
        def __init__(self):
            super().__init__(batcher, None)
            self.verify = self._verify

        def _verify(self, caches, blocks):
            seen.append([block.shape[1] for block in blocks])
            return batcher.verify(caches, blocks)

        def propose(self, caches, anchors, requests):
            return batcher.propose(caches, anchors, requests)

    rounds = make_rounds(engine_of(target, drafter), Spy())
    rounds.run(loops, [False, True, False, False])
    free = {seen[0][0], seen[0][2]}
    assert len(free) == 1 and free <= {2, 4, 8, BLOCK} and seen[0][1] == BLOCK and seen[0][3] == min(3, *free)


def test_only_rounds_of_its_own_choice_set_the_price(pair):
    """Pinned rounds and plain requests say nothing about the throughput that a free choice reaches."""
    target, drafter, batcher = pair
    engine = engine_of(target, drafter)
    for drafts, pinned, counted in ((True, False, True), (True, True, False), (False, False, False)):
        rounds = BatchRounds(engine, batcher, FREE)
        loops = [make_loop(target, drafter if drafts else None, prompt) for prompt in PROMPTS[:2]]
        for loop in loops:
            while loop.reading_prompt:
                loop.step()
        rounds.run(loops, [pinned, False])
        assert (rounds.lengths.throughput(2) != rounds.lengths._expected) is counted


def test_costs_are_measured_at_the_shared_lengths(pair):
    target, drafter, batcher = pair
    table = measure_costs(engine_of(target, drafter), batcher, 3)
    assert {batch for batch, _ in table.verify} == {2, 3} == set(table.draft)
    assert {width for _, width in table.verify} == {1, 2, 4, 8, BLOCK} and min(table.verify.values()) > 0
