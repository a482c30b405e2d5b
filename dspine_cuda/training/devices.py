"""Where training runs."""

from __future__ import annotations

import torch

from dspine.common.errors import BackendError


def pick_device(name: str) -> torch.device:
    """`auto`: CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"run.device is {name}, but torch sees no CUDA device here; use run.device=cpu")
    return device
