"""Memory while a drafter is loaded with MLX: one copy of the weights, and one tensor."""

from __future__ import annotations

import pytest

from tests.helpers.loading import CAN_MEASURE, SLACK, drafter_bytes, loading_peak


@pytest.mark.skipif(not CAN_MEASURE, reason="the peak of a process is read from /proc")
def test_one_copy_and_one_tensor(tmp_path):
    weights, largest = drafter_bytes()
    peak, rest = loading_peak(tmp_path, "dspine_mlx.drafter", "import mlx.core as mx", "mx.zeros(1)")
    assert weights <= rest <= weights + SLACK, f"{rest / 2**20:.1f} MiB are kept"
    assert peak <= weights + largest + SLACK, f"{peak / 2**20:.1f} MiB at the peak"
