"""What can go wrong while prompts are read into slots: clients leave at any step, memory runs out late, answers end at once,
the server stops. Whoever it happens to, the others' answers are their solo runs', and every slot comes back.

The scheduler is stepped by hand where order matters. Steps without graphs (`EagerRunner`): memory runs out where we say so."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from dspine.common.errors import DSpineError, OutOfMemory
from dspine.common.serving.metrics import Metrics
from dspine.common.serving.scheduler import Scheduler, SchedulerSettings
from dspine.common.serving.server import Server
from dspine.common.serving.settings import ServerSettings
from dspine_cuda import graphs, serving_prompts
from dspine_cuda.serving_graphs import SlotGraphs
from dspine_cuda.serving_prompts import SlotPrompts
from dspine_cuda.static.arena import ArenaShape
from dspine_cuda.static.slots import SlotArena
from tests.helpers.models import VOCAB, one_thread
from tests.serving.slot_runs import Capturing
from tests.serving.slot_server import CONTEXT, engine_maker
from tests.serving.test_scheduler import make_job
from tests.serving.toys import running

SLOTS = 3


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_moe_text"])
def engines(request, tmp_path_factory):
    return engine_maker(tmp_path_factory.mktemp("pair"), request.param)


@pytest.fixture(scope="module")
def engine(engines):
    return engines(True)


def opened(engine, **settings):
    """A scheduler without its thread; pieces of 8 tokens, one a turn."""
    settings = {"max_concurrency": SLOTS, "prefix_grain": 8, "prefill_chunk": 8} | settings
    scheduler = Scheduler(lambda: engine, SchedulerSettings(**settings), Metrics())
    scheduler._open()
    return scheduler


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(3, VOCAB, size=count).tolist()


def ask(engine, prompt, **options):
    """A job for these tokens."""
    job = make_job(engine, "w5", **({"max_tokens": 12} | options))
    job.prompt = prompt
    return job


def solo(engine, job):
    """The request alone, by the eager loop."""
    again = ask(engine, job.prompt)
    again.params, again.draft = job.params, job.draft
    return [event.token for event in again.open(engine).run()]


def put(scheduler, *jobs):
    for job in jobs:
        scheduler._queue.push(job)


def steps(scheduler, most=600):
    """Turns until nothing is left to do."""
    for count in range(most):
        if not scheduler._running and not len(scheduler._queue):
            return count
        scheduler._step()
    raise AssertionError("it hangs")


def all_free(scheduler):
    """Every slot is there again, and nothing of a sequence counts in it."""
    arena = scheduler.slots.slots.arena
    counts = [getattr(arena, name) for name in ("remaining", "lengths", "pending_m", "held")]
    free = sorted(scheduler.slots._free) == list(range(SLOTS)) and not scheduler.slots._held
    return free and not any(count.any() for count in counts)


def test_clients_leave_at_every_step(engine):
    """Before the first piece, between pieces, while the first token is awaited, between rounds: a companion and the next
    requests for the same prompt do not notice."""
    scheduler = opened(engine)
    text, met = ids(29), set()
    for when in range(9):
        company, gone = ask(engine, ids(5, 1), max_tokens=24), ask(engine, text)
        put(scheduler, company)
        scheduler._step()
        put(scheduler, gone)
        for _ in range(when):
            scheduler._step()
        met.add((gone.loop is not None, gone.loop is not None and gone.loop.awaiting, bool(gone.sink.updates)))
        scheduler.cancel([gone])
        steps(scheduler)
        assert company.sink.tokens == solo(engine, company), when
        assert gone.sink.tokens == solo(engine, gone)[: len(gone.sink.tokens)] and not gone.sink.done.is_set()
        assert all_free(scheduler)
        scheduler.prefixes.clear()
    assert met == {(False, False, False), (True, False, False), (True, True, False), (True, False, True)}
    put(scheduler, kept := ask(engine, text), again := ask(engine, text))
    steps(scheduler)
    assert kept.sink.tokens == again.sink.tokens == solo(engine, kept)


def test_no_memory_for_a_long_context(engine, monkeypatch):
    """Its graph is captured late, and there is no room: that request hears so, nobody else; once there is room it runs."""
    scheduler, real = opened(engine), SlotGraphs.read

    def read(slots, slot, start, tokens):
        if start >= 16:
            raise OutOfMemory("graphs: out of memory while capturing prompts of 9 tokens")
        return real(slots, slot, start, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(SlotGraphs, "read", read)
        short, long, other = (ask(engine, ids(n, n)) for n in (5, 40, 16))
        put(scheduler, short, long, other)
        steps(scheduler)
    error = long.sink.updates[-1].error
    assert (error.status, error.code, error.headers["Retry-After"]) == (503, "out_of_memory", "5")
    assert error.body()["error"]["type"] == "server_error" and not long.sink.tokens
    assert [job.sink.tokens for job in (short, other)] == [solo(engine, short), solo(engine, other)] and all_free(scheduler)
    put(scheduler, again := ask(engine, ids(40, 40)))
    steps(scheduler)
    assert again.sink.tokens == solo(engine, again) and again.way == "graphs"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_no_memory_for_an_eager_request(engine, monkeypatch, error):
    """Beside an arena there is less room for requests that have no slot: theirs alone fail, and they may come again."""
    scheduler = opened(engine)
    jobs = [ask(engine, ids(9, i), presence_penalty=float(i)) for i in range(2)]

    def prefill(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "prefill", prefill)
        put(scheduler, *jobs)
        steps(scheduler)
    found = jobs[1].sink.updates[-1].error
    assert (found.status, found.code, found.headers["Retry-After"]) == (503, "out_of_memory", "5")
    assert jobs[0].sink.tokens == solo(engine, jobs[0]) and all_free(scheduler)


def test_captures_without_room(engine, monkeypatch):
    """What the device says becomes our error, nothing of the program is kept, and the next try finds room."""
    failing = [True]

    def capture(function, device, pool):
        function()
        if failing.pop():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(replay=lambda: prompts.steps.read(program))

    monkeypatch.setattr(serving_prompts, "capture", capture)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**29, 2**30))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    pair = engine.target, engine.drafter
    prompts = SlotPrompts(*pair, SlotArena(*pair, ArenaShape(CONTEXT, 2, 6)), pool=object())
    program = prompts.steps.program(0, 40)
    with pytest.raises(OutOfMemory, match=r"capturing prompts of \d+ tokens: 0.50 GiB were free; lower --max-context"):
        prompts.read(1, 0, ids(40))
    assert not prompts._programs and not prompts._arena.kv.store[..., :-1, :].any()
    failing.append(False)
    cache = engine.target.make_cache(CONTEXT)
    want = engine.target.prefill(cache, torch.tensor([ids(40)]), chunk=64).logits
    torch.testing.assert_close(prompts.read(1, 0, ids(40)), want, atol=1e-4, rtol=1e-4)


def test_a_capture_that_fails_is_waited_for(monkeypatch):
    """What it had queued on its own stream comes before whatever the caller queues next."""
    log, main, side = [], SimpleNamespace(), SimpleNamespace(wait_stream=lambda _: log.append("side waits"))
    main.wait_stream = lambda other: log.append(("main waits", other is side))
    cuda = SimpleNamespace(Stream=lambda _: side, current_stream=lambda _: main, stream=nullcontext)
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda))

    def function():
        log.append("queued")
        raise MemoryError

    with pytest.raises(MemoryError):
        graphs.capture(function, "cuda", None)
    assert log == ["side waits", "queued", ("main waits", True)]


def test_no_memory_over_http(engines, monkeypatch):
    """A stream that fails before its first token is no 200."""

    def read(*_):
        raise OutOfMemory("graphs: out of memory")

    scheduler = SchedulerSettings(max_concurrency=SLOTS)
    server = Server(lambda: engines(True), ServerSettings(names=("tiny",), scheduler=scheduler))
    monkeypatch.setattr(SlotGraphs, "read", read)
    with running(server) as url:
        for stream in (False, True):
            body = {"model": "tiny", "prompt": ids(20), "max_tokens": 4, "stream": stream}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 503 and answer.headers["Retry-After"] == "5"
            assert answer.json()["error"]["code"] == "out_of_memory"
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200


def test_no_memory_for_another_way_of_sampling(engines):
    """Graphs of a new kind find no room: its sequences end, those of the other kind go on."""

    class Full(Capturing):
        def prepare(self, mode):
            if self.round.rules.rule != "greedy":
                raise OutOfMemory("graphs: out of memory while capturing")
            super().prepare(mode)

    engine = engines(True, Full)
    scheduler = opened(engine)
    jobs = [ask(engine, ids(9, i), temperature=0.8 * (i == 1), seed=i) for i in range(3)]
    put(scheduler, *jobs)
    steps(scheduler)
    assert jobs[1].sink.updates[-1].error.code == "out_of_memory" and len(jobs[1].sink.tokens) == 1
    assert [jobs[i].sink.tokens for i in (0, 2)] == [solo(engine, jobs[i]) for i in (0, 2)] and all_free(scheduler)


def test_ends(engine, monkeypatch):
    """Prompts of one token and of whole pieces; exactly a slot's length and one more; one token wanted; a stop token at once:
    those never begin a round."""
    scheduler, begun, begin = opened(engine, slot_tokens=64), [], SlotGraphs.begin
    monkeypatch.setattr(SlotGraphs, "begin", lambda slots, slot, *rest: (begun.append(slot), begin(slots, slot, *rest)))
    sizes = [(1, 20), (8, 20), (32, 20), (33, 20), (44, 20), (45, 20), (63, 1), (64, 1), (95, 20)]
    jobs = [ask(engine, ids(count, count), max_tokens=most) for count, most in sizes]
    put(scheduler, *jobs)
    steps(scheduler)
    for job, (count, most) in zip(jobs, sizes, strict=True):
        fits = count + min(most, CONTEXT - count) <= 64
        assert job.way == ("graphs" if fits else "eager") and job.sink.tokens == solo(engine, job), (count, job.rounds_by)
        assert fits or "a slot holds 64" in job.rounds_by
    assert len(begun) == 5  # not the one that wanted one token
    stopped = ask(engine, ids(20, 5))
    stopped.params = replace(stopped.params, stop_ids=frozenset([solo(engine, stopped)[0]]))
    put(scheduler, stopped)
    steps(scheduler)
    assert len(stopped.sink.tokens) == 1 and stopped.sink.updates[-1].finish_reason == "stop"
    assert len(begun) == 5 and all_free(scheduler)


def test_nobody_starves(engine):
    """A long prompt is read a chunk a turn whoever runs, and those that run have a round in each of these turns."""
    scheduler = opened(engine)
    company = [ask(engine, ids(3, i), max_tokens=90, draft=False) for i in (1, 2)]
    put(scheduler, *company)
    while not all(job.sink.updates for job in company):
        scheduler._step()
    scheduler._step()
    put(scheduler, long := ask(engine, ids(75, 4), max_tokens=4))
    turns = 0
    while not long.sink.updates:
        before = [len(job.sink.tokens) for job in company]
        scheduler._step()
        turns += 1
        assert [len(job.sink.tokens) for job in company] == [count + 1 for count in before]
    assert turns == 10 + 1
    steps(scheduler)
    assert long.sink.tokens == solo(engine, long)


@pytest.mark.parametrize("seed", [0, 1])
def test_everything_at_once(engine, seed):
    """Requests of every kind through three slots, shared beginnings, every fifth cancelled at some step."""
    rng, scheduler = np.random.default_rng(seed), opened(engine)
    kinds = [
        {},
        {"draft": False},
        {"temperature": 0.9, "seed": 7},
        {"presence_penalty": 1.0},
        {"top_p": 0.5},
        {"max_tokens": 1},
    ]
    waiting = []
    for i in range(16):
        prompt = ids(int(rng.integers(1, 30)), i % 3) + ids(int(rng.integers(1, 20)), i) * (i % 2)
        waiting.append(ask(engine, prompt, **kinds[int(rng.integers(len(kinds)))]))
    jobs, gone = list(waiting), set()
    while waiting or scheduler._running or len(scheduler._queue):
        while waiting and rng.random() < 0.5:
            put(scheduler, waiting.pop())
        if scheduler._running and rng.random() < 0.05:
            left = scheduler._running[int(rng.integers(len(scheduler._running)))]
            gone.add(left.number)
            scheduler.cancel([left])
        scheduler._step()
    for job in jobs:
        want = solo(engine, job)
        assert job.sink.tokens == (want[: len(job.sink.tokens)] if job.number in gone else want)
        assert job.number in gone or job.sink.done.is_set()
    assert all_free(scheduler) and gone and len(scheduler.slots._flights) <= 2


def test_the_server_stops_while_prompts_are_read(engines, monkeypatch):
    """Everybody hears of it, and the worker ends."""
    engine, reading, real = engines(True), threading.Event(), SlotGraphs.read

    def read(slots, *rest):
        reading.set()
        time.sleep(0.02)
        return real(slots, *rest)

    monkeypatch.setattr(SlotGraphs, "read", read)
    scheduler = Scheduler(lambda: engine, SchedulerSettings(max_concurrency=SLOTS, prefix_grain=8, prefill_chunk=8), Metrics())
    scheduler.start()
    jobs = [ask(engine, ids(60, i)) for i in range(6)]
    scheduler.submit(jobs)
    assert reading.wait(60)
    assert not scheduler.stop(0.0) and not scheduler._thread.is_alive()
    assert all(job.sink.done.is_set() for job in jobs)
    assert {job.sink.updates[-1].error.status for job in jobs if not job.sink.updates[-1].finish_reason} == {503}
    with pytest.raises(DSpineError, match="shutting down"):
        scheduler.submit([make_job(engine, "w5")])
