"""Shapes of known pairs: small JSON files with the target's config.json and a drafter's card, no weights."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine.common.errors import CheckpointError, DSpineError

_FOLDER = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Preset:
    """A pair by its shapes. `config` and `drafter` are cards as they would lie in config.json."""

    name: str
    about: str
    config: dict[str, Any]
    drafter: dict[str, Any]


def preset_names() -> list[str]:
    """Names that `--random-weights` takes."""
    return [preset.name for preset in _all()]


def find_preset(name: str) -> Preset:
    """By its whole name or what stands behind the slash, in any case. DSpineError lists the known ones."""
    for preset in _all():
        if name.lower() in (preset.name.lower(), preset.name.rpartition("/")[2].lower()):
            return preset
    raise DSpineError(f"--random-weights {name!r} is not a known preset; known: {', '.join(preset_names())}")


def cut_layers(preset: Preset, layers: int) -> Preset:
    """The first `layers` layers of the target; the drafter's taps move to where they fit, its own depth stays."""
    config, drafter = deepcopy(preset.config), deepcopy(preset.drafter)
    text = config.get("text_config", config)
    deep = text["num_hidden_layers"]
    if not 1 <= layers <= deep:
        raise DSpineError(f"--layers must be 1..{deep} for {preset.name}, got {layers}")
    group = text.get("full_attention_interval", 1)
    if layers % group:
        raise DSpineError(f"--layers must keep whole groups of {group} layers for {preset.name}, got {layers}")
    text["num_hidden_layers"] = layers
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:layers]
    taps = drafter["dflash_config"]["target_layer_ids"]
    drafter["num_target_layers"] = layers
    # as many taps as before, so that the drafter's shapes stay; on a shallow target the same layer is read more than once
    drafter["dflash_config"]["target_layer_ids"] = [tap * layers // deep for tap in taps]
    return Preset(f"{preset.name} cut to {layers} of {deep} layers", preset.about, config, drafter)


def plain_drafter(preset: Preset) -> Preset:
    """The same backbone as a causal DFlash drafter: no injection, no refinement. What they cost is the difference."""
    drafter = {key: value for key, value in preset.drafter.items() if key != "dspine_config"}
    drafter["architectures"] = ["DFlashDraftModel"]
    return Preset(preset.name, preset.about, preset.config, drafter)


def _all() -> list[Preset]:
    found = []
    for path in sorted(_FOLDER.glob("*.json")):
        try:
            found.append(Preset(**json.loads(path.read_text(encoding="utf-8"))))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{path}: damaged preset ({error}); reinstall dspine") from error
    return found
