"""A Gated DeltaNet layer between its two products: inputs, recurrence, gated norm. Three launches, each of which may start
under the one in front of it (programmatic dependent launch).

Factors and convolution inputs go straight to where the commit reads them. The recurrence fetches the state and folds the
last round's factors into it before it waits; nothing in front of it in the same round writes either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import gdn, gdn_rounds
from dspine.common.gdn import GdnFactors, GdnTokens
from dspine.common.gdn_rounds import GdnKept, GdnLayerWeights
from dspine.kernels_triton import _launch, gdn_inputs, gdn_verify
from dspine.kernels_triton._launch import (
    FLOATS,
    contiguous,
    early,
    expect_dtype,
    narrow,
    overlaps,
    power_of_2,
    programs_of,
    sigmoid,
)

HEADS = 4  # of one program of the gated norm


@triton.jit
def _gated_norm_kernel(
    mixed, gate, weight, out, pairs, heads, gate_stride, eps, DV: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """out = weight * mixed / rms(mixed) * silu(gate), a row of DV for every (token, head) pair."""
    pair, lane = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BD)
    inside = (pair < pairs)[:, None] & (lane < DV)[None, :]
    scale = tl.load(weight + lane, mask=lane < DV, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    at = pair.to(tl.int64)[:, None] * DV + lane[None, :]
    x = tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32)
    of_gate = (pair // heads).to(tl.int64)[:, None] * gate_stride + (pair % heads)[:, None] * DV + lane[None, :]
    z = tl.load(gate + of_gate, mask=inside, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 1) / DV + eps)[:, None] * scale[None, :]
    tl.store(out + at, narrow(x * (z * sigmoid(z)), out.dtype.element_ty), mask=inside)


def gated_norm(mixed: Tensor, gate: Tensor, weight: Tensor, eps: float, out: Tensor, overlap: bool = False) -> None:
    """mixed [B, w, Hv, Dv] and out contiguous; gate [B, w, Hv Dv], whose rows may lie apart. None checked."""
    heads, size = mixed.shape[2:]
    pairs = mixed.shape[0] * mixed.shape[1] * heads
    each = programs_of(pairs, HEADS)
    _gated_norm_kernel[(triton.cdiv(pairs, each),)](
        mixed, gate, weight, out, pairs, heads, gate.stride(1), eps, DV=size, BN=each, BD=power_of_2(size), num_warps=4,
        **early(overlap),
    )  # fmt: skip


def supports(
    projected: Tensor, window: Tensor, state: Tensor, past: GdnFactors, past_m: Tensor, room: GdnKept,
    weights: GdnLayerWeights, live: Tensor | None = None,
) -> bool:  # fmt: skip
    """bfloat16 and float32, 1..16 tokens, key heads of at most 256, states float32, a norm whose weight and eps are read."""
    layout, norm = weights.layout, weights.norm
    kinds = projected.dtype in FLOATS and state.dtype == torch.float32 and room.factors.k.dtype == projected.dtype
    sizes = projected.dim() == 3 and 1 <= projected.shape[1] <= gdn.MAX_TOKENS and layout.key_dim <= 256
    return kinds and sizes and isinstance(norm.weight, Tensor) and isinstance(norm.eps, float)


def gdn_round(
    projected: Tensor, window: Tensor, state: Tensor, past: GdnFactors, past_m: Tensor, room: GdnKept,
    weights: GdnLayerWeights, live: Tensor | None = None,
) -> tuple[Tensor, GdnKept, Tensor]:  # fmt: skip
    """`common.gdn_rounds.gdn_round`: `room` and `state` are written in place; all memory must be contiguous."""
    gdn_rounds.check_round(projected, room, weights)
    layout, sections = weights.layout, weights.sections
    batch, count = projected.shape[:2]
    rows, factors = room.inputs.shape[1], room.factors
    expect_dtype("gdn_round", "projected", projected, *FLOATS)
    expect_dtype("gdn_round", "room.inputs", room.inputs, projected.dtype)
    contiguous(
        "gdn_round", state=state, window=window, conv=weights.inputs.conv, **{"room.inputs": room.inputs},
        **{f"{name}.{part}": getattr(f, part) for name, f in (("past", past), ("room", factors)) for part in ("z", "k", "g")},
    )  # fmt: skip
    projected = projected if projected.stride(2) == 1 and _behind(projected) else projected.contiguous()
    inputs, z, b, a = projected.split_with_sizes(sections, 2)

    def empty(*shape: int, dtype: torch.dtype = projected.dtype) -> Tensor:
        return torch.empty((batch, count, *shape), dtype=dtype, device=projected.device)

    heads, size = layout.value_heads, layout.value_dim
    tokens = GdnTokens(
        empty(layout.key_heads, layout.key_dim), factors.k, empty(heads, size), empty(heads, dtype=torch.float32),
        empty(heads, dtype=torch.float32),
    )  # fmt: skip
    gdn._check_inputs(inputs, window, a, b, weights.inputs, layout)
    key = GdnFactors(*(x.unsqueeze(0) for x in (past.z, past.k, past.g)))
    gdn._check_commit(state.unsqueeze(0), key, past_m)
    mixed, out = empty(heads, size), empty(heads, size)
    overlap = overlaps(projected)
    gdn_inputs.launch(inputs, window, a, b, weights.inputs, layout, tokens, room.inputs, overlap)
    gdn_verify.launch(
        tokens.q, tokens.k, tokens.v, tokens.log_decay, tokens.beta, state, mixed, factors.z, factors.g, live, past, past_m,
        overlap=overlap, kept_rows=rows,
    )  # fmt: skip
    gated_norm(mixed, z, weights.norm.weight, weights.norm.eps, out, overlap)
    kept = GdnKept(GdnFactors(*(x[:, :count] for x in (factors.z, factors.k, factors.g))), room.inputs[:, :count])
    return out.view(batch, count, heads * size), kept, state


def _behind(x: Tensor) -> bool:
    """Whether the sequences of x [B, w, S] follow each other at the distance of its rows."""
    return x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def register() -> None:
    """Tell the core about `gdn_round` on CUDA."""
    _launch.register(gdn_round, supports)
