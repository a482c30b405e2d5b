"""How many tokens the sequences of a batch verify: the rules against plain readings of them, and simulated rounds in which
speculation must never cost more than looking at it now and then (no clocks: every cost is a formula)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.common.protocols import Proposal
from dspine.common.selection.calibrated import HybridSpecPolicy, LengthModel, NominalPolicy, uncorrected
from dspine.common.selection.policies import StaticPolicy
from dspine.common.serving.lengths import DRAFT_EVERY, PLAIN_EVERY, BatchLengths, CostTable, Turns
from dspine.common.serving.shared import SHARED, SharedLengths
from tests.helpers.calibrations import calibration

RULES = [BatchLengths, SharedLengths]


class Sequence:
    """What the rules know of a loop, and the truth: `accepts`, the chance of each draft."""

    def __init__(self, accepts=0.5, policy=None, room=96):
        self.policy, self.accepts, self.room = policy or StaticPolicy(), accepts, room


def plain_proposal(confidence=None, entropy=None):
    rows = [None if x is None else np.asarray(x, np.float32)[None] for x in (confidence, entropy)]
    return Proposal(np.zeros((1, 15), np.int32), np.array([True]), confidence=rows[0], entropy=rows[1])


def table(verify, draft, sizes=(2, 4, 8), widths=(1, 2, 4, 8, 12, 16)):
    return CostTable({(b, w): verify(b, w) for b in sizes for w in widths}, {b: draft(b) for b in sizes})


def test_lengths_follow_the_costs():
    """Free rows: verify all. Dear rows: decode plainly. In between: the likelier sequence gets the drafts."""
    loops = [Sequence(), Sequence()]
    free = BatchLengths(CostTable({(b, w): 1.0 for b in (2, 4) for w in (1, 8)}, {2: 0.1, 4: 0.1}))
    assert free.choose(loops, [8, 5]) == [8, 5] and free.choose(loops, [1, 1]) == [1, 1]
    dear = BatchLengths(CostTable({(b, w): float(b * w) for b in (2, 4) for w in (1, 8)}, {2: 1.0, 4: 1.0}))
    assert dear.choose(loops, [8, 8]) == [1, 1]
    assert dear.choose(loops, [8, 8], [True, False])[0] == 8  # pinned: its round boundaries may not depend on the clock
    some = BatchLengths(CostTable({(2, w): 1.0 + 0.12 * w for w in (1, 8)}, {2: 0.05}))
    for _ in range(30):
        some.observe(loops[0], 4, 4)
        some.observe(loops[1], 4, 0)
    first, second = some.choose(loops, [8, 8])
    assert first == 8 and second == 1
    before = some.rate(loops[1])
    for _ in range(200):
        some.observe(loops[1], 0, 0)
    assert some.rate(loops[1]) > before  # hope comes back, so it is tried again


def test_cost_table_follows_the_machine():
    table = CostTable({(2, 1): 1.0, (2, 8): 2.0, (4, 1): 1.5, (4, 8): 4.0}, {2: 0.5, 4: 0.8})
    assert table.verify_seconds(2, np.array([2, 16])).tolist() == [1.0, 2.0]
    assert table.verify_seconds(3, np.array([3]))[0] == pytest.approx(1.25)
    assert table.verify_seconds(8, np.array([8]))[0] == pytest.approx(3.0)
    for _ in range(200):
        table.observe(2, 2, 3.0, 2, 0.25)
    assert table.verify_seconds(2, np.array([2]))[0] == pytest.approx(3.0, rel=1e-3)
    assert table.draft_seconds(2) == pytest.approx(0.25, rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), batch=st.integers(2, 8))
def test_shared_length_is_the_best_of_the_papers(seed, batch):
    """argmax over {2, 4, 8, 12, 16} of sum G_b(w) - rho C(w), written out: any costs (not monotone), calibrated and other
    policies side by side, rows with less room, rows that decode plainly, pinned rows."""
    rng = np.random.default_rng(seed)
    made = calibration(16, seed=seed % 7)
    policies = [NominalPolicy(made), HybridSpecPolicy(made), StaticPolicy(), StaticPolicy(5)]
    loops = [Sequence(policy=policies[rng.integers(4)]) for _ in range(batch)]
    seconds = {w: float(rng.uniform(0.5, 3.0)) for w in (1, *SHARED)}
    rule = SharedLengths(CostTable({(batch, w): s for w, s in seconds.items()}, {batch: 0.3}))
    limits = [int(rng.integers(2, 17)) for _ in loops]
    pinned = [bool(rng.random() < 0.2) for _ in loops]
    proposals = [None if rng.random() < 0.2 else plain_proposal(rng.random(15), rng.exponential(size=15)) for _ in loops]
    rates = [float(rng.uniform(0.1, 0.95)) for _ in loops]
    for loop, rate in zip(loops, rates, strict=True):
        rule._rates[loop] = rate
    price = float(rng.uniform(0.1, 4.0)) * batch
    rule.observe_round(batch, price * 10.0, 10.0)

    def rows_at(w):
        rows = []
        for loop, limit, proposal, is_pinned in zip(loops, limits, proposals, pinned, strict=True):
            own = limit if not isinstance(loop.policy, StaticPolicy) else min(limit, loop.policy.length or limit)
            if is_pinned and proposal is not None and not isinstance(loop.policy, StaticPolicy):
                own = loop.policy.nominal(proposal, limit)
            rows.append(1 if proposal is None else own if is_pinned else min(w, own))
        return rows

    def score(w):
        rows, gain = rows_at(w), 0.0
        for loop, rate, proposal, is_pinned, count in zip(loops, rates, proposals, pinned, rows, strict=True):
            chance, total = 1.0, 1.0
            model = LengthModel(made.acceptance)
            read = not isinstance(loop.policy, StaticPolicy) and proposal is not None and not is_pinned
            each = model.conditional(proposal.confidence[0].astype(float), proposal.entropy[0].astype(float)) if read else None
            for i in range(count - 1):
                chance *= each[i] if read else rate
                total += chance
            gain += total
        per_row = sum(rows) / batch
        return gain - price * float(np.interp(per_row, [1, *SHARED], [seconds[w] for w in (1, *SHARED)]))

    got = rule.refine(loops, limits, limits, proposals, pinned)
    most = max((n for n, is_pinned in zip(rows_at(16), pinned, strict=True) if not is_pinned), default=1)
    if most > 1:
        options = [w for w in SHARED if w < most] + [next(w for w in SHARED if w >= most)]
        assert got in [rows_at(w) for w in options]
        best = max(score(w) for w in options)
        assert score(next(w for w in options if rows_at(w) == got)) == pytest.approx(best, rel=1e-9)
    else:
        assert got == rows_at(2)


def simulate(rule, accepts, verify, draft, *, batch=8, limit=16, rounds=600, warm=150, seed=0):
    """Tokens a second over rounds that really take verify(batch, mean rows) and draft(batch), and the share of drafted
    rounds, without the first `warm`. Answers are 96 tokens long, then another sequence comes."""
    rng = np.random.default_rng(seed)
    loops, tokens, seconds, drafted = [Sequence(accepts) for _ in range(batch)], 0, 0.0, 0
    for number in range(rounds):
        limits = [min(limit, loop.room) for loop in loops]
        lengths = rule.choose(loops, limits)
        proposals = [plain_proposal() if length > 1 else None for length in lengths]
        lengths = rule.refine(loops, lengths, limits, proposals)
        drafting = sum(proposal is not None for proposal in proposals)
        took = verify(batch, sum(lengths) / batch), draft(drafting) if drafting else 0.0
        found = 0
        for i, (loop, length) in enumerate(zip(loops, lengths, strict=True)):
            accepted = 0
            while accepted < length - 1 and rng.random() < loop.accepts:
                accepted += 1
            rule.observe(loop, length - 1, accepted)
            found += accepted + 1
            loop.room -= accepted + 1
            if loop.room <= 0:
                loops[i] = Sequence(accepts)
        rule.costs.observe(batch, sum(lengths), took[0], drafting, took[1])
        rule.observe_round(batch, found, sum(took))
        if number >= warm:
            tokens, seconds, drafted = tokens + found, seconds + sum(took), drafted + (drafting > 0)
    return tokens / seconds, drafted / (rounds - warm)


def fixed_length(w, accepts, verify, draft, batch=8):
    """Tokens a second at one length for ever."""
    return batch * sum(accepts**i for i in range(w)) / (verify(batch, w) + (draft(batch) if w > 1 else 0.0))


COSTS = {  # seconds: verify(batch, rows a sequence), draft(batch)
    "a small model on a CPU": (lambda b, w: 0.040 + 0.003 * b + 0.0006 * b * (w - 1), lambda b: 0.012 + 0.004 * b),
    "rows are dear": (lambda b, w: 0.02 + 0.005 * b * w, lambda b: 0.01 + 0.002 * b),
    "rows are free": (lambda b, w: 0.05 + 0.0001 * b * w, lambda b: 0.002),
    "experts": (lambda b, w: 0.02 + 0.008 * (b * w) ** 0.7, lambda b: 0.004 + 0.001 * b),
}
WRONG = {  # what start-up measured, over the truth: (plain rounds, everything drafted)
    "right": (1.0, 1.0), "plain too dear": (2.0, 1.0), "plain too cheap": (0.5, 1.0), "drafts too cheap": (1.0, 0.5),
    "drafts too dear": (1.0, 3.0),
}  # fmt: skip


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("wrong", WRONG)
def test_eight_sequences_never_lose_by_speculation(kind, costs, wrong):
    """At 8 sequences: at least plain decoding (less what looking at drafts now and then takes), and near the best fixed
    length where drafts pay, whatever the drafter is worth and however wrong the measurement at start-up was."""
    verify, draft = COSTS[costs]
    plain_factor, draft_factor = WRONG[wrong]
    for accepts in (0.05, 0.5, 0.8):
        measured = table(
            lambda b, w: verify(b, w) * (plain_factor if w == 1 else draft_factor), lambda b: draft(b) * draft_factor
        )
        got, _ = simulate(kind(measured), accepts, verify, draft)
        plain = fixed_length(1, accepts, verify, draft)
        best = max(fixed_length(w, accepts, verify, draft) for w in range(1, 17))
        assert got >= 0.96 * plain, accepts
        assert got >= 0.90 * best, accepts


@pytest.mark.parametrize("kind", RULES)
def test_drafting_is_decided_per_batch_size(kind):
    """The same drafts at the same costs: worth it for 2 sequences, not for 8."""
    verify, draft = (lambda b, w: 0.04 + 0.004 * b * w), (lambda b: 0.004 * b)
    rates = {}
    for batch in (2, 8):
        got, drafted = simulate(kind(table(verify, draft)), 0.55, verify, draft, batch=batch)
        rates[batch] = got / fixed_length(1, 0.55, verify, draft, batch), drafted
    assert rates[2][0] > 1.15 and rates[2][1] > 0.8
    assert rates[8][0] > 0.96 and rates[8][1] < 0.1


def test_price_is_the_pooled_throughput_of_its_batch_size():
    rule = SharedLengths(table(lambda b, w: 1.0 + 0.1 * w, lambda b: 0.5))
    rule.plan([Sequence(), Sequence()], [8, 8])
    assert rule.throughput(2) == rule._expected > 0  # nothing seen yet: what was planned
    for _ in range(400):
        rule.observe_round(2, 6, 2.0)
        rule.observe_round(4, 6, 3.0)
    assert rule.throughput(2) == pytest.approx(3.0) and rule.throughput(4) == pytest.approx(2.0)
    for _ in range(400):
        rule.observe_round(2, 4, 2.0)
    assert rule.throughput(2) == pytest.approx(2.0, rel=1e-2)


def test_a_hiccup_moves_nothing():
    costs = table(lambda b, w: 1.0 + 0.1 * w, lambda b: 0.5)
    for _ in range(10):
        costs.observe(2, 2, 1.1, 0, 0.0)
    costs.observe(2, 2, 50.0, 0, 0.0)
    assert costs.plain_scale.value == pytest.approx(1.0) and costs.verify_scale.value == 1.0


def test_turns_are_rare():
    turns = Turns(64)
    due = [i for i in range(1000) if turns.due(True)]
    assert np.diff([-1, *due]).tolist()[:4] == [8, 16, 32, 64] and set(np.diff(due[3:])) == {64}
    assert not any(Turns(64).due(i % 7 > 0) for i in range(1000))  # the other kind was seen anyway
    assert PLAIN_EVERY >= 100 and DRAFT_EVERY >= 100  # a look costs at most some per cent of so many rounds


def test_repeatable_requests_get_no_routing_correction():
    made = calibration(16)
    corrected, nominal = HybridSpecPolicy(made), NominalPolicy(made)
    assert type(uncorrected(corrected)) is NominalPolicy and uncorrected(nominal) is nominal
    proposal = plain_proposal(np.linspace(0.9, 0.3, 15), np.linspace(0.1, 2.0, 15))
    assert uncorrected(corrected).nominal(proposal, 16) == nominal.nominal(proposal, 16)
