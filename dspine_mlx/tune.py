"""`dspine bench --tune`: time MLX's own products against the small-row kernels, on the shapes of one model, on this machine.

The table says for each shape which numbers of rows the kernel made faster by at least `MARGIN`; everything else stays with
MLX. It is read when a quantised model is loaded on Metal.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import mlx.core as mx
from mlx import nn
from mlx_lm.utils import load_model

from dspine.common.configs import read_config
from dspine.common.errors import BackendError
from dspine_mlx import ops
from dspine_mlx.small_rows import ROWS, Shape, SmallRowLinear, SmallRowSwitch, Table, packed_layers, picks_of, save_table
from dspine_mlx.targets.layouts import load_options

MARGIN = 0.95  # the kernel must take at most this share of the library's time
CHAIN, REPEATS = 8, 15
Measure = Callable[[Callable[[], mx.array]], float]


def seconds(product: Callable[[], mx.array]) -> float:
    """Median time of one product, over chains of `CHAIN` evaluated together (a single one is mostly waiting)."""
    mx.eval(product())
    times = []
    for _ in range(REPEATS):
        started = perf_counter()
        mx.eval([product() for _ in range(CHAIN)])
        times.append((perf_counter() - started) / CHAIN)
    return statistics.median(times)


def tune(model: nn.Module, *, device: str, picks: int = 1, measure: Measure = seconds) -> Iterator[tuple[str, Table]]:
    """Measure every shape of the model; yields (a line about the shape, the table so far)."""
    ops.register()
    table = Table(device, version("mlx"))
    seen: set[str] = set()
    for name, layer, shape in packed_layers(model, picks):
        if shape.key in seen:
            continue
        seen.add(shape.key)
        ratios = {rows: _ratio(layer, shape, rows, picks, measure) for rows in ROWS}
        counts = {rows: rows * picks if shape.experts else rows for rows in ROWS}
        table.faster[shape.key] = [counts[rows] for rows, ratio in ratios.items() if ratio <= MARGIN]
        shown = " ".join(f"{rows}:{ratio:.2f}" for rows, ratio in ratios.items())
        yield f"{shape.key} ({name}): kernel over library {shown}", table


def _ratio(layer: nn.Module, shape: Shape, rows: int, picks: int, measure: Measure) -> float:
    """Time of the kernel over that of the library for `rows` tokens."""
    dtype = layer["scales"].dtype
    if not shape.experts:
        x = mx.random.normal((1, rows, shape.width)).astype(dtype)
        own = SmallRowLinear.over(layer, frozenset([rows]))
        return measure(lambda: own(x)) / measure(lambda: layer(x))
    chosen = mx.argsort(mx.random.normal((1, rows, shape.experts)), axis=-1)[..., :picks]
    x = mx.random.normal((1, rows, 1 if shape.share > 1 or picks == 1 else picks, 1, shape.width)).astype(dtype)
    own = SmallRowSwitch.over(layer, frozenset([rows * picks]))
    mx.eval(x, chosen)
    return measure(lambda: own(x, chosen)) / measure(lambda: layer(x, chosen))


def tune_folder(folder: Path, announce: Callable[[str], None]) -> Path | None:
    """Measure the shapes of one model folder, a line each through `announce`, and keep the table; None where there is nothing
    to measure. BackendError without Metal."""
    if not mx.metal.is_available():
        raise BackendError("--tune measures Metal kernels, and there is no Metal here: MLX's own products run")
    loaded, _ = load_model(folder, **load_options(read_config(folder)))
    if any(layer["scales"].dtype == mx.float16 for _, layer, _ in packed_layers(loaded)):
        loaded.set_dtype(mx.bfloat16)  # as targets run
    device = str(mx.device_info()["device_name"])
    table = None
    for line, so_far in tune(loaded, device=device, picks=picks_of(loaded)):
        announce(line)
        table = so_far
    if table is None:
        announce(f"{folder.name} has no packed layers that the kernels know: nothing to measure")
        return None
    return save_table(table)
