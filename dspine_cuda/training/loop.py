"""The training loop: prefetch, forward, global normalisation, update, metrics, evaluation, checkpoints, export."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dspine.common.environment import process_group
from dspine.common.errors import BackendError, DSpineError
from dspine.common.files import raise_disk_full
from dspine.common.models import resolve_model
from dspine_cuda.drafter import DrafterModel, TorchDrafter
from dspine_cuda.training.batches import Batch, make_batch
from dspine_cuda.training.checkpointing import check_data, load_latest, save_checkpoint, trim_metrics
from dspine_cuda.training.config import TrainConfig, complete_fingerprint
from dspine_cuda.training.data import Conversation, RowStream, data_facts, load_split
from dspine_cuda.training.devices import own_device
from dspine_cuda.training.evaluate import Acceptance, held_out_greedy, simulated_acceptance
from dspine_cuda.training.export import export_drafter
from dspine_cuda.training.feature_cache import FeatureCache
from dspine_cuda.training.initial import choose_mask_token, drafter_config, new_model, starting_model, state_arrays
from dspine_cuda.training.losses import LossSums, combine
from dspine_cuda.training.meter import Meter
from dspine_cuda.training.optimizer import MasterOptimizer
from dspine_cuda.training.progress import progress_bar
from dspine_cuda.training.schedules import alignment_beta, base_share, learning_rate, replacement_probability
from dspine_cuda.training.step import LossForward
from dspine_cuda.training.target import load_frozen_target, load_tokenizer

log = logging.getLogger("dspine.training")
PREFETCH = 4
WARM_STEPS, TIMED_STEPS = 4, 20  # of the probe that turns minutes into steps: the first compile


class Prefetcher:
    """Builds batches in a thread, in order. Yields (batch, stream position after it)."""

    def __init__(
        self,
        config: TrainConfig,
        stream: RowStream,
        first_step: int,
        pin: bool,
        features: FeatureCache | None = None,
        query_rows: int = 0,
    ) -> None:
        self._query_rows = query_rows
        self._config, self._stream, self._pin, self._features = config, stream, pin, features
        self._queue: queue.Queue[Any] = queue.Queue(PREFETCH)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._work_done = self._pool.submit(self._work, first_step)

    def _work(self, step: int) -> None:
        config = self._config
        while not self._stop.is_set() and step < config.schedule.steps:
            rows = self._stream.take(config.data.rows_per_step)
            batch = make_batch(
                rows,
                num_anchors=config.data.num_anchors,
                proposals=config.model.block_size - 1,
                gamma=config.loss.gamma,
                replacement=replacement_probability(step, config.schedule),
                seed=config.run.seed,
                step=step,
                states=None if self._features is None else self._features.gather(rows),
                query_rows=self._query_rows,
            )
            self._put((batch.pin() if self._pin else batch, self._stream.position))
            step += 1

    def _put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return
            except queue.Full:
                continue

    def next(self) -> tuple[Batch, tuple[int, int]]:
        """The next batch; an error of the thread is raised here."""
        while True:
            try:
                return self._queue.get(timeout=0.5)
            except queue.Empty:
                if self._work_done.done():
                    self._work_done.result()
                    raise RuntimeError("no more batches: the loop ran past schedule.max_steps") from None

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        self._pool.shutdown()


class Ranks:
    """Data parallelism as `torchrun` sets it up; one process without it."""

    def __init__(self, device: torch.device) -> None:
        self.world, self.rank = process_group()
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def add(self, tensors: list[Tensor]) -> None:
        """Sum over ranks, in place; one message for all (float32) tensors."""
        if self.world > 1:
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(flat)
            for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def wait(self) -> None:
        """Until every rank is here."""
        if self.world > 1:
            dist.barrier()

    def share(self, batch: Batch, micro_batches: int) -> list[Batch]:
        """This rank's micro-batches."""
        mine = batch.rows(self.rank, batch.tokens.shape[0], self.world)
        size = -(-mine.tokens.shape[0] // micro_batches)
        return [mine.rows(start, start + size) for start in range(0, mine.tokens.shape[0], size)]


def training_step(
    forward: LossForward,
    optimizer: MasterOptimizer,
    batches: list[Batch],
    ranks: Ranks,
    beta: float,
    rate: float,
    whole_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One update. Returns (global sums [8] in the order of LossSums.NAMES, the loss, gradient norm).

    Denominators and lambda are global, so with several micro-batches a pass without gradients makes them first. With
    `whole_weight`, the sum of weights of the whole step over all ranks, they are each micro-batch's own, scaled by its share.
    """
    if whole_weight is not None:
        return _local_step(forward, optimizer, batches, ranks, beta, rate, whole_weight)
    held = None
    if len(batches) == 1:
        held = forward(batches[0])
        totals = held.totals()
    else:
        with torch.no_grad():
            totals = torch.stack([forward(batch).totals() for batch in batches]).sum(dim=0)
    ranks.add([totals])
    loss = torch.zeros((), device=totals.device)
    for batch in batches:
        sums = held if held is not None else forward(batch)
        part = combine(sums, totals, forward.settings, beta)
        part.backward()
        optimizer.collect()
        loss = loss + part.detach()
    ranks.add([loss, *optimizer.unsummed])
    return totals, loss, optimizer.step(rate)


def _local_step(
    forward: LossForward,
    optimizer: MasterOptimizer,
    batches: list[Batch],
    ranks: Ranks,
    beta: float,
    rate: float,
    whole_weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`training_step` with normalisation inside each micro-batch: one forward each, no pass before."""
    totals = torch.zeros(len(LossSums.NAMES), device=whole_weight.device)
    loss = torch.zeros((), device=whole_weight.device)
    for batch in batches:
        sums = forward(batch)
        own = sums.totals()
        share = sums.weight.detach().float() / whole_weight.clamp(min=1e-12)
        part = combine(sums, own, forward.settings, beta) * share
        part.backward()
        optimizer.collect()
        totals, loss = totals + own, loss + part.detach()
    ranks.add([totals, loss, *optimizer.unsummed])
    return totals, loss, optimizer.step(rate)


class Trainer:
    """One run, from a config to an exported drafter."""

    def __init__(self, config: TrainConfig, resume: bool = False) -> None:
        self.config, run = config, config.run
        self.born = time.perf_counter()
        self.fingerprint = config.fingerprint()
        self.device = own_device(run.device)
        self.ranks = Ranks(self.device)
        self._check_ranks()
        self.output = Path(run.output_dir)
        self.checkpoints = self.output / "checkpoints"
        state = load_latest(self.checkpoints, self.fingerprint, complete_fingerprint) if resume else None
        if not resume and any(self.checkpoints.glob("step-*.pt")):
            raise DSpineError(f"{self.output} already holds a run; continue it with --resume or choose another run.output_dir")
        folder = resolve_model(config.model.target)
        dtype = getattr(torch, run.dtype)
        self.target = load_frozen_target(folder, self.device, dtype)
        self.train_data, self.held_out = self._conversations(folder)
        self.data_facts = data_facts(self.train_data, self.held_out)
        if state is not None:
            check_data(state, self.data_facts, self.output)
        vocab, mask_token = self.target.shape.vocab_size, config.model.mask_token_id
        if mask_token is None:
            mask_token = choose_mask_token(folder, self.train_data + self.held_out, vocab)
        self.shape = drafter_config(config, self.target.shape, mask_token)
        if self.held_out:  # not after hours
            held_out_greedy(self.held_out, run.eval_conversations, self.shape.num_proposals)
        self.model, space = starting_model(config, self.shape, self.target)
        self.basis = None if space is None else space.basis
        self.model = self.model.to(self.device, dtype).eval()
        self.forward = self._make_forward()
        self.optimizer = self._make_optimizer()
        self.step, position, self.elapsed = 0, (0, 0), 0.0
        if state is not None:
            self.step, position, self.elapsed = state["step"], tuple(state["position"]), state["elapsed"]
            self.optimizer.load_state_dict(state["optimizer"])
            self._fix_steps(state.get("max_steps"))
        self.stream = self._rows(position)
        self.position = position
        self.features = self._cached_features()
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DSpineError(f"run.output_dir {self.output}: cannot be made a folder ({error.strerror})") from error
        self.metrics = self.output / "metrics.jsonl"
        if self.leader:
            trim_metrics(self.metrics, self.step, self.config.schedule.max_steps)
            (self.output / "config.json").write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n")

    @property
    def leader(self) -> bool:
        return self.ranks.rank == 0

    def _conversations(self, folder: Path) -> tuple[list[Conversation], list[Conversation]]:
        """Training and held-out data; ids outside the target's vocabulary are an error."""
        data = self.config.data
        train, held_out = load_split(data.paths, data.holdout, lambda: load_tokenizer(folder))
        highest, vocab = max(int(c.tokens.max(initial=0)) for c in train + held_out), self.target.shape.vocab_size
        if highest >= vocab:
            raise DSpineError(
                f"data.path {', '.join(data.paths)}: token id {highest} is outside the target's vocabulary of {vocab}: the "
                f"data was made with another tokenizer"
            )
        return train, held_out

    def _rows(self, position: tuple[int, int]) -> RowStream:
        data = self.config.data
        return RowStream(self.train_data, data.sequence_length, data.open_rows, self.config.run.seed, position)

    def _fix_steps(self, steps: int | None) -> None:
        """From here on the schedules end at `steps` (None: as the config says)."""
        if steps is not None:
            self.config = self.config.model_copy(update={"schedule": self.config.schedule.fixed(steps)})
            self.shape = drafter_config(self.config, self.target.shape, self.shape.mask_token_id)

    def _steps_in_time(self) -> None:
        """`schedule.max_minutes`: time steps at learning rate 0, forget them, and fix how many fit."""
        schedule = self.config.schedule
        if schedule.max_minutes is None or self.step > 0:
            return
        real, self.config = self.config, self.config.model_copy(update={"schedule": schedule.fixed(1 << 30)})
        prefetch = self._prefetcher(self._rows(self.position))
        try:
            for count in range(WARM_STEPS + TIMED_STEPS):
                if count == WARM_STEPS:
                    self._wait_for_device()
                    started = time.perf_counter()
                self._update(prefetch.next()[0], 0.0)
            self._wait_for_device()
        finally:
            prefetch.close()
            self.config = real
        each = (time.perf_counter() - started) / TIMED_STEPS
        self.optimizer = None  # type: ignore[assignment]  # its memory first
        self.optimizer = self._make_optimizer()  # rate 0 moved no weight, but the moments
        spent = time.perf_counter() - self.born
        agreed = torch.tensor([max(0, int((60.0 * schedule.max_minutes - spent) / each))], device=self.device)
        if self.ranks.world > 1:
            dist.broadcast(agreed, 0)
        steps = min(int(agreed), schedule.max_steps or int(agreed))
        if steps < 1:
            raise DSpineError(
                f"schedule.max_minutes {schedule.max_minutes:g} is over before the first step: loading and compilation took "
                f"{spent:.0f} s, a step takes {1000 * each:.0f} ms"
            )
        self._fix_steps(steps)
        self.write({"kind": "schedule", "step": 0, "max_steps": steps, "ms_per_step": 1000 * each})

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _prefetcher(self, stream: RowStream) -> Prefetcher:
        pin, rows = self.device.type == "cuda", self.shape.query_rows
        return Prefetcher(self.config, stream, self.step, pin, self.features, rows)

    def _check_ranks(self) -> None:
        world, config = self.ranks.world, self.config
        if config.data.rows_per_step % (world * config.optimizer.micro_batches):
            raise DSpineError(
                f"data.rows_per_step {config.data.rows_per_step} does not divide into {world} ranks x "
                f"{config.optimizer.micro_batches} micro-batches"
            )
        if config.run.shard == "fsdp" and world < 2:
            raise DSpineError(
                "run.shard=fsdp needs several processes: start with torchrun --nproc-per-node N, or use run.shard=none (which "
                "also resumes a sharded run)"
            )
        if world > 1 and config.run.time_limit_minutes is not None:
            raise DSpineError("run.time_limit_minutes works with one process only; use schedule.max_steps or run.stop_after")

    def _cached_features(self) -> FeatureCache | None:
        """The feature file, made by the first rank where it is missing."""
        data = self.config.data
        if data.features == "recompute":
            return None
        folder = Path(data.cache_dir) if data.cache_dir else self.output / "features"
        taps = self.shape.target_layer_ids
        cache = FeatureCache(folder, self.stream.conversations, data.sequence_length, self.target, taps)
        if self.leader:
            cache.prepare(self.config.run.progress)
        self.ranks.wait()
        cache.open()
        return cache

    def _make_forward(self) -> LossForward:
        run, cuda = self.config.run, self.device.type == "cuda"
        attention = run.attention if run.attention != "auto" else ("flex" if cuda else "sdpa")
        if attention == "flex" and not cuda:
            raise BackendError("run.attention=flex has no backward pass on the CPU; use run.attention=sdpa")
        around = None
        if run.shard == "fsdp":
            from dspine_cuda.training.sharding import sharded_draft

            world, dtype = self.ranks.world, getattr(torch, run.dtype)
            around = partial(sharded_draft, self.model, device=self.device, dtype=dtype, world=world)
        return LossForward(
            self.model,
            self.target,
            self.config.loss,
            attention=attention,
            compiled=cuda if run.compile is None else run.compile,
            replaced=self.config.schedule.replacement_probability > 0,
            around=around,
        )

    def _make_optimizer(self) -> MasterOptimizer:
        if self.config.run.shard == "none":
            return MasterOptimizer(self.model, self.config.optimizer)
        from dspine_cuda.training.sharding import ShardedOptimizer

        return ShardedOptimizer(self.model, self.config.optimizer)

    def run(self) -> dict[str, Any]:
        """Train to the end (or to a limit); returns a summary with the last acceptance and the exported folder."""
        meter, run = Meter(self), self.config.run
        meter.pause(self._steps_in_time)
        last = self.config.schedule.steps
        prefetch = self._prefetcher(self.stream)
        try:
            with progress_bar(last, run.progress and self.leader) as advance:
                while self.step < last and not self._out_of_time():
                    batch, self.position = prefetch.next()
                    self._advance(batch, meter)
                    if self.step % run.log_every == 0 or self.step == last:
                        advance(self.step, _line(meter.flush()))
                    if run.eval_every and self.step % run.eval_every == 0 and self.step < last:
                        meter.pause(self.evaluate)
                    if self.step % run.checkpoint_every == 0:
                        meter.pause(lambda: self.save(meter.total()))
                    if run.stop_after is not None and self.step >= run.stop_after:
                        break
        finally:
            prefetch.close()
        meter.flush()
        self.save(meter.total())
        return self._finish(meter)

    def _out_of_time(self) -> bool:
        limit = self.config.run.time_limit_minutes
        return limit is not None and time.perf_counter() - self.born > 60.0 * limit

    def _advance(self, batch: Batch, meter: Meter) -> None:
        rate = learning_rate(self.step, self.config.optimizer.learning_rate, self.config.schedule)
        meter.count(batch)
        totals, loss, norm, beta = self._update(batch, rate)
        self.step += 1
        meter.add(totals, loss, norm, rate, beta)

    def _update(self, batch: Batch, rate: float) -> tuple[Tensor, Tensor, Tensor, float]:
        """One update at the current step; sums, loss, gradient norm and beta."""
        config, step = self.config, self.step
        beta = alignment_beta(step, config.loss.alignment_weight, config.schedule)
        self.forward.base_share = base_share(step, config.loss.base_share_end, config.schedule)
        whole = batch.to(self.device)
        weight = whole.weights.sum() if config.optimizer.normalize_over == "micro_batch" else None
        shares = self.ranks.share(whole, config.optimizer.micro_batches)
        return *training_step(self.forward, self.optimizer, shares, self.ranks, beta, rate, weight), beta

    def whole_model(self) -> DrafterModel:
        """The model with whole weights in the run's dtype. Sharded: a copy, and a collective (every rank calls it)."""
        if self.config.run.shard == "none":
            return self.model
        masters = self.optimizer.whole_masters()
        model = new_model(self.config, self.shape)
        model.load_state_dict(masters, strict=True)
        model.transfer_codes = self.model.transfer_codes
        return model.to(self.device, getattr(torch, self.config.run.dtype)).eval()

    def evaluate(self, exact: bool = False) -> Acceptance | None:
        """Acceptance on the held-out conversations by the inference code; one line in the metrics."""
        model = self.whole_model()
        if not self.leader or not self.held_out:
            return None
        run = self.config.run
        started = time.perf_counter()
        drafter = TorchDrafter(model, self.target, {"method": self.shape.method})
        chosen, _ = held_out_greedy(self.held_out, run.eval_conversations, self.shape.num_proposals)
        result = simulated_acceptance(drafter, self.target, chosen, stride=run.eval_stride, exact=exact)
        seconds = time.perf_counter() - started
        self.write({"kind": "eval", "step": self.step, **result.as_dict(), "seconds": round(seconds, 3)})
        return result

    def write(self, row: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        if self.leader:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def save(self, elapsed: float) -> None:
        """Checkpoint of this very step; atomic."""
        if not self.leader and self.config.run.shard == "none":
            return
        optimizer = self.optimizer.state_dict()
        if not self.leader:
            return
        state = {
            "step": self.step,
            "position": list(self.position),
            "elapsed": elapsed,
            "fingerprint": json.dumps(self.fingerprint),
            "max_steps": self.config.schedule.steps,
            "data": self.data_facts,
            "optimizer": optimizer,
        }
        save_checkpoint(self.checkpoints, state, self.config.run.keep_checkpoints)

    def _finish(self, meter: Meter) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "steps": self.step,
            "max_steps": self.config.schedule.steps,
            "elapsed_seconds": round(meter.total(), 1),
            **meter.speed(),
        }
        summary["skipped_steps"] = int(self.optimizer.skipped)
        masters, bits = self.optimizer.whole_masters(), self.config.run.export_bits
        if self.leader:  # before the evaluation, whatever becomes of that
            summary["drafter"] = str(self.export(self.output / "drafter", masters))
            if bits is not None:
                summary["quantized_drafter"] = str(self.export(self.output / f"drafter-{bits}bit", masters, bits))
        result = self.evaluate()
        if not self.leader:
            return summary
        summary["acceptance"] = None if result is None else result.as_dict()
        self.write({"kind": "end", "step": self.step, **summary})
        return summary

    def export(self, folder: Path, masters: dict[str, Tensor] | None = None, bits: int | None = None) -> Path:
        """The drafter as a checkpoint folder. masters: whole float32 weights, where they are at hand."""
        state = state_arrays(self.model, masters or self.optimizer.whole_masters())
        return export_drafter(folder, state, self.shape, self.basis, bits)  # type: ignore[arg-type]


def _line(row: dict[str, Any]) -> str:
    return f"loss {row['loss']:.3f}  ce {row['ce']:.3f}  {row['ms_per_step']:.0f} ms/step" if row else ""


def train(config: TrainConfig, resume: bool = False) -> dict[str, Any]:
    """Run (or continue) one training."""
    try:
        return Trainer(config, resume).run()
    except OSError as error:  # checkpoints say so themselves; metrics and the exported drafter end up here
        raise_disk_full(error, Path(config.run.output_dir) / "metrics.jsonl", "run it again with --resume")
        raise
