"""Random weights of a target, drawn on its own device: a shape can be timed without a file of its size.

The spread of each tensor is that of `common.bench.shapes.spread`, the same as in a folder of random weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dspine.common.bench.shapes import spread
from dspine_cuda.targets.checkpoint import TargetTensors
from dspine_cuda.targets.hybrid_config import HybridConfig
from dspine_cuda.targets.hybrid_tensors import HybridTensors, expected_tensors


class RandomTensors(TargetTensors):
    """`TargetTensors` of names and shapes alone. A tensor asked for twice is the same both times."""

    def __init__(
        self, folder: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device, seed: int = 0
    ) -> None:
        self.folder, self.shapes = Path(folder), shapes
        self._dtype, self._device, self._seed = dtype, device, seed
        self._number = {name: index for index, name in enumerate(sorted(shapes))}

    def read(self, name: str) -> Tensor:
        """A tensor of the target's dtype on its device."""
        mean, deviation = spread(self._stored_name(name), self.shapes[name])
        generator = torch.Generator(self._device).manual_seed(self._seed * 1_000_003 + self._number[name])
        made = torch.empty(self.shapes[name], dtype=self._dtype, device=self._device)
        return made.normal_(mean, deviation, generator=generator)

    def read_as(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same, without the copy that a mapped file needs."""
        return self.read(name).to(device, dtype)

    def _stored_name(self, name: str) -> str:
        return name


class RandomHybridTensors(RandomTensors, HybridTensors):
    """The same for a hybrid, experts of a layer in one tensor."""

    def __init__(self, folder: Path, config: HybridConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        shapes = expected_tensors(config, frozenset(config.moe_layers))
        if not config.tied:
            shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
        super().__init__(folder, shapes, dtype, device, seed)
        self.block = None
        self._centred = config.centred_norms

    def _stored_name(self, name: str) -> str:
        """As the checkpoint names it, which says whether a norm multiplies by 1 + w."""
        return name.replace("model.", "model.language_model.", 1) if self._centred else name
