"""DSpine's own kernels at the shape of Qwen3-8B's drafter, one launch (or two) a call, for `decode --tune --only dspine`.

A choice is a value of DSPINE_KERNELS_TRY. Weights are as many as no cache holds: in a round a layer's lie between other
layers' hundreds of megabytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.decode_cases import Case, normal, sets_of
from dspine.common.injection import InjectionWeights
from dspine.kernels_triton import candidate_scores, injection_messages, injection_write, transition_scores
from dspine.kernels_triton._choices import written

ROWS, M, K, HIDDEN, RANK, MESSAGE, TOKENS = 16, 15, 16, 4096, 1024, 512, 32_768  # TOKENS: of the tables, a part of a vocabulary
READOUT = "8b readout"
PARAMETERS: dict[str, tuple[str, Any]] = {  # case -> its name in DSPINE_KERNELS_TRY, today's choice
    "dspine messages": ("injection_messages", injection_messages.Launch()),
    "dspine write": ("injection_write", injection_write.Launch()),
    "dspine gate": ("transition_gate", transition_scores.Gate()),
    "dspine part": ("transition_part", transition_scores.Part()),
}
CHOICES = {
    "dspine messages": (  # columns, step, warps, stages, split, late
        (16, 64, 2, 5, 4, 0), (32, 64, 4, 3, 8, 0), (16, 64, 2, 3, 8, 0), (32, 128, 4, 3, 4, 0), (16, 128, 2, 3, 4, 0),
        (32, 64, 4, 5, 2, 0), (32, 128, 4, 5, 2, 0), (16, 128, 2, 5, 2, 0), (64, 64, 8, 5, 4, 0), (64, 64, 8, 3, 8, 0),
        (32, 64, 4, 5, 1, 0), (32, 64, 4, 5, 4, 1), (16, 64, 2, 5, 4, 1), (16, 64, 2, 3, 8, 1),
    ),
    "dspine write": (  # columns, step, warps, stages, warps of a row
        (32, 128, 4, 3, 8), (32, 128, 4, 5, 8), (16, 256, 2, 3, 8), (16, 256, 4, 3, 8), (16, 128, 2, 5, 8), (64, 128, 4, 5, 8),
        (64, 256, 8, 3, 8), (32, 256, 4, 3, 4), (32, 256, 4, 3, 16), (16, 256, 2, 3, 16),
    ),
    "dspine gate": (  # pairs, columns, step, warps, stages, late
        (64, 16, 128, 4, 3, 0), (64, 16, 64, 4, 5, 0), (64, 16, 64, 4, 8, 0), (64, 16, 256, 4, 3, 0), (64, 32, 64, 4, 5, 0),
        (64, 32, 128, 4, 4, 0), (128, 16, 64, 4, 5, 0), (128, 16, 64, 8, 5, 0), (128, 16, 128, 8, 4, 0), (128, 32, 64, 8, 5, 0),
        (128, 32, 128, 8, 3, 0), (32, 16, 128, 4, 4, 0), (32, 16, 128, 2, 4, 0), (32, 32, 128, 4, 4, 0), (32, 32, 64, 4, 6, 0),
        (16, 32, 128, 4, 5, 0), (64, 16, 128, 4, 4, 1), (64, 32, 128, 4, 4, 1), (128, 16, 128, 8, 4, 1),
    ),
    "dspine part": (  # columns, pairs, step, warps, stages, late
        (128, 64, 128, 4, 3, 0), (128, 64, 128, 4, 4, 0), (64, 64, 64, 4, 4, 0), (64, 64, 128, 4, 3, 0),
        (64, 64, 128, 4, 4, 0), (64, 128, 64, 8, 4, 0), (64, 128, 128, 8, 3, 0), (128, 128, 64, 8, 3, 0),
        (128, 64, 64, 8, 4, 0), (128, 32, 64, 4, 4, 0), (64, 32, 128, 4, 3, 0), (32, 64, 128, 4, 4, 0),
        (32, 128, 128, 8, 3, 0), (128, 64, 64, 4, 4, 1), (64, 64, 128, 4, 4, 1), (64, 128, 128, 8, 3, 1),
    ),
}  # fmt: skip


def variant(name: str, chosen: Any) -> str:
    """`name=value` of launch parameters."""
    return f"{PARAMETERS[name][0]}={written(chosen)}"


def today(name: str) -> str | None:
    """The choice that runs by itself."""
    return variant(name, PARAMETERS[name][1]) if name in PARAMETERS else None


def tasks() -> list[tuple[str, int, str]]:
    """(case, rows, choice), today's first; the two operations as a whole at the end."""
    found = []
    for name, (_, now) in PARAMETERS.items():
        made = [now, *(type(now)(*numbers) for numbers in CHOICES[name])]
        found += [(name, ROWS, variant(name, one)) for one in dict.fromkeys(made)]
    return [*found, ("dspine candidate_scores", ROWS, ""), ("dspine transition_scores", ROWS, "")]


