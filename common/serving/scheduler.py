"""The worker: one thread that loads the engine, owns the device, and runs every round (case V1).

A turn of the loop: drop cancelled jobs, admit waiting ones, read some prompt tokens, run one round of every running
sequence. So a request joins and leaves between rounds, a long prompt holds the others up for one chunk at most, and a
client that goes away costs at most the round it is in (case V3).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from dspine.common.decoding import DecodingLoop, Round
from dspine.common.errors import BackendError, DSpineError, OutOfMemory
from dspine.common.protocols import Engine, Rounds, ServingRuntime, ServingSupport, Slots
from dspine.common.runtimes import load_runtime
from dspine.common.serving.errors import ApiError
from dspine.common.serving.jobs import Job
from dspine.common.serving.metrics import Metrics
from dspine.common.serving.prefixes import PrefixCache
from dspine.common.serving.queue import FairQueue
from dspine.common.serving.rounds import BatchRounds, measure_costs
from dspine.common.serving.slots import SlotRounds

logger = logging.getLogger("dspine.server")
# what a request, or the device under it, can raise: it ends that request; anything else ends the server
FAILURES = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)


SLOT_TOKENS = 8192


@dataclass(frozen=True)
class SchedulerSettings:
    """max_concurrency: sequences that run at once; max_queue: jobs that wait; prefill_chunk: prompt tokens read between two
    rounds; prefix_bytes: limit of the prefix cache, 0 is off; prefix_grain, exact_prefixes: see `prefixes`; batch: run several
    sequences as one batch where possible; slot_tokens: prompt and answer of a sequence whose rounds run as graphs in a batch,
    at most (less where memory is short; longer ones run eagerly); needs_slots: it is an error where those cannot be had."""

    max_concurrency: int = 8
    max_queue: int = 64
    prefill_chunk: int = 512
    prefix_bytes: int = 256 * 2**20
    prefix_grain: int = 128
    exact_prefixes: bool = True
    batch: bool = True
    slot_tokens: int = SLOT_TOKENS
    needs_slots: bool = False

    @property
    def chunk(self) -> int:
        """Prompt tokens that are computed together."""
        return min(self.prefill_chunk, self.prefix_grain) if self.prefix_bytes and self.exact_prefixes else self.prefill_chunk


class Scheduler:
    """Jobs in, updates out. `submit` may be called from any thread; sinks are called on the worker's."""

    def __init__(self, load: Callable[[], Engine], settings: SchedulerSettings, metrics: Metrics) -> None:
        self._load, self.settings, self.metrics = load, settings, metrics
        self._condition = threading.Condition()
        self._queue = FairQueue()
        self._running: list[Job] = []
        self._stopping = self._abandon = False
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._opened = False
        self.bytes_per_token: int | None = None  # of both caches; None where they do not say
        self.bytes_per_sequence = 0  # whatever the length: states of linear attention, room for a block
        self._thread = threading.Thread(target=self._main, name="dspine-worker", daemon=True)
        self.engine: Engine
        self.support = ServingSupport(None, None, "not loaded")
        self.prefixes = PrefixCache(None, 0)
        self._rounds: BatchRounds | None = None
        self.slots: SlotRounds | None = None
        self.slots_reason = "one sequence at a time, or in turns"  # why there are none
        self._mean_seconds = 2.0  # of a job, running: for Retry-After
        self._turn = 0

    # called from other threads

    def start(self) -> Engine:
        """Load on the worker's thread and wait for it; raises what loading raised."""
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        if not self._opened:
            raise BackendError("the worker thread ended while loading")
        return self.engine

    @property
    def alive(self) -> bool:
        """Whether the worker is there and takes jobs."""
        return self._thread.is_alive() and not self._stopping

    @property
    def occupancy(self) -> tuple[int, int]:
        """Sequences running and jobs waiting."""
        with self._condition:
            return len(self._running), len(self._queue)

    def check_room(self, count: int = 1) -> None:
        """ApiError 429 where `count` more jobs find no place, 503 where the server stops: before a request is worked on."""
        with self._condition:
            self._check_room(count)

    def submit(self, jobs: list[Job]) -> None:
        """Queue the jobs of one request, all or none; errors of `check_room`."""
        with self._condition:
            self._check_room(len(jobs))
            for job in jobs:
                self._queue.push(job)
            self._condition.notify()

    def _check_room(self, count: int) -> None:
        if self._stopping or not self._thread.is_alive():
            raise ApiError("the server is shutting down", status=503, code="shutting_down", headers={"Retry-After": "5"})
        free = self.settings.max_concurrency - len(self._running)
        if len(self._queue) + count > self.settings.max_queue + max(free, 0):
            wait = str(self._retry_after())
            self.metrics.rejected.inc()
            raise ApiError(
                f"the queue is full ({len(self._queue)} waiting, {len(self._running)} running): try again in {wait} s",
                status=429,
                code="queue_full",
                headers={"Retry-After": wait},
            )

    def _retry_after(self) -> int:
        waiting = len(self._queue) + 1
        return int(min(max(self._mean_seconds * waiting / self.settings.max_concurrency, 1), 60))

    def cancel(self, jobs: list[Job]) -> None:
        """Their client is gone: they end before the next round."""
        with self._condition:
            for job in jobs:
                job.cancelled = True
            self._condition.notify()

    def stop(self, grace: float) -> bool:
        """Take no more jobs, let those in the house finish for `grace` seconds, then end. True if all finished."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join(grace)
        finished = not self._thread.is_alive()
        with self._condition:
            self._abandon = True
            self._condition.notify()
        self._thread.join(30)
        return finished

    # the worker's thread

    def _main(self) -> None:
        try:
            self._open()
        except (*FAILURES, ImportError) as error:  # handed to `start`, which raises it
            self._failure = error
            return
        finally:
            self._ready.set()
        try:
            while self._wait():
                self._step()
        finally:
            self._end_all(ApiError("the server stopped before this answer was finished", status=503, code="stopped"))

    def _open(self) -> None:
        self.engine = self._load()
        self.bytes_per_token, self.bytes_per_sequence = _cache_bytes(self.engine)
        runtime = load_runtime(self.engine.runtime)[0]
        if isinstance(runtime, ServingRuntime):
            self.support = runtime.serving(self.engine.target, self.engine.drafter)
        else:
            self.support = ServingSupport(None, None, f"runtime {self.engine.runtime} runs one sequence at a time, in turns")
        self.prefixes = PrefixCache(
            self.support.prefixes,
            self.settings.prefix_bytes,
            grain=self.settings.chunk,
            exact=self.settings.exact_prefixes,
        )
        if self.support.batcher is not None and self.settings.batch and self.settings.max_concurrency > 1:
            costs = measure_costs(self.engine, self.support.batcher, self.settings.max_concurrency)
            self._rounds = BatchRounds(self.engine, self.support.batcher, costs)
            self.slots_reason = self.engine.rounds_reason or "this engine has no rounds as graphs"
            if self.engine.rounds is not None:
                self._make_slots(self.engine.rounds)
        self._opened = True

    def _make_slots(self, rounds: Rounds) -> None:
        """Slots whose rounds are graphs; where they cannot be had and need not be, the reason why."""
        made: Slots | None = None
        try:
            made = rounds.slots(self.settings.max_concurrency, self.settings.slot_tokens)
            slots = SlotRounds(self.engine, made)
            made.prepare_prompts(self.settings.chunk)
        except (DSpineError, RuntimeError) as error:  # RuntimeError: what the device's libraries raise
            if self.settings.needs_slots:
                raise
            if made is not None:
                made.close()
            known = isinstance(error, DSpineError)
            if not known:
                logger.error("graphs failed at the start", exc_info=error)
            self.slots_reason = (
                f"batches run eagerly: {error if known else f'graphs failed ({type(error).__name__}), see the log'}"
            )
        else:
            self.slots = slots

    @property
    def rounds(self) -> Rounds | None:
        """Rounds without the CPU of one sequence, for a server of one sequence; `slots` are those of several."""
        return self.engine.rounds if self.settings.max_concurrency == 1 else None

    @property
    def prompts(self) -> str:
        """How prompts are read, and why: `captured: ...` or `eager: ...`; requests without a slot always eagerly."""
        return "eager: only batches as graphs capture them" if self.slots is None else self.slots.slots.prompts

    @property
    def batches(self) -> bool:
        """Whether several sequences run as one batch."""
        return self._rounds is not None

    def _wait(self) -> bool:
        """Until there is something to do; false at the end."""
        with self._condition:
            while not self._running and not len(self._queue) and not self._stopping:
                self._condition.wait()
            return not self._abandon and (bool(self._running) or len(self._queue) > 0)

    def _step(self) -> None:
        """One turn."""
        for job in self._admit():
            self._start(job)
        self._drop_cancelled()
        self._read_prompts()
        self._drop_cancelled()
        ready = [job for job in self._running if not job.loop.reading_prompt]  # type: ignore[union-attr]
        if self.slots is not None:
            placed = [job for job in ready if self.slots.holds(job.loop)]
            ready = [job for job in ready if not self.slots.holds(job.loop)]
            self._in_slots(self.slots, placed)
        if len(ready) > 1 and self._rounds is not None:
            self._batched(ready)
        else:
            for job in ready:
                self._alone(job)
        self.metrics.running.set(len(self._running))
        self.metrics.prefix_bytes.set(self.prefixes.nbytes)

    def _admit(self) -> list[Job]:
        with self._condition:
            self._queue.drop_cancelled()
            free = self.settings.max_concurrency - len(self._running)
            admitted = [self._queue.pop() for _ in range(min(free, len(self._queue)))]
            self.metrics.waiting.set(len(self._queue))
            self._running += admitted
            return admitted

    def _start(self, job: Job) -> None:
        try:
            loop = job.open(self.engine, self.rounds, self.slots)
            self.prefixes.fill(loop, ((_tokens(other), other) for other in self._loops(besides=job)))
        except FAILURES as error:
            self._fail(job, error)

    def _loops(self, besides: Job) -> list[DecodingLoop]:
        return [job.loop for job in self._running if job.loop is not None and job is not besides]

    def _drop_cancelled(self) -> None:
        for job in [job for job in self._running if job.cancelled]:
            self.metrics.cancelled.inc()
            self._remove(job, keep=True)

    def _read_prompts(self) -> None:
        """Up to `prefill_chunk` prompt tokens in all; jobs that are reading take turns. Who only waits for the first token,
        asked for one turn ago, comes first."""
        budget = self.settings.prefill_chunk
        reading = [job for job in self._running if job.loop.reading_prompt]  # type: ignore[union-attr]
        self._turn += 1
        order = reading[self._turn % len(reading) :] + reading[: self._turn % len(reading)] if reading else []
        for job in sorted(order, key=lambda job: not job.loop.awaiting):  # type: ignore[union-attr]
            while budget > 0 and job in self._running and job.loop.reading_prompt:  # type: ignore[union-attr]
                before = job.loop.committed  # type: ignore[union-attr]
                self._alone(job)
                budget -= max(job.loop.committed - before, 1)  # type: ignore[union-attr]
                if job.loop.awaiting:  # type: ignore[union-attr]  # the round is started first
                    break

    def _alone(self, job: Job) -> None:
        """The next step of one sequence."""
        loop = job.loop
        assert loop is not None
        way = "prefill" if loop.reading_prompt else job.way
        if loop.reading_prompt and not loop.awaiting:
            self.metrics.pieces.labels(loop.reader).inc()
        try:
            result = loop.step()
            self.prefixes.passed(loop)
            self._deliver(job, result, way)
        except FAILURES as error:
            self._fail(job, error)

    def _batched(self, jobs: list[Job]) -> None:
        assert self._rounds is not None
        try:
            results = self._rounds.run([job.loop for job in jobs], [job.pinned for job in jobs])  # type: ignore[misc]
        except FAILURES as error:
            for job in jobs:
                self._fail(job, error)
            return
        for job, result in zip(jobs, results, strict=True):
            if isinstance(result, Round):
                self._deliver(job, result)
            else:
                self._fail(job, result)

    def _in_slots(self, slots: SlotRounds, jobs: list[Job]) -> None:
        """The next round of the sequences that have a slot, and news of the one before it."""
        by_loop = {id(job.loop): job for job in jobs}

        def tell(loop: DecodingLoop, result: Round | DSpineError) -> None:
            job = by_loop[id(loop)]
            if isinstance(result, Round):
                self._deliver(job, result, job.way)
            else:
                self._fail(job, result)

        try:
            slots.run([job.loop for job in jobs], tell)  # type: ignore[misc]
        except FAILURES as error:
            for job in [job for job in jobs if job in self._running]:
                self._fail(job, error)

    def _deliver(self, job: Job, result: Round, way: str = "eager") -> None:
        assert job.loop is not None
        self.metrics.round(result, way)
        job.tell(result)
        if job.loop.finish_reason is not None:
            self._mean_seconds = 0.9 * self._mean_seconds + 0.1 * (perf_counter() - job.started)
            self.metrics.finished(job)
            self._remove(job, keep=True)

    def _fail(self, job: Job, error: BaseException) -> None:
        """The client hears what its request did wrong; what went wrong here is logged and not shown, but for missing memory."""
        if isinstance(error, OutOfMemory) or _says_no_room(error):
            logger.warning("request %d: %s", job.number, error, exc_info=None if isinstance(error, OutOfMemory) else error)
            text = str(error) if isinstance(error, OutOfMemory) else "the device has no memory for this request now"
            error = ApiError(text, status=503, code="out_of_memory", headers={"Retry-After": "5"})
        elif not isinstance(error, ApiError):
            if isinstance(error, DSpineError):
                error = ApiError(str(error))
            else:
                logger.error("request %d failed", job.number, exc_info=error)
                error = ApiError("generation failed on the server; its log says why", status=500, code="internal_error")
        self.metrics.failed.inc()
        self._remove(job, keep=False)
        job.fail(error)

    def _remove(self, job: Job, *, keep: bool) -> None:
        if keep and job.loop is not None:
            try:
                self.prefixes.keep(_tokens(job.loop), job.loop)
            except FAILURES:  # out of memory, say: the answer is whole, the cache can be done without
                logger.error("the prefix cache failed and was emptied", exc_info=True)
                self.prefixes.clear()
        if self.slots is not None:
            self.slots.release(job.loop)
        if job.loop is not None:  # the caches go with it
            job.loop.cache = job.loop.draft_cache = None
            job.loop.finish_reason = job.loop.finish_reason or "cancelled"  # it holds no arena any more
        with self._condition:
            if job in self._running:
                self._running.remove(job)

    def _end_all(self, error: ApiError) -> None:
        with self._condition:
            jobs = [*self._running, *self._queue]
            self._running, self._queue = [], FairQueue()
        for job in jobs:
            job.fail(error)


def _says_no_room(error: BaseException) -> bool:
    """Whether Python or the device's library (torch's class of that name, which is not imported here) ran out of memory."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _tokens(loop: DecodingLoop) -> np.ndarray:
    """The committed tokens of a loop."""
    return np.asarray([*loop.prompt, *loop.output], dtype=np.int32)[: loop.committed]


def _cache_bytes(engine: Engine) -> tuple[int | None, int]:
    """Bytes a token, and bytes a sequence besides, from two small caches of each kind; (None, 0) where they do not say."""
    sizes = []
    for capacity in (64, 320):
        caches = [engine.target.make_cache(capacity)]
        if engine.drafter is not None:
            caches.append(engine.drafter.make_cache(capacity))
        sizes.append(sum(getattr(cache, "nbytes", 0) for cache in caches))
    each = (sizes[1] - sizes[0]) // 256
    return (each, max(sizes[0] - 64 * each, 0)) if each else (None, 0)
