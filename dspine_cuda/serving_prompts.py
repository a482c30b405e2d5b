"""Prompts of the server's slots as CUDA graphs: one for each number of rows and each context (`static.prompts`).

Graphs for contexts of up to `COMMON` tokens are captured at the start, the others when a prompt first gets there; nothing live
is written while one is captured, so sequences may be running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dspine.common.errors import DSpineError, OutOfMemory
from dspine.common.serving.slot_prompts import CAPTURED, EAGER
from dspine_cuda.graphs import capture
from dspine_cuda.static.arena import GIB
from dspine_cuda.static.prompts import ROWS, Program, PromptSteps, prompt_bytes
from dspine_cuda.static.slots import SlotArena
from dspine_cuda.targets.hybrid import HybridTarget
from dspine_cuda.targets.moe import SparseMlp

COMMON = 1024  # tokens of context


def longest_piece(target: Any) -> int:
    """Rows of the largest program that this target allows, 0: none. Experts without grouped products read their counts on the
    host when there are many rows, and cannot be captured then."""
    if target.device.type != "cuda" or not isinstance(target, HybridTarget):
        return ROWS[-1]
    sparse = [layer.mlp for layer in target.layers if isinstance(layer.mlp, SparseMlp)]
    return max((rows for rows in ROWS if not any(mlp.reads_host(rows) for mlp in sparse)), default=0)


class SlotPrompts:
    """`protocols.Slots.read` and what belongs to it. `reason` says how prompts are read; `piece` is 0 where eagerly."""

    def __init__(
        self, target: Any, drafter: Any | None, arena: SlotArena, *, wanted: bool = True, pool: Any = None
    ) -> None:  # fmt: skip
        """wanted: false leaves prompts to the eager prefill. pool: of the graphs; None runs the steps without graphs."""
        longest = longest_piece(target)
        self.steps = PromptSteps(target, drafter, arena, longest) if wanted and longest else None
        self._arena, self._pool = arena, pool
        self._programs: dict[Program, Callable[[], None]] = {}
        if self.steps is not None:
            how = "steps without graphs" if pool is None else "a graph a piece"
            self.piece, self.reason = self.steps.longest, f"{CAPTURED}: pieces of up to {self.steps.longest} tokens, {how}"
        else:
            why = "switched off" if not wanted else f"experts of {ROWS[0]} rows are counted on the host"
            self.piece, self.reason = 0, f"{EAGER}: {why}"

    def read(self, slot: int, start: int, tokens: Sequence[int]) -> Tensor:
        """`Slots.read`."""
        if self.steps is None or not 1 <= len(tokens) <= self.piece or start + len(tokens) > self._arena.shape.tokens:
            raise DSpineError(
                f"a piece of {len(tokens)} prompt tokens behind {start}: pieces have 1 to {self.piece}, a slot holds "
                f"{self._arena.shape.tokens}; report this"
            )
        run = self._ready(self.steps.program(start, len(tokens)))
        self.steps.send(slot, start, tokens)
        run()
        return self.steps.logits

    def prepare(self, chunk: int) -> None:
        """`Slots.prepare_prompts`."""
        if self.steps is not None and self._pool is not None:
            for program in self.steps.programs(min(chunk, self.piece), COMMON):
                self._ready(program)

    @property
    def nbytes(self) -> int:
        """Of what the largest program works with, 0 without programs."""
        return 0 if self.steps is None else prompt_bytes(self.steps.target, self.steps.drafter, self._arena.shape)

    def close(self) -> None:
        """Free the graphs."""
        self._programs.clear()

    def _ready(self, program: Program) -> Callable[[], None]:
        if program not in self._programs:
            self._programs[program] = self._make(program)
        return self._programs[program]

    def _make(self, program: Program) -> Callable[[], None]:
        """What runs a program. Warming up and capturing reads no token into no slot: scrap rows aside, nothing changes."""
        steps, device = self.steps, self._arena.device
        assert steps is not None
        if self._pool is None:
            return lambda: steps.read(program)
        steps.send(0, 0, [])
        free = torch.cuda.mem_get_info(device)[0]
        try:
            with torch.cuda.device(device), torch.inference_mode():
                graph = capture(lambda: steps.read(program), device, self._pool)
                graph.replay()  # the first one makes it executable
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfMemory(
                f"graphs: out of memory while capturing prompts of {program.context} tokens: {free / GIB:.2f} GiB were free; "
                "lower --max-context or --max-concurrency, or use --graphs off"
            ) from error
        return graph.replay
