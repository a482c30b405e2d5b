"""Gated DeltaNet over a short block, with compact factors for rollback (`algorithms` 3; paper equations 1, 2, 3, 7, 10).

Letters: B batch, T or w tokens of the block, Hk key heads, Hv value heads (a multiple of Hk; value head h reads key head
h // (Hv / Hk)), Dk and Dv their sizes, C convolution channels (q, k, v behind one another: 2 Hk Dk + Hv Dv), L layers.

Conventions: batch first. State float32 [B, Hv, Dv, Dk] (float64 where the reference runs). Queries and keys have unit
norm, the query also carries 1/sqrt(Dk). `log_decay` (at most 0) and `beta` have the state's dtype. Lengths are int [B]:
rows at or after a length are padding and may hold anything, NaN included. Only differences g_i - g_j <= 0 are
exponentiated, and they are masked before the exponential; `e^{-g}` is never formed. H is inverted by forward
substitution: its power series is exact in algebra and wrong in low precision for nearly parallel keys.

`gdn_recurrence` is equation 1 token by token: the witness of the tests, and no operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import arange, array_namespace, astype, at_least_float32, is_low_precision, sigmoid, take_along
from dspine.common.errors import DSpineError
from dspine.common.registry import namespace_name, operation

Array = Any
MAX_TOKENS = 16  # longest block of `gdn_verify`
NORM_EPS = 1e-6  # inside the l2 norm of q and k, as the models have it


@dataclass(frozen=True)
class GdnLayout:
    """Heads and their sizes."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        _check_heads("GdnLayout", self.key_heads, self.value_heads)

    @property
    def channels(self) -> int:
        """C: q, k and v behind one another."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class GdnInputWeights:
    """One layer: conv [C, width] (depthwise; tap width-1 meets the newest input), decay_log A_log [Hv], dt_bias [Hv],
    conv_bias [C] or None."""

    conv: Array
    decay_log: Array
    dt_bias: Array
    conv_bias: Array | None = None


@dataclass(frozen=True)
class GdnTokens:
    """What a block gives the recurrence: q, k [B, T, Hk, Dk], v [B, T, Hv, Dv] in the dtype of the projections;
    log_decay, beta float32 [B, T, Hv]."""

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array


@dataclass(frozen=True)
class GdnFactors:
    """Compact factors of a block: z [B, w, Hv, Dv] and cumulative log decay g [B, w, Hv] in the state's dtype;
    k [B, w, Hk, Dk] as it came in (its padded rows may hold anything). Stacked over layers: [L, B, ...]."""

    z: Array
    k: Array
    g: Array


@operation
def gdn_inputs(projected: Array, window: Array, a: Array, b: Array, weights: GdnInputWeights, layout: GdnLayout) -> GdnTokens:
    """Short causal convolution over the kept window, SiLU, split, l2 norm of q and k, decay and write strength.

    projected [B, T, C]: pre-convolution inputs of the block; window [B, width-1, C]: those of the tokens before it, oldest
    first; a, b [B, T, Hv]. log_decay = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b), in float32 from float32 (a
    beta rounded to bfloat16 would drift: case N3). T is free. Computed in float32, then q, k, v in the dtype of
    `projected`. Raises `DSpineError` on shapes that do not fit `layout`.
    """
    xp = array_namespace(projected, window)
    _check_inputs(projected, window, a, b, weights, layout)
    batch, count, _ = projected.shape
    width = weights.conv.shape[1]
    rows = at_least_float32(xp.concat([astype(window, projected.dtype), projected], axis=1))
    conv = astype(weights.conv, rows.dtype)
    mixed = sum(rows[:, j : j + count, :] * conv[:, j] for j in range(width))
    if weights.conv_bias is not None:
        mixed = mixed + astype(weights.conv_bias, rows.dtype)
    mixed = mixed * sigmoid(mixed)
    keys = layout.key_heads * layout.key_dim
    shape = (batch, count, layout.key_heads, layout.key_dim)
    q = _unit(xp.reshape(mixed[..., :keys], shape)) * layout.key_dim**-0.5
    k = _unit(xp.reshape(mixed[..., keys : 2 * keys], shape))
    v = xp.reshape(mixed[..., 2 * keys :], (batch, count, layout.value_heads, layout.value_dim))
    wide_a, wide_b = at_least_float32(a), at_least_float32(b)
    bias = astype(weights.dt_bias, wide_a.dtype)
    log_decay = -xp.exp(astype(weights.decay_log, wide_a.dtype)) * _softplus(wide_a + bias)
    dtype = projected.dtype
    return GdnTokens(astype(q, dtype), astype(k, dtype), astype(v, dtype), log_decay, sigmoid(wide_b))


@operation
def gdn_verify(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, lengths: Array | None = None
) -> tuple[Array, GdnFactors]:
    """Outputs and compact factors of w = 1..16 tokens at once (equations 3 and 10); the state is read, not changed.

    q, k [B, w, Hk, Dk], v [B, w, Hv, Dv] of one dtype; log_decay, beta float32 [B, w, Hv]; state float32
    [B, Hv, Dv, Dk]; lengths int [B] (None: all w rows are live; 0: an unused slot, whose state may hold anything).
    Returns o [B, w, Hv, Dv] in the dtype of v, and the factors. In padded rows o and z are 0 and g repeats the last live
    row's. w = 1 runs the same code. Raises `DSpineError` on wrong ranks, dtypes, head ratios, w over 16, and (NumPy
    arrays and torch on the CPU; elsewhere it would be a host read, see `check_log_decay`) log decays above 0.
    """
    xp = array_namespace(q, k, v, state)
    _check_block(q, k, v, log_decay, beta, state)
    if namespace_name(log_decay) == "numpy":
        check_log_decay(log_decay, lengths)
    out_dtype, kept_k = v.dtype, k
    q, k, v = (astype(x, state.dtype) for x in (q, k, v))
    count = q.shape[1]
    if lengths is not None:
        live = xp.expand_dims(arange(q, count), axis=0) < xp.expand_dims(lengths, axis=-1)  # [B, w]
        q, k, v, log_decay, beta = (_where_rows(live, x) for x in (q, k, v, log_decay, beta))
        state = _where_rows(lengths > 0, state)
    g = xp.cumulative_sum(log_decay, axis=1)
    heads = xp.permute_dims(g, (0, 2, 1))  # [B, Hv, w]
    decay = xp.exp(heads)
    between = _decay_between(heads)
    keys, queries = (_heads_first(x, v.shape[2]) for x in (k, q))  # [B, Hv, w, Dk]
    transposed = xp.permute_dims(state, (0, 1, 3, 2))
    from_keys, from_queries = xp.matmul(keys, transposed), xp.matmul(queries, transposed)  # [B, Hv, w, Dv]
    lower = xp.permute_dims(keys, (0, 1, 3, 2))
    strength = xp.expand_dims(xp.permute_dims(beta, (0, 2, 1)), axis=-1)  # [B, Hv, w, 1]
    values = xp.permute_dims(v, (0, 2, 1, 3))
    right = strength * (values - xp.expand_dims(decay, axis=-1) * from_keys)
    z = _substitute(strength * (between * xp.matmul(keys, lower)), right)
    out = xp.expand_dims(decay, axis=-1) * from_queries + xp.matmul(between * xp.matmul(queries, lower), z)
    z, out = (xp.permute_dims(x, (0, 2, 1, 3)) for x in (z, out))
    return astype(out, out_dtype), GdnFactors(z, kept_k, g)


@operation
def gdn_commit(states: Array, factors: GdnFactors, windows: Array, inputs: Array, m: Array) -> tuple[Array, Array]:
    """The state and convolution window after the first m tokens of a block, for ALL layers at once (equation 7).

    states float32 [L, B, Hv, Dv, Dk]; factors stacked over layers (z [L, B, w, Hv, Dv], k [L, B, w, Hk, Dk], g
    [L, B, w, Hv]); windows [L, B, width-1, C] and the block's pre-convolution inputs [L, B, w, C]; m int [B], 0..w (0
    leaves that row exactly as it is). Returns (states, windows). A kernel may write in place and return its arguments:
    use what is returned, never the arguments afterwards. Raises `DSpineError` on shapes and dtypes that do not fit.
    """
    _check_commit(states, factors, m)
    _check_windows(states, factors, windows, inputs)
    return _states_after(states, factors, m), _window_after(windows, inputs, m)


def _states_after(states: Array, factors: GdnFactors, m: Array) -> Array:
    """Equation 7, masked: what lies in rows m and later of the factors never matters."""
    xp = array_namespace(states, factors.z)
    count, value_heads = factors.z.shape[2], states.shape[2]
    index = xp.reshape(m, (1, -1, 1, 1))
    rows = xp.reshape(arange(states, count), (1, 1, -1, 1))
    kept = rows < index  # [1, B, w, 1]
    g = xp.where(kept, factors.g, xp.zeros_like(factors.g))
    last = xp.broadcast_to(xp.where(index > 0, index - 1, xp.zeros_like(index)), (*g.shape[:2], 1, g.shape[3]))
    total = take_along(g, last, axis=2)  # [L, B, 1, Hv]
    exponent = xp.where(kept, total - g, xp.zeros_like(g))
    weight = xp.exp(exponent)
    z = xp.where(xp.expand_dims(kept, axis=-1), factors.z, xp.zeros_like(factors.z)) * xp.expand_dims(weight, axis=-1)
    k = astype(factors.k, states.dtype)
    k = xp.where(xp.expand_dims(kept, axis=-1), k, xp.zeros_like(k))
    k = _repeat_heads(k, value_heads, axis=3)
    update = xp.matmul(xp.permute_dims(z, (0, 1, 3, 4, 2)), xp.permute_dims(k, (0, 1, 3, 2, 4)))  # [L, B, Hv, Dv, Dk]
    carry = xp.reshape(xp.exp(total), (*states.shape[:3], 1, 1))
    return carry * states + update  # m = 0: times 1, plus 0


@operation
def gdn_verify_deferred(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    state: Array,
    pending: GdnFactors,
    pending_m: Array,
    lengths: Array | None = None,
) -> tuple[Array, GdnFactors, Array]:
    """`gdn_verify` of one layer on the state after `pending_m` int [B] tokens of the last round's factors.

    The state is read once and written back once; arguments as in `gdn_verify`, `pending` as in `GdnFactors`. Returns
    (o, factors, state): a kernel may have written the state in place. Rows of length 0 with pending_m 0 stay as they are.
    """
    xp = array_namespace(q, state)
    stacked = GdnFactors(*(xp.expand_dims(x, axis=0) for x in (pending.z, pending.k, pending.g)))
    states = xp.expand_dims(state, axis=0)
    _check_commit(states, stacked, pending_m)
    state = _states_after(states, stacked, pending_m)[0]
    out, factors = gdn_verify.reference(q, k, v, log_decay, beta, state, lengths)
    return out, factors, state


def gdn_recurrence(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array
) -> tuple[Array, Array, Array, Array]:
    """Equation 1, token by token, in the state's dtype: the independent witness. Shapes as in `gdn_verify`, any T.

    Returns o [B, T, Hv, Dv], z [B, T, Hv, Dv], the state after every token [B, T, Hv, Dv, Dk], and the last state.
    """
    xp = array_namespace(q, k, v, state)
    q, k, v = (astype(x, state.dtype) for x in (q, k, v))
    outs, writes, states = [], [], []
    for i in range(q.shape[1]):
        key, query = (_repeat_heads(x[:, i], v.shape[2], axis=1) for x in (k, q))  # [B, Hv, Dk]
        faded = xp.exp(log_decay[:, i])[..., None, None] * state
        read = xp.sum(faded * key[:, :, None, :], axis=-1)
        z = beta[:, i][..., None] * (v[:, i] - read)
        state = faded + z[..., None] * key[:, :, None, :]
        outs.append(xp.sum(state * query[:, :, None, :], axis=-1))
        writes.append(z)
        states.append(state)
    return xp.stack(outs, axis=1), xp.stack(writes, axis=1), xp.stack(states, axis=1), state


def check_log_decay(log_decay: Array, lengths: Array | None = None) -> None:
    """Raise where a live log decay is above 0: then the decay itself was passed. Reads on the host."""
    xp = array_namespace(log_decay)
    if lengths is not None:
        live = xp.expand_dims(arange(log_decay, log_decay.shape[1]), axis=0) < xp.expand_dims(lengths, axis=-1)
        log_decay = _where_rows(live, log_decay)
    largest = float(xp.max(log_decay)) if 0 not in log_decay.shape else 0.0
    if largest > 0.0:
        raise DSpineError(
            f"log_decay must be at most 0, got {largest:.6g}: it is the LOG of the decay (decay in (0, 1]); pass log(decay)"
        )


def _decay_between(g: Array) -> Array:
    """Gamma_ij = e^{g_i - g_j} for j <= i, else 0: g [..., w] -> [..., w, w]; masked before the exponential."""
    xp = array_namespace(g)
    rows = arange(g, g.shape[-1])
    lower = xp.expand_dims(rows, axis=0) <= xp.expand_dims(rows, axis=-1)
    difference = xp.expand_dims(g, axis=-1) - xp.expand_dims(g, axis=-2)
    zeros = xp.zeros_like(difference)
    return xp.where(lower, xp.exp(xp.where(lower, difference, zeros)), zeros)


def _substitute(matrix: Array, right: Array) -> Array:
    """Solve (I + strict lower part of `matrix` [..., w, w]) Z = `right` [..., w, Dv], one row after another."""
    xp = array_namespace(matrix, right)
    solved = right[..., :1, :]
    for i in range(1, right.shape[-2]):
        row = right[..., i : i + 1, :] - xp.matmul(matrix[..., i : i + 1, :i], solved)
        solved = xp.concat([solved, row], axis=-2)
    return solved


def _window_after(windows: Array, inputs: Array, m: Array) -> Array:
    """The width-1 inputs that end at token m: rows m..m+width-2 of [window, inputs]."""
    xp = array_namespace(windows, inputs)
    joined = xp.concat([windows, astype(inputs, windows.dtype)], axis=2)
    rows = xp.reshape(m, (1, -1, 1, 1)) + xp.reshape(arange(windows, windows.shape[2], m.dtype), (1, 1, -1, 1))
    return take_along(joined, xp.broadcast_to(rows, windows.shape), axis=2)


def _repeat_heads(x: Array, value_heads: int, axis: int) -> Array:
    """Key heads at `axis` repeated to value heads: head h of the result is head h // (Hv / Hk)."""
    xp = array_namespace(x)
    repeat = value_heads // x.shape[axis]
    if repeat == 1:
        return x
    shape = list(x.shape)
    wide = xp.broadcast_to(xp.expand_dims(x, axis=axis + 1), (*shape[: axis + 1], repeat, *shape[axis + 1 :]))
    return xp.reshape(wide, (*shape[:axis], value_heads, *shape[axis + 1 :]))


