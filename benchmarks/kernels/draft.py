"""The drafter's operations at Qwen3-8B's shape, the length rules and acceptance: times, floors, the core's code beside them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.gdn import timed
from benchmarks.kernels.timing import Floors
from dspine.common import acceptance, gdn, injection, signals, transition
from dspine.common.gdn import GdnInputWeights, GdnLayout
from dspine.common.injection import InjectionWeights
from dspine.common.norms import RMSNorm
from dspine.common.registry import reference_only, registered_kernel
from dspine.common.selection import lengths
from dspine.common.selection.lengths import LengthTables

M, K, HIDDEN, RANK, MESSAGE, VOCABULARY, LAYERS = 15, 16, 4096, 1024, 512, 151_936, 5
TOKENS = 32_768  # of the tables of codes and of the LM head
SETS = 8  # of arguments: more than the L2 cache holds
Call = Callable[..., Any]


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def _weights() -> InjectionWeights:
    gates = [_normal(MESSAGE, RANK, scale=RANK**-0.5) for _ in range(3)]
    return InjectionWeights(
        _normal(RANK, HIDDEN, scale=HIDDEN**-0.5), _normal(HIDDEN, MESSAGE, scale=0.05), *gates, _normal(MESSAGE)
    )


@functools.lru_cache(maxsize=1)
def _code_tables() -> tuple[Tensor, Tensor]:
    """Codes and LM head of a part of the vocabulary, for all sets."""
    return _normal(TOKENS, RANK, scale=RANK**-0.5), _normal(TOKENS, HIDDEN, scale=HIDDEN**-0.5)


def _tables() -> LengthTables:
    rise = torch.linspace(0, 1, 32, device="cuda").expand(M, 32).contiguous()
    cost = torch.linspace(1, 3, M + 2, device="cuda")
    pairs = torch.linspace(8, 2, M + 2, device="cuda")
    given = torch.linspace(0, 8, 9, device="cuda").expand(M + 2, 9).contiguous()
    return LengthTables(
        rise, torch.tensor([-1.0, 4.0, -0.05, 0.1, -0.3, -0.1], device="cuda"), cost, 0.3, 0.05, 0.02, pairs, given
    )


def operations() -> dict[str, tuple[Any, tuple, float, int]]:
    """name -> (core operation, arguments, bytes that must be read, launches of the kernel)."""
    weights, norm = _weights(), RMSNorm(_normal(HIDDEN), 1e-6)
    u, z, gated = _normal(1, M, HIDDEN), _normal(1, M, RANK), _normal(1, M, MESSAGE)
    logits = _normal(1, M, VOCABULARY, dtype=torch.float32, scale=3.0)
    scores = _normal(1, M, K, K, dtype=torch.float32)
    candidates = torch.randint(0, TOKENS, (1, M, K), device="cuda")
    heard, code = _normal(1, M, MESSAGE, dtype=torch.float32), _normal(1, RANK)
    uniforms = torch.rand(1, M, device="cuda")
    confidence, entropy = torch.rand(1, M, device="cuda"), torch.rand(1, M, device="cuda") * 3
    limit, tables = torch.full((1,), M + 1, dtype=torch.int32, device="cuda"), _tables()
    picks = torch.randint(0, 256, (1, M + 1, 8), device="cuda", dtype=torch.int32)
    length, survival = torch.full((1,), 6, dtype=torch.int32, device="cuda"), torch.rand(1, M, device="cuda")
    p = torch.softmax(_normal(1, M + 1, VOCABULARY, dtype=torch.float32), dim=-1)
    draft = p[:, :-1].argmax(dim=-1).to(torch.int32)
    layout = GdnLayout(16, 32, 128, 128)
    inputs = (
        _normal(1, 16, layout.channels), _normal(1, 3, layout.channels), _normal(1, 16, 32), _normal(1, 16, 32),
        GdnInputWeights(_normal(layout.channels, 4), _normal(32, dtype=torch.float32), _normal(32)), layout,
    )  # fmt: skip
    gates, write, readout = 2 * 3 * MESSAGE * RANK, 2 * HIDDEN * MESSAGE, 2 * RANK * HIDDEN
    codes, rows = _normal(1, M, K, RANK), _normal(1, M, K, HIDDEN)
    return {
        "gdn_inputs": (gdn.gdn_inputs, inputs, 2 * layout.channels * 23, 1),
        "injection_gate": (injection.injection_gate, (z, z.clone(), weights), gates, 1),
        "injection_messages": (injection.injection_messages, (_normal(1, M + 1, RANK), code, weights), gates, 1),
        "injection_write": (injection.injection_write, (u, gated, weights.write, norm), write, 2),
        "draft_signals": (signals.draft_signals, (logits, K), 4 * M * VOCABULARY, 2),
        "transition_scores": (
            transition.transition_scores, (u, codes, rows, weights, norm),
            gates + write + readout + 2 * M * K * (RANK + HIDDEN), 6,
        ),
        "candidate_scores": (
            transition.candidate_scores, (u, heard, code, candidates, *_code_tables(), weights, norm),
            2 * gates // 3 + write + 2 * M * K * (RANK + HIDDEN), 3,
        ),
        "path_walk": (transition.path_walk, (scores, candidates), 4 * M * K * K, 1),
        "path_walk_sampled": (transition.path_walk_sampled, (scores, candidates, uniforms, 0.7), 4 * M * K * K, 1),
        "select_length": (lengths.select_length, (confidence, entropy, limit, tables), 4096, 1),
        "correct_length": (lengths.correct_length, (picks, length, survival, limit, tables), 4096, 1),
        "accept_greedy": (acceptance.accept_greedy, (p, draft, limit), 4 * (M + 1) * VOCABULARY, 2),
        "accept_point_mass": (
            acceptance.accept_point_mass, (p, draft, limit, uniforms, torch.rand(1, M + 1, device="cuda")), 4 * VOCABULARY, 2
        ),
    }  # fmt: skip


# what the issue asks for together: (operations, how often each, microseconds)
TOGETHER = {
    "injection, 5 layers": ((("injection_gate", LAYERS), ("injection_write", LAYERS)), 60.0),
    "injection of a round, 5 layers": ((("injection_messages", LAYERS), ("injection_write", LAYERS)), 60.0),
    "draft signals, transition scores, walk": ((("draft_signals", 1), ("transition_scores", 1), ("path_walk", 1)), 100.0),
    "draft signals, candidate scores, walk": ((("draft_signals", 1), ("candidate_scores", 1), ("path_walk", 1)), 100.0),
    "selection and correction": ((("select_length", 1), ("correct_length", 1)), 10.0),
}


def rows(floors: Floors, passed: Callable[[str], str | None], *, reference: bool) -> Iterator[dict[str, Any]]:
    """One row an operation, then the groups of `TOGETHER`. `passed` gives the reason not to time an operation."""
    sets = [operations() for _ in range(SETS)]
    table = sets[0]
    for name, (_, _, read, launches) in table.items():
        reason = passed(name)
        if reason:
            yield {"op": name, "refused": reason}
            continue
        kernel = registered_kernel(name, "torch", "cuda")
        assert kernel is not None, name
        calls = [[(kernel.function, one[name][1], 1)] for one in sets]
        yield {"op": name} | _per_set(timed([partial(_run, calls)], floors, read, 0, launches))
    for name, (members, target) in TOGETHER.items():
        if any(passed(member) for member, _ in members):
            yield {"op": name, "refused": "one of its operations is not timed"}
            continue
        calls = [
            [(registered_kernel(member, "torch", "cuda").function, one[member][1], count) for member, count in members]  # type: ignore[union-attr]
            for one in sets
        ]
        total = sum(table[member][2] * count for member, count in members)
        launches = sum(table[member][3] * count for member, count in members)
        yield {"op": name, "target": target} | _per_set(timed([partial(_run, calls)], floors, total, 0, launches))
    for name, (core, args, read, launches) in table.items() if reference else ():  # last: a failed capture may spoil others
        with reference_only():
            yield {"op": f"{name}, core's code"} | timed([partial(core.reference, *args)], floors, read, 0, launches)


def _run(calls: list[list[tuple[Call, tuple, int]]]) -> None:
    """Every set of arguments in turn, in one graph: a replay costs the host more than a small kernel costs the device."""
    for one in calls:
        for function, args, count in one:
            for _ in range(count):
                function(*args)


def _per_set(row: dict[str, Any]) -> dict[str, Any]:
    return row | {key: row[key] / SETS for key in ("us", "low", "high") if key in row}
