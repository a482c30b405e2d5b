"""The sequential parts of the drafter family: DFlash2's convolution and candidate selector, Domino's GRU correction,
DSpark's Markov and confidence heads (`docs/algorithms.md`). One implementation for both runtimes.

Linear maps and tables come as callables (an `nn.Linear`, a quantised one, a packed one): `x [..., in] -> [..., out]`, and
`ids int [...] -> rows [..., r]`. B batch, R rows of a block, M proposals, K candidates, H hidden size, r rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import array_namespace, astype, at_least_float32, sigmoid, softmax
from dspine.common.sampling import sample_index

Array = Any
Map = Callable[[Array], Array]


# -- DFlash2 --------------------------------------------------------------------------------------------------------------


def grouped_conv(x: Array, delta: Array, base: Array) -> Array:
    """y_t[c] = sum_j (base[j, c] + delta_t[j, group(c)]) x_{t-j}[c], zeros before row 0.

    x [..., R, H]; delta [..., R, taps, groups]; base [taps, H]. Consecutive channels share a group. -> [..., R, H].
    """
    xp = array_namespace(x, delta, base)
    rows, hidden = x.shape[-2:]
    taps, groups = delta.shape[-2:]
    shape = (*x.shape[:-1], groups, hidden // groups)
    total = None
    for tap in range(min(taps, rows)):
        kernel = xp.reshape(astype(base[tap, :], x.dtype), (groups, hidden // groups))
        kernel = kernel + xp.expand_dims(delta[..., tap, :], axis=-1)
        shifted = x if tap == 0 else xp.concat([xp.zeros_like(x[..., :tap, :]), x[..., : rows - tap, :]], axis=-2)
        term = kernel * xp.reshape(shifted, shape)
        total = term if total is None else total + term
    return xp.reshape(total, x.shape)


def conv_kernels(x: Array, project: Map, taps: int) -> tuple[Array, Array]:
    """The two dynamic kernels of one sublayer from its normed input x [..., R, H]: side 0 acts on that input, side 1 on the
    sublayer's output. Rows of `project` [..., 2 * taps * groups] lie by side, tap, group. -> 2 x [..., R, taps, groups]."""
    xp = array_namespace(x)
    kernels = project(x)
    kernels = xp.reshape(kernels, (*kernels.shape[:-1], 2, taps, kernels.shape[-1] // (2 * taps)))
    return kernels[..., 0, :, :], kernels[..., 1, :, :]


@dataclass(frozen=True)
class SelectorWeights:
    """predecessor A and successor B: ids -> [..., r]; hidden: [..., H] -> [..., r]."""

    predecessor: Map
    successor: Map
    hidden: Map


def selector_lattice(hidden: Array, unary: Array, candidates: Array, anchor: Array, weights: SelectorWeights) -> Array:
    """S_t(p, c) = U_t(c) + <A[p] * (W h_t), B[c]> of every pair of neighbouring candidates, float32.

    hidden [B, M, H] final-normed; unary [B, M, K] (after scale and softcap) of candidates int [B, M, K]; anchor int [B]
    precedes row 0, whose K rows are equal. -> [B, M, K, K], what `transition.path_walk` walks over.
    """
    xp = array_namespace(hidden, unary, candidates)
    count = candidates.shape[-1]
    first = xp.broadcast_to(xp.reshape(astype(anchor, candidates.dtype), (-1, 1, 1)), (candidates.shape[0], 1, count))
    before = weights.predecessor(xp.concat([first, candidates[:, :-1, :]], axis=1))
    context = at_least_float32(before * xp.expand_dims(astype(weights.hidden(hidden), before.dtype), axis=-2))
    after = at_least_float32(weights.successor(candidates))
    return xp.expand_dims(at_least_float32(unary), axis=-2) + xp.matmul(context, xp.matrix_transpose(after))


# -- drawing token after token --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walk:
    """tokens int [B, M]; logits float32 [B, M, V], each row corrected given the tokens before it; q float32 [B, M, V] the
    distributions drawn from (None: greedy)."""

    tokens: Array
    logits: Array
    q: Array | None


@dataclass(frozen=True)
class Draws:
    """temperature 0 is greedy; else uniforms float32 [B, M]."""

    temperature: float = 0.0
    uniforms: Array | None = None

    def pick(self, logits: Array, step: int) -> tuple[Array, Array | None]:
        """logits [B, V] of draw `step` -> (tokens int [B], q [B, V] or None)."""
        xp = array_namespace(logits)
        if self.temperature == 0.0:
            return xp.argmax(logits, axis=-1), None
        q = softmax(logits / self.temperature)
        return sample_index(q, self.uniforms[:, step]), q


def walk(base: Array, anchor: Array, draws: Draws, correct: Callable[[int, Array], Array]) -> Walk:
    """Draw a block from left to right: row t is base_t + correct(t, token before it), where `correct` returns [B, V] (or
    None for no correction). base float32 [B, M, V], anchor int [B]."""
    xp = array_namespace(base)
    previous, tokens, rows, drawn = anchor, [], [], []
    for step in range(base.shape[1]):
        logits = base[:, step, :]
        bias = correct(step, previous)
        logits = logits if bias is None else logits + at_least_float32(bias)
        previous, q = draws.pick(logits, step)
        tokens.append(previous)
        rows.append(logits)
        drawn.append(q)
    q = None if drawn[0] is None else xp.stack(drawn, axis=1)
    return Walk(xp.stack(tokens, axis=1), xp.stack(rows, axis=1), q)


# -- DSpark ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MarkovWeights:
    """kind vanilla, gated or rnn; embed W1: ids -> [..., r]; bias W2: [..., r] -> [..., V]; mix: the gate's map [..., H + r] ->
    [..., r], or the recurrent cell's [..., 2r + H] -> [..., 3r]."""

    kind: str
    embed: Map
    bias: Map
    mix: Map | None = None


def markov_latent(hidden: Array, before: Array, state: Array | None, weights: MarkovWeights) -> tuple[Array, Array | None]:
    """What W2 is applied to in one step: hidden h_t [B, H], before W1[x_{t-1}] [B, r], state [B, r] (rnn) -> (latent [B, r],
    the state of the next step)."""
    xp = array_namespace(hidden, before)
    if weights.kind == "vanilla":
        return before, None
    assert weights.mix is not None
    hidden = astype(hidden, before.dtype)
    if weights.kind == "gated":
        return sigmoid(weights.mix(xp.concat([hidden, before], axis=-1))) * before, None
    state = xp.zeros_like(before) if state is None else state
    mixed = weights.mix(xp.concat([state, before, hidden], axis=-1))
    rank = before.shape[-1]
    gate = sigmoid(mixed[..., :rank])
    state = gate * state + (1 - gate) * xp.tanh(mixed[..., rank : 2 * rank])
    return xp.tanh(mixed[..., 2 * rank :]), state


def markov_walk(base: Array, hidden: Array, anchor: Array, weights: MarkovWeights | None, draws: Draws) -> Walk:
    """DSpark's draws: base logits float32 [B, M, V] and final-normed hidden [B, M, H] of the proposal rows. Without weights
    (rank 0) rows are independent."""
    state: list[Array | None] = [None]

    def correct(step: int, previous: Array) -> Array | None:
        if weights is None:
            return None
        latent, state[0] = markov_latent(hidden[:, step, :], weights.embed(previous), state[0], weights)
        return weights.bias(latent)

    return walk(base, anchor, draws, correct)


def confidence_logits(hidden: Array, anchor: Array, tokens: Array, project: Map, embed: Map | None) -> Array:
    """w . [h_t; W1[x_{t-1}]] + b, float32 [B, M]; `embed` None leaves the Markov part out. sigmoid gives the expected
    acceptance of draft t, a function of the tokens BEFORE it only."""
    xp = array_namespace(hidden, tokens)
    features = hidden
    if embed is not None:
        first = xp.expand_dims(astype(anchor, tokens.dtype), axis=-1)
        before = embed(xp.concat([first, tokens[:, :-1]], axis=1))
        features = xp.concat([hidden, astype(before, hidden.dtype)], axis=-1)
    return at_least_float32(xp.squeeze(project(features), axis=-1))


# -- Domino ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DominoWeights:
    """input [..., H] and state [..., G] -> [..., 3G]: the GRU's maps, gates by r, z, n; down [..., H + G] -> [..., e]
    and up [..., e] -> [..., V]; embed: ids -> [..., H], the target's table."""

    input: Map
    state: Map
    down: Map
    up: Map
    embed: Map


def gru_step(x: Array, state: Array | None, weights: DominoWeights) -> Array:
    """One step of a GRU without biases: x [B, H], state [B, G] (None: zeros) -> [B, G].

    r, z = sigmoid(W x + U s); n = tanh(W_n x + r * (U_n s)); s' = (1 - z) n + z s.
    """
    xp = array_namespace(x)
    left = weights.input(x)
    size = left.shape[-1] // 3
    if state is None:
        return (1 - sigmoid(left[..., size : 2 * size])) * xp.tanh(left[..., 2 * size :])
    right = weights.state(state)
    reset, keep = (sigmoid(left[..., part] + right[..., part]) for part in (slice(0, size), slice(size, 2 * size)))
    new = xp.tanh(left[..., 2 * size :] + reset * right[..., 2 * size :])
    return (1 - keep) * new + keep * state


def domino_walk(base: Array, hidden: Array, anchor: Array, weights: DominoWeights, draws: Draws) -> Walk:
    """Domino's draws: proposal 0 from its base logits, then base_i + E2 silu(E0 [z_i; s_i]) with s_i the GRU's state after
    [anchor, tokens 0..i-1]. base float32 [B, M, V], hidden z [B, M, H]."""
    xp = array_namespace(base, hidden)
    state: list[Array | None] = [None]

    def correct(step: int, previous: Array) -> Array | None:
        state[0] = gru_step(astype(weights.embed(previous), hidden.dtype), state[0], weights)
        if step == 0:
            return None
        inner = weights.down(xp.concat([hidden[:, step, :], state[0]], axis=-1))
        return weights.up(inner * sigmoid(inner))

    return walk(base, anchor, draws, correct)
