"""The loop over static rounds gives the eager loop's events: policies, sampling, ends, cancellations, several slots; and
what is refused. Run without graphs: `EagerRunner`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from dspine.common.decoding import DecodingParams, decode  # noqa: E402
from dspine.common.errors import BackendError, DSpineError  # noqa: E402
from dspine.common.protocols import Engine  # noqa: E402
from dspine.common.registry import reference_only  # noqa: E402
from dspine.common.sampling import SamplingParams  # noqa: E402
from dspine.common.selection.calibration import calibration_path, check_calibration, identify  # noqa: E402
from dspine.common.selection.capture import time_lengths, time_stage_zero  # noqa: E402
from dspine.common.selection.policies import StaticPolicy, parse_policy  # noqa: E402
from dspine_cuda.drafter import load_drafter  # noqa: E402
from dspine_cuda.graphs import EagerRunner, GraphRunner, staged  # noqa: E402
from dspine_cuda.runtime import RUNTIME  # noqa: E402
from dspine_cuda.static import drafter as static_drafter  # noqa: E402
from dspine_cuda.static.arena import Arena, ArenaShape, arena_bytes, check_room  # noqa: E402
from dspine_cuda.static.loop import GraphDecoder  # noqa: E402
from dspine_cuda.static.round import RoundRules, StaticRound, read_report  # noqa: E402
from dspine_cuda.static.switch import switch_support  # noqa: E402
from dspine_cuda.static.timing import expert_blocks, timed_rounds  # noqa: E402
from tests.helpers.calibrations import calibration  # noqa: E402
from tests.helpers.drafters import drafter_folder  # noqa: E402
from tests.helpers.hybrids import save_hybrid  # noqa: E402
from tests.helpers.models import one_thread, prompt, save_tiny  # noqa: E402

FAMILIES = ("qwen3", "qwen3_5_moe_text")
WIDTH, PICKS = 8, 3
PROMPT = [5, 9, 11, 4, 21]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(target, drafter of head size 16) of a dense and a hybrid family; contexts of 40 tokens."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        save = save_tiny if family == "qwen3" else save_hybrid
        save(folder / "t", family, max_position_embeddings=40)
        target = RUNTIME.load_target(folder / "t", device="cpu", dtype="float32")
        made = drafter_folder(folder / "d", "dspine", WIDTH, target.head_weight(), 5, head_dim=16)
        found[family] = target, load_drafter(made, target)
    return found


@pytest.fixture(params=FAMILIES)
def pair(request, pairs):
    return pairs[request.param]


class Words:
    """A tokenizer without stop tokens."""

    stop_ids: frozenset[int] = frozenset()


def routed_calibration():
    """Prices low enough that lengths differ from round to round and the router decides."""
    made = calibration(WIDTH)
    routing = made.routing.model_copy(
        update={"experts_per_token": PICKS, "pairs": [6.0] * (WIDTH + 1), "pairs_given": [[1.0, 5, 8, 12]] * (WIDTH + 1)}
    )
    cost = made.cost.model_copy(update={"expert": 0.003, "stage_zero": 0.003})
    return made.model_copy(update={"routing": routing, "cost": cost})


def events_of(iterator):
    return [(e.token, e.drafted, e.finish_reason) for e in iterator]


def both(pair, params, policy, drafter=True):
    target, drafts = pair[0], pair[1] if drafter else None
    want = list(decode(target, drafts, PROMPT, params, policy))
    loop, reason = GraphDecoder(*pair, make_runner=EagerRunner).loop(drafts, PROMPT, params, policy)
    assert loop is not None, reason
    got = list(loop.run())
    assert events_of(got) == events_of(want)
    for name in ("rounds", "drafted_tokens", "accepted_tokens", "generated_tokens"):
        assert getattr(got[-1].stats, name) == getattr(want[-1].stats, name), name
    return loop


def test_to_the_contexts_end(pair):
    """40 tokens of context: the last rounds are cut by it."""
    loop = both(pair, DecodingParams(max_tokens=500, break_even=0.0), StaticPolicy())
    assert loop.finish_reason == "length" and loop.committed + 1 == 40


@pytest.mark.parametrize("policy", [StaticPolicy(1), StaticPolicy()])
@pytest.mark.parametrize("rule", ["point-mass", "rejection"])
def test_sampled_text(pair, policy, rule):
    sampling = SamplingParams(temperature=0.9, top_k=20, seed=7)
    both(pair, DecodingParams(max_tokens=12, sampling=sampling, acceptance=rule, break_even=0.0), policy)


def test_plain_decoding(pair):
    both(pair, DecodingParams(max_tokens=10), StaticPolicy(), drafter=False)
    both(pair, DecodingParams(max_tokens=10, sampling=SamplingParams(temperature=1.0, seed=2)), StaticPolicy(), drafter=False)


def test_stop_tokens_end_the_text_on_the_device(pair):
    params = DecodingParams(max_tokens=14, break_even=0.0)
    text = [e.token for e in decode(pair[0], None, PROMPT, params)]
    for stop in (text[5], text[9]):
        loop = both(pair, DecodingParams(max_tokens=14, break_even=0.0, stop_ids=frozenset({stop, 96})), StaticPolicy())
        assert loop.finish_reason == "stop" and loop.output[-1] == stop and int(loop.arena.remaining[0]) == 0


def test_break_even_goes_on_plainly(pair, monkeypatch):
    """Drafting switched off in the middle: the plain round takes over where the drafted one stood."""
    monkeypatch.setattr("dspine.common.decoding.BREAK_EVEN_ROUNDS", 3)
    loop = both(pair, DecodingParams(max_tokens=30, break_even=9.0), StaticPolicy())
    assert loop.stats.drafting_disabled and loop.drafter is None and loop.stats.rounds > 5


@pytest.mark.parametrize("name", ["nominal", "hybridspec"])
def test_lengths_chosen_on_the_device(pairs, name):
    """Eq. 5 and Eq. 6 as device work: the host policies' lengths, so the same rounds and the same text."""
    pair = pairs["qwen3_5_moe_text"]
    loop = both(pair, DecodingParams(max_tokens=24, break_even=0.0), parse_policy(name, routed_calibration()))
    assert staged(loop._runner.round) == (name == "hybridspec")
    assert loop.stats.drafted_tokens < loop.stats.rounds * (WIDTH - 1)


