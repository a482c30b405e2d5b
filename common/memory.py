"""How much memory a pair needs, computed from its folders before anything is loaded; and how much the machine has.

Bytes are exact for weights and caches (`docs/mac.md` has the formulas); activations are an upper estimate and named as such.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine.common.checkpoints import expected_tensors
from dspine.common.configs import DrafterConfig, load_drafter_config, read_config
from dspine.common.errors import CheckpointError, DSpineError

_ITEM = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}  # floating formats of a safetensors file
_KEEP = 4  # first tokens that a rotating cache never drops, as mlx_lm keeps them
GIB = 2**30


@dataclass(frozen=True)
class CacheOptions:
    """How a target keeps its K/V. `max_kv_size` tokens at most (the first four and the newest; None keeps all);
    `kv_bits` 4 or 8 with groups of `kv_group_size` along the head (None: the dtype of the activations)."""

    max_kv_size: int | None = None
    kv_bits: int | None = None
    kv_group_size: int = 64

    def __post_init__(self) -> None:
        if self.max_kv_size is not None and self.max_kv_size < 2 * _KEEP:
            raise DSpineError(f"max_kv_size must be at least {2 * _KEEP} tokens, got {self.max_kv_size}")
        if self.kv_bits not in (None, 4, 8):
            raise DSpineError(f"kv_bits must be 4 or 8, got {self.kv_bits}; without it the K/V keep their own format")
        if self.kv_group_size not in (32, 64, 128):
            raise DSpineError(f"kv_group_size must be 32, 64 or 128, got {self.kv_group_size}")
        if self.max_kv_size is not None and self.kv_bits is not None:
            raise DSpineError("max_kv_size and kv_bits do not go together: a rotating cache is not quantised; drop one")

    @property
    def plain(self) -> bool:
        """Whether nothing was asked for."""
        return self.max_kv_size is None and self.kv_bits is None


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device: `total`, and what this process may still take (`usable`); `source` says where from."""

    total: int
    usable: int
    source: str


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part, for `tokens` tokens in the caches."""

    tokens: int
    parts: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(size for _, size in self.parts)

    def line(self) -> str:
        """`weights 0.25 + K/V 0.18 + ... = 0.61 GiB for 4096 tokens`."""
        shown = " + ".join(f"{name} {size / GIB:.2f}" for name, size in self.parts if size)
        return f"{shown} = {self.total / GIB:.2f} GiB for {self.tokens} tokens"

    def check(self, memory: DeviceMemory, where: str) -> None:
        """DSpineError with the numbers where the plan does not fit."""
        if self.total > memory.usable:
            raise DSpineError(
                f"{where} does not fit: {self.line()}, but {memory.usable / GIB:.2f} GiB are usable ({memory.source}); "
                "take a smaller or quantised model, fewer --max-tokens, --max-kv-size or --kv-bits 8"
            )


def plan_memory(
    folder: Path,
    draft_folder: Path | None,
    *,
    tokens: int,
    dtype: str = "auto",
    packed: bool = False,
    options: CacheOptions | None = None,
    chunk: int = 512,
) -> MemoryPlan:
    """What a target of `folder`, its drafter, and their caches for `tokens` tokens take.

    dtype: `auto` keeps the stored formats, `float32` where the runtime runs this model wide. packed: a quantised drafter stays
    packed in memory. `chunk`: prompt tokens that are read at a time.
    """
    card = read_config(folder)
    options = options or CacheOptions()
    stored = stored_bytes(folder)
    item = _item_size(stored, dtype)
    parts = [("weights", weight_bytes(stored, None if dtype == "auto" else item))]
    parts += cache_parts(card, tokens, item, options)
    if draft_folder is not None:
        config = load_drafter_config(draft_folder)
        parts.append(("drafter", draft_bytes(config, draft_folder if packed else None, item)))
        parts.append(("drafter context", draft_context_bytes(config, tokens, item)))
    parts.append(("activations", activation_bytes(card, chunk, item)))
    return MemoryPlan(tokens, tuple(parts))


def plan_on(
    runtime: Any,
    device: str,
    folder: Path,
    draft_folder: Path | None,
    *,
    tokens: int,
    dtype: str = "auto",
    options: CacheOptions | None = None,
    chunk: int = 512,
) -> MemoryPlan:
    """`plan_memory` with what this runtime makes of the stored formats on this device: `runs_wide` (a config.json, device) says
    whether it runs a model in float32 unless told otherwise, `packs_drafters` (device) whether drafters stay packed."""
    wide, packs = getattr(runtime, "runs_wide", None), getattr(runtime, "packs_drafters", None)
    if dtype == "auto" and wide is not None and wide(read_config(folder), device):
        dtype = "float32"
    packed = packs is not None and packs(device)
    return plan_memory(folder, draft_folder, tokens=tokens, dtype=dtype, packed=packed, options=options, chunk=chunk)


def stored_bytes(folder: Path) -> dict[str, int]:
    """Bytes of all safetensors files of a folder by storage format (`BF16`, `U32`, ...), from their headers only."""
    found: dict[str, int] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no .safetensors file: expected the weights of a model")
    for path in files:
        for kind, size in _entries(path):
            found[kind] = found.get(kind, 0) + size
    return found


def _entries(path: Path) -> Iterator[tuple[str, int]]:
    size = path.stat().st_size
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if length > size:
            raise CheckpointError(f"{path} is cut off: its header says {length} bytes, the file has {size}")
        header = handle.read(length)
    try:
        entries = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        for entry in entries.values():
            start, stop = entry["data_offsets"]
            yield entry["dtype"], stop - start
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {type(error).__name__} in its header") from error


def _item_size(stored: dict[str, int], dtype: str) -> int:
    """Bytes of one activation: as asked for, else as most floating weights are stored."""
    if dtype != "auto":
        return 4 if dtype == "float32" else 2
    floats = {kind: size for kind, size in stored.items() if kind in _ITEM}
    return _ITEM[max(floats, key=lambda kind: floats[kind])] if floats else 2


def weight_bytes(stored: dict[str, int], item: int | None) -> int:
    """Bytes in memory; `item` bytes a floating number where the dtype changes, packed integers as they are."""
    return sum(size // _ITEM[kind] * item if item and kind in _ITEM else size for kind, size in stored.items())


@dataclass(frozen=True)
class LayerShape:
    """What the caches of one decoder need to know. `window` is that of `sliding` layers."""

    full: int
    sliding: int
    linear: int
    kv_heads: int
    head_dim: int
    window: int
    state: int = 0  # numbers in the state of one linear layer
    conv: int = 0  # numbers in its convolution window


def layer_shape(card: dict[str, Any]) -> LayerShape:
    """From a config.json. CheckpointError where a number is missing."""
    facts = {**card, **(card.get("text_config") or {})}
    try:
        layers, heads, hidden = (int(facts[key]) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: expected layers, heads and hidden size as numbers ({error})") from error
    kinds = facts.get("layer_types")
    if not kinds:
        every = facts.get("full_attention_interval") if facts.get("linear_num_value_heads") else None
        kinds = ["linear_attention" if every and (i + 1) % every else "full_attention" for i in range(layers)]
    linear, sliding = kinds.count("linear_attention"), kinds.count("sliding_attention")
    state = conv = 0
    if linear:
        hv, dv, hk, dk, kernel = (
            int(facts[f"linear_{key}"])
            for key in ("num_value_heads", "value_head_dim", "num_key_heads", "key_head_dim", "conv_kernel_dim")
        )
        state, conv = hv * dv * dk, (kernel - 1) * (2 * hk * dk + hv * dv)
    return LayerShape(
        full=len(kinds) - linear - sliding,
        sliding=sliding,
        linear=linear,
        kv_heads=int(facts.get("num_key_value_heads") or heads),
        head_dim=int(facts.get("head_dim") or hidden // heads),
        window=int(facts.get("sliding_window") or 0),
        state=state,
        conv=conv,
    )


def kv_bytes(shape: LayerShape, layers: int, tokens: int, item: int, options: CacheOptions) -> int:
    """K/V of `layers` attention layers: 2 x heads x head size x bytes a number, or the packed form with its scales."""
    numbers = 2 * layers * shape.kv_heads * shape.head_dim * tokens
    if options.kv_bits is None:
        return numbers * item
    return numbers * options.kv_bits // 8 + numbers // options.kv_group_size * 2 * item


def cache_parts(card: dict[str, Any], tokens: int, item: int, options: CacheOptions) -> list[tuple[str, int]]:
    """Target caches: K/V of layers that have attention, states (float32) and windows of the others."""
    shape = layer_shape(card)
    held = min(tokens, options.max_kv_size or tokens)
    size = kv_bytes(shape, shape.full, held, item, options)
    size += kv_bytes(shape, shape.sliding, min(tokens, shape.window or tokens), item, options)
    states = shape.linear * (4 * shape.state + item * shape.conv)
    return [("K/V", size), ("linear-attention states", states)]


def draft_bytes(config: DrafterConfig, folder: Path | None, item: int) -> int:
    """Weights of a drafter, and its transfer codes [V, r] where it has them. folder: as stored there, packed matrices as they
    are; None: every number whole."""
    codes = config.vocab_size * config.dspine.transfer_rank if config.dspine is not None else 0
    if folder is not None:
        return weight_bytes(stored_bytes(folder), item) + codes * item
    return (sum(math.prod(shape) for shape in expected_tensors(config).values()) + codes) * item


def draft_context_bytes(config: DrafterConfig, tokens: int, item: int) -> int:
    """Context K/V of a drafter with room for one block; sliding layers hold what their window reaches."""
    held = [tokens if rule.reach is None else min(tokens, rule.reach) for rule in config.mask_rules()]
    return 2 * config.num_kv_heads * config.head_dim * sum(rows + config.block_size for rows in held) * item


def activation_bytes(card: dict[str, Any], chunk: int, item: int) -> int:
    """Upper estimate: ten rows of the hidden size and three of the inner one a prompt token of a chunk, and float32 logits
    of one block of 16."""
    facts = {**card, **(card.get("text_config") or {})}
    hidden = int(facts.get("hidden_size") or 0)
    inner = int(facts.get("intermediate_size") or facts.get("moe_intermediate_size") or 4 * hidden)
    return chunk * (10 * hidden + 3 * inner) * item + 2 * 16 * int(facts.get("vocab_size") or 0) * 4


def host_memory() -> DeviceMemory:
    """Memory of this machine, or of this container where it has less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    usable, source = total, "physical memory"
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for row in meminfo.read_text().splitlines():
            if row.startswith("MemAvailable:"):
                usable, source = int(row.split()[1]) * 1024, "available memory"
    limit = _container_limit()
    if limit is not None and limit < usable:
        usable, source = limit, "limit of this container"
    return DeviceMemory(total, usable, source)


def _container_limit() -> int | None:
    """What a Linux control group leaves, or None without one."""
    base = Path("/sys/fs/cgroup")
    limit, used = base / "memory.max", base / "memory.current"
    if not (limit.is_file() and used.is_file()):
        return None
    text = limit.read_text().strip()
    return max(int(text) - int(used.read_text()), 0) if text.isdecimal() else None


def device_memory(runtime: Any, device: str) -> DeviceMemory:
    """What the runtime says of a device of its own; for the CPU, and where it says nothing, the host's memory."""
    ask = getattr(runtime, "device_memory", None)
    found = ask(device) if ask is not None else None
    return found if found is not None else host_memory()
