"""The kernel text MLX makes of a `metal_kernel` call: header, signature, body.

Written from what `mx.export_function` shows for such calls; `test_signature.py` pins the two against each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Arrays of fewer elements than this are passed in the constant address space.
MAX_CONSTANT_ELEMENTS = 8

# In MLX's order; an attribute becomes an argument when its name occurs anywhere in the body.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

# The expression over `emu_position* p` that gives each attribute its value.
_VALUES = {
    "dispatch_quadgroups_per_threadgroup": "p->dispatched_simdgroups * 8",
    "dispatch_simdgroups_per_threadgroup": "p->dispatched_simdgroups",
    "dispatch_threads_per_threadgroup": "emu_uint3(p->dispatched_threads_per_group)",
    "grid_origin": "uint3(0)",
    "grid_size": "emu_uint3(p->threads_per_grid)",
    "quadgroup_index_in_threadgroup": "p->index_in_group / 4",
    "quadgroups_per_threadgroup": "p->simdgroups * 8",
    "simdgroup_index_in_threadgroup": "p->simdgroup",
    "simdgroups_per_threadgroup": "p->simdgroups",
    "thread_execution_width": "32u",
    "thread_index_in_quadgroup": "p->lane % 4",
    "thread_index_in_simdgroup": "p->lane",
    "thread_index_in_threadgroup": "p->index_in_group",
    "thread_position_in_grid": "emu_uint3(p->position_in_grid)",
    "thread_position_in_threadgroup": "emu_uint3(p->position_in_group)",
    "threadgroup_position_in_grid": "emu_uint3(p->group_in_grid)",
    "threadgroups_per_grid": "emu_uint3(p->groups_per_grid)",
    "threads_per_grid": "emu_uint3(p->threads_per_grid)",
    "threads_per_simdgroup": "32u",
    "threads_per_threadgroup": "emu_uint3(p->threads_per_group)",
}

METAL_TYPES = {
    "bool": "bool",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "float16_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "complex64": "complex64_t",
}


@dataclass(frozen=True)
class Operand:
    """An input or an output: its name, dtype name as in `METAL_TYPES`, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Buffer:
    """One bound buffer: an operand itself, or its shape, strides or rank as an array of integers."""

    name: str
    operand: int  # index into inputs, then outputs
    part: str  # "data", "shape", "strides", "ndim"


@dataclass(frozen=True)
class KernelText:
    """What MLX hands to the Metal compiler, and what the emulator needs to call it."""

    function: str
    text: str  # without the explicit instantiation
    instantiation: str
    template_arguments: str
    buffers: tuple[Buffer, ...]
    arguments: tuple[str, ...]  # C++ expressions of the call, in order


def kernel_text(
    name: str,
    source: str,
    header: str,
    inputs: Sequence[Operand],
    outputs: Sequence[Operand],
    template: Sequence[tuple[str, object]] = (),
    atomic_outputs: bool = False,
) -> KernelText:
    """Generate the text of a kernel. Template values are bool, int, or a dtype name of `METAL_TYPES`."""
    buffers: list[Buffer] = []
    lines: list[str] = []
    arguments: list[str] = []

    def bind(text: str, buffer: Buffer, call: str) -> None:
        index = len(buffers)
        lines.append(f"  {text} [[buffer({index})]]")
        buffers.append(buffer)
        arguments.append(call.format(index))

    for i, operand in enumerate(inputs):
        kind = METAL_TYPES[operand.dtype]
        space = "constant" if operand.size < MAX_CONSTANT_ELEMENTS else "device"
        scalar = not operand.shape
        mark, deref = ("&", "*") if scalar else ("*", "")
        bind(f"const {space} {kind}{mark} {operand.name}", Buffer(operand.name, i, "data"), f"{deref}(const {kind}*)b[{{}}]")
        if scalar:
            continue
        for part, text in (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&")):
            if f"{operand.name}_{part}" in source:
                deref = "*" if text.endswith("&") else ""
                label = f"{operand.name}_{part}"
                bind(f"const constant {text} {label}", Buffer(label, i, part), f"{deref}(const {text[:-1]}*)b[{{}}]")
    for i, operand in enumerate(outputs, start=len(inputs)):
        kind = METAL_TYPES[operand.dtype]
        kind = f"atomic<{kind}>" if atomic_outputs else kind
        bind(f"device {kind}* {operand.name}", Buffer(operand.name, i, "data"), f"({kind}*)b[{{}}]")
    for attribute, kind in ATTRIBUTES.items():
        if attribute in source:
            lines.append(f"  {kind} {attribute} [[{attribute}]]")
            arguments.append(_VALUES[attribute])

    function = _function_name(name, inputs, outputs, template)
    values = ", ".join(_template_value(value) for _, value in template)
    text = header
    if template:
        text += f"template <{', '.join(f'{_template_kind(v)} {n}' for n, v in template)}>\n"
    text += f"[[kernel]] void {function}(\n" + ",\n".join(lines) + ") {\n" + source + "\n}\n"
    instantiation = ""
    if template:
        call = f"{function}<{values}>"
        instantiation = f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({call}) {call};\n'
    return KernelText(function, text, instantiation, f"<{values}>" if template else "", tuple(buffers), tuple(arguments))


def _template_kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if isinstance(value, int) else "typename"


def _template_value(value: object) -> str:
    return str(int(value)) if isinstance(value, int) else METAL_TYPES[str(value)]


def _function_name(
    name: str, inputs: Sequence[Operand], outputs: Sequence[Operand], template: Sequence[tuple[str, object]]
) -> str:
    values = ", ".join(_template_value(value) for _, value in template)
    parts = [f"custom_kernel_{name}"]
    if template:
        parts.append(re.sub(r"\W+", "_", f"<{values}".replace("-", "_")))
    for operand in inputs:
        suffix = "s" if not operand.shape else "c" if operand.size < MAX_CONSTANT_ELEMENTS else ""
        parts.append(METAL_TYPES[operand.dtype] + suffix)
    parts += [METAL_TYPES[operand.dtype] for operand in outputs]
    return "_".join(parts)
