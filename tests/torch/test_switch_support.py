"""Which drivers and packages conditional CUDA graphs need, and what is said where they are missing: no GPU is asked."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dspine_cuda.static.switch import switch_support


@pytest.fixture
def bindings(monkeypatch):
    """cuda-bindings as it would be found: (the runtime's version numbers, what NVRTC answers)."""
    answers = SimpleNamespace(driver=(0, 13000), nvrtc=(0, 13, 0))
    runtime = SimpleNamespace(cudaDriverGetVersion=lambda: answers.driver, cudaGraphConditionalHandleCreate=None)
    nvrtc = SimpleNamespace(nvrtcVersion=lambda: answers.nvrtc)
    package, inner = ModuleType("cuda"), ModuleType("cuda.bindings")
    inner.runtime, inner.nvrtc, package.bindings = runtime, nvrtc, inner
    monkeypatch.setitem(sys.modules, "cuda", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings", inner)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    answers.runtime = runtime
    return answers


@pytest.mark.parametrize(
    ("version", "works", "words"),
    [
        (12070, False, "the driver serves CUDA 12.7, SWITCH nodes need 12.8"),
        (11080, False, "the driver serves CUDA 11.8, SWITCH nodes need 12.8"),
        (12080, True, "conditional graphs: driver CUDA 12.8, NVRTC 13.0"),
        (13000, True, "conditional graphs: driver CUDA 13.0, NVRTC 13.0"),
    ],
)
def test_drivers(bindings, version, works, words):
    bindings.driver = (0, version)
    assert switch_support(torch.device("cuda")) == (works, words)


def test_packages(bindings, monkeypatch):
    bindings.nvrtc = (5, 0, 0)
    assert switch_support(torch.device("cuda")) == (False, "NVRTC does not answer (error 5)")
    bindings.driver = (35, 0)
    assert "SWITCH nodes need 12.8" in switch_support(torch.device("cuda"))[1]
    del bindings.runtime.cudaGraphConditionalHandleCreate
    assert switch_support(torch.device("cuda")) == (False, "cuda-bindings is too old for conditional nodes")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert switch_support(torch.device("cuda")) == (False, "cuda-bindings is not installed")
