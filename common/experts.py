"""A mixture of experts over a few tokens (`algorithms` 4): the routed part, given the router's picks.

Letters: N tokens, k experts a token, E experts, I their inner size, H hidden size.
"""

from __future__ import annotations

from typing import Any

from dspine.common.arrays import array_namespace, astype, at_least_float32, sigmoid
from dspine.common.errors import DSpineError
from dspine.common.registry import operation

Array = Any


@operation
def routed_experts(x: Array, picks: Array, weights: Array, gate_up: Array, down: Array) -> Array:
    """sum_j weights[n, j] * down_e(silu(gate_e(x_n)) * up_e(x_n)) with e = picks[n, j].

    x [N, H] normed; picks int [N, k], the experts of a token distinct; weights float32 [N, k]; gate_up [E, 2I, H] (gate
    above up) and down [E, H, I] in the dtype of x. Everything between x and the result is float32 at least. Returns [N, H]
    in the dtype of x. Raises `DSpineError` on shapes that do not fit.
    """
    xp = array_namespace(x, gate_up, down)
    check_experts(x, picks, weights, gate_up, down)
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
    return astype(xp.sum(xp.reshape(each, (count, k, -1)) * amount, axis=1), x.dtype)


def check_experts(x: Array, picks: Array, weights: Array, gate_up: Array, down: Array) -> None:
    """Raise `DSpineError` where shapes or dtypes do not fit together."""
    where = "routed_experts"
    for name, array, rank, letters in ((("x", x, 2, "N, H")), ("picks", picks, 2, "N, k"), ("down", down, 3, "E, H, I")):
        if len(array.shape) != rank:
            raise DSpineError(f"{where}: {name} must have shape [{letters}], got {tuple(array.shape)}")
    count, size = x.shape
    experts, _, inner = down.shape
    for name, array, shape in (
        ("picks", picks, (count, picks.shape[1])),
        ("weights", weights, tuple(picks.shape)),
        ("down", down, (experts, size, inner)),
        ("gate_up", gate_up, (experts, 2 * inner, size)),
    ):
        if tuple(array.shape) != shape:
            raise DSpineError(f"{where}: {name} must have shape {shape}, got {tuple(array.shape)}")
    if "int" not in str(picks.dtype):
        raise DSpineError(f"{where}: picks must be integers, got {picks.dtype}")
    if not x.dtype == gate_up.dtype == down.dtype:
        raise DSpineError(f"{where}: x, gate_up and down must have one dtype, got {x.dtype}, {gate_up.dtype}, {down.dtype}")
