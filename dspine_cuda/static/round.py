"""One round as device work only: draft, select, begin, correct, finish, accept, commit. Every method can be captured.

What a method leaves for the next one lies in the arena, so that each may be a graph of its own. A slot whose budget is used up
(`remaining` 0) does nothing: rounds launched after a text has ended change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspine.common.acceptance import (
    Verdict,
    accept_greedy,
    accept_point_mass,
    accept_point_mass_logits,
    accept_rejection,
    accept_rejection_dense,
    accept_rejection_logits,
)
from dspine.common.errors import DSpineError
from dspine.common.protocols import DraftRequest, Proposal
from dspine.common.sampling import ACCEPT, DRAFT, DRAW, SamplingParams, token_probabilities
from dspine.common.selection.lengths import LengthTables, RoundLengths, bound_lengths, correct_length, select_length
from dspine.common.settling import REPORT_HEAD, Settled, settle_round
from dspine.common.stepping import place_drafts, round_limits, round_uniforms
from dspine_cuda.static.arena import Arena
from dspine_cuda.static.dense import StaticDense, StaticOutput
from dspine_cuda.static.drafter import StaticDrafter
from dspine_cuda.static.hybrid import StaticHybrid, StaticStage, save_stage, saved_stage
from dspine_cuda.static.steps import put
from dspine_cuda.targets.dense import DenseTarget
from dspine_cuda.targets.hybrid import HybridTarget


@dataclass(frozen=True)
class RoundRules:
    """What is fixed while graphs are captured: acceptance rule, sampling parameters, and the tables of a device-side length
    policy (None: a fixed length). lengths: those that it may choose, and that graphs are captured for (None: all)."""

    rule: str = "greedy"
    sampling: SamplingParams = SamplingParams()
    tables: LengthTables | None = None
    corrected: bool = False  # Eq. 6 on the router's picks too
    lengths: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Report:
    """One slot's round as the host reads it: tokens emitted, of which `accepted` were drafts; the drafts that were verified;
    whether the draft was finite."""

    tokens: list[int]
    accepted: int
    drafts: list[int]
    finite: bool


def read_report(row: np.ndarray) -> Report:
    """One slot's row of `Arena.report`, int32 [4 + 2 W]."""
    rows = (len(row) - REPORT_HEAD) // 2
    emitted, accepted, verified, finite = (int(x) for x in row[:REPORT_HEAD])
    block, tokens = row[REPORT_HEAD : REPORT_HEAD + rows], row[REPORT_HEAD + rows :]
    drafts = block[1 : max(verified, 1)].tolist() if finite else []
    return Report(tokens[:emitted].tolist(), min(accepted, emitted), drafts, bool(finite))