@functools.lru_cache(maxsize=1)
def _weights(short: bool) -> list[InjectionWeights]:
    def one() -> InjectionWeights:
        gates = [normal(MESSAGE, RANK, scale=RANK**-0.5) for _ in range(3)]
        return InjectionWeights(
            normal(RANK, HIDDEN, scale=HIDDEN**-0.5), normal(HIDDEN, MESSAGE, scale=0.05), *gates, normal(MESSAGE)
        )

    return [one() for _ in range(sets_of(2 * 3 * MESSAGE * RANK, short))]


@functools.lru_cache(maxsize=1)
def _tables(short: bool) -> tuple[Tensor, Tensor]:
    count = 64 if short else TOKENS
    return normal(count, RANK, scale=RANK**-0.5), normal(count, HIDDEN, scale=HIDDEN**-0.5)


def _operands(codes: Tensor, head: Tensor) -> transition_scores.Operands:
    ids = torch.randint(0, codes.shape[0], (1, M, K), device="cuda")
    heard = torch.randn(1, M, MESSAGE, device="cuda")
    return transition_scores.Operands(normal(1, M, HIDDEN), heard, codes, head, K, ids, normal(1, RANK))


def case(name: str, short: bool) -> Case:
    """The calls of one name; launch parameters are read off the environment when they run."""
    weights, (codes, head) = _weights(short), _tables(short)
    norm = SimpleNamespace(weight=normal(HIDDEN), eps=1e-6)
    u, of = normal(1, ROWS, HIDDEN), [_operands(codes, head) for _ in weights]
    gated, rms = normal(M * K, MESSAGE), torch.ones(M, device="cuda")
    gates, write, pairs = 2 * MESSAGE * RANK, 2 * HIDDEN * MESSAGE, 2 * M * K
    readout = 2 * RANK * HIDDEN
    calls: list[Callable[[], object]]
    if name == "dspine messages":
        raw, code = normal(1, ROWS, RANK), normal(1, RANK)
        calls = [partial(injection_messages.injection_messages, raw, code, w) for w in weights]
        return Case(calls, 3 * gates, 2 * ROWS * MESSAGE, 1)
    if name == "dspine write":
        sent = normal(1, ROWS, MESSAGE)
        calls = [partial(injection_write.injection_write, u, sent, w.write, norm) for w in weights]
        return Case(calls, write, 4 * ROWS * HIDDEN, 2)
    if name == "dspine gate":
        calls = [partial(transition_scores.launch_gate, one, w, gated, rms) for one, w in zip(of, weights, strict=True)]
        return Case(calls, 2 * gates + pairs * RANK, pairs * MESSAGE, 1)
    if name == "dspine part":
        calls = [partial(_part, one, w, norm, gated, rms) for one, w in zip(of, weights, strict=True)]
        return Case(calls, write + pairs * (HIDDEN + MESSAGE), 0, 1)
    if name == "dspine candidate_scores":
        calls = [
            partial(candidate_scores.candidate_scores, one.hidden, one.heard, one.anchor_code, one.ids, codes, head, w, norm)
            for one, w in zip(of, weights, strict=True)
        ]
        return Case(calls, 2 * gates + write + pairs * (HIDDEN + RANK), 0, 3)
    given, rows = normal(1, M, K, RANK), normal(1, M, K, HIDDEN)
    calls = [partial(transition_scores.transition_scores, u[:, 1:], given, rows, w, norm) for w in weights]
    return Case(calls, 3 * gates + write + readout + pairs * (HIDDEN + RANK), 0, 6)


def _part(of: transition_scores.Operands, weights: InjectionWeights, norm: Any, gated: Tensor, rms: Tensor) -> None:
    parts = -(-HIDDEN // transition_scores.part_choice(gated.dtype).columns)
    products, squares = (torch.empty(M, parts, *rest, device="cuda") for rest in ((16, 16), (16,)))
    transition_scores.launch_part(of, weights, norm, gated, rms, products, squares)


def best(found: list[dict[str, Any]]) -> str:
    """`DSPINE_KERNELS_TRY` of the fastest choice of each case, the readout's product too."""
    kept = []
    for name in (*PARAMETERS, f"dspine {READOUT}"):
        mine = [row for row in found if row["op"] == name and "us" in row]
        if mine:
            launch = min(mine, key=lambda row: row["us"])["launch"]
            kept.append(
                launch if isinstance(launch, str) else f"linear_rows.{RANK}x{HIDDEN}={','.join(map(str, launch.values()))}"
            )
    return ";".join(kept)
