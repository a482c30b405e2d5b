"""The bench's contender over static rounds, without graphs on the CPU: replayed rounds, phases and lengths as the loop has
them. No timing is asserted."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dspine.common.bench.contenders import Contender, LoopContender, Task, TracePolicy  # noqa: E402
from dspine.common.bench.timing import PHASES, HostTimer  # noqa: E402
from dspine.common.bench.trace import Trace  # noqa: E402
from dspine.common.errors import DSpineError  # noqa: E402
from dspine.common.selection.policies import parse_policy  # noqa: E402
from dspine_cuda import graphs  # noqa: E402
from dspine_cuda.bench import StaticContender, fill, read_by_host, refusal  # noqa: E402
from dspine_cuda.bench_replay import BenchDecoder  # noqa: E402
from dspine_cuda.graphs import POLICY, EagerRunner, GraphRunner, body_of, length_bodies, staged  # noqa: E402
from dspine_cuda.runtime import RUNTIME  # noqa: E402
from dspine_cuda.static.round import RoundRules  # noqa: E402
from tests.helpers.models import one_thread  # noqa: E402
from tests.torch.test_static_loop import PROMPT, WIDTH, pairs, routed_calibration  # noqa: E402, F401

TOKENS = 16


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


class Ticks(HostTimer):
    """A clock that ticks once a mark."""

    now = 0

    def mark(self, *produced):
        self.now += 1
        return float(self.now)


@pytest.fixture(params=["qwen3", "qwen3_5_moe_text"])
def pair(request, pairs):  # noqa: F811
    return pairs[request.param]


def both(pair):
    return StaticContender(*pair, Ticks(), EagerRunner), LoopContender(*pair, Ticks())


def same(pair, task):
    static, loop = both(pair)
    got, want = static.run(task), loop.run(task)
    assert (got.token_ids, got.rounds, got.tokens, got.round_count) == (
        want.token_ids, want.rounds, want.tokens, want.round_count,
    )  # fmt: skip
    return static, got


def test_runs_are_those_of_the_loop(pair):
    static, run = same(pair, Task(PROMPT, TOKENS, False))
    assert isinstance(static, Contender) and run.round_count == TOKENS - 1
    same(pair, Task(PROMPT, TOKENS, True))


def test_replayed_acceptance_and_lengths(pair):
    """Counts from the table, around again and from the start in every run; lengths of a trace."""
    counts = (3, 0, 5, 1)
    static, run = same(pair, Task(PROMPT, 20, True, counts))
    assert run.rounds[:4] == [(WIDTH, 3), (WIDTH, 0), (WIDTH, 5), (WIDTH, 1)]
    assert static.run(Task(PROMPT, 20, True, counts)).rounds == run.rounds
    trace = Trace(WIDTH, ((3, 2), (2, 1), (WIDTH, 6), (1, 0)))
    replay = tuple(accepted for _, accepted in trace.rounds)
    _, run = same(pair, Task(PROMPT, 24, True, replay, TracePolicy(trace)))
    assert run.rounds[:4] == [(3, 2), (2, 1), (WIDTH, 6), (1, 0)]
    _, run = same(pair, Task(PROMPT, 12, True, (7,), TracePolicy(Trace(WIDTH, ((4, 0),)))))
    assert run.rounds[0] == (4, 3)


TRACE = Trace(WIDTH, ((3, 2), (2, 1), (WIDTH, 6), (5, 0)))
TRACED = Task(PROMPT, 24, True, tuple(accepted for _, accepted in TRACE.rounds), TracePolicy(TRACE))


class Noted(EagerRunner):
    """Notes modes, and what Stage 0 and Stage 1 were asked for."""

    def __init__(self, round_):
        super().__init__(round_)
        self.modes, self.begun, self.verified = [], [], []
        begin, accept = round_.begin, round_.accept
        round_.begin = lambda u: (self.begun.append(u), begin(u))
        round_.accept = lambda w: (self.verified.append(w), accept(w))

    def launch(self, mode):
        self.modes.append(mode)
        super().launch(mode)


def test_lengths_of_a_trace_are_the_devices(pair):
    """Rounds of a policy, through Stage 0 and correction; the lengths are a table beside the arena, which the host can change
    under way, and graphs are for those that occur."""
    static = StaticContender(*pair, Ticks(), Noted)
    run = static.run(TRACED)
    (runner,) = (r for r in static.decoder._runners.values() if r.modes)
    round_, hybrid = runner.round, hasattr(pair[0].make_cache(8), "states")
    assert set(runner.modes) == {POLICY} and round_.rules.lengths == (2, 3, 5, WIDTH) and staged(round_) == hybrid
    assert [w for w, _ in run.rounds[:4]] == [w for w, _ in TRACE.rounds] == runner.verified[:4]
    assert runner.begun == (runner.verified if hybrid else [])
    round_.lengths.fill_(5)
    again = static.run(TRACED)
    assert again.rounds[:4] == [(5, 2), (5, 1), (5, 4), (5, 0)]


def test_plain_full_and_traced_rounds_take_turns(pair):
    """Sets of graphs on one arena, each with its own tables, none of them the other's."""
    static, loop = both(pair)
    other = TracePolicy(Trace(WIDTH, TRACE.rounds[::-1]))
    tasks = [
        TRACED,
        replace(TRACED, policy=other),
        Task(PROMPT, 24, True, (3, 0, 5)),
        Task(PROMPT, 24, False),
        Task(PROMPT, 24, True),
    ]
    for task in [*tasks, *reversed(tasks)]:
        got, want = static.run(task), loop.run(Task(task.prompt, task.tokens, task.draft, task.replay, fresh(task.policy)))
        assert (got.token_ids, got.rounds) == (want.token_ids, want.rounds)
    arena = static.decoder.arena
    assert (
        len([runner for runner in static.decoder._runners.values() if runner.round.arena is arena]) == 4
    )  # plain rounds need no tables


