"""CUDA graphs against the eager path: every length and acceptance count, conditional and host-read lengths, long runs, two
models in one process, and what the CPU does in a steady round. `DSPINE_GPU_ROUNDS` shortens the long run (12,000 rounds)."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dspine.common.decoding import DecodingParams, decode  # noqa: E402
from dspine.common.sampling import SamplingParams  # noqa: E402
from dspine.common.selection.policies import StaticPolicy, parse_policy  # noqa: E402
from dspine_cuda.bench import StaticContender  # noqa: E402
from dspine_cuda.drafter import load_drafter  # noqa: E402
from dspine_cuda.graphs import PLAIN, POLICY, EagerRunner, GraphRunner  # noqa: E402
from dspine_cuda.runtime import RUNTIME  # noqa: E402
from dspine_cuda.static.arena import Arena, ArenaShape  # noqa: E402
from dspine_cuda.static.loop import GraphDecoder  # noqa: E402
from dspine_cuda.static.round import RoundRules, StaticRound, read_report  # noqa: E402
from dspine_cuda.static.switch import switch_support  # noqa: E402
from tests.helpers.drafters import drafter_folder  # noqa: E402
from tests.helpers.hybrids import save_hybrid  # noqa: E402
from tests.helpers.models import VOCAB, prompt, save_tiny  # noqa: E402
from tests.torch.test_static_loop import routed_calibration  # noqa: E402

FAMILIES = ("llama", "qwen3", "qwen3_5_moe_text")
WIDTH, PROMPT = 8, [5, 9, 11, 4, 21]
ROUNDS = int(os.environ.get("DSPINE_GPU_ROUNDS", "12000"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(target, drafter) of every family in float32, blocks of 8."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        (save_hybrid if family == "qwen3_5_moe_text" else save_tiny)(folder / "t", family)
        target = RUNTIME.load_target(folder / "t", device="cuda", dtype="float32")
        made = drafter_folder(folder / "d", "dspine", WIDTH, target.head_weight(), 5, head_dim=16)
        found[family] = target, load_drafter(made, target)
    return found


@pytest.fixture(params=FAMILIES)
def pair(request, pairs):
    return pairs[request.param]


def read_by_host(round_: StaticRound) -> GraphRunner:
    return GraphRunner(round_, conditional=False)


def events_of(iterator: Any) -> list[Any]:
    return [(e.token, e.drafted, e.finish_reason) for e in iterator]


def static_events(pair: Any, params: DecodingParams, policy: Any, drafted: bool = True, make: Any = GraphRunner) -> list[Any]:
    decoder = GraphDecoder(*pair, make_runner=make)
    loop, reason = decoder.loop(pair[1] if drafted else None, PROMPT, params, policy)
    assert loop is not None, reason
    found = events_of(loop.run())
    decoder.close()
    return found


@pytest.mark.parametrize("w", range(1, WIDTH + 1))
def test_every_length_and_acceptance(pair, w):
    """A graph's logits, reports and lengths are those of the eager target, whatever is accepted."""
    target, drafter = pair
    arena = Arena(target, drafter, ArenaShape(128, 1, WIDTH))
    round_ = StaticRound(target, drafter, arena)
    with torch.inference_mode():
        for _ in range(2):
            round_.verify(w)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            round_.verify(w)
    logits = round_.output.logits
    for accepted in range(w):
        text = prompt(12, seed=6).cuda()
        cache = target.make_cache(64)
        arena.rewind()
        for held in (cache, arena.cache):
            result = target.prefill(held, text[:, :11], chunk=8)
        drafter.commit(arena.draft_cache, result.features)
        arena.start([11], [int(text[0, 11])], [40], frozenset(), None)
        anchor = int(text[0, 11])
        for count in (accepted, w - 1 - accepted):
            row = [anchor]
            for i in range(w - 1):
                block = torch.tensor([row], device="cuda")
                best = int(target.finish(cache, target.begin(cache, block), len(row)).logits[0, -1].argmax())
                row.append(best if i < count else (best + 1) % VOCAB)
            verification = target.finish(cache, target.begin(cache, torch.tensor([row], device="cuda")), w)
            arena.block[:, :w].copy_(torch.tensor([row], dtype=torch.int32))
            arena.finite.fill_(True)
            graph.replay()
            report = read_report(arena.report[0].cpu().numpy())
            torch.testing.assert_close(logits, verification.logits, atol=2e-3, rtol=1e-3)
            assert report.accepted == count and report.drafts == row[1:]
            target.commit(cache, verification, count + 1)
            anchor = report.tokens[-1]
            assert int(arena.lengths[0]) == cache.length


