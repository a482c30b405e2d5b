"""Speed of drafter training on random weights: milliseconds a step, tokens a second, model FLOPs use, memory.

    python -m benchmarks.training_speed --shape qwen3-8b --recompute mlp          # 16 rows of 3,072, 512 anchors, block 16
    python -m benchmarks.training_speed --shape qwen3-8b --recompute mlp --with-target
    python -m benchmarks.training_speed --shape smollm2 --with-target

The step is the trainer's own: forward, losses, backward, AdamW on float32 masters, bfloat16 copies. Without --with-target the
target's features are random arrays, as if read from a cache. Work is counted from shapes (`dspine_cuda.training.flops`):
what is computed twice counts once. `drafter_mfu` leaves the frozen target's work out, `mfu` counts it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.provenance import provenance
from dspine.common.configs import DrafterConfig, DSpineConfig, RopeConfig
from dspine.common.masks import FULL
from dspine_cuda.drafter import DrafterModel
from dspine_cuda.training.batches import Batch, make_batch
from dspine_cuda.training.config import LossSection, OptimizerSection
from dspine_cuda.training.data import Conversation, pack_rows
from dspine_cuda.training.devices import pick_device
from dspine_cuda.training.flops import peak_flops, step_flops
from dspine_cuda.training.initial import RecomputedMLP
from dspine_cuda.training.loop import Ranks, training_step
from dspine_cuda.training.optimizer import MasterOptimizer
from dspine_cuda.training.step import LossForward
from dspine_cuda.training.target import FrozenTarget, TargetShape


@dataclasses.dataclass(frozen=True)
class Shape:
    """A target's sizes, and the run's: rows of `length` tokens, `anchors` blocks of `block` rows each."""

    target: TargetShape
    taps: tuple[int, ...]
    rank: int
    message: int
    top_k: int
    rows: int
    length: int
    anchors: int
    block: int


def _target(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocab: int) -> TargetShape:
    return TargetShape(
        "qwen3", layers, hidden, inner, heads, kv_heads, head_dim, vocab, 1e-6, 40_960, RopeConfig(theta=1e6), False
    )  # fmt: skip


SHAPES = {
    "qwen3-8b": Shape(_target(36, 4096, 12288, 32, 8, 128, 151_936), (1, 9, 17, 25, 33), 1024, 512, 16, 16, 3072, 512, 16),
    "smollm2": Shape(_target(30, 576, 1536, 9, 3, 64, 49_152), (1, 8, 14, 20, 27), 256, 128, 16, 32, 512, 128, 8),
    "tiny": Shape(_target(4, 32, 48, 4, 2, 16, 128), (1, 3), 12, 8, 4, 2, 48, 6, 5),
}


def drafter_shape(shape: Shape, layers: int) -> DrafterConfig:
    """The DSpine drafter of that target."""
    t = shape.target
    return DrafterConfig(
        method="dspine", hidden_size=t.hidden_size, intermediate_size=t.intermediate_size, num_layers=layers,
        num_heads=t.num_heads, num_kv_heads=t.num_kv_heads, head_dim=t.head_dim, rms_norm_eps=t.rms_norm_eps,
        vocab_size=t.vocab_size, max_position_embeddings=t.max_position_embeddings, block_size=shape.block,
        mask_token_id=t.vocab_size - 1, num_target_layers=t.num_layers, target_layer_ids=shape.taps, rope=t.rope,
        layer_types=(FULL,) * layers, is_causal=True,
        dspine=DSpineConfig(transfer_rank=shape.rank, message_size=shape.message, top_k=shape.top_k),
    )  # fmt: skip


def random_target(shape: Shape, device: torch.device, dtype: torch.dtype, whole: bool) -> FrozenTarget:
    """A target of random weights; without `whole` only its embedding and head (the layers are never run)."""
    t = shape.target if whole else dataclasses.replace(shape.target, num_layers=0)

    def normal(*size: int) -> Tensor:
        return torch.empty(*size, device=device, dtype=dtype).normal_(std=0.02)

    ones = torch.ones(t.hidden_size, device=device, dtype=dtype)
    weights = {"embed_tokens.weight": normal(t.vocab_size, t.hidden_size), "norm.weight": ones}
    weights["lm_head.weight"] = normal(t.vocab_size, t.hidden_size)
    for i in range(t.num_layers):
        stem = f"layers.{i}."
        for name, out in (("q", t.num_heads), ("k", t.num_kv_heads), ("v", t.num_kv_heads)):
            weights[f"{stem}self_attn.{name}_proj.weight"] = normal(out * t.head_dim, t.hidden_size)
        weights[f"{stem}self_attn.o_proj.weight"] = normal(t.hidden_size, t.num_heads * t.head_dim)
        for name in ("gate", "up"):
            weights[f"{stem}mlp.{name}_proj.weight"] = normal(t.intermediate_size, t.hidden_size)
        weights[f"{stem}mlp.down_proj.weight"] = normal(t.hidden_size, t.intermediate_size)
        weights |= {f"{stem}{name}_layernorm.weight": ones for name in ("input", "post_attention")}
        for name in ("q", "k"):
            weights[f"{stem}self_attn.{name}_norm.weight"] = torch.ones(t.head_dim, device=device, dtype=dtype)
    return FrozenTarget(t, weights, device, dtype, "random")


def random_drafter(config: DrafterConfig, device: torch.device, dtype: torch.dtype, recompute: str) -> DrafterModel:
    """A drafter of random weights with random unit codes."""
    with torch.device(device):
        model = DrafterModel(config)
        if recompute == "mlp":
            for layer in model.layers:
                layer.mlp = RecomputedMLP(config)
        codes = torch.randn(config.vocab_size, config.dspine.transfer_rank)  # type: ignore[union-attr]
    model.transfer_codes = codes / codes.norm(dim=-1, keepdim=True)
    return model.to(device, dtype).eval()


def random_batch(shape: Shape, step: int, states: Tensor | None) -> Batch:
    """Rows of one document each, the last three quarters supervised; every anchor taken."""
    rng = np.random.default_rng(step)
    length = shape.length
    conversations = [
        Conversation(rng.integers(0, shape.target.vocab_size, length), np.arange(length) >= length // 4)
        for _ in range(shape.rows)
    ]
    rows = pack_rows(conversations, [[i] for i in range(shape.rows)], length)
    return make_batch(
        rows, num_anchors=shape.anchors, proposals=shape.block - 1, gamma=7.0, replacement=0.5, seed=0, step=step, states=states
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the steps; medians over those after the warm-up."""
    shape, device = SHAPES[args.shape], pick_device(args.device)
    changes = {name: getattr(args, name) for name in ("rows", "anchors") if getattr(args, name) is not None}
    shape = dataclasses.replace(shape, **changes)
    cuda, dtype = device.type == "cuda", torch.bfloat16 if device.type == "cuda" else torch.float32
    config, target = drafter_shape(shape, args.layers), random_target(shape, device, dtype, args.with_target)
    model = random_drafter(config, device, dtype, args.recompute)
    loss = LossSection(chunk_rows=args.chunk_rows)
    forward = LossForward(model, target, loss, attention="flex" if cuda else "sdpa", compiled=cuda, replaced=True)
    optimizer = MasterOptimizer(model, OptimizerSection(learning_rate=6e-4))
    ranks, states = Ranks(device), None
    if not args.with_target:
        width = config.feature_size + config.hidden_size
        states = torch.empty(shape.rows, shape.length, width, device=device, dtype=dtype).normal_()
    batches = [random_batch(shape, step, None) for step in range(2)]
    work = step_flops(config, shape.target, batches[0], refinement=True, alignment="cosine", cached=states is not None)
    seconds = []
    for step in range(args.warmup + args.steps):
        started = perf_counter()
        batch = dataclasses.replace(batches[step % 2].to(device), states=states)
        weight = batch.weights.sum() if args.normalize_over == "micro_batch" else None
        shares = ranks.share(batch, args.micro_batches)
        _, value, norm = training_step(forward, optimizer, shares, ranks, 0.5, 1e-4, weight)
        assert bool(torch.isfinite(value)) and bool(torch.isfinite(norm))  # also waits for the device
        seconds.append(perf_counter() - started)
        print(f"step {step}: {1000 * seconds[-1]:.0f} ms", file=sys.stderr, flush=True)
    typical = statistics.median(seconds[args.warmup :])
    result: dict[str, Any] = {
        "shape": args.shape, "rows": shape.rows, "length": shape.length, "anchors": shape.anchors, "block": shape.block,
        "layers": args.layers, "with_target": args.with_target, "recompute": args.recompute, "chunk_rows": args.chunk_rows,
        "micro_batches": args.micro_batches, "normalize_over": args.normalize_over,
        "trainable_parameters": sum(p.numel() for p in model.parameters()), "device": str(device),
        "accelerator": torch.cuda.get_device_name(device) if cuda else None,
        "ms_per_step": 1000 * typical, "ms_all": [1000 * s for s in seconds[args.warmup :]],
        "context_tokens_per_second": shape.rows * shape.length / typical,
        "blocks_per_second": shape.rows * shape.anchors / typical,
        "block_rows_per_second": shape.rows * shape.anchors * shape.block / typical,
        "drafter_flops_per_step": work.drafter, "target_flops_per_step": work.target,
    }  # fmt: skip
    peak = peak_flops(device, dtype)
    if peak is not None:
        result["drafter_mfu"] = work.drafter / typical / peak
        result["mfu"] = (work.drafter + work.target) / typical / peak
        result["peak_memory_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
    return result | {"provenance": provenance()}


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure, print (and write) one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--anchors", type=int)
    parser.add_argument("--with-target", action="store_true", help="run the frozen target in every step")
    parser.add_argument("--recompute", choices=("none", "mlp"), default="none")
    parser.add_argument("--chunk-rows", type=int, default=8192)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--normalize-over", choices=("step", "micro_batch"), default="step")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    result = measure(args)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
