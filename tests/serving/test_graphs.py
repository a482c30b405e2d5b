"""`dspine serve --graphs`: one sequence or several over static rounds, and every eager fallback is told.

The static steps run without CUDA here (`EagerRunner`); what is tested is how the server drives them.
"""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from dspine.common import runtimes
from dspine.common.cli import serve as command
from dspine.common.decoding import DecodingParams
from dspine.common.errors import DSpineError
from dspine.common.selection.policies import StaticPolicy
from dspine.common.serving.metrics import Metrics
from dspine.common.serving.scheduler import Scheduler, SchedulerSettings
from dspine.common.serving.server import Server, captured
from dspine.common.serving.settings import ServerSettings, graphs_mode
from dspine_cuda.serving_graphs import SlotGraphs
from dspine_cuda.static.loop import GraphDecoder
from tests.serving.slot_runs import Capturing
from tests.serving.slot_server import WORDS, engine_maker
from tests.serving.test_scheduler import make_job
from tests.serving.toys import running


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_moe_text"])
def engines(request, tmp_path_factory):
    return engine_maker(tmp_path_factory.mktemp("pair"), request.param)


def serve(engine, concurrency=1, **settings):
    scheduler = SchedulerSettings(max_concurrency=concurrency, prefix_grain=4, prefill_chunk=8)
    return Server(lambda: engine, ServerSettings(names=("tiny",), scheduler=scheduler, default_max_tokens=12, **settings))


BODIES = {
    "greedy": {"temperature": 0},
    "plain": {"temperature": 0, "draft": False},
    "seed": {"temperature": 0.8, "seed": 3},
    "stop": {"temperature": 0, "stop": ["w1"]},
    "bias": {"temperature": 0, "logit_bias": {"9": 2.0}},
    "penalty": {"temperature": 0, "presence_penalty": 1.0},
    "logprobs": {"temperature": 0, "logprobs": 2},
}
EAGER = {"stop": "stop strings", "bias": "a bias or a grammar", "penalty": "penalties", "logprobs": "log-probabilities"}


def test_answers_are_the_eager_servers(engines):
    """Greedy, plain and sampled over static rounds; what the host must see runs eagerly, and says so; prefixes are kept and
    reused between both."""
    found = {}
    for static in (False, True):
        server = serve(engines(static))
        assert server.summary()["graphs"] is static
        with running(server) as url:
            for name, change in (*BODIES.items(), ("again", BODIES["greedy"])):
                body = {"model": "tiny", "prompt": WORDS, "ignore_eos": True, **change}
                answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()
                found[static, name] = answer["choices"][0]["text"], answer["usage"]
    for name in (*BODIES, "again"):
        assert found[True, name][0] == found[False, name][0], name
        told = found[True, name][1]["speculative"]["rounds_by"]
        assert told.startswith(f"eager: {EAGER[name]}" if name in EAGER else "graphs: ")
        assert "rounds_by" not in found[False, name][1]["speculative"]
    assert len({text for text, _ in found.values()}) >= 3
    again = found[True, "again"][1]
    assert again["prompt_tokens_details"]["cached_tokens"] > 0 and again["speculative"]["drafted"] > 0


def remember_loops(engine, kept):
    """Whoever still knows a loop must not keep the arena from others."""
    make = engine.rounds.loop

    def loop(*args):
        kept.append(make(*args))
        return kept[-1]

    engine.rounds.loop = loop


def test_a_client_that_left_frees_the_arena(engines):
    engine, kept = engines(True), []
    remember_loops(engine, kept)
    server = serve(engine)
    body = {"model": "tiny", "prompt": WORDS, "ignore_eos": True, "temperature": 0, "max_tokens": 60}
    with running(server) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60) as answer:
            next(answer.iter_lines())
        while server.scheduler.occupancy != (0, 0):
            time.sleep(0.005)
        usage = httpx.post(f"{url}/v1/completions", json=body | {"max_tokens": 8}, timeout=60).json()["usage"]
        assert usage["speculative"]["rounds_by"].startswith("graphs")
        metrics = httpx.get(f"{url}/metrics", timeout=60).text
        assert "dspine_cancelled_total 1.0" in metrics and len(kept) == 3


