"""Drafter tensors: which names and shapes a config asks for, strict reading, MLX's affine quantisation undone.

Reading goes through NumPy, so both runtimes see the very same float32 values of one file (bfloat16 widens exactly).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.configs import DrafterConfig
from dspine.common.draft_cards import BRIDGE
from dspine.common.draft_layouts import BORROWED, MAPS, canonical_name, head_tensors, kind_of
from dspine.common.errors import CheckpointError
from dspine.common.quantization import GroupForm, dequantize_affine
from dspine.common.transfer_space import TransferBasis, transfer_codes

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "U32": np.uint32,
    "I64": np.int64, "I32": np.int32, "U8": np.uint8, "I8": np.int8, "BOOL": np.bool_, "F8_E4M3": np.uint8,
}  # fmt: skip
_FLOATS = ("F64", "F32", "F16", "BF16")
_SCALED_EMBEDDINGS = ("gemma", "granite", "minicpm")
CODES, READY = "transfer_codes", "transfer_ready"
BASIS = ("transfer_eigenvectors", "transfer_eigenvalues", "transfer_mean")


@dataclass(frozen=True)
class _Entry:
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


def read_header(path: Path) -> dict[str, _Entry]:
    """Names, dtypes, shapes and places of a safetensors file; a damaged or cut file is one clear error."""
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(total - 8, 100_000_000):
                raise ValueError(f"header of {length} bytes in a file of {total}")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError(f"the header is no object but {type(header).__name__}")
        entries = {}
        for name, item in header.items():
            if name == "__metadata__":
                continue
            (start, end), shape = item["data_offsets"], item["shape"]
            if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in (*shape, start, end)):
                raise ValueError(f"{name} has shape {shape!r} at bytes {start!r}..{end!r}")
            if item["dtype"] not in _DTYPES:
                raise ValueError(f"{name} has dtype {item['dtype']}")
            wanted = math.prod(shape) * np.dtype(_DTYPES[item["dtype"]]).itemsize
            if end - start != wanted or 8 + length + end > total:
                raise ValueError(f"{name} needs bytes {start}..{end}, the file holds {total - 8 - length}")
            entries[name] = _Entry(path, item["dtype"], tuple(item["shape"]), 8 + length + start, end - start)
    except (OSError, struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: missing or damaged safetensors file ({error}); fetch it again") from error
    return entries


def read_words(entry: _Entry) -> np.ndarray:
    """One tensor as it is stored; bfloat16 as uint16."""
    raw = np.fromfile(entry.path, dtype=np.uint8, count=entry.size, offset=entry.offset)
    return raw.view(_DTYPES[entry.dtype]).reshape(entry.shape)


def read_tensor(entry: _Entry) -> np.ndarray:
    """One tensor as NumPy in its own dtype; bfloat16 widens to float32."""
    array = read_words(entry)
    if entry.dtype == "BF16":
        wide = array.astype(np.uint32)
        wide <<= 16  # in place: a large drafter is loaded with one tensor's copies beside its weights
        return wide.view(np.float32)
    return array


def expected_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every trained tensor (the transfer space is apart). Source: `docs/formats.md`."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, config.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(config.num_layers):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
            attention + "q_proj.weight": (queries, hidden),
            attention + "k_proj.weight": (keys, hidden),
            attention + "v_proj.weight": (keys, hidden),
            attention + "o_proj.weight": (hidden, queries),
            attention + "q_norm.weight": (head,),
            attention + "k_norm.weight": (head,),
            mlp + "gate_proj.weight": (inner, hidden),
            mlp + "up_proj.weight": (inner, hidden),
            mlp + "down_proj.weight": (hidden, inner),
        }
        if config.attention_bias:
            sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": hidden}
            shapes |= {f"{attention}{name}.bias": (size,) for name, size in sizes.items()}
    if config.dspine is not None:
        rank, message = config.dspine.transfer_rank, config.dspine.message_size
        for i in range(config.num_layers):
            shapes[f"injection.readouts.{i}.weight"] = (rank, hidden)
            shapes[f"injection.writes.{i}.weight"] = (hidden, message)
        for name in ("message", "receiver_gate", "predecessor_gate"):
            shapes[f"injection.{name}.weight"] = (message, rank)
        shapes["injection.bias"] = (message,)
        if config.dspine.hops == 2:
            shapes["injection.second"] = (message,)
    return shapes | head_tensors(config)


class DraftTensors:
    """The tensors of one drafter folder, checked against its config. `read` gives float32; every tensor must be read."""

    def __init__(self, folder: Path, config: DrafterConfig) -> None:
        self.folder, self.config = Path(folder), config
        self._entries = _gather_entries(self.folder)
        self._unread = set(expected_tensors(config))
        self._check_names()

    def _check_names(self) -> None:
        quantized = {name[: -len(".scales")] for name in self._entries if name.endswith(".scales")}
        parts = {f"{name}.{part}" for name in quantized for part in ("scales", "biases")}
        found = set(self._entries) - parts - {CODES, READY, *BASIS}
        expected = expected_tensors(self.config)
        self._check_borrowed(found)
        missing, extra = sorted(set(expected) - found), sorted(found - set(expected))
        if missing or extra:
            kind = _kind_hint(self.config, found)
            raise CheckpointError(
                f"{self.folder}: tensors do not fit a {self.config.method} drafter{kind}; missing: {_names(missing)}; "
                f"unexpected: {_names(extra)}"
            )
        transfer = {CODES, READY, *BASIS} & set(self._entries)
        if self.config.method != "dspine" and transfer:
            raise CheckpointError(
                f"{self.folder}: a {self.config.method} card, but the file holds {_names(sorted(transfer))}; is it a DSpine "
                "drafter?"
            )
        if self.config.method == "dspine" and CODES not in transfer and not set(BASIS) <= transfer:
            raise CheckpointError(
                f"{self.folder}: no transfer space; expected {CODES}, or {', '.join(BASIS)} (readouts fit one exact basis, so "
                "it cannot be derived again from the target)"
            )
        for name, shape in expected.items():
            got, dtype = self._entries[name].shape, self._entries[name].dtype
            if self._is_quantized(name):
                self._check_quantized(name, shape)
            elif got != shape:
                raise CheckpointError(f"{self.folder}: {name} has shape {list(got)}, the config asks for {list(shape)}")
            elif dtype not in _FLOATS:
                raise CheckpointError(
                    f"{self.folder}: {name} has dtype {dtype}, expected one of {', '.join(_FLOATS)} (or MLX's packed form with "
                    "scales and biases); convert the file first"
                )

    def _check_borrowed(self, found: set[str]) -> None:
        """Copies of the target's tables are dropped, once their shape says that they are: all rows, or of a head those that
        the drafter may propose."""
        rows = {name: {self.config.vocab_size} for name in BORROWED}
        for name in BORROWED[1:]:
            rows[name].add(self.config.draft_vocab_size or self.config.vocab_size)
        for name in sorted(found & set(BORROWED)):
            got, hidden = self._entries[name].shape, self.config.hidden_size
            fits = len(got) == 2 and got[0] in rows[name] and got[1] == hidden
            if not fits and not self._is_quantized(name):
                own = f"the target's own rows, {sorted(rows[name])} x {hidden}"
                raise CheckpointError(f"{self.folder}: {name} has shape {list(got)}, expected {own}")
        found -= {*BORROWED, *MAPS}
        if self.config.draft_vocab_size is not None and "t2d" not in self._entries:
            raise CheckpointError(
                f"{self.folder}: draft_vocab_size is {self.config.draft_vocab_size}, but no t2d says which tokens those are"
            )

    def _is_quantized(self, name: str) -> bool:
        return name.removesuffix(".weight") + ".scales" in self._entries

    def form(self, name: str) -> GroupForm | None:
        """How a tensor is stored: bits and group size, or None where it is a plain float tensor."""
        if not self._is_quantized(name):
            return None
        return quantization_form(self.config.quantization, name.removesuffix(".weight"), str(self.folder))

    def _check_quantized(self, name: str, shape: tuple[int, ...]) -> None:
        form, stem = self.form(name), name.removesuffix(".weight")
        assert form is not None
        if len(shape) != 2 or shape[1] % form.group_size:
            raise CheckpointError(f"{self.folder}: {name} {list(shape)} cannot be stored in groups of {form.group_size}")
        got = [self._entries[n].shape if n in self._entries else None for n in (name, f"{stem}.scales", f"{stem}.biases")]
        groups = (shape[0], shape[1] // form.group_size)
        if got != [(shape[0], form.words(shape[1])), groups, groups] or self._entries[name].dtype != "U32":
            raise CheckpointError(
                f"{self.folder}: {name} packs {list(got[0] or ())} words with scales {list(got[1] or ())} and biases "
                f"{list(got[2] or ())}; expected {[shape[0], form.words(shape[1])]} (uint32) and {list(groups)} at {form.bits} "
                f"bits in groups of {form.group_size}"
            )

    def read(self, name: str) -> np.ndarray:
        """One tensor as float32, dequantised."""
        form = self.form(name)
        if form is not None:
            return dequantize_affine(*self.packed(name), form.bits, form.group_size)
        self._unread.discard(name)
        return read_tensor(self._entries[name]).astype(np.float32, copy=False)

    def words(self, name: str) -> np.ndarray | None:
        """A tensor that is stored in bfloat16, as its words uint16 and not widened; None for any other."""
        if self.form(name) is not None or self._entries[name].dtype != "BF16":
            return None
        self._unread.discard(name)
        return read_words(self._entries[name])

    def packed(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A quantised tensor as it is stored: uint32 words [out, W], scales and biases float32 [out, groups]."""
        self._unread.discard(name)
        stem = name.removesuffix(".weight")
        scales, biases = (read_tensor(self._entries[f"{stem}.{part}"]).astype(np.float32) for part in ("scales", "biases"))
        return read_tensor(self._entries[name]), scales, biases

    def draft_tokens(self) -> np.ndarray | None:
        """Target ids the drafter may propose, ascending int64 [draft_vocab_size]; None: all."""
        count, vocab = self.config.draft_vocab_size, self.config.vocab_size
        if count is None:
            return None
        marks = read_tensor(self._entries["t2d"])
        tokens = np.flatnonzero(marks)
        if marks.shape != (vocab,) or len(tokens) != count:
            raise CheckpointError(
                f"{self.folder}: t2d {list(marks.shape)} marks {len(tokens)} tokens, expected {count} of {vocab}"
            )
        if "d2t" in self._entries:
            ahead = read_tensor(self._entries["d2t"])
            if ahead.shape != (count,) or not np.array_equal(np.arange(count) + ahead, tokens):
                raise CheckpointError(f"{self.folder}: d2t and t2d do not name the same tokens in the same order")
        return tokens

    def transfer_basis(self) -> TransferBasis | None:
        """The stored basis of the transfer space as float32, or None where there is none."""
        if not all(name in self._entries for name in BASIS):
            return None
        return TransferBasis(*(read_tensor(self._entries[name]).astype(np.float32) for name in BASIS))

    def transfer_codes(self, head_weight: Callable[[], np.ndarray]) -> np.ndarray:
        """C float32 [V, r]: stored, or made from the stored basis and the target's LM head [V, H], asked for only then."""
        rank, vocab = self.config.dspine.transfer_rank, self.config.vocab_size  # type: ignore[union-attr]
        if CODES in self._entries:
            codes = read_tensor(self._entries[CODES]).astype(np.float32)
        else:
            vectors, values, mean = (read_tensor(self._entries[name]).astype(np.float64) for name in BASIS)
            codes = transfer_codes(head_weight().astype(np.float64), TransferBasis(vectors, values, mean)).astype(np.float32)
        if codes.shape != (vocab, rank):
            raise CheckpointError(f"{self.folder}: {CODES} has shape {list(codes.shape)}, the config asks for {[vocab, rank]}")
        return codes

    def finish(self) -> None:
        """Raise if a tensor was loaded by nobody (a tensor that is allocated but not used costs acceptance silently)."""
        if self._unread:
            raise CheckpointError(f"{self.folder}: tensors never used: {_names(sorted(self._unread))}")


