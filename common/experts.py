"""A mixture of experts over a few tokens (`algorithms` 4): the router's choice, and the experts given that choice.

Letters: N tokens, k experts a token, E experts, I their inner size, H hidden size, Is the shared expert's inner size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import array_namespace, astype, at_least_float32, sigmoid, softmax, top_k
from dspine.common.errors import DSpineError
from dspine.common.norms import fused_norm
from dspine.common.registry import operation

Array = Any


@dataclass(frozen=True)
class SharedExpert:
    """The expert of every token, as far as a router's product has made it: amount [N, 1] (its sigmoid weighs the result),
    gate_up [N, 2 Is] (gate before up: products with x, not yet activated), down [H, Is]."""

    amount: Array
    gate_up: Array
    down: Array


@operation
def pick_experts(logits: Array, k: int, normalised: bool) -> tuple[Array, Array]:
    """Softmax over the experts, the k most probable, and their weights: logits [N, E] -> (picks int [N, k], weights float32).

    Probabilities are float32 at least; picks are in descending order, of equal probabilities the lower expert first.
    `normalised`: the k weights sum to 1. They are rounded to the dtype of the logits, as the models do it. A row's picks do
    not depend on the rows beside it. Raises `DSpineError` on shapes, and where k is not 1..E.
    """
    check_picks(logits, k)
    xp = array_namespace(logits)
    weights, picks = top_k(softmax(logits), k)
    if normalised:
        weights = weights / xp.sum(weights, axis=-1, keepdims=True)
    return picks, at_least_float32(astype(weights, logits.dtype))


def check_picks(logits: Array, k: int) -> None:
    """Raise `DSpineError` unless k experts can be picked."""
    if len(logits.shape) != 2:
        raise DSpineError(f"pick_experts: logits must have shape [N, E], got {tuple(logits.shape)}")
    if not 1 <= k <= logits.shape[1]:
        raise DSpineError(f"pick_experts: k must be 1..{logits.shape[1]}, got {k}")


@operation
def routed_experts(
    x: Array, picks: Array, weights: Array, gate_up: Array, down: Array,
    shared: SharedExpert | None = None, residual: Array | None = None, norm: Any | None = None,
) -> Array | tuple[Array, Array]:  # fmt: skip
    """sum_j weights[n, j] * down_e(silu(gate_e(x_n)) * up_e(x_n)) with e = picks[n, j]; plus the shared expert, plus residual.

    x [N, H] normed; picks int [N, k], the experts of a token distinct; weights float32 [N, k]; gate_up [E, 2I, H] (gate
    above up) and down [E, H, I] in the dtype of x; shared as in `SharedExpert`; residual [N, H]. Everything between x and
    the result is float32 at least. Returns [N, H] in the dtype of x; with `norm` (`weight` [H] and `eps`) the pair of that
    and its norm, which is taken of the rounded sum. Raises `DSpineError` on shapes that do not fit.
    """
    xp = array_namespace(x, gate_up, down)
    check_experts(x, picks, weights, gate_up, down, shared, residual, norm)
    count, k = picks.shape
    inner = down.shape[2]
    flat = xp.reshape(picks, (-1,))
    wide = at_least_float32(x)
    chosen = at_least_float32(xp.take(gate_up, flat, axis=0))  # [N k, 2I, H]
    rows = xp.reshape(xp.broadcast_to(xp.expand_dims(wide, axis=1), (count, k, x.shape[1])), (count * k, x.shape[1], 1))
    both = xp.matmul(chosen, rows)[..., 0]
    gate, up = both[:, :inner], both[:, inner:]
    hidden = gate * sigmoid(gate) * up
    each = xp.matmul(at_least_float32(xp.take(down, flat, axis=0)), xp.expand_dims(hidden, axis=-1))[..., 0]
    amount = xp.expand_dims(astype(weights, each.dtype), axis=-1)
    total = xp.sum(xp.reshape(each, (count, k, -1)) * amount, axis=1)
    if shared is not None:
        total = total + _shared(shared)
    if residual is not None:
        total = total + at_least_float32(residual)
    out = astype(total, x.dtype)
    return out if norm is None else (out, fused_norm(norm, at_least_float32(out), x.dtype, x.dtype))


def _shared(shared: SharedExpert) -> Array:
    """sigmoid(amount) * down(silu(gate) * up) [N, H], float32 at least."""
    xp = array_namespace(shared.gate_up, shared.down)
    gate_up = at_least_float32(shared.gate_up)
    inner = gate_up.shape[1] // 2
    hidden = gate_up[:, :inner] * sigmoid(gate_up[:, :inner]) * gate_up[:, inner:]
    return sigmoid(at_least_float32(shared.amount)) * xp.matmul(hidden, at_least_float32(shared.down).T)


def check_experts(
    x: Array, picks: Array, weights: Array, gate_up: Array, down: Array,
    shared: SharedExpert | None = None, residual: Array | None = None, norm: Any | None = None,
) -> None:  # fmt: skip
    """Raise `DSpineError` where shapes or dtypes do not fit together."""
    where = "routed_experts"
    for name, array, rank, letters in ((("x", x, 2, "N, H")), ("picks", picks, 2, "N, k"), ("down", down, 3, "E, H, I")):
        if len(array.shape) != rank:
            raise DSpineError(f"{where}: {name} must have shape [{letters}], got {tuple(array.shape)}")
    count, size = x.shape
    experts, _, inner = down.shape
    expected = [
        ("picks", picks, (count, picks.shape[1])),
        ("weights", weights, tuple(picks.shape)),
        ("down", down, (experts, size, inner)),
        ("gate_up", gate_up, (experts, 2 * inner, size)),
    ]
    floats = [("gate_up", gate_up), ("down", down)]
    if shared is not None:
        width = shared.down.shape[-1]
        expected += [
            ("shared.down", shared.down, (size, width)),
            ("shared.gate_up", shared.gate_up, (count, 2 * width)),
            ("shared.amount", shared.amount, (count, 1)),
        ]
        floats += [("shared.down", shared.down), ("shared.gate_up", shared.gate_up), ("shared.amount", shared.amount)]
    if residual is not None:
        expected.append(("residual", residual, (count, size)))
        floats.append(("residual", residual))
    if norm is not None:
        expected.append(("norm.weight", norm.weight, (size,)))
    for name, array, shape in expected:
        if tuple(array.shape) != shape:
            raise DSpineError(f"{where}: {name} must have shape {shape}, got {tuple(array.shape)}")
    if "int" not in str(picks.dtype):
        raise DSpineError(f"{where}: picks must be integers, got {picks.dtype}")
    for name, array in floats:
        if array.dtype != x.dtype:
            raise DSpineError(f"{where}: {name} must have the dtype of x, {x.dtype}, got {array.dtype}")
