"""Pretraining of a small hybrid: packed rows, next-token loss, balanced routing, weights rounded as they will be stored.

Float32 masters and AdamW; the model computes with bfloat16 copies. In the last part of the schedule the copies are refreshed
from ROUNDED masters, so the gradient is that of the stored model (straight through) and storing it costs nothing.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine_cuda.training.checkpointing import load_latest, save_checkpoint, trim_metrics
from dspine_cuda.training.data import Conversation, PackedRows, RowStream, load_conversations, split_holdout
from dspine_cuda.training.hybrid_config import PretrainConfig
from dspine_cuda.training.hybrid_model import HybridModel, Routing, new_model
from dspine_cuda.training.hybrid_quant import as_stored, storage_forms
from dspine_cuda.training.masks import NO_DOCUMENT

TERMS = ("loss", "balance", "router_z", "busiest")


def documents(config: PretrainConfig) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held out). Documents longer than a row are cut into pieces that start afresh; every token is a target."""
    train: list[Conversation] = []
    held_out: list[Conversation] = []
    source = config.held_out_data or config.data[0]
    for path in config.data:
        found = load_conversations(path)
        if path == source:
            found, held_out = split_holdout(found, config.holdout)
        train += [piece for item in found for piece in _pieces(item, config.sequence_length)]
    if not held_out:
        raise DSpineError(f"held_out_data {source} is none of data {list(config.data)}")
    return train, held_out


def _pieces(item: Conversation, length: int) -> list[Conversation]:
    parts = [item.tokens[start : start + length] for start in range(0, len(item.tokens), length)]
    return [Conversation(part, np.ones(len(part), dtype=bool)) for part in parts if len(part) > 8]


def next_token_labels(rows: PackedRows) -> np.ndarray:
    """int64 [B, S]: the following token of the same document, -100 where there is none."""
    labels = np.full(rows.tokens.shape, -100, dtype=np.int64)
    inside = (rows.documents[:, 1:] == rows.documents[:, :-1]) & (rows.documents[:, 1:] != NO_DOCUMENT)
    labels[:, :-1] = np.where(inside, rows.tokens[:, 1:], -100)
    return labels


