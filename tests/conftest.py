"""What must be decided before any test module is imported."""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():  # without a GPU Triton kernels are interpreted; Triton reads this at its first import
    os.environ.setdefault("TRITON_INTERPRET", "1")
