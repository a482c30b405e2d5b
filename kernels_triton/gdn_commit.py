"""The accepted state of ALL layers and their convolution windows, in one launch and in place (`algorithms` 3, equation 7).

The first programs each fold the factors into BV rows of one head's state, with the very function that the deferred commit
of `gdn_verify` uses; the others move the windows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspine.common import gdn
from dspine.common.errors import DSpineError
from dspine.common.gdn import GdnFactors
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import contiguous, power_of_2, programs_of
from dspine.kernels_triton.gdn_verify import fold, load_factors


@dataclass(frozen=True)
class Launch:
    """block_v: rows of the state a program holds; channels: of a window that a program moves."""

    block_v: int = 32
    num_warps: int = 4
    channels: int = 1024


LAUNCH = Launch()


@triton.jit
def _gdn_commit_kernel(
    states, z, k, g, windows, inputs, m, batch_size, state_programs, channels, window_layer, window_batch, window_row,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr,
    W: tl.constexpr, WIDTH: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < state_programs:
        SLICES: tl.constexpr = (DV + BV - 1) // BV
        pair = program // SLICES  # layer x batch x value head
        entry, head = pair // HV, pair % HV
        count = tl.minimum(tl.load(m + entry % batch_size).to(tl.int32), W)
        if count > 0:
            dv = (program % SLICES) * BV + tl.arange(0, BV)
            dk = tl.arange(0, DK_PAD)
            place = states + pair.to(tl.int64) * (DV * DK) + dv[None, :] * DK + dk[:, None]
            inside = (dk < DK)[:, None] & (dv < DV)[None, :]
            FULL: tl.constexpr = DV % BV == 0 and DK == DK_PAD
            if FULL:
                held = tl.load(place)
            else:
                held = tl.load(place, mask=inside, other=0.0)
            last = load_factors(z, k, g, entry * W, head, head // (HV // HK), dv, dk, HK, HV, DK, DV, W)
            held = fold(held, last[0], last[1], last[2], count)
            if FULL:
                tl.store(place, held)
            else:
                tl.store(place, held, mask=inside)
    else:
        slices = tl.cdiv(channels, BC)
        entry = (program - state_programs) // slices
        channel = ((program - state_programs) % slices) * BC + tl.arange(0, BC)
        inside = channel < channels
        count = tl.minimum(tl.load(m + entry % batch_size).to(tl.int32), W)
        old = windows + (entry // batch_size).to(tl.int64) * window_layer + (entry % batch_size) * window_batch + channel
        new = inputs + entry.to(tl.int64) * (W * channels) + channel
        if count > 0:
            for j in tl.static_range(WIDTH):  # ascending, row j from row j + count: a row is read before it is overwritten
                source = j + count
                if source < WIDTH:
                    row = tl.load(old + source * window_row, mask=inside)
                else:
                    row = tl.load(new + (source - WIDTH) * channels, mask=inside).to(windows.dtype.element_ty)
                tl.store(old + j * window_row, row, mask=inside)


def supports(states: Tensor, factors: GdnFactors, windows: Tensor, inputs: Tensor, m: Tensor) -> bool:
    """float32 states; keys bfloat16 or float32, of at most 256."""
    return states.dtype == torch.float32 and factors.k.dtype in (torch.bfloat16, torch.float32) and states.shape[-1] <= 256


def launch(
    states: Tensor, factors: GdnFactors, windows: Tensor, inputs: Tensor, m: Tensor, parameters: Launch | None = None
) -> None:
    """Launch in place; arguments as in `gdn_commit`, all contiguous, none checked."""
    layers, batch, value_heads, value_dim, key_dim = states.shape
    chosen = parameters or LAUNCH
    block_v = chosen.block_v if parameters else programs_of(value_dim, chosen.block_v)
    entries, width, channels = layers * batch, windows.shape[2], windows.shape[3]
    state_programs = entries * value_heads * triton.cdiv(value_dim, block_v)
    moves = entries * triton.cdiv(channels, chosen.channels) if width and channels else 0
    _gdn_commit_kernel[(state_programs + moves,)](
        states, factors.z, factors.k, factors.g, windows, inputs, m, batch, state_programs, channels, *windows.stride()[:3],
        HK=factors.k.shape[3], HV=value_heads, DK=key_dim, DV=value_dim, DK_PAD=power_of_2(key_dim, 16),
        W=factors.z.shape[2], WIDTH=width, BV=block_v, BC=chosen.channels, num_warps=chosen.num_warps,
    )  # fmt: skip


def gdn_commit(states: Tensor, factors: GdnFactors, windows: Tensor, inputs: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """`common.gdn.gdn_commit`, IN PLACE: states (contiguous) and windows (channels behind one another) are returned."""
    gdn._check_commit(states, factors, m)
    gdn._check_windows(states, factors, windows, inputs)
    contiguous("gdn_commit", states=states)
    if windows.shape[3] > 1 and windows.stride(3) != 1:
        raise DSpineError(f"gdn_commit: the channels of windows must lie behind one another, got strides {windows.stride()}")
    kept = GdnFactors(factors.z.contiguous(), factors.k.contiguous(), factors.g.contiguous())
    launch(states, kept, windows, inputs.contiguous(), m)
    return states, windows


def register() -> None:
    """Tell the core about `gdn_commit` on CUDA."""
    _launch.register(gdn_commit, supports)
