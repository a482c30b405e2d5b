"""Runs the source strings of `mx.fast.metal_kernel` on Linux, on NumPy or MLX arrays. See docs/metal-emulator.md.

`run_kernel` runs one launch. `emulated_metal_kernel` stands for `mx.fast.metal_kernel`; `emulated` patches it in.
bfloat16 travels as `BFloat16(bits)` or as an mx.array; outputs of that dtype come back as uint16 bits from `run_kernel`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np

from tests.metal.lint import LintError, address_space_errors, lint_unavailable
from tests.metal.rewrite import check_header, rewrite_threadgroup
from tests.metal.signature import METAL_TYPES, KernelText, Operand, kernel_text
from tests.metal.toolchain import compile_kernel, runtime_library, unavailable

SCHEDULES = ("forward", "reverse", "random")
CPU_SECONDS = 60.0
MAX_BUFFERS = 31  # entries of Metal's buffer argument table
_ERRORS = ("", "out-of-bounds", "divergence", "time", "threadgroup-memory", "race", "uninitialised", "trap", "stack", "setup")
# Poison of outputs: NaNs in every float format, and improbable integers.
_POISON = (b"\xa5\xff\xa5\xff\xa5\xff\xa5\xff", b"\x5a\xff\x5a\xff\x5a\xff\x5a\xff")


class KernelFault(AssertionError):
    """The kernel did what Metal forbids. `kind`: one of `_ERRORS`, "unwritten", "limits", "address-space"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class BFloat16:
    """An array of bfloat16, as its bits (uint16)."""

    bits: np.ndarray


@dataclass(frozen=True)
class Report:
    """What the last launch used."""

    threadgroup_bytes: int
    benign_races: int  # check mode: unordered writes of the same value
    lint: str = "not asked for"  # check mode: "clean", or why address spaces were not checked


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("item", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("initialised", ctypes.c_uint32),
        ("unwritten", ctypes.c_uint64),
        ("first_unwritten", ctypes.c_uint64),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("group", ctypes.c_uint32 * 3),
        ("schedule", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("check", ctypes.c_uint32),
        ("workers", ctypes.c_uint32),
        ("cpu_seconds", ctypes.c_double),
        ("error", ctypes.c_uint32),
        ("message", ctypes.c_char * 1024),
        ("threadgroup_bytes", ctypes.c_uint32),
        ("benign_races", ctypes.c_uint64),
    ]


# ------------------------------------------------------------------------------------------------------------ dtypes
def dtype_name(dtype: object) -> str:
    """The name of a NumPy dtype, an MLX dtype or a string, as a key of `METAL_TYPES`."""
    if isinstance(dtype, str):
        name = dtype
    elif type(dtype).__module__.startswith("mlx"):
        name = str(dtype).rpartition(".")[2]
    else:
        name = np.dtype(dtype).name
    name = {"bool_": "bool"}.get(name, name)
    if name not in METAL_TYPES:
        raise TypeError(f"expected a dtype of {', '.join(METAL_TYPES)}, got {dtype!r}")
    return name


def storage(name: str) -> np.dtype:
    """The NumPy dtype that carries a Metal type: bfloat16 as uint16."""
    return np.dtype("uint16" if name == "bfloat16" else name)


def _is_mlx(value: object) -> bool:
    return type(value).__module__.startswith("mlx") and hasattr(value, "dtype")


def _operand(name: str, value: object) -> tuple[Operand, np.ndarray]:
    """Any input as (operand, row-contiguous NumPy array). Python numbers become the dtypes that MLX gives them."""
    if isinstance(value, BFloat16):
        data, dtype = np.asarray(value.bits), "bfloat16"
    elif _is_mlx(value):
        import mlx.core as mx  # noqa: PLC0415

        dtype = dtype_name(value.dtype)
        data = np.array(value.view(mx.uint16) if dtype == "bfloat16" and value.ndim else _bits(value, dtype))
    elif isinstance(value, bool):
        data, dtype = np.array(value), "bool"
    elif isinstance(value, int):
        data, dtype = np.array(value, dtype=np.int32), "int32"
    elif isinstance(value, float):
        data, dtype = np.array(value, dtype=np.float32), "float32"
    else:
        data = np.asarray(value)
        dtype = dtype_name(data.dtype)
    shape = data.shape
    return Operand(name, dtype, shape), np.ascontiguousarray(data).reshape(shape)


def _bits(value: object, dtype: str) -> object:
    import mlx.core as mx  # noqa: PLC0415

    return value.reshape(1).view(mx.uint16).reshape(()) if dtype == "bfloat16" else value


# --------------------------------------------------------------------------------------------------------- compiling
def translation_unit(kernel: KernelText, body: str) -> str:
    """The C++ file of a kernel: MLX's text with threadgroup declarations rewritten, and the entry point."""
    rewritten, _ = rewrite_threadgroup(body)
    head, brace, tail = kernel.text.rpartition(") {\n" + body + "\n}\n")
    if tail or not brace:
        raise RuntimeError("the body is not where it was put")
    call = ",\n    ".join(kernel.arguments)
    return (
        '#include "prelude.h"\n#pragma GCC poison std double\n'
        f'#line 1 "kernel"\n{head}) {{\n{rewritten}\n}}\n'
        "static inline uint3 emu_uint3(const uint32_t* v) { return uint3(v[0], v[1], v[2]); }\n"
        'extern "C" void emu_entry_point(void* const* b, const emu_position* p) {\n'
        f"  (void)b; (void)p;\n  {kernel.function}{kernel.template_arguments}(\n    {call});\n}}\n"
    )


@functools.cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(runtime_library()))
    library.emu_run.argtypes = [ctypes.POINTER(_Launch)]
    library.emu_run.restype = ctypes.c_int
    return library


