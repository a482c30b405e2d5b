"""The least time a step could take: bytes that must be read once, over the read bandwidth measured in the same run.

Bytes: every weight a forward multiplies with (the embedding's rows left out, the head in; of routed experts only those that
were hit), K/V of the context, states of linear attention. What is left out makes the floor lower, never higher: activations,
writes, launches.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.arrays import array_namespace
from dspine.common.checkpoints import read_header
from dspine.common.configs import DrafterConfig, read_config
from dspine.common.memory import CacheOptions, cache_parts, draft_context_bytes
from dspine.common.protocols import ArrayOps, Timer

_EXPERT = re.compile(r"\.(?:experts|switch_mlp)\.")
_SKIPPED = re.compile(r"(?:model\.)?(?:visual|mtp|vision_tower)\.")
_ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}
_CHAIN = 4  # reads between two marks: on a GPU the first launch is part of the time
_PACKED = ("U32", "I32", "U8", "I8")
Sizes = dict[str, tuple[tuple[int, ...], str]]  # name -> shape, storage format


@dataclass(frozen=True)
class WeightBytes:
    """dense: read by every forward; expert: one routed expert through all MoE layers; embedding: rows only (not counted in
    `dense` unless it is the head too)."""

    dense: int
    expert: int
    experts: int
    head: int

    def read(self, hit: float) -> float:
        """Bytes of a forward that hits so many experts a layer."""
        return self.dense + self.expert * min(hit, self.experts)


def folder_sizes(folder: Path) -> Sizes:
    """Shapes and formats of a folder's tensors, from the headers of its files."""
    found: Sizes = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {name: (entry.shape, entry.dtype) for name, entry in read_header(path).items()}
    return found


def target_bytes(sizes: Sizes, config: dict[str, Any], dtype: str) -> WeightBytes:
    """From the tensors of a target and its card; floating tensors count in the format they run in, packed ones as stored."""
    facts = {**config, **(config.get("text_config") or {})}
    experts = int(facts.get("num_experts") or 0)
    tied = bool(config.get("tie_word_embeddings", facts.get("tie_word_embeddings")))
    dense = routed = embedding = head = 0
    for name, (shape, kind) in sizes.items():
        if _SKIPPED.match(name):
            continue
        size = _nbytes(shape, kind, dtype)
        if _EXPERT.search(name):
            routed += size
        elif "embed_tokens" in name:
            embedding += size
        else:
            dense += size
            head += size if "lm_head" in name else 0
    head = head or embedding
    return WeightBytes(dense + (embedding if tied or not _has_head(sizes) else 0), routed // max(experts, 1), experts, head)


def _has_head(sizes: Sizes) -> bool:
    return any("lm_head" in name for name in sizes)


def _nbytes(shape: tuple[int, ...], kind: str, dtype: str) -> int:
    width = {"U32": 4, "I32": 4, "U8": 1, "I8": 1}.get(kind) if kind in _PACKED else _ITEM.get(dtype, 4)
    return int(np.prod(shape)) * width  # type: ignore[operator]


def expected_experts(experts: int, picks: int, w: int) -> float:
    """Distinct experts of w tokens that each draw `picks` of them evenly: E (1 - (1 - k / E)^w)."""
    return experts * (1 - (1 - picks / experts) ** w) if experts else 0.0


def context_bytes(config: dict[str, Any], tokens: int, dtype: str) -> int:
    """K/V of a context and the states of linear attention, read once."""
    return sum(size for _, size in cache_parts(config, tokens, _ITEM.get(dtype, 4), CacheOptions()))


def draft_bytes_read(config: DrafterConfig, folder: Path, head: int, tokens: int, dtype: str) -> int:
    """A draft: its weights (with the transfer space's rows left out), the target's head, its context's K/V."""
    skipped = ("transfer", "codes", "embed_tokens", "lm_head", "d2t", "t2d")
    weights = sum(
        _nbytes(shape, "F32", dtype) if kind not in _PACKED else _nbytes(shape, kind, dtype)
        for name, (shape, kind) in folder_sizes(folder).items()
        if not any(part in name for part in skipped)
    )
    return weights + head + draft_context_bytes(config, tokens, _ITEM.get(dtype, 4))


def measure_bandwidth(arrays: ArrayOps, timer: Timer, *, nbytes: int, repetitions: int = 7) -> dict[str, float]:
    """Bytes a second of reading a large float32 array once (its sum): the best and the median of several."""
    array = arrays.to_device(np.ones(nbytes // 4, dtype=np.float32))
    xp = array_namespace(array)
    timer.mark(xp.sum(array))
    rates = []
    for _ in range(repetitions):
        begun = timer.mark()
        ended = timer.mark([xp.sum(array) for _ in range(_CHAIN)])
        rates.append(_CHAIN * nbytes / max(timer.seconds([begun, ended])[0], 1e-9))
    return {"bytes_per_second": max(rates), "median": statistics.median(rates), "array_bytes": float(nbytes)}


def target_config(folder: Path) -> dict[str, Any]:
    """The target's card."""
    return read_config(folder)