def test_cancelled_requests_leave_nothing(pair):
    """A request broken off anywhere, then a whole one on the same arena."""
    target, drafter = pair
    decoder, params = GraphDecoder(*pair, make_runner=EagerRunner), DecodingParams(max_tokens=14, break_even=0.0)
    want = events_of(decode(target, drafter, PROMPT, params))
    for steps in (1, 4):
        loop, _ = decoder.loop(drafter, prompt(9, seed=steps)[0].tolist(), params, StaticPolicy())
        for _ in range(steps):
            loop.step()
        assert decoder.loop(drafter, PROMPT, params, StaticPolicy())[0] is None  # it holds the arena
        arena = loop.arena
        del loop
        loop, reason = decoder.loop(drafter, PROMPT, params, StaticPolicy())
        assert loop is not None, reason
        assert events_of(loop.run()) == want and loop.arena is arena
        del loop


def test_two_pairs_take_turns(pairs):
    """Two models in one process, round by round."""
    params = DecodingParams(max_tokens=14, break_even=0.0)
    loops = [GraphDecoder(*p, make_runner=EagerRunner).loop(p[1], PROMPT, params, StaticPolicy())[0] for p in pairs.values()]
    while any(loop.finish_reason is None for loop in loops):
        for loop in loops:
            if loop.finish_reason is None:
                loop.step()
    for loop, pair in zip(loops, pairs.values(), strict=True):
        assert loop.output == [e.token for e in decode(*pair, PROMPT, params)]


