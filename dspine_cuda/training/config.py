"""One YAML file plus `section.key=value` overrides -> a validated `TrainConfig`; what is wrong is one line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dspine.common.errors import DSpineError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelSection(_Section):
    """The target and the drafter's shape; a shape left out is the target's own."""

    target: str = "smollm2"  # name, hub id or Hugging Face folder
    method: Literal["dspine", "dflash", "dflash2", "domino", "dspark"] = "dspine"
    injection: bool = True  # ablation: false trains a block-causal backbone alone, exported as DFlash with is_causal true
    injection_layers: tuple[int, ...] | None = (
        None  # 0-based layers that receive messages; None: all (the others' writes stay 0)
    )
    start_from: str | None = None  # a drafter folder of the same shape whose weights (and transfer space) training starts from
    num_layers: int = Field(5, ge=1)
    block_size: int = Field(8, ge=2)  # rows, the anchor included
    taps: tuple[int, ...] | None = None  # 0-based target layers whose OUTPUT is read; None: spread as DFlash spreads them
    mask_token_id: int | None = Field(None, ge=0)  # None: the tokenizer's mask token, else an id that the data never uses
    is_causal: bool | None = None  # all but dspine: block-causal or not; None is bidirectional (full attention)
    intermediate_size: int | None = Field(None, ge=1)
    num_heads: int | None = Field(None, ge=1)
    num_kv_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=2)
    sliding_window: int | None = Field(None, ge=1)
    sliding_layers: tuple[int, ...] = ()
    init: Literal["target", "random"] = "target"  # the target's last layers, or N(0, 0.02)
    transfer_rank: int = Field(256, ge=1)
    message_size: int = Field(128, ge=1)
    top_k: int = Field(16, ge=1)  # candidates of DSpine's walk and of DFlash2's selector
    hops: Literal[1, 2] = 1  # beyond the article: 2 adds a message from two tokens back
    refined_layers: Literal[1, 2] = 1  # beyond the article: 2 refines the last layer but one as well

    @model_validator(mode="after")
    def _consistent(self) -> ModelSection:
        if self.method == "dspine" and self.is_causal is False:
            raise ValueError("is_causal is false, but a DSpine drafter is block-causal; leave it out or use method dflash")
        if self.sliding_layers and self.sliding_window is None:
            raise ValueError("sliding_layers needs sliding_window")
        for name in ("sliding_layers", "injection_layers"):
            layers = getattr(self, name) or ()
            if any(not 0 <= layer < self.num_layers for layer in layers):
                raise ValueError(f"{name} must be 0..{self.num_layers - 1}, got {list(layers)}")
        if self.injection_layers is not None and not self.injected:
            raise ValueError("injection_layers needs method dspine with injection")
        if (self.hops, self.refined_layers) != (1, 1) and not self.injected:
            raise ValueError("hops and refined_layers need method dspine with injection")
        if self.refined_layers > self.num_layers:
            raise ValueError("refined_layers is 2, but there is one layer")
        return self

    @property
    def injected(self) -> bool:
        """True where the trained model has the injection (and so the transfer space)."""
        return self.method == "dspine" and self.injection


class HeadsSection(_Section):
    """Sizes of the parts that DFlash2, Domino and DSpark have of their own."""

    conv_kernel_size: int = Field(2, ge=1)
    conv_group_size: int = Field(64, ge=1)
    selector_rank: int = Field(128, ge=1)
    gru_hidden_dim: int = Field(256, ge=1)
    emb_dim: int = Field(128, ge=1)
    shift_label: bool = False  # Domino: row i predicts token i + 1
    markov_rank: int = Field(128, ge=1)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence: bool = True
    confidence_with_markov: bool = False


class DataSection(_Section):
    """Where conversations come from and how they are packed."""

    # a folder of npz shards, an npz file or a conversations JSONL file; or a list of those: the holdout comes from the first
    path: str | tuple[str, ...]
    sequence_length: int = Field(512, ge=8)
    rows_per_step: int = Field(32, ge=1)  # over all ranks and micro-batches
    num_anchors: int = Field(128, ge=1)  # blocks drawn a row
    holdout: int = Field(500, ge=0)  # the last conversations of the last shard, kept for evaluation
    open_rows: int = Field(16, ge=1)  # rows being packed at once: more waste less
    features: Literal["recompute", "cache"] = "recompute"  # cache: the target runs once, its features are read from disk
    cache_dir: str | None = None  # None: run.output_dir/features

    @model_validator(mode="after")
    def _some_path(self) -> DataSection:
        if not self.paths or not all(self.paths):
            raise ValueError("path names no data")
        if len(set(self.paths)) < len(self.paths):
            raise ValueError(f"path names one place twice: {', '.join(self.paths)}")
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """All places, in order."""
        return (self.path,) if isinstance(self.path, str) else self.path


class LossSection(_Section):
    """Weights of `algorithms` 1, Training."""

    alpha: float = Field(0.1, ge=0, le=1)  # share of cross-entropy; the rest is l1 to the target's distribution
    gamma: float = Field(7.0, gt=0)  # w_t = exp(-(t - 1) / gamma)
    refinement: bool = True  # ablation: false leaves out the refined output
    mass_threshold: float = Field(1e-4, ge=0, le=1)
    normalization: Literal["own", "shared"] = "own"
    alignment: Literal["cosine", "token", "none"] = "cosine"  # layer supervision; `token` is the ablation's cross-entropy
    alignment_weight: float = Field(0.5, ge=0)  # beta at the end of its warm-up
    alignment_scale: float = Field(1.0, ge=0)
    chunk_rows: int = Field(8192, ge=1)  # block rows whose logits exist at one time
    head_weight: float = Field(1.0, ge=0)  # of DFlash2's selector loss and of DSpark's confidence loss
    base_share_end: float = Field(
        1.0, gt=0, le=1
    )  # Domino: share of the run over which the uncorrected output's share falls to 0


class ScheduleSection(_Section):
    """Everything that moves with the global step. Its end: `max_steps`, or what fits into `max_minutes` (then `max_steps`, if
    set, is a ceiling): steps are timed once, after compilation, and the number is fixed from there on, in resumed runs too."""

    max_steps: int | None = Field(None, ge=1)
    max_minutes: float | None = Field(None, gt=0)  # of the call, loading and compilation included; evaluations on top
    warmup_ratio: float = Field(0.04, ge=0, lt=1)
    beta_warmup_steps: int | None = Field(None, ge=1)  # None: as long as the learning rate's warm-up
    replacement_probability: float = Field(0.5, ge=0, le=1)
    replacement_layers: int = Field(3, ge=0)
    replacement_hold_ratio: float = Field(1 / 6, ge=0, le=1)
    replacement_end_ratio: float = Field(1 / 3, ge=0, le=1)

    @model_validator(mode="after")
    def _ordered(self) -> ScheduleSection:
        if self.replacement_end_ratio < self.replacement_hold_ratio:
            raise ValueError(f"replacement_end_ratio {self.replacement_end_ratio} is before replacement_hold_ratio")
        if self.max_steps is None and self.max_minutes is None:
            raise ValueError("max_steps is missing (or max_minutes, to let the clock set it)")
        return self

    @property
    def steps(self) -> int:
        """The last step. ValueError while the clock has not fixed it yet (`max_minutes` alone)."""
        if self.max_steps is None:
            raise ValueError("schedule.max_steps is not fixed yet")
        return self.max_steps

    def fixed(self, steps: int) -> ScheduleSection:
        """The same schedule, `steps` long."""
        return self.model_copy(update={"max_steps": steps})


class OptimizerSection(_Section):
    """AdamW without weight decay."""

    learning_rate: float = Field(6e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    micro_batches: int = Field(1, ge=1)
    # step: denominators and lambda of the whole step, so any split gives one gradient; several micro-batches then cost a pass
    # without gradients first. micro_batch: refined counts and lambda of each micro-batch, scaled by its share of supervision.
    normalize_over: Literal["step", "micro_batch"] = "step"


class RunSection(_Section):
    """Machine, files and rhythm."""

    output_dir: str
    seed: int = Field(0, ge=0)
    device: str = "auto"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the computation; master weights are float32
    attention: Literal["auto", "flex", "sdpa"] = "auto"  # auto: flex on CUDA, a dense mask elsewhere
    compile: bool | None = None  # None: on CUDA only
    shard: Literal["none", "fsdp"] = "none"  # fsdp: masters, gradients and moments in shards, one a rank (torchrun)
    recompute: Literal["none", "mlp"] = "none"  # mlp: its inner activations are made again in the backward pass
    log_every: int = Field(20, ge=1)
    checkpoint_every: int = Field(500, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    eval_every: int = Field(500, ge=0)  # 0: only at the end
    eval_conversations: int = Field(256, ge=1)
    eval_stride: int = Field(24, ge=1)  # an anchor every so many positions
    time_limit_minutes: float | None = Field(None, gt=0)  # of this call, loading included; stops, does not bend schedules
    stop_after: int | None = Field(None, ge=1)  # stop (with a checkpoint) after this step; the schedules do not notice
    export_bits: Literal[4, 5, 6, 8] | None = None  # also write an affine-quantised copy, group 64
    progress: bool = True


class TrainConfig(_Section):
    """The whole run."""

    model: ModelSection
    heads: HeadsSection = HeadsSection()
    data: DataSection
    loss: LossSection = LossSection()
    schedule: ScheduleSection
    optimizer: OptimizerSection = OptimizerSection()
    run: RunSection

    @model_validator(mode="before")
    @classmethod
    def _without_injection(cls, data: Any) -> Any:
        """Refinement and cosine alignment need the injection: off where there is none, an error where asked for."""
        if (
            not isinstance(data, dict)
            or not isinstance(data.get("model"), dict)
            or not isinstance(data.get("loss") or {}, dict)
        ):
            return data
        if data["model"].get("method", "dspine") == "dspine" and data["model"].get("injection", True):
            return data
        loss = dict(data.get("loss") or {})
        if loss.get("refinement") or loss.get("alignment") == "cosine":
            raise ValueError("loss.refinement and loss.alignment=cosine need a DSpine model with injection; drop them")
        return data | {"loss": {"refinement": False, "alignment": "none"} | loss}

    @model_validator(mode="after")
    def _divides(self) -> TrainConfig:
        if self.data.rows_per_step % self.optimizer.micro_batches:
            raise ValueError(
                f"data.rows_per_step {self.data.rows_per_step} does not divide into optimizer.micro_batches "
                f"{self.optimizer.micro_batches}"
            )
        return self

    def fingerprint(self) -> dict[str, Any]:
        """What must not change between a run and its resumption (files, machine and rhythm may)."""
        content = self.model_dump(mode="json", exclude={"run"})
        for name in ("path", "cache_dir"):
            content["data"].pop(name)
        content["seed"] = self.run.seed
        return content


def complete_fingerprint(stored: dict[str, Any]) -> dict[str, Any]:
    """A fingerprint of an older version: settings that did not exist then had what is now their default."""
    complete = dict(stored)
    for name, field in TrainConfig.model_fields.items():
        if name == "run" or not isinstance(stored.get(name, {}), dict) or (name not in stored and field.is_required()):
            continue
        section = field.annotation
        defaults = {key: f.get_default() for key, f in section.model_fields.items() if not f.is_required()}  # type: ignore[union-attr]
        dropped = {"path", "cache_dir"} if name == "data" else set()
        complete[name] = {key: value for key, value in defaults.items() if key not in dropped} | stored.get(name, {})
    return complete


def load_train_config(path: Path | str | None, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read `path` (YAML; None: overrides only) and apply `section.key=value` overrides, values read as YAML."""
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError) as error:
            raise DSpineError(f"cannot read the training config {path}: {error}") from error
        except yaml.YAMLError as error:
            raise DSpineError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(data, dict):
            raise DSpineError(f"{path}: expected sections (model, data, schedule, run, ...), got {type(data).__name__}")
    for override in overrides:
        _apply(data, override)
    return parse_train_config(data, str(path or "overrides"))


