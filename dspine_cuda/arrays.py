"""Between host and device for torch: the only reads of the generation loop go through here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PINNED = 1 << 20  # bytes of an array up to which its way to CUDA does not hold the host up


class TorchArrays:
    """`protocols.ArrayOps` on one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def to_device(self, array: Any) -> Tensor:
        """A NumPy array, list, number or tensor as a tensor of the same dtype on the device; host memory is never shared."""
        if isinstance(array, Tensor):
            return array.to(self.device)
        array = np.asarray(array)
        if self.device.type == "cuda" and array.nbytes <= _PINNED:
            return torch.tensor(array).pin_memory().to(self.device, non_blocking=True)
        return torch.tensor(array, device=self.device)

    def later(self, array: Tensor) -> Callable[[], np.ndarray]:
        """What gives a NumPy copy of the array as it is now, waiting for nothing that is queued from here on."""
        if self.device.type != "cuda":
            copy = array.detach().clone()
            return copy.numpy
        copy = torch.empty(array.shape, dtype=array.dtype, pin_memory=True)
        copy.copy_(array.detach(), non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))

        def read() -> np.ndarray:
            event.synchronize()
            return copy.numpy()

        return read

    def to_host(self, *arrays: Tensor) -> tuple[np.ndarray, ...]:
        """NumPy copies of the tensors (half-precision ones widened to float32), after ONE synchronisation."""
        if self.device.type == "cuda":
            copies = [array.detach().to("cpu", non_blocking=True) for array in arrays]
            torch.cuda.current_stream(self.device).synchronize()
        else:
            copies = [array.detach().clone() for array in arrays]
        return tuple((c.float() if c.dtype in (torch.bfloat16, torch.float16) else c).numpy() for c in copies)
