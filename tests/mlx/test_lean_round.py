"""A steady-state round, counted: reads of the host, graph nodes, traces of compiled parts, copies of caches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import mlx.core as mx
import numpy as np
import pytest

from dspine.common.decoding import DecodingLoop, DecodingParams, decode
from dspine.common.protocols import DraftRequest
from dspine.common.sampling import SamplingParams
from dspine.common.selection.policies import StaticPolicy
from dspine_mlx.arrays import MlxArrays
from dspine_mlx.compiled import COMMIT_LENGTHS, Parts
from dspine_mlx.drafter import load_drafter
from tests.helpers.drafters import Prompted
from tests.mlx.graphs import metered
from tests.mlx.hybrids import hybrid_target
from tests.mlx.toys import drafter_folder, toy_target

PROMPT = [3, 5, 7, 11, 13]
TOKENS = 48


class Signals(StaticPolicy):
    """Full length; asks for signals, and for one more token at the router."""

    def stage_zero_length(self, nominal, limit):
        return min(nominal + 1, limit)

    def nominal(self, proposal, limit):
        assert proposal.confidence.shape == proposal.entropy.shape
        return max(1, limit - 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lean")


@pytest.fixture(scope="module")
def dense(folder):
    target = toy_target("qwen3")
    return target, load_drafter(drafter_folder(folder / "dense", "dspine", 8, target.head_weight()), target)


@pytest.fixture(scope="module")
def hybrid(folder):
    target = hybrid_target("qwen3_5_moe")
    return target, load_drafter(drafter_folder(folder / "hybrid", "dspine", 8, target.head_weight()), target)


def run(monkeypatch, target, drafter, policy=None, count=TOKENS, **options):
    """Rounds of one request: (meter, tokens)."""
    with metered(monkeypatch, target, drafter) as meter:
        params = DecodingParams(max_tokens=count, break_even=0.0, **options)
        loop = DecodingLoop(target, drafter, PROMPT, params, policy or StaticPolicy())
        while loop.finish_reason is None:
            meter.mark()
            loop.step()
    return meter, loop.output


def steady(meter):
    """All rounds but the first (the prompt), and the last ones, which verify less than a block."""
    return meter.rounds[2:-8]


def test_one_read_a_round_on_dense_targets(dense, monkeypatch):
    meter, _ = run(monkeypatch, *dense)
    assert {round.reads for round in meter.rounds[1:]} == {1}


def test_two_reads_a_round_with_signals_and_a_router(dense, hybrid, monkeypatch):
    for pair in (dense, hybrid):
        meter, _ = run(monkeypatch, *pair, Signals(needs_signals=True), count=40)
        assert {round.reads for round in steady(meter)} == {2}
    meter, _ = run(monkeypatch, *hybrid, count=40)
    assert {round.reads for round in steady(meter)} == {1}


@pytest.mark.parametrize("pair", ["dense", "hybrid"])
def test_the_graph_does_not_grow_with_the_text(pair, monkeypatch, request):
    meter, _ = run(monkeypatch, *request.getfixturevalue(pair))
    sizes = {(*round.nodes.values(),) for round in steady(meter)}
    assert len(steady(meter)) > 20 and len(sizes) == 1 and 0 not in next(iter(sizes)), sizes


def test_a_draft_is_queued_before_the_text_is_shown(dense, monkeypatch):
    target, drafter = dense
    order: list[str] = []
    propose, read = drafter.propose, target.arrays.to_host
    monkeypatch.setattr(drafter, "propose", lambda *args: order.append("draft") or propose(*args))
    loop = DecodingLoop(target, drafter, PROMPT, DecodingParams(max_tokens=12, break_even=0.0), StaticPolicy())
    for event in loop.run():
        order.append("text")
        assert event.finish_reason or "draft" in order
    text = "".join(word[0] for word in order)
    assert text.startswith("dt") and "td" in text and "dd" not in text
    assert text.count("d") == loop.stats.rounds - loop.stats.plain_rounds, "drafts that nobody verified"
    assert target.arrays.to_host == read


def test_a_draft_that_was_queued_is_the_one_that_is_verified(dense, monkeypatch):
    """With and without queueing, greedy and sampled: the same tokens."""
    target, drafter = dense
    for options in ({}, {"acceptance": "rejection"}):
        sampling = {"sampling": SamplingParams(temperature=1.0, top_k=8, seed=3)} if options else {}
        params = DecodingParams(max_tokens=40, break_even=0.0, **options, **sampling)
        ahead = [event.token for event in decode(target, drafter, PROMPT, params)]
        with monkeypatch.context() as patch:
            patch.setattr(type(drafter), "queues_ahead", False)
            assert [event.token for event in decode(target, drafter, PROMPT, params)] == ahead


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pair", ["dense", "hybrid"])
def test_a_plain_round_is_begun_before_the_token_is_read(pair, temperature, monkeypatch, request):
    """One read a token, and the next block is on its way by then, as mlx_lm has it; with and without it the same tokens."""
    target, _ = request.getfixturevalue(pair)
    params = DecodingParams(max_tokens=20, sampling=SamplingParams(temperature, top_k=9, seed=4))
    order: list[str] = []
    start, read = target.start, MlxArrays.to_host
    loop = DecodingLoop(target, None, PROMPT, params, StaticPolicy())
    want = []
    while loop.finish_reason is None:
        want += [event.token for event in loop.step().events]
    with monkeypatch.context() as patch:
        patch.setattr(target, "start", lambda *args: order.append("s") or start(*args))
        patch.setattr(MlxArrays, "to_host", lambda self, *arrays: order.append("r") or read(self, *arrays))
        assert [event.token for event in decode(target, None, PROMPT, params)] == want
    assert "".join(order) == "r" + "s" + "sr" * 18 + "r", "prompt, first block, then always the next before the read"


@pytest.mark.parametrize("pair", ["dense", "hybrid"])
@pytest.mark.parametrize("end", ["stop id", "closed", "other thread"])
def test_a_round_begun_early_leaves_nothing(pair, end, request):
    """A text that ends before its limit: the caches hold what was committed, and the next block says what a fresh one says."""
    target, _ = request.getfixturevalue(pair)
    text = [event.token for event in decode(target, None, PROMPT, DecodingParams(max_tokens=24))]
    count = next(i for i in range(6, 24) if text[i] not in text[:i]) + 1
    stop = frozenset([text[count - 1]]) if end == "stop id" else frozenset()
    loop = DecodingLoop(target, None, PROMPT, DecodingParams(max_tokens=24, stop_ids=stop), StaticPolicy())
    events = loop.run()
    if end == "other thread":
        with ThreadPoolExecutor(1) as pool:
            got = [(pool.submit(next, events).result() if i % 2 else next(events)).token for i in range(count)]
    else:
        got = [event.token for event in islice(events, count)]
    events.close()
    assert got == text[:count] and loop.cache.pending == 0 and loop.cache.length == loop.committed == len(PROMPT) + count - 1
    fresh = target.make_cache(64)
    target.prefill(fresh, mx.array([[*PROMPT, *text[: count - 1]]]), chunk=64)
    said = []
    for cache in (loop.cache, fresh):
        block = mx.array([[text[count - 1], 3, 4]])
        said.append(np.array(target.finish(cache, target.begin(cache, block), 3).logits))
    np.testing.assert_allclose(*said, atol=1e-4)


def test_rounds_that_the_host_shapes_are_not_begun_early(dense, monkeypatch):
    target, _ = dense
    monkeypatch.setattr(target, "start", lambda *args: pytest.fail("begun early"))
    params = DecodingParams(max_tokens=6, sampling=SamplingParams(repetition_penalty=1.2))
    assert len([*decode(target, None, PROMPT, params)]) == 6

    class Rule:
        needs_drafts = False

        def apply(self, logits, drafts):
            return logits

        def emitted(self, tokens):
            pass

    loop = DecodingLoop(target, None, PROMPT, DecodingParams(max_tokens=6), StaticPolicy(), rules=[Rule()])
    assert len([*loop.run()]) == 6


def test_compiled_parts_are_traced_once(dense, monkeypatch):
    """A second request of the same lengths traces nothing, and gives the same tokens; the draft's graph gets smaller."""
    target, drafter = dense
    params = DecodingParams(max_tokens=TOKENS, break_even=0.0)
    text = [event.token for event in decode(target, drafter, PROMPT, params)]
    compiled = type(drafter)(drafter.model, target, {}, compiled=True)
    prompted = Prompted(compiled, PROMPT, text + [0] * 16, wrong_every=5)
    assert [event.token for event in decode(target, prompted, PROMPT, params)] == text
    first = dict(compiled.parts.traces)
    lengths = first.pop("commit")
    assert set(first.values()) == {1} and 1 < lengths <= COMMIT_LENGTHS, first
    assert [event.token for event in decode(target, prompted, PROMPT, params)] == text
    assert compiled.parts.traces == {**first, "commit": lengths}
    meter, plain = run(monkeypatch, target, compiled, count=14)[0], run(monkeypatch, target, drafter, count=14)[0]
    assert steady(meter)[0].nodes["draft"] < 0.8 * steady(plain)[0].nodes["draft"]