def quantization_form(quantization: dict[str, Any] | None, stem: str, where: str) -> GroupForm:
    """MLX's metadata for one module: the general `bits` and `group_size`, or an entry of the module's own name."""
    if quantization is None:
        raise CheckpointError(f"{where}: {stem}.weight is quantised, but config.json has no `quantization`")
    own = quantization.get(stem, quantization.get(f"model.{stem}"))
    form = own if isinstance(own, dict) else quantization
    bits, group, mode = form.get("bits"), form.get("group_size"), form.get("mode", quantization.get("mode", "affine"))
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (bits, group))
    if not whole or mode != "affine":
        raise CheckpointError(
            f"{where}: quantization of {stem} is {form!r}; known: mode affine (MLX), with whole numbers `bits` and `group_size`"
        )
    return GroupForm(bits, group)


def _gather_entries(folder: Path) -> dict[str, _Entry]:
    files = sorted(path for path in folder.glob("*.safetensors") if path.name != "transfer.safetensors")
    if not files:
        raise CheckpointError(f"{folder}: no safetensors file there; expected model.safetensors (no pickle is ever opened)")
    entries: dict[str, _Entry] = {}
    for path in files:
        for stored, entry in read_header(path).items():
            name = canonical_name(stored)
            if name in entries:
                raise CheckpointError(f"{folder}: {name} is stored twice ({entries[name].path.name}, {path.name}: {stored})")
            if name is not None:
                entries[name] = entry
    transfer = folder / "transfer.safetensors"
    if transfer.is_file():
        entries |= {CODES if name == "codes" else name: entry for name, entry in read_header(transfer).items()}
    return entries


