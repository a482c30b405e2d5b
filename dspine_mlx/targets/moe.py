"""A mixture-of-experts block of mlx-lm in two halves: which experts (the router), and what they say.

The halves meet where HybridSpec stops and resumes. Router weights, experts (`SwitchGLU`, quantised or not) and the
shared expert are the loaded modules; only the choice of the top k is ours, because `mx.argpartition` breaks ties as it
likes, and a tie broken one way for one row and another way for sixteen changes the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import SwitchGLU

from dspine.common.arrays import top_k
from dspine.common.errors import DSpineError
from dspine_mlx.arrays import MlxArrays, device_name

PARTS = ("up_proj", "gate_proj", "down_proj")
PROBED = 8  # experts that `gather_error` asks, and picks a token of its probe
GATHERED = {"float32": 1e-2, "bfloat16": 0.05}  # its limit: TF32 and the rounding of each product pass


@dataclass(frozen=True)
class Routing:
    """picks int32 [B, T, k], best first, of equal ones the lower id; scores [B, T, k] in the dtype of the block's input."""

    picks: mx.array
    scores: mx.array

    def first(self, count: int) -> Routing:
        """The first `count` tokens."""
        return Routing(self.picks[:, :count], self.scores[:, :count])


def is_moe(mlp: Any) -> bool:
    """Whether a layer's `mlp` is a block with a router."""
    return all(name in mlp for name in ("gate", "switch_mlp"))


def route(block: Any, x: mx.array) -> Routing:
    """Router of `block` on post-attention-normed x [B, T, H]: softmax over all experts in float32, the top k, renormalised
    where the model does so. The choice is made on the logits, so that two of them never tie by the softmax's rounding."""
    logits = block.gate(x).astype(mx.float32)
    _, picks = top_k(logits, block.top_k)
    scores = mx.take_along_axis(mx.softmax(logits, axis=-1), picks, axis=-1)
    if block.norm_topk_prob:
        scores = scores / mx.sum(scores, axis=-1, keepdims=True)
    return Routing(picks.astype(mx.int32), scores.astype(x.dtype))


def experts(block: Any, x: mx.array, routing: Routing) -> mx.array:
    """Output [B, T, H] of the picked experts of `block`, weighted, plus the shared expert where there is one."""
    out = mx.sum(block.switch_mlp(x, routing.picks) * routing.scores[..., None], axis=-2)
    if "shared_expert" in block:
        out = out + mx.sigmoid(block.shared_expert_gate(x)) * block.shared_expert(x)
    return out.astype(x.dtype)


def check_gathers(model: nn.Module, name: str, dtype: str) -> None:
    """DSpineError where gathered products of the experts are wrong on this device: mlx-lm's own call would be just as wrong,
    and the text quietly worse. One block is asked for each packing and shape that the model has."""
    kinds: dict[tuple[Any, ...], SwitchGLU] = {}
    for module in model.modules():
        if type(module) is SwitchGLU:  # others may compute something else
            kinds.setdefault(tuple(_kind(module[part]) for part in PARTS), module)
    for mlp in kinds.values():
        error = gather_error(mlp, getattr(mx, dtype))
        if error is not None and not error <= GATHERED[dtype]:
            raise DSpineError(
                f"{name}: MLX's gathered products of the experts are wrong on {device_name()} (relative difference {error:.3g} "
                f"from one expert at a time, expected at most {GATHERED[dtype]}); use --dtype float32, quantised experts, or "
                "--backend torch"
            )


def _kind(part: Any) -> tuple[Any, ...]:
    packing = (getattr(part, name, None) for name in ("bits", "group_size", "mode"))
    return (type(part), part.weight.dtype, tuple(part.weight.shape), *packing)


def gather_error(mlp: SwitchGLU, dtype: mx.Dtype) -> float | None:
    """Relative distance (Frobenius) of the gathered products of experts from those with one expert after another in float32,
    the larger of two: for one token, and for as many as mlx-lm sorts by expert. None for packings that this does not know. MLX
    has a kernel of its own for gathers on every device and for every dtype and packing."""
    parts = [mlp[name] for name in PARTS]
    if any("scales" in part and part.mode != "affine" for part in parts):
        return None
    count = min(PROBED, parts[0].weight.shape[0])
    matrices = [[_matrix(part, expert) for expert in range(count)] for part in parts]
    width, errors = matrices[0][0].shape[1], []
    for tokens in (1, 80 // count):
        x = mx.sin(mx.reshape(mx.arange(tokens * width), (1, tokens, width)) * 0.7).astype(dtype)
        picks = ((mx.arange(tokens)[:, None] + mx.arange(count)) % count)[None]
        got = mlp(x, picks.astype(mx.int32)).astype(mx.float32)
        rows = mx.stack([_one_expert(mlp, x.astype(mx.float32), each) for each in zip(*matrices, strict=True)], axis=2)
        wanted = mx.take_along_axis(rows, picks[..., None], axis=2)
        errors.append(mx.linalg.norm(got - wanted) / mx.maximum(mx.linalg.norm(wanted), 1e-9))
    return float(MlxArrays().to_host(mx.max(mx.stack(errors)))[0])


def _matrix(part: Any, expert: int) -> mx.array:
    """float32 [out, in] of one expert, dequantised."""
    if "scales" not in part:
        return part.weight[expert].astype(mx.float32)
    packed = [part[name][expert] for name in ("weight", "scales", "biases") if part.get(name) is not None]
    return mx.dequantize(*packed, group_size=part.group_size, bits=part.bits, mode=part.mode).astype(mx.float32)


def _one_expert(mlp: Any, x: mx.array, matrices: tuple[mx.array, mx.array, mx.array]) -> mx.array:
    up, gate, down = matrices
    return mlp.activation(x @ up.T, x @ gate.T) @ down.T