@functools.lru_cache(maxsize=512)
def _entry(code: str, check: bool) -> tuple[ctypes.CDLL, int]:
    _runtime()
    library = ctypes.CDLL(str(compile_kernel(code, check)))
    return library, ctypes.cast(library.emu_entry_point, ctypes.c_void_p).value


# ----------------------------------------------------------------------------------------------------------- running
_last_report = Report(0, 0)


def last_report() -> Report:
    """Threadgroup memory and benign races of the last launch."""
    return _last_report


def run_kernel(
    name: str,
    source: str,
    header: str,
    input_names: Sequence[str],
    inputs: Sequence[object],
    output_names: Sequence[str],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[object],
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    template: Sequence[tuple[str, object]] = (),
    schedule: str = "forward",
    check: bool = False,
    *,
    seed: int = 0,
    init_value: float | None = None,
    atomic_outputs: bool = False,
    cpu_seconds: float = CPU_SECONDS,
    workers: int | None = None,
) -> list[np.ndarray]:
    """Run a kernel as `mx.fast.metal_kernel(...)(...)` would and return its outputs (bfloat16 as uint16 bits).

    `schedule`: order in which the lanes of a threadgroup run ("forward", "reverse", "random" with `seed`).
    `check`: find races, exact out-of-bounds and uninitialised reads; slow, for small shapes. With clang++, address spaces.
    `cpu_seconds`: a kernel that uses more is taken for an endless loop.
    Raises KernelFault when the kernel breaks a rule, CompileError when g++ rejects it.
    """
    if reason := unavailable():
        raise RuntimeError(reason)
    if len(input_names) != len(inputs) or not len(output_names) == len(output_shapes) == len(output_dtypes):
        raise ValueError("expected as many inputs and outputs as names")
    _check_limits(grid, threadgroup)
    pairs = [_operand(n, v) for n, v in zip(input_names, inputs, strict=True)]
    operands = [operand for operand, _ in pairs]
    outputs = [
        Operand(n, dtype_name(d), tuple(int(x) for x in s))
        for n, s, d in zip(output_names, output_shapes, output_dtypes, strict=True)
    ]
    values = [(n, v if isinstance(v, int) else dtype_name(v)) for n, v in template]
    kernel = kernel_text(name, source, header, operands, outputs, values, atomic_outputs)
    if len(kernel.buffers) > MAX_BUFFERS:
        raise KernelFault("limits", f"kernel {name!r}: Metal binds at most {MAX_BUFFERS} buffers, got {len(kernel.buffers)}")
    check_header(header)
    entry = _entry(translation_unit(kernel, source), check)
    lint = _lint(name, kernel, source) if check else "not asked for"
    launch = functools.partial(
        _launch, name, entry[1], kernel, operands, [array for _, array in pairs], outputs, grid, threadgroup,
        schedule=SCHEDULES.index(schedule), check=check, seed=seed, init_value=init_value, cpu_seconds=cpu_seconds,
        workers=workers or min(2, os.cpu_count() or 1), lint=lint,
    )  # fmt: skip
    results, suspects = launch(poison=_POISON[0])
    if suspects:  # an element may hold the poison's value by right: then another poison leaves no trace there
        _check_written(name, outputs, suspects, launch(poison=_POISON[1])[1])
    return results


