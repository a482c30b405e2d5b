"""Equation 5 in one launch: calibration, the logistic model, prefix products, the best length (`algorithms` 4)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspine.common.selection import lengths
from dspine.common.selection.lengths import LengthChoice, LengthTables
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import expect_dtype, expect_shape, power_of_2, sigmoid

MOST = 256  # drafts


@triton.jit
def _select_length_kernel(
    confidence, entropy, limit, calibration, coefficients, cost, length, stage_zero, survival, rate,
    M: tl.constexpr, MP: tl.constexpr, POINTS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, MP)
    inside = i < M
    h = tl.load(entropy + batch * M + i, mask=inside, other=0.0)
    mean = tl.load(entropy + batch * M)
    means = tl.zeros([MP], dtype=tl.float32)
    for t in tl.static_range(M):
        means = tl.where(i == t, mean, means)
        mean = (tl.load(entropy + batch * M + t) + mean) / 2
    change = tl.log((h + EPS) / (means + EPS))
    place = tl.minimum(tl.maximum(tl.load(confidence + batch * M + i, mask=inside, other=0.0), 0.0) * (POINTS - 1), POINTS - 1)
    left = tl.minimum(tl.floor(place), POINTS - 2)
    at = calibration + i * POINTS + left.to(tl.int32)
    low = tl.load(at, mask=inside, other=0.0)
    calibrated = low + (place - left) * (tl.load(at + 1, mask=inside, other=0.0) - low)
    position = (i + 1).to(tl.float32)
    logit = tl.load(coefficients) + tl.load(coefficients + 1) * calibrated + tl.load(coefficients + 2) * position
    logit += tl.load(coefficients + 3) * calibrated * position
    logit += tl.load(coefficients + 4) * tl.log(1.0 + h) + tl.load(coefficients + 5) * change
    accepted = tl.where(inside, sigmoid(logit), 0.0)
    alive = tl.cumprod(accepted, 0)
    tl.store(survival + batch * M + i, alive, mask=inside)
    score = tl.cumsum(alive, 0) + 1 - rate * tl.load(cost + 2 + i, mask=inside, other=0.0)
    best = tl.argmax(tl.where(inside, score, float("-inf")), 0).to(tl.int32) + 2
    tl.store(length + batch, best)
    cap = tl.load(limit + batch).to(tl.int32)
    tl.store(stage_zero + batch, tl.minimum(tl.minimum(best + 1, M + 1), cap))


def supports(confidence: Tensor, entropy: Tensor, limit: Tensor, tables: LengthTables) -> bool:
    """float32 throughout, up to 256 drafts."""
    floats = (confidence, entropy, tables.calibration, tables.coefficients, tables.cost)
    return all(x.dtype == torch.float32 for x in floats) and confidence.dim() == 2 and 0 < confidence.shape[1] <= MOST


def select_length(confidence: Tensor, entropy: Tensor, limit: Tensor, tables: LengthTables) -> LengthChoice:
    """`common.selection.lengths.select_length`: the same arguments, results and errors."""
    lengths._check_tables(confidence, entropy, tables)
    where = "select_length"
    for name, x in (("confidence", confidence), ("entropy", entropy), ("tables.calibration", tables.calibration),
                    ("tables.coefficients", tables.coefficients), ("tables.cost", tables.cost)):  # fmt: skip
        expect_dtype(where, name, x, torch.float32)
    expect_dtype(where, "limit", limit, torch.int32, torch.int64)
    batch, drafts = confidence.shape
    expect_shape(where, "limit", limit, (batch,))
    length, stage_zero = (torch.empty(batch, dtype=torch.int32, device=confidence.device) for _ in range(2))
    survival = torch.empty((batch, drafts), dtype=torch.float32, device=confidence.device)
    if batch:
        _select_length_kernel[(batch,)](
            confidence.contiguous(), entropy.contiguous(), limit.contiguous(), tables.calibration.contiguous(),
            tables.coefficients.contiguous(), tables.cost.contiguous(), length, stage_zero, survival, float(tables.rate),
            M=drafts, MP=power_of_2(drafts), POINTS=tables.calibration.shape[1], EPS=lengths.ENTROPY_EPS, num_warps=1,
        )  # fmt: skip
    return LengthChoice(length, stage_zero, survival)


def register() -> None:
    """Tell the core about `select_length` on CUDA."""
    _launch.register(select_length, supports)
