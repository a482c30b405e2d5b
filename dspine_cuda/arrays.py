"""Between host and device for torch: the only reads of the generation loop go through here."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class TorchArrays:
    """`protocols.ArrayOps` on one device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def to_device(self, array: Any) -> Tensor:
        """A NumPy array, list, number or tensor as a tensor of the same dtype on the device; host memory is never shared."""
        if isinstance(array, Tensor):
            return array.to(self.device)
        return torch.tensor(np.asarray(array), device=self.device)

    def to_host(self, *arrays: Tensor) -> tuple[np.ndarray, ...]:
        """NumPy copies of the tensors (half-precision ones widened to float32), after ONE synchronisation."""
        if self.device.type == "cuda":
            copies = [array.detach().to("cpu", non_blocking=True) for array in arrays]
            torch.cuda.current_stream(self.device).synchronize()
        else:
            copies = [array.detach().clone() for array in arrays]
        return tuple((c.float() if c.dtype in (torch.bfloat16, torch.float16) else c).numpy() for c in copies)
