"""Training state on disk: written beside and renamed, newest kept, exact to resume from."""

from __future__ import annotations

import errno
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dspine.common.errors import DSpineError
from dspine.common.files import write_whole

_FULL = 1 << 26  # bytes: a disk with less has no room for a checkpoint


def checkpoint_path(folder: Path, step: int) -> Path:
    """File of one step's checkpoint."""
    return folder / f"step-{step:08d}.pt"


def save_checkpoint(folder: Path, state: dict[str, Any], keep: int) -> Path:
    """`state["step"]` names the file; older ones beyond `keep` go once the new one is whole."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(file: BinaryIO) -> None:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch reports a failed write of its own archive without the reason
            if shutil.disk_usage(folder).free > _FULL:
                raise
            raise OSError(errno.ENOSPC, str(error)) from error

    path = write_whole(checkpoint_path(folder, state["step"]), write, "run it again with --resume")
    for old in sorted(folder.glob("step-*.pt"))[:-keep]:
        old.unlink()
    return path


def load_latest(
    folder: Path, fingerprint: dict[str, Any], complete: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> dict[str, Any] | None:
    """The newest checkpoint, or None where there is none; one of another configuration is an error. `complete` adds to an older
    fingerprint what it could not know."""
    files = sorted(folder.glob("step-*.pt"))
    if not files:
        return None
    try:
        state = torch.load(files[-1], map_location="cpu", weights_only=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise DSpineError(
            f"{files[-1]}: not a readable checkpoint ({' '.join(str(error).split())[:120]}); delete it to use an older one"
        ) from error
    stored = json.loads(json.dumps(complete(json.loads(state["fingerprint"]))))
    wanted = json.loads(json.dumps(fingerprint))
    if stored != wanted:
        changed = sorted(differences(stored, wanted))
        raise DSpineError(
            f"{files[-1]}: made with other settings ({'; '.join(changed)}); use another run.output_dir or the old settings"
        )
    return state


def check_data(state: dict[str, Any], facts: dict[str, Any], folder: Path) -> None:
    """DSpineError where a checkpoint's run was begun with other data (`data_facts`; older checkpoints do not say)."""
    changed = differences(state.get("data", facts), facts, "data")
    if changed:
        raise DSpineError(
            f"{folder}: the data is not that which the run was begun with ({'; '.join(changed)}): put it back, or begin "
            f"another run (model.start_from goes on from an exported drafter)"
        )


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """`section.key: OLD there, NEW now` of every value that differs in two nested dictionaries."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            d
            for key in sorted(set(old) | set(new))
            for d in differences(old.get(key), new.get(key), f"{name}.{key}".strip("."))
        ]
    return [] if old == new else [f"{name}: {old!r} there, {new!r} now"]


def trim_metrics(path: Path, step: int, last: int | None = None) -> None:
    """Drop lines of steps beyond `step`, so that a resumed run's file has every step once; where `step` is the `last` one, its
    evaluation and end too, which are made again."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the line that was being written when the run was killed
            continue
        again = step == last and row.get("step") == last and row.get("kind") in ("eval", "end")
        if row.get("step", 0) <= step and not again:
            kept.append(line)
    temporary = path.with_suffix(".part")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(path)
