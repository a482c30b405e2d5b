"""Transition scores straight from the tables of codes and of the LM head: three launches, nothing gathered in front of them.

The launches are the last three of `transition_scores`; the readout's product and the receiver's half of the gate come from the
last layer's `injection_messages`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspine.common import transition
from dspine.common.injection import InjectionWeights
from dspine.kernels_triton import _launch, injection_gate
from dspine.kernels_triton._launch import FLOATS, contiguous, expect_dtype, expect_shape
from dspine.kernels_triton.injection_write import readable_norm
from dspine.kernels_triton.transition_scores import Operands, score


def supports(
    hidden: Tensor,
    heard: Tensor,
    anchor_code: Tensor,
    candidates: Tensor,
    codes: Tensor,
    head: Tensor,
    weights: InjectionWeights,
    norm: Any,
) -> bool:
    """bfloat16 or float32, one dtype for hidden, tables and weights; up to 64 candidates; contiguous tables; a norm whose
    weight and eps can be read."""
    read = (weights.write, weights.message, weights.predecessor_gate)
    dtypes = {hidden.dtype, anchor_code.dtype, codes.dtype, head.dtype, *(x.dtype for x in read)}
    same = len(dtypes) == 1 and hidden.dtype in FLOATS and heard.dtype == torch.float32
    return (
        same
        and 0 < candidates.shape[-1] <= 64
        and codes.is_contiguous()
        and head.is_contiguous()
        and readable_norm(norm, hidden)
    )


def candidate_scores(
    hidden: Tensor,
    heard: Tensor,
    anchor_code: Tensor,
    candidates: Tensor,
    codes: Tensor,
    head: Tensor,
    weights: InjectionWeights,
    norm: Any,
) -> Tensor:
    """`common.transition.candidate_scores`: the same arguments, results and errors. hidden and heard may be slices of larger
    blocks; tables and weights must be contiguous."""
    where = "candidate_scores"
    transition.check_candidate_scores(hidden, heard, anchor_code, candidates, codes, head, weights)
    expect_dtype(where, "hidden", hidden, *FLOATS)
    expect_dtype(where, "heard", heard, torch.float32)
    expect_dtype(where, "candidates", candidates, torch.int32, torch.int64)
    for name, array in (("anchor_code", anchor_code), ("codes", codes), ("head", head), ("weights.write", weights.write)):
        expect_dtype(where, name, array, hidden.dtype)
    injection_gate.check_weights(where, weights, codes.shape[-1], hidden.dtype)
    expect_shape(where, "weights.write", weights.write, (hidden.shape[-1], weights.message.shape[0]))
    contiguous(where, codes=codes, head=head, write=weights.write)
    (batch, count, _), k = hidden.shape, candidates.shape[-1]
    scores = torch.empty((batch, count, k, k), dtype=torch.float32, device=hidden.device)
    if not scores.numel():
        return scores
    rms = torch.empty(batch * count, dtype=torch.float32, device=hidden.device)
    blocks = (_blocks(hidden), _blocks(heard))
    return score(
        Operands(*blocks, codes, head, k, candidates.contiguous(), anchor_code.contiguous()), weights, norm, rms, scores
    )


def _blocks(x: Tensor) -> Tensor:
    """x [B, M, N] with M rows of N in a row; blocks may lie apart, at multiples of 16."""
    whole = x.stride(2) == 1 and x.stride(1) == x.shape[2] and x.stride(0) % 16 == 0
    return x if whole else x.contiguous()


def register() -> None:
    """Tell the core about `candidate_scores` on CUDA."""
    _launch.register(candidate_scores, supports)
