"""Fits on synthetic rounds of known truth, tables against plain loops, Dinkelbach against brute force, captures on toys."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from dspine.common.errors import DSpineError
from dspine.common.protocols import Engine
from dspine.common.selection import capture as capturing
from dspine.common.selection.calibrate import CalibrateSettings, calibrate
from dspine.common.selection.calibrated import LengthModel
from dspine.common.selection.calibration import CostTable
from dspine.common.selection.fitting import (
    Rounds,
    dinkelbach,
    expected_calibration_error,
    expected_gain,
    fit_acceptance,
    fit_cost,
    fit_expert,
    fit_routing,
    fit_slope,
    hindsight,
    new_pairs,
    realised_gain,
)
from dspine.common.selection.prompts import PromptRow, read_prompts, refuse_overlap
from tests.helpers.calibrations import EXPERTS, LAYERS, PICKS, RoutedTarget, router_picks, signal_oracle, signals
from tests.helpers.toys import ToyTarget, markov_logits, oracle_drafter

pytest.importorskip("sklearn", reason="the calibrate extra is not installed")

M = 7
VOCAB = 32
LOGITS = markov_logits(VOCAB, seed=3)
PROMPT = [1, 2, 3]
QUIET = lambda done, of: None  # noqa: E731


def synthetic(count: int, seed: int = 0) -> tuple[Rounds, np.ndarray]:
    """Rounds whose conditional acceptance is a known function of confidence, position and entropy; and the true survival."""
    rng = np.random.default_rng(seed)
    confidence, entropy = rng.beta(3, 1.5, (count, M)), rng.exponential(0.6, (count, M))
    position = np.arange(1, M + 1)
    logit = -2.2 + 5.5 * confidence**2 - 0.05 * position - 0.8 * np.log1p(entropy)
    conditional = 1 / (1 + np.exp(-logit))
    hit = rng.random((count, M)) < conditional
    accepted = np.cumprod(hit, axis=1).sum(axis=1)
    return Rounds(confidence, entropy, accepted), np.cumprod(conditional, axis=1)


def test_acceptance_model_recovers_the_truth():
    rounds, _ = synthetic(12000)
    fresh, truth = synthetic(4000, seed=1)
    model = LengthModel(fit_acceptance(rounds))
    got = np.stack([model.survival(c, h) for c, h in zip(fresh.confidence, fresh.entropy, strict=True)])
    assert np.abs(got - truth).mean() < 0.015 and np.abs(got - truth).max() < 0.2
    label, _ = fresh.labels()
    assert expected_calibration_error(got, label) < 0.015
    raw = np.cumprod(fresh.confidence, axis=1)
    assert expected_calibration_error(raw, label) > 0.05, "the raw confidences must be badly calibrated here"


def test_labels_are_conditional():
    """1[A >= i] among rounds with A >= i - 1: nothing behind the first rejection is a label."""
    label, known = Rounds(np.zeros((3, 3)), np.zeros((3, 3)), np.array([0, 1, 3])).labels()
    assert known.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert label[known].tolist() == [False, True, False, True, True, True]


@pytest.mark.parametrize("accepted", [0, M])
def test_one_class_only(accepted):
    rng = np.random.default_rng(0)
    model = fit_acceptance(Rounds(rng.random((40, M)), rng.random((40, M)), np.full(40, accepted)))
    got = LengthModel(model).conditional(rng.random(M), rng.random(M))
    assert (got > 0.97).all() if accepted else (got < 0.03).all()


def test_few_rounds_share_one_map():
    rounds, _ = synthetic(60)
    maps = fit_acceptance(rounds).isotonic
    assert maps[-1] == maps[-2] and maps[0] != maps[-1]
    with pytest.raises(DSpineError, match="no whole round"):
        fit_acceptance(Rounds(np.zeros((0, M)), np.zeros((0, M)), np.zeros(0, int)))


def test_calibration_error_written_out():
    p, y = np.array([0.1, 0.12, 0.9, 1.0]), np.array([0, 1, 1, 1])
    assert expected_calibration_error(p, y, 2) == pytest.approx(0.5 * abs(0.5 - 0.11) + 0.5 * abs(1 - 0.95))
    assert expected_calibration_error(np.zeros(0), np.zeros(0)) == 0


def test_cost_curve_is_recovered_under_interrupted_rounds():
    rng = np.random.default_rng(0)
    truth = {w: 0.012 + 0.0015 * w + 0.00008 * w**2 for w in range(2, 17)}
    seconds = {w: [t * rng.normal(1, 0.01) + 0.2 * (rng.random() < 0.1) for _ in range(30)] for w, t in truth.items()}
    fit = fit_cost(seconds, 16)
    got = np.array(fit["target"]) + fit["fixed"]
    np.testing.assert_allclose(got, list(truth.values()), rtol=0.01)
    assert fit["fixed"] == pytest.approx(0.012, rel=0.15) and fit["rounds"] == [30] * 15
    with pytest.raises(DSpineError, match=r"lengths \[3\]"):
        fit_cost({2: [1.0], 4: [1.0]}, 4)
    assert fit_cost({2: [1.0]}, 2)["target"] == [0.0]
    two = fit_cost({2: [1.0], 3: [1.5]}, 3)
    np.testing.assert_allclose(np.array(two["target"]) + two["fixed"], [1.0, 1.5])


def test_expert_time_is_recovered():
    rng = np.random.default_rng(1)
    n, position, a = rng.integers(40, 120, 400), rng.integers(10, 900, 400), rng.integers(0, 8, 400)
    seconds = 0.01 + 4.2e-6 * n + 1e-6 * position + 2e-5 * a + rng.normal(0, 2e-6, 400)
    seconds[::17] += 0.05
    got = fit_expert(seconds, n, np.column_stack([position, a]))
    assert got == pytest.approx(4.2e-6, rel=0.03)
    assert fit_expert(0.01 - 4e-6 * n, n, np.zeros((400, 0))) == 0, "never negative"
    assert fit_expert(seconds, np.full(400, 50), np.zeros((400, 0))) == 0
    assert fit_slope([2, 3, 4], [1.0, 1.5, 2.0]) == pytest.approx(0.5)
    assert fit_slope([2, 3, 4], [2.0, 1.5, 1.0]) == fit_slope([2], [1.0]) == fit_slope([], []) == 0


def picks(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([[[rng.permutation(10)[:3] for _ in range(4)] for _ in range(M + 1)] for _ in range(count)])


def test_new_pairs_are_sets():
    made = picks(140)
    got = new_pairs(made)
    for r in (0, 77, 139):
        for t, layer in itertools.product(range(M + 1), range(4)):
            before = set(made[r, :t, layer].ravel())
            assert got[r, t, layer] == len(set(made[r, t, layer]) - before)


def test_expert_tables_written_out():
    counts = new_pairs(picks(90))
    rounds = Rounds(np.zeros((90, M)), np.zeros((90, M)), np.zeros(90, int), counts, 3)
    tables = fit_routing(rounds)
    assert tables.moe_layers == 4 and tables.experts_per_token == 3
    cells = [0, 0]
    for w in range(1, M + 1):
        a, b = counts[:, w, 0].astype(float), counts[:, w, 1:].sum(axis=1).astype(float)
        assert tables.pairs[w] == pytest.approx(np.mean(a) + np.mean(b))
        line = np.polyfit(a, b, 1) if a.std() else (0.0, b.mean())
        for n in range(4):
            some = b[a == n]
            want = n + (some.mean() if len(some) >= 30 else max(line[0] * n + line[1], 0.0))
            cells[len(some) >= 30] += 1
            assert tables.pairs_given[w][n] == pytest.approx(want)
    assert min(cells) > 3, "both kinds of cells must occur"
    first, later = counts[:, 1:, 0].astype(float), counts[:, 1:, 1:].sum(axis=2).astype(float)
    flat = [(x - x.mean(axis=0)).ravel() for x in (first, later)]
    assert tables.correlation == pytest.approx(np.corrcoef(*flat)[0, 1])
    assert fit_routing(Rounds(np.zeros((1, M)), np.zeros((1, M)), np.zeros(1, int))) is None


def test_dinkelbach_equals_brute_force():
    rng = np.random.default_rng(2)
    for trial in range(60):
        gain, cost = rng.uniform(1, 5, (4, 5)), rng.uniform(0.5, 3, (4, 5) if trial % 2 else 5)
        wide = np.broadcast_to(cost, gain.shape)
        best = max(
            sum(gain[r, c] for r, c in enumerate(choice)) / sum(wide[r, c] for r, c in enumerate(choice))
            for choice in itertools.product(range(5), repeat=4)
        )
        rate, choice = dinkelbach(gain, cost)
        assert rate == pytest.approx(best, rel=1e-12)
        rows = np.arange(4)
        assert gain[rows, choice].sum() / wide[rows, choice].sum() == pytest.approx(best, rel=1e-12)
    with pytest.raises(DSpineError, match="positive"):
        dinkelbach(np.ones((2, 2)), np.array([1.0, 0.0]))


def test_rates_are_pooled_not_averaged():
    """A ratio of sums differs from the mean of ratios, and Dinkelbach's choice follows the former."""
    gain, cost = np.array([[1.0, 9.0], [1.0, 1.2]]), np.array([1.0, 2.0])
    rate, choice = dinkelbach(gain, cost)
    assert rate == pytest.approx(10 / 3) and choice.tolist() == [1, 0]