def fresh(policy):
    return policy.fresh() if isinstance(policy, TracePolicy) else policy


def test_phases_of_a_trace(pair):
    found = StaticContender(*pair, Ticks(), EagerRunner).phases(TRACED)
    hybrid = hasattr(pair[0].make_cache(8), "states")
    count = StaticContender(*pair, Ticks(), EagerRunner).run(TRACED).round_count
    for phase in ("stage 0", "correction"):
        assert found[phase] == [float(hybrid)] * count
    assert found["stage 1"] == [1.0] * count


class Recorded:
    """In place of a captured graph: what it would replay."""

    def __init__(self, function):
        self.replay = torch.inference_mode()(function)


class Switches:
    """In place of `SwitchGraph`: the same order of nodes, run by reading the lengths."""

    def __init__(self, device):
        self.nodes, self.bodies = [], []

    def child(self, graph):
        self.nodes.append(graph.replay)

    def switch(self, length, first, made):
        self.bodies.append(made)
        self.nodes.append(lambda: made[min(max(int(length[0]) - first, 0), len(made) - 1)].replay())

    def finish(self):
        return self

    def replay(self):
        for node in self.nodes:
            node()


def pretended(round_, conditional):
    """A `GraphRunner` without CUDA: its layout of graphs and its two ways to launch a policy's round."""
    runner = GraphRunner.__new__(GraphRunner)
    runner.round, runner.device, runner.conditional = round_, round_.arena.device, conditional
    runner._graphs, runner._switches, runner._capture = {}, {}, Recorded
    runner._read = lambda length: int(length[0])
    runner._capture_policy()
    return runner


@pytest.mark.parametrize("conditional", [True, False])
def test_conditional_and_read_graphs_lay_out_the_lengths_that_occur(pairs, monkeypatch, conditional):  # noqa: F811
    monkeypatch.setattr(graphs, "SwitchGraph", Switches)
    pair = pairs["qwen3_5_moe_text"]

    class Pretended(EagerRunner):
        def __init__(self, round_):
            super().__init__(round_)
            self.made = pretended(round_, conditional) if round_.rules.tables is not None else None

        def launch(self, mode):
            if mode != POLICY:
                return super().launch(mode)
            self.made._switches[POLICY].replay() if conditional else self.made._launch_read()
            self._reports.append((self.round.arena.report.numpy().copy(), 0.0))

    static, steps = StaticContender(*pair, Ticks(), Pretended), StaticContender(*pair, Ticks(), EagerRunner)
    for task in (Task(PROMPT, 24, True, policy=parse_policy("hybridspec", routed_calibration())), TRACED):
        got, want = static.run(task), steps.run(task)
        assert (got.token_ids, got.rounds) == (want.token_ids, want.rounds)
    (made,) = (r.made for r in static.decoder._runners.values() if r.round.rules.lengths)
    captured = set(made._graphs[POLICY])
    assert captured == {"draft", "correct"} | {(part, w) for part in ("begin", "finish") for w in (2, 3, 5, WIDTH)}
    if conditional:
        by_length = made._graphs[POLICY]
        assert made._switches[POLICY].bodies[1] == [by_length["finish", w] for w in (2, 2, 3, 5, 5, 8, 8, 8)]


