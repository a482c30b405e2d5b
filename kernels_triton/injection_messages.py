"""Messages of the injection straight from the readout products: unit norms, the anchor's code, the shift by one row, gate and
message, in one launch.

A row's norm is found in the same pass as its products and divides them afterwards, so z is never rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import injection
from dspine.common.injection import InjectionWeights
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, expect_dtype, multiply, narrow, overlaps, power_of_2, sigmoid
from dspine.kernels_triton.injection_gate import COLUMNS, ROWS, STEP, WARPS, check_weights, fetch_three


@triton.jit
def _injection_messages_kernel(
    raw, codes, of_receiver, of_predecessor, message, bias, out, total, size, rank, root,
    R: tl.constexpr, BN: tl.constexpr, BA: tl.constexpr, RANK_PAD: tl.constexpr, BR: tl.constexpr, FETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * BN + tl.arange(0, BN)
    column = tl.program_id(0) * BA + tl.arange(0, BA)
    place = row % R  # 0: the anchor, 1: hears the anchor's code
    if OVERLAP:
        gdc_launch_dependents()
        if tl.program_id(1) == 0:
            fetch_three(of_receiver, of_predecessor, message, column, size, rank, FETCH)
        gdc_wait()
    hearing = tl.zeros([BN, BA], tl.float32)
    sending = tl.zeros([BN, BA], tl.float32)
    sent = tl.zeros([BN, BA], tl.float32)
    of_self = tl.zeros([BN], tl.float32)
    of_other = tl.zeros([BN], tl.float32)
    for start in range(0, RANK_PAD, BR):
        lane = start + tl.arange(0, BR)
        known = (lane < rank)[None, :]
        of_row = (row < total)[:, None] & known
        of_weight = (column < size)[None, :] & (lane < rank)[:, None]
        weight = column[None, :].to(tl.int64) * rank + lane[:, None]
        at = row.to(tl.int64)[:, None] * rank + lane[None, :]
        hears = tl.load(raw + at, mask=of_row & (place > 0)[:, None], other=0.0)
        before = tl.load(raw + at - rank, mask=of_row & (place > 1)[:, None], other=0.0)
        code = (row // R).to(tl.int64)[:, None] * rank + lane[None, :]
        before = tl.where((place == 1)[:, None], tl.load(codes + code, mask=of_row & (place == 1)[:, None], other=0.0), before)
        hearing += multiply(hears, tl.load(of_receiver + weight, mask=of_weight, other=0.0))
        sending += multiply(before, tl.load(of_predecessor + weight, mask=of_weight, other=0.0))
        sent += multiply(before, tl.load(message + weight, mask=of_weight, other=0.0))
        wide, other = hears.to(tl.float32), before.to(tl.float32)
        of_self += tl.sum(wide * wide, 1)
        of_other += tl.sum(other * other, 1)
    own = (root / tl.sqrt(tl.where(of_self > 0, of_self, root * root)))[:, None]  # rows of zeros stay zeros
    theirs = (root / tl.sqrt(tl.where((place > 1) & (of_other > 0), of_other, root * root)))[:, None]  # a code is not divided
    gate = hearing * own + sending * theirs
    gate += tl.load(bias + column, mask=column < size, other=0.0).to(tl.float32)[None, :]
    gated = tl.where((place > 0)[:, None], sent * theirs * sigmoid(gate), 0.0)
    inside = (row < total)[:, None] & (column < size)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * size + column[None, :], narrow(gated, out.dtype.element_ty), mask=inside)


def supports(raw: Tensor, anchor_code: Tensor, weights: InjectionWeights) -> bool:
    """One dtype out of bfloat16 and float32."""
    dtypes = {x.dtype for x in (raw, anchor_code, weights.message, weights.receiver_gate, weights.predecessor_gate)}
    return len(dtypes) == 1 and raw.dtype in FLOATS


def injection_messages(raw: Tensor, anchor_code: Tensor, weights: InjectionWeights) -> Tensor:
    """`common.injection.injection_messages`: the same arguments, results and errors; weights must be contiguous."""
    where = "injection_messages"
    injection.check_injection_messages(raw, anchor_code, weights)
    expect_dtype(where, "raw", raw, *FLOATS)
    check_weights(where, weights, raw.shape[-1], raw.dtype)
    batch, rows, rank = raw.shape
    size, total, overlap = weights.message.shape[0], batch * rows, overlaps(raw)
    out = torch.empty((batch, rows, size), dtype=raw.dtype, device=raw.device)
    if total:
        _injection_messages_kernel[(triton.cdiv(size, COLUMNS), triton.cdiv(total, ROWS))](
            raw.contiguous(), anchor_code.contiguous(), weights.receiver_gate, weights.predecessor_gate, weights.message,
            weights.bias, out, total, size, rank, rank**0.5, R=rows, BN=ROWS, BA=COLUMNS,
            RANK_PAD=triton.cdiv(rank, STEP) * STEP, BR=STEP, FETCH=power_of_2(rank, 64), OVERLAP=overlap, num_warps=WARPS,
            **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return out


def register() -> None:
    """Tell the core about `injection_messages` on CUDA."""
    _launch.register(injection_messages, supports)
