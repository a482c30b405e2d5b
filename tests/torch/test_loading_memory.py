"""Memory while a drafter is loaded with torch: one copy of the weights, and one tensor."""

from __future__ import annotations

import pytest

from tests.helpers.loading import CAN_MEASURE, HIDDEN, INNER, LAYERS, SLACK, drafter_bytes, loading_peak


@pytest.mark.skipif(not CAN_MEASURE, reason="the peak of a process is read from /proc")
def test_one_copy_and_one_tensor(tmp_path):
    """The largest tensor is the gate and up projections of a layer, stacked. Those of K and V are kept twice: a round
    projects the context through all of them at once."""
    weights, _ = drafter_bytes()
    key_value, stacked = LAYERS * 2 * 256 * HIDDEN * 2, 2 * INNER * HIDDEN * 2
    peak, rest = loading_peak(tmp_path, "dspine_cuda.drafter", "import torch", "torch.zeros(1)")
    assert weights <= rest <= weights + key_value + SLACK, f"{rest / 2**20:.1f} MiB are kept"
    assert peak <= weights + key_value + stacked + SLACK, f"{peak / 2**20:.1f} MiB at the peak"
