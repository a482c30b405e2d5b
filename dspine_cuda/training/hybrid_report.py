"""What a trained hybrid is worth: held-out perplexity, which experts are used, routing novelty across layers, sample text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from dspine_cuda.training.data import Conversation
from dspine_cuda.training.hybrid_generate import cut_loop, generate
from dspine_cuda.training.hybrid_model import HybridModel

BLOCK = 16


@torch.inference_mode()
def held_out_pass(
    model: HybridModel, conversations: list[Conversation], batch: int = 32, longest: int = 512
) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
    """Perplexities, and of every ANSWER token: its layer-by-layer picks int [T, layers, k] and its conversation int [T]."""
    device = model.embed_tokens.weight.device
    sums = {"all": 0.0, "answers": 0.0}
    counts = {"all": 0, "answers": 0}
    picks, owners = [], []
    for start in range(0, len(conversations), batch):
        part = [c for c in conversations[start : start + batch] if len(c.tokens) > 1]
        width = max(min(len(c.tokens), longest) for c in part)
        tokens, real, answer = (np.zeros((len(part), width), dtype=np.int64) for _ in range(3))
        for row, c in enumerate(part):
            count = min(len(c.tokens), width)
            tokens[row, :count], real[row, :count] = c.tokens[:count], 1
            answer[row, c.prompt_length : count] = 1
        ids = torch.from_numpy(tokens).to(device)
        positions = torch.arange(width, device=device).expand(len(part), -1)
        hidden, _, routings = model(ids, positions)
        loss = F.cross_entropy(model.logits(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none").cpu().numpy()
        for name, mask in (("all", real), ("answers", answer)):
            chosen = mask[:, 1:].astype(bool).ravel()
            sums[name] += float(loss[chosen].sum())
            counts[name] += int(chosen.sum())
        chosen_experts = torch.stack([r.chosen.view(len(part), width, -1) for r in routings], dim=2).cpu().numpy()
        picks.append(chosen_experts[answer.astype(bool)])
        owners.append(start + np.nonzero(answer)[0])
    perplexity = {name: math.exp(sums[name] / counts[name]) for name in sums}
    return perplexity, np.concatenate(picks), np.concatenate(owners)


def expert_usage(picks: np.ndarray, experts: int) -> list[dict[str, Any]]:
    """Per layer: the share of assignments of every expert, and the entropy as a share of the largest possible."""
    rows = []
    for layer in range(picks.shape[1]):
        share = np.bincount(picks[:, layer].ravel(), minlength=experts) / picks[:, layer].size
        entropy = float(-(share[share > 0] * np.log(share[share > 0])).sum() / math.log(experts))
        rows.append({"layer": layer, "entropy": round(entropy, 4), "share": [round(float(s), 5) for s in share]})
    return rows


def novelty(picks: np.ndarray, owners: np.ndarray, experts: int) -> np.ndarray:
    """New distinct experts that each token adds to its block of 16, int [blocks, 16, layers]: blocks lie end to end in every
    answer."""
    blocks = []
    for owner in np.unique(owners):
        rows = picks[owners == owner]
        count = len(rows) // BLOCK
        blocks.append(rows[: count * BLOCK].reshape(count, BLOCK, *rows.shape[1:]))
    grouped = np.concatenate(blocks)
    used = np.zeros((*grouped.shape[:3], experts), dtype=bool)
    np.put_along_axis(used, grouped, True, axis=-1)
    seen = np.logical_or.accumulate(used, axis=1).sum(axis=-1)
    return np.diff(seen, axis=1, prepend=0)


def novelty_correlation(new: np.ndarray) -> dict[str, Any]:
    """Correlation of layer 0's new experts with those of all later layers, position means removed (the paper's section 12.1:
    0.49 and 0.52 on its models), and the slope: later-layer pairs per new expert of layer 0."""
    first, later = new[:, 1:, 0].astype(np.float64), new[:, 1:, 1:].sum(axis=-1).astype(np.float64)
    first, later = first - first.mean(axis=0), later - later.mean(axis=0)
    slope = float((first * later).sum() / (first * first).sum())
    value = float((first * later).sum() / np.sqrt((first * first).sum() * (later * later).sum()))
    return {"correlation": round(value, 4), "slope": round(slope, 4), "blocks": len(new)}


def mean_new_experts(new: np.ndarray) -> list[float]:
    """Mean new (layer, expert) pairs at each position of a block."""
    return [round(float(v), 3) for v in new.sum(axis=-1).mean(axis=0)]


def samples(model: HybridModel, tokenizer: Any, prompts: list[np.ndarray], max_new: int = 160) -> list[dict[str, str]]:
    """Greedy text, and text at temperature 0.8, for each prompt."""
    warm = [0.0] * len(prompts) + [0.8] * len(prompts)
    answers = generate(model, prompts * 2, warm, max_new, seed=0)
    texts = [tokenizer.decode(cut_loop(a).tolist()) for a in answers]
    half = len(prompts)
    return [
        {"prompt": tokenizer.decode(p.tolist()), "greedy": texts[i], "temperature 0.8": texts[half + i]}
        for i, p in enumerate(prompts)
    ]


def make_report(model: HybridModel, held_out: list[Conversation], tokenizer: Any, shown: int = 6) -> dict[str, Any]:
    """Everything as one JSON-able dictionary."""
    perplexity, picks, owners = held_out_pass(model, held_out)
    experts = model.shape.num_experts
    new = novelty(picks, owners, experts)
    usage = expert_usage(picks, experts)
    short = [c.tokens[: c.prompt_length].astype(np.int64) for c in held_out if 8 < c.prompt_length < 64][:shown]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "held_out_conversations": len(held_out),
        "perplexity": {name: round(value, 4) for name, value in perplexity.items()},
        "routing_novelty": novelty_correlation(new),
        "mean_new_pairs_by_position": mean_new_experts(new),
        "least_used_share": min(min(row["share"]) for row in usage),
        "most_used_share": max(max(row["share"]) for row in usage),
        "expert_usage": usage,
        "samples": samples(model, tokenizer, short),
    }
