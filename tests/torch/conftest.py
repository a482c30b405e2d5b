"""Torch tests: skipped with a reason where torch is absent."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")
