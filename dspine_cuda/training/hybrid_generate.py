"""Batched generation by a small hybrid with cached state: answers for a drafter's training data, and samples for a report.

Prompts of a batch are padded on the right: padding has log decay 0 and write strength 0, so a row's state after the prompt is
that of its last real token; K/V of padding are masked by length.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine_cuda.training.hybrid_model import Attention, DeltaNet, HybridModel, Rows, chunked_delta_rule

LOOP_PERIODS = range(1, 41)
_SHORT_LOOP = 16  # repeated tokens before a short period is a loop ("000" or "====" is none), and what is kept of it


class DecodeState:
    """Everything between steps: lengths int [B] (tokens processed), and per layer either (window [B, width-1, C], state
    float32 [B, Hv, Dk, Dv]) or (keys, values [B, K/V heads, capacity, D])."""

    def __init__(self, model: HybridModel, batch: int, capacity: int) -> None:
        shape, weight = model.shape, model.embed_tokens.weight
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        self.capacity = capacity
        self.layers: list[tuple[Tensor, Tensor]] = []
        for layer in model.layers:
            if layer.attention:
                size = (batch, shape.num_key_value_heads, capacity, shape.head_dim)
                self.layers.append((weight.new_zeros(size), weight.new_zeros(size)))
            else:
                window = weight.new_zeros(batch, shape.linear_conv_kernel_dim - 1, 2 * shape.key_dim + shape.value_dim)
                heads = (batch, shape.linear_num_value_heads, shape.linear_key_head_dim, shape.linear_value_head_dim)
                self.layers.append((window, weight.new_zeros(heads, dtype=torch.float32)))


@torch.inference_mode()
def prefill(model: HybridModel, state: DecodeState, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Prompts int [B, S], padded on the right, real lengths int [B] -> logits float32 [B, V] after each prompt."""
    batch, width = tokens.shape
    positions = torch.arange(width, device=tokens.device).expand(batch, -1)
    rows, real = Rows(positions), positions < lengths[:, None]
    x = model.embed_tokens(tokens)
    for layer, (first, second) in zip(model.layers, state.layers, strict=True):
        normed, mixer = layer.input_layernorm(x), layer.mixer
        if isinstance(mixer, Attention):
            q, k, v, gate = mixer.project(normed, positions)
            first[:, :, :width], second[:, :, :width] = k, v
            mixed = mixer.attend(q, k, v, gate, rows.mask)
        else:
            inputs, decay, beta = mixer.project(normed)
            core, last = chunked_delta_rule(
                *mixer.heads(mixer.convolve(inputs, rows.segment)),
                decay * real[..., None],
                beta * real[..., None],
                rows.segment,
            )
            second.copy_(last)
            reach = first.shape[1]
            place = lengths[:, None] - reach + torch.arange(reach, device=tokens.device)
            taken = inputs.gather(1, place.clamp(min=0)[..., None].expand(-1, -1, inputs.shape[-1]))
            first.copy_(torch.where((place >= 0)[..., None], taken, 0))
            mixed = mixer.finish(core, normed)
        x, _ = layer.experts(x + mixed)
    state.lengths.copy_(lengths)
    last_hidden = x[torch.arange(batch, device=tokens.device), lengths - 1]
    return model.logits(model.norm(last_hidden))


@torch.inference_mode()
def decode_step(model: HybridModel, state: DecodeState, tokens: Tensor, reach: int) -> Tensor:
    """One token int [B] a row -> logits float32 [B, V]. `reach`: no row is longer than this after the step."""
    x = model.embed_tokens(tokens)
    index = torch.arange(len(tokens), device=tokens.device)
    mask = (torch.arange(reach, device=tokens.device) <= state.lengths[:, None])[:, None, None]
    for layer, (first, second) in zip(model.layers, state.layers, strict=True):
        normed, mixer = layer.input_layernorm(x), layer.mixer
        if isinstance(mixer, Attention):
            q, k, v, gate = mixer.project(normed[:, None], state.lengths[:, None])
            first[index, :, state.lengths], second[index, :, state.lengths] = k[:, :, 0], v[:, :, 0]
            mixed = mixer.attend(q, first[:, :, :reach], second[:, :, :reach], gate, mask)[:, 0]
        else:
            mixed = _recurrent(mixer, normed, first, second)
        x, _ = layer.experts(x + mixed)
    state.lengths += 1
    return model.logits(model.norm(x))