class StaticRound:
    """The steps of one pair on one arena."""

    def __init__(self, target: Any, drafter: Any | None, arena: Arena, rules: RoundRules | None = None) -> None:
        self.arena, self.rules, self.rows = arena, rules or RoundRules(), arena.shape.rows
        self.target = static_target(target, arena)
        self.drafter = StaticDrafter(drafter, arena) if drafter is not None else None
        self._stage: StaticStage | None = None  # room between a graph of `begin` and one of `finish`
        self._drawn: tuple[Tensor | None, Tensor] | None = None  # (candidates, q) of drawn drafts
        self.output: StaticOutput | None = None  # of the newest target step
        self._limit: Tensor | None = None  # drafts that it may accept
        self._settled: Settled | None = None  # by the newest `accept`, for `commit`
        self._widest = torch.full_like(arena.lengths, self.rows)

    # -- the parts ---------------------------------------------------------------------------------------------------------

    def draft(self) -> None:
        """Drafts behind the anchor, into `block`; signals where a policy reads them."""
        rules = self.rules
        drawn = rules.rule == "rejection"
        uniforms = self._uniforms(self.rows - 1)[DRAFT] if drawn else None
        request = DraftRequest(rules.sampling.temperature if drawn else 0.0, uniforms, rules.tables is not None)
        proposal = self.drafter.propose(request)  # type: ignore[union-attr]
        self._place(proposal.tokens, proposal.finite)  # a longer arena (`dspine bench`): what stands behind stays
        if drawn:
            self._drawn = proposal.candidates, proposal.q  # type: ignore[assignment]
        if rules.tables is not None:
            self._select(proposal)

    def anchor_only(self) -> None:
        """A block of the anchor alone."""
        self._place(self.arena.block[:, :0], None)

    def _place(self, tokens: Tensor, finite: Tensor | None) -> None:
        arena = self.arena
        block, flags = place_drafts(tokens, finite, arena.anchor, arena.block, arena.finite)
        put((arena.block, block), (arena.finite, flags))

    def _select(self, proposal: Proposal) -> None:
        """Eq. 5: `nominal` w0, `upper` u and the survival probabilities. A draft that is not finite is verified as far as its
        anchor: its length is 1."""
        arena = self.arena
        choice = select_length(proposal.confidence, proposal.entropy, self._widest, self.rules.tables)  # type: ignore[arg-type]
        room = RoundLengths(arena.nominal, arena.upper, arena.chosen, arena.survival)
        chosen = choice.length, choice.stage_zero, choice.survival
        bounded = bound_lengths(*chosen, arena.finite, arena.remaining, room, self.rows, self.rules.corrected)
        put(*zip(vars(room).values(), vars(bounded).values(), strict=True))

    def begin(self, u: int) -> None:
        """Stage 0 of the first u tokens, kept for `finish`."""
        stage = self.target.begin(self.arena.block[:, :u], self.live(u))
        if isinstance(stage, StaticStage):
            if self._stage is None:
                self._stage = saved_stage(stage, self.rows)
            save_stage(self._stage, stage)

    def correct(self) -> None:
        """Eq. 6: `chosen`, never more than Stage 0 covered."""
        arena, stage = self.arena, self._stage
        assert self.rules.tables is not None and stage is not None and stage.picks is not None
        # Stage 0's length is within the budget already
        found = correct_length(stage.picks, arena.nominal, arena.survival, arena.upper, self.rules.tables)
        arena.chosen.copy_(found)

    def resume(self, w: int) -> None:
        """Stage 1 of the first w tokens after `begin`."""
        stage = self._stage if self._stage is not None else self.arena.block
        self.output = self.target.finish(stage, w, self._bounded(w))

    def forward(self, w: int) -> None:
        """Both stages of w tokens, nothing kept between them."""
        live = self._bounded(w)
        self.output = self.target.finish(self.target.begin(self.arena.block[:, :w], live), w, live)

    def finish(self, w: int) -> None:
        """`resume`, acceptance and commit."""
        self.resume(w)
        self.accept(w)
        self.commit()

    def verify(self, w: int, drafting: bool = True) -> None:
        """`forward`, acceptance and commit. drafting: the drafter's context goes on too."""
        self.forward(w)
        self.accept(w)
        self.commit(drafting)

    # -- whole rounds of a known length ------------------------------------------------------------------------------------

    def drafted(self, w: int) -> None:
        """Draft, verify w tokens, accept, commit."""
        self.draft()
        self.verify(w)

    def plain(self) -> None:
        """Plain decoding: the same machinery over a block of one."""
        self.anchor_only()
        self.verify(1, drafting=False)

    def live(self, w: int) -> Tensor:
        """Rows that count, int32 [B]: the budget's, the length's and (`SlotRound`) the limit's; 0 in slots that have ended."""
        return self._limits(w)[0]

    def _limits(self, w: int) -> tuple[Tensor, Tensor]:
        """(rows that count, drafts that may be accepted), int32 [B] each."""
        arena: Any = self.arena
        return round_limits(arena.remaining, arena.finite, w, arena.limits if arena.is_shared else None)

    def _bounded(self, w: int) -> Tensor:
        """`live`, and what `accept` will need of the same launch."""
        live, self._limit = self._limits(w)
        return live

    # -- acceptance and commit ---------------------------------------------------------------------------------------------

    def accept(self, w: int) -> None:
        """The verdict about the newest output of w tokens; counters and report go on by what it emits."""
        assert self.output is not None
        arena = self.arena
        assert self._limit is not None
        verdict = self._judge(self.output.logits, arena.block[:, 1:w], self._limit)
        self._settled = settle_round(
            verdict.accepted, verdict.next_token, arena.block, arena.finite, arena.counters, arena.stops, arena.report, w
        )
        kept = (*vars(arena.counters).values(), arena.report)
        put(*zip(kept, (*vars(self._settled.counters).values(), self._settled.report), strict=True))

    def commit(self, drafting: bool = True) -> None:
        """Caches go on by what was accepted."""
        assert self.output is not None and self._settled is not None
        if drafting and self.drafter is not None and self.output.features is not None:
            self.drafter.commit(self.output.features, self._settled.m, self._settled.before)
        self.target.commit(self._settled.m)

    def _judge(self, logits: Tensor, draft: Tensor, limit: Tensor) -> Verdict:
        rules, count = self.rules, draft.shape[1]
        if rules.rule == "greedy":
            return accept_greedy(logits, draft, limit)
        lanes = self._uniforms(count + 1)
        uniforms = lanes[ACCEPT][:, :count], lanes[DRAW]
        candidates, q = (None, None) if self._drawn is None or rules.rule == "point-mass" or not count else self._drawn
        if rules.sampling.unfiltered and (q is None or candidates is not None):  # one kernel draws plain tokens and others
            temperature = rules.sampling.temperature
            if q is None:
                return accept_point_mass_logits(logits, draft, limit, *uniforms, temperature)
            return accept_rejection_logits(logits, draft, limit, candidates[:, :count], q[:, :count], *uniforms, temperature)
        p = token_probabilities(logits.to(torch.float32), rules.sampling)
        if q is None:
            return accept_point_mass(p, draft, limit, *uniforms)
        if candidates is None:
            return accept_rejection_dense(p, draft, limit, q[:, :count], *uniforms)
        return accept_rejection(p, draft, limit, candidates[:, :count], q[:, :count], *uniforms)

    def _uniforms(self, count: int) -> Tensor:
        """Uniforms of the next `count` output positions, float32 [3, B, count] by lane."""
        return round_uniforms(self.arena.uniforms, self.arena.generated, count)


def static_target(target: Any, arena: Arena) -> StaticDense | StaticHybrid:
    """The static form of a lean target. DSpineError for any other class."""
    if isinstance(target, DenseTarget):
        return StaticDense(target, arena)
    if isinstance(target, HybridTarget):
        return StaticHybrid(target, arena)
    raise DSpineError(f"a target of class {type(target).__name__} has no static form: lean dense and hybrid decoders have one")
