"""The calibration file of one pair on one runtime and device class: its model, and the checks made on load.

One JSON file beside the drafter (`calibration.<runtime>-<device class>.json`), written by `dspine calibrate`. It holds what
the length policies read (`lengths.LengthTables`), the identity it belongs to, and where it comes from. A file that belongs
to something else is an error that names both sides; nothing is used half.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dspine.common.errors import DSpineError
from dspine.common.protocols import Engine, TargetInfo
from dspine.common.selection.lengths import FEATURES, LengthTables

VERSION = 1
FORMAT = "dspine-calibration"
_SAMPLES, _CHUNK = 64, 1 << 16  # of a weights file that is too large to hash whole
_WHOLE = 64 << 20


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Identity(_Model):
    """What a calibration belongs to. `target_name` and `drafter_name` are for people: a renamed folder still matches.

    target: hash of the target's shape (`target_hash`); drafter: hash of its config and weights (`drafter_hash`);
    device: the class of the device, e.g. `cpu`, `cuda-nvidia-h200`; rounds: what the times are of, `eager` or `graphs`.
    """

    target_name: str
    model_type: str
    target: str
    drafter_name: str
    drafter: str
    runtime: str
    device: str
    dtype: str
    block_size: int = Field(ge=2)
    rounds: Literal["eager", "graphs"] = "eager"


class AcceptanceModel(_Model):
    """isotonic [M][N]: per draft position the calibrated confidence at confidences j / (N - 1); coefficients [6] in the
    order of `lengths.FEATURES`."""

    isotonic: list[list[float]]
    coefficients: list[float]


class CostTable(_Model):
    """Times in seconds. lengths 2..W; measured: median round time at each; rounds: how many were timed; quadratic: c0, c1,
    c2 of the fit; target: C_tgt(w), the fit without its length-independent part `fixed`; stage_zero: s; expert: eta."""

    lengths: list[int]
    measured: list[float]
    rounds: list[int]
    quadratic: list[float]
    target: list[float]
    fixed: float
    stage_zero: float = Field(ge=0)
    expert: float = Field(ge=0)


class RoutingTables(_Model):
    """pairs [W + 1]: mean new (layer, expert) pairs of the token that extends length w; pairs_given [W + 1][k + 1]: the same
    given n new layer-0 experts; correlation: of layer-0 novelty with the later layers', position means removed."""

    experts_per_token: int = Field(ge=1)
    moe_layers: int = Field(ge=1)
    pairs: list[float]
    pairs_given: list[list[float]]
    correlation: float | None = None


class Calibration(_Model):
    """Everything in the file. rate: rho, tokens a second. figures: measured quality (ECE, regret, ...), for reports only."""

    format: Literal["dspine-calibration"] = FORMAT
    version: Literal[1] = VERSION
    identity: Identity
    acceptance: AcceptanceModel
    cost: CostTable
    routing: RoutingTables | None = None
    rate: float = Field(gt=0)
    figures: dict[str, Any] = {}
    provenance: dict[str, Any] = {}

    @model_validator(mode="after")
    def _shapes(self) -> Calibration:
        width = self.identity.block_size
        rows, cost = self.acceptance.isotonic, self.cost
        points = {len(row) for row in rows}
        _require(
            len(rows) == width - 1 and len(points) == 1 and min(points) >= 2, f"acceptance.isotonic needs {width - 1} rows"
        )
        _require(all(0 <= v <= 1 for row in rows for v in row), "acceptance.isotonic must lie in 0..1")
        _require(all(a <= b for row in rows for a, b in zip(row, row[1:], strict=False)), "acceptance.isotonic must not fall")
        _require(len(self.acceptance.coefficients) == len(FEATURES), f"acceptance.coefficients needs {len(FEATURES)} entries")
        _require(cost.lengths == list(range(2, width + 1)), f"cost.lengths must be 2..{width}")
        sizes = {len(cost.measured), len(cost.rounds), len(cost.target)}
        _require(sizes == {width - 1}, f"cost tables need {width - 1} entries")
        _require(
            min(cost.measured) > 0 and len(cost.quadratic) == 3, "cost.measured must be positive, cost.quadratic 3 numbers"
        )
        if self.routing is not None:
            given = {len(row) for row in self.routing.pairs_given}
            sizes = {len(self.routing.pairs), len(self.routing.pairs_given)}
            _require(sizes == {width + 1}, f"routing tables need {width + 1} entries")
            _require(given == {self.routing.experts_per_token + 1}, "routing.pairs_given needs experts_per_token + 1 columns")
        return self

    def tables(self, dtype: Any = np.float64) -> LengthTables:
        """The arrays of the length operations (NumPy); times in seconds."""
        cost = np.array([self.cost.target[0], self.cost.target[0], *self.cost.target], dtype)  # 0 and 1 are never chosen
        pairs = given = None
        if self.routing is not None:
            pairs, given = np.array(self.routing.pairs, dtype), np.array(self.routing.pairs_given, dtype)
        return LengthTables(
            calibration=np.array(self.acceptance.isotonic, dtype),
            coefficients=np.array(self.acceptance.coefficients, dtype),
            cost=cost,
            rate=self.rate,
            stage_zero=self.cost.stage_zero,
            expert=self.cost.expert,
            pairs=pairs,
            pairs_given=given,
        )

    def save(self, path: Path) -> None:
        """Write the file; floats keep 9 digits."""
        text = json.dumps(_rounded(self.model_dump()), indent=1, allow_nan=False)
        path.write_text(re.sub(r"(?<=[\[\d,])\n\s+(?=-?[\d\]])", "", text) + "\n", encoding="utf-8")  # number lists on one line


