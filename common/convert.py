"""Drafter folders from one form to another: quantised to n bits, SpecForge's one file, the two-file reference form.

Everything goes through the strict reader, so a converted folder holds exactly the tensors of its kind, under the names of
`docs/checkpoints.md`, with copies of the target's tables dropped. The card keeps what the source said.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.checkpoints import BASIS, CODES, READY, DraftTensors, expected_tensors, read_header, read_tensor
from dspine.common.configs import DrafterConfig, load_drafter_config, read_config
from dspine.common.draft_cards import BRIDGE, normalise_card
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.mask_embedding import NAME as MASK_EMBEDDING
from dspine.common.mask_embedding import read_mask_embedding
from dspine.common.quantization import GroupForm, bfloat16_bits, dequantize_affine, quantize_affine
from dspine.common.stored import write_safetensors

FORMS = ("specforge", "two-file", "mlx")
_QUANTISED = ("proj.weight", "fc.weight", "kernel_projection.weight", "embed_proj.0.weight", "embed_proj.2.weight")
_WHOLE = ("confidence_head.", "markov_head.", "candidate_selector.")  # small, or looked up by row: they stay bfloat16
_HEADS = ("lm_head.weight", "model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "embed_tokens.weight")


@dataclass(frozen=True)
class Scheme:
    """bits and group size of quantised matrices; `mixed`: the MLPs take `bits`, all others 8."""

    bits: int
    group_size: int = 64
    mixed: bool = False

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group_size not in (32, 64, 128):
            raise DSpineError(
                f"expected 4 or 8 bits in groups of 32, 64 or 128, got {self.bits} in groups of {self.group_size}"
            )

    def form(self, name: str, shape: tuple[int, ...]) -> GroupForm | None:
        """How this tensor is stored; None: bfloat16."""
        matrix = len(shape) == 2 and name.endswith(_QUANTISED) and not name.startswith(_WHOLE)
        if not matrix or shape[1] % self.group_size:
            return None
        return GroupForm(8 if self.mixed and ".mlp." not in name else self.bits, self.group_size)


@dataclass
class Report:
    """What a conversion did; `lines` is for people."""

    method: str
    form: str
    tensors: int = 0
    quantised: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    error: float = 0.0  # largest relative root-mean-square error of a quantised tensor
    worst: str = ""
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """One fact a line."""
        lines = [f"{self.method} drafter, {self.tensors} tensors -> {self.form}"]
        if self.quantised:
            lines.append(f"quantised {self.quantised} matrices; largest relative error {self.error:.2%} ({self.worst})")
        lines.append(f"weights {self.bytes_before / 1e6:.1f} MB -> {self.bytes_after / 1e6:.1f} MB")
        return [*lines, *self.notes]


def convert_drafter(source: Path, out: Path, *, form: str, scheme: Scheme | None = None, target: Path | None = None) -> Report:
    """Write the drafter of `source` to the new or empty folder `out`.

    form: one of `FORMS`; `scheme` belongs to `mlx`. `target`: the target model's folder, whose LM head turns a stored basis
    into the codes that the other forms of a DSpine drafter hold.
    """
    _check_request(source, out, form, scheme)
    config = load_drafter_config(source)
    if form == "two-file" and config.dspine is None:
        raise DSpineError(f"form two-file is for DSpine drafters; {source} holds a {config.method} drafter")
    tensors = DraftTensors(source, config)
    report = Report(config.method, form, bytes_before=sum(path.stat().st_size for path in source.glob("*.safetensors")))
    stored, overrides = _weights(tensors, config, scheme, report)
    tokens = tensors.draft_tokens()
    if tokens is not None:
        marks = np.zeros(config.vocab_size, dtype=np.bool_)
        marks[tokens] = True
        stored["t2d"] = ("BOOL", marks)
        report.notes.append(f"proposes {len(tokens)} of {config.vocab_size} tokens")
    out.mkdir(parents=True, exist_ok=True)
    if config.dspine is not None:
        stored |= _transfer_space(tensors, config, form, out, target, report)
    write_safetensors(out / "model.safetensors", stored)
    card = _card(source, config, scheme, overrides)
    (out / "config.json").write_text(json.dumps({"config": card} if form == "two-file" else card, indent=2) + "\n")
    if read_mask_embedding(source, config) is not None:
        shutil.copyfile(source / MASK_EMBEDDING, out / MASK_EMBEDDING)
        report.notes.append(f"{MASK_EMBEDDING} copied")
    DraftTensors(out, load_drafter_config(out))  # what was written is read back as strictly as anything else
    report.bytes_after = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    return report


def _check_request(source: Path, out: Path, form: str, scheme: Scheme | None) -> None:
    if form not in FORMS:
        raise DSpineError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if (form == "mlx") != (scheme is not None):
        raise DSpineError("quantised weights are the mlx form: use --form mlx with --bits, or another form without")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DSpineError(f"{out} exists and is not an empty folder: name a new one")
    if out.resolve() == source.resolve():
        raise DSpineError(f"{out} is the source itself: name a new folder")


def _weights(
    tensors: DraftTensors, config: DrafterConfig, scheme: Scheme | None, report: Report
) -> tuple[dict[str, tuple[str, np.ndarray]], dict[str, GroupForm]]:
    """Every trained tensor as it will lie in the file, and the forms of the quantised ones."""
    stored: dict[str, tuple[str, np.ndarray]] = {}
    forms: dict[str, GroupForm] = {}
    for name, shape in expected_tensors(config).items():
        array = tensors.read(name)
        if not np.isfinite(array).all():
            raise CheckpointError(f"{tensors.folder}: {name} is not finite")
        chosen = None if scheme is None else scheme.form(name, shape)
        report.tensors += 1
        if chosen is None:
            stored[name] = ("BF16", bfloat16_bits(array))
            continue
        stem = name.removesuffix(".weight")
        words, scales, biases = quantize_affine(array, chosen.bits, chosen.group_size)
        stored[name] = ("U32", words)
        stored[f"{stem}.scales"], stored[f"{stem}.biases"] = (("BF16", bfloat16_bits(a)) for a in (scales, biases))
        forms[stem] = chosen
        report.quantised += 1
        again = dequantize_affine(words, scales, biases, chosen.bits, chosen.group_size)
        error = float(np.linalg.norm(again - array) / max(float(np.linalg.norm(array)), 1e-30))
        if error > report.error:
            report.error, report.worst = error, name
    return stored, forms


def _transfer_space(
    tensors: DraftTensors, config: DrafterConfig, form: str, out: Path, target: Path | None, report: Report
) -> dict[str, tuple[str, np.ndarray]]:
    """DSpine's codes where the form keeps them: beside the weights, in a file of their own, or as the basis they came from."""
    basis = tensors.transfer_basis()
    if basis is not None and (form == "mlx" or target is None):
        if form == "two-file":
            raise DSpineError("this drafter stores the basis of its codes; form two-file needs the codes: name --target")
        report.notes.append("transfer space kept as its basis")
        arrays = (basis.eigenvectors, basis.eigenvalues, basis.mean)
        return {name: ("F32", array) for name, array in zip(BASIS, arrays, strict=True)}
    codes = tensors.transfer_codes(_head_reader(target, config))
    if form == "two-file":
        write_safetensors(out / "transfer.safetensors", {"codes": ("F32", codes)})
        report.notes.append(f"codes {list(codes.shape)} in transfer.safetensors")
        return {}
    report.notes.append(f"codes {list(codes.shape)} beside the weights")
    return {CODES: ("F32", codes), READY: ("BOOL", np.ones((), dtype=np.bool_))}


