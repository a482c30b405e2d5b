"""Several sequences in slots of one arena: every answer is its solo run's, whoever joins, leaves or is cancelled; idle slots
are not written to (case R8). The static steps run without graphs here (`EagerRunner`)."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.errors import DSpineError
from dspine.common.protocols import Engine
from dspine.common.sampling import SamplingParams
from dspine.common.selection.policies import StaticPolicy
from dspine.common.serving.slots import KINDS, SlotRounds
from dspine_cuda.drafter import load_drafter
from dspine_cuda.graphs import EagerRunner
from dspine_cuda.runtime import RUNTIME
from dspine_cuda.serving_graphs import SHARE, SMALLEST, SlotGraphs, experts_refusal, slot_tokens
from dspine_cuda.static.arena import ArenaShape, arena_bytes
from dspine_cuda.targets.hybrid import HybridTarget
from dspine_cuda.targets.moe import SparseMlp
from tests.helpers.drafters import drafter_folder
from tests.helpers.hybrids import save_hybrid
from tests.helpers.models import VOCAB, one_thread, save_tiny
from tests.serving import slot_runs
from tests.serving.slot_runs import (
    BLOCK,
    COUNT,
    PROMPTS,
    SLOTS,
    TOKENS,
    Capturing,
    alone,
    join,
    params_of,
    run_at_random,
    turn,
    untouched_while_others_run,
)

FAMILIES = ("qwen3", "qwen3_5_moe_text")
rounds_of = partial(slot_runs.rounds_of, make_runner=EagerRunner)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    (save_tiny if request.param == "qwen3" else save_hybrid)(folder / "t", request.param, max_position_embeddings=TOKENS)
    target = RUNTIME.load_target(folder / "t", device="cpu", dtype="float32")
    return target, load_drafter(drafter_folder(folder / "d", "dspine", BLOCK, target.head_weight(), 5, head_dim=16), target)


@pytest.fixture(scope="module")
def solo(pair):
    return [alone(pair, i, params_of(i)) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_answers_are_their_solo_runs(pair, solo, seed):
    """Joins, ends and cancellations at random; greedy and sampled side by side, all six requests through four slots twice."""
    rounds, book = rounds_of(pair)
    found, most = run_at_random(rounds, book, pair, solo, seed)
    for i, output, ended in found:
        assert output == (solo[i] if ended else solo[i][: len(output)]), i
    assert sum(ended for *_, ended in found) >= 6 and most >= 3


def test_sequences_move_to_low_slots(pair, solo):
    """Two of four end; the third moves down, so that graphs over two slots reach it, and its answer stays the same. A sequence
    that still reads its prompt does not move."""
    rounds, book = rounds_of(pair)
    loops = [join(rounds, book, pair, i, solo[i]) for i in (0, 1, 3, 2)]
    for _ in range(2):
        turn(rounds, loops)
    for loop in loops[:2]:
        rounds.release(loop)
    turn(rounds, loops[2:])
    assert [loop.slot for loop in loops[2:]] == [2, 0]
    turn(rounds, loops[2:])
    assert [loop.slot for loop in loops[2:]] == [1, 0] and sorted(rounds._free) == [2, 3]
    while not all(loop.finish_reason for loop in loops[2:]):
        turn(rounds, loops[2:])
    assert loops[2].output == solo[3] and loops[3].output == solo[2]
    first, last = join(rounds, book, pair, 0, solo[0]), join(rounds, book, pair, 1, solo[1])
    reading, _ = rounds.loop(pair[1], PROMPTS[3], params_of(3), StaticPolicy(), False)
    rounds.release(first)
    rounds.release(last)
    turn(rounds, [])
    assert reading.slot == 2


def test_modes_are_captured_beside_running_sequences(pair, solo):
    found, most = run_at_random(*slot_runs.rounds_of(pair, Capturing), pair, solo, 3)
    assert most >= 3 and all(output == (solo[i] if ended else solo[i][: len(output)]) for i, output, ended in found)


def test_a_round_that_fails_ends_its_sequences_only(pair, solo):
    """Everything under way is forgotten; the next requests find every slot as it should be."""
    failing = []

    class Failing(EagerRunner):
        def launch(self, mode):
            super().launch(mode)
            if failing and len(self._reports) > 1:
                raise RuntimeError(failing.pop())

    rounds, book = slot_runs.rounds_of(pair, Failing)
    loops = [join(rounds, book, pair, i, solo[i]) for i in (0, 1, 2)]
    turn(rounds, loops)
    reading, _ = rounds.loop(pair[1], PROMPTS[3], params_of(3), StaticPolicy(), False)
    failing.append("the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        turn(rounds, loops)
    for loop in loops:
        rounds.release(loop)
    while reading.reading_prompt:
        reading.step()
    after = [reading, *(join(rounds, book, pair, i, solo[i]) for i in (4, 5))]
    while not all(loop.finish_reason for loop in after):
        turn(rounds, after)
    assert [loop.output for loop in after[:2]] == [solo[3], solo[4]] and after[2].output == solo[5]


def test_lengths_and_caches(pair, solo):
    """Rounds accept different counts, and what the slots hold afterwards are the caches of the committed tokens, read anew."""
    rounds, book = rounds_of(pair)
    loops = [join(rounds, book, pair, i, solo[i]) for i in (0, 1, 3)]
    for _ in range(4):
        turn(rounds, loops)
    accepted = {tuple(loop.stats.accepted_at) for loop in loops}
    assert all(sum(at) > 0 for at in accepted) and len(accepted) > 1
    for kind in rounds._flights:
        rounds._drain(kind, lambda *_: None)
    for loop in loops:
        assert loop.cache.length == loop.committed == int(rounds.slots.arena.lengths[loop.slot])
        cold, tokens = pair[0].make_cache(TOKENS), [*loop.prompt, *loop.output][: loop.committed]
        pair[0].prefill(cold, torch.tensor([tokens]), chunk=16)
        warm, new = (getattr(cache, "kv", cache).store[..., : len(tokens), :] for cache in (loop.cache, cold))
        torch.testing.assert_close(warm, new, atol=2e-5, rtol=1e-4)
        if hasattr(cold, "states"):
            arena = rounds.slots.arena
            arena.hand_back(0)
            torch.testing.assert_close(loop.cache.states, cold.states, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(loop.cache.windows, cold.windows, atol=2e-5, rtol=1e-4)


def test_idle_slots_are_not_written_to(pair, solo):
    rounds, book = rounds_of(pair)
    assert untouched_while_others_run(rounds, book, pair, solo) == (solo[1], solo[0])


def test_parked_slots_lose_nothing(pair, solo):
    """Rounds of another way of sampling leave a running slot's counters, rows and text alone."""
    rounds, book = rounds_of(pair)
    sampled, greedy = join(rounds, book, pair, 2), join(rounds, book, pair, 4, solo[4])
    other = join(rounds, book, pair, 5, params=params_of(5, temperature=0.5))
    while not all(loop.finish_reason for loop in (sampled, greedy, other)):
        turn(rounds, [sampled, greedy, other])
    assert sampled.output == solo[2] and greedy.output == solo[4]
    assert other.output == alone(pair, 5, params_of(5, temperature=0.5))


