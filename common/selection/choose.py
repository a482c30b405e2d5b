"""From what was asked for (`--policy`, `--calibration`) to a policy for a loaded pair, with the reason in words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dspine.common.configs import PATH_SIGNALS
from dspine.common.errors import DSpineError
from dspine.common.protocols import Engine, LengthPolicy
from dspine.common.selection.calibrated import CALIBRATED
from dspine.common.selection.calibration import Calibration, calibration_path, check_calibration, identify, load_calibration
from dspine.common.selection.policies import AUTO_POLICY, StaticPolicy, parse_policy


@dataclass(frozen=True)
class PolicyChoice:
    """policy, why it was taken, and the calibration file it reads (None for full and static)."""

    policy: LengthPolicy
    reason: str
    path: Path | None = None


def choose_policy(
    text: Any, engine: Engine, *, calibration: str | Path | None = None, acceptance: str = "auto", draft: bool = True
) -> PolicyChoice:
    """The policy for this pair. A policy that was named and cannot be had is an error; only `auto` falls back, with a reason.

    auto: `hybridspec` where a valid calibration lies beside the drafter and the target has a router, `nominal` where it has
    none (or where acceptance `rejection` was asked for, which hybridspec excludes), else `full`.
    """
    if not isinstance(text, str):
        return PolicyChoice(text, "given as an object")
    if text in CALIBRATED and draft:
        path = Path(calibration) if calibration is not None else calibration_path(engine)
        if calibration is None and not path.is_file():
            raise DSpineError(
                f"policy {text!r} needs a calibration, and there is no {path.name} beside the drafter: "
                "run `dspine calibrate`, name one with --calibration, or use --policy full"
            )
        return PolicyChoice(parse_policy(text, _checked(engine, path)), f"asked for, with {path.name}", path)
    if text != AUTO_POLICY:
        return PolicyChoice(parse_policy(text) if text not in CALIBRATED else StaticPolicy(), "asked for")
    return _automatic(engine, calibration, acceptance, draft)


def _automatic(engine: Engine, calibration: str | Path | None, acceptance: str, draft: bool) -> PolicyChoice:
    if engine.drafter is None or not draft:
        return PolicyChoice(StaticPolicy(), "auto: nothing is drafted")
    if calibration is not None:  # a file that was named must fit
        path = Path(calibration)
        found = _checked(engine, path)
    else:
        path = calibration_path(engine)
        if not path.is_file():
            return PolicyChoice(StaticPolicy(), f"auto: no {path.name} beside the drafter")
        try:
            found = _checked(engine, path)
        except DSpineError as error:
            return PolicyChoice(StaticPolicy(), f"auto: {error}")
    if acceptance == "rejection" and getattr(engine.drafter.config, "method", None) in PATH_SIGNALS:
        reason = (
            "auto: acceptance 'rejection' excludes every policy that reads this drafter's signals, which follow its drawn path"
        )
        return PolicyChoice(StaticPolicy(), reason)
    if found.routing is None:
        return PolicyChoice(parse_policy("nominal", found), f"auto: {path.name} fits, the target has no router", path)
    if acceptance == "rejection":
        reason = f"auto: {path.name} fits; acceptance 'rejection' excludes the routing correction"
        return PolicyChoice(parse_policy("nominal", found), reason, path)
    return PolicyChoice(parse_policy("hybridspec", found), f"auto: {path.name} fits, the target has a router", path)


def _checked(engine: Engine, path: Path) -> Calibration:
    stamp = path.stat().st_mtime_ns if path.is_file() else 0
    found = _load(path, stamp)
    check_calibration(found, identify(engine), path)
    return found


@lru_cache(maxsize=8)
def _load(path: Path, stamp: int) -> Calibration:
    return load_calibration(path)
