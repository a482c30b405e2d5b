"""The wheel, built without network from a copy of the tree, holds every module, the drafters, and working entry points."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.tree import NAMES, ROOT, project, shipped_modules


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: a build in place would leave folders behind, and pick up what an older one left."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for folder in NAMES:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_modules_equal_the_tree(unpacked):
    names = {path.relative_to(unpacked).with_suffix("").as_posix().replace("/", ".") for path in unpacked.rglob("*.py")}
    assert names == set(shipped_modules())
    assert not (unpacked / "common").exists(), "a package called `common` must not reach site-packages"
    assert not (unpacked / "dspine" / "__init__.py").exists(), "dspine is a namespace"


def test_drafters_are_in_the_wheel(unpacked):
    checkpoints = ROOT / "examples" / "checkpoints"
    wanted = {path.relative_to(checkpoints) for path in checkpoints.glob("*/*") if path.parent.name != "__pycache__"}
    inside = unpacked / "dspine" / "checkpoints"
    assert {path.relative_to(inside) for path in inside.glob("*/*")} == wanted


def test_entry_points_name_modules_of_the_wheel(unpacked):
    points = dict(project()["project"]["scripts"])
    for group in project()["project"]["entry-points"].values():
        points |= group
    assert {"dspine", "mlx", "torch", "train"} <= set(points)
    for value in points.values():
        module = value.partition(":")[0].replace(".", "/")
        assert (unpacked / f"{module}.py").is_file(), value


def test_installed_wheel_works_without_the_tree(unpacked, tmp_path):
    code = (
        "import dspine.common.models as m; from dspine.common.cli.main import build_app; build_app()\n"
        "print(m.__file__); print(m.checkpoints_folder())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    module, checkpoints = run.stdout.split()
    assert Path(module).is_relative_to(unpacked) and Path(checkpoints) == unpacked / "dspine" / "checkpoints"
