"""Where a figure comes from: commit, machine, versions, command. A result without them is not a result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("dspine", "torch", "triton", "mlx", "mlx-lm", "transformers", "numpy")


def provenance() -> dict[str, Any]:
    """Facts of this run as plain JSON values."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "commit": _commit(),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "python": platform.python_version(),
        "versions": versions,
    }


def _commit() -> str:
    """Short commit of the source tree this module lies in; a wheel has none."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        return "unknown (installed, no source tree)"
    run = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*run, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        if head.returncode:
            return "unknown (no git)"
        dirty = subprocess.run(
            [*run, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return "unknown (no git)"
    return head.stdout.strip() + ("-dirty" if dirty else "")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if lines and lines[0]:
            return lines[0]
    return platform.processor() or platform.machine()