def test_slots_of_different_lengths(pair):
    """Two slots, one ending before the other: each gives what it gives alone."""
    target, drafter = pair
    texts, budgets = [prompt(6, seed=1), prompt(13, seed=2)], [5, 13]
    arena = Arena(target, drafter, ArenaShape(40, 2, WIDTH))
    want = []
    for slot, (text, budget) in enumerate(zip(texts, budgets, strict=True)):
        alone = Arena(target, drafter, ArenaShape(40, 1, WIDTH))
        result = target.prefill(alone.cache, text[:, :-1], chunk=8)
        drafter.commit(alone.draft_cache, result.features)
        alone.start([text.shape[1] - 1], [int(text[0, -1])], [budget], frozenset(), None)
        arena.kv.store[:, :, slot] = alone.kv.store[:, :, 0]
        arena.draft_cache._store[:, :, slot] = alone.draft_cache._store[:, :, 0]
        if hasattr(alone.cache, "states"):
            arena.cache.states[:, slot], arena.cache.windows[:, slot] = alone.cache.states[:, 0], alone.cache.windows[:, 0]
        round_, tokens = StaticRound(target, drafter, alone), []
        while int(alone.remaining[0]):
            round_.drafted(WIDTH)
            tokens += read_report(alone.report[0].numpy()).tokens
        want.append(tokens)
    arena.start([t.shape[1] - 1 for t in texts], [int(t[0, -1]) for t in texts], budgets, frozenset(), None)
    round_, got = StaticRound(target, drafter, arena), [[], []]
    while bool(arena.remaining.any()):
        round_.drafted(WIDTH)
        for slot in (0, 1):
            got[slot] += read_report(arena.report[slot].numpy()).tokens
    assert got == want


class NoReads(TorchDispatchMode):
    """Fails on anything that CUDA could do only by waiting: a scalar read, or a shape that depends on data."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().partition("::")[2].partition(".")[0]
        assert name not in self.READS, f"a host read: {function.name()}"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("rule", ["greedy", "point-mass", "rejection"])
def test_no_step_reads_the_device(pair, rule):
    """Every step, with the core's own operations: what a CUDA graph could not hold would show here."""
    target, drafter = pair
    sampling = SamplingParams(temperature=0.0 if rule == "greedy" else 0.8)
    arena = Arena(target, drafter, ArenaShape(40, 1, WIDTH))
    arena.start([0], [7], [20], frozenset(), None)
    rules = [RoundRules(rule, sampling)]
    hybrid = hasattr(target, "record_routing") and hasattr(arena.cache, "states")
    if rule == "greedy":
        decoder = GraphDecoder(target, drafter, make_runner=EagerRunner)
        policy = parse_policy("hybridspec" if hybrid else "nominal", routed_calibration())
        rules.append(decoder.plan(DecodingParams(), policy, drafter).rules)
    with torch.inference_mode(), reference_only():
        for each in rules:
            round_ = StaticRound(target, drafter, arena, each)
            with NoReads():
                round_.plain()
                round_.drafted(5)
                if each.tables is not None and staged(round_):
                    round_.draft()
                    round_.begin(4)
                    round_.correct()
                    round_.finish(3)
    assert int(arena.lengths[0]) > 0


def test_arena_bytes_are_what_is_allocated(pair):
    target, drafter = pair
    arena = Arena(target, drafter, ArenaShape(100, 2, WIDTH))
    parts = arena_bytes(target, drafter, arena.shape)
    kv = arena.kv.store
    assert parts["kv"] == kv.numel() * kv.element_size()
    assert parts["drafter"] == arena.draft_cache.nbytes
    if arena.pending is not None:
        cache = arena.cache
        assert parts["states"] == cache.states.numel() * 4
        assert parts["windows"] == cache.windows.numel() * cache.windows.element_size()
        held = [arena.fresh.inputs, *(x for f in (arena.pending, arena.fresh.factors) for x in (f.z, f.k, f.g))]
        assert parts["factors"] == sum(x.numel() * x.element_size() for x in held)
    assert parts["round"] > arena.uniforms.numel() * 4


