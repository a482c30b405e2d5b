"""Every kernel on shapes that leave lanes, rows and columns idle: in check mode, and past clang's address spaces.

Check mode finds races, reads out of bounds by one element, and reads of what was never written. Arrays of fewer than 8 elements
lie in `constant` memory, the others in `device`: both kinds occur here.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from dspine.common import gdn, transition
from dspine.kernels_metal.accept import accept_greedy, accept_point_mass
from dspine.kernels_metal.correct_length import correct_length
from dspine.kernels_metal.draft_signals import draft_signals
from dspine.kernels_metal.gathered_rows import gathered_rows
from dspine.kernels_metal.gdn_commit import gdn_commit
from dspine.kernels_metal.gdn_inputs import gdn_inputs
from dspine.kernels_metal.gdn_verify import gdn_verify, gdn_verify_deferred
from dspine.kernels_metal.injection_gate import injection_gate
from dspine.kernels_metal.injection_write import injection_write
from dspine.kernels_metal.path_walk import path_walk, path_walk_sampled
from dspine.kernels_metal.quantized_rows import quantized_rows
from dspine.kernels_metal.select_length import select_length
from dspine.kernels_metal.transition_scores import transition_scores
from tests.metal.emulator import dtype_name, emulated_metal_kernel
from tests.metal.lint import address_space_errors, lint_unavailable
from tests.metal.signature import Operand, kernel_text
from tests.metal.test_signature import check as check_text
from tests.metal_kernels.running import low, run_from, run_metal
from tests.metal_kernels.test_decisions import tables_of
from tests.metal_kernels.test_draft import weights_of
from tests.metal_kernels.test_gdn import block, committed
from tests.metal_kernels.test_packed import packed

I32, F32 = np.int32, np.float32


def normal(rng: Any, *shape: int) -> np.ndarray:
    return np.float32(rng.normal(size=shape))


def gdn_runs(rng: Any, run: Any, *heads: int) -> None:
    args, lengths = block(rng, 2, 3, *heads), np.array([3, 1], I32)
    out = run(gdn_verify, (*args, lengths))
    run(gdn_commit, (*committed(rng, 2, 2, 3, *heads), np.array([3, 0], I32)))
    run(gdn_verify_deferred, (*args, gdn.GdnFactors(*out[1:]), np.array([2, 0], I32), lengths))
    layout = gdn.GdnLayout(*heads)
    for bias in (None, normal(rng, layout.channels)):
        weights = gdn.GdnInputWeights(normal(rng, layout.channels, 4), normal(rng, heads[1]), normal(rng, heads[1]), bias)
        gates = (normal(rng, 1, 2, heads[1]) for _ in range(2))
        run(gdn_inputs, (normal(rng, 1, 2, layout.channels), normal(rng, 1, 3, layout.channels), *gates, weights, layout))


def draft_runs(rng: Any, run: Any, width: int, count: int) -> None:
    weights, norm = weights_of(rng, width, 5, 3, "bfloat16"), transition.RMSNorm(np.ones(width, F32), 1e-6)
    u, z, p = normal(rng, 3, width), normal(rng, 3, 1, 5), normal(rng, 3, count, 5)
    run(injection_gate, (low(z, "bfloat16"), low(p, "bfloat16"), weights))
    run(injection_write, (u, normal(rng, 3, 3), weights.write))
    run(injection_write, (u, normal(rng, 3, 3), weights.write, norm))
    run(transition_scores, (u, p, normal(rng, 3, count, width), weights, norm))
    scores, candidates = normal(rng, 1, 2, count, count), np.arange(2 * count, dtype=I32).reshape(1, 2, count)
    run(path_walk, (scores, candidates))
    run(path_walk_sampled, (scores, candidates, np.float32(rng.random((1, 2))), 1.0))
    run(draft_signals, (normal(rng, 2, width * 10), count))


def decision_runs(rng: Any, run: Any, drafts: int, vocabulary: int) -> None:
    tables, limit = tables_of(rng, drafts, 2, 4), np.array([drafts + 1, 2], I32)
    signals = (np.float32(rng.random((2, drafts))) for _ in range(2))
    length, _, survival = run(select_length, (*signals, limit, tables))
    run(correct_length, (rng.integers(0, 5, (2, drafts + 1, 2)).astype(I32), length, survival, limit, tables))
    logits = normal(rng, 2, drafts + 1, vocabulary)
    draft, most = np.zeros((2, drafts), I32), np.array([drafts, 0], I32)
    run(accept_greedy, (logits, draft, most))
    uniforms = np.float32(rng.random((2, drafts))), np.float32(rng.random((2, drafts + 1)))
    run(accept_point_mass, (np.abs(logits), draft, most, *uniforms))


def packed_runs(rng: Any, run: Any, rows: int, columns: int) -> None:
    words, scales, biases = packed(rng, (3, columns, 64), 6, 32)
    x = normal(rng, rows, 64)
    run(quantized_rows, (x, words[0], scales.values[0], biases.values[0], 6, 32))
    picks = rng.integers(0, 3, rows * 2).astype(I32)
    run(gathered_rows, (x, words, scales.values, biases.values, picks, 6, 32))


RUNS = {
    "packed": lambda rng, run: packed_runs(rng, run, 3, 5),
    "packed, more rows": lambda rng, run: packed_runs(rng, run, 9, 18),
    "gdn": lambda rng, run: gdn_runs(rng, run, 1, 2, 5, 3),
    "gdn, one number a head": lambda rng, run: gdn_runs(rng, run, 1, 1, 1, 1),
    "draft": lambda rng, run: draft_runs(rng, run, 7, 3),
    "draft, wider": lambda rng, run: draft_runs(rng, run, 33, 8),
    "decisions": lambda rng, run: decision_runs(rng, run, 3, 70),
    "decisions, two tokens": lambda rng, run: decision_runs(rng, run, 1, 3),
}


@pytest.mark.parametrize("name", RUNS)
def test_check_mode(name):
    """The results of check mode are those of the fast mode, too."""

    def run(kernel, args):
        checked = run_from(functools.partial(emulated_metal_kernel, check=True), kernel, args)
        assert [x.tobytes() for x in checked] == [x.tobytes() for x in run_metal(kernel, args)]
        return checked

    RUNS[name](np.random.default_rng(1), run)


def watching(look: Any, **made: Any) -> Any:
    """A kernel maker that calls look(name, source, header, inputs, outputs, template) before the emulator runs a launch."""
    emulated = emulated_metal_kernel(**made)

    def kernel(**call: Any) -> Any:
        operands = [
            Operand(n, dtype_name(x.dtype), tuple(x.shape)) for n, x in zip(made["input_names"], call["inputs"], strict=True)
        ]
        shapes = zip(made["output_names"], call["output_dtypes"], call["output_shapes"], strict=True)
        template = [(n, v if isinstance(v, int) else dtype_name(v)) for n, v in call["template"]]
        outputs = [Operand(n, dtype_name(d), s) for n, d, s in shapes]
        look(made["name"], made["source"], made["header"], operands, outputs, template)
        return emulated(**call)

    return kernel


@pytest.mark.parametrize("name", RUNS)
def test_address_spaces(name):
    if reason := lint_unavailable():
        pytest.skip(reason)
    errors: list[str] = []

    def look(name, source, header, inputs, outputs, template):
        errors.extend(address_space_errors(kernel_text(name, source, header, inputs, outputs, template), source))

    RUNS[name](np.random.default_rng(1), functools.partial(run_from, functools.partial(watching, look)))
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize("name", ["gdn", "draft", "decisions"])
def test_the_emulator_runs_the_text_that_mlx_makes(name):
    """MLX shows the text of an exported launch, without Metal too: signature, attributes, template, all of it."""

    def look(*text):
        check_text(*text)

    RUNS[name](np.random.default_rng(1), functools.partial(run_from, functools.partial(watching, look)))
