"""Batched generation for targets without a static-cache forward of their own: hybrids, and models of `transformers`.

The same jobs, draws and answers as `generator.BatchGenerator`, one batch after another: prompts of similar length together,
each row at its own length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dspine.common.sampling import DRAW, sample_index, uniforms
from dspine_cuda.training.generator import Answer, BatchGenerator, Job, fitting_batch
from dspine_cuda.training.loops import cut_loop
from dspine_cuda.training.target import FrozenTarget

LOOK_AHEAD = 8  # batches of jobs that are sorted by length before they are cut


class Stepper(Protocol):
    """A model with its caches: prompts in, then a token of every row at a time; logits float32 [B, V]."""

    def start(self, prompts: list[np.ndarray], capacity: int) -> Tensor: ...

    def step(self, tokens: Tensor) -> Tensor: ...


class HybridStepper:
    """`hybrid_generate`'s state: prompts padded on the right."""

    def __init__(self, target: Any) -> None:
        self.target, self.reach = target, 0

    def start(self, prompts: list[np.ndarray], capacity: int) -> Tensor:
        from dspine_cuda.training.hybrid_generate import DecodeState, prefill

        device = self.target.device
        self.reach = max(len(p) for p in prompts)
        tokens = np.zeros((len(prompts), self.reach), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        self.state = DecodeState(self.target.model, len(prompts), capacity)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        return prefill(self.target.model, self.state, torch.from_numpy(tokens).to(device), lengths)

    def step(self, tokens: Tensor) -> Tensor:
        from dspine_cuda.training.hybrid_generate import decode_step

        self.reach += 1
        return decode_step(self.target.model, self.state, tokens, self.reach)


class TransformersStepper:
    """A model of `transformers` with its own cache: prompts padded on the left."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def start(self, prompts: list[np.ndarray], capacity: int) -> Tensor:
        from transformers import DynamicCache

        device, longest = self.target.device, max(len(p) for p in prompts)
        tokens, mask = (np.zeros((len(prompts), longest), dtype=np.int64) for _ in range(2))
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
        self.mask = torch.from_numpy(mask).to(device)
        self.positions = (self.mask.cumsum(dim=1) - 1).clamp(min=0)
        self.cache = DynamicCache(config=self.target.model.config)
        logits = self._run(torch.from_numpy(tokens).to(device), self.positions)
        self.positions = self.positions[:, -1:]
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        self.positions = self.positions + 1
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        return self._run(tokens[:, None], self.positions)

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        generic = self.target.generic
        output = self.target.model.base_model(
            tokens, attention_mask=self.mask, position_ids=positions, use_cache=True, **{generic._cache_name: self.cache}
        )
        return self.target.head(output.last_hidden_state[:, -1])


class CachedGenerator:
    """`run(jobs)` as `BatchGenerator.run`; answers come batch by batch."""

    def __init__(
        self,
        target: Any,
        stepper: Stepper,
        *,
        capacity: int,
        batch: int | None = None,
        stop_ids: Iterable[int],
        seed: int = 0,
        cut_loops: bool = True,
    ) -> None:
        self.target, self.stepper, self.capacity, self.seed, self.cut_loops = target, stepper, capacity, seed, cut_loops
        self.batch = batch or (64 if target.device.type == "cuda" else 8)
        self.stops = sorted(stop_ids)

    @torch.no_grad()
    def run(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """Answers, batch by batch."""
        source = iter(jobs)
        while held := [job for _, job in zip(range(LOOK_AHEAD * self.batch), source, strict=False)]:
            held.sort(key=lambda job: len(job.tokens))
            for first in range(0, len(held), self.batch):
                yield from self._answer(held[first : first + self.batch])

    def _answer(self, jobs: list[Job]) -> Iterator[Answer]:
        device, count = self.target.device, len(jobs)
        lengths = np.array([len(job.tokens) for job in jobs])
        limits = np.minimum([job.limit for job in jobs], self.capacity - lengths)
        heat = torch.tensor([job.temperature for job in jobs], device=device, dtype=torch.float32)
        draws = np.zeros((count, int((lengths + limits).max()) + 1), dtype=np.float32)
        for row, job in enumerate(jobs):
            if job.temperature > 0:
                draws[row] = uniforms(self.seed, job.number, 0, draws.shape[1])[:, DRAW]
        written: list[np.ndarray] = []
        running = np.ones(count, dtype=bool)
        ends = np.zeros(count, dtype=np.int64)
        logits = self.stepper.start([job.tokens for job in jobs], self.capacity)
        while running.any():
            place = torch.from_numpy(draws[np.arange(count), np.minimum(lengths + len(written), draws.shape[1] - 1)]).to(device)
            chosen = logits.argmax(dim=-1)
            if bool((heat > 0).any()):
                scaled = logits / torch.where(heat > 0, heat, 1.0)[:, None]
                chosen = torch.where(heat > 0, sample_index(torch.softmax(scaled, dim=-1), place), chosen)
            tokens = chosen.cpu().numpy()
            written.append(tokens)
            over = running & (np.isin(tokens, self.stops) | (len(written) >= limits))
            ends[over], running = len(written), running & ~over
            if running.any():
                logits = self.stepper.step(chosen)
        table = np.stack(written, axis=1)
        for row, job in enumerate(jobs):
            answer = table[row, : ends[row]]
            cut = cut_loop(answer) if self.cut_loops else None
            if cut is not None:
                yield Answer(job, answer[:cut], "loop")
            else:
                yield Answer(job, answer, "stop" if int(answer[-1]) in self.stops else "length")


def generator_for(target: Any, *, most: int | None = None, **settings: Any) -> BatchGenerator | CachedGenerator:
    """The generator that fits a frozen target; settings as of `BatchGenerator` (capacity, batch, stop_ids, seed, cut_loops).
    most: jobs there will be, no more slots are made."""
    if most is not None and isinstance(target, FrozenTarget):
        settings["batch"] = min(most, settings.get("batch") or fitting_batch(target, settings["capacity"]))
    if isinstance(target, FrozenTarget):
        return BatchGenerator(target, **settings)
    stepper = TransformersStepper(target) if hasattr(target, "generic") else HybridStepper(target)
    return CachedGenerator(target, stepper, **settings)
