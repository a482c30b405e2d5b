"""MLX tests: skipped with a reason where MLX is absent. They run on MLX's CPU back end, where all that they claim is exact;
`DSPINE_TEST_MLX=gpu` runs them on Metal or CUDA instead."""

from __future__ import annotations

import os

import pytest

mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
# before mlx_lm is imported: it makes a stream of the default device
mx.set_default_device(mx.Device(getattr(mx, os.environ.get("DSPINE_TEST_MLX", "cpu"))))
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
