"""Length policies by name. `full` and `static:W` need nothing; the others read a calibration (`calibrated`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.errors import DSpineError
from dspine.common.protocols import LengthPolicy, Proposal, StageZero
from dspine.common.selection.calibrated import CALIBRATED
from dspine.common.selection.calibration import Calibration

AUTO_POLICY = "auto"


@dataclass(frozen=True)
class StaticPolicy:
    """Verify at most `length` input tokens (the anchor included); None verifies the whole block."""

    length: int | None = None
    needs_signals: bool = False
    reads_draft_tokens: bool = False

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise DSpineError(f"policy static:W needs W of at least 1 (1 is plain decoding), got {self.length}")

    @property
    def name(self) -> str:
        return "full" if self.length is None else f"static:{self.length}"

    def nominal(self, proposal: Proposal, limit: int) -> int:
        return limit if self.length is None else min(self.length, limit)

    def stage_zero_length(self, nominal: int, limit: int) -> int:
        return nominal

    def correct(self, stage: StageZero, nominal: int, limit: int) -> int:
        return nominal


def parse_policy(text: Any, calibration: Calibration | None = None) -> LengthPolicy:
    """A name -> policy; a policy object is returned as it is. `auto` is decided by `choose.choose_policy`, not here.

    Raises DSpineError: an unknown name, or one that needs a calibration where none was given.
    """
    if not isinstance(text, str):
        return text
    kind, _, value = text.partition(":")
    if kind == "full" and not value:
        return StaticPolicy()
    if kind == "static" and value.isdigit():
        return StaticPolicy(int(value))
    if text in CALIBRATED:
        if calibration is None:
            raise DSpineError(f"policy {text!r} needs a calibration of this pair: run `dspine calibrate`, or use --policy full")
        return CALIBRATED[text](calibration)
    names = ", ".join(CALIBRATED)
    raise DSpineError(f"policy must be 'full' or 'static:W' (W tokens, the anchor included), or auto, {names}; got {text!r}")


def check_policy_name(text: Any) -> bool:
    """Check a name before anything is loaded; returns whether the policy reads drafted tokens (`auto` adapts, so False)."""
    if isinstance(text, str) and text in CALIBRATED:
        return CALIBRATED[text].reads_draft_tokens
    return text != AUTO_POLICY and parse_policy(text).reads_draft_tokens
