"""The core's code of every operation reads nothing on the host: it runs on torch's meta device and under `mx.compile`."""

from __future__ import annotations

import numpy as np
import pytest

from dspine.common.parity.backends import map_values, role_dtype, rounded
from dspine.common.parity.runner import OPERATIONS, table
from dspine.common.registry import reference_only

CHECKS = {op: [check for check in table(True) if check.op == op and "long-run" not in check.family] for op in OPERATIONS}
CASES = [(op, check) for op in OPERATIONS for check in {check.family: check for check in CHECKS[op]}.values()]
IDS = [f"{op}-{check.family}".replace(" ", "_") for op, check in CASES]


def reference(op, *args):
    return OPERATIONS[op].reference(*args)


@pytest.mark.parametrize(("op", "check"), CASES, ids=IDS)
def test_torch_meta_tensors(op, check):
    """A meta tensor has no numbers: any read of one, and any shape that depends on one, raises."""
    torch = pytest.importorskip("torch")
    inputs = check.build()
    want = check.expect(map_values(lambda value: rounded(value, "float32"), inputs))

    def meta(value):
        return torch.empty(value.array.shape, dtype=getattr(torch, role_dtype(value, "float32")), device="meta")

    with reference_only():
        found = check.run(reference, map_values(meta, inputs))
    assert {name: tuple(array.shape) for name, array in found.items()} == {name: a.shape for name, a in want.items()}


@pytest.mark.parametrize(("op", "check"), CASES, ids=IDS)
def test_mlx_compile(op, check):
    mx = pytest.importorskip("mlx.core")
    inputs, arrays, names = check.build(), [], []

    def collect(value):
        host = rounded(value, "float32").astype(np.int32 if value.role == "int" else np.float32)
        arrays.append(mx.array(host))

    map_values(collect, inputs)

    def traced(*leaves):
        remaining = iter(leaves)
        found = check.run(reference, map_values(lambda value: next(remaining), inputs))
        names[:] = found
        return list(found.values())

    with reference_only():
        found = mx.compile(traced)(*arrays)
    want = check.expect(map_values(lambda value: rounded(value, "float32"), inputs))
    for name, array in zip(names, found, strict=True):
        assert check.error(name, np.array(array), want[name]) <= max(
            check.bound(name, "float32", want[name]), 1e-5 * (check.kinds[name] != "exact")
        )
