"""The one way from a kernel file to a Metal kernel: built when first used, shared by all threads, replaceable in tests.

Nothing here holds an array or a stream, and nothing imports MLX before a kernel runs. `built_by` puts another maker of
kernels in the place of `mx.fast.metal_kernel` for one context (tests on machines without Metal run an emulator).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from dspine.common.errors import DSpineError

Array = Any
Factory = Callable[..., Callable[..., Sequence[Array]]]

METAL = {"namespace": "mlx", "device": "metal", "name": "metal"}  # of every registration
SIMD = 32  # threads of a simdgroup on every Apple GPU
THREADGROUP_BYTES = 32_768  # threadgroup memory that every Apple GPU has
THREADGROUP_THREADS = 1024


@dataclass(frozen=True)
class MetalSource:
    """A kernel as text: the body, its header, and the names that the generated signature gets."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    header: str = ""


_factory: ContextVar[Factory | None] = ContextVar("dspine_metal_factory", default=None)
_built: dict[tuple[Factory, MetalSource], Callable[..., Sequence[Array]]] = {}
_lock = threading.Lock()


@contextmanager
def built_by(factory: Factory) -> Iterator[None]:
    """Inside, kernels come from `factory`, which takes what `mx.fast.metal_kernel` takes and returns what it returns."""
    token = _factory.set(factory)
    try:
        yield
    finally:
        _factory.reset(token)


def metal_kernel(source: MetalSource) -> Callable[..., Sequence[Array]]:
    """The callable kernel of this source; compiled for each template by MLX when it is first launched."""
    factory = _factory.get()
    if factory is None:
        import mlx.core as mx

        factory = mx.fast.metal_kernel
    with _lock:
        kernel = _built.get((factory, source))
        if kernel is None:
            kernel = _built[factory, source] = factory(
                name=source.name,
                input_names=list(source.inputs),
                output_names=list(source.outputs),
                source=source.body,
                header=source.header,
            )
    return kernel


def launch(
    source: MetalSource,
    inputs: Sequence[Array],
    *,
    template: Sequence[tuple[str, Any]],
    groups: tuple[int, int, int],
    threads: int,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
) -> Sequence[Array]:
    """Run `groups` threadgroups of `threads` threads (one axis); returns the outputs."""
    if not 0 < threads <= THREADGROUP_THREADS or min(groups) < 1:
        raise DSpineError(
            f"{source.name}: 1..{THREADGROUP_THREADS} threads and no empty grid expected, got {threads}, {groups}"
        )
    return metal_kernel(source)(
        inputs=list(inputs),
        template=list(template),
        grid=(groups[0] * threads, groups[1], groups[2]),
        threadgroup=(threads, 1, 1),
        output_shapes=[tuple(shape) for shape in shapes],
        output_dtypes=list(dtypes),
    )


def mlx() -> Any:
    """`mlx.core`, imported when a kernel runs: importing these files must import no framework."""
    import mlx.core as mx

    return mx


def ceil_div(a: int, b: int) -> int:
    """Smallest n with n * b >= a."""
    return -(-a // b)


def floating(*arrays: Array) -> bool:
    """True where all arrays are float32, bfloat16 or float16."""
    return all(str(array.dtype).rpartition(".")[2] in ("float32", "bfloat16", "float16") for array in arrays)


def rows_of(x: Array) -> int:
    """Product of all axes but the last."""
    count = 1
    for size in x.shape[:-1]:
        count *= size
    return count
