"""Where training runs."""

from __future__ import annotations

import torch

from dspine.common.environment import local_rank, process_group
from dspine.common.errors import BackendError


def pick_device(name: str) -> torch.device:
    """`auto`: CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(f"run.device is {name}, but torch sees no CUDA device here; use run.device=cpu")
    return device


def own_device(name: str) -> torch.device:
    """`pick_device` for a process of `torchrun`: `auto` and `cuda` are the GPU of its own local rank, made the current one."""
    device = pick_device(name)
    if device.type != "cuda":
        return device
    if device.index is None and process_group()[0] > 1:
        device = torch.device("cuda", local_rank())
    if device.index is not None:
        count = torch.cuda.device_count()
        if device.index >= count:
            raise BackendError(
                f"run.device is {name}: this process would run on GPU {device.index}, but torch sees {count}; start no more "
                f"processes than GPUs (torchrun --nproc-per-node)"
            )
        torch.cuda.set_device(device)
    return device
