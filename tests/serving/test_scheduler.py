"""The worker: turns, limits, cancellation at every stage, failures, the end; batches that change nothing."""

from __future__ import annotations

import threading
import time

import pytest

from dspine.common.decoding import DecodingParams
from dspine.common.errors import CheckpointError
from dspine.common.sampling import SamplingParams
from dspine.common.selection.policies import StaticPolicy
from dspine.common.serving.errors import ApiError
from dspine.common.serving.jobs import Job, TextStream
from dspine.common.serving.metrics import Metrics
from dspine.common.serving.queue import FairQueue
from dspine.common.serving.scheduler import Scheduler, SchedulerSettings
from tests.serving.toys import toy_engine


class Collector:
    """A sink that keeps what it hears."""

    def __init__(self):
        self.updates, self.done, self.hook = [], threading.Event(), None

    def __call__(self, update):
        self.updates.append(update)
        if self.hook is not None:
            self.hook(self)
        if update.finish_reason or update.error:
            self.done.set()

    @property
    def tokens(self):
        return [piece.token for update in self.updates for piece in update.pieces]

    @property
    def text(self):
        return "".join(piece.text for update in self.updates for piece in update.pieces) + self.updates[-1].tail


def make_job(engine, text, *, max_tokens=20, client="", draft=True, stops=(), **sampling):
    sink = Collector()
    params = DecodingParams(max_tokens=max_tokens, sampling=SamplingParams(**sampling), prefill_chunk=8)
    if sampling.get("temperature"):
        params = DecodingParams(max_tokens=max_tokens, sampling=params.sampling, acceptance="point-mass", prefill_chunk=8)
    stream = TextStream(engine.tokenizer, list(stops), {})
    ids = engine.tokenizer.encode(text)
    return Job(ids, params, StaticPolicy(), stream, sink, client=client, draft=draft, pinned=bool(sampling.get("temperature")))


@pytest.fixture
def make(registry, tmp_path):
    """Schedulers over toy engines; all are ended afterwards."""
    made = []

    def build(slow=0.0, draft=True, **settings):
        engine = toy_engine(tmp_path / "model", slow=slow, draft=draft)
        settings = {"prefill_chunk": 8, "prefix_bytes": 0, "prefix_grain": 8} | settings
        scheduler = Scheduler(lambda: engine, SchedulerSettings(**settings), Metrics())
        scheduler.start()
        made.append(scheduler)
        return scheduler

    yield build
    for scheduler in made:
        scheduler.stop(0.0)


def finish(scheduler, jobs):
    scheduler.submit(jobs)
    assert all(job.sink.done.wait(60) for job in jobs)
    return [job.sink for job in jobs]


def whole(length, grain=8):
    return length - length % grain


TEXTS = [f"request {i} says {'ab' * (3 * i)}" for i in range(6)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "seed": 5}])
def test_v2_answers_do_not_depend_on_company(make, registry, sampling):
    """Alone, in turns and as a batch, with and without drafts: the same text; half of the requests are identical."""
    texts = [*TEXTS, TEXTS[0], TEXTS[0]]
    alone = make(max_concurrency=1)
    wanted = [finish(alone, [make_job(alone.engine, text, **sampling)])[0].tokens for text in texts]
    for batch in (True, False):
        scheduler = make(max_concurrency=8, batch=batch)
        jobs = [make_job(scheduler.engine, text, **sampling) for text in texts]
        assert [sink.tokens for sink in finish(scheduler, jobs)] == wanted
        if sampling or not batch:  # a greedy batch drafts where the clock says that it pays
            assert all(job.sink.updates[-1].stats.accepted_tokens > 0 for job in jobs)
        if batch:
            assert max(registry.batcher.sizes) >= 6
        else:
            assert not scheduler.batches
    if not sampling:
        plain = make(max_concurrency=8)
        jobs = [make_job(plain.engine, text, draft=i % 2 == 0) for i, text in enumerate(texts)]
        assert [sink.tokens for sink in finish(plain, jobs)] == wanted


def test_everything_runs_on_one_thread(make):
    """Case V1."""
    scheduler = make()
    finish(scheduler, [make_job(scheduler.engine, text) for text in TEXTS])
    assert scheduler.engine.target.threads == {scheduler._thread.ident}


def test_requests_join_and_leave_between_rounds(make, registry):
    scheduler = make(slow=0.002, max_concurrency=4)
    early = make_job(scheduler.engine, "early", max_tokens=200)
    scheduler.submit([early])
    while not early.sink.updates:
        time.sleep(0.001)
    late = [make_job(scheduler.engine, text, max_tokens=5) for text in TEXTS[:3]]
    finish(scheduler, late)
    assert not early.sink.done.is_set(), "short requests overtake a long one that came first"
    assert early.sink.done.wait(60) and {1} | set(registry.batcher.sizes) >= {2, 4}


