"""The budgets of `docs/mac.md`: graph nodes of a steady-state round, for shapes of real pairs, without their weights."""

from __future__ import annotations

import re

import pytest

from tests.mlx.weightless import PAIRS, round_cost
from tests.packaging.tree import ROOT

ROW = re.compile(r"^\| ([^|]+?) " + r"\| ([\d,]+) " * 6 + r"\|", re.MULTILINE)
SLACK = 0.1  # budgets lie at most this far above what is counted: a stale one is as wrong as one that is passed


def budgets() -> dict[str, tuple[int, ...]]:
    """Table row -> nodes of draft, verify, commit, all, of a plain round, and of mlx-lm's one-token step."""
    text = (ROOT / "docs" / "mac.md").read_text()
    return {name: tuple(int(n.replace(",", "")) for n in numbers) for name, *numbers in ROW.findall(text)}


def test_every_pair_has_a_budget():
    assert set(budgets()) == set(PAIRS)


@pytest.mark.parametrize("name", PAIRS)
def test_rounds_stay_within_their_budgets(name, monkeypatch):
    cost = round_cost(name, monkeypatch)
    draft, verify, commit, total, single, plain = budgets()[name]
    for phase, counted, budget in (
        ("draft", cost.draft, draft),
        ("verify", cost.verify, verify),
        ("commit", cost.commit, commit),
        ("round", cost.total, total),
        ("plain round", cost.single, single),
    ):
        assert (1 - SLACK) * budget <= counted <= budget, f"{name}, {phase}: {counted} nodes, budget {budget}"
    assert abs(cost.plain - plain) <= SLACK * plain and cost.single <= cost.plain, "plain decoding hands over more than mlx-lm"


@pytest.mark.parametrize("name", PAIRS)
def test_compiling_makes_the_graph_smaller(name, monkeypatch):
    compiled, plain = (round_cost(name, monkeypatch, compiled=on) for on in (True, False))
    assert compiled.draft < 0.75 * plain.draft and compiled.commit < plain.commit and compiled.verify == plain.verify
