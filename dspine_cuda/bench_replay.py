"""Static rounds whose acceptance and lengths come from a trace: tables on the device and a counter of rounds.

Everything is computed as ever and only then replaced: the verdict's count, and the lengths that Eq. 5 and Eq. 6 chose. So a
replayed round runs the graphs that a calibrated policy runs, and the host knows no more of its lengths than it knows of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dspine.common.acceptance import Verdict
from dspine.common.bench.contenders import TracePolicy
from dspine.common.decoding import DecodingParams
from dspine.common.protocols import LengthPolicy
from dspine.common.selection.lengths import FEATURES, LengthTables
from dspine.common.selection.policies import StaticPolicy
from dspine_cuda.graphs import POLICY
from dspine_cuda.static.arena import Arena
from dspine_cuda.static.loop import GraphDecoder, Plan
from dspine_cuda.static.round import RoundRules, StaticRound
from dspine_cuda.targets.moe import SparseMlp

POINTS = 101  # of a calibration's tables, as `dspine calibrate` writes them


@dataclass(frozen=True)
class ReplayRules(RoundRules):
    """counts: drafts that rounds accept, one after another and around again (None: their own verdict). sequence: tokens that
    they verify, likewise (empty: whatever the mode says)."""

    counts: tuple[int, ...] | None = None
    sequence: tuple[int, ...] = ()


class ReplayedRound(StaticRound):
    """A round by `ReplayRules`. Of a length's drafts no more are accepted than were verified; Stage 0 takes the length that is
    verified, for a trace holds no other."""

    rules: ReplayRules

    def __init__(self, target: Any, drafter: Any, arena: Arena, rules: ReplayRules) -> None:
        super().__init__(target, drafter, arena, rules)
        self.turn = torch.zeros(1, dtype=torch.int64, device=arena.device)
        self.counts = self._table(rules.counts)
        self.lengths = self._table(rules.sequence)

    def _table(self, values: tuple[int, ...] | None) -> Tensor | None:
        return torch.tensor(values, dtype=torch.int32, device=self.arena.device) if values else None

    def restart(self) -> None:
        """The next round is the tables' first."""
        self.turn.zero_()

    def draft(self) -> None:
        """`StaticRound.draft`, then this round's length in place of the one that was selected."""
        super().draft()
        if self.lengths is not None:
            length = self._now(self.lengths)
            for place in (self.arena.nominal, self.arena.upper, self.arena.chosen):
                place.copy_(length)

    def correct(self) -> None:
        """`StaticRound.correct`, then this round's length in place of the corrected one."""
        super().correct()
        if self.lengths is not None:
            self.arena.chosen.copy_(self._now(self.lengths))

    def _now(self, table: Tensor) -> Tensor:
        return table.index_select(0, self.turn % len(table))

    def _judge(self, logits: Tensor, draft: Tensor, limit: Tensor) -> Verdict:
        verdict = super()._judge(logits, draft, limit)
        if self.counts is not None:
            count = self._now(self.counts).to(verdict.accepted.dtype)
            verdict = Verdict(torch.minimum(count, limit.to(count.dtype)), verdict.next_token)
        self.turn.add_(1)
        return verdict


class BenchDecoder(GraphDecoder):
    """A decoder that can replay acceptance (`counts`, None: the pair's own) and the lengths of a trace."""

    counts: tuple[int, ...] | None = None
    _neutral: LengthTables | None = None

    def make_round(self, rules: RoundRules) -> StaticRound:
        """Replayed where the rules say so."""
        if not isinstance(rules, ReplayRules):
            return super().make_round(rules)
        assert self.arena is not None
        return ReplayedRound(self.target, self.drafter, self.arena, rules)

    def idle_arena(self, tokens: int) -> Arena:
        """The arena for so many tokens, emptied, nothing in flight."""
        self.prepare(tokens)
        assert self.arena is not None
        for runner in self._runners.values():
            runner.drop()
        self.arena.rewind()
        return self.arena

    def runner_key(self, plan: Plan) -> tuple[Any, ...]:
        """Graphs hold the tables too."""
        rules = plan.rules
        more = (rules.counts, rules.sequence) if isinstance(rules, ReplayRules) else (None, ())
        return *super().runner_key(plan), *more

    def plan(self, params: DecodingParams, policy: LengthPolicy, drafter: Any | None) -> Plan | str:
        """A trace runs as a policy of the device does: its lengths are a table there, with graphs for those that occur."""
        traced = isinstance(policy, TracePolicy) and drafter is not None
        found = super().plan(params, StaticPolicy() if traced else policy, drafter)
        if isinstance(found, str) or drafter is None or not (traced or self.counts):
            return found
        rules = ReplayRules(**vars(found.rules), counts=self.counts)
        if not traced:
            return Plan(found.mode, rules)
        most = drafter.config.block_size
        sequence = tuple(min(length, most) for length, _ in policy.trace.rounds)  # type: ignore[attr-defined]
        lengths = tuple(sorted(set(sequence)))
        if self._neutral is None:
            self._neutral = neutral_tables(self.target, drafter)
        rules = replace(rules, tables=self._neutral, corrected=True, lengths=lengths, sequence=sequence)
        return Plan(POLICY, rules)


def neutral_tables(target: Any, drafter: Any) -> LengthTables:
    """Tables of a calibration's shape, all zeros: what they choose is replaced, so only the work of choosing counts."""
    longest = drafter.config.num_proposals + 1
    layers = getattr(target, "layers", ())
    picks = next((layer.mlp.top_k for layer in layers if isinstance(getattr(layer, "mlp", None), SparseMlp)), 1)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, device=target.device)

    return LengthTables(
        calibration=zeros(longest - 1, POINTS), coefficients=zeros(len(FEATURES)), cost=zeros(longest + 1), rate=0.0,
        pairs=zeros(longest + 1), pairs_given=zeros(longest + 1, picks + 1),
    )  # fmt: skip
