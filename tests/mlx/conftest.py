"""MLX tests: skipped with a reason where MLX is absent."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
