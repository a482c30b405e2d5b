"""From logits to distributions and draws: temperature, top-k, top-p, min-p, penalties; counter-based uniforms.

Randomness never comes from a framework: uniforms are made on the host from NumPy's Philox, keyed by (seed, request,
position), and handed in. So equal logits give equal tokens, alone or in a batch, on either backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dspine.common.arrays import arange, array_namespace, astype, at_least_float32, softmax, take_along, top_k
from dspine.common.errors import DSpineError
from dspine.common.registry import operation

Array = Any
DRAFT, ACCEPT, DRAW = 0, 1, 2  # the lanes of `uniforms`
LEAST_TEMPERATURE = 1e-6  # above 0: logits divided by less than this leave float32's range, and every draw is token 0
_BLOCK = 256  # two-level inverse CDF: sums of 256 first, so float32 stays exact enough at any vocabulary


@dataclass(frozen=True)
class SamplingParams:
    """How the target's distribution is shaped. Applied in this order: penalties, temperature, top-k, top-p, min-p.

    temperature 0 is greedy, any other at least `LEAST_TEMPERATURE`. top_k 0, top_p 1 and min_p 0 switch a filter off.
    repetition_penalty counts the prompt and the output (as Hugging Face), presence and frequency penalties the output only (as
    OpenAI).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = (
            ("temperature", not self.temperature or LEAST_TEMPERATURE <= self.temperature <= 100.0, "0 (greedy) or 1e-06..100"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0, at most 1 (1 is off)"),
            ("min_p", 0.0 <= self.min_p < 1.0, "0 (off) up to, not including, 1"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 10.0, "above 0, at most 10 (1 is off)"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "-2..2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "-2..2"),
            ("seed", 0 <= self.seed < 2**63, "0..2^63-1"),
        )
        for name, ok, expected in rules:
            if not ok:
                raise DSpineError(f"{name} must be {expected}, got {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def unfiltered(self) -> bool:
        """Whether the distribution is softmax(logits / temperature) and nothing else."""
        return (self.top_k, self.top_p, self.min_p) == (0, 1.0, 0.0) and not self.penalised

    def with_temperature(self, temperature: float) -> SamplingParams:
        return replace(self, temperature=temperature)


def uniforms(seed: int, request: int, start: int, count: int) -> np.ndarray:
    """Uniforms of output positions start..start+count-1: float32 [count, 3] in [0, 1); lanes DRAFT, ACCEPT, DRAW.

    Position p always gets Philox block p of the key (seed, request), whatever the round it falls into. 23 bits each, so
    that u * total < total also after float32 rounding.
    """
    philox = np.random.Philox(
        key=np.array([seed, request], dtype=np.uint64), counter=np.array([start, 0, 0, 0], dtype=np.uint64)
    )
    raw = philox.random_raw(4 * count).reshape(count, 4)[:, :3]
    return ((raw >> np.uint64(41)).astype(np.float32)) * np.float32(2.0**-23)


@operation
def token_probabilities(logits: Array, params: SamplingParams) -> Array:
    """softmax(logits / temperature) after top-k, top-p and min-p, renormalised: [..., V] -> float32 [..., V].

    Ties at a threshold are kept. Temperature must be above 0.
    """
    xp = array_namespace(logits)
    logits = at_least_float32(logits) / params.temperature
    lowest = xp.full_like(logits, float("-inf"))
    if 0 < params.top_k < logits.shape[-1]:
        values, _ = top_k(logits, params.top_k)
        logits = xp.where(logits >= values[..., -1:], logits, lowest)
    p = softmax(logits)
    if params.top_p < 1.0:
        kept = _nucleus(p, params)
        p = xp.where(kept, p, xp.zeros_like(p))
        p = p / xp.sum(p, axis=-1, keepdims=True)
    if params.min_p > 0.0:
        p = xp.where(p >= params.min_p * xp.max(p, axis=-1, keepdims=True), p, xp.zeros_like(p))
        p = p / xp.sum(p, axis=-1, keepdims=True)
    return p


def _nucleus(p: Array, params: SamplingParams) -> Array:
    """Tokens of the smallest set whose mass reaches top_p (mass BEFORE a token below top_p keeps it)."""
    xp = array_namespace(p)
    ordered = top_k(p, params.top_k)[0] if 0 < params.top_k < p.shape[-1] else xp.flip(xp.sort(p, axis=-1), axis=-1)
    before = xp.cumulative_sum(ordered, axis=-1) - ordered
    smallest = xp.min(xp.where(before < params.top_p, ordered, xp.ones_like(ordered)), axis=-1, keepdims=True)
    return p >= smallest


@operation
def sample_index(p: Array, u: Array) -> Array:
    """Inverse-CDF draw: weights `p` [..., n] (need not sum to 1), `u` [...] in [0, 1) -> index int [...].

    Two levels (blocks of 256), so that a float32 running sum stays short. A weight of zero is never drawn.
    """
    xp = array_namespace(p)
    n = p.shape[-1]
    if n <= _BLOCK:
        return _draw(p, u * xp.sum(p, axis=-1))[0]
    pad = -n % _BLOCK
    if pad:
        p = xp.concat([p, xp.zeros_like(p[..., :pad])], axis=-1)
    blocks = xp.reshape(p, (*p.shape[:-1], (n + pad) // _BLOCK, _BLOCK))
    sums = xp.sum(blocks, axis=-1)
    block, before = _draw(sums, u * xp.sum(sums, axis=-1))
    wide = xp.broadcast_to(xp.reshape(block, (*block.shape, 1, 1)), (*block.shape, 1, _BLOCK))
    inside = xp.squeeze(take_along(blocks, wide, axis=-2), axis=-2)
    index, _ = _draw(inside, u * xp.sum(sums, axis=-1) - before)
    return block * _BLOCK + index


def _draw(weights: Array, threshold: Array) -> tuple[Array, Array]:
    """First index whose running sum exceeds `threshold` [...], and the sum before it; clamped to positive weights."""
    xp = array_namespace(weights)
    running = xp.cumulative_sum(weights, axis=-1)
    positions = arange(weights, weights.shape[-1])
    positive = weights > 0
    last = xp.max(xp.where(positive, positions, xp.zeros_like(positions)), axis=-1)
    hit = positive & (running > xp.expand_dims(threshold, axis=-1))
    index = xp.min(xp.where(hit, positions, xp.expand_dims(last, axis=-1)), axis=-1)
    before = xp.squeeze(take_along(running - weights, xp.expand_dims(index, axis=-1)), axis=-1)
    return index, before


def sample_candidates(values: Array, candidates: Array, u: Array, temperature: float) -> tuple[Array, Array]:
    """Draw each row on its own among its candidates: values (logits) and candidates int [..., K], u [...] in [0, 1) ->
    (tokens [...], q = softmax(values / temperature) [..., K], the distribution drawn from)."""
    xp = array_namespace(values)
    q = softmax(values / temperature)
    picks = xp.expand_dims(sample_index(q, u), axis=-1)
    return xp.squeeze(take_along(candidates, picks), axis=-1), q


@operation
def penalise(logits: Array, block: Array, counts: Array, output_counts: Array, params: SamplingParams) -> Array:
    """Repetition, presence and frequency penalties over a block, as if its tokens came one by one.

    logits [B, w, V]: row i follows block token i; block int [B, w]: the anchor and the drafts. counts / output_counts
    float32 [B, V]: occurrences in prompt + output / in the output, the anchor INCLUDED. Row i also counts block tokens
    1..i; a rejected draft is never counted, because the rows after it are not used and `counts` is not changed here.
    """
    xp = array_namespace(logits)
    logits = at_least_float32(logits)
    vocabulary = arange(logits, logits.shape[-1])
    seen, emitted, rows = counts, output_counts, []
    for i in range(block.shape[1]):
        if i:
            once = astype(vocabulary == xp.expand_dims(block[:, i], axis=-1), counts.dtype)
            seen, emitted = seen + once, emitted + once
        row = logits[:, i, :]
        scaled = xp.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
        row = xp.where(seen > 0, scaled, row)
        present = astype(emitted > 0, row.dtype)
        rows.append(row - params.presence_penalty * present - params.frequency_penalty * emitted)
    return xp.stack(rows, axis=1)
