"""Triton tests: interpreted on the CPU; on a CUDA device they are compiled and carry the marker `gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed: pip install 'dspine[cuda]'")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).resolve().parent
    for item in items:
        if torch.cuda.is_available() and here in Path(item.fspath).resolve().parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN (integers: their largest), so an output that nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