def test_the_body_of_a_length_that_has_none():
    def round_of(lengths):
        rules, arena = RoundRules(lengths=lengths), type("A", (), {"shape": type("S", (), {"rows": 8})})
        return type("R", (), {"rules": rules, "arena": arena})

    assert length_bodies(round_of(None)) == list(range(1, 9))
    bodies = length_bodies(round_of((5, 2)))
    assert bodies == [2, 2, 5, 5, 5] and [body_of(bodies, w) for w in (0, 1, 3, 5, 8)] == [2, 2, 5, 5, 5]
    for wrong in ((), (0, 2), (9,)):
        with pytest.raises(DSpineError, match="must lie within 1..8"):
            length_bodies(round_of(wrong))


def test_the_reading_contender_has_a_name_of_its_own(pair):
    named = [StaticContender(*pair, Ticks(), make) for make in (GraphRunner, read_by_host, EagerRunner)]
    assert [c.name for c in named] == ["graphs", "graphs-read", "static steps"]
    assert [c.for_chosen_lengths for c in named] == [False, True, False] and isinstance(named[0].decoder, BenchDecoder)


def test_phases_belong_to_their_steps(pair):
    """One tick a phase of a round, and the rounds are those of a run."""
    static, run = same(pair, Task(PROMPT, TOKENS, True, (3, 0, 5)))
    found = static.phases(Task(PROMPT, TOKENS, True, (3, 0, 5)))
    assert set(found) == set(PHASES)
    for phase, seconds in found.items():
        used = phase in ("draft", "stage 1", "accept", "commit")
        assert seconds == [float(used)] * run.round_count, phase
    plain = static.phases(Task(PROMPT, TOKENS, False))
    assert plain["draft"] == [0.0] * (TOKENS - 1) and plain["stage 1"] == plain["accept"] == [1.0] * (TOKENS - 1)
    assert static.run(Task(PROMPT, TOKENS, False)).round_count == TOKENS - 1  # the arena is free again


def test_phases_begin_with_the_token_that_a_run_begins_with(pair):
    """Acceptance of its own depends on what the rounds' first anchor is."""
    static = StaticContender(*pair, Ticks(), EagerRunner)
    run = static.run(Task(PROMPT, TOKENS, True))
    assert fill(*pair, static.decoder.idle_arena(len(PROMPT) + TOKENS), PROMPT) == run.token_ids[0]
    assert {len(seconds) for seconds in static.phases(Task(PROMPT, TOKENS, True)).values()} == {run.round_count}


def test_phases_of_lengths_chosen_on_the_device(pairs):  # noqa: F811
    pair = pairs["qwen3_5_moe_text"]
    policy = parse_policy("hybridspec", routed_calibration())
    static, run = same(pair, Task(PROMPT, TOKENS, True, policy=policy))
    found = static.phases(Task(PROMPT, TOKENS, True, policy=policy))
    for phase in ("draft", "stage 0", "correction", "stage 1", "accept", "commit"):
        assert found[phase] == [1.0] * run.round_count, phase


def test_lengths(pair):
    """A pair of ticks for every repetition; lengths beyond the drafter's block too; every round commits one token."""
    static, _ = both(pair)
    found = static.lengths(PROMPT, (1, 3, WIDTH, 10), 2, 0)
    assert found == {w: [(1.0, 1.0)] * 2 for w in (1, 3, WIDTH, 10)}
    plain = StaticContender(pair[0], None, Ticks(), EagerRunner)
    assert plain.lengths(PROMPT, (1, 2), 1, 0) == {1: [(1.0, 1.0)], 2: [(1.0, 1.0)]}


def test_what_cannot_run_says_so(pair):
    static, _ = both(pair)

    policy = type("Other", (), {"name": "other", "needs_signals": False, "reads_draft_tokens": False, "fresh": lambda s: s})()
    for call in (static.run, static.phases):
        with pytest.raises(DSpineError, match="length policy 'other' runs on the host; time it without them"):
            call(Task(PROMPT, TOKENS, True, policy=policy))
    with pytest.raises(DSpineError, match="exceed the context of 40"):
        static.lengths(PROMPT, (1, 2), 20, 0)
    assert refusal(*pair) == "no CUDA: the target is on cpu" == RUNTIME.bench_refusal(*pair)
    assert RUNTIME.bench_contenders(*pair) == []