def test_refusals(pairs, tmp_path):
    target, drafter = pairs["qwen3"]
    with pytest.raises(DSpineError, match=r"asks for .* GiB \(kv .*\) and 0.00 GiB are free"):
        check_room(arena_bytes(target, drafter, ArenaShape(64, 1, WIDTH)), torch.device("cpu"), free=1000)
    with pytest.raises(DSpineError, match="context overflow: 41 tokens asked for"):
        GraphDecoder(target, drafter, make_runner=EagerRunner).prepare(41)
    with pytest.raises(DSpineError, match="context overflow: 60 tokens and 20 to come"):
        Arena(target, drafter, ArenaShape(64, 1, WIDTH)).start([60], [1], [20], frozenset(), None)
    with pytest.raises(DSpineError, match="2 sequences for an arena of 1 slots"):
        Arena(target, drafter, ArenaShape(64, 1, WIDTH)).start([6, 6], [1, 1], [20, 20], frozenset(), None)
    with pytest.raises(DSpineError, match="blocks of 1 to 16 rows, got 64, 1 and 17"):
        ArenaShape(64, 1, 17)
    narrow = load_drafter(drafter_folder(tmp_path / "n", "dspine", WIDTH, target.head_weight(), 5, head_dim=8), target)
    with pytest.raises(DSpineError, match="attention heads of 8 are not supported: 16 to 256"):
        GraphDecoder(target, narrow)
    arena = Arena(target, drafter, ArenaShape(64, 1, WIDTH))
    with pytest.raises(BackendError, match="CUDA graphs need a CUDA device, the target is on cpu"):
        GraphRunner(StaticRound(target, drafter, arena))
    assert switch_support(torch.device("cpu")) == (False, "no CUDA on cpu")
    target.bind_features(drafter.config.target_layer_ids)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"sampling": SamplingParams(repetition_penalty=1.2)}, "penalties"),
        ({"top_logprobs": 2}, "log-probabilities"),
        ({"stop_ids": frozenset(range(17))}, "more than 16 stop tokens"),
    ],
)
def test_requests_that_run_eagerly_say_why(pairs, params, words):
    target, drafter = pairs["qwen3"]
    loop, reason = GraphDecoder(target, drafter, make_runner=EagerRunner).loop(
        drafter, PROMPT, DecodingParams(**params), StaticPolicy()
    )
    assert loop is None and words in reason


def test_attention_rules(pairs):
    """Only windows that reach over the block have a form in `block_attention`."""
    from dspine.common.masks import MaskRule

    assert static_drafter.fits(MaskRule(True, None, False), 8) and static_drafter.fits(MaskRule(False, 8, True), 8)
    assert not static_drafter.fits(MaskRule(True, 7, True), 8) and not static_drafter.fits(MaskRule(False, 8, False, True), 8)


def test_the_python_api_takes_static_rounds(pair, monkeypatch):
    """`stream_generate` over an engine with rounds: the same tokens, the reason queryable, sessions stay eager."""
    from dspine.common.generation import generate
    from dspine.common.protocols import Engine
    from dspine.common.sessions import Session

    target, drafter = pair
    tokenizer = type("Words", (), {"eos_token_id": None})()
    monkeypatch.setattr("dspine.common.generation.encode_prompt", lambda *_, **__: PROMPT)
    monkeypatch.setattr("dspine.common.generation.stop_token_ids", lambda *_: frozenset())
    monkeypatch.setattr("dspine.common.generation._with_text", lambda events, _: map(as_step, events))
    monkeypatch.setattr("dspine.common.generation.Detokenizer", lambda _: None)
    eager = Engine(target, drafter, tokenizer, "torch", "asked for", "tiny", "tiny-draft")
    static = Engine(target, drafter, tokenizer, "torch", "asked for", "tiny", "tiny-draft")
    static.rounds = GraphDecoder(target, drafter, make_runner=EagerRunner)
    options = {"max_tokens": 12, "policy": "full"}
    want = generate(eager, "x", **options)
    assert generate(static, "x", **options).token_ids == want.token_ids
    assert static.rounds_reason == "static steps without graphs"
    assert generate(static, "x", **options, session=Session(None)).token_ids == want.token_ids
    assert static.rounds_reason == "a session keeps the caches"


def as_step(event):
    from dspine.common.generation import GenerationStep

    return GenerationStep("", event.token, event.drafted, event.finish_reason, event.stats)


def test_graphs_that_were_asked_for_and_cannot_run(pair):
    with pytest.raises(BackendError, match="asked for and cannot run: no CUDA: the target is on cpu"):
        RUNTIME.graph_rounds(*pair, "on")
    assert RUNTIME.graph_rounds(*pair, "auto") == (None, "no CUDA: the target is on cpu")
    assert RUNTIME.graph_rounds(*pair, "off") == (None, "graphs are off")
    with pytest.raises(DSpineError, match="graphs must be one of auto, on, off, got 'yes'"):
        RUNTIME.graph_rounds(*pair, "yes")


