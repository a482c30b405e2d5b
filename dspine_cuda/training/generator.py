"""Batched generation by the frozen target, for training data and evaluation texts.

Every slot of the batch runs its own sequence at its own position over one static cache; a finished slot takes the next
job at once. Prompt tokens go through the same step as answers (forced instead of drawn), so one captured CUDA graph serves
everything. Draws come from counter-based uniforms keyed by (seed, job, position): a job's text does not depend on its
neighbours, up to the rounding of batched products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine.common.sampling import DRAW, sample_index, uniforms
from dspine_cuda.training.loops import TAIL, cut_loop, looping_tails
from dspine_cuda.training.target import FrozenTarget

STEPS_A_READ = 16  # steps between two looks of the host
READS_A_LOOP_CHECK = 4
WINDOW = 256  # the cache is read up to the next multiple of this
MAX_BATCH = 2048


@dataclass(frozen=True)
class Job:
    """number: keys its draws; tokens int [n]: the prompt; limit: new tokens at most; temperature 0 is greedy."""

    number: int
    tokens: np.ndarray
    limit: int
    temperature: float = 0.0


@dataclass(frozen=True)
class Answer:
    """tokens int [n]: everything after the prompt, the stop token included; reason: stop, length or loop."""

    job: Job
    tokens: np.ndarray
    reason: str


class BatchGenerator:
    """Invariant between steps: a slot that is not done has K/V of tokens [0, position) and still has to process `position`."""

    def __init__(
        self,
        target: FrozenTarget,
        *,
        capacity: int,
        batch: int | None = None,
        stop_ids: Iterable[int],
        seed: int = 0,
        cut_loops: bool = True,
        graphs: bool | None = None,
    ) -> None:
        """capacity: longest sequence in tokens. batch None: what fits on the device. graphs None: on CUDA."""
        if capacity > target.info.context_length:
            raise DSpineError(
                f"sequences of {capacity} tokens asked for, the target's context holds {target.info.context_length}"
            )
        self.target, self.seed, self.cut_loops = target, seed, cut_loops
        self.capacity, self.device = capacity, target.device
        self.width = -(-capacity // 8) * 8
        self.batch = batch or fitting_batch(target, self.width)
        self.graphs = target.device.type == "cuda" if graphs is None else graphs
        shape, device, size = target.shape, target.device, self.batch
        stops = sorted(stop_ids)
        self.stops = torch.tensor(stops or [-1], device=device)
        cache = (shape.num_layers, 2, size, shape.num_kv_heads, self.width, shape.head_dim)
        self.cache = torch.zeros(cache, dtype=target.dtype, device=device)
        self.ids = torch.zeros(size, self.width + 1, dtype=torch.int64, device=device)
        self.draws = torch.zeros(size, self.width + 1, dtype=torch.float32, device=device)
        self.position, self.forced, self.limit, self.length = (
            torch.zeros(size, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.temperature = torch.zeros(size, dtype=torch.float32, device=device)
        self.done = torch.ones(size, dtype=torch.bool, device=device)
        self._rows = torch.arange(size, device=device)
        self._captured: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._jobs: list[Job | None] = [None] * size
        self._reads = 0

    @torch.no_grad()
    def run(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """Answers in the order in which they end."""
        source = iter(jobs)
        highest = np.zeros(self.batch, dtype=np.int64)  # positions as the host knows them
        while True:
            self._refill(source, highest)
            active = np.array([job is not None for job in self._jobs])
            if not active.any():
                return
            sampled = any(job is not None and job.temperature > 0 for job in self._jobs)
            self._advance(int(highest[active].max()) + STEPS_A_READ, sampled)
            yield from self._finished(highest)

    def _refill(self, source: Iterator[Job], highest: np.ndarray) -> None:
        slots, jobs = [], []
        for slot, held in enumerate(self._jobs):
            if held is not None:
                continue
            job = next(source, None)
            if job is None:
                break
            self._check(job)
            self._jobs[slot] = job
            slots.append(slot)
            jobs.append(job)
        if not slots:
            return
        ids = np.zeros((len(slots), self.width + 1), dtype=np.int64)
        draws = np.zeros((len(slots), self.width + 1), dtype=np.float32)
        for row, job in enumerate(jobs):
            ids[row, : len(job.tokens)] = job.tokens
            if job.temperature > 0:
                draws[row] = uniforms(self.seed, job.number, 0, self.width + 1)[:, DRAW]
        where = torch.tensor(slots, device=self.device)
        self.ids[where] = torch.from_numpy(ids).to(self.device)
        self.draws[where] = torch.from_numpy(draws).to(self.device)
        self.forced[where] = torch.tensor([len(job.tokens) for job in jobs], device=self.device)
        self.limit[where] = torch.tensor([min(job.limit, self.capacity - len(job.tokens)) for job in jobs], device=self.device)
        self.temperature[where] = torch.tensor([job.temperature for job in jobs], device=self.device, dtype=torch.float32)
        self.position[where], self.length[where], self.done[where] = 0, 0, False
        highest[slots] = 0

    def _check(self, job: Job) -> None:
        if not 0 < len(job.tokens) < self.capacity or job.limit < 1:
            raise DSpineError(
                f"job {job.number}: a prompt of {len(job.tokens)} tokens and {job.limit} new ones do not fit a capacity of "
                f"{self.capacity}"
            )

    def _advance(self, reach: int, sampled: bool) -> None:
        """STEPS_A_READ steps; no position goes beyond `reach`."""
        window = min(-(-reach // WINDOW) * WINDOW, self.width)
        graph = self._captured.get((window, sampled))
        for _ in range(STEPS_A_READ):
            if graph is None:
                self._step(window, sampled)
            else:
                graph.replay()
        if graph is None and self.graphs:  # the steps above have warmed it up
            torch.cuda.synchronize(self.device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(window, sampled)
            self._captured[window, sampled] = graph

    def _step(self, window: int, sampled: bool) -> None:
        """One token of every slot; done slots repeat theirs and change nothing."""
        position, following = self.position, self.position + 1
        token = self.ids.gather(1, position[:, None])
        hidden = self.target.decode(token, position[:, None], self._attends(window))
        logits = self.target.head(hidden[:, 0])
        chosen = logits.argmax(dim=-1)
        if sampled:
            hot = self.temperature > 0
            scaled = logits / torch.where(hot, self.temperature, 1.0)[:, None]
            draw = self.draws.gather(1, following[:, None])[:, 0]
            chosen = torch.where(hot, sample_index(torch.softmax(scaled, dim=-1), draw), chosen)
        given = self.ids.gather(1, following[:, None])[:, 0]
        inside, moving = following < self.forced, ~self.done
        chosen = torch.where(inside | self.done, given, chosen)
        self.ids.scatter_(1, following[:, None], chosen[:, None])
        count = following + 1 - self.forced
        ended = moving & ~inside & ((chosen[:, None] == self.stops).any(dim=1) | (count >= self.limit))
        self.length.copy_(torch.where(ended, following + 1, self.length))
        self.done |= ended
        self.position.copy_(torch.where(moving & ~ended, following, position))

    def _attends(self, window: int) -> list[Callable[[Tensor, Tensor, Tensor], Tensor]]:
        size, kv_heads = self.batch, self.target.shape.num_kv_heads
        seen = torch.arange(window, device=self.device)[None, :] <= self.position[:, None]
        bias = torch.zeros(size, 1, 1, window, dtype=self.target.dtype, device=self.device)
        bias = bias.masked_fill_(~seen[:, None, None, :], float("-inf"))

        def attend_of(index: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
            keys, values = self.cache[index, 0], self.cache[index, 1]

            def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                keys[self._rows, :, self.position] = key[:, :, 0]
                values[self._rows, :, self.position] = value[:, :, 0]
                grouped = query.reshape(size, kv_heads, -1, query.shape[-1])  # query heads of one K/V head become its rows
                mask = bias.expand(size, kv_heads, grouped.shape[2], window)
                mixed = F.scaled_dot_product_attention(grouped, keys[:, :, :window], values[:, :, :window], attn_mask=mask)
                return mixed.reshape(size, -1, 1, query.shape[-1])

            return attend

        return [attend_of(index) for index in range(self.target.shape.num_layers)]

    def _finished(self, highest: np.ndarray) -> Iterator[Answer]:
        done, length = self.done.cpu().numpy(), self.length.cpu().numpy()
        highest[:] = self.position.cpu().numpy()
        self._reads += 1
        if self.cut_loops and self._reads % READS_A_LOOP_CHECK == 0:
            self._stop_loops(done, length, highest)
        ended = [slot for slot, job in enumerate(self._jobs) if job is not None and done[slot]]
        if not ended:
            return
        rows = self.ids[torch.tensor(ended, device=self.device)].cpu().numpy()
        stops = set(self.stops.tolist())
        for slot, row in zip(ended, rows, strict=True):
            job = self._jobs[slot]
            assert job is not None
            self._jobs[slot] = None
            tokens = row[len(job.tokens) : length[slot]]
            cut = cut_loop(tokens) if self.cut_loops else None
            if cut is not None:
                yield Answer(job, tokens[:cut], "loop")
            else:
                yield Answer(job, tokens, "stop" if int(tokens[-1]) in stops else "length")

    def _stop_loops(self, done: np.ndarray, length: np.ndarray, highest: np.ndarray) -> None:
        """End slots that run in circles; updates the host's `done` and `length`."""
        running = [
            s for s, job in enumerate(self._jobs) if job is not None and not done[s] and highest[s] > len(job.tokens) + 24
        ]
        if not running:
            return
        answered = np.array([highest[s] + 1 - len(self._jobs[s].tokens) for s in running])  # type: ignore[union-attr]
        ends = torch.from_numpy(highest[running] + 1).to(self.device)
        index = (ends[:, None] - TAIL + torch.arange(TAIL, device=self.device)).clamp(min=0)
        tails = self.ids[torch.tensor(running, device=self.device)[:, None], index].cpu().numpy()
        looping = looping_tails(tails, answered)
        caught = [slot for slot, loops in zip(running, looping, strict=True) if loops]
        done[caught], length[caught] = True, highest[caught] + 1
        if caught:
            self.done[torch.tensor(caught, device=self.device)] = True


def fitting_batch(target: FrozenTarget, width: int) -> int:
    """Slots that fit: K/V of `width` tokens each and the work on their logits; 16 on the CPU."""
    if target.device.type != "cuda":
        return 16
    shape = target.shape
    slot = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * target.dtype.itemsize * width + 32 * shape.vocab_size
    free = torch.cuda.mem_get_info(target.device)[0]
    return max(1, min(MAX_BATCH, int(0.7 * free / slot) // 8 * 8))
