"""How Metal kernels are made: lazily, once, by any thread, through one replaceable function; and where they are registered."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import dspine.kernels_metal
from dspine.common import registry, transition
from dspine.common.errors import DSpineError
from dspine.kernels_metal import _launch, path_walk
from dspine_mlx import ops
from tests.metal.emulator import emulated_metal_kernel

FOLDER = Path(dspine.kernels_metal.__file__).parent
FILES = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))
SOURCES = {
    source.name: source
    for name in [*FILES, "_linear"]
    for source in vars(importlib.import_module(f"dspine.kernels_metal.{name}")).values()
    if isinstance(source, _launch.MetalSource)
}
SCORES = mx.array(np.random.default_rng(0).normal(size=(1, 3, 4, 4)).astype(np.float32))
CANDIDATES = mx.array(np.arange(12, dtype=np.int32).reshape(1, 3, 4))


def counting(made):
    def make(**kwargs):
        made.append(kwargs["name"])
        return emulated_metal_kernel(**kwargs)

    return make


def test_first_line_names_the_twin():
    for name in FILES:
        first = (FOLDER / f"{name}.py").read_text(encoding="utf-8").partition("\n")[0]
        assert first.startswith("# twin: dspine.common.")
        for twin in first.removeprefix("# twin: ").split(", "):
            module, _, function = twin.rpartition(".")
            assert hasattr(getattr(importlib.import_module(module), function), "reference"), twin


def test_registration_is_for_metal_only():
    ops.register()
    operations = {key.split("/")[0] for key, name in registry.kernel_report().items() if name == "metal"}
    assert set(FILES) - {"accept"} <= operations
    assert {"accept_greedy", "accept_point_mass", "path_walk_sampled", "gdn_verify_deferred"} <= operations
    for name in operations:
        assert registry.registered_kernel(name, "mlx", "metal").name == "metal"
        other = registry.registered_kernel(name, "mlx", "cpu")
        assert other is None or other.name != "metal"


def test_importing_and_registering_makes_nothing():
    code = (
        "import sys, pkgutil, importlib, dspine.kernels_metal as k\n"
        "for m in pkgutil.iter_modules(k.__path__): importlib.import_module(f'dspine.kernels_metal.{m.name}')\n"
        "assert not any(name.partition('.')[0] in ('mlx', 'torch', 'triton') for name in sys.modules)\n"
        "from dspine_mlx import ops; ops.register()\n"
        "from dspine.kernels_metal import _launch; assert not _launch._built\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_a_kernel_is_made_once_and_shared_by_threads():
    made = []
    factory, results = counting(made), []
    expected = np.array(transition.path_walk.reference(SCORES, CANDIDATES))
    barrier = threading.Barrier(4)

    def work():
        with _launch.built_by(factory):
            barrier.wait(timeout=30)
            results.append(np.array(path_walk.path_walk(SCORES, CANDIDATES)))

    for _ in range(2):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert len(results) == 8 and all((r == expected).all() for r in results)
    assert made == ["dspine_path_walk"]


def test_the_factory_ends_with_its_block():
    made = []
    with _launch.built_by(counting(made)):
        assert _launch.metal_kernel(path_walk.GREEDY) is _launch.metal_kernel(path_walk.GREEDY)
    assert len(made) == 1 and _launch._factory.get() is None
    if not mx.metal.is_available():
        with pytest.raises(Exception, match="No Metal back-end"):
            mx.eval(path_walk.path_walk(SCORES, CANDIDATES))


def test_empty_or_too_large_launches_are_refused():
    launch = functools.partial(_launch.launch, path_walk.GREEDY, [], template=[], shapes=[], dtypes=[])
    for groups, threads in (((0, 1, 1), 32), ((1, 1, 1), 2048)):
        with pytest.raises(DSpineError, match="1..1024 threads and no empty grid"):
            launch(groups=groups, threads=threads)


def test_sources_keep_to_what_metal_has():
    """Names that are unique (MLX caches by name), no more buffers than 31, no double, no keyword as a name."""
    assert len(SOURCES) >= 18
    for source in SOURCES.values():
        assert source.name.startswith("dspine_")
        names = (*source.inputs, *source.outputs)
        assert len(set(names)) == len(names) <= 31
        text = source.header + source.body
        assert "double" not in text and "\t" not in text
        assert all(name in source.body for name in names), source.name