def test_variants_are_bounded():
    parts = Parts(True)
    for i in range(200):
        parts.run(("close", i), lambda i=i: lambda x: x + i, mx.array([1.0]))
    assert len(parts._functions) <= 64 and len(parts.traces) == 200
    assert float(parts.run(("close", 199), lambda: None, mx.array([1.0]))) == 200.0


def address(array: mx.array) -> int:
    """Where the numbers of a computed array lie."""
    return np.array(array, copy=False).__array_interface__["data"][0]


def test_rollback_copies_no_cache(dense):
    """Rounds of every kept length leave every buffer where it was."""
    target, drafter = dense
    cache, context = target.make_cache(256), drafter.make_cache(256)
    prefill = target.prefill(cache, mx.array([[5] * 40]), chunk=16)
    drafter.commit(context, prefill.features)

    def buffers() -> list[mx.array]:
        kept = [array for layer in cache.layers for array in (layer.keys, layer.values)] + context._keys + context._values
        mx.eval(kept)
        return kept

    where = [address(array) for array in buffers()]
    for kept in (1, 4, 2, 3):
        mx.eval(drafter.propose(context, mx.array([4]), DraftRequest()).tokens)
        verification = target.finish(cache, target.begin(cache, mx.array([[1, 2, 3, 4]])), 4)
        mx.eval(verification.logits)
        held = [layer.keys for layer in cache.layers]
        target.commit(cache, verification, kept)
        assert all(layer.keys is keys for layer, keys in zip(cache.layers, held, strict=True))
        del held
        drafter.commit(context, verification.features[:, :kept])
        assert [address(array) for array in buffers()] == where
