"""Importing the core or showing help imports no array framework (habit 5, case I1): seen in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

from tests.packaging.tree import ROOT, shipped_modules

FRAMEWORKS = ("torch", "mlx", "triton", "jax", "mlx_lm", "transformers", "cupy")
REPORT = (
    "import sys\n"
    f"found = sorted(name for name in {FRAMEWORKS!r} if name in sys.modules)\n"
    "sys.exit('imported: ' + ', '.join(found) if found else 0)\n"
)


def run_python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_core_imports_no_framework():
    kernels = "dspine.kernels_triton."  # written in Triton: imported by the torch runtime on CUDA, and by nothing else
    names = [name for name in shipped_modules() if name.startswith("dspine.") and not name.startswith(kernels)]
    core = [name.removesuffix(".__init__") for name in names]
    assert "dspine.common.generation" in core and "dspine.common.cli.main" in core
    run = run_python("".join(f"import {name}\n" for name in core) + REPORT)
    assert run.returncode == 0, run.stderr


def test_runtime_entry_points_import_no_framework():
    code = "from importlib.metadata import entry_points\nassert [p.load() for p in entry_points(group='dspine.runtimes')]\n"
    run = run_python(code + REPORT)
    assert run.returncode == 0, run.stderr


def test_help_and_version_import_no_framework():
    for arguments in (["--help"], ["generate", "--help"], ["--version"]):
        code = (
            f"import sys; sys.argv = ['dspine', *{arguments!r}]\n"
            "from dspine.common.cli.main import main\n"
            "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        )
        run = run_python(code + REPORT)
        assert run.returncode == 0, (arguments, run.stderr)
        assert run.stdout


def test_absent_frameworks_are_named_only_when_used():
    """Neither torch nor MLX can be imported: help and info work, and `generate` says what is missing."""
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'mlx', 'mlx_lm', 'triton'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "absent = ('torch', 'mlx', 'mlx_lm', 'triton')\n"
        "importlib.util.find_spec = lambda name, package=None: None if name in absent else real(name, package)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from dspine.common.cli.main import main\n"
    )
    info = run_python(block + "sys.argv = ['dspine', 'info']\nmain()\n")
    assert info.returncode == 0 and info.stdout.count("not available") >= 2, info.stdout + info.stderr
    generate = run_python(block + "sys.argv = ['dspine', 'generate', '--prompt', 'hi']\nmain()\n")
    assert generate.returncode == 2 and generate.stderr.startswith("error: no runtime can run here"), generate.stderr
    assert generate.stderr.count("\n") == 1 and "pip install" in generate.stderr
