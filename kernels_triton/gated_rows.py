"""The first half of a feed-forward layer in one launch: a few rows times gate and up, silu(gate) * up.

A program takes rows of gate and of up in turn, so that one product makes both; sums and roundings are those of `linear_rows`
and `silu_mul`, and so are the launch parameters (of the whole matrix). A row's bits do not depend on the rows beside it.
A product with a large matrix follows. Its programs would take the place of those that still read here, so it may begin once a
program has its products, not before (`late_next=0` in `DSPINE_KERNELS_TRY`: at once, as behind `linear_rows`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dspine.common import gating
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import contiguous, early, fetch, narrow, overlaps, power_of_2, sigmoid, variant
from dspine.kernels_triton.linear_rows import ROWS, choose, row_products, supports


@triton.jit
def _gated_rows_kernel(
    x, weight, out, rows, inner, size,
    BI: tl.constexpr, BK: tl.constexpr, SIZE_PAD: tl.constexpr, EVEN: tl.constexpr, FETCH: tl.constexpr, OVERLAP: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * 16 + tl.arange(0, 16)
    both = tl.arange(0, 2 * BI)
    wanted = tl.minimum(tl.program_id(0) * BI + both // 2, inner - 1)  # columns behind the last are not stored
    base = weight + ((both % 2) * inner + wanted).to(tl.int64) * size
    if OVERLAP:
        if not LATE:
            gdc_launch_dependents()
        if FETCH > 0:
            line = tl.arange(0, FETCH // 64) * 64  # 128 bytes of bfloat16
            fetch(base[:, None] + tl.minimum(line, size - 1)[None, :])
        gdc_wait()
    total = row_products(x, base, row, rows, 0, size, 2 * BI, BK, SIZE_PAD, EVEN)
    if OVERLAP and LATE:
        gdc_launch_dependents()
    gate, up = tl.split(tl.reshape(total, [16, BI, 2]))
    DTYPE: tl.constexpr = out.dtype.element_ty
    gate, up = narrow(gate, DTYPE).to(tl.float32), narrow(up, DTYPE).to(tl.float32)
    active = narrow(gate * sigmoid(gate), DTYPE).to(tl.float32)
    column = tl.program_id(0) * BI + tl.arange(0, BI)
    inside = (row < rows)[:, None] & (column < inner)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * inner + column[None, :], narrow(active * up, DTYPE), mask=inside)


def gated_rows(x: Tensor, weight: Tensor) -> Tensor:
    """`common.gating.gated_rows`: the same arguments, results and errors; the weight must be contiguous."""
    gating.check_gated_rows(x, weight)
    contiguous("gated_rows", weight=weight)
    (rows, size), inner = x.shape, weight.shape[0] // 2
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    chosen = choose(2 * inner, size, x.dtype)
    step, columns = min(chosen.step, power_of_2(size, 16)), max(chosen.columns // 2, 16)
    _gated_rows_kernel[(triton.cdiv(inner, columns), triton.cdiv(rows, ROWS))](
        x.contiguous(), weight, out, rows, inner, size, BI=columns, BK=step, SIZE_PAD=triton.cdiv(size, step) * step,
        EVEN=size % step == 0, FETCH=power_of_2(min(chosen.fetch, size), 64) if chosen.fetch else 0,
        LATE=variant("late_next", True), num_warps=chosen.num_warps, num_stages=chosen.stages,
        **early(overlaps(x)),
    )  # fmt: skip
    return out


def register() -> None:
    """Tell the core about `gated_rows` on CUDA."""
    _launch.register(gated_rows, supports)
