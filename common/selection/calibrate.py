"""From prompts to a calibration: capture run, fits, timings, Dinkelbach, and what they are worth on test prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from dspine.common.errors import DSpineError
from dspine.common.protocols import Engine
from dspine.common.selection.calibrated import LengthModel
from dspine.common.selection.calibration import AcceptanceModel, Calibration, CostTable, identify
from dspine.common.selection.capture import Capture, capture, encode, time_lengths, time_stage_zero
from dspine.common.selection.fitting import (
    dinkelbach,
    expected_calibration_error,
    expected_gain,
    fit_acceptance,
    fit_cost,
    fit_expert,
    fit_routing,
    fit_slope,
    hindsight,
    round_seconds,
    scikit_learn,
)
from dspine.common.selection.prompts import PromptRow, refuse_overlap

Progress = Callable[[str, int, int], None]  # (step, done, of)
STEPS = ("capture", "lengths", "stage 0", "test")


@dataclass(frozen=True)
class CalibrateSettings:
    """max_tokens a prompt; repetitions: timed rounds at each length; stage_repetitions: of `begin` at each length and prompt;
    timing_prompts: how many prompts the timings draw on."""

    max_tokens: int = 256
    repetitions: int = 32
    stage_repetitions: int = 8
    timing_prompts: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_tokens", "repetitions", "stage_repetitions", "timing_prompts"):
            if getattr(self, name) < 1:
                raise DSpineError(f"{name.replace('_', ' ')} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class CalibrationRun:
    """The calibration and what the report shows of the runs behind it."""

    calibration: Calibration
    captured: Capture
    survival: np.ndarray  # [R, M] on the capture run
    seconds: dict[int, list[float]]
    test: Capture | None = None
    test_survival: np.ndarray | None = None
    stage: tuple[list[int], list[float]] = field(default=([], []))


def calibrate(
    engine: Engine,
    prompts: Sequence[PromptRow],
    settings: CalibrateSettings,
    *,
    test_prompts: Sequence[PromptRow] = (),
    versions: dict[str, Any] | None = None,
    progress: Progress = lambda step, done, of: None,
) -> CalibrationRun:
    """Measure and fit everything for this pair on this machine. Deterministic but for the timings.

    Raises DSpineError: no drafter, prompts shared with the test prompts, too few rounds; BackendError without scikit-learn.
    """
    scikit_learn()  # before minutes of decoding
    identity = identify(engine)
    refuse_overlap(prompts, test_prompts)
    ids, skipped = encode(engine, prompts)
    order = np.random.default_rng(settings.seed).permutation(len(ids))
    timed = [ids[i] for i in order[: settings.timing_prompts]]
    captured = capture(engine, ids, settings.max_tokens, lambda done, of: progress("capture", done, of))
    acceptance = fit_acceptance(captured.rounds)
    seconds = time_lengths(
        engine, timed, settings.max_tokens, settings.repetitions, settings.seed, lambda done, of: progress("lengths", done, of)
    )
    stage = time_stage_zero(
        engine, timed[:4], settings.stage_repetitions, settings.seed, lambda done, of: progress("stage 0", done, of)
    )
    routing = fit_routing(captured.rounds)
    cost = CostTable(
        **fit_cost(seconds, identity.block_size),
        stage_zero=_stage_slope(*stage),
        expert=_expert_time(captured) if engine.rounds is None else engine.rounds.time_expert(settings.repetitions),
    )
    survival = survival_of(captured, acceptance)
    rate, _ = dinkelbach(expected_gain(survival), round_seconds(cost))
    figures = _figures(captured, survival, cost, rate)
    test, test_survival = None, None
    if test_prompts:
        test_ids, _ = encode(engine, test_prompts)
        test = capture(engine, test_ids, settings.max_tokens, lambda done, of: progress("test", done, of))
        test_survival = survival_of(test, acceptance)
        figures["test"] = _figures(test, test_survival, cost, rate)
    made = Calibration(
        identity=identity,
        acceptance=acceptance,
        cost=cost,
        routing=routing,
        rate=rate,
        figures=figures,
        provenance=_provenance(prompts, skipped, captured, settings, versions),
    )
    return CalibrationRun(made, captured, survival, seconds, test, test_survival, stage)


def _provenance(
    prompts: Sequence[PromptRow], skipped: int, captured: Capture, settings: CalibrateSettings, versions: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "prompts": prompts_hash(prompts),
        "prompt_count": len(prompts) - skipped,
        "prompts_too_long": skipped,
        "rounds": len(captured.rounds),
        "rounds_left_out": captured.left_out,
        "settings": vars(settings).copy(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions or {},
    }


def survival_of(captured: Capture, acceptance: AcceptanceModel) -> np.ndarray:
    """Prefix probabilities [R, M] of captured rounds, as the policies compute them."""
    model = LengthModel(acceptance)
    rounds = captured.rounds
    return np.stack([model.survival(c, h) for c, h in zip(rounds.confidence, rounds.entropy, strict=True)])


def prompts_hash(prompts: Sequence[PromptRow]) -> str:
    """Hash of the prompts' texts, independent of their order."""
    return hashlib.sha256("\0".join(sorted(row.key for row in prompts)).encode()).hexdigest()[:16]


def _figures(captured: Capture, survival: np.ndarray, cost: CostTable, rate: float) -> dict[str, Any]:
    rounds = captured.rounds
    label, known = rounds.labels()
    conditional = survival / np.concatenate([np.ones((len(rounds), 1)), survival[:, :-1]], axis=1).clip(1e-30)
    return {
        "rounds": len(rounds),
        "acceptance_length": float(1 + rounds.accepted.mean()),
        "ece_prefix": expected_calibration_error(survival, label),
        "ece_conditional": expected_calibration_error(conditional[known], label[known]),
        "throughput": hindsight(survival, rounds.accepted, cost, rate),
    }


def _stage_slope(lengths: list[int], seconds: list[float]) -> float:
    """s from the medians at each length."""
    u = sorted(set(lengths))
    times = np.asarray(seconds)
    at = np.asarray(lengths)
    return fit_slope(u, [float(np.median(times[at == length])) for length in u])


def _expert_time(captured: Capture) -> float:
    """eta from the capture run: all rounds have one length, so what differs is experts, text position and commit."""
    rounds = captured.rounds
    if rounds.new_pairs is None:
        return 0.0
    distinct = rounds.new_pairs.sum(axis=(1, 2)).astype(np.float64)
    others = np.column_stack([captured.positions, rounds.accepted])
    return fit_expert(captured.verify_seconds, distinct, others)
