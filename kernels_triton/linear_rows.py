"""A few rows times a large matrix, at the speed of reading the matrix once.

Blocks of 16 rows whatever N is, and launch parameters that depend on the matrix alone: a row's bits do not depend on the
rows beside it. Weights are constants, so a program asks the cache for its part of them before it waits for the launch in
front (programmatic dependent launch): memory stays busy while one kernel ends and the next begins.

Few columns make few programs; `Launch.split` spreads each column's inputs over several. The last of them to end adds the
sums of all, in their own order, so bits do not depend on who was last. The split depends on the matrix alone too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import linear_rows as core
from dspine.common.environment import kernel_variants
from dspine.common.errors import DSpineError
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import (
    FLOATS,
    arrived,
    contiguous,
    counters,
    early,
    fetch,
    multiply,
    narrow,
    overlaps,
    power_of_2,
    programs_of,
)

MAX_ROWS, ROWS = 64, 16
ALIGNED = 16  # elements: rows of the result begin at multiples of it, so that what follows may load them 16 bytes at a time


@dataclass(frozen=True)
class Launch:
    """columns: outputs of a program; step: inputs it reads at a time; stages: of the pipeline; fetch: of a program's inputs of
    each column, those that are asked for before the wait (0: none); split: programs that share a column's inputs."""

    columns: int
    step: int
    num_warps: int = 4
    stages: int = 4
    fetch: int = 512
    split: int = 1


def choose(columns: int, size: int, dtype: torch.dtype) -> Launch:
    """Launch parameters for a matrix [columns, size]. `linear_rows.COLUMNSxSIZE=columns,step,warps,stages,fetch,split` in
    DSPINE_KERNELS_TRY replaces those of a bfloat16 matrix."""
    if dtype == torch.float32:
        chosen = Launch(32, 64, 4, 3, 0)
    elif (given := kernel_variants().get(f"linear_rows.{columns}x{size}")) is not None:
        chosen = read_launch(given)
    else:
        chosen = _measured(columns, size)
    columns, step = (programs_of(min(n, 512), least) for n, least in ((columns, chosen.columns), (size, chosen.step)))
    return replace(chosen, columns=columns, step=step)


def _measured(columns: int, size: int) -> Launch:
    """What an H200 runs fastest (`benchmarks.kernels.decode --tune`, the product of the times at 1 and 16 rows): few columns
    mean few programs, each of which must keep more bytes in flight."""
    if columns >= 16384:
        return Launch(64, 128, fetch=0)  # gate and up
    if size <= 2048:
        return Launch(32, 128, stages=6, fetch=2048 if columns <= 512 else 512)  # of a narrow model; the router's
    if columns <= 1024:
        return Launch(32, 128, split=4)  # readout of a DSpine drafter: 32 programs alone
    if 2048 < columns <= 4608 and size <= 4096:
        return Launch(16, 512)  # output of attention
    return Launch(32, 256, fetch=0 if columns > 4608 and size <= 4096 else 512)  # q, k, v; down


def read_launch(text: str) -> Launch:
    """Six numbers between commas, in the order of `Launch`. DSpineError for anything else."""
    parts = text.split(",")
    if len(parts) != 6 or not all(part.isdigit() for part in parts):
        raise DSpineError(f"launch parameters of linear_rows: columns,step,warps,stages,fetch,split expected, got {text!r}")
    chosen = Launch(*(int(part) for part in parts))
    sizes = (chosen.columns, chosen.step, chosen.num_warps, chosen.split)
    if min(chosen.columns, chosen.step) < 16 or min(*sizes, chosen.stages) < 1 or any(n & (n - 1) for n in sizes):
        raise DSpineError(
            f"launch parameters of linear_rows: powers of two (columns and step of at least 16) expected, got {text!r}"
        )
    return chosen


