"""How far each runtime is from the authors' code, golden by golden: the table of `docs/checkpoints.md`.

    python -m tests.goldens.make.measure

Runs the golden tests and collects every comparison they make. The error of an array is max|a - b| / max|b|, in float32; the
table shows the largest one of a case, of its logits (or scores) and of everything else. Exit code 1 where a test fails.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.goldens import ERRORS, TOLERANCE, WEIGHTS_OF

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "torch": ("torch/test_drafter_goldens.py", "torch/test_family_goldens.py"),
    "MLX": ("mlx/test_drafter_goldens.py", "mlx/test_family_goldens.py"),
}
SCORES = ("logits", "scores", "lattice", "corrected", "bias")
CASES = (
    "dflash", "dflash_sliding", "dflash_sliding_noncausal", "pypi_yarn", "pypi_mixed", "pypi_narrow2", "pypi_open2", "dflash2",
    "domino_shift", "domino_noshift", "dspark_vanilla", "dspark_gated", "dspark_rnn", "dspine", "dspine_sliding",
)  # fmt: skip


class Collector:
    """Comparisons by case: a test's parameter names it, or its own name does."""

    def __init__(self) -> None:
        self.found: dict[str, list[tuple[str, float]]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Any:
        """Around one test."""
        ERRORS.clear()
        result = yield
        self.found.setdefault(case_of(item), []).extend(ERRORS)
        return result


def case_of(item: Any) -> str:
    """The golden case that a test reads."""
    named = getattr(item, "callspec", None)
    if named is not None and named.params.get("case") in CASES:
        return named.params["case"]
    matching = [case for case in CASES if item.name.startswith(f"test_{case}_golden") or f"_{case}_golden" in item.name]
    if item.name.startswith("test_dspine_golden_sliding"):
        return "dspine_sliding"
    return matching[-1] if matching else "other"


def worst(errors: list[tuple[str, float]], scores: bool) -> str:
    """The largest error of the scores, or of all the rest; a dash where there are none."""
    chosen = [error for name, error in errors if any(word in name for word in SCORES) == scores]
    return f"{max(chosen):.1e}" if chosen else "-"


def main() -> int:
    """Print the table as Markdown."""
    measured, failed = {}, 0
    for runtime, files in FILES.items():
        collector = Collector()
        failed |= pytest.main(["-q", "-p", "no:cacheprovider", *(str(ROOT / file) for file in files)], plugins=[collector])
        measured[runtime] = collector.found
    heads = " | ".join(f"{runtime}: logits, scores | {runtime}: states" for runtime in FILES)
    print(f"| golden | {heads} |\n| --- |{' --- |' * 2 * len(FILES)}")  # noqa: T201
    for case in CASES:
        cells = [worst(measured[runtime].get(case, []), scores) for runtime in FILES for scores in (True, False)]
        print(f"| `{case}` | {' | '.join(cells)} |")  # noqa: T201
    largest = max(error for found in measured.values() for errors in found.values() for _, error in errors)
    print(f"\nlargest of all {largest:.1e}, allowed {TOLERANCE:.0e}")  # noqa: T201
    assert set(WEIGHTS_OF) - {"dspine_loss"} <= set(CASES)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