@pytest.mark.parametrize("policy", [StaticPolicy(1), StaticPolicy(3), StaticPolicy()])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, seed=5)])
def test_text_is_that_of_the_same_steps_without_graphs(pair, policy, sampling):
    """Bit for bit: a graph replays exactly the kernels of the eager static steps."""
    params = DecodingParams(max_tokens=60, sampling=sampling, break_even=0.0)
    want = static_events(pair, params, policy, make=EagerRunner)
    assert static_events(pair, params, policy) == want
    assert static_events(pair, params, policy, make=read_by_host) == want


def test_greedy_text_is_the_eager_one(pair):
    params = DecodingParams(max_tokens=60, break_even=0.0)
    want = events_of(decode(*pair, PROMPT, params))
    assert [e[0] for e in static_events(pair, params, StaticPolicy())] == [e[0] for e in want]
    assert [e[0] for e in static_events(pair, params, StaticPolicy(), drafted=False)] == [e[0] for e in want]


@pytest.mark.parametrize("name", ["nominal", "hybridspec"])
@pytest.mark.parametrize("conditional", [False, True])
def test_lengths_chosen_on_the_device(pairs, name, conditional):
    """SWITCH nodes, and the same graphs after one read, against the steps without graphs."""
    if conditional and not switch_support(torch.device("cuda:0"))[0]:
        pytest.skip(switch_support(torch.device("cuda:0"))[1])
    pair, params = pairs["qwen3_5_moe_text"], DecodingParams(max_tokens=80, break_even=0.0)
    policy = parse_policy(name, routed_calibration())
    want = static_events(pair, params, policy, make=EagerRunner)
    assert static_events(pair, params, policy, make=lambda r: GraphRunner(r, conditional=conditional)) == want


def test_cancelled_requests_and_the_contexts_end(pair):
    target, drafter = pair
    decoder, params = GraphDecoder(target, drafter), DecodingParams(max_tokens=40, break_even=0.0)
    want = static_events(pair, params, StaticPolicy(), make=EagerRunner)
    for steps in (1, 2, 4):
        loop, _ = decoder.loop(drafter, prompt(9, seed=steps)[0].tolist(), params, StaticPolicy())
        for _ in range(steps):
            loop.step()
        del loop
        loop, reason = decoder.loop(drafter, PROMPT, params, StaticPolicy())
        assert loop is not None, reason
        assert events_of(loop.run()) == want
        del loop
    loop, _ = decoder.loop(drafter, PROMPT, DecodingParams(max_tokens=10_000, break_even=0.0), StaticPolicy())
    assert events_of(loop.run())[-1][2] == "length" and loop.committed + 1 == target.info.context_length
    decoder.close()


def test_two_models_in_one_process(pairs):
    params = DecodingParams(max_tokens=40, break_even=0.0)
    chosen = [pairs["qwen3"], pairs["qwen3_5_moe_text"]]
    want = [[e[0] for e in static_events(pair, params, StaticPolicy())] for pair in chosen]
    decoders = [GraphDecoder(*pair) for pair in chosen]
    loops = [d.loop(p[1], PROMPT, params, StaticPolicy())[0] for d, p in zip(decoders, chosen, strict=True)]
    while any(loop.finish_reason is None for loop in loops):
        for loop in loops:
            if loop.finish_reason is None:
                loop.step()
    assert [loop.output for loop in loops] == want
    for decoder in decoders:
        decoder.close()


def modes() -> list[Any]:
    return [PLAIN, WIDTH, POLICY]


def running(pair: Any, mode: Any) -> tuple[Arena, GraphRunner]:
    """A prepared runner of a mode on a fresh arena."""
    target, drafter = pair
    tables = GraphDecoder(target, drafter)._on_device(parse_policy("hybridspec", routed_calibration()))
    corrected = hasattr(target.make_cache(16), "states")
    rules = RoundRules(tables=tables, corrected=corrected) if mode == POLICY else RoundRules()
    arena = Arena(target, drafter, ArenaShape(400, 1, WIDTH))
    runner = GraphRunner(StaticRound(target, drafter, arena, rules))
    runner.prepare(mode)
    return arena, runner


