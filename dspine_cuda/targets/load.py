"""Load a target folder: choose the device, the dtype and the decoder, and say why in `TargetInfo.adapter`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dspine.common.errors import BackendError, DSpineError
from dspine.common.protocols import Target, TargetInfo
from dspine_cuda.targets.config import eos_token_ids, lean_obstacle, parse_decoder_config, read_target_config
from dspine_cuda.targets.hybrid_config import HYBRID_FAMILIES, fp8_block, parse_hybrid_config, text_config

DTYPES = ("auto", "bfloat16", "float32", "float16")
SMALL_HIDDEN = 1024  # hybrids up to this size run in float32 on the CPU by default: their products are bound by call overhead


def choose_device(name: str) -> torch.device:
    """auto (CUDA where there is one, else the CPU), cpu, cuda, cuda:N; an absent device is an error that lists the rest."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda:0" if count else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise BackendError(f"device must be auto, cpu, cuda or cuda:N for the torch runtime, got {name!r}")
    if kind == "cpu":
        return torch.device("cpu")
    number = int(index or 0)
    if number >= count:
        there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
        hint = (
            ""
            if count
            else '; for CUDA install a CUDA build of torch (pip install "dspine[cuda]") on a machine with an NVIDIA GPU'
        )
        raise BackendError(f"device {name!r} asked for, but torch {torch.__version__} sees: {there}{hint}")
    return torch.device("cuda", number)


def choose_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype and why. `auto` is never float16: residual streams of real models overflow it."""
    if name not in DTYPES:
        raise DSpineError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    if name != "auto":
        return getattr(torch, name), f"{name} as asked"
    if device.type == "cuda":
        return torch.bfloat16, "bfloat16: default on CUDA"
    if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16, "bfloat16: this CPU multiplies it in hardware"
    return torch.float32, "float32: this CPU has no bfloat16 products"


def load_target(folder: Path, *, device: str = "auto", dtype: str = "auto", random_weights: bool = False) -> Target:
    """A Hugging Face model folder as a `protocols.Target`.

    Llama, Qwen3, Qwen3-MoE, Qwen3.5 (dense and MoE) and Qwen3-Next run on lean decoders of this project; any other plain
    decoder through `transformers`. random_weights: the folder has a config.json only, and numbers are drawn on the device
    (lean decoders only). Raises
    `CheckpointError` for a folder that is missing, damaged or cannot be rolled back, `BackendError` for an absent device.
    """
    folder = Path(folder)
    where = str(folder / "config.json")
    data = read_target_config(folder, fp8_families=HYBRID_FAMILIES)
    place = choose_device(device)
    if data["model_type"] in HYBRID_FAMILIES:
        return _load_hybrid(folder, data, place, dtype, random_weights)
    number, why = choose_dtype(dtype, place)
    obstacle = lean_obstacle(data, where)
    if obstacle is None:
        from dspine_cuda.targets.dense import DenseTarget

        config = parse_decoder_config(data, where)
        facts = {
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "context_length": config.context_length,
        }
        info = _info(folder, data, place, number, f"lean decoder, {config.model_type} family; {why}", facts)
        tensors = None
        if random_weights:
            from dspine_cuda.targets.random_tensors import RandomTensors

            tensors = RandomTensors(folder, config.tensors(), number, place)
        return DenseTarget(folder, config, info, tensors)
    if random_weights:
        raise DSpineError(f"{folder}: random weights need a lean decoder ({obstacle})")
    from dspine_cuda.targets.generic import load_generic

    return load_generic(
        folder,
        number,
        place,
        lambda facts: _info(folder, data, place, number, f"transformers adapter: {obstacle}; {why}", facts),
    )


def _load_hybrid(folder: Path, data: dict[str, Any], place: torch.device, dtype: str, random_weights: bool) -> Target:
    """A family of `HYBRID_FAMILIES` on its lean decoder."""
    from dspine_cuda.targets.hybrid import HybridTarget
    from dspine_cuda.targets.hybrid_tensors import HybridTensors

    where = str(folder / "config.json")
    config = parse_hybrid_config(data, where)
    number, why = choose_dtype(dtype, place)
    if dtype == "auto" and place.type == "cpu" and config.hidden_size <= SMALL_HIDDEN:
        number, why = torch.float32, f"float32: faster than bfloat16 on the CPU for a hidden size of {config.hidden_size}"
    block = fp8_block(data, where)
    facts = {name: getattr(config, name) for name in ("num_layers", "hidden_size", "vocab_size", "context_length")}
    gdn, moe = len(config.gdn_layers), len(config.moe_layers)
    layers = f"{gdn} GDN and {config.num_layers - gdn} attention layers, {moe} with experts"
    adapter = f"lean hybrid decoder, {config.model_type} family ({layers}); {why}"
    info = _info(folder, text_config(data, where), place, number, adapter, facts)
    if block is not None:
        info = replace(info, quantization=f"fp8 blocks of {block[0]} x {block[1]}, multiplied out at load")
    if random_weights:
        from dspine_cuda.targets.random_tensors import RandomHybridTensors

        return HybridTarget(folder, config, info, RandomHybridTensors(folder, config, number, place))
    return HybridTarget(folder, config, info, HybridTensors(folder, block))


def _info(
    folder: Path, data: dict[str, Any], device: torch.device, dtype: torch.dtype, adapter: str, facts: dict[str, int]
) -> TargetInfo:
    return TargetInfo(
        name=folder.name,
        model_type=data["model_type"],
        eos_token_ids=eos_token_ids(folder, data),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        adapter=adapter,
        **facts,
    )
