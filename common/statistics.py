"""Running figures of one generation: what was drafted, what stayed, where the time went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Statistics:
    """Counters over emitted tokens only: nothing after a stop token is counted. Times are seconds of wall clock.

    `rounds` counts target forwards after the prefill; `mean_acceptance_length` is tokens emitted by rounds over rounds
    (the first token comes from the prefill and is left out), so plain decoding has exactly 1.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt: taken from a prefix cache instead of being computed
    generated_tokens: int = 0
    rounds: int = 0
    plain_rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    proposed_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    verified_lengths: dict[int, int] = field(default_factory=dict)
    non_finite_drafts: int = 0
    drafting_disabled: str | None = None
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_seconds: float = 0.0

    def add_round(self, verified: int, accepted: int, emitted: int) -> None:
        """One round: `verified` drafts looked at, `accepted` of them emitted, `emitted` tokens in all."""
        self.rounds += 1
        self.plain_rounds += verified == 0
        self.drafted_tokens += verified
        self.accepted_tokens += accepted
        self.generated_tokens += emitted
        self.verified_lengths[verified + 1] = self.verified_lengths.get(verified + 1, 0) + 1
        grow = verified - len(self.proposed_at)
        self.proposed_at += [0] * grow
        self.accepted_at += [0] * grow
        for i in range(verified):
            self.proposed_at[i] += 1
            self.accepted_at[i] += i < accepted

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round."""
        return (self.generated_tokens - 1) / self.rounds if self.rounds else 0.0

    @property
    def mean_verified_length(self) -> float:
        """Input tokens that the target verified a round, the anchor included (plain rounds verify 1)."""
        return sum(w * n for w, n in self.verified_lengths.items()) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Entry i-1: share of rounds with at least i drafts verified in which at least i were accepted."""
        return [a / p if p else 0.0 for a, p in zip(self.accepted_at, self.proposed_at, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens after the first, over the time of the rounds (the prefill is reported apart)."""
        return (self.generated_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, derived figures included."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "rounds": self.rounds,
            "plain_rounds": self.plain_rounds,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_by_position": self.acceptance_by_position,
            "mean_verified_length": self.mean_verified_length,
            "verified_lengths": {str(w): n for w, n in sorted(self.verified_lengths.items())},
            "non_finite_drafts": self.non_finite_drafts,
            "drafting_disabled": self.drafting_disabled,
            "prefill_seconds": self.prefill_seconds,
            "draft_seconds": self.draft_seconds,
            "verify_seconds": self.verify_seconds,
            "decode_seconds": self.decode_seconds,
            "tokens_per_second": self.tokens_per_second,
        }
