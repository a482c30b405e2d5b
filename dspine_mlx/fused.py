"""The core's Gated DeltaNet operations of a block under `mx.compile`: chains of elementwise steps become one kernel each.

For CUDA, where MLX has no Metal kernels to run and each step of the core's own code would be a launch. The compiled functions
are traced from that code, or from `lean_gdn` where that has the call, once for each length and thread.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

from dspine.common import gdn as core
from dspine.common.gdn import MAX_TOKENS, GdnFactors, GdnInputWeights, GdnLayout, GdnTokens
from dspine_mlx import lean_gdn

Arrays = tuple[mx.array, ...]


def gdn_inputs(
    projected: mx.array, window: mx.array, a: mx.array, b: mx.array, weights: GdnInputWeights, layout: GdnLayout
) -> GdnTokens:
    """`common.gdn.gdn_inputs`; prompts, which have any length, run as they are."""
    if projected.shape[1] > MAX_TOKENS:
        return lean_gdn.gdn_inputs(projected, window, a, b, weights, layout)
    bias = () if weights.conv_bias is None else (weights.conv_bias,)
    return GdnTokens(*_inputs(layout)(projected, window, a, b, weights.conv, weights.decay_log, weights.dt_bias, *bias))


def gdn_verify(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array, lengths: mx.array | None = None
) -> tuple[mx.array, GdnFactors]:
    """`common.gdn.gdn_verify`."""
    live = () if lengths is None else (lengths,)
    out, z, g = _verify()(q, k, v, log_decay, beta, state, *live)
    return out, GdnFactors(z, k, g)


def gdn_commit(
    states: mx.array, factors: GdnFactors, windows: mx.array, inputs: mx.array, m: mx.array
) -> tuple[mx.array, mx.array]:
    """`common.gdn.gdn_commit`."""
    return _commit()(states, factors.z, factors.k, factors.g, windows, inputs, m)


@cache
def _inputs(layout: GdnLayout) -> Callable[..., Arrays]:
    def run(
        projected: mx.array, window: mx.array, a: mx.array, b: mx.array, conv: mx.array, decay_log: mx.array, dt_bias: mx.array,
        *bias: mx.array,
    ) -> Arrays:  # fmt: skip
        weights = GdnInputWeights(conv, decay_log, dt_bias, bias[0] if bias else None)
        tokens = lean_gdn.gdn_inputs(projected, window, a, b, weights, layout)
        return tokens.q, tokens.k, tokens.v, tokens.log_decay, tokens.beta

    return mx.compile(run)


@cache
def _verify() -> Callable[..., Arrays]:
    def run(*inputs: mx.array) -> Arrays:
        verify = lean_gdn.gdn_verify if lean_gdn.one_token(*inputs) else core.gdn_verify.reference
        out, factors = verify(*inputs)
        return out, factors.z, factors.g

    return mx.compile(run)


@cache
def _commit() -> Callable[..., Arrays]:
    def run(
        states: mx.array, z: mx.array, k: mx.array, g: mx.array, windows: mx.array, inputs: mx.array, m: mx.array
    ) -> Arrays:
        block = states, GdnFactors(z, k, g), windows, inputs, m
        commit = lean_gdn.gdn_commit if lean_gdn.one_token_each(*block) else core.gdn_commit.reference
        return commit(*block)

    return mx.compile(run)


OPERATIONS: tuple[tuple[Callable[..., Any], Callable[..., bool] | None], ...] = (
    (gdn_inputs, lean_gdn.inputs_fit),
    (gdn_verify, None),
    (gdn_commit, None),
)