@pytest.mark.parametrize("policy", [StaticPolicy(1), StaticPolicy(3)])
def test_fixed_lengths_and_plain_company(pair, policy):
    """A pinned length is kept; a request that does not draft runs beside one that does."""
    rounds, book = rounds_of(pair)
    params = params_of(2)
    loop = join(rounds, book, pair, 2, policy=policy)
    plain = join(rounds, book, pair, 1, drafter=False, params=params_of(1))
    while not (loop.finish_reason and plain.finish_reason):
        turn(rounds, [loop, plain])
    want = DecodingLoop(*pair, PROMPTS[2], params, policy)
    list(want.run())
    assert loop.output == want.output and loop.stats.drafted_tokens == want.stats.drafted_tokens
    assert plain.output == alone(pair, 1, params_of(1), drafter=False) and not plain.stats.drafted_tokens


def test_the_host_ends_texts(pair, solo):
    """Stop tokens, more of them than the device compares, and watched strings; the next request in that slot is right."""
    rounds, book = rounds_of(pair)
    stop = solo[0][7]
    params = DecodingParams(max_tokens=COUNT, stop_ids=frozenset([stop, *range(VOCAB, VOCAB + 40)]), break_even=0)
    watched = join(rounds, book, pair, 1, solo[1])
    watched.watch = lambda token: len(watched.output) >= 4
    stopped = join(rounds, book, pair, 0, solo[0], params)
    while not (stopped.finish_reason and watched.finish_reason):
        turn(rounds, [stopped, watched])
    assert stopped.finish_reason == watched.finish_reason == "stop"
    assert stopped.output == solo[0][: solo[0].index(stop) + 1] and watched.output == solo[1][: len(watched.output)]
    after = join(rounds, book, pair, 3, solo[3])
    while after.finish_reason is None:
        turn(rounds, [after])
    assert after.output == solo[3]


def test_break_even_ends_drafts_one_round_late(pair):
    rounds, book = rounds_of(pair)
    params = DecodingParams(max_tokens=40, break_even=6.5)
    loop, _ = rounds.loop(pair[1], [5, 6, 7], params, StaticPolicy(), True)
    loop._recent.extend([1] * 49)
    while loop.finish_reason is None:
        if loop.reading_prompt:
            loop.step()
        turn(rounds, [loop])
    assert loop.stats.drafting_disabled and loop.drafter is None and loop.stats.plain_rounds > 0
    assert loop.stats.rounds - loop.stats.plain_rounds == 2


