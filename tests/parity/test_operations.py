"""Operation x backend x dtype x shape x input family against float64: the table of `dspine parity`, as tests."""

from __future__ import annotations

import pytest

from dspine.common.parity.backends import BACKENDS
from dspine.common.parity.runner import OPERATIONS, run_check, table
from tests.parity.backends import backends

CHECKS = [(check, dtype) for check in table(scaled=True) for dtype in check.dtypes]
IDS = [f"{check.op}-{check.family}-{check.shape}-{dtype}".replace(" ", "_") for check, dtype in CHECKS]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("check", "dtype"), CHECKS, ids=IDS)
def test_parity(check, dtype, backend):
    result = run_check(check, dtype, backends()[backend])
    if result.skipped_reason is not None:
        pytest.skip(result.skipped_reason)
    assert result.passed, f"error {result.error:.3e} above its bound {result.bound:.1e}"


def test_every_operation_has_checks():
    """An operation without a row in the table is held to nothing."""
    assert {check.op for check, _ in CHECKS} == set(OPERATIONS)
    assert len(set(IDS)) == len(IDS)