def parse_train_config(data: dict[str, Any], where: str = "config") -> TrainConfig:
    """Validate a nested dictionary; every problem in one line."""
    try:
        return TrainConfig.model_validate(data)
    except ValidationError as error:
        problems = []
        for item in error.errors():
            name = ".".join(str(part) for part in item["loc"]) or "config"
            if item["type"] == "extra_forbidden":
                problems.append(f"unknown key {name}{_known(item['loc'])}")
            elif item["type"] == "missing":
                problems.append(f"{name} is missing")
            else:
                problems.append(f"{name}: {item['msg'].removeprefix('Value error, ')} (got {_short(item['input'])})")
        raise DSpineError(f"{where}: {'; '.join(problems)}") from None


def _apply(data: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.partition(".")
    if not equals or not dot or not key or "." in key:
        raise DSpineError(f"override {override!r}: expected section.key=value, e.g. schedule.max_steps=2000")
    holder = data.setdefault(section, {})
    if not isinstance(holder, dict):
        raise DSpineError(f"override {override!r}: {section} is not a section")
    try:
        holder[key] = yaml.safe_load(_number(text))
    except yaml.YAMLError as error:
        raise DSpineError(f"override {override!r}: the value is not valid YAML") from error


def _number(text: str) -> str:
    """YAML 1.1 reads `2e-3` as a string: spell it as YAML wants it."""
    head, e, tail = text.lower().partition("e")
    return f"{head}.0e{tail}" if e and head.lstrip("+-").isdigit() and tail.lstrip("+-").isdigit() else text


def _known(location: tuple[int | str, ...]) -> str:
    if len(location) == 1:
        return f" (sections: {', '.join(TrainConfig.model_fields)})"
    section = TrainConfig.model_fields.get(str(location[0]))
    fields = getattr(section.annotation, "model_fields", {}) if section else {}
    return f" (known: {', '.join(fields)})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