class Clocked(EagerRunner):
    """Every round takes so long; the modes that were launched are noted."""

    clock = 0.125

    def __init__(self, round_):
        super().__init__(round_)
        self.launched = []

    def launch(self, mode):
        assert not self._reports, "one round in flight while rounds are timed"
        self.launched.append(mode)
        super().launch(mode)

    def wait(self):
        report = super().wait()
        self.seconds = self.clock
        return report


def test_rounds_are_timed_at_the_lengths_asked_for(pair):
    """What a calibration asks of graphs: lengths in the order given, cut rounds left out, the text that of plain decoding."""
    target, drafter = pair
    decoder = GraphDecoder(target, drafter, make_runner=Clocked)
    asked = [2, 8, 3, 5, 4, 7, 6] * 10
    want = [e.token for e in decode(target, None, PROMPT, DecodingParams(max_tokens=25))]
    taken = iter(asked)
    loop, _ = decoder.loop(drafter, PROMPT, DecodingParams(max_tokens=25, break_even=0.0), StaticPolicy())
    loop._runner.depth = 2
    rounds = list(timed_rounds(loop, taken))
    assert loop._runner.launched == asked[: len(loop._runner.launched)], "each length is run, not only named"
    loop._runner.depth = 1
    assert loop.output == want and rounds
    whole = 25 // WIDTH  # rounds that no end can have cut
    assert [w for w, _ in rounds][:whole] == asked[:whole] and len(rounds) < 25
    assert all(seconds == loop._runner.clock for _, seconds in rounds), "the runner's clock, not the host's"
    made = decoder.time_rounds(PROMPT, DecodingParams(max_tokens=25, break_even=0.0), iter(asked))
    assert [w for w, _ in made] == [w for w, _ in rounds]


def test_stage_zero_and_experts_are_timed_on_idle_slots(pairs):
    target, drafter = pairs["qwen3_5_moe_text"]
    decoder = GraphDecoder(target, drafter, make_runner=EagerRunner)
    assert len(decoder.time_stage_zero(3, 4)) == 4
    blocks = expert_blocks(decoder._idle_round())
    experts, k = target.layers[0].mlp.experts, target.layers[0].mlp.top_k
    assert blocks.more == len(decoder._idle_round().target.experts) * (min(WIDTH * k, experts) - k)
    assert decoder.time_expert(3) >= 0.0
    dense = GraphDecoder(*pairs["qwen3"], make_runner=EagerRunner)
    assert dense.time_stage_zero(3, 4) == [] and dense.time_expert(3) == 0.0
    loop, _ = decoder.loop(drafter, PROMPT, DecodingParams(max_tokens=25, break_even=0.0), StaticPolicy())
    with pytest.raises(DSpineError, match="holds the arena"):
        decoder.time_expert(3)
    del loop


def test_a_calibration_of_graphs_times_graphs(pairs):
    """Times come from the engine's rounds, and the file says so: eager rounds refuse it, naming both."""
    target, drafter = pairs["qwen3_5_moe_text"]
    rounds = GraphDecoder(target, drafter, make_runner=EagerRunner)
    engine = Engine(target, drafter, Words(), "torch", "", "toy", "/nowhere", rounds=rounds)
    seconds = time_lengths(engine, [PROMPT, PROMPT[::-1]], 30, 2, 0, lambda done, of: None)
    assert all(seconds[w] for w in range(2, WIDTH))
    lengths, times = time_stage_zero(engine, [PROMPT], 2, 0, lambda done, of: None)
    assert sorted(set(lengths)) == list(range(2, WIDTH + 1)) and len(times) == 2 * (WIDTH - 1)
    assert identify(engine).rounds == "graphs" and calibration_path(engine).name.endswith("-graphs.json")
    made = calibration(WIDTH).model_copy(update={"identity": identify(engine)})
    with pytest.raises(DSpineError, match="rounds: calibrated for 'graphs', here 'eager'"):
        check_calibration(made, identify(dataclasses.replace(engine, rounds=None)), Path("c.json"))