def test_refusals(pair):
    rounds, book = rounds_of(pair, count=2)

    def why(prompt=(5, 6), policy=None, pinned=False, drafter=pair[1], **change):
        return rounds.loop(drafter, list(prompt), DecodingParams(**change), policy or StaticPolicy(), pinned)[1]

    class Elsewhere:
        name, needs_signals, reads_draft_tokens = "elsewhere", True, False

    assert why(sampling=SamplingParams(presence_penalty=1.0)) == "penalties are counted on the host"
    assert "log-probabilities" in why(top_logprobs=2)
    assert "another drafter" in why(drafter=object())
    seeded = SamplingParams(temperature=1.0, seed=3)
    assert "'elsewhere' runs on the host" in why(policy=Elsewhere(), pinned=True, sampling=seeded)
    taken = [join(rounds, book, pair, i) for i in (0, 1)]
    assert why() == "no slot is free"
    rounds.release(taken[0])
    with pytest.raises(DSpineError, match="empty"):
        rounds.loop(pair[1], [], DecodingParams(), StaticPolicy(), False)
    assert len(rounds._free) == 1
    for loop in (*taken, None):
        rounds.release(loop)
    assert sorted(rounds._free) == [0, 1]
    rounds.slots.tokens = 20
    assert why(max_tokens=19) == "prompt and answer may take 21 tokens, a slot holds 20"


def test_ways_of_sampling_are_few(pair):
    rounds, _ = rounds_of(pair)
    used = [rounds.loop(pair[1], [5, 6], params_of(2, temperature=0.5 + i), StaticPolicy(), True)[0] for i in range(KINDS)]
    loop, reason = rounds.loop(None, [5, 6], DecodingParams(), StaticPolicy(), False)
    assert loop is None and "no slot" in reason
    rounds.release(used[0])
    used[0] = None
    assert len(rounds._free) == 1
    loop, _ = rounds.loop(pair[1], [5, 6], params_of(2, temperature=9.0), StaticPolicy(), True)
    assert loop is not None and len(rounds._flights) == KINDS
    rounds.release(loop)
    for other in used[1:]:
        assert other.kind in rounds._flights


def test_filters_make_no_difference_to_greedy_requests(pair):
    """They share the graphs of greedy rounds, and nobody can take all ways of sampling with them."""
    rounds, book = rounds_of(pair)
    for i in range(2 * KINDS):
        params = params_of(0, top_p=0.9 - 0.1 * i, top_k=i, seed=i)
        loop, _ = rounds.loop(pair[1], PROMPTS[0], params, StaticPolicy(), False)
        assert loop is not None and loop.kind == ("greedy", SamplingParams())
        rounds.release(loop)
    assert list(rounds._flights) == [("greedy", SamplingParams())]


def test_a_kind_that_cannot_make_room_costs_no_slot(pair, monkeypatch):
    rounds, book = rounds_of(pair)

    def refuse(kind):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(rounds, "_room_for", refuse)
    with pytest.raises(RuntimeError, match="the device is gone"):
        join(rounds, book, pair, 0)
    assert sorted(rounds._free) == list(range(SLOTS))


def test_memory_decides_the_length_of_slots(pair):
    target, drafter = pair
    assert slot_tokens(target, drafter, 4, 10**6) == TOKENS
    with pytest.raises(DSpineError, match=r"4 slots of 64 tokens ask for .* lower --max-concurrency"):
        slot_tokens(target, drafter, 4, TOKENS, free=1000)
    slots = SlotGraphs(*pair, 4, TOKENS, EagerRunner)
    arena = sum(slots.arena.parts.values())
    one = arena_bytes(target, drafter, ArenaShape(TOKENS, 1, BLOCK))
    assert slots.nbytes - arena > 2 * one["kv"]  # the prompt being read has copies of a slot's
    assert slot_tokens(target, drafter, 4, TOKENS, free=int(slots.nbytes / SHARE) + 1) == TOKENS
    with pytest.raises(DSpineError, match="4 slots of 64 tokens"):
        slot_tokens(target, drafter, 4, TOKENS, free=int(slots.nbytes / SHARE) - 1)
    assert SMALLEST >= TOKENS


def test_experts_that_would_read_the_host_are_refused():
    """Wide rounds of float32 experts: their counts would be read while a graph is captured."""
    mlp = object.__new__(SparseMlp)
    mlp.top_k, mlp.gate_up, mlp.down = 8, torch.zeros(4, 16, 8), torch.zeros(4, 8, 16)
    target = object.__new__(HybridTarget)
    target.device, target.layers = torch.device("cuda"), [SimpleNamespace(mlp=mlp)]
    assert experts_refusal(target, 511) is None
    assert "512 rows" in experts_refusal(target, 512)


def test_without_a_drafter(pair, solo):
    """Three slots, plain rounds only, costs measured as the server does it."""
    slots = SlotGraphs(pair[0], None, 3, TOKENS, EagerRunner)
    rounds = SlotRounds(Engine(pair[0], None, None, "torch", "", "", None), slots)
    assert slots.sizes == [1, 2, 3] and set(rounds.lengths.costs.verify) == {(1, 1), (2, 1), (3, 1)}
    loops = [rounds.loop(None, PROMPTS[i], params_of(i), StaticPolicy(), False)[0] for i in (0, 1, 3)]
    while not all(loop.finish_reason for loop in loops):
        for loop in loops:
            while loop.reading_prompt:
                loop.step()
        turn(rounds, loops)
    assert [loop.output for loop in loops] == [solo[0], solo[1], solo[3]]
