"""Acceptance traces: how many drafts of each round a real pair accepted, to be replayed where weights are random."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspine.common.errors import DSpineError

FORMAT, VERSION = "dspine-acceptance-trace", 1
SHIPPED = Path(__file__).parent / "traces"


@dataclass(frozen=True)
class Trace:
    """rounds: (input tokens verified, drafts accepted) of each, in order. `source` says which pair, where and when."""

    block_size: int
    rounds: tuple[tuple[int, int], ...]
    source: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def acceptance_length(self) -> float:
        """Tokens a round."""
        return 1 + sum(accepted for _, accepted in self.rounds) / len(self.rounds)

    def label(self) -> str:
        """One line for every output that rests on it, with the policy it was recorded under and whose costs that read."""
        pair = " with ".join(str(self.source[key]) for key in ("model", "drafter") if key in self.source) or "an unnamed pair"
        found = (
            f"acceptance REPLAYED from {self.name}: {len(self.rounds)} rounds of {pair}, {self.acceptance_length:.2f} a round"
        )
        if "policy" in self.source:
            costs = f" by the costs of {self.source['costs']}" if "costs" in self.source else ""
            found += f", recorded under policy {self.source['policy']}{costs}"
        return found


def save_trace(path: Path, block_size: int, rounds: Sequence[tuple[int, int]], source: dict[str, Any]) -> None:
    """Write a trace file. DSpineError where there is no whole round or no place to write."""
    if not rounds:
        raise DSpineError("--record-trace: no whole round was drafted, so there is nothing to record; take more --tokens")
    card = {"format": FORMAT, "version": VERSION, "source": source, "block_size": block_size, "rounds": [*map(list, rounds)]}
    try:
        path.write_text(json.dumps(card) + "\n", encoding="utf-8")
    except OSError as error:
        raise DSpineError(f"--record-trace {path}: cannot be written ({error})") from error


def load_trace(name: str | Path) -> Trace:
    """A file, or the name of a shipped trace. DSpineError says what was expected and found."""
    path = Path(name)
    shipped = SHIPPED / f"{name}.json"
    if not path.is_file() and shipped.is_file():
        path = shipped
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        known = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.json")))
        raise DSpineError(
            f"--trace {str(name)!r}: no readable JSON file ({error}); expected what `dspine bench --record-trace` wrote, or a "
            f"shipped trace: {known}"
        ) from error
    if not isinstance(card, dict) or card.get("format") != FORMAT or card.get("version") != VERSION:
        raise DSpineError(f"--trace {path}: not a {FORMAT} of version {VERSION}; record one with `dspine bench --record-trace`")
    block, rounds = card.get("block_size"), card.get("rounds")
    whole = isinstance(block, int) and block > 1 and isinstance(rounds, list) and rounds
    if not whole or not all(_round_fits(item, block) for item in rounds):
        raise DSpineError(
            f"--trace {path}: expected block_size above 1 and rounds as [verified, accepted], accepted < verified <= block_size"
        )
    return Trace(block, tuple((v, a) for v, a in rounds), dict(card.get("source") or {}), path.name)


def _round_fits(item: Any, block: int) -> bool:
    if not (isinstance(item, list) and len(item) == 2 and all(type(n) is int for n in item)):
        return False
    return 0 <= item[1] < item[0] <= block
