"""Prompts read into slots by the static steps: every piece is the eager prefill's, whatever its length, its start and its slot;
nothing of another slot changes; prefixes are reused bit for bit. The steps run without graphs here; that nothing in them reads
the device is seen on tensors without numbers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.errors import DSpineError
from dspine.common.protocols import Engine
from dspine.common.registry import reference_only
from dspine.common.selection.policies import StaticPolicy
from dspine.common.serving.prefixes import PrefixCache
from dspine.common.serving.slots import SlotRounds
from dspine_cuda import serving_prompts
from dspine_cuda.drafter import load_drafter
from dspine_cuda.graphs import EagerRunner
from dspine_cuda.runtime import RUNTIME
from dspine_cuda.serving import TorchPrefixes
from dspine_cuda.serving_graphs import SlotGraphs
from dspine_cuda.serving_hybrid import HybridPrefixes
from dspine_cuda.serving_prompts import longest_piece
from dspine_cuda.static.arena import ArenaShape
from dspine_cuda.static.prompts import Program, PromptSteps
from dspine_cuda.static.slots import SlotArena
from dspine_cuda.targets import load, moe
from dspine_cuda.targets.hybrid import HybridTarget
from dspine_cuda.targets.moe import SparseMlp
from tests.helpers.drafters import drafter_folder
from tests.helpers.hybrids import FAMILIES as HYBRIDS
from tests.helpers.hybrids import save_hybrid
from tests.helpers.models import one_thread, prompt, save_tiny
from tests.serving.batches import FixedCosts
from tests.serving.slot_prompts import CONTEXT, PIECES, check_piece, memory_of, poisoned, same_bits
from tests.serving.slot_runs import BLOCK, COSTS, turn

SLOTS = 3


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_moe_text"])
def folder(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    (save_tiny if request.param == "qwen3" else save_hybrid)(root / "t", request.param, max_position_embeddings=CONTEXT)
    head = RUNTIME.load_target(root / "t", device="cpu", dtype="float32").head_weight()
    drafter_folder(root / "d", "dspine", BLOCK, head, 5, head_dim=16)
    return root


@pytest.fixture(scope="module")
def pair(folder):
    target = RUNTIME.load_target(folder / "t", device="cpu", dtype="float32")
    return target, load_drafter(folder / "d", target)


def rounds_of(pair, **options):
    slots = SlotGraphs(*pair, SLOTS, CONTEXT, EagerRunner, **options)
    return SlotRounds(Engine(*pair, None, "torch", "", "", None), slots, FixedCosts(COSTS, {1: 0.01, 4: 0.01}))


@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_a_piece_is_the_eager_prefill(pair, pieces):
    """Logits, K/V, the drafter's context, states and windows, in a slot whose memory holds no numbers; the others keep every
    bit of theirs."""
    slots = poisoned(SlotGraphs(*pair, SLOTS, CONTEXT, EagerRunner))
    check_piece(pair, slots, 1, pieces)


def test_a_prompt_without_tokens_changes_nothing(pair):
    """What a capture runs: states and windows keep their bits, rows go to scrap."""
    slots = poisoned(SlotGraphs(*pair, SLOTS, CONTEXT, EagerRunner))
    slots.read(0, 0, prompt(40)[0].tolist())
    before = [[part.clone() for part in memory_of(slots.arena, slot)] for slot in range(SLOTS)]
    steps = slots._prompts.steps
    steps.send(0, 0, [])
    for program in steps.programs(512, CONTEXT):
        steps.read(program)
    assert all(same_bits(kept, memory_of(slots.arena, slot)) for slot, kept in enumerate(before))


def solo(pair, ids, params):
    loop = DecodingLoop(*pair, ids, params, StaticPolicy())
    list(loop.run())
    return loop


@pytest.mark.parametrize("chunk", [32, 700])
def test_answers_are_their_solo_runs(pair, chunk):
    """Prompts around every bucket and of several pieces, one beside another; with `--graphs`' own loop, and sampled too."""
    rounds, running, found = rounds_of(pair), [], []
    for i, count in enumerate((1, 31, 32, 33, 64, 65, 130, 513)):
        sampling = {"temperature": 0.9, "seed": i, "top_k": 30} if i % 3 == 2 else {}
        params = DecodingParams(max_tokens=12, prefill_chunk=chunk, break_even=0)
        params = replace(params, sampling=replace(params.sampling, **sampling))
        loop, reason = rounds.loop(pair[1], prompt(count, seed=count)[0].tolist(), params, StaticPolicy(), bool(sampling))
        assert loop is not None, reason
        steps = 0
        while loop.reading_prompt:
            waits = loop.awaiting
            result, steps = loop.step(), steps + 1
            assert bool(result.events) is waits  # the token comes a step after the last piece
            turn(rounds, running)
        assert steps == 1 + -(-count // min(chunk, 512)) and loop.stats.prefill_seconds > 0
        running, found = [*(each for each in running if each.finish_reason is None), loop], [*found, loop]
        while len(running) == SLOTS:
            turn(rounds, running)
            running = [each for each in running if each.finish_reason is None]
    while running:
        turn(rounds, running)
        running = [each for each in running if each.finish_reason is None]
    for loop in found:
        want = solo(pair, loop.prompt.tolist(), loop.params)
        assert loop.output == want.output and loop.reader == "captured" and want.reader == "eager"


def test_prefixes_are_reused_bit_for_bit(pair):
    """A warm prompt is read by the programs of a cold one; rows that the eager prefill made are another reader's."""
    hybrid = isinstance(pair[0], HybridTarget)
    prefixes = PrefixCache(HybridPrefixes() if hybrid else TorchPrefixes(), 10**8, grain=32)
    shared, ends = prompt(70, seed=9)[0].tolist(), ([5, 6, 7], [8, 9] * 20, [4] * 9)
    rounds = rounds_of(pair)

    def run(ids, slots=True):
        params = DecodingParams(max_tokens=6, prefill_chunk=32, break_even=0)
        loop = rounds.loop(pair[1], ids, params, StaticPolicy(), False)[0] if slots else None
        loop = loop or DecodingLoop(*pair, ids, params, StaticPolicy())
        reused = prefixes.fill(loop)
        while loop.reading_prompt:
            loop.step()
            prefixes.passed(loop)
        prefixes.keep(loop.prompt, loop)
        caches = (getattr(loop.cache, "kv", loop.cache).store, loop.draft_cache._store)
        rows = [x[..., : len(ids), :].clone() for x in caches]
        rows += [loop.cache.states.clone(), loop.cache.windows.clone()] if hybrid else []
        rounds.release(loop)
        return reused, rows, loop.output

    assert run([*shared, *ends[0]], slots=False)[0] == 0
    assert run([*shared, *ends[0]])[0] == 0 and run([*shared, *ends[2]], slots=False)[0] == 64
    reused, warm, text = run([*shared, *ends[1]])
    prefixes.clear()
    none, cold, wanted = run([*shared, *ends[1]])
    assert (reused, none) == (64, 0) and text == wanted
    assert all(torch.equal(one, other) for one, other in zip(warm, cold, strict=True))


def test_programs(pair):
    """A piece always meets the same program, and the store holds its context."""
    steps = PromptSteps(*pair, SlotArena(*pair, ArenaShape(CONTEXT, 1, BLOCK)))
    found = {steps.program(start, count) for start in range(0, CONTEXT - 1, 7) for count in range(1, min(512, CONTEXT - start))}
    assert steps.program(0, 1) == Program(32, 256) and steps.program(225, 1) == Program(32, 512)
    assert steps.program(128, 128) == Program(128, 256)
    assert all(program.context <= steps.arena.shape.store for program in found)
    assert set(steps.programs(32, 512)) == {Program(32, 256), Program(32, 512)}
    assert len(steps.programs(512, 1024)) <= 15
    small = PromptSteps(*pair, SlotArena(*pair, ArenaShape(20, 1, BLOCK)))
    assert (small.sizes, small.longest) == ([32], 20) and small.program(0, 20) == Program(32, 32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", *HYBRIDS])
def test_nothing_reads_the_device(family, dtype, tmp_path, monkeypatch):
    """On tensors without numbers, any read and any shape that depends on one raises; the code is that of CUDA."""
    (save_hybrid if family in HYBRIDS else save_tiny)(tmp_path / "t", family, max_position_embeddings=CONTEXT)
    head = RUNTIME.load_target(tmp_path / "t", device="cpu", dtype="float32").head_weight()
    drafter_folder(tmp_path / "d", "dspine", BLOCK, head, 5, head_dim=16)
    monkeypatch.setattr(load, "choose_device", torch.device)
    monkeypatch.setattr(moe, "can_group", lambda weight: weight.dtype == torch.bfloat16)
    target = RUNTIME.load_target(tmp_path / "t", device="meta", dtype=dtype)
    drafter = load_drafter(tmp_path / "d", target)
    steps = PromptSteps(target, drafter, SlotArena(target, drafter, ArenaShape(CONTEXT, 2, BLOCK)))
    with reference_only():
        for program in steps.programs(128, 512):
            steps.read(program)


def test_refusals(pair, monkeypatch):
    """Experts that are counted on the host: fewer rows at once, or the eager prefill; it says which."""
    mlp = object.__new__(SparseMlp)
    mlp.top_k, mlp.gate_up, mlp.down = 8, torch.zeros(4, 16, 8), torch.zeros(4, 8, 16)
    target = object.__new__(HybridTarget)
    target.device, target.layers = torch.device("cuda"), [SimpleNamespace(mlp=mlp)]
    assert longest_piece(target) == 256
    mlp.top_k = 200
    assert longest_piece(target) == 0
    monkeypatch.setattr(serving_prompts, "longest_piece", lambda _: 64)
    assert "up to 64 tokens" in SlotGraphs(*pair, 1, CONTEXT, EagerRunner).prompts
    monkeypatch.setattr(serving_prompts, "longest_piece", lambda _: 0)
    slots = SlotGraphs(*pair, 1, CONTEXT, EagerRunner)
    assert slots.piece == 0 and slots.prompts == "eager: experts of 32 rows are counted on the host"


def test_the_eager_prefill_can_be_had(pair):
    rounds = rounds_of(pair, prompts=False)
    assert rounds.slots.prompts == "eager: switched off"
    rounds.slots.prepare_prompts(128)
    ids = prompt(40)[0].tolist()
    loop, _ = rounds.loop(pair[1], ids, DecodingParams(max_tokens=3), StaticPolicy(), False)
    result = loop.step()
    assert len(result.events) == 1 and not loop.reading_prompt and loop.reader == "eager"
    assert loop.output == solo(pair, ids, replace(loop.params, max_tokens=1)).output


def test_a_piece_that_does_not_fit_is_refused(pair):
    slots = SlotGraphs(*pair, 1, CONTEXT, EagerRunner)
    for start, count in ((0, 513), (CONTEXT - 3, 4), (0, 0)):
        with pytest.raises(DSpineError, match="piece"):
            slots.read(0, start, [3] * count)