def official_dspine_sizes(folder: Path, bridge: Any) -> dict[str, int]:
    """The `dspine_config` of a file that only carries the official mark: read off SpecForge's tensor names, or an error
    that lists what the file holds instead and what is missing (the official names are not public)."""
    entries = _gather_entries(folder)
    message = entries.get("injection.message.weight")
    if message is not None and len(message.shape) == 2:
        return {"message_size": message.shape[0], "transfer_rank": message.shape[1]}
    backbone = ("layers.", "fc.", "hidden_norm.", "norm.")
    found = sorted(name for name in entries if not name.startswith(backbone) or ".injection" in name)
    raise CheckpointError(
        f"{folder}: an official DSpine file ({BRIDGE} is {bridge!r}) whose tensor names this version does not know. Beyond the "
        f"backbone it holds: {_names(found)}; missing: injection.readouts.N.weight, injection.writes.N.weight, "
        f"injection.message/receiver_gate/predecessor_gate.weight, injection.bias, {CODES}. Convert it to SpecForge's form"
    )


def _kind_hint(config: DrafterConfig, found: set[str]) -> str:
    kind = kind_of(found)
    if kind == config.method:
        return ""
    if kind == "dspine":
        return " (the file is a DSpine drafter; its config must carry dspine_config)"
    if kind == "dflash" and config.method == "dspine":
        return " (the file is a plain DFlash drafter; drop dspine_config and use architecture DFlashDraftModel)"
    return f" (by its names the file is a {kind} drafter; its config must say so)"


