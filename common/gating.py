"""The gated activation of a feed-forward layer, and the gate on attention's output."""

from __future__ import annotations

from typing import Any

from dspine.common.arrays import astype, at_least_float32, sigmoid
from dspine.common.errors import DSpineError
from dspine.common.linear_rows import check_linear_rows, linear_rows
from dspine.common.registry import operation

Array = Any


@operation
def silu_mul(gate_up: Array) -> Array:
    """silu(gate) * up: gate_up [..., 2I] (gate before up) -> [..., I].

    silu in float32 at least; it is rounded to the dtype of gate_up before the product, as `silu(gate) * up` is of two
    operations. Raises `DSpineError` where the last axis is odd.
    """
    check_silu_mul(gate_up)
    size = gate_up.shape[-1] // 2
    gate = at_least_float32(gate_up[..., :size])
    return astype(gate * sigmoid(gate), gate_up.dtype) * gate_up[..., size:]


def check_silu_mul(gate_up: Array) -> None:
    """Raise `DSpineError` unless the last axis is two halves."""
    if len(gate_up.shape) < 1 or gate_up.shape[-1] % 2 or not gate_up.shape[-1]:
        raise DSpineError(f"silu_mul: gate_up must have shape [..., 2I], got {tuple(gate_up.shape)}")


@operation
def gated_rows(x: Array, weight: Array) -> Array:
    """silu(gate) * up of gate and up = x [N, K] times weight [2I, K] transposed (gate before up) -> [N, I].

    `silu_mul` of `linear_rows`, whose roundings a kernel keeps: a row has the same bits whatever rows are beside it. Raises
    `DSpineError` on shapes or dtypes that do not fit.
    """
    check_gated_rows(x, weight)
    return silu_mul(linear_rows(x, weight))


def check_gated_rows(x: Array, weight: Array) -> None:
    """Raise `DSpineError` where shapes or dtypes do not fit together, or the weight is not two halves."""
    check_linear_rows(x, weight)
    if weight.shape[0] % 2 or not weight.shape[0]:
        raise DSpineError(f"gated_rows: weight must have shape [2I, K], got {tuple(weight.shape)}")


@operation
def sigmoid_mul(x: Array, gate: Array) -> Array:
    """x * sigmoid(gate), one shape and dtype: the gate on what attention's heads give.

    sigmoid in float32 at least; it is rounded to the dtype before the product, as `x * gate.sigmoid()` is of two operations.
    Raises `DSpineError` on shapes or dtypes that differ.
    """
    check_sigmoid_mul(x, gate)
    return x * astype(sigmoid(at_least_float32(gate)), x.dtype)


def check_sigmoid_mul(x: Array, gate: Array) -> None:
    """Raise `DSpineError` unless both have one shape and dtype."""
    if tuple(x.shape) != tuple(gate.shape) or x.dtype != gate.dtype:
        raise DSpineError(
            f"sigmoid_mul: gate must have shape {tuple(x.shape)} and dtype {x.dtype}, got {tuple(gate.shape)} and {gate.dtype}"
        )
