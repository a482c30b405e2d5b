"""Settings of a hybrid's pretraining: one YAML file plus `key=value` overrides; unknown keys are errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dspine.common.errors import DSpineError
from dspine_cuda.training.hybrid_shape import HybridShape


class PretrainConfig(BaseModel):
    """Data, schedule, optimiser and storage. Exactly one of `max_steps` and `minutes` sets the length of the schedule."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: tuple[str, ...]  # folders of npz shards (or single shards)
    tokenizer: str  # folder with tokenizer.json, tokenizer_config.json, chat_template.jinja
    output_dir: str
    held_out_data: str | None = None  # the source whose last conversations are held out; None: the first of `data`
    shape: dict[str, Any] = {}  # over hybrid-tiny's sizes
    holdout: int = Field(500, ge=1)
    sequence_length: int = Field(512, ge=16)
    rows_per_step: int = Field(64, ge=1)
    max_steps: int | None = Field(None, ge=1)
    minutes: float | None = Field(None, gt=0)  # wall time of training; learning rate and rounding follow the clock
    stop_after: int | None = Field(None, ge=1)  # stop (with a checkpoint) after this step; the schedule does not notice
    learning_rate: float = Field(3e-3, gt=0)
    final_ratio: float = Field(0.02, ge=0, le=1)  # learning rate at the end, as a share of the peak
    warmup_steps: int = Field(200, ge=1)
    weight_decay: float = Field(0.1, ge=0)  # of matrices
    betas: tuple[float, float] = (0.9, 0.95)
    dropout: float = Field(0.0, ge=0, lt=1)  # of residual branches
    clip_norm: float = Field(1.0, gt=0)
    balance: float = Field(0.01, ge=0)  # weight of the load-balance loss
    router_z: float = Field(1e-3, ge=0)  # weight of mean(logsumexp(router logits)^2)
    expert_bits: int = Field(4, ge=2, le=8)
    projection_bits: int = Field(6, ge=2, le=8)
    embedding_bits: int = Field(8, ge=2, le=8)
    round_from: float = Field(0.7, ge=0, le=1)  # share of the schedule after which weights are rounded as stored; 1: never
    seed: int = 0
    device: str = "auto"
    dtype: str = "bfloat16"
    compile: bool = False
    log_every: int = Field(50, ge=1)
    eval_every: int = Field(1000, ge=0)
    eval_rows: int = Field(64, ge=1)
    checkpoint_every: int = Field(1000, ge=1)

    @model_validator(mode="after")
    def _one_length(self) -> PretrainConfig:
        if (self.max_steps is None) == (self.minutes is None):
            raise ValueError("expected exactly one of max_steps and minutes")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype must be bfloat16 or float32, got {self.dtype!r}")
        unknown = sorted(set(self.shape) - set(HybridShape.__dataclass_fields__))
        if unknown:
            raise ValueError(f"shape: unknown {', '.join(unknown)}")
        return self

    @property
    def model_shape(self) -> HybridShape:
        return HybridShape(**self.shape)

    def fingerprint(self) -> dict[str, Any]:
        """What must not change between a run and its resumption."""
        free = {"data", "tokenizer", "output_dir", "held_out_data", "stop_after", "device", "compile", "log_every",
                "eval_every", "eval_rows", "checkpoint_every"}  # fmt: skip
        return self.model_dump(mode="json", exclude=free)


def load_pretrain_config(path: Path | None, overrides: Sequence[str] = ()) -> PretrainConfig:
    """YAML file (None: overrides only), then `key=value` overrides with YAML values."""
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except (OSError, yaml.YAMLError) as error:
            raise DSpineError(f"cannot read {path}: {' '.join(str(error).split())}") from error
        if not isinstance(data, dict):
            raise DSpineError(f"{path}: expected keys and values, got {type(data).__name__}")
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise DSpineError(f"override {override!r}: expected key=value, e.g. minutes=8")
        data[name] = yaml.safe_load(text)
    try:
        return PretrainConfig.model_validate(data)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'config'}: {e['msg']}" for e in error.errors())
        raise DSpineError(f"{path or 'overrides'}: {problems}") from None
