"""From a folder to a target: `mlx_lm`'s loader, the dtype decision, the family's adapter, one check."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_model

from dspine.common.configs import read_config
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.memory import CacheOptions
from dspine.common.protocols import TargetInfo
from dspine.common.tokenizer import eos_ids_of_folder
from dspine_mlx import ops
from dspine_mlx.arrays import device_name
from dspine_mlx.small_rows import load_table, picks_of, use_table
from dspine_mlx.targets.families import FAMILIES
from dspine_mlx.targets.layouts import load_options
from dspine_mlx.targets.moe import check_gathers
from dspine_mlx.targets.plain import PlainTarget, find_decoder, find_head

logger = logging.getLogger("dspine")
_DTYPES = ("auto", "bfloat16", "float32")


def load_target(folder: Path, *, dtype: str = "auto", cache: CacheOptions | None = None) -> PlainTarget:
    """Load `folder` with mlx_lm and wrap it; `cache`: how its K/V are kept. Raises `CheckpointError` for a folder that does
    not load, `DSpineError` for a model that cannot be rolled back or is no plain decoder."""
    if dtype not in _DTYPES:
        hint = "; float16 is never used: residuals of real models overflow it" if dtype == "float16" else ""
        raise DSpineError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}{hint}")
    folder = Path(folder)
    options = load_options(read_config(folder))
    try:
        model, config = load_model(folder, lazy=True, **options)
        quantized = _quantization(config) is not None
        chosen, note = choose_dtype(dtype, _stored_dtype(model), quantized=quantized, experts=has_float_experts(model))
        cast(model, chosen)
        mx.eval(model.parameters())
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"{folder}: mlx-lm cannot load this folder ({type(error).__name__}: {text[:300]})") from error
    if note:
        logger.warning("%s: %s", folder.name, note)
    if quantized and device_name() == "metal":
        table, _ = load_table(str(mx.device_info()["device_name"]))
        if table is not None:
            use_table(model, table, picks_of(model))
    target = wrap_model(model, config, name=folder.name, eos_token_ids=eos_ids_of_folder(folder), note=note)
    if cache is not None:
        target.use_cache_options(cache)
    return target


def wrap_model(
    model: nn.Module, config: dict[str, Any], *, name: str, eos_token_ids: Iterable[int] = (), note: str = ""
) -> PlainTarget:
    """A target over a module that `mlx_lm.load` returned together with its config (`return_config=True`)."""
    ops.register()
    facts = {**config, **(config.get("text_config") or {})}
    decoder = find_decoder(model, name)
    dtype = _short(_stored_dtype(model))
    if dtype == "float16":
        raise DSpineError(f"{name}: weights are float16, which real residuals overflow; set_dtype(mx.bfloat16) first")
    if dtype != "float32" and device_name() == "cpu" and has_float_experts(model):
        raise DSpineError(
            f"{name}: experts in {dtype} cannot run on the CPU, where MLX's gather_mm has float32 only; use dtype float32 "
            "(or auto), quantised experts, or --backend torch"
        )
    missing = [key for key in ("model_type", "hidden_size", "max_position_embeddings") if facts.get(key) is None]
    if missing:
        raise CheckpointError(f"{name}: config.json has no {', '.join(missing)}; expected a decoder's config")
    family = FAMILIES.get(facts["model_type"], PlainTarget)
    module = type(decoder).__module__.rpartition(".")[2]
    notes = [note, "vision tower left out: text only" if "vision_config" in config else ""]
    info = TargetInfo(
        name=name,
        model_type=facts["model_type"],
        num_layers=len(decoder.layers),
        hidden_size=int(facts["hidden_size"]),
        vocab_size=int(find_head(model, decoder).weight.shape[0]),
        context_length=int(facts["max_position_embeddings"]),
        eos_token_ids=frozenset(eos_token_ids),
        dtype=dtype,
        device=device_name(),
        adapter="; ".join([f"{family.__name__} ({family.describe(model)}) over mlx_lm.models.{module}", *filter(None, notes)]),
        quantization=_quantization(config),
    )
    check_gathers(model, name, dtype)
    target = family(model, info)
    target.check()
    return target


def choose_dtype(asked: str, stored: mx.Dtype, *, quantized: bool = False, experts: bool = False) -> tuple[mx.Dtype, str]:
    """The dtype to run in, and a note where it is not the stored one.

    `auto` runs as stored, with these exceptions: float16 becomes bfloat16 (residuals of real models overflow float16); on
    the CPU, quantised weights run in float32 (MLX's bfloat16 `quantized_matmul` there is ten times slower, and coarse), and
    so do `experts` that are not quantised (MLX's `gather_mm` has nothing else there).
    """
    if asked != "auto":
        return getattr(mx, asked), ""
    if quantized and device_name() == "cpu" and stored != mx.float32:
        return mx.float32, f"scales stored as {_short(stored)}, run in float32 on the CPU"
    if experts and device_name() == "cpu" and stored != mx.float32:
        return mx.float32, f"stored as {_short(stored)}, run in float32: MLX multiplies experts on the CPU in nothing else"
    if stored == mx.float16:
        return mx.bfloat16, "stored as float16, run in bfloat16: residuals of real models overflow float16"
    return stored, ""


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Every floating parameter to `dtype`, except those that mlx-lm keeps wide (`cast_predicate`: the decay of linear
    attention): they run in float32."""
    narrow = getattr(model, "cast_predicate", None) or (lambda path: True)
    parts = [
        (path, value.astype(dtype if narrow(path) else mx.float32))
        for path, value in tree_flatten(model.parameters())
        if mx.issubdtype(value.dtype, mx.floating)
    ]
    model.load_weights(parts, strict=False)


def has_float_experts(model: nn.Module) -> bool:
    """Whether any layer has experts that are not quantised."""
    return any(isinstance(module, SwitchLinear) for module in model.modules())


def _short(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _stored_dtype(model: nn.Module) -> mx.Dtype:
    """The narrowest floating dtype among the parameters (of the scales, where weights are quantised)."""
    found = {value.dtype for _, value in tree_flatten(model.parameters())}
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        if dtype in found:
            return dtype
    raise DSpineError("the model has no floating-point parameters; expected float16, bfloat16 or float32")


def _quantization(config: dict[str, Any]) -> str | None:
    form = config.get("quantization") or config.get("quantization_config")
    if not isinstance(form, dict) or "bits" not in form:
        return None
    return f"{form['bits']}-bit, groups of {form.get('group_size')}"
