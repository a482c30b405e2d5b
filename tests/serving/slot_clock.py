"""The server's rounds in slots on a clock of its own: a device with a table of what graphs take, a host that takes its share,
and texts of which it is known which drafts come true. No time passes while it runs, and nothing is random twice."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from dspine.common.bench.trace import load_trace
from dspine.common.decoding import DecodingParams
from dspine.common.protocols import Engine
from dspine.common.selection.policies import StaticPolicy
from dspine.common.serving import host_share
from dspine.common.serving import slots as slots_module
from dspine.common.serving.slots import SlotRounds

ANSWER, PROMPT = 64, [5, 6, 7]


class Clock:
    """Seconds of the host, and until when the device is busy."""

    def __init__(self) -> None:
        self.now = self.device = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


class ClockSlots:
    """`protocols.Slots` whose graphs take device(size, width) seconds and each launch `launching` of the host. texts[slot]:
    1 where a draft of that position comes true."""

    reason, prompts, nbytes, tokens, piece = "a clock", "not read", 0, 4096, 0

    def __init__(self, clock: Clock, device: Callable[[int, int], float], rows: int, count: int, launching: float) -> None:
        self.clock, self.device, self.rows, self.count, self.launching = clock, device, rows, count, launching
        self.widths = [*(w for w in (2, 4, 8, 12, 16) if w < rows), rows]
        self.sizes = [*(n for n in (1, 2, 4, 8, 16, 32) if n < count), count]
        self.drafter = SimpleNamespace(config=SimpleNamespace(num_proposals=rows - 1, block_size=rows), info=None)
        self.texts: dict[int, np.ndarray] = {}
        self.place: dict[int, int] = {}
        self.ran: list[tuple[int, int]] = []

    def caches(self, slot, drafting):
        return SimpleNamespace(length=0), SimpleNamespace(length=0) if drafting else None

    def begin(self, slot, length, anchor, remaining, uniforms):
        self.place[slot] = 0

    def end(self, slot):
        pass

    def move(self, slot, to, length, drafting):
        self.texts[to], self.place[to] = self.texts[slot], self.place[slot]
        return self.caches(to, drafting)

    def reach(self, slots):
        return next(size for size in self.sizes if size >= slots)

    def ready(self, kind, limits, drafting):
        return True

    def drop(self, kind):
        raise AssertionError("a round failed")

    def launch(self, kind, limits, drafting):
        clock, most = self.clock, max(limits)
        clock.spend(self.launching)
        graph = self.reach(len(limits)), 1 if most < 2 else next(w for w in self.widths if w >= most)
        self.ran.append(graph)
        seconds = self.device(*graph)
        clock.device = ends = max(clock.device, clock.now) + seconds
        reports = [self._report(slot, limit) if limit else None for slot, limit in enumerate(limits)]

        def read():
            clock.now = max(clock.now, ends)
            return reports, seconds

        return read

    def _report(self, slot, limit):
        left = len(self.texts[slot]) - self.place[slot]
        if not left:  # it has ended, and the host does not know yet
            return SimpleNamespace(tokens=[], accepted=0, drafts=[], finite=True)
        tried = self.texts[slot][self.place[slot] :][: min(limit, left) - 1]
        accepted = int(np.argmin([*tried, 0]))
        self.place[slot] += accepted + 1
        return SimpleNamespace(tokens=[9] * (accepted + 1), accepted=accepted, drafts=[9] * (limit - 1), finite=True)

    def measure(self):
        """As `SlotGraphs.measure` does it."""
        verify, draft = {}, {}
        for size in self.sizes:
            plain = verify[size, 1] = self.device(size, 1)
            whole = {w: self.device(size, w) for w in self.widths}
            draft[size] = min(whole.values()) - plain
            verify |= {(size, w): seconds - draft[size] for w, seconds in whole.items()}
        return verify, draft


def texts_of(rates, count, seed=0):
    """[texts, ANSWER - 1] of 0 and 1: each text's drafts come true with its own chance."""
    rng = np.random.default_rng(seed)
    chosen = np.asarray(rates)[np.arange(count) % len(rates)]
    return (rng.random((count, ANSWER - 1)) < chosen[:, None]).astype(int)


def texts_of_trace(name, count):
    """As many texts that begin at different places of a real pair's trace."""
    flags = [flag for _, accepted in load_trace(name).rounds for flag in [1] * accepted + [0]]
    return np.array([np.roll(flags, -37 * i)[: ANSWER - 1] for i in range(count)])


def serve(
    monkeypatch, texts, clients, device, *, side="auto", host=1e-3, launching=1e-4, prefill=0.0, queued=0.0, rows=16, slots=32,
    wrong=1.0,
):  # fmt: skip
    """All texts through so many clients: tokens a second of the second half, and the graphs (slots, width) of its rounds. host:
    seconds of a turn besides launching; prefill: of reading a prompt, during which no round is launched; queued: of the device
    behind that; wrong: what plain graphs took at the start over the truth."""
    clock = Clock()
    for module in (slots_module, host_share):
        monkeypatch.setattr(module, "perf_counter", clock)
    made = ClockSlots(clock, lambda b, w: device(b, w) * (wrong if w == 1 else 1.0), rows, slots, launching)
    target = SimpleNamespace(info=SimpleNamespace(context_length=4096, name="clock"))
    rounds = SlotRounds(Engine(target, made.drafter, None, "clock", "", "", None), made)
    made.device = device
    waiting, running, done = list(range(len(texts))), [], 0
    half = None

    def tell(loop, result):
        nonlocal done
        clock.spend(host / max(len(running), 1))
        if loop.finish_reason is not None:
            done += 1
            rounds.release(loop)

    while waiting or running:
        while waiting and len(running) < clients:
            text = texts[waiting.pop(0)]
            drafter = made.drafter if side != "plain" else None
            params = DecodingParams(max_tokens=len(text) + 1, break_even=0)
            loop, why = rounds.loop(drafter, PROMPT, params, StaticPolicy(), side == "full")
            assert loop is not None, why
            made.texts[loop.slot] = text
            clock.spend(prefill)
            clock.device = max(clock.device, clock.now) + queued
            loop._read, loop.stats.generated_tokens, loop.output = len(PROMPT), 1, [9]
            loop.cache.length = len(PROMPT)
            running.append(loop)
        rounds.run(running, tell)
        running = [loop for loop in running if loop.finish_reason is None]
        if half is None and done >= len(texts) // 2:
            half = clock.now, done, len(made.ran)
    assert half is not None
    return (done - half[1]) * ANSWER / (clock.now - half[0]), made.ran[half[2] :]