def _check_written(name: str, outputs: list[Operand], first: list[np.ndarray], second: list[np.ndarray]) -> None:
    for operand, a, b in zip(outputs, first, second, strict=bool(second)):
        if (both := np.intersect1d(a, b)).size:
            raise KernelFault(
                "unwritten",
                f"kernel {name!r}: output {operand.name!r} {operand.shape}: {both.size} of {operand.size} elements were never "
                f"written, the first is element {int(both[0])}",
            )


def _lint(name: str, kernel: KernelText, source: str) -> str:
    """Check address spaces; returns "clean" or why nothing was checked."""
    if reason := lint_unavailable():
        return reason
    try:
        found = address_space_errors(kernel, source)
    except LintError as error:
        return str(error)
    if found:
        raise KernelFault("address-space", f"kernel {name!r}: address spaces:\n" + "\n".join(found))
    return "clean"


def _check_limits(grid: tuple[int, int, int], threadgroup: tuple[int, int, int]) -> None:
    if min(*grid, *threadgroup) < 1:
        raise KernelFault("limits", f"expected positive sizes, got grid {grid}, threadgroup {threadgroup}")
    if (threads := int(np.prod(threadgroup))) > 1024:
        raise KernelFault("limits", f"a threadgroup has at most 1024 threads, got {threadgroup} = {threads}")


def _launch(
    name: str, entry: int, kernel: KernelText, inputs: list[Operand], arrays: list[np.ndarray], outputs: list[Operand],
    grid: tuple[int, int, int], threadgroup: tuple[int, int, int], *, poison: bytes, schedule: int, check: bool, seed: int,
    init_value: float | None, cpu_seconds: float, workers: int, lint: str,
) -> tuple[list[np.ndarray], list[np.ndarray]]:  # fmt: skip
    """One launch: (outputs, per output the indices of elements that still hold the poison; empty when there are none)."""
    results = [_poisoned(operand, poison, init_value) for operand in outputs]
    held = []  # arrays of shapes and strides that must outlive the call
    buffers = (_Buffer * len(kernel.buffers))()
    for buffer, bound in zip(buffers, kernel.buffers, strict=True):
        is_output = bound.operand >= len(inputs)
        data = results[bound.operand - len(inputs)] if is_output else _part(arrays[bound.operand], bound.part)
        held.append(data)
        buffer.name = bound.name.encode()
        buffer.data = data.ctypes.data
        buffer.bytes = data.nbytes
        buffer.item = data.itemsize
        buffer.kind = int(is_output)
        buffer.initialised = int(init_value is not None)
    group = [min(g, t) for g, t in zip(grid, threadgroup, strict=True)]  # as MLX clamps it
    launch = _Launch(
        kernel=kernel.function.encode(), entry=entry, buffers=buffers, buffer_count=len(buffers),
        grid=(ctypes.c_uint32 * 3)(*grid), group=(ctypes.c_uint32 * 3)(*group), schedule=schedule, seed=seed,
        check=int(check), workers=workers, cpu_seconds=cpu_seconds,
    )  # fmt: skip
    error = _runtime().emu_run(ctypes.byref(launch))
    global _last_report  # noqa: PLW0603
    _last_report = Report(launch.threadgroup_bytes, launch.benign_races, lint)
    if error:
        message = launch.message.decode(errors="replace")
        raise KernelFault(_ERRORS[error], f"kernel {name!r}: {message}")
    suspects = []
    if init_value is None:
        suspects = [
            np.flatnonzero(_same(result, _poisoned(operand, poison, None)))
            for operand, result in zip(outputs, results, strict=True)
        ]
    return results, suspects if any(s.size for s in suspects) else []


