"""MLX versions of core operations (`common/registry`); loading a target or a drafter registers them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from dspine.common import arrays as core
from dspine.common.registry import register_device, register_kernel
from dspine.kernels_metal import (
    accept,
    correct_length,
    draft_signals,
    gathered_rows,
    gdn_commit,
    gdn_inputs,
    gdn_verify,
    injection_gate,
    injection_write,
    path_walk,
    quantized_rows,
    select_length,
    transition_scores,
)
from dspine_mlx import fused, lean_gdn
from dspine_mlx.arrays import device_name

METAL = (
    *(gdn_inputs, gdn_verify, gdn_commit, injection_gate, injection_write, draft_signals, transition_scores, path_walk),
    *(select_length, correct_length, accept, quantized_rows, gathered_rows),
)
_BLOCK = 128  # two short sorts instead of one over the whole vocabulary


def top_k(x: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """`common.arrays.top_k` for a long last axis: x [..., V] -> (values [..., k], ids int32 [..., k]), descending.

    The k largest lie in the k blocks of 128 with the largest maxima, so only those are sorted. Of equal values the lower
    id comes first: `mx.argsort` is stable, and the picked blocks are put back into ascending order before the second sort.
    """
    size, pad = x.shape[-1], -x.shape[-1] % _BLOCK
    if pad:
        x = mx.concatenate([x, mx.full((*x.shape[:-1], pad), float("-inf"), dtype=x.dtype)], axis=-1)
    blocks = mx.reshape(x, (*x.shape[:-1], (size + pad) // _BLOCK, _BLOCK))
    picked = mx.sort(mx.argsort(-mx.max(blocks, axis=-1), axis=-1)[..., :k], axis=-1)
    inside = mx.take_along_axis(blocks, picked[..., None], axis=-2)
    inside = mx.reshape(inside, (*inside.shape[:-2], -1))
    order = mx.argsort(-inside, axis=-1)[..., :k]
    ids = mx.take_along_axis(picked, order // _BLOCK, axis=-1) * _BLOCK + order % _BLOCK
    return mx.take_along_axis(inside, order, axis=-1), ids.astype(mx.int32)


def _top_k_pays(x: mx.array, k: int) -> bool:
    return mx.issubdtype(x.dtype, mx.floating) and 2 * k * _BLOCK <= x.shape[-1]


def _exact_on_cpu(x: mx.array, *rest: Any) -> bool:
    return x.dtype == mx.float32  # in bfloat16 MLX sums in bfloat16 there: errors of some percent


def library_rows(x: mx.array, words: mx.array, scales: mx.array, biases: mx.array, bits: int, group_size: int) -> mx.array:
    """`common.quantized_rows.quantized_rows` by MLX's own product."""
    packed = mx.view(words, mx.uint32), scales.astype(x.dtype), biases.astype(x.dtype)
    return mx.quantized_matmul(x, *packed, transpose=True, group_size=group_size, bits=bits)


def library_gathered(
    x: mx.array, words: mx.array, scales: mx.array, biases: mx.array, picks: mx.array, bits: int, group_size: int
) -> mx.array:
    """`common.quantized_rows.gathered_rows` by MLX's own product."""
    packed = mx.view(words, mx.uint32), scales.astype(x.dtype), biases.astype(x.dtype)
    rows = mx.expand_dims(mx.repeat(x, picks.shape[0] // x.shape[0], axis=0), 1)
    out = mx.gather_qmm(rows, *packed, rhs_indices=picks, transpose=True, group_size=group_size, bits=bits)
    return mx.squeeze(out, 1)


def register() -> None:
    """Register every MLX version of a core operation; calling it again changes nothing."""
    register_device("mlx", device_name)
    for device in ("cpu", "metal", "cuda"):
        register_kernel(
            core.top_k.__name__,
            namespace="mlx",
            device=device,
            function=top_k,
            name="mlx-two-level",
            supports=_top_k_pays,
        )
    for device, supports in (("cpu", _exact_on_cpu), ("cuda", None)):
        own = (("quantized_rows", library_rows), ("gathered_rows", library_gathered))
        for operation, function in own:
            names = {"namespace": "mlx", "device": device, "name": "mlx-library"}
            register_kernel(operation, function=function, supports=supports, **names)
    for device, name, functions in (("cpu", "mlx-lean", lean_gdn.KERNELS), ("cuda", "mlx-compiled", fused.OPERATIONS)):
        for function, supports in functions:
            names = {"namespace": "mlx", "device": device, "name": name}
            register_kernel(function.__name__, function=function, supports=supports, **names)
    for kernel in METAL:  # for device `metal` only: elsewhere MLX runs the core's own code
        kernel.register()
