"""Metrics of a run: losses, speed, and model FLOPs use."""

from __future__ import annotations

import logging
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from dspine_cuda.training.batches import Batch
from dspine_cuda.training.flops import peak_flops, step_flops
from dspine_cuda.training.losses import LossSums

log = logging.getLogger("dspine.training")


class Meter:
    """Sums of metrics on the device, read once every `flush`; wall time without pauses."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before, self._started = trainer.elapsed, time.perf_counter()
        self._mark = self._started
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []
        self._last = (0.0, 0.0)
        self.lines: list[dict[str, Any]] = []
        self._flops = [0.0, 0.0]  # drafter, target
        self._tokens = 0
        self._peak = peak_flops(trainer.device, getattr(torch, trainer.config.run.dtype))

    def speed(self) -> dict[str, float]:
        """Medians over the metrics lines after the first (which compiles), and the peak memory on CUDA."""
        lines = self.lines[1:] or self.lines
        names = ("ms_per_step", "blocks_per_second", "context_tokens_per_second", "tokens_per_second", "drafter_mfu", "mfu")
        medians = {name: statistics.median(line[name] for line in lines) for name in names if lines and name in lines[0]}
        peak = {"peak_memory_bytes": lines[-1]["peak_memory_bytes"]} if lines and "peak_memory_bytes" in lines[-1] else {}
        return medians | peak

    def count(self, batch: Batch) -> None:
        """Note the work of one whole batch, still on the host."""
        trainer = self._trainer
        loss = trainer.config.loss
        work = step_flops(
            trainer.shape, trainer.target.shape, batch, refinement=loss.refinement, alignment=loss.alignment,
            cached=batch.states is not None,
        )  # fmt: skip
        self._flops[0] += work.drafter
        self._flops[1] += work.target
        self._tokens += int((batch.documents >= 0).sum())

    def add(self, totals: Tensor, loss: Tensor, norm: Tensor, rate: float, beta: float) -> None:
        self._rows.append((totals, loss, norm))
        self._last = (rate, beta)

    def total(self) -> float:
        """Seconds of this run, earlier parts included."""
        return self._before + time.perf_counter() - self._started

    def pause(self, work) -> None:  # noqa: ANN001
        """Do `work` outside the step timing."""
        self.flush()
        work()
        self._mark = time.perf_counter()

    def flush(self) -> dict[str, Any]:
        """Write one metrics line over the steps since the last; the only read of the device."""
        if not self._rows:
            return {}
        trainer, steps = self._trainer, len(self._rows)
        totals = torch.stack([row[0] for row in self._rows]).double().cpu()
        losses, norms = (torch.stack([row[i] for row in self._rows]).double().cpu() for i in (1, 2))
        seconds = time.perf_counter() - self._mark
        self._mark, self._rows = time.perf_counter(), []
        sums = dict(zip(LossSums.NAMES, totals.sum(dim=0).tolist(), strict=True))
        data, layers = trainer.config.data, trainer.shape.num_layers
        denominator = max(sums["weight"], 1e-12)
        row = {
            "kind": "train",
            "step": trainer.step,
            "loss": losses.mean().item(),
            "ce": sums["ce"] / denominator,
            "l1": sums["l1"] / denominator,
            "refined_ce": sums["refined_ce"] / max(sums["covered"], 1e-12),
            "refined_l1": sums["refined_l1"] / max(sums["heavy"], 1e-12),
            "coverage": sums["covered"] / denominator,
            "alignment": sums["alignment"] / denominator / layers,
            "head": sums["head"] / max(sums["head_count"], 1e-12),
            "learning_rate": self._last[0],
            "beta": self._last[1],
            "gradient_norm": norms.mean().item(),
            "ms_per_step": 1000.0 * seconds / steps,
            "blocks_per_second": steps * data.rows_per_step * data.num_anchors / seconds,
            "context_tokens_per_second": steps * data.rows_per_step * data.sequence_length / seconds,
            "tokens_per_second": self._tokens / seconds,
            "skipped_steps": int(trainer.optimizer.skipped),
        }
        if self._peak is not None:
            available = seconds * self._peak * trainer.ranks.world
            row["drafter_mfu"], row["mfu"] = self._flops[0] / available, sum(self._flops) / available
        self._flops, self._tokens = [0.0, 0.0], 0
        if trainer.device.type == "cuda":
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(trainer.device)
        blamed = trainer.optimizer.blamed()
        if blamed:
            row["non_finite_gradients"] = blamed
            log.warning("step %d: gradient not finite, update skipped; parameters: %s", trainer.step, ", ".join(blamed))
        trainer.write(row)
        self.lines.append(row)
        return row
