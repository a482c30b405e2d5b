"""The source tree as the packaging tests see it."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = {  # folder -> import name of what ships
    "common": "dspine.common",
    "kernels_metal": "dspine.kernels_metal",
    "kernels_triton": "dspine.kernels_triton",
    "dspine_mlx": "dspine_mlx",
    "dspine_cuda": "dspine_cuda",
    "examples/checkpoints": "dspine.checkpoints",
}
_SKIPPED = {"build", "dist", "runs", "__pycache__", "node_modules"}


def python_files(top: str) -> list[Path]:
    return sorted(path for path in (ROOT / top).rglob("*.py") if not _hidden(path))


def folders_with_python() -> set[str]:
    found = {path.parent.relative_to(ROOT) for path in ROOT.rglob("*.py") if not _hidden(path)}
    return {folder.as_posix() + "/" for folder in found if folder != Path(".")}


def _hidden(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    return any(part in _SKIPPED or part.startswith(".") or part.endswith(".egg-info") for part in parts)


def shipped_modules() -> dict[str, Path]:
    """Import name -> file of every module that a wheel must hold; a package is listed as `package.__init__`."""
    modules = {}
    for folder, name in NAMES.items():
        for path in python_files(folder):
            relative = path.relative_to(ROOT / folder).with_suffix("")
            modules[".".join((name, *relative.parts))] = path
    return modules


@cache
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def imports(path: Path) -> Iterator[tuple[int, int, str]]:
    """(line, relative level, module) of every import statement, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, 0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "dspine" else [node.module or ""]
            yield from ((node.lineno, node.level, name) for name in names)
