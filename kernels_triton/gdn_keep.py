"""What a round leaves, for all layers in one launch and in place: windows move on, factors replace those of the round before.

Only the rows of accepted tokens are copied. One program moves a slice of one layer's and sequence's rows, one after another.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspine.common import gdn_rounds
from dspine.common.errors import DSpineError
from dspine.common.gdn import GdnFactors
from dspine.common.gdn_rounds import GdnKept
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import contiguous, power_of_2, programs_of

COLUMNS = 256  # of a row that one program moves


@triton.jit
def _rows(old, new, entry, rows, count, first, SIZE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """old[entry, :count] = new[entry, :count], columns from `first` on."""
    column, row = first + tl.arange(0, BC), tl.arange(0, BR)
    at = entry.to(tl.int64) * rows * SIZE + row[:, None] * SIZE + column[None, :]
    inside = (row < count)[:, None] & (column < SIZE)[None, :]
    tl.store(old + at, tl.load(new + at, mask=inside).to(old.dtype.element_ty), mask=inside)


@triton.jit
def _gdn_keep_kernel(
    windows, inputs, z, k, g, new_z, new_k, new_g, m, batch, rows,
    C: tl.constexpr, ZS: tl.constexpr, KS: tl.constexpr, GS: tl.constexpr, WIDTH: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    entry, part = tl.program_id(1), tl.program_id(0)  # entry: layer x sequence
    count = tl.minimum(tl.load(m + entry % batch).to(tl.int32), rows)
    OF_Z: tl.constexpr = (ZS + BC - 1) // BC
    OF_K: tl.constexpr = OF_Z + (KS + BC - 1) // BC
    OF_G: tl.constexpr = OF_K + (GS + BC - 1) // BC
    if part < OF_Z:
        _rows(z, new_z, entry, rows, count, part * BC, ZS, BR, BC)
    elif part < OF_K:
        _rows(k, new_k, entry, rows, count, (part - OF_Z) * BC, KS, BR, BC)
    elif part < OF_G:
        _rows(g, new_g, entry, rows, count, (part - OF_K) * BC, GS, BR, BC)
    elif count > 0:
        column = (part - OF_G) * BC + tl.arange(0, BC)
        inside = column < C
        old = windows + entry.to(tl.int64) * WIDTH * C + column
        new = inputs + entry.to(tl.int64) * rows * C + column
        for j in tl.static_range(WIDTH):  # ascending, row j from row j + count: a row is read before it is overwritten
            source = j + count
            if source < WIDTH:
                row = tl.load(old + source * C, mask=inside)
            else:
                row = tl.load(new + (source - WIDTH) * C, mask=inside).to(windows.dtype.element_ty)
            tl.store(old + j * C, row, mask=inside)


def supports(windows: Tensor, past: GdnFactors, fresh: GdnKept, m: Tensor) -> bool:
    """Contiguous memory of any dtype."""
    return all(x.is_contiguous() for x in (windows, past.z, past.k, past.g, fresh.inputs))


def launch(windows: Tensor, past: GdnFactors, fresh: GdnKept, m: Tensor) -> None:
    """Launch in place; arguments as in `gdn_keep`, all contiguous, none checked."""
    layers, batch, width, channels = windows.shape
    sizes = [math.prod(x.shape[3:]) for x in (past.z, past.k, past.g)]
    each = programs_of(max(channels, *sizes), COLUMNS)
    parts = sum(triton.cdiv(size, each) for size in (*sizes, channels))
    new = fresh.factors
    _gdn_keep_kernel[(parts, layers * batch)](
        windows, fresh.inputs, past.z, past.k, past.g, new.z, new.k, new.g, m, batch, past.g.shape[2], C=channels, ZS=sizes[0],
        KS=sizes[1], GS=sizes[2], WIDTH=width, BR=power_of_2(past.g.shape[2]), BC=each, num_warps=4,
    )  # fmt: skip


def gdn_keep(windows: Tensor, past: GdnFactors, fresh: GdnKept, m: Tensor) -> tuple[Tensor, GdnFactors]:
    """`common.gdn_rounds.gdn_keep`, IN PLACE: windows and past are returned."""
    gdn_rounds.check_keep(windows, past, fresh, m)
    contiguous("gdn_keep", windows=windows, **{f"past.{name}": getattr(past, name) for name in ("z", "k", "g")})
    if windows.data_ptr() == fresh.inputs.data_ptr() or past.z.data_ptr() == fresh.factors.z.data_ptr():
        raise DSpineError("gdn_keep: what a round leaves must not lie in the memory that it replaces")
    factors = GdnFactors(*(x.contiguous() for x in (fresh.factors.z, fresh.factors.k, fresh.factors.g)))
    if windows.numel():
        launch(windows, past, GdnKept(factors, fresh.inputs.contiguous()), m.to(torch.int32))
    return windows, past


def register() -> None:
    """Tell the core about `gdn_keep` on CUDA."""
    _launch.register(gdn_keep, supports)
