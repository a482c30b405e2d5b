"""Any other plain decoder as the frozen target, through `transformers`: packed rows by a mask of their own and positions that
restart. Slower than the trainer's own forward, and proven on the loaded model before it is trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspine.common.configs import RopeConfig
from dspine.common.errors import CheckpointError
from dspine.common.protocols import TargetInfo
from dspine_cuda.targets.config import eos_token_ids, read_target_config
from dspine_cuda.targets.generic import load_generic
from dspine_cuda.training.masks import document_mask

_PROBE = 7  # tokens of a document in the check at load


class GenericFrozenTarget:
    """Same methods and attributes as `FrozenTarget`."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, reason: str) -> None:
        from dspine_cuda.training.target import TargetShape

        data = read_target_config(folder)

        def info(facts: dict[str, int]) -> TargetInfo:
            return TargetInfo(
                name=str(folder), model_type=data["model_type"], eos_token_ids=eos_token_ids(folder, data),
                dtype=str(dtype).removeprefix("torch."), device=str(device), adapter=f"training: transformers; {reason}",
                **facts,
            )  # fmt: skip

        self.generic = load_generic(folder, dtype, device, info)
        self.info, self.device, self.dtype = self.generic.info, device, dtype
        self.model, config = self.generic.model, self.generic.model.config
        heads, hidden = config.num_attention_heads, config.hidden_size
        rope = getattr(config, "rope_parameters", None) or {}
        self.shape = TargetShape(
            model_type=config.model_type,
            num_layers=self.info.num_layers,
            hidden_size=hidden,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * hidden,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
            vocab_size=self.info.vocab_size,
            rms_norm_eps=float(getattr(config, "rms_norm_eps", None) or 1e-6),
            max_position_embeddings=self.info.context_length,
            rope=RopeConfig(theta=float(getattr(config, "rope_theta", None) or rope.get("rope_theta") or 10_000.0)),
            attention_bias=False,
        )
        self.weights = {name.removeprefix("model."): tensor for name, tensor in self.model.state_dict().items()}
        self.head_matrix = self.model.get_output_embeddings().weight
        with torch.no_grad():
            every = torch.arange(self.info.vocab_size, device=device)[None]
            self.embedding = self.generic.embed(every)[0].to(dtype)
        self._taps: tuple[int, ...] = ()
        self._check(folder)

    @torch.no_grad()
    def _check(self, folder: Path) -> None:
        """What the losses and packed rows build on; a model that breaks it is refused with the reason."""
        states = torch.randn(3, self.shape.hidden_size, device=self.device).to(self.dtype)
        plain = (states @ self.head_matrix.T).float()
        limit = (1e-3 if self.dtype == torch.float32 else 0.05) * float(plain.abs().max())
        if not torch.allclose(self.generic.head(states), plain, atol=limit, rtol=0.0):
            raise CheckpointError(
                f"{folder}: {self.info.model_type} scales or caps the logits of its LM head: the trainer's losses do not"
            )
        window = getattr(self.model.config, "sliding_window", None)
        if window is not None and "sliding_attention" in (getattr(self.model.config, "layer_types", None) or ()):
            raise CheckpointError(
                f"{folder}: {self.info.model_type} has sliding-window layers, which packed rows do not honour"
            )
        ids = torch.arange(2 * _PROBE, device=self.device)[None] % self.info.vocab_size
        documents = torch.arange(2, device=self.device).repeat_interleave(_PROBE)[None]
        positions = torch.arange(_PROBE, device=self.device).repeat(2)[None]
        packed = self.features(ids, positions, document_mask(documents), (0,))
        alone = self.features(ids[:, _PROBE:], positions[:, :_PROBE], document_mask(documents[:, :_PROBE] * 0), (0,))
        for whole, part in zip(packed, alone, strict=True):
            limit = (1e-3 if self.dtype == torch.float32 else 0.1) * float(part.float().abs().max())
            if not torch.allclose(whole[:, _PROBE:].float(), part.float(), atol=limit, rtol=0.0):
                raise CheckpointError(
                    f"{folder}: {self.info.model_type} does not keep packed documents apart in `transformers`"
                )

    def compile(self) -> None:
        """Stays eager: the model's code is not ours."""

    @torch.no_grad()
    def features(self, tokens: Tensor, positions: Tensor, mask: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Packed forward: tokens and positions int [B, S], mask bool [B or 1, 1, S, S] -> the outputs of layers `taps`
        concatenated [B, S, taps*H], and the final-normed hidden states [B, S, H]."""
        if taps != self._taps:
            self.generic.bind_features(taps)
            self._taps = taps
        mask = mask.expand(tokens.shape[0], -1, -1, -1)
        additive = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(
            ~mask, torch.finfo(self.dtype).min
        )
        captured = self.generic._captured
        captured.clear()
        output = self.model.base_model(tokens, attention_mask=additive, position_ids=positions, use_cache=False)
        features = torch.cat([captured[tap] for tap in taps], dim=-1)
        captured.clear()
        return features, output.last_hidden_state

    eager_features = features

    def bind_features(self, layer_ids: Any) -> None:
        """Taps are arguments of `features` here; nothing to remember."""

    def embed(self, tokens: Tensor) -> Tensor:
        """int [...] -> [..., H]."""
        return self.embedding[tokens]

    def head(self, hidden: Tensor) -> Tensor:
        """Final-normed [..., H] -> logits float32 [..., V]."""
        return torch.nn.functional.linear(hidden, self.head_matrix).float()

    def head_rows(self, ids: Tensor) -> Tensor:
        """LM-head rows of `ids` int [...] -> [..., H]."""
        return self.head_matrix[ids]

    def head_weight(self) -> np.ndarray:
        """LM head as float32 NumPy [V, H]."""
        return self.head_matrix.detach().float().cpu().numpy()
