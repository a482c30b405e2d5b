"""The parity suite itself: a wrong kernel, NaN, a missing backend and a declined call must all be seen."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from dspine.common.cli import parity as command
from dspine.common.cli.main import build_app
from dspine.common.errors import BackendError, DSpineError
from dspine.common.parity.backends import ParityBackend, to_bfloat16
from dspine.common.parity.runner import OPERATIONS, run_all, run_check, table
from dspine.common.registry import Kernel
from dspine.common.signals import draft_signals

FIELDS = {"op", "backend", "device", "dtype", "shape", "family", "error", "bound", "passed", "skipped_reason"}


def to_numpy(array, dtype):
    return array.astype({"float32": np.float32, "bfloat16": np.float32, "int32": np.int32}[dtype])


def numpy_backend(function=None, supports=None, **settings):
    """The core in NumPy, or `function` as the kernel of every operation."""
    kernel = None
    if function is not None:
        kernel = lambda op: Kernel(op, "numpy", "cpu", function(op), "made up", supports)  # noqa: E731
    return ParityBackend("numpy", "cpu", to_device=to_numpy, to_host=np.asarray, kernel=kernel, scaled=True, **settings)


def first(op, family="random"):
    return next(check for check in table(True) if (check.op, check.family) == (op, family))


@pytest.mark.parametrize("op", OPERATIONS)
def test_numpy_meets_every_float32_bound(op):
    for check in table(True):
        if check.op == op:
            result = run_check(check, "float32", numpy_backend())
            assert result.passed and result.skipped_reason is None, result


def altered(change):
    return numpy_backend(lambda op: lambda *args: change(OPERATIONS[op].reference(*args)))


def test_a_slightly_wrong_kernel_misses():
    off = altered(lambda found: dataclasses.replace(found, entropy=found.entropy * (1 + 1e-5)))
    result = run_check(first("draft_signals"), "float32", off)
    assert not result.passed and result.error == pytest.approx(1e-5, rel=0.1) and result.bound == 2e-6
    swapped = altered(lambda found: dataclasses.replace(found, ids=found.ids[..., ::-1]))
    assert not run_check(first("draft_signals"), "float32", swapped).passed


def test_not_a_number_and_a_wrong_shape_miss():
    for change in (
        lambda f: dataclasses.replace(f, entropy=f.entropy * np.nan),
        lambda f: dataclasses.replace(f, entropy=f.entropy[:, :1]),
    ):
        result = run_check(first("draft_signals"), "float32", altered(change))
        assert not result.passed and result.error == float("inf")
        json.loads(json.dumps(result.as_dict(), allow_nan=False))


def test_padding_that_was_written_misses():
    """An unused state slot holds NaN and must still hold it."""
    check = first("gdn_commit", "padded")
    assert run_check(check, "float32", numpy_backend()).passed
    filled = altered(lambda found: (np.nan_to_num(found[0]), found[1]))
    assert not run_check(check, "float32", filled).passed


def test_absent_backends_and_kernels_are_reported():
    absent = run_check(first("path_walk"), "float32", ParityBackend("metal", "none", skipped="no Metal device here"))
    assert absent.skipped_reason == "no Metal device here" and (absent.error, absent.passed) == (None, None)
    without = dataclasses.replace(numpy_backend(), kernel=lambda op: None)
    assert "has no kernel for path_walk" in run_check(first("path_walk"), "float32", without).skipped_reason
    declining = numpy_backend(lambda op: draft_signals, supports=lambda *args: False)
    assert "declines this call" in run_check(first("draft_signals"), "float32", declining).skipped_reason
    standing_in = dataclasses.replace(declining, fallback=True)
    assert run_check(first("draft_signals"), "float32", standing_in).skipped_reason is None


def test_unknown_operation():
    with pytest.raises(DSpineError, match="unknown operation gdn_verfy; there are: gdn_inputs"):
        list(run_all([numpy_backend()], ["gdn_verfy"]))


def test_bfloat16_rounds_to_nearest_even():
    torch = pytest.importorskip("torch")
    x = np.concatenate(
        [np.random.default_rng(0).normal(size=10_000) * 10.0 ** np.arange(-20, 20, 0.004), [0.0, np.inf, -np.inf]]
    )
    x = np.concatenate([x.astype(np.float32), np.float32([1.00390625, 1.01171875, 3.4e38])])  # two ties, an overflow
    np.testing.assert_array_equal(to_bfloat16(x)[:-1], torch.from_numpy(x).bfloat16().float().numpy()[:-1])


# ------------------------------------------------------------------------------------------------------- dspine parity
def invoke(monkeypatch, backends, *arguments):
    monkeypatch.setattr(command, "available_backends", lambda: backends)
    return CliRunner().invoke(build_app(), ["parity", "--op", "path_walk", "--op", "draft_signals", *arguments])


def test_command_passes_and_prints_a_table(monkeypatch):
    absent = ParityBackend("triton", "none", skipped="triton is not installed")
    run = invoke(monkeypatch, [numpy_backend(), absent])
    assert run.exit_code == 0, run.output
    assert "draft_signals" in run.output and "on triton: triton is not installed" in run.output and "ok" in run.output


def test_command_fails_on_a_miss_and_ends_with_json(monkeypatch):
    wrong = numpy_backend(
        lambda op: lambda *args: OPERATIONS[op].reference(*args) * 0 if op == "path_walk" else draft_signals.reference(*args)
    )
    run = invoke(monkeypatch, [wrong], "--json")
    assert run.exit_code == 1
    rows = json.loads(run.stdout.splitlines()[-1])["results"]
    assert all(set(row) == FIELDS for row in rows)
    assert {row["op"] for row in rows if row["passed"] is False} == {"path_walk"}
    assert "missed: path_walk on numpy" in run.stderr


def test_a_named_backend_must_run(monkeypatch):
    backends = [numpy_backend(), ParityBackend("metal", "none", skipped="no Metal device here")]
    for name, kind, message in (
        ("metal", BackendError, "cannot run here: no Metal"),
        ("tpu", DSpineError, "there are: numpy, metal"),
    ):
        run = invoke(monkeypatch, backends, "--backend", name)
        assert isinstance(run.exception, kind) and message in str(run.exception)
