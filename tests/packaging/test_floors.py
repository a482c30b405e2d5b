"""Floors, sizes and habits of the source tree, checked on its syntax: nothing is imported here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.packaging.tree import ROOT, imports, python_files

FRAMEWORKS = {"torch", "mlx", "mlx_lm", "triton", "jax", "cupy"}
UPPER = {"examples", "benchmarks", "tests"}
MLX_SIDE = {"dspine_mlx", "dspine.kernels_metal", "mlx", "mlx_lm"}
TORCH_SIDE = {"dspine_cuda", "dspine.kernels_triton", "torch", "triton"}

FORBIDDEN = {
    "common": FRAMEWORKS | UPPER | {"dspine_mlx", "dspine_cuda", "dspine.kernels_metal", "dspine.kernels_triton"},
    "kernels_metal": TORCH_SIDE | UPPER | {"dspine_mlx"},
    "kernels_triton": MLX_SIDE | UPPER | {"dspine_cuda"},
    "dspine_mlx": TORCH_SIDE | UPPER,
    "dspine_cuda": MLX_SIDE | UPPER,
}
MODULE_LINES, FUNCTION_LINES = 500, 60
KERNEL_SOURCES = ("kernels_metal", "kernels_triton")  # source text of kernels may be long: exempt by folder


def _inside(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


@pytest.mark.parametrize("room", FORBIDDEN)
def test_rooms_import_only_lower_floors(room):
    files = python_files(room)
    assert files
    bad = [
        f"{_where(path, line)} imports {module}"
        for path in files
        for line, _, module in imports(path)
        if any(_inside(module, package) for package in FORBIDDEN[room])
    ]
    assert not bad, "\n".join(bad)


def test_imports_are_absolute_and_by_the_installed_names():
    """`import common` would work from a source tree only."""
    folders = ("common", "kernels_metal", "kernels_triton")
    bad = [
        f"{_where(path, line)} imports {'.' * level}{module}"
        for room in (*FORBIDDEN, "benchmarks", "tests")
        for path in python_files(room)
        for line, level, module in imports(path)
        if level or any(_inside(module, folder) for folder in folders)
    ]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("room", [*FORBIDDEN, "benchmarks"])
def test_sizes(room):
    bad = []
    for path in python_files(room):
        if room in KERNEL_SOURCES and path.name != "__init__.py":
            continue
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > MODULE_LINES:
            bad.append(f"{_where(path, 1)} has {text.count(chr(10))} lines, at most {MODULE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > FUNCTION_LINES:
                    bad.append(f"{_where(path, node.lineno)} {node.name} has {lines} lines, at most {FUNCTION_LINES}")
    assert not bad, "\n".join(bad)


def _environment_reads(text: str) -> bool:
    return re.search(r"\bos\.environ\b|\bgetenv\b|from os import .*\benviron\b", text) is not None


def test_environment_is_read_in_one_place():
    readers = {
        path.relative_to(ROOT).as_posix()
        for room in FORBIDDEN
        for path in python_files(room)
        if _environment_reads(path.read_text(encoding="utf-8"))
    }
    assert readers == {"common/environment.py"}