def test_hindsight_written_out():
    rounds, survival = synthetic(300, seed=4)
    lengths = np.arange(2, M + 2)
    target = 0.004 * lengths
    cost = CostTable(
        lengths=lengths.tolist(), measured=(target + 0.02).tolist(), rounds=[1] * M, quadratic=[0.02, 0.004, 0],
        target=target.tolist(), fixed=0.02, stage_zero=0, expert=0,
    )  # fmt: skip
    rate, choice = dinkelbach(expected_gain(survival), target + 0.02)
    got = hindsight(survival, rounds.accepted, cost, rate)

    def pooled(length_of):
        tokens = [min(a, w - 1) + 1 for a, w in zip(rounds.accepted, length_of, strict=True)]
        return sum(tokens) / sum(0.004 * w + 0.02 for w in length_of)

    assert got["nominal"] == pytest.approx(pooled(choice + 2))
    assert got["full"] == pytest.approx(pooled([M + 1] * 300))
    assert got["best_static"] == pytest.approx(max(pooled([w] * 300) for w in lengths))
    assert got["clairvoyant"] >= pooled(np.maximum(rounds.accepted + 1, 2)) - 1e-9
    assert got["clairvoyant"] > got["best_rate"] >= got["nominal"] > got["full"]
    assert 0 <= got["oracle_regret"] < 0.03 < got["clairvoyant_regret"]
    np.testing.assert_array_equal(
        realised_gain(np.array([0, 2, 9]), 3), [[1 + min(a, w) for w in (1, 2, 3)] for a in (0, 2, 9)]
    )


