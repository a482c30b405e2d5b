"""The MLX runtime as `common` finds it: lazily, with one-line refusals."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import mlx.core as mx
import pytest

from dspine.common.errors import BackendError, CheckpointError
from dspine.common.runtimes import choose_runtime
from dspine_mlx.arrays import wire_memory
from dspine_mlx.runtime import RUNTIME
from tests.mlx.toys import drafter_folder, save_model, toy_model


def run_python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_runtime_imports_no_mlx():
    run_python(
        "import sys, dspine_mlx.runtime as r\n"
        "assert r.RUNTIME.name == 'mlx'\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'torch')]\n"
    )


def test_importing_the_package_makes_no_stream_and_registers_nothing():
    """V1: what is made at import belongs to the importing thread."""
    run_python(
        "import sys, dspine_mlx.generate, dspine_mlx.drafter, dspine_mlx.targets, dspine_mlx.ops, mlx.core as mx\n"
        "from dspine.common.registry import kernel_report\n"
        "assert kernel_report() == {}\n"
        "ours = [module for name, module in sys.modules.items() if name.startswith('dspine')]\n"
        "held = [value for module in ours for value in vars(module).values()]\n"
        "assert len(ours) > 10 and not any(isinstance(value, (mx.array, mx.Stream)) for value in held)\n"
    )


def test_found_by_name():
    runtime, reason = choose_runtime("mlx")
    assert runtime is RUNTIME and "asked for" in reason


def test_availability_names_the_devices():
    state = RUNTIME.availability()
    assert state.ok and "cpu" in state.devices and state.reason and "dspine[mlx]" in state.install
    assert ("metal" in state.devices) == mx.metal.is_available()


def test_absent_mlx_is_one_line(monkeypatch, tmp_path):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "mlx_lm" else real(name, *rest))
    state = RUNTIME.availability()
    assert not state.ok and state.reason == "not installed: mlx_lm" and state.devices == ()
    with pytest.raises(BackendError, match=r"not installed: mlx_lm.*pip install 'dspine\[mlx\]'"):
        RUNTIME.load_target(tmp_path)


def test_unknown_device_is_one_line(tmp_path):
    with pytest.raises(BackendError, match="device 'tpu' is not there for MLX; here: .*cpu"):
        RUNTIME.load_target(tmp_path, device="tpu")


def test_pair_through_the_protocol(tmp_path):
    model, config = toy_model("llama")
    target = RUNTIME.load_target(save_model(tmp_path / "t", model, config), device="cpu", dtype="float32")
    assert target.info.device == "cpu"
    drafter = RUNTIME.load_drafter(drafter_folder(tmp_path / "d", "dspine", 6, target.head_weight()), target)
    assert target.layer_ids == (1, 2) and drafter.info["block_size"] == 6
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        RUNTIME.load_drafter(tmp_path / "nowhere", target)


def test_the_wired_limit_is_the_recommended_working_set(monkeypatch):
    """As mlx_lm sets it, before weights are loaded; without Metal, and on a system that refuses, nothing is set."""
    limits = []
    monkeypatch.setattr(mx, "set_wired_limit", limits.append)
    if not mx.metal.is_available():
        assert wire_memory() is None and limits == []
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *_: {"max_recommended_working_set_size": 12_345})
    assert wire_memory() == 12_345 and limits == [12_345]

    def refuse(limit):
        raise RuntimeError("set_wired_limit needs macOS 15")

    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    assert wire_memory() is None
