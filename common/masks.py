"""Which keys a block row may see: one rule for inference, training and tests.

A drafter's row sits at offset `o` of a block whose anchor stands at position `p` (row 0 is the anchor). Its keys are
context tokens at positions `kv < p` and the rows `j` of its OWN block. Rules and their sources: `docs/formats.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Array = Any

FULL = "full_attention"
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class MaskRule:
    """Visibility in one layer. `causal`: in-block keys j <= o only; `window` W limits the context to p + o - kv < W;
    `window_in_block`: the same distance limit also between block rows; `anchored`: the context limit is p - kv <= W for
    every row of the block (the `speculators` package)."""

    causal: bool
    window: int | None
    window_in_block: bool
    anchored: bool = False

    def context(self, offset: Array, anchor: Array, position: Array) -> Array:
        """Visibility of context token `position` for block row `offset`: bool, by broadcasting."""
        visible = position < anchor
        if self.window is not None and self.anchored:
            visible = visible & (anchor + 0 * offset - position <= self.window)
        elif self.window is not None:
            visible = visible & (anchor + offset - position < self.window)
        return visible

    @property
    def reach(self) -> int | None:
        """Context tokens before the anchor that some row may see; None: all."""
        return self.window if self.window is None or self.anchored else self.window - 1

    def block(self, offset: Array, key_offset: Array) -> Array:
        """Visibility of row `key_offset` of the same block: bool, by broadcasting."""
        visible = (key_offset <= offset) if self.causal else (key_offset == key_offset)
        if self.window is not None and self.window_in_block:
            near = offset - key_offset < self.window
            visible = visible & near if self.causal else visible & near & (key_offset - offset < self.window)
        return visible

    @property
    def sees_whole_block(self) -> bool:
        """True where no in-block mask is needed."""
        return not self.causal and not (self.window is not None and self.window_in_block)


def mask_rule(method: str, layer_type: str, is_causal: bool | None, window: int | None, anchored: bool = False) -> MaskRule:
    """The rule of one layer.

    DSpine is block-causal everywhere. All others: full layers are bidirectional, sliding layers causal, unless `is_causal`
    overrides the causality of every layer. Inside the block a sliding layer also limits the distance, except where
    `is_causal` is absent in SpecForge's own kinds (Domino, DSpark, DSpine), which then limit only the context, and in
    `speculators` files (`anchored`), which never do.
    """
    sliding = layer_type == SLIDING
    in_block = sliding and not anchored and (is_causal is not None or method in ("dflash", "dflash2"))
    if method == "dspine":
        return MaskRule(True, window if sliding else None, sliding and is_causal is True)
    causal = sliding if is_causal is None else is_causal
    return MaskRule(causal, window if sliding else None, in_block, anchored and sliding)