def _head_reader(target: Path | None, config: DrafterConfig) -> Callable[[], np.ndarray]:
    """The target's LM head as float32 [V, H], read from its safetensors when it is asked for."""

    def read() -> np.ndarray:
        assert target is not None
        entries = {name: e for path in sorted(target.glob("*.safetensors")) for name, e in read_header(path).items()}
        name = next((name for name in _HEADS if name in entries), None)
        shape = (config.vocab_size, config.hidden_size)
        if name is None or entries[name].shape != shape or f"{name.removesuffix('.weight')}.scales" in entries:
            raise CheckpointError(f"{target}: no plain LM head {list(shape)} there (looked for {', '.join(_HEADS)})")
        return read_tensor(entries[name]).astype(np.float32)

    return read


def _card(source: Path, config: DrafterConfig, scheme: Scheme | None, forms: dict[str, GroupForm]) -> dict[str, Any]:
    card = normalise_card(read_config(source), str(source))
    for key in ("quantization", "quantization_config", "auto_map"):
        card.pop(key, None)
    if config.dspine is not None:
        card["dspine_config"] = config.dspine.card()
        card["architectures"] = ["DSpineDraftModel"]
        card["dflash_config"] = {k: v for k, v in (card.get("dflash_config") or {}).items() if k != BRIDGE}
    card["dtype"] = "bfloat16"
    if scheme is not None:
        general = GroupForm(scheme.bits, scheme.group_size)
        card["quantization"] = asdict(general) | {stem: asdict(form) for stem, form in forms.items() if form != general}
    return card
