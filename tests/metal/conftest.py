from __future__ import annotations

import pytest

from tests.metal.toolchain import unavailable


@pytest.fixture(autouse=True)
def emulator_can_run():
    """A Mac runs its kernels for real; elsewhere a missing compiler is a reason, not a failure."""
    if reason := unavailable():
        pytest.skip(reason)