def _heads_first(x: Array, value_heads: int) -> Array:
    """[B, w, Hk, Dk] -> [B, Hv, w, Dk]."""
    return _repeat_heads(array_namespace(x).permute_dims(x, (0, 2, 1, 3)), value_heads, axis=1)


def _where_rows(mask: Array, x: Array) -> Array:
    """`x` where `mask` (over its leading axes), else 0: NaN in padding must not spread."""
    xp = array_namespace(mask, x)
    return xp.where(xp.reshape(mask, (*mask.shape, *(1,) * (len(x.shape) - len(mask.shape)))), x, xp.zeros_like(x))


def _softplus(x: Array) -> Array:
    """log(1 + e^x) without overflow."""
    xp = array_namespace(x)
    return xp.where(x > 0, x, xp.zeros_like(x)) + xp.log1p(xp.exp(-xp.abs(x)))


def _unit(x: Array) -> Array:
    """x / sqrt(sum x^2 + eps) over the last axis."""
    xp = array_namespace(x)
    return x / xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)


def _check_heads(where: str, key_heads: int, value_heads: int) -> None:
    if key_heads < 1 or value_heads % key_heads:
        raise DSpineError(f"{where}: value heads must be a multiple of key heads, got {value_heads} and {key_heads}")


def _expect(where: str, name: str, x: Array, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise DSpineError(f"{where}: {name} must have shape {shape}, got {tuple(x.shape)}")


def _expect_rank(where: str, name: str, x: Array, letters: str) -> None:
    if len(x.shape) != len(letters.split(", ")):
        raise DSpineError(f"{where}: {name} must have shape [{letters}], got {tuple(x.shape)}")


def _expect_state_dtype(where: str, name: str, x: Array, dtype: Any) -> None:
    if is_low_precision(x) or "float" not in str(x.dtype):
        raise DSpineError(f"{where}: {name} must be float32, got {x.dtype}: the recurrence does not survive less")
    if x.dtype != dtype:
        raise DSpineError(f"{where}: {name} must have the state's dtype {dtype}, got {x.dtype}")


def _expect_int(where: str, name: str, x: Array, batch: int) -> None:
    _expect(where, name, x, (batch,))
    if "int" not in str(x.dtype):
        raise DSpineError(f"{where}: {name} must be an integer array, got {x.dtype}")


def _check_inputs(projected: Array, window: Array, a: Array, b: Array, weights: GdnInputWeights, layout: GdnLayout) -> None:
    where = "gdn_inputs"
    _expect_rank(where, "projected", projected, "B, T, C")
    batch, count, _ = projected.shape
    _expect(where, "projected", projected, (batch, count, layout.channels))
    _expect_rank(where, "weights.conv", weights.conv, "C, width")
    _expect(where, "window", window, (batch, weights.conv.shape[1] - 1, layout.channels))
    _expect(where, "weights.conv", weights.conv, (layout.channels, weights.conv.shape[1]))
    for name, x in (("a", a), ("b", b)):
        _expect(where, name, x, (batch, count, layout.value_heads))
    for name, x in (("weights.decay_log", weights.decay_log), ("weights.dt_bias", weights.dt_bias)):
        _expect(where, name, x, (layout.value_heads,))


def _check_block(q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array) -> None:
    where = "gdn_verify"
    _expect_rank(where, "q", q, "B, w, Hk, Dk")
    _expect_rank(where, "v", v, "B, w, Hv, Dv")
    batch, count, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    if not 1 <= count <= MAX_TOKENS:
        raise DSpineError(f"{where}: 1..{MAX_TOKENS} tokens at once, got {count}; cut longer input into blocks")
    _check_heads(where, key_heads, value_heads)
    _expect(where, "k", k, (batch, count, key_heads, key_dim))
    _expect(where, "v", v, (batch, count, value_heads, value_dim))
    _expect(where, "state", state, (batch, value_heads, value_dim, key_dim))
    if not q.dtype == k.dtype == v.dtype:
        raise DSpineError(f"{where}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    _expect_state_dtype(where, "state", state, state.dtype)
    for name, x in (("log_decay", log_decay), ("beta", beta)):
        _expect(where, name, x, (batch, count, value_heads))
        _expect_state_dtype(where, name, x, state.dtype)


def _check_commit(states: Array, factors: GdnFactors, m: Array) -> None:
    where = "gdn_commit"
    _expect_rank(where, "states", states, "L, B, Hv, Dv, Dk")
    _expect_rank(where, "factors.z", factors.z, "L, B, w, Hv, Dv")
    _expect_rank(where, "factors.k", factors.k, "L, B, w, Hk, Dk")
    layers, batch, value_heads, value_dim, key_dim = states.shape
    count, key_heads = factors.z.shape[2], factors.k.shape[3]
    _check_heads(where, key_heads, value_heads)
    if not 1 <= count <= MAX_TOKENS:
        raise DSpineError(f"{where}: factors of 1..{MAX_TOKENS} tokens, got {count}")
    _expect_state_dtype(where, "states", states, states.dtype)
    _expect(where, "factors.z", factors.z, (layers, batch, count, value_heads, value_dim))
    _expect(where, "factors.k", factors.k, (layers, batch, count, key_heads, key_dim))
    _expect(where, "factors.g", factors.g, (layers, batch, count, value_heads))
    for name, x in (("factors.z", factors.z), ("factors.g", factors.g)):
        _expect_state_dtype(where, name, x, states.dtype)
    _expect_int(where, "m", m, batch)


def _check_windows(states: Array, factors: GdnFactors, windows: Array, inputs: Array) -> None:
    where = "gdn_commit"
    _expect_rank(where, "windows", windows, "L, B, width-1, C")
    layers, batch = states.shape[:2]
    _expect(where, "windows", windows, (layers, batch, *windows.shape[2:]))
    _expect(where, "inputs", inputs, (layers, batch, factors.z.shape[2], windows.shape[3]))