def test_graphs_are_captured_before_the_first_request(engines):
    """The arena has room for whatever a request may ask for, and nothing holds it."""
    engine, kept = engines(True), []
    remember_loops(engine, kept)
    settings = ServerSettings(names=("tiny",), max_context=64, scheduler=SchedulerSettings(max_concurrency=1))
    assert captured(engine, settings) is engine and len(kept) == 1
    assert engine.rounds.arena.shape.tokens >= 64 and not engine.rounds.busy and len(engine.rounds._runners) == 1
    arena = engine.rounds.arena
    loop, _ = engine.rounds.loop(engine.drafter, [5, 6, 7], DecodingParams(max_tokens=60, break_even=0), StaticPolicy())
    list(loop.run())
    assert engine.rounds.arena is arena and len(engine.rounds._runners) == 1
    several = dataclasses.replace(settings, scheduler=SchedulerSettings(max_concurrency=2))
    other = engines(True)
    captured(other, several)
    assert other.rounds.arena is None


def test_several_sequences_have_slots(engines):
    """Eight requests of every kind through four slots at once: the answers of a server without graphs, one by one; what the
    host must see runs in the eager batch beside them. The second four find their prefixes kept."""
    bodies = {name: BODIES[name] for name in ("greedy", "plain", "seed", "stop", "bias", "penalty", "logprobs")}
    bodies |= {"again": BODIES["greedy"]}
    found = {}
    for static, concurrency in ((False, 1), (True, 4)):
        server = serve(engines(static, Capturing), concurrency)
        summary = server.summary()
        assert summary["graphs"] is static and (not static or "up to 4 slots" in summary["graphs_reason"])
        assert summary["prompts"].startswith("captured: pieces of up to 96 tokens" if static else "eager: only batches")
        with running(server) as url, ThreadPoolExecutor(len(bodies)) as pool:

            def ask(item, url=url):
                body = {"model": "tiny", "prompt": WORDS, "ignore_eos": True, "max_tokens": 24, **item[1]}
                return item[0], httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()

            for name, answer in pool.map(ask, bodies.items()) if static else map(ask, bodies.items()):
                found[static, name] = answer["choices"][0]["text"], answer["usage"]
            metrics = httpx.get(f"{url}/metrics", timeout=60).text
        if static:
            assert sorted(server.scheduler.slots._free) == [0, 1, 2, 3]
            assert all(f'dspine_rounds_by_total{{way="{way}"}}' in metrics for way in ("prefill", "graphs", "eager"))
            assert all(f'dspine_prompt_pieces_total{{way="{way}"}}' in metrics for way in ("captured", "eager"))
    for name in bodies:
        assert found[True, name][0] == found[False, name][0], name
        told = found[True, name][1]["speculative"]["rounds_by"]
        eager = name in EAGER and name != "stop"
        assert told.startswith(f"eager: {EAGER[name]}" if eager else "graphs: batches of up to 4 slots"), name
    assert any(usage["prompt_tokens_details"]["cached_tokens"] for (static, _), (_, usage) in found.items() if static)


def test_a_round_starts_before_a_first_token_is_read(engines):
    """The device is never without work because the host waits for a prompt: pieces, the others' round, then the token."""
    engine, log = engines(True), []
    settings = SchedulerSettings(max_concurrency=2, prefix_grain=4, prefill_chunk=64)
    scheduler = Scheduler(lambda: engine, settings, Metrics())
    scheduler._open()
    slots = scheduler.slots.slots
    later, launch = slots.later, slots.launch

    def ask(array):
        log.append("ask")
        read = later(array)
        return lambda: log.append("token") or read()

    def start(*args):
        log.append("round")
        return launch(*args)

    slots.later, slots.launch = ask, start
    jobs = [make_job(engine, words, max_tokens=40) for words in (WORDS, "w9 w8 w7 " + WORDS)]
    for job in jobs:
        log.clear()
        scheduler._queue.push(job)
        while not job.sink.updates:
            scheduler._step()
    assert "round" in log[log.index("ask") : log.index("token")]
    assert not jobs[0].sink.done.is_set()


