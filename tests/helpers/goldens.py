"""Golden cases: arrays that the authors' public reference code made (`tests/goldens/README.md`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
TOLERANCE = 1e-5  # max|a - b| / max|b|, array by array: issue of every golden, in float32
ERRORS: list[tuple[str, float]] = []  # (name, relative error) of every array compared, for `tests/goldens/make/measure.py`

WEIGHTS_OF = {
    "dspine_sliding": "dspine",
    "dspine_loss": "dspine",
    "dflash_sliding": "dflash",
    "dflash_sliding_noncausal": "dflash",
}


def golden_arrays(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / case / "io.npz"))


def golden_target(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDENS / WEIGHTS_OF.get(case, case) / "target.npz"))


def golden_folder(case: str, tmp_path: Path, **changes: object) -> Path:
    """A checkpoint folder of the case (config and weights together), with `changes` to its config; None drops a key."""
    folder = tmp_path / f"{case}-checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(GOLDENS / WEIGHTS_OF.get(case, case) / "model.safetensors", folder / "model.safetensors")
    config = json.loads((GOLDENS / case / "config.json").read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """max|a - b| / max|b| over one array, in float64; infinite where a number is not finite."""
    difference = np.abs(got.astype(np.float64) - want.astype(np.float64))
    if not np.isfinite(difference).all():
        return float("inf")
    size = float(np.abs(want).max(initial=0.0))
    return float(difference.max(initial=0.0)) / size if size else float(difference.any()) and float("inf")


def assert_golden(got: object, want: np.ndarray, name: str) -> None:
    """Integers equal; floats within `TOLERANCE`, relative to the largest number of the golden array."""
    got = np.asarray(got)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, golden {want.shape}"
    if want.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want, err_msg=name)
        return
    error = relative_error(got, want)
    ERRORS.append((name, error))
    assert error <= TOLERANCE, f"{name}: relative error {error:.2e} above {TOLERANCE:.0e}"