def _recurrent(mixer: DeltaNet, x: Tensor, window: Tensor, state: Tensor) -> Tensor:
    """Equation 1 for one token of every row; window and state are advanced in place."""
    inputs, decay, beta = mixer.project(x)
    taps = torch.cat([window, inputs[:, None]], dim=1)
    window.copy_(taps[:, 1:])
    q, k, v = mixer.heads(F.silu((taps * mixer.conv1d.weight[:, 0].T).sum(dim=1)))
    state.mul_(decay.exp()[..., None, None])
    z = beta[..., None] * (v - (k[..., None, :] @ state).squeeze(-2))
    flat = state.flatten(0, 1)
    flat.baddbmm_(k.flatten(0, 1)[..., None], z.flatten(0, 1)[:, None])
    return mixer.finish((q[..., None, :] @ state).squeeze(-2), x)


@torch.inference_mode()
def generate(
    model: HybridModel, prompts: Sequence[np.ndarray], temperatures: Sequence[float], max_new: int, seed: int
) -> list[np.ndarray]:
    """Answers int64 (the end token included where it was reached); temperature 0 is greedy."""
    device, shape = model.embed_tokens.weight.device, model.shape
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(max(len(p) for p in prompts))
    padded = np.zeros((len(prompts), longest), dtype=np.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    warm = torch.tensor(temperatures, device=device, dtype=torch.float32)[:, None]
    generator = torch.Generator(device=device).manual_seed(seed)
    state = DecodeState(model, len(prompts), longest + max_new)
    logits = prefill(model, state, torch.from_numpy(padded).to(device), lengths)
    answers = torch.full((len(prompts), max_new), -1, dtype=torch.int64, device=device)
    running = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for step in range(max_new):
        noise = torch.empty_like(logits).exponential_(generator=generator).clamp(min=1e-30).log()  # minus a Gumbel draw
        token = (logits - warm * noise).argmax(dim=-1)
        answers[:, step] = torch.where(running, token, -1)
        running &= token != shape.eos_token_id
        if step + 1 == max_new or (step % 16 == 15 and not bool(running.any())):
            break
        logits = decode_step(model, state, token, longest + step + 1)
    found = answers.cpu().numpy()
    return [row[row >= 0] for row in found]


def cut_loop(answer: np.ndarray) -> np.ndarray:
    """The answer up to where a third copy of a loop starts (periods up to 40 tokens; of short ones 16 tokens are kept)."""
    end = len(answer)
    for period in LOOP_PERIODS:
        if len(answer) < 3 * period:
            break
        same = (answer[period:] == answer[:-period]).astype(np.int64)
        breaks = np.flatnonzero(same == 0)
        starts = np.concatenate([[0], breaks + 1])
        runs = np.diff(np.concatenate([starts, [len(same) + 1]])) - 1
        long = np.flatnonzero(runs >= max(2 * period, _SHORT_LOOP))
        if len(long):
            end = min(end, int(starts[long[0]]) + max(2 * period, _SHORT_LOOP))
    return answer[:end]


@dataclass(frozen=True)
class GenerationPlan:
    """minutes: wall time (None: all prompts); sampled: share of prompts answered at a temperature; holdout: the last prompts,
    answered greedily and written last."""

    minutes: float | None = None
    batch: int = 2048
    max_new: int = 288
    max_prompt: int = 224
    temperatures: tuple[float, ...] = (0.7, 1.0)
    sampled: float = 0.5
    holdout: int = 500
    seed: int = 0
    shard_tokens: int = 4_000_000


def plan_batches(prompts: list[np.ndarray], plan: GenerationPlan) -> Iterator[tuple[list[int], list[float]]]:
    """(indices, temperatures) of every batch: held-out prompts first (they must not miss the time limit), then the others in
    random order, each batch sorted by length. Too long prompts and repeated ones are left out."""
    seen: set[bytes] = set()
    usable: list[int] = []
    for index in reversed(range(len(prompts))):  # of equal prompts the held-out one stays
        key = np.asarray(prompts[index], dtype=np.int64).tobytes()
        if 0 < len(prompts[index]) <= plan.max_prompt and key not in seen:
            seen.add(key)
            usable.append(index)
    first = len(prompts) - plan.holdout
    held_out = [i for i in reversed(usable) if i >= first]
    others = np.array([i for i in reversed(usable) if i < first], dtype=np.int64)
    rng = np.random.default_rng([plan.seed, 3])
    rng.shuffle(others)
    for start in range(0, len(held_out), plan.batch):
        chosen = held_out[start : start + plan.batch]
        yield chosen, [0.0] * len(chosen)
    for start in range(0, len(others), plan.batch):
        chosen = sorted(others[start : start + plan.batch].tolist(), key=lambda i: len(prompts[i]))
        warm = rng.choice(plan.temperatures, len(chosen)) * (rng.random(len(chosen)) < plan.sampled)
        yield chosen, warm.tolist()


def generate_shards(model: HybridModel, prompts: list[np.ndarray], output: Path, plan: GenerationPlan) -> dict[str, Any]:
    """Answer prompts until the time is over; shards `part_*.npz` as `training.data` reads them, held-out ones last."""
    started = time.perf_counter()
    rows: list[tuple[np.ndarray, int, bool]] = []
    held_out: list[tuple[np.ndarray, int, bool]] = []
    first, looped = len(prompts) - plan.holdout, 0
    for number, (chosen, warm) in enumerate(plan_batches(prompts, plan)):
        if plan.minutes is not None and time.perf_counter() - started > 60 * plan.minutes:
            break
        answers = generate(model, [prompts[i] for i in chosen], warm, plan.max_new, seed=1000 * plan.seed + number)
        for index, temperature, answer in zip(chosen, warm, answers, strict=True):
            kept = cut_loop(answer)
            looped += len(kept) < len(answer)
            if len(kept) < 4:
                continue
            item = (np.concatenate([prompts[index], kept]).astype(np.uint16), len(prompts[index]), temperature == 0)
            (held_out if index >= first else rows).append(item)
    if not rows or not held_out:
        raise DSpineError(
            f"generation: {len(rows)} training and {len(held_out)} held-out answers; raise minutes or the holdout"
        )
    order = np.random.default_rng([plan.seed, 4]).permutation(len(rows))
    written = _write_shards([rows[i] for i in order] + held_out, output, plan.shard_tokens)
    tokens = sum(len(row[0]) for row in rows + held_out)
    return {
        "conversations": len(rows),
        "held_out": len(held_out),
        "tokens": tokens,
        "answer_tokens": tokens - sum(row[1] for row in rows + held_out),
        "cut_loops": looped,
        "seconds": round(time.perf_counter() - started, 1),
        "shards": written,
    }


def _write_shards(rows: list[tuple[np.ndarray, int, bool]], output: Path, shard_tokens: int) -> list[str]:
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob("part_*.npz"):
        old.unlink()
    ends = np.cumsum([len(row[0]) for row in rows])
    shard_of = (ends - 1) // shard_tokens
    names = []
    for number in sorted(set(shard_of.tolist())):
        part = [row for row, shard in zip(rows, shard_of, strict=True) if shard == number]
        path = output / f"part_{number:02d}.npz"
        np.savez_compressed(
            path,
            tokens=np.concatenate([row[0] for row in part]),
            lengths=np.array([len(row[0]) for row in part], dtype=np.int32),
            prompt_lengths=np.array([row[1] for row in part], dtype=np.int32),
            greedy=np.array([row[2] for row in part]),
        )
        names.append(path.name)
    return names
