"""Length policies with a fixed length: verify everything, or at most W tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.errors import DSpineError
from dspine.common.protocols import LengthPolicy, Proposal, StageZero


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


def parse_policy(text: Any) -> LengthPolicy:
    """`full` or `static:W` -> policy; a policy object is returned as it is."""
    if not isinstance(text, str):
        return text
    kind, _, value = text.partition(":")
    if kind == "full" and not value:
        return StaticPolicy()
    if kind == "static" and value.isdigit():
        return StaticPolicy(int(value))
    raise DSpineError(f"policy must be 'full' or 'static:W' (W tokens, the anchor included), got {text!r}")