def begin_text(pair: Any, arena: Arena, seed: int) -> None:
    target, drafter = pair
    text = prompt(12, seed=seed).cuda()
    arena.rewind()
    drafter.commit(arena.draft_cache, target.prefill(arena.cache, text[:, :11], chunk=8).features)
    arena.start([11], [int(text[0, 11])], [380], frozenset(), None)


@pytest.mark.slow
@pytest.mark.parametrize("mode", modes())
def test_long_runs_neither_drift_nor_leak(pairs, mode):
    """12,000 rounds: every text of the same prompt is the first one's, and memory stays where it was."""
    pair = pairs["qwen3_5_moe_text"]
    arena, runner = running(pair, mode)
    first, held, done, allocated = {}, [], 0, 0
    while done < ROUNDS:
        seed = done % 3
        begin_text(pair, arena, seed)
        held = []
        while True:
            runner.launch(mode)
            report = read_report(runner.wait()[0])
            done += 1
            held += report.tokens
            if len(held) >= 380 or not report.tokens:
                break
        assert first.setdefault(seed, held) == held, f"round {done}"
        if len(first) == 3:
            torch.cuda.synchronize()
            allocated = allocated or torch.cuda.memory_allocated()
            assert torch.cuda.memory_allocated() <= allocated
    arena.hand_back(int(arena.lengths[0]))
    arena.cache.check_integrity()
    runner.close()


@pytest.mark.parametrize("mode", modes())
def test_a_round_is_one_launch_and_one_copy(pairs, mode):
    """CPU work of steady-state rounds, counted by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    pair = pairs["qwen3_5_moe_text"]
    arena, runner = running(pair, mode)
    if mode == POLICY and not runner.conditional:
        pytest.skip(runner.reason)
    begin_text(pair, arena, 0)
    for _ in range(3):
        runner.launch(mode)
        runner.wait()
    count = 10
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(count):
            runner.launch(mode)
            runner.wait()
    calls: dict[str, int] = {}
    for event in found.events():
        name = event.name
        if name.startswith(("cuda", "cu")) and "::" not in name:
            calls[name] = calls.get(name, 0) + 1
    launches = sum(n for name, n in calls.items() if "GraphLaunch" in name)
    kernels = sum(n for name, n in calls.items() if "LaunchKernel" in name)
    copies = sum(n for name, n in calls.items() if "Memcpy" in name)
    assert (launches, kernels, copies) == (count, 0, count), calls
    runner.close()


def test_the_bench_times_graphs(pair):
    """Runs, replayed runs, phases and lengths as graphs between CUDA events: the rounds are the static steps'."""
    from dspine.common.bench.contenders import Task

    contender, *others = RUNTIME.bench_contenders(*pair)
    steps = StaticContender(*pair, RUNTIME.timer("cuda"), EagerRunner)
    switches = switch_support(torch.device("cuda:0"))[0]
    assert contender.name == "graphs" and [other.name for other in others] == ["graphs-read"] * switches
    assert RUNTIME.bench_refusal(*pair) is None
    for task in (Task(PROMPT, 40, False), Task(PROMPT, 40, True), Task(PROMPT, 40, True, (3, 0, 5, 1))):
        got, want = contender.run(task), steps.run(task)
        assert (got.token_ids, got.rounds) == (want.token_ids, want.rounds)
        spent = contender.phases(task)
        used = {"stage 1", "accept", "commit"} | ({"draft"} if task.draft else set())
        for phase, seconds in spent.items():
            assert len(seconds) == got.round_count and all((s > 0) == (phase in used) for s in seconds), phase
    found = contender.lengths(PROMPT, (1, WIDTH, 16), 3, 0)
    assert all(len(times) == 3 and 0 < verify for times in found.values() for verify, _ in times)
    contender.decoder.close()