class Words:
    """As much of a tokenizer as calibration asks for: prompts are token ids already."""

    stop_ids = frozenset({-1})


@pytest.fixture
def pair(tmp_path, monkeypatch) -> Engine:
    """A routed toy pair; a prompt's text is its token ids."""
    monkeypatch.setattr(capturing, "encode_prompt", lambda tokenizer, prompt, limit: [int(t) for t in prompt.split()])
    target = RoutedTarget(LOGITS, VOCAB)
    drafter = signal_oracle(LOGITS, PROMPT, M + 1, 5)
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return Engine(target, drafter, Words(), "toy", "asked for", "toy", str(folder))


def test_capture_on_a_toy(pair):
    """Every fifth text position is drafted wrongly: A, the signals and the routing of every whole round are known."""
    got = capturing.capture(pair, [PROMPT], 90, QUIET)
    assert got.left_out >= 1 and pair.target.record_routing is False
    text = list(PROMPT)
    for _ in range(120):
        text.append(int(np.argmax(LOGITS(text))))
    for row, at in enumerate(got.positions):
        block = text[at : at + M + 1]
        wrong = [t for t in range(at + 1, at + M + 1) if t % 5 == 0]
        assert got.rounds.accepted[row] == (wrong[0] - at - 1 if wrong else M)
        confidence, entropy = signals(at, M)
        np.testing.assert_array_equal(got.rounds.confidence[row], confidence.astype(np.float64))
        np.testing.assert_array_equal(got.rounds.entropy[row], entropy.astype(np.float64))
        assert got.rounds.new_pairs[row, 0].tolist() == [PICKS] * LAYERS
        first = set(router_picks(text[: at + 1], 0))
        if got.rounds.accepted[row]:
            assert got.rounds.new_pairs[row, 1, 0] == len(set(router_picks([*text[:at], *block[:2]], 0)) - first)
    assert len(got.rounds) > 10 and got.usage.shape == (LAYERS, EXPERTS)
    assert got.usage.sum() == len(got.rounds) * (M + 1) * LAYERS * PICKS


def test_cut_rounds_are_left_out(pair):
    """A stop token inside a block cuts A; the last rounds of a limit are shorter than the block."""
    whole = capturing.capture(pair, [PROMPT], 90, QUIET)
    stopped = Engine(
        pair.target, pair.drafter, SimpleNamespace(stop_ids=frozenset(range(0, VOCAB, 9))), "toy", "", "toy", pair.draft_model
    )
    cut = capturing.capture(stopped, [PROMPT], 90, QUIET)
    known = dict(zip(whole.positions.tolist(), whole.rounds.accepted.tolist(), strict=True))
    assert cut.left_out == 1 and len(cut.rounds) < len(whole.rounds)
    for at, accepted in zip(cut.positions.tolist(), cut.rounds.accepted.tolist(), strict=True):
        assert known[at] == accepted
    with pytest.raises(DSpineError, match="cut short"):
        capturing.capture(pair, [PROMPT], 3, QUIET)


