"""Packed layers that pick their product by the number of rows: MLX's own, or the small-row kernels where those were faster.

Which rows go to a kernel stands in a table that `dspine bench --tune` measures on the user's machine (`dspine_mlx/tune.py`).
Without a table, and on every device but Metal, nothing is replaced: MLX's own products run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from dspine.common.environment import cache_folder
from dspine.common.errors import DSpineError
from dspine.common.quantized_rows import BITS, gathered_rows, quantized_rows

FORMAT = 1
ROWS = range(2, 17)


@dataclass(frozen=True)
class Shape:
    """What decides which product is faster: `experts` 0 is a plain layer; `share` picks read one row of x."""

    bits: int
    group_size: int
    width: int
    columns: int
    dtype: str
    experts: int = 0
    share: int = 1

    @property
    def key(self) -> str:
        """Name of the shape in a table."""
        routed = f"/{self.experts} experts/{self.share} picks a row" if self.experts else ""
        return f"{self.width} to {self.columns} at {self.bits} bits in groups of {self.group_size}, {self.dtype}{routed}"


@dataclass
class Table:
    """key of a shape -> numbers of rows (of picks, where experts are gathered) whose product the kernel made faster."""

    device: str
    mlx: str
    faster: dict[str, list[int]] = field(default_factory=dict)

    def rows(self, shape: Shape) -> frozenset[int]:
        """Rows that go to the kernel; none for a shape that was not measured."""
        return frozenset(self.faster.get(shape.key, ()))


def table_path(device: str) -> Path:
    """Where the table of a device is kept."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"
    return cache_folder() / "tune" / f"{name}.json"


def save_table(table: Table) -> Path:
    """Write a table to its place; DSpineError where that cannot be written."""
    path = table_path(table.device)
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"format": FORMAT, **vars(table)}, indent=1) + "\n")
        os.replace(part, path)
    except OSError as error:
        raise DSpineError(f"cannot write {path}: {error.strerror}; set DSPINE_CACHE to another folder") from error
    return path


def load_table(device: str) -> tuple[Table | None, str]:
    """(the table of this device or None, why): one of another MLX is not used, a damaged one is an error."""
    path = table_path(device)
    if not path.is_file():
        return None, "not tuned: dspine bench --tune measures which products the small-row kernels make faster"
    try:
        content = json.loads(path.read_text())
        form = content.pop("format")
        table = Table(**content)
        good = all(isinstance(rows, list) and set(rows) <= set(range(1, 257)) for rows in table.faster.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DSpineError(f"{path} is damaged ({type(error).__name__}): delete it, or run dspine bench --tune again") from error
    if form != FORMAT or not good:
        raise DSpineError(f"{path} is not a table of format {FORMAT}: delete it, or run dspine bench --tune again")
    if table.mlx != version("mlx"):
        return None, f"tuned with MLX {table.mlx}, this is {version('mlx')}: run dspine bench --tune again"
    return table, str(path)


def shape_of(layer: nn.Module, picks: int = 1) -> Shape | None:
    """The shape of a packed layer, or None where the kernels do not know its form. `picks`: experts a token."""
    if type(layer) not in (nn.QuantizedLinear, QuantizedSwitchLinear) or layer.mode != "affine":
        return None
    if layer.bits not in BITS or layer.get("biases") is None or layer.get("global_scale") is not None:
        return None
    scales = layer["scales"]
    facts = (layer.bits, layer.group_size, scales.shape[-1] * layer.group_size, scales.shape[-2])
    dtype = str(scales.dtype).rpartition(".")[2]
    if isinstance(layer, nn.QuantizedLinear):
        return Shape(*facts, dtype)
    return Shape(*facts, dtype, experts=layer.num_experts, share=picks)


def picks_of(model: nn.Module) -> int:
    """Experts a token of this model; 1 without experts."""
    found = [layer.top_k for _, layer in model.named_modules() if isinstance(getattr(layer, "top_k", None), int)]
    return max(found, default=1)


class SmallRowLinear(nn.QuantizedLinear):
    """A `QuantizedLinear` whose products of `rows` rows go to the kernel."""

    @classmethod
    def over(cls, layer: nn.QuantizedLinear, rows: frozenset[int]) -> SmallRowLinear:
        """The same arrays in a layer of this kind."""
        return _same_arrays(cls, layer, rows)

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., K] -> [..., N]."""
        width = x.shape[-1]
        if x.size // width not in self.kernel_rows:
            return super().__call__(x)
        flat = mx.reshape(x, (-1, width))
        out = quantized_rows(flat, self["weight"], self["scales"], self["biases"], self.bits, self.group_size)
        out = mx.reshape(out, (*x.shape[:-1], out.shape[-1]))
        return out + self["bias"] if "bias" in self else out


class SmallRowSwitch(QuantizedSwitchLinear):
    """A `QuantizedSwitchLinear` whose products of `rows` picks go to the kernel."""

    @classmethod
    def over(cls, layer: QuantizedSwitchLinear, rows: frozenset[int]) -> SmallRowSwitch:
        """The same arrays in a layer of this kind."""
        return _same_arrays(cls, layer, rows)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """x [..., 1, K] (a row a pick, or one for all picks of a token), indices int [...] -> [..., 1, N], as mlx-lm has it."""
        rows, picks = x.size // x.shape[-1], indices.size
        if picks not in self.kernel_rows or picks % rows:
            return super().__call__(x, indices, sorted_indices)
        flat = mx.reshape(x, (rows, x.shape[-1]))
        parts = self["weight"], self["scales"], self["biases"]
        out = gathered_rows(flat, *parts, mx.reshape(indices, (-1,)), self.bits, self.group_size)
        out = mx.reshape(out, (*indices.shape, 1, out.shape[-1]))
        return out + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else out


def _same_arrays(kind: type, layer: nn.Module, rows: frozenset[int]) -> Any:
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    for name in ("weight", "scales", "biases", "bias"):
        if name in layer:
            made[name] = layer[name]
    made.group_size, made.bits, made.mode, made.kernel_rows = layer.group_size, layer.bits, layer.mode, rows
    if isinstance(layer, QuantizedSwitchLinear):
        made.global_scale = None
    made.freeze()
    return made


def packed_layers(model: nn.Module, picks: int = 1) -> Iterator[tuple[str, nn.Module, Shape]]:
    """(name, layer, shape) of every layer whose form the kernels know. Of experts, `down_proj` has a row a pick."""
    for name, layer in model.named_modules():
        shape = shape_of(layer, 1 if name.endswith("down_proj") else picks)
        if shape is not None:
            yield name, layer, shape


def use_table(model: nn.Module, table: Table, picks: int = 1) -> int:
    """Put layers that pick by rows in the place of those the table knows; returns how many. Nothing of the class of a
    layer is changed: the model gets other objects over the same arrays."""
    changes = []
    for name, layer, shape in packed_layers(model, picks):
        rows = table.rows(shape)
        if rows:
            kind = SmallRowLinear if isinstance(layer, nn.QuantizedLinear) else SmallRowSwitch
            changes.append((name, kind.over(layer, rows)))
    model.update_modules(_nested(changes))
    return len(changes)


def _nested(changes: list[tuple[str, nn.Module]]) -> Any:
    from mlx.utils import tree_unflatten

    return tree_unflatten(changes) if changes else {}