def test_long_prompt_holds_others_up_for_a_chunk_only(make):
    scheduler = make(max_concurrency=2)
    running = make_job(scheduler.engine, "short", max_tokens=60)
    long = make_job(scheduler.engine, "x" * 400, max_tokens=2)
    between = []
    running.sink.hook = lambda sink: between.append(len(long.sink.updates))
    finish(scheduler, [running, long])
    assert between[:8] == [0] * 8 and len(between) > 8  # it went on while 400 tokens were read in chunks of 8


def test_fair_queue_takes_turns(make):
    queue, engine = FairQueue(), make().engine
    for i in range(3):
        queue.push(make_job(engine, f"many {i}", client="many"))
    queue.push(make_job(engine, "one", client="one"))
    order = [queue.pop().client for _ in range(len(queue))]
    assert order == ["many", "one", "many", "many"]
    with pytest.raises(IndexError):
        queue.pop()


def test_queue_limit_is_429(make):
    scheduler = make(slow=0.01, max_concurrency=1, max_queue=2)
    jobs = [make_job(scheduler.engine, text, max_tokens=30) for text in TEXTS[:5]]
    scheduler.submit(jobs[:1])
    while not jobs[0].sink.updates:
        time.sleep(0.001)
    scheduler.submit(jobs[1:3])
    with pytest.raises(ApiError) as error:
        scheduler.submit(jobs[3:4])
    assert error.value.status == 429 and 1 <= int(error.value.headers["Retry-After"]) <= 60
    with pytest.raises(ApiError):
        scheduler.submit(jobs[3:5])
    assert all(job.sink.done.wait(60) for job in jobs[:3])
    assert finish(scheduler, [jobs[3]])[0].tokens


@pytest.mark.parametrize("stage", ["queued", "prefill", "first token", "streaming"])
def test_v3_cancel_at_each_stage(make, stage):
    """Work stops within one round; others are untouched; nothing is kept beyond the committed tokens."""
    scheduler = make(slow=0.002, max_concurrency=1 if stage == "queued" else 2, prefix_bytes=10**6)
    engine = scheduler.engine
    other = make_job(engine, "other", max_tokens=40)
    victim = make_job(engine, "v" * 300, max_tokens=200)
    wanted = {"first token": 1, "streaming": 4}.get(stage, 0)

    def cancel(sink):
        if len(sink.updates) == wanted:
            scheduler.cancel([victim])

    if wanted:
        victim.sink.hook = cancel
    else:
        other.sink.hook = lambda sink: len(sink.updates) == 3 and scheduler.cancel([victim])
    scheduler.submit([other, victim])
    assert other.sink.done.wait(60)
    while scheduler.occupancy != (0, 0):
        time.sleep(0.001)
    assert len(victim.sink.updates) <= wanted + 1 and not victim.sink.done.is_set()
    kept = {tuple(entry.tokens.tolist()): entry for entry in scheduler.prefixes._entries}
    for tokens, entry in kept.items():
        assert list(tokens) == entry.saved[0] == entry.saved[1]
        if tokens[0] == victim.prompt[0]:
            assert list(tokens) == [*victim.prompt, *victim.sink.tokens][: len(tokens)]
    clean = make(max_concurrency=1)
    assert other.sink.tokens == finish(clean, [make_job(clean.engine, "other", max_tokens=40)])[0].tokens
    again = make_job(engine, "v" * 300, max_tokens=12)
    assert finish(scheduler, [again])[0].tokens == finish(clean, [make_job(clean.engine, "v" * 300, max_tokens=12)])[0].tokens


def test_one_that_fails_leaves_alone(make):
    class Broken:
        needs_drafts = False

        def apply(self, logits, drafts):
            raise ApiError("this one", status=500)

        def emitted(self, tokens):
            pass

    scheduler = make(max_concurrency=4)
    bad = make_job(scheduler.engine, "bad")
    bad.make_rules = lambda: [Broken()]
    good = [make_job(scheduler.engine, text) for text in TEXTS[:2]]
    finish(scheduler, [good[0], bad, good[1]])
    assert bad.sink.updates[-1].error.message == "this one" and all(len(job.sink.tokens) == 20 for job in good)


def test_start_raises_what_loading_raises(registry):
    def load():
        raise CheckpointError("the drafter is broken")

    with pytest.raises(CheckpointError, match="broken"):
        Scheduler(load, SchedulerSettings(), Metrics()).start()


