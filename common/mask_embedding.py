"""`mask_embedding.pt`: a trained embedding for the mask token beside a drafter's weights (MiMo).

The one pickle that is ever opened, and read here without torch: a zip archive whose pickle may name a handful of tensor
constructors and nothing else, so no code of the file can run.
"""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.configs import DrafterConfig
from dspine.common.errors import CheckpointError

NAME = "mask_embedding.pt"
_STORAGES = {
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": np.dtype("<u2"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
}
_LARGEST = 64 << 20  # bytes of one member; an embedding row is kilobytes


@dataclass(frozen=True)
class _Storage:
    kind: str
    data: np.ndarray


def _rebuild(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: Any) -> np.ndarray:
    """What `torch._utils._rebuild_tensor_v2` stands for: a view of a storage, widened to float32 where it is bfloat16."""
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    needed = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 if all(size) else 0
    if offset < 0 or min(stride, default=0) < 0 or needed > storage.data.size:
        raise pickle.UnpicklingError("a tensor beyond its storage")
    item = storage.data.itemsize
    view = np.lib.stride_tricks.as_strided(storage.data[offset:], size, [s * item for s in stride])
    if storage.kind == "BFloat16Storage":
        return (view.astype(np.uint32) << 16).view(np.float32)
    return np.array(view)


class _Reader(pickle.Unpickler):
    """Knows tensors, dictionaries, strings and numbers."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(archive.open(f"{root}/data.pkl"))
        self._archive, self._root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")

    def persistent_load(self, pid: Any) -> Any:
        tag, kind, key, _, count = pid
        if tag != "storage" or kind not in _STORAGES:
            raise pickle.UnpicklingError(f"storage {kind!r} is not allowed")
        member = self._archive.getinfo(f"{self._root}/data/{key}")
        if member.file_size > _LARGEST:
            raise pickle.UnpicklingError(f"a storage of {member.file_size} bytes")
        return _Storage(kind, np.frombuffer(self._archive.read(member), dtype=_STORAGES[kind], count=count))


def _load(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        roots = [name.removesuffix("/data.pkl") for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(roots) != 1 or archive.getinfo(f"{roots[0]}/data.pkl").file_size > _LARGEST:
            raise pickle.UnpicklingError("no single data.pkl inside")
        return _Reader(archive, roots[0]).load()


def read_mask_embedding(folder: Path, config: DrafterConfig) -> np.ndarray | None:
    """The row [H], float32, or None where the folder has no such file. Its mask id must be the card's."""
    path = Path(folder) / NAME
    if not path.is_file():
        return None
    try:
        saved = _load(path)
        row, token = np.asarray(saved["embedding"], dtype=np.float32), int(saved["mask_token_id"])
        per_position = bool(saved.get("per_position"))
    except (zipfile.BadZipFile, pickle.UnpicklingError, EOFError, OSError, KeyError, IndexError, TypeError, ValueError,
            AttributeError) as error:  # fmt: skip
        raise CheckpointError(
            f"{path}: not a mask embedding (a dictionary with `embedding` and `mask_token_id`, tensors only): {error}"
        ) from error
    if per_position:
        raise CheckpointError(f"{path}: one mask embedding a position is not run; expected one row [{config.hidden_size}]")
    if token != config.mask_token_id:
        raise CheckpointError(f"{path}: trained for mask token {token}, the config's mask_token_id is {config.mask_token_id}")
    if row.size != config.hidden_size or row.shape[-1] != config.hidden_size or not np.isfinite(row).all():
        raise CheckpointError(f"{path}: embedding has shape {list(row.shape)}, expected finite [{config.hidden_size}]")
    return row.reshape(-1)