@triton.jit
def row_products(
    x, base, row, rows, begin, size, BO: tl.constexpr, BK: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """float32 [16, BO]: inputs [begin, begin + PART) of 16 rows times those of BO columns, whose first inputs stand at `base`.
    EVEN: none of them lies behind `size`."""
    total = tl.zeros([16, BO], tl.float32)
    for start in range(0, PART, BK):
        lane = begin + start + tl.arange(0, BK)
        if EVEN:
            left = tl.load(x + row[:, None] * size + lane[None, :], mask=(row < rows)[:, None], other=0.0)
            right = tl.load(base[None, :] + lane[:, None])
        else:
            inside = lane < size
            left = tl.load(x + row[:, None] * size + lane[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
            right = tl.load(base[None, :] + lane[:, None], mask=inside[:, None], other=0.0)
        total += multiply(left, right)
    return total


@triton.jit
def _linear_rows_kernel(
    x, weight, out, sums, counter, rows, columns, size, out_stride,
    BO: tl.constexpr, BK: tl.constexpr, PART: tl.constexpr, EVEN: tl.constexpr, FETCH: tl.constexpr, SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """PART: inputs of one program, a multiple of BK. sums float32 [SPLIT, rows, columns] and counter: only where SPLIT > 1."""
    row = tl.program_id(1) * 16 + tl.arange(0, 16)
    column = tl.program_id(0) * BO + tl.arange(0, BO)
    begin = tl.program_id(2) * PART
    base = weight + tl.minimum(column, columns - 1).to(tl.int64) * size  # columns behind the last are not stored
    if OVERLAP:
        gdc_launch_dependents()
        if FETCH > 0:
            line = begin + tl.arange(0, FETCH // 64) * 64  # 128 bytes of bfloat16
            fetch(base[:, None] + tl.minimum(line, size - 1)[None, :])
        gdc_wait()
    total = row_products(x, base, row, rows, begin, size, BO, BK, PART, EVEN)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * out_stride + column[None, :]
    if SPLIT == 1:
        tl.store(out + at, narrow(total, out.dtype.element_ty), mask=inside)
    else:
        place = row[:, None] * columns + column[None, :]
        tl.store(sums + tl.program_id(2) * rows * columns + place, total, mask=inside)
        if arrived(counter + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), SPLIT):
            whole = tl.zeros([16, BO], tl.float32)
            for part in tl.static_range(SPLIT):
                whole += tl.load(sums + part * rows * columns + place, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(out + at, narrow(whole, out.dtype.element_ty), mask=inside)


def supports(x: Tensor, weight: Tensor) -> bool:
    """Up to 64 rows, one dtype out of bfloat16 and float32, a contiguous weight."""
    return x.dtype == weight.dtype and x.dtype in FLOATS and 1 <= x.shape[0] <= MAX_ROWS and weight.is_contiguous()


def launch(x: Tensor, weight: Tensor, out: Tensor, parameters: Launch | None = None) -> None:
    """Launch into out [N, O], whose rows may lie apart; x and weight contiguous, none checked. The weight may be read before
    the launch in front has ended."""
    (rows, size), columns = x.shape, weight.shape[0]
    chosen = parameters or choose(columns, size, x.dtype)
    step = min(chosen.step, power_of_2(size, 16))
    part = triton.cdiv(size, step * chosen.split) * step
    grid = (triton.cdiv(columns, chosen.columns), triton.cdiv(rows, ROWS), chosen.split)
    sums, counter = out, out
    if chosen.split > 1:
        sums = torch.empty((chosen.split, rows, columns), dtype=torch.float32, device=x.device)
        counter = counters(weight, grid[0] * grid[1])
    _linear_rows_kernel[grid](
        x, weight, out, sums, counter, rows, columns, size, out.stride(0), BO=chosen.columns, BK=step, PART=part,
        EVEN=size % (step * chosen.split) == 0, FETCH=power_of_2(min(chosen.fetch, part), 64) if chosen.fetch else 0,
        SPLIT=chosen.split, num_warps=chosen.num_warps, num_stages=chosen.stages, **early(overlaps(x)),
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
