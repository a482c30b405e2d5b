"""Shared by all kernels here: exact products, checks of arguments, rounding of sizes.

A product is `exact` where both factors have at most 8 bits of significand and the sum is float32: that is what a tensor
core does with bfloat16 operands. A float32 operand is cut into three bfloat16 terms first (24 bits). TF32 is never used
alone. Float32 inputs run float32 multiply-adds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspine.common.environment import early_launches, kernel_variants
from dspine.common.errors import DSpineError
from dspine.common.registry import register_kernel

FLOATS = (torch.float32, torch.bfloat16)
# The interpreter keeps bfloat16 as raw 16-bit words and would multiply those; widening first gives the same numbers.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def multiply(a, b):
    """a @ b of one dtype, float32 accumulation: bfloat16 products are exact, float32 ones are multiply-adds."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    elif INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def thirds(x, SPLIT: tl.constexpr):
    """float32 x as a sum of three bfloat16 terms, largest first, where SPLIT; else (x, x, x)."""
    if SPLIT:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return high, middle, low
    else:
        return x, x, x


@triton.jit
def multiply_thirds(a, high, middle, low, SPLIT: tl.constexpr):
    """a @ (high + middle + low): exact terms of a bfloat16 `a` where SPLIT, else a @ high in float32 multiply-adds."""
    if SPLIT:
        return multiply(a, low) + multiply(a, middle) + multiply(a, high)
    else:
        return tl.dot(a.to(tl.float32), high, input_precision="ieee")


@triton.jit
def multiply_wide(a, b):
    """a @ b with b float32: exact terms of b where a is bfloat16, else float32 multiply-adds."""
    SPLIT: tl.constexpr = a.dtype == tl.bfloat16
    high, middle, low = thirds(b, SPLIT)
    return multiply_thirds(a, high, middle, low, SPLIT)


@triton.jit
def multiply_terms(a, b):
    """a @ b with a float32: two bfloat16 terms of it (16 bits) where b is bfloat16, else float32 multiply-adds."""
    if b.dtype == tl.bfloat16:
        high = narrow(a, tl.bfloat16)
        rest = narrow(a - high.to(tl.float32), tl.bfloat16)
        return multiply(rest, b) + multiply(high, b)
    else:
        return multiply(a, b)


@triton.jit
def multiply_small(a, b, SPLIT: tl.constexpr):
    """a @ b, both float32: six exact products of bfloat16 terms (error about 2^-22) where SPLIT, else multiply-adds.

    Faster than 3xTF32 here: a sum of products lies in registers as the left factor of the next one wants it.
    """
    if SPLIT:
        high, middle, low = thirds(a, SPLIT)
        high_b, middle_b, low_b = thirds(b, SPLIT)
        least = multiply(high, low_b) + multiply(middle, middle_b) + multiply(low, high_b)
        return least + (multiply(high, middle_b) + multiply(middle, high_b)) + multiply(high, high_b)
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def arrive(x):
    """`x` itself, at this place of the program: a load before it may wait here, and not earlier.

    The compiler puts a loaded tile into shared memory as soon as it has arrived, and loads written further down would
    only be issued after that. With this between load and use, all loads of a kernel are in flight together.
    """
    if INTERPRETED:
        return x
    elif x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=False, pack=1)