def test_lengths_are_interleaved_and_complete(pair, monkeypatch):
    """Timed with the signals that every calibrated policy asks for: they are a part of its rounds."""
    pair.target.stages.clear()
    requests, propose = [], pair.drafter.propose
    monkeypatch.setattr(pair.drafter, "propose", lambda cache, anchor, r: (requests.append(r), propose(cache, anchor, r))[1])
    got = capturing.time_lengths(pair, [PROMPT], 200, 5, 0, QUIET)
    assert requests and all(request.signals for request in requests)
    assert sorted(got) == list(range(2, M + 2)) and all(len(row) == 5 for row in got.values())
    asked = [w for u, w in pair.target.stages if u > 1][:M]
    assert sorted(asked) == list(range(2, M + 2)) and asked != sorted(asked)
    u, seconds = capturing.time_stage_zero(pair, [PROMPT], 2, 0, QUIET)
    assert sorted(u) == sorted([*range(2, M + 2)] * 2) and min(seconds) > 0
    dense = Engine(ToyTarget(LOGITS, VOCAB), pair.drafter, Words(), "toy", "", "toy", pair.draft_model)
    assert capturing.time_stage_zero(dense, [PROMPT], 2, 0, QUIET) == ([], [])


def test_calibrate_end_to_end_is_deterministic_but_for_time(pair):
    rows = [PromptRow(1, "1 2 3"), PromptRow(2, "3 1 2")]
    settings = CalibrateSettings(max_tokens=60, repetitions=2, stage_repetitions=1)
    runs = [calibrate(pair, rows, settings, test_prompts=[PromptRow(1, "2 2 2")]).calibration for _ in range(2)]
    assert runs[0].acceptance == runs[1].acceptance and runs[0].routing == runs[1].routing
    assert runs[0].routing.experts_per_token == PICKS and runs[0].rate > 0
    assert {"ece_prefix", "throughput"} <= set(runs[0].figures["test"])
    assert runs[0].provenance["prompts"] == runs[1].provenance["prompts"] and runs[0].provenance["rounds"] > 0
    with pytest.raises(DSpineError, match=r"disjoint.*1 = 7"):
        calibrate(pair, rows, settings, test_prompts=[PromptRow(7, "1  2 3")])


def test_a_drafter_without_signals_is_refused(pair):
    plain = Engine(pair.target, oracle_drafter(LOGITS, PROMPT, M + 1), Words(), "toy", "", "toy", pair.draft_model)
    with pytest.raises(DSpineError, match="no confidence and entropy"):
        capturing.capture(plain, [PROMPT], 40, QUIET)


@pytest.mark.parametrize(
    "text, suffix, want",
    [
        ('{"prompt": "a b"}\n\n{"turns": ["c", "d"]}\n', "jsonl", ["a b", "c"]),
        ('{"messages": [{"role": "user", "content": "x"}], "split": "test"}', "jsonl", [[{"role": "user", "content": "x"}]]),
        ("first prompt\n second \n", "txt", ["first prompt", "second"]),
    ],
)
def test_prompt_files(tmp_path, text, suffix, want):
    path = tmp_path / f"p.{suffix}"
    path.write_text(text)
    rows = read_prompts(path)
    assert [row.prompt for row in rows] == want


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "hold nothing"),
        ("{broken", "line 1 is no JSON"),
        ("{}\n", "line 1 holds no prompt"),
        ('{"prompt": "a"}\n[1]\n', "line 2 is no JSON object"),
        ('{"prompt": "a"}\n{"prompt": " "}\n', "line 2 holds no prompt"),
        ('{"messages": ["hello"]}', "line 1 holds no prompt"),
        (
            '{"prompt": "One two"}\n{"prompt": "x"}\n{"messages": [{"role": "user", "content": "one  TWO"}]}\n',
            "repeat.*lines 1 = 3",
        ),
    ],
)
def test_bad_prompt_files(tmp_path, text, words):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(DSpineError, match=words):
        read_prompts(path)
    with pytest.raises(DSpineError, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl")


def test_overlap_names_both_lines():
    with pytest.raises(DSpineError, match="3 = 9"):
        refuse_overlap([PromptRow(3, "a")], [PromptRow(9, "A ")])
    refuse_overlap([PromptRow(3, "a")], [PromptRow(9, "b")])
