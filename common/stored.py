"""Models kept small: official tensor names, group-wise n-bit weights, expanded once into an ordinary Hugging Face folder.

A stored folder holds `storage.json` (version; form and shape of every quantised tensor), `stored.safetensors` and the model's
own config and tokenizer files, unchanged. The weights file has a name of its own: nothing takes it for a plain checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dspine.common.checkpoints import read_header, read_tensor
from dspine.common.environment import cache_folder
from dspine.common.errors import CheckpointError
from dspine.common.files import write_whole
from dspine.common.prepared import WEIGHTS, publish
from dspine.common.quantization import GroupForm, bfloat16_bits, dequantize_affine, quantize_affine

FORMS, TENSORS = "storage.json", "stored.safetensors"
VERSION = 1
_FORMAT = "dspine-stored"
_RECIPE = 1  # raise it when what an expanded folder holds changes
_REQUIRED = ("config.json", FORMS, TENSORS)
_COPIED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_LIMIT = 2**20  # bytes of storage.json


def is_stored(folder: Path) -> bool:
    """Whether the folder holds a stored model."""
    return (Path(folder) / FORMS).is_file()


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]]) -> None:
    """name -> (dtype tag, array of the raw bits); written beside and renamed, so a file is whole or absent."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (tag, array) in tensors.items():
        header[name] = {"dtype": tag, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)

    def write(file: BinaryIO) -> None:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())

    write_whole(path, write)


def write_stored(folder: Path, tensors: Mapping[str, np.ndarray], forms: Mapping[str, GroupForm]) -> Path:
    """Write storage.json and stored.safetensors. tensors: float32 by official name; those without a form stay bfloat16."""
    unknown = sorted(set(forms) - set(tensors))
    if unknown:
        raise CheckpointError(f"{folder}: forms for tensors that are not there: {', '.join(unknown)}")
    raw: dict[str, tuple[str, np.ndarray]] = {}
    listed: dict[str, Any] = {}
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise CheckpointError(f"{folder}: {name} holds values that are not finite")
        form = forms.get(name)
        if form is None:
            raw[name] = ("BF16", bfloat16_bits(array))
            continue
        words, scales, biases = quantize_affine(array, form.bits, form.group_size)
        raw[name] = ("U32", words)
        raw[f"{name}.scales"], raw[f"{name}.biases"] = (("BF16", bfloat16_bits(a)) for a in (scales, biases))
        listed[name] = {"bits": form.bits, "group_size": form.group_size, "shape": list(array.shape)}
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / TENSORS, raw)
    content = {"format": _FORMAT, "version": VERSION, "tensors": listed}
    (folder / FORMS).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return folder


def read_stored(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(official name, float32 array) of every tensor, dequantised. What does not fit together is one clear error."""
    folder = Path(folder)
    listed = _read_forms(folder / FORMS)
    entries = read_header(folder / TENSORS)
    parts = {f"{name}.{part}" for name in listed for part in ("scales", "biases")}
    missing = sorted((set(listed) | parts) - set(entries))
    if missing:
        raise CheckpointError(f"{folder}: {TENSORS} lacks {', '.join(missing[:4])}, which {FORMS} lists")
    for name, entry in entries.items():
        if name in parts:
            continue
        if name not in listed:
            if entry.dtype not in ("BF16", "F32"):
                raise CheckpointError(f"{folder}: {name} has dtype {entry.dtype} and no form in {FORMS}; expected BF16 or F32")
            array = read_tensor(entry)
        else:
            array = _dequantized(folder, name, entries, *listed[name])
        if not np.isfinite(array).all():
            raise CheckpointError(f"{folder}: {name} holds values that are not finite; fetch the folder again")
        yield name, array


def _read_forms(path: Path) -> dict[str, tuple[GroupForm, tuple[int, ...]]]:
    try:
        if path.stat().st_size > _LIMIT:
            raise ValueError(f"larger than {_LIMIT} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT or content["version"] != VERSION:
            raise ValueError(
                f"format {content['format']!r} version {content['version']!r}, expected {_FORMAT!r} version {VERSION}"
            )
        listed = {}
        for name, item in content["tensors"].items():
            bits, group, shape = item["bits"], item["group_size"], item["shape"]
            numbers = (bits, group, *shape)
            if not shape or any(type(n) is not int or n < 1 for n in numbers) or shape[-1] % group:
                raise ValueError(f"{name}: {bits} bits, groups of {group}, shape {shape}")
            listed[name] = (GroupForm(bits, group), tuple(shape))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: missing or damaged ({error}); fetch the folder again") from error
    return listed


def _dequantized(folder: Path, name: str, entries: Mapping[str, Any], form: GroupForm, shape: tuple[int, ...]) -> np.ndarray:
    scales, biases = entries[f"{name}.scales"], entries[f"{name}.biases"]
    wanted = {
        "words": (entries[name], ("U32",), (*shape[:-1], form.words(shape[-1]))),
        "scales": (scales, ("BF16", "F32"), (*shape[:-1], shape[-1] // form.group_size)),
        "biases": (biases, ("BF16", "F32"), (*shape[:-1], shape[-1] // form.group_size)),
    }
    for part, (entry, dtypes, expected) in wanted.items():
        if entry.shape != expected or entry.dtype not in dtypes:
            raise CheckpointError(
                f"{folder}: {name}: {part} are {entry.dtype} {list(entry.shape)}, expected {dtypes[0]} {list(expected)}"
            )
    arrays = [read_tensor(entry) for entry in (entries[name], scales, biases)]
    with np.errstate(over="ignore", invalid="ignore"):  # of damaged scales: the caller looks at the result
        return dequantize_affine(*arrays, form.bits, form.group_size)


def expand_stored(folder: Path, into: Path) -> None:
    """Write an ordinary bfloat16 Hugging Face folder."""
    tensors = {name: ("BF16", bfloat16_bits(array)) for name, array in read_stored(folder)}
    write_safetensors(into / WEIGHTS, tensors)
    for name in _COPIED:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, into / name)


def expanded_folder(folder: Path) -> Path:
    """Where the expanded folder is, or would be: named after the stored one and its content."""
    folder = Path(folder).resolve()
    absent = [name for name in _REQUIRED if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"stored model {folder} lacks {', '.join(absent)}; fetch the folder again")
    digest = hashlib.sha256()
    for name in (*_REQUIRED, *_COPIED[1:]):
        if (folder / name).is_file():
            digest.update(name.encode() + b"\0" + hashlib.sha256((folder / name).read_bytes()).digest())
    return cache_folder() / "models" / f"{folder.name}-{digest.hexdigest()[:16]}-r{_RECIPE}"


def prepare_stored(folder: Path) -> Path:
    """The stored model as an ordinary Hugging Face folder in the user's cache; made on the first call."""
    folder = Path(folder)
    final = expanded_folder(folder)
    files = [WEIGHTS, *(name for name in _COPIED if (folder / name).is_file())]
    return publish(final, files, lambda partial: expand_stored(folder, partial))