@pytest.mark.parametrize("policy", ["nominal", "hybridspec"])
def test_the_bench_times_phases_of_chosen_lengths(pairs, policy):
    from dspine.common.bench.contenders import Task

    pair = pairs["qwen3_5_moe_text"]
    task = Task(PROMPT, 40, True, policy=parse_policy(policy, routed_calibration()))
    contender, *_ = RUNTIME.bench_contenders(*pair)
    spent = contender.phases(task)
    assert len(set(map(len, spent.values()))) == 1 and all(s > 0 for s in spent["stage 1"])
    assert all((s > 0) == (policy == "hybridspec") for s in spent["stage 0"] + spent["correction"])
    contender.decoder.close()


@pytest.mark.parametrize("policy", ["trace", "hybridspec"])
def test_conditional_and_read_graphs_run_the_same_rounds(pairs, policy):
    """Lengths of a trace and lengths of a calibration, through SWITCH nodes and after reads: the static steps' rounds; only the
    trace's lengths are captured; plain and full rounds between them change nothing."""
    from dspine.common.bench.contenders import Task, TracePolicy
    from dspine.common.bench.trace import Trace

    pair = pairs["qwen3_5_moe_text"]
    trace = Trace(WIDTH, ((3, 2), (2, 1), (WIDTH, 6), (5, 0)))
    chosen = Task(PROMPT, 60, True, policy=parse_policy("hybridspec", routed_calibration()))
    if policy == "trace":
        chosen = Task(PROMPT, 60, True, tuple(accepted for _, accepted in trace.rounds), TracePolicy(trace))
    steps = StaticContender(*pair, RUNTIME.timer("cuda"), EagerRunner)
    want = steps.run(chosen)
    for contender in RUNTIME.bench_contenders(*pair):
        contender.reserve(len(PROMPT) + 60)
        for task in (chosen, Task(PROMPT, 60, True, (3, 0, 5)), Task(PROMPT, 60, False), chosen):
            got = contender.run(task)
            if task is chosen:
                assert (got.token_ids, got.rounds, got.tokens) == (want.token_ids, want.rounds, want.tokens), contender.name
        (runner,) = (r for r in contender.decoder._runners.values() if r.has(POLICY))
        assert runner.conditional == (contender.name == "graphs" and switch_support(torch.device("cuda:0"))[0])
        lengths = {key[1] for key in runner._graphs[POLICY] if key[0] == "finish"}
        assert lengths == ({2, 3, 5, WIDTH} if policy == "trace" else set(range(1, WIDTH + 1)))
        if policy == "trace":
            assert [w for w, _ in got.rounds[:4]] == [3, 2, WIDTH, 5]
            spent = contender.phases(chosen)
            assert {len(seconds) for seconds in spent.values()} == {got.round_count} and all(s > 0 for s in spent["stage 0"])
        contender.decoder.close()


def test_early_launches_change_nothing(pair, monkeypatch):
    """Programmatic dependent launches, in a graph and without: the text is that of launches one after another."""
    params = DecodingParams(max_tokens=60, break_even=0.0)
    want = static_events(pair, params, StaticPolicy())
    monkeypatch.setenv("DSPINE_EARLY_LAUNCH", "0")
    assert static_events(pair, params, StaticPolicy()) == want


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_has_the_same_bits_in_every_block(family, tmp_path):
    """bfloat16: logits and K/V of the first tokens, alone and in longer blocks."""
    (save_hybrid if family == "qwen3_5_moe_text" else save_tiny)(tmp_path, family)
    target = RUNTIME.load_target(tmp_path, device="cuda", dtype="bfloat16")
    text, seen = prompt(11 + 16, seed=6).cuda(), {}
    for w in (16, 1, 2, 5, 8, 15):
        arena = Arena(target, None, ArenaShape(64, 1, 16))
        round_ = StaticRound(target, None, arena)
        target.prefill(arena.cache, text[:, :11], chunk=8)
        arena.start([11], [int(text[0, 11])], [40], frozenset(), None)
        arena.block.copy_(text[:, 11:])
        with torch.inference_mode():
            round_.forward(w)
        found = round_.output.logits[0], arena.kv.store[..., 11 : 11 + w, :]
        seen = seen or {"logits": found[0], "kv": found[1]}
        assert torch.equal(found[0], seen["logits"][:w]) and torch.equal(found[1], seen["kv"][..., :w, :]), w
