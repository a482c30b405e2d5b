"""Sequences in slots of one arena that join, end and are cancelled at random; on the CPU and on CUDA."""

from __future__ import annotations

import numpy as np
import torch

from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.errors import DSpineError
from dspine.common.protocols import Engine
from dspine.common.sampling import SamplingParams
from dspine.common.selection.policies import StaticPolicy
from dspine.common.serving.slots import SlotRounds
from dspine_cuda.graphs import EagerRunner
from dspine_cuda.serving_graphs import SlotGraphs
from tests.helpers.models import VOCAB
from tests.serving.batches import FixedCosts

BLOCK, SLOTS, TOKENS, COUNT = 6, 4, 64, 18
PROMPTS = [np.random.default_rng(i).integers(3, VOCAB, size=n).tolist() for i, n in enumerate((5, 17, 23, 9, 12, 7))]
COSTS = {(1, 1): 1.0, (1, 6): 1.0, (4, 1): 1.0, (4, 6): 1.0}


class Capturing(EagerRunner):
    """Wants every mode prepared, and prepares it as graphs are captured: by rounds in which every slot is parked."""

    def __init__(self, round_):
        super().__init__(round_)
        self.modes = set()

    def has(self, mode):
        return mode in self.modes

    def prepare(self, mode):
        assert not self._reports and mode not in self.modes
        self.modes.add(mode)
        for _ in range(2):
            self.launch(mode)
        self.drop()

    def launch(self, mode):
        assert mode in self.modes and len(self._reports) < 2
        super().launch(mode)


class Book:
    """Mends greedy drafts from known texts, on the device, so that rounds of every length occur."""

    def __init__(self, make_runner, device):
        self.make_runner = make_runner
        self.table = torch.full((SLOTS, 2 * TOKENS), -1, dtype=torch.int32, device=device)

    def write(self, slot, text):
        self.table[slot] = -1
        self.table[slot, : len(text)] = torch.tensor(list(text), dtype=torch.int32)

    def runner(self, round_):
        made, arena = round_.draft, round_.arena

        def draft():
            made()
            if round_.rules.rule == "greedy":
                start = arena.generated.to(torch.int64)[:, None]
                slot = torch.arange(len(start), device=arena.device)[:, None]
                offset = torch.arange(BLOCK - 1, device=arena.device)
                right = self.table[: len(start)].gather(1, start + offset)
                good = (offset < (start * 7 + slot) % BLOCK) & (right >= 0)
                arena.block[:, 1:].copy_(torch.where(good, right, arena.block[:, 1:]))

        round_.draft = draft
        return self.make_runner(round_)


def rounds_of(pair, make_runner, count=SLOTS):
    """Slots whose lengths do not follow the clock."""
    book = Book(make_runner, pair[0].device)
    slots = SlotGraphs(*pair, count, TOKENS, book.runner)
    move = slots.move

    def moved(slot, to, *rest):
        book.table[to] = book.table[slot]
        return move(slot, to, *rest)

    slots.move = moved
    made = SlotRounds(Engine(*pair, None, "torch", "", "", None), slots, FixedCosts(COSTS, {1: 0.01, 4: 0.01}))
    return made, book


def params_of(i, count=COUNT, **change):
    """Of request i: every third is sampled."""
    sampled = {"temperature": 0.9, "seed": i, "top_k": 30} if i % 3 == 2 else {}
    return DecodingParams(max_tokens=count, sampling=SamplingParams(**(sampled | change)), break_even=0)


def alone(pair, i, params, drafter=True):
    """The answer of the eager loop."""
    loop = DecodingLoop(pair[0], pair[1] if drafter else None, PROMPTS[i], params, StaticPolicy())
    return [event.token for event in loop.run()]


def join(rounds, book, pair, i, text=(), params=None, drafter=True, policy=None):
    params = params or params_of(i)
    pinned = not params.sampling.greedy
    loop, reason = rounds.loop(pair[1] if drafter else None, PROMPTS[i], params, policy or StaticPolicy(), pinned)
    assert loop is not None, reason
    book.write(loop.slot, text)
    while loop.reading_prompt:
        loop.step()
    return loop


def turn(rounds, loops):
    """One turn of the server's loop: every round is told before the next one of its sequence is settled."""

    def tell(loop, result):
        assert not isinstance(result, DSpineError), result
        assert loop.output[-len(result.events) :] == [event.token for event in result.events]
        loop.told = getattr(loop, "told", 1) + len(result.events)
        assert loop.told == len(loop.output)
        if loop.finish_reason is not None:
            rounds.release(loop)

    rounds.run([loop for loop in loops if loop.finish_reason is None], tell)


def run_at_random(rounds, book, pair, texts, seed):
    """All requests through the slots twice; [(request, its answer, whether it came to its end)], the most that ran at once."""
    rng = np.random.default_rng(seed)
    waiting = [*rng.permutation(len(PROMPTS)), *rng.permutation(len(PROMPTS))]
    running, found, most = {}, [], 0
    while waiting or running:
        while waiting and len(running) < SLOTS and rng.random() < 0.6:
            i = int(waiting.pop())
            running[join(rounds, book, pair, i, texts[i])] = i
        most = max(most, len(running))
        turn(rounds, running)
        for loop, i in list(running.items()):
            gone = rng.random() < 0.03
            if loop.finish_reason is None and gone:
                rounds.release(loop)
            if loop.finish_reason is not None or gone:
                found.append((i, loop.output, loop.finish_reason is not None))
                del running[loop]
    assert not rounds._held and sorted(rounds._free) == list(range(SLOTS))
    return found, most


def parts_of(arena, slot, lengths=TOKENS):
    """Copies of everything of a slot that a round of others must leave alone."""
    found = [arena.kv.store[:, :, slot, :, :lengths], arena.draft_cache._store[:, :, slot, :, :lengths]]
    found += [getattr(arena, name)[slot] for name in ("lengths", "anchor", "remaining", "generated", "uniforms", "pending_m")]
    if arena.pending is not None:
        found += [arena.cache.states[:, slot], arena.cache.windows[:, slot]]
        found += [getattr(arena.pending, name)[:, slot] for name in "zkg"]
    return [part.clone() for part in found]


def untouched_while_others_run(rounds, book, pair, texts):
    """Case R8: slot 0 reads its prompt piece by piece while 1 runs, 2 is empty and 3 behind the graph's reach. The answers of
    both."""
    arena = rounds.slots.arena
    for part in (arena.kv.store, arena.draft_cache._store):
        part.copy_(torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    first = join(rounds, book, pair, 2, texts[2])
    running = join(rounds, book, pair, 0, texts[0])
    turn(rounds, [first, running])
    rounds.release(first)
    params = DecodingParams(max_tokens=COUNT, prefill_chunk=6, break_even=0)
    loop, _ = rounds.loop(pair[1], PROMPTS[1], params, StaticPolicy(), False)
    assert loop.slot == 0
    while loop.reading_prompt:
        loop.step()
        before = [parts_of(arena, slot) for slot in (0, 2, 3)]
        turn(rounds, [running])
        for slot, kept in zip((0, 2, 3), before, strict=True):
            assert all(torch.equal(old, new) for old, new in zip(kept, parts_of(arena, slot), strict=True)), slot
    book.write(0, texts[1])
    while loop.finish_reason is None or running.finish_reason is None:
        turn(rounds, [loop, running])
    return loop.output, running.output
