"""Metal kernels under the emulator: skipped with a reason where MLX or the emulator's compiler is absent."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")

from tests.metal.toolchain import unavailable  # noqa: E402


@pytest.fixture(autouse=True)
def emulator():
    if reason := unavailable():
        pytest.skip(reason)
