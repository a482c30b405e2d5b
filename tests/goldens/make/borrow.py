"""Take single classes and functions out of an unpacked wheel, and run them as they stand.

The packages behind the goldens want CUDA, servers or models at import. Their formulas are a few plain torch definitions:
those are cut out of the source by name, and executed in a namespace that holds torch only. Nothing of them is stored here.
"""

from __future__ import annotations

import ast
import typing
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class _Plain(ast.NodeTransformer):
    """Decorators that compile or register would pull in the rest of the package."""

    KEPT = ("property", "abstractmethod", "staticmethod", "classmethod")

    def _strip(self, node: Any) -> Any:
        node.decorator_list = [d for d in node.decorator_list if isinstance(d, ast.Name) and d.id in self.KEPT]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                argument.annotation = None
        self.generic_visit(node)
        return node

    visit_FunctionDef = visit_ClassDef = _strip  # noqa: N815


def borrow(path: Path, *names: str, **more: Any) -> dict[str, Any]:
    """The named top-level definitions of a source file, ready to use; `more` are names they refer to."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    wanted = [node for node in tree.body if getattr(node, "name", None) in names]
    missing = set(names) - {node.name for node in wanted}  # type: ignore[attr-defined]
    if missing:
        raise SystemExit(f"{path}: {', '.join(sorted(missing))} not there; has the package changed?")
    module = ast.fix_missing_locations(_Plain().visit(ast.Module(body=wanted, type_ignores=[])))
    space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "ABC": ABC, "abstractmethod": abstractmethod}
    space |= {name: getattr(typing, name) for name in ("Any", "Optional", "Tuple")} | more
    exec(compile(module, str(path), "exec"), space)  # noqa: S102
    return space
