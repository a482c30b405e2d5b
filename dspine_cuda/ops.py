"""Torch versions of core operations. `register()` is called once, when the runtime is first used."""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor

from dspine.common import arrays, attention, gating, gdn, norms, signals, transition
from dspine.common.registry import register_device, register_kernel, registered_kernel
from dspine_cuda import cpu_gdn, cpu_ops

_TRITON_KERNELS = (
    "accept",
    "add_rms_norm",
    "attention_inputs",
    "block_attention",
    "candidate_scores",
    "correct_length",
    "draft_signals",
    "gated_rows",
    "gdn_commit",
    "gdn_inputs",
    "gdn_keep",
    "gdn_round",
    "gdn_verify",
    "injection_gate",
    "injection_messages",
    "injection_write",
    "linear_rows",
    "path_walk",
    "pick_experts",
    "routed_experts",
    "select_length",
    "settle_round",
    "sigmoid_mul",
    "silu_mul",
    "stepping",
    "transition_scores",
)
_LOW_WORD = 0xFFFFFFFF
_LOOKED_AT = 4  # times k values that `top_k_cpu` looks at
_ONE_PASS = 16  # most values that the kernel of `draft_signals` finds for `top_k`: a program is compiled for every k
_LARGE = 4096  # entries from which on its two launches are fewer than those over keys
_KEYED = (torch.float32, torch.bfloat16, torch.float16)


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """x [..., V] -> (values [..., k], ids int64 [..., k]), descending, of equal values the lower id first.

    `torch.topk` leaves the order of ties open, and bfloat16 logits tie often. So it runs over int64 keys that hold the
    value in the high word (the bits of a float32, made monotone) and the inverted id in the low word: no two are equal.
    """
    # + 0.0 turns -0.0 into 0.0: they are equal as numbers, but not as bits
    bits = (x.to(torch.float32) + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(x.shape[-1], device=x.device)
    keys = torch.topk((ordered << 32) | (_LOW_WORD - ids), k, dim=-1).values
    picks = _LOW_WORD - (keys & _LOW_WORD)
    return x.gather(-1, picks), picks


def top_k_cpu(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top_k` on the CPU, where a read costs nothing: plain `torch.topk` of more than k, put in order. Only a row whose k-th
    value may have equals beyond those (or is not a number) takes the keys."""
    values, ids = torch.topk(x, min(_LOOKED_AT * k, x.shape[-1]), dim=-1)
    if values.shape[-1] < x.shape[-1] and not bool((values[..., k - 1] > values[..., -1]).all()):
        return top_k(x, k)
    ids = ids.sort(dim=-1).values
    values, order = x.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values[..., :k], ids.gather(-1, order[..., :k])


def top_k_cuda(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top_k` of a vocabulary by the kernel of `draft_signals`: one pass, the same order of ties."""
    kernel = registered_kernel(signals.draft_signals.__name__, "torch", "cuda")
    if kernel is None or k > _ONE_PASS or x.shape[-1] < _LARGE or not kernel.supports(x, k):  # type: ignore[misc]
        return top_k(x, k)
    ids = kernel.function(x, k).ids
    return x.gather(-1, ids), ids


def _supports_top_k(x: Tensor, k: int) -> bool:
    return x.dtype in _KEYED and 0 < k <= x.shape[-1]


def register() -> None:
    """Tell the core about torch's devices and kernels (idempotent)."""
    register_device("torch", lambda array: array.device.type)
    for device, function in (("cpu", top_k_cpu), ("cuda", top_k_cuda)):
        name = arrays.top_k.__name__
        register_kernel(
            name, namespace="torch", device=device, function=function, name="torch.topk over keys", supports=_supports_top_k
        )
    on_cpu = (
        (transition.transition_scores, cpu_ops.transition_scores, cpu_ops.on_cpu_in_half),
        (transition.path_walk, cpu_ops.path_walk, None),
        (signals.draft_signals, cpu_ops.draft_signals, None),
        (gdn.gdn_inputs, cpu_gdn.gdn_inputs, cpu_gdn.supports_inputs),
        (gdn.gdn_verify, cpu_gdn.gdn_verify, cpu_gdn.supports_verify),
        (gdn.gdn_commit, cpu_gdn.gdn_commit, cpu_gdn.supports_commit),
        (attention.attention_inputs, cpu_ops.attention_inputs, None),
        (norms.add_rms_norm, cpu_ops.add_rms_norm, cpu_ops.has_own_norm),
        (gating.silu_mul, cpu_ops.silu_mul, None),
    )
    for core, function, supports in on_cpu:
        name = core.__name__
        register_kernel(name, namespace="torch", device="cpu", function=function, name=f"torch {name}", supports=supports)
    if torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        for module in _TRITON_KERNELS:  # each under its operation's name
            importlib.import_module(f"dspine.kernels_triton.{module}").register()
