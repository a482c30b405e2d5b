"""Running the table: every check on every backend, each result with its error, its bound and its reason when skipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dspine.common import (
    acceptance,
    attention,
    experts,
    gating,
    gdn,
    gdn_rounds,
    injection,
    linear_rows,
    norms,
    quantized_rows,
    settling,
    signals,
    stepping,
    transition,
)
from dspine.common.errors import DSpineError
from dspine.common.parity import (
    block_checks,
    decision_checks,
    draft_checks,
    gdn_checks,
    layer_checks,
    packed_checks,
    round_checks,
    step_checks,
)
from dspine.common.parity.backends import ParityBackend, map_values, role_dtype, rounded
from dspine.common.parity.checks import Check
from dspine.common.registry import reference_only
from dspine.common.selection import lengths

OPERATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        gdn.gdn_inputs,
        gdn.gdn_verify,
        gdn.gdn_verify_deferred,
        gdn.gdn_commit,
        gdn_rounds.gdn_round,
        gdn_rounds.gdn_keep,
        injection.injection_gate,
        injection.injection_messages,
        injection.injection_write,
        signals.draft_signals,
        signals.draft_candidates,
        transition.transition_scores,
        transition.candidate_scores,
        transition.path_walk,
        transition.path_walk_sampled,
        lengths.select_length,
        lengths.correct_length,
        acceptance.accept_greedy,
        acceptance.accept_point_mass,
        acceptance.accept_point_mass_logits,
        acceptance.accept_rejection_logits,
        lengths.bound_lengths,
        settling.settle_round,
        stepping.table_rows,
        stepping.enter_block,
        stepping.round_uniforms,
        stepping.round_limits,
        stepping.place_drafts,
        attention.attention_inputs,
        attention.context_inputs,
        attention.block_attention,
        norms.add_rms_norm,
        gating.sigmoid_mul,
        gating.silu_mul,
        gating.gated_rows,
        experts.pick_experts,
        experts.routed_experts,
        linear_rows.linear_rows,
        quantized_rows.quantized_rows,
        quantized_rows.gathered_rows,
    )
}


@dataclass(frozen=True)
class Result:
    """One row of the table: `error` and `bound` are those of the output that came closest to (or passed) its bound.

    A skipped check has its reason, and None for error, bound and passed.
    """

    op: str
    backend: str
    device: str
    dtype: str
    shape: str
    family: str
    error: float | None
    bound: float | None
    passed: bool | None
    skipped_reason: str | None = None

    @property
    def missed(self) -> bool:
        """It ran, and an output is above its bound."""
        return self.passed is False

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: an infinite error (NaN, a wrong shape) is written as a string."""
        row = dataclasses.asdict(self)
        if self.error is not None and not np.isfinite(self.error):
            row["error"] = str(self.error)
        return row


class Declined(Exception):
    """A kernel said that it does not support these arguments: the core's own code would run."""


@lru_cache(maxsize=2)
def table(scaled: bool) -> tuple[Check, ...]:
    """All checks; `scaled`: real model shapes cut down for emulated and interpreted backends."""
    parts = (gdn_checks, round_checks, draft_checks, decision_checks, block_checks, layer_checks, packed_checks, step_checks)
    return tuple(check for part in parts for check in part.checks(scaled))


def cases(backend: ParityBackend) -> Iterator[tuple[Check, str]]:
    """(check, dtype) for this backend, in the order of the table."""
    for check in table(backend.scaled):
        for dtype in check.dtypes:
            yield check, dtype


def run_check(check: Check, dtype: str, backend: ParityBackend) -> Result:
    """One check on one backend. A backend or kernel that is absent gives a skipped result with its reason."""
    reason = backend.skipped or _no_kernel(check.op, backend)
    if reason:
        return _skipped(check, dtype, backend, reason)
    assert backend.to_device is not None and backend.to_host is not None
    inputs = check.build()
    want = check.expect(map_values(lambda value: rounded(value, dtype), inputs))
    args = map_values(lambda value: backend.to_device(rounded(value, dtype), role_dtype(value, dtype)), inputs)
    try:
        with backend.session(), reference_only():
            found = check.run(lambda op, *values: _call(backend, op, values), args)
            got = {name: np.asarray(backend.to_host(array)) for name, array in found.items()}
    except Declined as declined:
        return _skipped(check, dtype, backend, str(declined))
    return _judge(check, dtype, backend, got, want)


def run_all(backends: Iterable[ParityBackend], operations: Iterable[str] | None = None) -> Iterator[Result]:
    """Every check of the named operations (None: all) on every backend, as they finish."""
    wanted = set(OPERATIONS if operations is None else operations)
    unknown = wanted - set(OPERATIONS)
    if unknown:
        raise DSpineError(f"parity: unknown operation {', '.join(sorted(unknown))}; there are: {', '.join(OPERATIONS)}")
    for backend in backends:
        for check, dtype in cases(backend):
            if check.op in wanted:
                yield run_check(check, dtype, backend)


def _no_kernel(op: str, backend: ParityBackend) -> str | None:
    if backend.kernel is None or backend.fallback or backend.kernel(op) is not None:
        return None
    return f"{backend.name} has no kernel for {op}: the core's own code runs"


def _call(backend: ParityBackend, op: str, values: tuple[Any, ...]) -> Any:
    """The backend's kernel, or the core's code where the backend falls back to it (or the op is not the one under test)."""
    kernel = backend.kernel(op) if backend.kernel is not None else None
    if kernel is None:
        return OPERATIONS[op].reference(*values)  # type: ignore[attr-defined]
    if kernel.supports is not None and not kernel.supports(*values):
        if backend.fallback:
            return OPERATIONS[op].reference(*values)  # type: ignore[attr-defined]
        raise Declined(f"the {kernel.name} kernel of {op} declines this call: the core's own code runs")
    return kernel.function(*values)


def _skipped(check: Check, dtype: str, backend: ParityBackend, reason: str) -> Result:
    return Result(check.op, backend.name, backend.device, dtype, check.shape, check.family, None, None, None, reason)


def _judge(check: Check, dtype: str, backend: ParityBackend, got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> Result:
    """The output with the largest share of its bound; every output must be there and within."""
    assert got.keys() == want.keys(), (got.keys(), want.keys())
    rows = [(check.error(name, got[name], want[name]), check.bound(name, dtype, want[name])) for name in want]
    error, bound = max(rows, key=lambda row: _share(*row))
    passed = all(error <= bound for error, bound in rows)
    return Result(check.op, backend.name, backend.device, dtype, check.shape, check.family, error, bound, passed)


def _share(error: float, bound: float) -> float:
    """Share of the bound that is used up; above 1 is a miss."""
    if bound == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / bound