@triton.jit
def fetch(address):
    """Ask the second-level cache for the line of 128 bytes at each pointer; nothing waits for it."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def arrived(counter, count):
    """Whether this program is the last of `count` to come here; it then sees what all of them have stored, and the counter is
    0 again. Whatever is read afterwards must pass the first-level cache (`.cg`)."""
    if not INTERPRETED:
        tl.debug_barrier()  # every thread's stores stand before the one that counts
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = before == count - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x) without overflow in either direction."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """float32 to the dtype of an output, rounded to nearest even (the interpreter's own cast to bfloat16 cuts)."""
    if INTERPRETED:
        if DTYPE == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
            x = tl.where(tl.abs(x) < float("inf"), rounded, x)
    return x.to(DTYPE)


def contiguous(where: str, **arrays: Tensor) -> None:
    """Raise unless every array is contiguous: kernels that write in place, or read large weights, make no copies."""
    for name, array in arrays.items():
        if not array.is_contiguous():
            raise DSpineError(
                f"{where}: {name} must be contiguous, got shape {tuple(array.shape)} with strides {array.stride()}; "
                "pass .contiguous()"
            )


def expect_shape(where: str, name: str, array: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless `array` has exactly this shape."""
    if tuple(array.shape) != shape:
        raise DSpineError(f"{where}: {name} must have shape {shape}, got {tuple(array.shape)}")


def expect_dtype(where: str, name: str, array: Tensor, *dtypes: torch.dtype) -> None:
    """Raise unless `array` has one of these dtypes."""
    if array.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise DSpineError(f"{where}: {name} must be {names}, got {str(array.dtype).removeprefix('torch.')}")


def programs_of(size: int, wanted: int) -> int:
    """Entries of a dimension that one program takes: `wanted`, or all of them where the interpreter runs, which pays for
    every operation of every program and hardly for its size."""
    return power_of_2(size, wanted) if INTERPRETED.value else wanted


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def overlaps(array: Tensor) -> bool:
    """Whether a launch may start before the one in front has ended (programmatic dependent launch: Hopper and later)."""
    able = array.is_cuda and not INTERPRETED.value and _capability(array.device.index) >= (9, 0)
    return able and early_launches()


# What early launches rest on. Every program of a kernel that may start early comes to `gdc_wait`, which lasts until the
# launch in front has ended: so a launch that has ended stands for all in front of it, and what is behind the wait may read
# and write anything. Before the wait a kernel may read
# - constants, and what earlier rounds have left (a state, its factors, rows of a cache): a round's graph begins with a launch
#   that does not overlap;
# - lengths, live rows and the m of a commit (`attention_inputs`, `block_attention`): those that write them (`settle_round`,
#   `round_limits`, the library's own kernels) never call `gdc_launch_dependents`, so whatever chain of early launches follows
#   begins when they have ended. A kernel that writes such numbers must not call it either;
# - what was written in front of a launch that waits before it calls it (`routed_experts`: the picks; `injection_write`: u).
# What was written in the same round is read past the first-level cache (`.cg`): only the wait promises that it is not stale.
# Nothing is written before the wait but a state that nobody else touches in the round (`gdn_verify_deferred`).
def early(overlap: bool) -> dict[str, Any]:
    """How a kernel is launched that may, or may not, start before the launch in front has ended."""
    return {"OVERLAP": overlap, **({"launch_pdl": True} if overlap else {})}


def variant(name: str, default: bool) -> bool:
    """A choice of `DSPINE_KERNELS_TRY`: 0 or 1, else `default`."""
    value = kernel_variants().get(name, str(int(default)))
    if value not in ("0", "1"):
        raise DSpineError(f"DSPINE_KERNELS_TRY: {name} must be 0 or 1, got {value!r}")
    return value == "1"


COUNTERS = 1 << 16  # of one allocation
_pools: dict[torch.device, list[Tensor]] = {}
_counters: dict[tuple[torch.device, int, int], Tensor] = {}


def counters(owner: Tensor, count: int) -> Tensor:
    """`count` int32 zeros for launches whose last program finishes what the others began, and sets them to zero again.

    They belong to the memory of `owner` (a weight, a cache): launches that share it must not run at the same time, others
    may. They live as long as the process; memory that is freed and given out again finds them at zero.
    """
    key = (owner.device, owner.data_ptr(), count)
    if key not in _counters:
        pools = _pools.setdefault(owner.device, [])
        if not pools or pools[-1].numel() < count:
            if owner.is_cuda and torch.cuda.is_current_stream_capturing():
                raise DSpineError("a kernel's counters were asked for while a graph is captured; run the step once before")
            pools.append(torch.zeros(max(COUNTERS, count), dtype=torch.int32, device=owner.device))
        _counters[key], pools[-1] = pools[-1][:count], pools[-1][count:]
    return _counters[key]


def power_of_2(count: int, least: int = 1) -> int:
    """Smallest power of two that is at least `count` and `least`."""
    return max(least, triton.next_power_of_2(count))


def register(function: Callable[..., Any], supports: Callable[..., bool]) -> None:
    """Register a kernel under its own name: the operation's."""
    name = function.__name__
    register_kernel(name, namespace="torch", device="cuda", function=function, name=f"triton {name}", supports=supports)