def _require(condition: bool, words: str) -> None:
    if not condition:
        raise ValueError(words)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def load_calibration(path: Path) -> Calibration:
    """Read and check one file. Raises DSpineError: absent, damaged, of another version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DSpineError(f"calibration {path} cannot be read ({error.strerror}): {_REMEDY}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DSpineError(f"calibration {path} is damaged (no JSON: {error}): {_REMEDY}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise DSpineError(f"{path} is no calibration: expected a JSON object with format {FORMAT!r}. {_REMEDY}")
    if data.get("version") != VERSION:
        found = data.get("version")
        raise DSpineError(f"calibration {path} has version {found!r}, this dspine reads version {VERSION}: {_REMEDY}")
    try:
        return Calibration.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise DSpineError(f"calibration {path} is damaged ({where}: {first['msg']}): {_REMEDY}") from error


_REMEDY = "run `dspine calibrate`, or use --policy full, which needs none"


@dataclass(frozen=True)
class Mismatch:
    """One field in which a calibration and a loaded pair differ."""

    field: str
    file: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.field}: calibrated for {self.file!r}, here {self.here!r}"


def mismatches(calibration: Calibration, here: Identity) -> list[Mismatch]:
    """Fields that differ; hashes are shown with the name they stand for."""
    theirs, ours = calibration.identity, here
    named = {"target": "target_name", "drafter": "drafter_name"}
    found = []
    for field in ("model_type", "target", "drafter", "runtime", "device", "dtype", "block_size", "rounds"):
        left, right = getattr(theirs, field), getattr(ours, field)
        if left != right:
            if field in named:
                left, right = (f"{getattr(side, named[field])} {value}" for side, value in ((theirs, left), (ours, right)))
            found.append(Mismatch(field.replace("_", " "), left, right))
    return found


def check_calibration(calibration: Calibration, here: Identity, path: Path) -> None:
    """DSpineError naming both sides where the calibration belongs to something else."""
    found = mismatches(calibration, here)
    if found:
        raise DSpineError(f"calibration {path} does not belong here ({'; '.join(map(str, found))}): {_REMEDY}")


def identify(engine: Engine) -> Identity:
    """Identity of a loaded pair. Raises DSpineError without a drafter."""
    if engine.drafter is None:
        raise DSpineError("a calibration belongs to a pair, and no drafter is loaded: name one with --draft-model")
    info, folder = engine.target.info, Path(engine.draft_model or "")
    return Identity(
        target_name=info.name,
        model_type=info.model_type,
        target=target_hash(info),
        drafter_name=folder.name,
        drafter=drafter_hash(folder),
        runtime=engine.runtime,
        device=engine.device_class or info.device.partition(":")[0],
        dtype=info.dtype,
        block_size=engine.drafter.config.block_size,
        rounds="graphs" if engine.rounds is not None else "eager",
    )


def calibration_path(engine: Engine) -> Path:
    """Where the file of this pair, runtime and device class lies: in the drafter's folder."""
    here = identify(engine)
    return Path(engine.draft_model or "") / file_name(here.runtime, here.device, here.rounds)


def file_name(runtime: str, device: str, rounds: str = "eager") -> str:
    """`calibration.<runtime>-<device class>.json`, with `-graphs` where the times are of CUDA graphs."""
    return f"calibration.{runtime}-{device}{'' if rounds == 'eager' else '-' + rounds}.json"


def device_class(kind: str, accelerator: str = "") -> str:
    """`cpu`, or the kind with the accelerator's name: ("cuda", "NVIDIA H200") -> `cuda-nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", f"{kind} {accelerator}".lower()).strip("-")


def target_hash(info: TargetInfo) -> str:
    """Hash of what fixes the target's cost and kind: type, layers, widths, quantisation."""
    shape = {key: getattr(info, key) for key in ("model_type", "num_layers", "hidden_size", "vocab_size", "quantization")}
    return _digest(json.dumps(shape, sort_keys=True).encode())


def drafter_hash(folder: Path) -> str:
    """Hash of a drafter folder's config.json and weights."""
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    key = tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.is_file())
    return _hash_files(key)


@lru_cache(maxsize=16)
def _hash_files(key: tuple[tuple[str, int, int], ...]) -> str:
    parts = []
    for name, size, _ in key:
        with open(name, "rb") as file:
            if size <= _WHOLE:
                parts.append(hashlib.sha256(file.read()).digest())
                continue
            for index in range(_SAMPLES):
                file.seek(index * (size - _CHUNK) // (_SAMPLES - 1), os.SEEK_SET)
                parts.append(hashlib.sha256(file.read(_CHUNK)).digest())
        parts.append(str(size).encode())
    return _digest(b"".join(parts))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
