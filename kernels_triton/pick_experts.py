"""A router's choice in one launch: softmax, the k largest, their weights. One program a token.

The k largest are taken one after another, in one warp: the largest bits, then the lowest expert that has them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import experts
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, early, narrow, overlaps, power_of_2

MOST_EXPERTS, MOST_PICKS = 4096, 64


@triton.jit
def _pick_experts_kernel(
    logits, picks, weights, stride, E: tl.constexpr, K: tl.constexpr, E_PAD: tl.constexpr, K_PAD: tl.constexpr,
    NORMALISED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    expert, place = tl.arange(0, E_PAD), tl.arange(0, K_PAD)
    inside = expert < E
    logit = tl.load(logits + row.to(tl.int64) * stride + expert, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(inside, logit, -3.0e38), 0)
    probability = tl.where(inside, tl.exp(tl.where(inside, logit - largest, 0.0)), 0.0)
    probability = probability / tl.sum(probability, 0)
    # the bits of a probability are ordered as it is; no expert's are below 0, NaN of either sign included: what is picked is
    # always an expert
    key = tl.where(inside, probability.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    chosen, bits = tl.zeros([K_PAD], tl.int32), tl.zeros([K_PAD], tl.int32)
    for j in tl.static_range(K):
        best = tl.max(key, 0)
        first = tl.min(tl.where(key == best, expert, E_PAD), 0)
        chosen, bits = tl.where(place == j, first, chosen), tl.where(place == j, best, bits)
        key = tl.where(expert == first, -1, key)
    value = bits.to(tl.float32, bitcast=True)
    if NORMALISED:
        value = value / tl.sum(value, 0)
    at = row * K + place
    tl.store(picks + at, chosen.to(tl.int64), mask=place < K)
    tl.store(weights + at, narrow(value, logits.dtype.element_ty).to(tl.float32), mask=place < K)


def supports(logits: Tensor, k: int, normalised: bool) -> bool:
    """bfloat16 and float32 logits of up to 4,096 experts, of which up to 64 are picked; experts behind one another."""
    fits = logits.dim() == 2 and 1 <= logits.shape[1] <= MOST_EXPERTS and 1 <= k <= min(MOST_PICKS, logits.shape[1])
    return fits and logits.dtype in FLOATS and logits.stride(1) == 1


def launch(logits: Tensor, picks: Tensor, weights: Tensor, normalised: bool) -> None:
    """Launch into picks int64 [N, k] and weights float32 [N, k]; rows of the logits may lie apart, nothing is checked."""
    (rows, count), k = logits.shape, picks.shape[1]
    _pick_experts_kernel[(rows,)](
        logits, picks, weights, logits.stride(0), E=count, K=k, E_PAD=power_of_2(count, 32), K_PAD=power_of_2(k),
        NORMALISED=normalised, num_warps=max(1, power_of_2(count) // 256), **early(overlaps(logits)),
    )  # fmt: skip


def pick_experts(logits: Tensor, k: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """`common.experts.pick_experts`: the same arguments, results (picks int64) and errors."""
    experts.check_picks(logits, k)
    shape = (logits.shape[0], k)
    picks = torch.empty(shape, dtype=torch.int64, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        launch(logits if logits.stride(1) == 1 else logits.contiguous(), picks, weights, normalised)
    return picks, weights


def register() -> None:
    """Tell the core about `pick_experts` on CUDA."""
    _launch.register(pick_experts, supports)