class RowFeed:
    """Rows as tensors, made in a thread. Yields (tokens, positions, labels int64 [B, S], stream position after them)."""

    def __init__(self, stream: RowStream, count: int, pin: bool) -> None:
        self._stream, self._count, self._pin = stream, count, pin
        self._queue: queue.Queue[Any] = queue.Queue(8)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        item: Any
        while not self._stop.is_set():
            try:
                rows = self._stream.take(self._count)
                arrays = (rows.tokens, rows.positions, next_token_labels(rows))
                tensors = tuple(torch.from_numpy(a).pin_memory() if self._pin else torch.from_numpy(a) for a in arrays)
                item = (*tensors, self._stream.position)
            except DSpineError as error:
                item = error
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.2)
                    break
                except queue.Full:
                    continue

    def next(self) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
        item = self._queue.get()
        if isinstance(item, DSpineError):
            raise item
        return item

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def losses(
    model: HybridModel, tokens: Tensor, positions: Tensor, labels: Tensor, balance: float, router_z: float
) -> tuple[Tensor, Tensor]:
    """What is minimised, and float32 [4]: `TERMS`, detached (busiest: the largest share of one expert in any layer)."""
    hidden, _, routings = model(tokens, positions)
    language = F.cross_entropy(model.logits(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)
    used = labels.flatten() != -100
    parts = torch.stack([torch.stack(balance_terms(routing, used)) for routing in routings])
    mean = parts.mean(dim=0)
    total = language + balance * mean[0] + router_z * mean[1]
    return total, torch.stack([language, mean[0], mean[1], parts[:, 2].amax()]).detach()


def balance_terms(routing: Routing, used: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Load-balance loss (1 when even), router z-loss, and the largest share of assignments, over the `used` rows."""
    experts = routing.logits.shape[-1]
    weight = used.float()[:, None] / used.sum()
    chosen = torch.zeros_like(routing.logits).scatter(-1, routing.chosen, 1.0 / routing.chosen.shape[-1])
    share = (chosen * weight).sum(dim=0)
    probability = (routing.logits.softmax(dim=-1) * weight).sum(dim=0)
    z = (routing.logits.logsumexp(dim=-1, keepdim=True).square() * weight).sum()
    return experts * (share * probability).sum(), z, share.amax()


class Masters:
    """Float32 masters and AdamW over the model's copies. Invariant: after `step` every copy is its master in the copy's
    dtype, rounded as stored first where `rounding` is on."""

    def __init__(self, model: HybridModel, config: PretrainConfig) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.copies = [parameter for _, parameter in model.named_parameters()]
        self.held = [p.detach().float().clone() for p in self.copies]
        self.clip_norm, self.rounding = config.clip_norm, False
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        self.forms = storage_forms(
            shapes, experts=config.expert_bits, projections=config.projection_bits, embedding=config.embedding_bits
        )
        groups = [
            {"params": [m for m in self.held if m.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [m for m in self.held if m.ndim <= 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)

    @torch.no_grad()
    def step(self, rate: float) -> Tensor:
        """Clip, update, refresh; returns the gradient norm before clipping. A gradient that is not finite changes nothing."""
        gradients = [
            c.grad.float() if c.grad is not None else torch.zeros_like(m) for c, m in zip(self.copies, self.held, strict=True)
        ]
        norm = torch.stack(torch._foreach_norm(gradients)).square().sum().sqrt()
        finite = torch.isfinite(norm)
        torch._foreach_mul_(gradients, torch.where(finite, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0), 1.0))
        for master, gradient in zip(self.held, gradients, strict=True):
            master.grad = gradient
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.grad_scale, self.adamw.found_inf = None, (~finite).float()
        self.adamw.step()
        for copy, master in zip(self.copies, self.held, strict=True):
            copy.grad, master.grad = None, None
        self.refresh()
        return norm

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies from masters."""
        for name, copy, master in zip(self.names, self.copies, self.held, strict=True):
            copy.copy_(as_stored(name, master, self.forms) if self.rounding else master)

    def tensors_to_store(self, prefix: str) -> dict[str, np.ndarray]:
        """Name -> float32 master; those that are not quantised as they will be read."""
        whole = {n: m if n in self.forms else as_stored(n, m, self.forms) for n, m in zip(self.names, self.held, strict=True)}
        return {prefix + name: tensor.float().cpu().numpy() for name, tensor in whole.items()}

    def state_dict(self) -> dict[str, Any]:
        return {
            "masters": {n: m.cpu() for n, m in zip(self.names, self.held, strict=True)},
            "adamw": self.adamw.state_dict()["state"],
            "rounding": self.rounding,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, master in zip(self.names, self.held, strict=True):
            master.copy_(state["masters"][name])
        self.adamw.load_state_dict({"state": state["adamw"], "param_groups": self.adamw.state_dict()["param_groups"]})
        self.rounding = state["rounding"]
        self.refresh()


class Pretrainer:
    """One run; everything a checkpoint holds is `step`, `elapsed`, the stream's position and the masters."""

    def __init__(self, config: PretrainConfig, resume: bool = False) -> None:
        from dspine_cuda.training.devices import pick_device

        self.config, self.output = config, Path(config.output_dir)
        self.device = pick_device(config.device)
        self.checkpoints = self.output / "checkpoints"
        state = load_latest(self.checkpoints, config.fingerprint()) if resume else None
        if state is None and any(self.checkpoints.glob("step-*.pt")):
            raise DSpineError(f"{self.checkpoints} holds checkpoints: continue with --resume or name another output_dir")
        self.model = new_model(config.model_shape, config.seed).to(self.device, getattr(torch, config.dtype))
        for layer in self.model.layers:
            layer.dropout = config.dropout
        self.masters = Masters(self.model, config)
        if config.compile:
            self.model.compile_layers()
        train, self.held_out = documents(config)
        self.step, self.elapsed, position = 0, 0.0, (0, 0)
        if state is not None:
            self.step, self.elapsed, position = state["step"], state["elapsed"], tuple(state["position"])
            self.masters.load_state_dict(state["masters"])
        self.position = position
        self.stream = RowStream(train, config.sequence_length, 16, config.seed, position)
        self.output.mkdir(parents=True, exist_ok=True)
        self.metrics = self.output / "metrics.jsonl"
        trim_metrics(self.metrics, self.step)
        (self.output / "config.json").write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n", encoding="utf-8")
        self._started = time.perf_counter()

    def total_seconds(self) -> float:
        """Wall time of training, earlier parts included."""
        return self.elapsed + time.perf_counter() - self._started

    def progress(self) -> float:
        """Share of the schedule that is done, at most 1."""
        if self.config.max_steps is not None:
            return min(1.0, self.step / self.config.max_steps)
        assert self.config.minutes is not None
        return min(1.0, self.total_seconds() / (60.0 * self.config.minutes))

    def rate(self, progress: float) -> float:
        """Linear warm-up in steps, cosine in progress."""
        config = self.config
        low = config.final_ratio
        cosine = low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
        return config.learning_rate * min(1.0, (self.step + 1) / config.warmup_steps) * cosine

    def run(self) -> dict[str, Any]:
        """Train to the end or to `stop_after`; returns a summary."""
        config = self.config
        self._started = time.perf_counter()
        feed = RowFeed(self.stream, config.rows_per_step, pin=self.device.type == "cuda")
        window: list[tuple[Tensor, Tensor]] = []
        mark, summary = time.perf_counter(), {}
        try:
            while self.progress() < 1.0 and (config.stop_after is None or self.step < config.stop_after):
                window.append(self._advance(feed))
                if self.step % config.log_every == 0:
                    summary = self._log(window, time.perf_counter() - mark)
                    window, mark = [], time.perf_counter()
                if config.eval_every and self.step % config.eval_every == 0:
                    self._write({"kind": "eval", "step": self.step, **self.evaluate()})
                    mark = time.perf_counter()
                if self.step % config.checkpoint_every == 0:
                    self.save()
                    mark = time.perf_counter()
        finally:
            feed.close()
        if window:
            summary = self._log(window, time.perf_counter() - mark)
        self.save()
        return summary | self.evaluate() | {"step": self.step, "seconds": round(self.total_seconds(), 1)}

    def _advance(self, feed: RowFeed) -> tuple[Tensor, Tensor]:
        config, progress = self.config, self.progress()
        if progress >= config.round_from and config.round_from < 1 and not self.masters.rounding:
            self.masters.rounding = True
            self.masters.refresh()
        tokens, positions, labels, self.position = feed.next()
        torch.manual_seed(config.seed * 1_000_003 + self.step)  # dropout is a function of the step: resumption is exact
        batch = (t.to(self.device, non_blocking=True) for t in (tokens, positions, labels))
        total, terms = losses(self.model, *batch, config.balance, config.router_z)
        total.backward()
        norm = self.masters.step(self.rate(progress))
        self.step += 1
        return terms, norm

    def _log(self, window: list[tuple[Tensor, Tensor]], seconds: float) -> dict[str, Any]:
        terms = torch.stack([terms for terms, _ in window]).mean(dim=0).tolist()
        norms = torch.stack([norm for _, norm in window]).tolist()
        config, progress = self.config, self.progress()
        row = {
            "kind": "train", "step": self.step, **dict(zip(TERMS, terms, strict=True)),
            "gradient_norm": sum(norms) / len(norms), "learning_rate": self.rate(progress),
            "progress": round(progress, 4), "epoch": self.position[0],
            "rounded": self.masters.rounding, "ms_per_step": 1000 * seconds / len(window),
            "tokens_per_second": len(window) * config.rows_per_step * config.sequence_length / seconds,
            "elapsed": round(self.total_seconds(), 1),
        }  # fmt: skip
        if self.device.type == "cuda":
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
        self._write(row)
        return {"loss": row["loss"], "tokens_per_second": row["tokens_per_second"]}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Loss and perplexity a token on held-out conversations."""
        config = self.config
        self.model.eval()
        stream = RowStream(
            [p for c in self.held_out for p in _pieces(c, config.sequence_length)], config.sequence_length, 16, 0
        )
        total = count = 0.0
        for _ in range(max(1, config.eval_rows // config.rows_per_step)):
            rows = stream.take(min(config.rows_per_step, config.eval_rows))
            tensors = (torch.from_numpy(a).to(self.device) for a in (rows.tokens, rows.positions, next_token_labels(rows)))
            tokens, positions, labels = tensors
            logits = self.model.logits(self.model(tokens, positions)[0]).flatten(0, 1)
            total += F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum").item()
            count += (labels != -100).sum().item()
        self.model.train()
        return {"held_out_loss": total / count, "held_out_perplexity": math.exp(total / count)}

    def _write(self, row: dict[str, Any]) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def save(self) -> None:
        """Checkpoint of this very step."""
        state = {
            "step": self.step, "elapsed": self.total_seconds(), "position": list(self.position),
            "fingerprint": json.dumps(self.config.fingerprint()), "masters": self.masters.state_dict(),
        }  # fmt: skip
        save_checkpoint(self.checkpoints, state, keep=1)
