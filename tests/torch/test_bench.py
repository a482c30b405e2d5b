"""The bench's contender over static rounds, without graphs on the CPU: replayed rounds, phases and lengths as the loop has
them. No timing is asserted."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dspine.common.bench.contenders import Contender, LoopContender, Task, TracePolicy  # noqa: E402
from dspine.common.bench.timing import PHASES, HostTimer  # noqa: E402
from dspine.common.bench.trace import Trace  # noqa: E402
from dspine.common.errors import DSpineError  # noqa: E402
from dspine.common.selection.policies import parse_policy  # noqa: E402
from dspine_cuda.bench import StaticContender, refusal  # noqa: E402
from dspine_cuda.graphs import EagerRunner  # noqa: E402
from dspine_cuda.runtime import RUNTIME  # noqa: E402
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
