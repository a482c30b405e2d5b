"""The project's kernels under the strictest mode: races, exact bounds, uninitialised reads, address spaces, 32 KB.

What they compute is held to the reference by `tests/parity` and `tests/metal_kernels`; this is about how they go about it.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.metal.emulator import Report, emulated_metal_kernel, last_report
from tests.metal.lint import lint_unavailable

mx = pytest.importorskip("mlx.core", reason="MLX is not installed")

from dspine.common.parity.runner import OPERATIONS, run_check, table  # noqa: E402
from dspine.common.registry import registered_kernel  # noqa: E402
from dspine.kernels_metal import gdn_verify  # noqa: E402
from dspine.kernels_metal._launch import built_by  # noqa: E402
from dspine_mlx.parity import metal_backend, register_metal_kernels  # noqa: E402

CHECKED_BYTES = 300_000  # check mode is for small arrays
MODELS = ("qwen", "smollm")
SPECIAL = ("padded", "with-norm", "masked", "ties", "limits")


def reports_of(row, dtype, **mode) -> dict[str, list[Report]]:
    """Runs one row of the parity table; the reports of its launches, by kernel."""
    reports: dict[str, list[Report]] = {}

    def factory(**kernel):
        run = emulated_metal_kernel(**kernel, **mode)

        def launch(**arguments):
            size = sum(x.nbytes for x in arguments["inputs"] if isinstance(x, mx.array))
            assert size < CHECKED_BYTES, f"{kernel['name']} was given {size} bytes: choose a smaller row"
            outputs = run(**arguments)
            reports.setdefault(kernel["name"], []).append(last_report())
            return outputs

        return launch

    result = run_check(row, dtype, metal_backend("emulated", scaled=True, session=lambda: built_by(factory)))
    assert result.passed, f"error {result.error}, bound {result.bound}"
    return reports


register_metal_kernels()
WITH_KERNEL = {name for name in OPERATIONS if registered_kernel(name, "mlx", "metal") is not None}


def rows():
    """Of every operation with a Metal kernel and every small shape the first family, and families with code of their own."""
    taken = set()
    for check in table(scaled=True):
        if check.shape.startswith(MODELS) or check.op not in WITH_KERNEL:
            continue
        if (check.op, check.shape) not in taken or check.family in SPECIAL:
            taken.add((check.op, check.shape))
            yield from ((check, dtype) for dtype in check.dtypes)


ROWS = list(rows())


@pytest.mark.parametrize(("check", "dtype"), ROWS, ids=[f"{c.op}-{c.family}-{c.shape}-{d}".replace(" ", "_") for c, d in ROWS])
def test_check_mode(check, dtype):
    for name, reports in reports_of(check, dtype, check=True).items():
        for report in reports:
            assert report.benign_races == 0, name
            assert report.threadgroup_bytes <= 32768
            assert report.lint == "clean" or report.lint == lint_unavailable(), f"{name}: {report.lint}"


def test_every_operation_has_a_row():
    assert {check.op for check, _ in ROWS} == WITH_KERNEL and len(WITH_KERNEL) > 14


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [2, 16])
@pytest.mark.parametrize("sizes", [(64, 64), (128, 128), (256, 256), (64, 256), (256, 64)], ids=str)
def test_threadgroup_memory_of_verification(sizes, tokens, dtype):
    """Case M5: 40,192 bytes in somebody's float32 instance failed every request; the emulator counts what is declared."""
    dk, dv = sizes
    rng = np.random.default_rng(0)

    def array(*shape):
        return mx.array(rng.standard_normal(shape).astype(np.float32) * dk**-0.5)

    seen = []

    def factory(**kernel):
        run = emulated_metal_kernel(**kernel)

        def launch(**arguments):
            outputs = run(**arguments)
            seen.append(last_report().threadgroup_bytes)
            return outputs

        return launch

    q, k, v = (array(1, tokens, 1, size).astype(dtype) for size in (dk, dk, dv))
    with built_by(factory):
        mx.eval(
            gdn_verify.gdn_verify(q, k, v, -mx.abs(array(1, tokens, 1)), mx.sigmoid(array(1, tokens, 1)), array(1, 1, dv, dk))
        )
    assert seen == [gdn_verify.threadgroup_bytes(tokens)]
    assert max(seen) <= 32768
