"""Caches of a prompt in a file: K/V of every kind, states and windows of linear attention, context of the drafter.

One safetensors file (`docs/mac.md`): arrays as they are in memory, bit for bit, what they belong to, and a hash over all of it.
A file for another model, drafter, dtype or kind of K/V is refused, and so is one that is not what was written: MLX would take
states of another shape as they come, and read outside them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from dspine.common.errors import CheckpointError, DSpineError
from dspine_mlx.arrays import MlxArrays

FORMAT = "dspine-prompt-cache-2"
_SAMPLE = 16  # leading numbers of every tensor that go into a fingerprint


def fingerprint(model: nn.Module) -> str:
    """Hash over names, shapes, dtypes and the first numbers of all tensors of a model."""
    tensors = sorted(tree_flatten(model.parameters()))
    heads = [mx.reshape(array, (-1,))[:_SAMPLE] for _, array in tensors]
    digest = hashlib.sha256()
    for (name, array), head in zip(tensors, MlxArrays().to_host(*heads), strict=True):
        digest.update(f"{name} {array.shape} {array.dtype};".encode())
        digest.update(np.ascontiguousarray(head).tobytes())
    return digest.hexdigest()


def checksum(arrays: dict[str, mx.array], described: dict[str, str]) -> str:
    """Hash over all arrays, bit for bit, and the metadata (itself left out)."""
    digest = hashlib.sha256()
    for name in sorted(described.keys() - {"checksum"}):
        digest.update(f"{name}={described[name]};".encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.shape} {array.dtype};".encode())
        digest.update(np.ascontiguousarray(array.view(mx.uint8)))
    return digest.hexdigest()


def target_facts(target: Any) -> dict[str, Any]:
    """What a file says of its target; every line must match."""
    info, options = target.info, target.cache_options
    return {
        "model type": info.model_type,
        "layers": info.num_layers,
        "hidden size": info.hidden_size,
        "vocabulary": info.vocab_size,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "max_kv_size": options.max_kv_size,
        "kv_bits": options.kv_bits,
        "kv_group_size": options.kv_group_size if options.kv_bits is not None else None,
        "weights": fingerprint(target.model),
    }


def draft_facts(drafter: Any) -> dict[str, Any]:
    """What a file says of its drafter."""
    return {"method": drafter.config.method, "layers": drafter.config.num_layers, "weights": fingerprint(drafter.model)}


def save_prompt_cache(path: Path, target: Any, drafter: Any, session: Any, about: dict[str, Any]) -> int:
    """Write the caches of a session, and `about` (plain JSON values), to `path`; returns the bytes of the file.

    The file is complete or not there: it is written beside its place and renamed.
    """
    length = len(session.tokens)
    arrays, facts = session.cache.export(length)
    held = {f"target.{name}": array for name, array in arrays.items()}
    if drafter is not None:
        held |= {f"draft.{name}": array for name, array in session.draft_cache.export(length).items()}
    held["tokens"] = mx.array(session.tokens)
    described = {
        "format": FORMAT,
        "target": json.dumps(target_facts(target)),
        "drafter": json.dumps(draft_facts(drafter) if drafter is not None else None),
        "facts": json.dumps(facts),
        "about": json.dumps(about),
    }
    described["checksum"] = checksum(held, described)
    try:
        with tempfile.TemporaryDirectory(prefix=".prompt-cache-", dir=path.parent) as folder:
            part = Path(folder) / "part.safetensors"
            mx.save_safetensors(str(part), held, described)
            os.replace(part, path)
    except (OSError, RuntimeError) as error:  # MLX says RuntimeError where the disk is full
        why = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DSpineError(f"cannot write the prompt cache {path}: {why}") from error
    return path.stat().st_size


def load_prompt_cache(path: Path, target: Any, drafter: Any) -> tuple[np.ndarray, Any, Any, dict[str, Any]]:
    """(tokens int32 [n], target cache, drafter cache or None, about). CheckpointError where the file is no prompt cache, is
    not what was written, or belongs to another model, drafter, dtype or kind of K/V."""
    arrays, described = _read(path)
    _compare(path, "model", json.loads(described["target"]), target_facts(target))
    tokens = np.array(arrays.pop("tokens"), dtype=np.int32)
    cache = target.make_cache(len(tokens))
    part = {name.removeprefix("target."): array for name, array in arrays.items() if name.startswith("target.")}
    draft_cache = None
    cache.restore(part, json.loads(described["facts"]), len(tokens))
    if drafter is not None:
        theirs = json.loads(described["drafter"])
        if theirs is None:
            raise CheckpointError(f"{path} was made without a drafter: make it again with this one, or use --no-draft")
        _compare(path, "drafter", theirs, draft_facts(drafter))
        draft_cache = drafter.make_cache(len(tokens))
        rows = {name.removeprefix("draft."): array for name, array in arrays.items() if name.startswith("draft.")}
        draft_cache.restore(rows, len(tokens))
    mx.eval(cache.export(len(tokens))[0])
    return tokens, cache, draft_cache, json.loads(described["about"])


def _read(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise DSpineError(f"prompt cache {path} {what}: make one with dspine cache-prompt")
    try:
        arrays, described = mx.load(str(path), format="safetensors", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} is no prompt cache: {' '.join(str(error).split())[:200]}") from error
    if described.get("format") != FORMAT:
        found = described.get("format", "none; mlx_lm's own files are another format")
        raise CheckpointError(f"{path} is no prompt cache of this version: expected format {FORMAT}, got {found}")
    if described.get("checksum") != checksum(arrays, described):
        raise CheckpointError(f"{path} is damaged: its checksum is another; make it again with dspine cache-prompt")
    return arrays, described


def _compare(path: Path, what: str, there: dict[str, Any], here: dict[str, Any]) -> None:
    differing = [f"{key} {there.get(key)} there, {here[key]} here" for key in here if there.get(key) != here[key]]
    if differing:
        listed = "; ".join(line if "weights" not in line else "other weights" for line in differing)
        made = f"for another {what}" if "other weights" in listed else "with other settings"
        again = "give the same ones, or " if made == "with other settings" else ""
        raise CheckpointError(f"{path} was made {made}: {listed}; {again}make one with dspine cache-prompt")
