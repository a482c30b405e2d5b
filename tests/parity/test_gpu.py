"""The whole table on CUDA, at real model shapes: what `dspine parity` runs there, as tests."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from dspine.common.parity.runner import OPERATIONS, run_all
from tests.parity.backends import backends

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["triton", "torch-ops"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_operation(op, name):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if name == "triton" and find_spec(f"dspine.kernels_metal.{op}") and not find_spec(f"dspine.kernels_triton.{op}"):
        pytest.skip("an operation of Metal alone")
    results = list(run_all([backends()[name]], [op]))
    assert results and all(result.device != "interpreted" for result in results)
    missed = [result for result in results if result.missed]
    assert not missed, "\n".join(map(str, missed))
    if name == "triton":
        declined = {(result.shape, result.skipped_reason) for result in results if result.skipped_reason}
        assert not declined, declined