def test_clients_that_leave_free_their_slots(engines):
    """Four streams are cut off in the middle; the next four requests have slots, and the right answers."""
    server = serve(engines(True), 4)
    body = {"model": "tiny", "prompt": WORDS, "ignore_eos": True, "temperature": 0, "max_tokens": 40}
    with running(server) as url:
        wanted = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]

        def leave(_):
            with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60) as answer:
                next(answer.iter_lines())

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(leave, range(4)))
            while server.scheduler.occupancy != (0, 0):
                time.sleep(0.005)
            assert sorted(server.scheduler.slots._free) == [0, 1, 2, 3]
            answers = list(pool.map(lambda _: httpx.post(f"{url}/v1/completions", json=body, timeout=60).json(), range(4)))
    for answer in answers:
        assert answer["choices"][0]["text"] == wanted
        assert answer["usage"]["speculative"]["rounds_by"].startswith("graphs")


def test_batches_have_graphs_where_they_run(monkeypatch):
    """`auto` and `on`; sequences that take turns have none, and `on` with them is refused before anything is loaded."""
    assert [graphs_mode(asked, count) for count in (1, 8) for asked in ("auto", "on", "off")] == ["auto", "on", "off"] * 2
    assert [graphs_mode(asked, 8, batch=False) for asked in ("auto", "off")] == ["off", "off"]
    assert graphs_mode("auto", 1, batch=False) == "auto"
    monkeypatch.setattr(command, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(DSpineError, match="--max-concurrency is 8; drop --no-batch, or use --max-concurrency 1"):
        command.serve(command.ServeOptions(port=0, graphs="on", no_batch=True))


@pytest.mark.parametrize("error", [DSpineError("graphs: 4 slots ask for 90 GiB"), RuntimeError("CUDA error: 90 GiB")])
@pytest.mark.parametrize("late", [False, True])
def test_slots_that_cannot_be_had(engines, monkeypatch, late, error):
    """Where graphs are not asked for by name, batches run eagerly and the start says why; where they are, it is an error. late:
    when the arena is there already, which is freed."""
    freed, close = [], SlotGraphs.close

    def refuse(*_):
        raise error

    monkeypatch.setattr(SlotGraphs, "close", lambda slots: (freed.append(slots), close(slots)))
    monkeypatch.setattr(SlotGraphs if late else GraphDecoder, "prepare_prompts" if late else "slots", refuse)
    server = serve(engines(True), 4)
    summary = server.summary()
    why = error if isinstance(error, DSpineError) else "graphs failed (RuntimeError), see the log"
    assert not summary["graphs"] and summary["graphs_reason"] == f"batches run eagerly: {why}"
    assert summary["prompts"].startswith("eager: only batches") and len(freed) == late
    with running(server) as url:
        body = {"model": "tiny", "prompt": WORDS, "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    assert answer["choices"][0]["text"] and not answer["usage"]["speculative"].get("rounds_by", "").startswith("graphs")
    engine = engines(True)
    needs = SchedulerSettings(max_concurrency=4, needs_slots=True)
    with pytest.raises(type(error), match="90 GiB"):
        Server(lambda: engine, ServerSettings(names=("tiny",), scheduler=needs))


def test_why_batches_run_eagerly(engines):
    assert serve(engines(False), 4).summary()["graphs_reason"] == engines(False).rounds_reason != ""


def test_the_flag_reaches_the_runtime(registry, monkeypatch):
    """`--graphs on` on a runtime without them is an error of the start, never eager rounds instead."""
    seen = {}

    def spy(*_, **options):
        seen.update(options)
        raise DSpineError("enough")

    monkeypatch.setattr("dspine.common.serving.server.set_up_logging", lambda: None)
    monkeypatch.setattr(command, "load", spy)
    monkeypatch.setattr(command, "choose_runtime", lambda name: (registry, "asked for"))
    for graphs, concurrency, wanted in (("on", 1, "on"), ("on", 8, "on"), ("auto", 1, "auto"), ("auto", 8, "auto")):
        with pytest.raises(DSpineError, match="enough"):
            command.serve(command.ServeOptions(port=0, graphs=graphs, max_concurrency=concurrency))
        assert seen["graphs"] == wanted


def test_torch_without_cuda_refuses(engines):
    runtime = runtimes.load_runtime("torch")[0]
    engine = engines(False)
    with pytest.raises(DSpineError, match="no CUDA"):
        runtime.graph_rounds(engine.target, engine.drafter, "on")
