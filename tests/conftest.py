"""What must be decided before any test module is imported."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():  # without a GPU Triton kernels are interpreted; Triton reads this at its first import
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Tiny products gain nothing from threads and lose much where workers or other programs share the cores; read at torch's import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