def test_stop_lets_running_requests_finish(make):
    scheduler = make(slow=0.002)
    jobs = [make_job(scheduler.engine, text, max_tokens=40) for text in TEXTS[:3]]
    scheduler.submit(jobs)
    assert scheduler.stop(30.0) and all(job.sink.updates[-1].finish_reason == "length" for job in jobs)
    with pytest.raises(ApiError) as error:
        scheduler.submit([make_job(scheduler.engine, "late")])
    assert error.value.status == 503


def test_stop_without_patience_tells_the_clients(make):
    scheduler = make(slow=0.01, max_concurrency=1)
    jobs = [make_job(scheduler.engine, text, max_tokens=100) for text in TEXTS[:3]]
    scheduler.submit(jobs)
    assert not scheduler.stop(0.05)
    assert all(job.sink.updates[-1].error.status == 503 for job in jobs)


def test_r4_warm_drafts_equal_cold_ones(make):
    """A prefix hit brings the drafter's context along: rounds and acceptance are those of a cold run."""
    text = "the same beginning, " * 3
    cold = make(max_concurrency=1)
    wanted = finish(cold, [make_job(cold.engine, text + "second")])[0]
    warm = make(max_concurrency=1, prefix_bytes=10**6)
    finish(warm, [make_job(warm.engine, "something else in the slot first, long enough")])
    finish(warm, [make_job(warm.engine, text + "first")])
    got = finish(warm, [make_job(warm.engine, text + "second")])[0]
    assert got.tokens == wanted.tokens and got.updates[-1].stats.cached_tokens == whole(len(text)) > 40
    shape = [(update.drafted, update.accepted) for update in got.updates]
    assert shape == [(update.drafted, update.accepted) for update in wanted.updates]
    # a prefix without the drafter's part serves plain requests only
    plain = make(max_concurrency=1, prefix_bytes=10**6)
    finish(plain, [make_job(plain.engine, text + "first", draft=False)])
    drafting = finish(plain, [make_job(plain.engine, text + "second")])[0]
    assert drafting.tokens == wanted.tokens and drafting.updates[-1].stats.cached_tokens == 0
    assert finish(plain, [make_job(plain.engine, text + "first", draft=False)])[0].updates[-1].stats.cached_tokens > 0


def test_r11_nothing_of_another_conversation(make):
    scheduler, cold = make(max_concurrency=1, prefix_bytes=10**6), make(max_concurrency=1)
    system = "system prompt shared by both. "
    finish(scheduler, [make_job(scheduler.engine, system + "remember MANGO")])
    got = finish(scheduler, [make_job(scheduler.engine, system + "hi")])[0]
    assert got.tokens == finish(cold, [make_job(cold.engine, system + "hi")])[0].tokens
    assert got.updates[-1].stats.cached_tokens == whole(len(system)) > 0


def test_answers_are_reused_only_where_that_was_asked_for(make):
    for exact in (True, False):
        scheduler = make(max_concurrency=1, prefix_bytes=10**6, exact_prefixes=exact)
        first = finish(scheduler, [make_job(scheduler.engine, "a first turn", max_tokens=20)])[0]
        again = make_job(scheduler.engine, "a first turn" + first.text + " and more")
        length = len("a first turn" + first.text) - 1  # the newest token was not in the caches
        assert finish(scheduler, [again])[0].updates[-1].stats.cached_tokens == (
            whole(len("a first turn")) if exact else length
        )


def test_running_sequences_lend_their_prefix(make):
    scheduler = make(slow=0.001, max_concurrency=4, prefix_bytes=10**6)
    first = make_job(scheduler.engine, "shared beginning of some length: one", max_tokens=150)
    scheduler.submit([first])
    while not first.sink.updates:
        time.sleep(0.001)
    second = finish(scheduler, [make_job(scheduler.engine, "shared beginning of some length: two")])[0]
    assert second.updates[-1].stats.cached_tokens == whole(len("shared beginning of some length: ")) > 0
    assert not first.sink.done.is_set() or len(first.sink.tokens) == 150


@pytest.mark.parametrize("limit", [0, 500, 3000])
def test_m2_byte_limit_on_every_path(make, limit):
    scheduler = make(max_concurrency=2, prefix_bytes=limit)
    text = "turn"
    for turn in range(30):
        text += f" and {turn}"
        job = make_job(scheduler.engine, text[-300:], max_tokens=8, draft=turn % 3 > 0)
        if turn % 5 == 4:
            job.sink.hook = lambda sink, job=job: scheduler.cancel([job])
            scheduler.submit([job])
        else:
            finish(scheduler, [job])
        while scheduler.occupancy != (0, 0):
            time.sleep(0.001)
        entries = scheduler.prefixes._entries
        held = sum(8 * len(part) for entry in entries for part in entry.saved if part is not None)
        assert held == scheduler.prefixes.nbytes <= limit
    assert (len(scheduler.prefixes) > 0) is (limit > 0)