def _part(array: np.ndarray, part: str) -> np.ndarray:
    if part == "data":
        return array
    if part == "shape":
        return np.array(array.shape, dtype=np.int32)
    if part == "strides":
        return np.array([stride // array.itemsize for stride in array.strides], dtype=np.int64)
    return np.array(array.ndim, dtype=np.int32)


def _poisoned(operand: Operand, poison: bytes, init_value: float | None) -> np.ndarray:
    dtype = storage(operand.dtype)
    if init_value is not None:
        if operand.dtype == "bfloat16":
            bits = np.array(init_value, dtype=np.float32).view(np.uint32)
            return np.full(operand.shape, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, dtype=dtype)
        return np.full(operand.shape, init_value, dtype=dtype)
    pattern = (poison if dtype.itemsize > 1 else poison[:1] * 8)[: max(dtype.itemsize, 1)]
    return np.frombuffer(pattern * operand.size, dtype=dtype).reshape(operand.shape).copy()


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not a.size:
        return np.zeros(0, dtype=bool)
    rows = (a.reshape(-1, 1).view(np.uint8), b.reshape(-1, 1).view(np.uint8))
    return (rows[0] == rows[1]).all(axis=1)


# ------------------------------------------------------------------------------------------------------ MLX's own form
def emulated_metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict | None = None,
    *,
    schedule: str = "forward",
    check: bool = False,
    seed: int = 0,
    cpu_seconds: float = CPU_SECONDS,
) -> Callable[..., list]:
    """What `mx.fast.metal_kernel` returns, emulated: called with the same keywords, it returns a list of mx.array.

    Inputs are always passed row-contiguous, also with `ensure_row_contiguous=False`.
    """
    del ensure_row_contiguous, compile_options

    def kernel(
        *, inputs, grid, threadgroup, output_shapes, output_dtypes, template=None, init_value=None, verbose=False, stream=None
    ) -> list:
        import mlx.core as mx  # noqa: PLC0415

        del verbose, stream
        arrays = run_kernel(
            name, source, header, input_names, inputs, output_names, output_shapes, output_dtypes, tuple(grid),
            tuple(threadgroup), template or (), schedule, check, seed=seed, init_value=init_value,
            atomic_outputs=atomic_outputs, cpu_seconds=cpu_seconds,
        )  # fmt: skip
        names = [dtype_name(dtype) for dtype in output_dtypes]
        return [_to_mlx(mx, a, n) for a, n in zip(arrays, names, strict=True)]

    return kernel


def _to_mlx(mx: object, array: np.ndarray, dtype: str) -> object:
    if dtype != "bfloat16":
        return mx.array(array)
    return mx.array(array.reshape(-1)).view(mx.bfloat16).reshape(array.shape)


@contextlib.contextmanager
def emulated(schedule: str = "forward", check: bool = False, seed: int = 0, available: bool = True) -> Iterator[None]:
    """Within this block `mx.fast.metal_kernel` makes emulated kernels and Metal says that it is available.

    Kernels that were made before stay what they were: clear caches of kernel objects before and after.
    """
    import mlx.core as mx  # noqa: PLC0415

    make = functools.partial(emulated_metal_kernel, schedule=schedule, check=check, seed=seed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(mx.fast, "metal_kernel", make))
        if available:
            stack.enter_context(mock.patch.object(mx.metal, "is_available", lambda: True))
        yield
