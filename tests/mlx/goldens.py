"""A golden target for the MLX drafter: embedding and LM head behind the `Target` protocol's names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from dspine.common.protocols import TargetInfo
from dspine_mlx.drafter import MlxDrafter, load_drafter
from tests.helpers.goldens import golden_folder, golden_target


def golden_model_target(case: str, dtype: str = "float32", **facts: Any) -> SimpleNamespace:
    arrays = {name: mx.array(array).astype(getattr(mx, dtype)) for name, array in golden_target(case).items()}
    mx.eval(arrays)
    embed, head = arrays["embed_tokens"], arrays["lm_head"]
    vocab, hidden = embed.shape
    info = TargetInfo(**{
        "name": "golden", "model_type": "toy", "num_layers": 8, "hidden_size": hidden, "vocab_size": vocab,
        "context_length": 512, "eos_token_ids": frozenset(), "dtype": dtype, "device": "cpu", "adapter": "toy", **facts,
    })  # fmt: skip
    return SimpleNamespace(
        info=info,
        embed=lambda ids: embed[ids],
        head=lambda hidden: (hidden @ head.T).astype(mx.float32),
        head_rows=lambda ids: head[ids],
        head_weight=lambda: golden_target(case)["lm_head"],
        bind_features=lambda ids: None,
    )


def load_case(case: str, tmp_path: Path, dtype: str = "float32", **changes: object) -> MlxDrafter:
    return load_drafter(golden_folder(case, tmp_path, **changes), golden_model_target(case, dtype))


def ids(values: object) -> mx.array:
    """Token ids as the loop hands them in: int32."""
    return mx.array(np.asarray(values, dtype=np.int32))
