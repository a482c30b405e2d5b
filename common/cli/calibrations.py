"""What `dspine info` shows of calibration files: those beside the shipped drafters, and whether they fit this machine."""

from __future__ import annotations

from pathlib import Path

from dspine.common.errors import DSpineError
from dspine.common.models import SHIPPED_PAIRS, checkpoints_folder
from dspine.common.runtimes import load_runtime, runtime_names
from dspine.common.selection.calibration import device_class, drafter_hash, load_calibration


def calibration_rows() -> list[tuple[str, str]]:
    """(drafter / file, verdict) for every calibration of a shipped pair; one row that says so where there is none."""
    here = device_classes()
    rows = []
    for pair in SHIPPED_PAIRS:
        folder = checkpoints_folder() / pair.draft
        rows += [(f"{pair.model}: {path.name}", verdict(path, here)) for path in sorted(folder.glob("calibration.*.json"))]
    places = ", ".join(f"{runtime}-{device}" for runtime, device in here)
    return rows or [("none", f"`auto` verifies whole blocks; `dspine calibrate` writes one (here: {places or 'no runtime'})")]


def device_classes() -> list[tuple[str, str]]:
    """(runtime, device class) of everything that can run here."""
    found = []
    for name in runtime_names():
        runtime, state = load_runtime(name)
        if runtime is not None and state.ok:
            names = [device_class(device.partition(":")[0], runtime.accelerator(device)) for device in state.devices]
            found += [(name, device) for device in dict.fromkeys(names)]
    return found


def verdict(path: Path, here: list[tuple[str, str]]) -> str:
    """Whether a file can be used here, in words. Target and dtype are compared when a pair is loaded."""
    try:
        made = load_calibration(path)
    except DSpineError as error:
        return str(error)
    belongs, facts = made.identity, f"{made.rate:.0f} tokens/s, {made.identity.dtype}, {made.provenance.get('date', 'no date')}"
    ours = drafter_hash(path.parent)
    if belongs.drafter != ours:
        return f"does not match: made for drafter weights {belongs.drafter}, these are {ours}"
    if (belongs.runtime, belongs.device) not in here:
        places = ", ".join(f"{runtime} on {device}" for runtime, device in here) or "no runtime"
        return f"for {belongs.runtime} on {belongs.device}; here: {places}"
    policy = "hybridspec" if made.routing is not None else "nominal"
    return f"matches: `auto` takes {policy} on {belongs.runtime}, {belongs.device} ({facts})"