def _names(names: list[str]) -> str:
    return ", ".join(names) if names else "none"


def check_pair(config: DrafterConfig, info: Any, where: str) -> None:
    """Refuse a drafter that was trained for another target. `info` is the target's `TargetInfo`."""
    facts = [
        ("hidden size", config.target_hidden_size or config.hidden_size, info.hidden_size),
        ("vocabulary", config.vocab_size, info.vocab_size),
        ("number of target layers", config.num_target_layers or info.num_layers, info.num_layers),
    ]
    for name, draft, target in facts:
        if draft != target:
            raise CheckpointError(f"{where}: drafter made for another target: its {name} is {draft}, {info.name} has {target}")
    if config.input_embedding_scale != 1.0 and info.model_type.startswith(_SCALED_EMBEDDINGS):
        raise CheckpointError(
            f"{where}: input_embedding_scale {config.input_embedding_scale} is meant for raw embeddings, but {info.model_type} "
            "scales its own; this pair is not run"
        )
    if config.mask_token_id in info.eos_token_ids:
        raise CheckpointError(
            f"{where}: mask_token_id {config.mask_token_id} is a stop token of {info.name}; a mask row must not end a text"
        )
    if config.target_hidden_size not in (None, config.hidden_size):
        raise CheckpointError(
            f"{where}: hidden size {config.hidden_size} differs from the target's {info.hidden_size}; they share one LM head"
        )
