"""A few rows times a large matrix, at the speed of reading the matrix once.

Blocks of 16 rows whatever N is, and launch parameters that depend on the matrix alone: a row's bits do not depend on the
rows beside it. Weights are constants, so a program asks the cache for its part of them before it waits for the launch in
front (programmatic dependent launch): memory stays busy while one kernel ends and the next begins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import linear_rows as core
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import FLOATS, contiguous, fetch, multiply, narrow, overlaps, power_of_2, programs_of

MAX_ROWS, ROWS = 64, 16
ALIGNED = 16  # elements: rows of the result begin at multiples of it, so that what follows may load them 16 bytes at a time


@dataclass(frozen=True)
class Launch:
    """columns: outputs of a program; step: inputs it reads at a time; stages: of the pipeline; fetch: inputs of each column
    that are asked for before the wait (0: none)."""

    columns: int
    step: int
    num_warps: int = 4
    stages: int = 4
    fetch: int = 512


def choose(columns: int, size: int, dtype: torch.dtype) -> Launch:
    """Launch parameters for a matrix [columns, size]."""
    chosen = Launch(32, 64, 4, 3, 0) if dtype == torch.float32 else _measured(columns, size)
    columns, step = (programs_of(min(n, 512), least) for n, least in ((columns, chosen.columns), (size, chosen.step)))
    return replace(chosen, columns=columns, step=step)


def _measured(columns: int, size: int) -> Launch:
    """What an H200 runs fastest (`benchmarks.kernels.decode --tune`, the product of the times at 1 and 16 rows): few columns
    mean few programs, each of which must keep more bytes in flight."""
    if columns >= 16384:
        return Launch(64, 128, fetch=0)  # gate and up
    if size <= 2048:
        return Launch(32, 128, stages=6, fetch=2048 if columns <= 512 else 512)  # of a narrow model; the router's
    if 2048 < columns <= 4608 and size <= 4096:
        return Launch(16, 512)  # output of attention
    return Launch(32, 256, fetch=0 if columns > 4608 and size <= 4096 else 512)  # q, k, v; down


@triton.jit
def _linear_rows_kernel(
    x, weight, out, rows, columns, size, out_stride,
    BO: tl.constexpr, BK: tl.constexpr, SIZE_PAD: tl.constexpr, EVEN: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * 16 + tl.arange(0, 16)
    column = tl.program_id(0) * BO + tl.arange(0, BO)
    base = weight + tl.minimum(column, columns - 1).to(tl.int64) * size  # columns behind the last are not stored
    if OVERLAP:
        gdc_launch_dependents()
        if FETCH > 0:
            line = tl.arange(0, FETCH // 64) * 64  # 128 bytes of bfloat16
            fetch(base[:, None] + tl.minimum(line, size - 1)[None, :])
        gdc_wait()
    total = tl.zeros([16, BO], tl.float32)
    for start in range(0, SIZE_PAD, BK):
        lane = start + tl.arange(0, BK)
        if EVEN:
            left = tl.load(x + row[:, None] * size + lane[None, :], mask=(row < rows)[:, None], other=0.0)
            right = tl.load(base[None, :] + lane[:, None])
        else:
            inside = lane < size
            left = tl.load(x + row[:, None] * size + lane[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
            right = tl.load(base[None, :] + lane[:, None], mask=inside[:, None], other=0.0)
        total += multiply(left, right)
    at = row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out + at, narrow(total, out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


def supports(x: Tensor, weight: Tensor) -> bool:
    """Up to 64 rows, one dtype out of bfloat16 and float32, a contiguous weight."""
    return x.dtype == weight.dtype and x.dtype in FLOATS and 1 <= x.shape[0] <= MAX_ROWS and weight.is_contiguous()


def launch(x: Tensor, weight: Tensor, out: Tensor, parameters: Launch | None = None) -> None:
    """Launch into out [N, O], whose rows may lie apart; x and weight contiguous, none checked. The weight may be read before
    the launch in front has ended."""
    (rows, size), columns = x.shape, weight.shape[0]
    chosen = parameters or choose(columns, size, x.dtype)
    step = min(chosen.step, power_of_2(size, 16))
    overlap = overlaps(x)
    _linear_rows_kernel[(triton.cdiv(columns, chosen.columns), triton.cdiv(rows, ROWS))](
        x, weight, out, rows, columns, size, out.stride(0), BO=chosen.columns, BK=step,
        SIZE_PAD=triton.cdiv(size, step) * step, EVEN=size % step == 0,
        FETCH=power_of_2(min(chosen.fetch, size), 64) if chosen.fetch else 0, OVERLAP=overlap, num_warps=chosen.num_warps,
        num_stages=chosen.stages, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip


def linear_rows(x: Tensor, weight: Tensor) -> Tensor:
    """`common.linear_rows.linear_rows`: the same arguments, results and errors; the weight must be contiguous."""
    core.check_linear_rows(x, weight)
    contiguous("linear_rows", weight=weight)
    columns = weight.shape[0]
    out = torch.empty((x.shape[0], -(-columns // ALIGNED) * ALIGNED), dtype=x.dtype, device=x.device)[:, :columns]
    launch(x.contiguous(), weight, out)
    return out


def register() -> None:
    """Tell the core about `linear_rows` on CUDA."""
    _launch.register(linear_rows, supports)
