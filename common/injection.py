"""Adjacent causal injection after every drafter layer (`algorithms` 1; article "逐层门控注入").

    g_t = sigmoid(G_q z_t + G_p z_{t-1} + b),  m_t = A z_{t-1},  h_t = u_t + RMS(u_t) W_l (g_t * m_t),  t >= 1

All messages of a layer come from features read BEFORE injection, so they are computed at once. Row 0, the anchor, is
never written to; it only sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import array_namespace, astype, at_least_float32, sigmoid
from dspine.common.errors import DSpineError
from dspine.common.norms import fused_norm
from dspine.common.registry import operation
from dspine.common.transfer_space import normalize, read_prediction

Array = Any


@dataclass(frozen=True)
class InjectionWeights:
    """One layer's view: readout [r, H], write [H, a]; shared: message, receiver_gate, predecessor_gate [a, r], bias [a]."""

    readout: Array
    write: Array
    message: Array
    receiver_gate: Array
    predecessor_gate: Array
    bias: Array


@operation
def injection_gate(receiver: Array, predecessor: Array, weights: InjectionWeights) -> Array:
    """g * m: receiver z_t and predecessor z_{t-1} [..., r] -> [..., a]; float32 inside, rounded once to the dtype of z."""
    xp = array_namespace(receiver, predecessor)
    dtype, (receiver, predecessor) = predecessor.dtype, (at_least_float32(x) for x in (receiver, predecessor))
    gate = xp.matmul(receiver, at_least_float32(weights.receiver_gate).T) + at_least_float32(weights.bias)
    gate = sigmoid(gate + xp.matmul(predecessor, at_least_float32(weights.predecessor_gate).T))
    return astype(gate * xp.matmul(predecessor, at_least_float32(weights.message).T), dtype)


@operation
def injection_messages(
    raw: Array, anchor_code: Array, weights: InjectionWeights, heard: bool = False
) -> Array | tuple[Array, Array]:
    """What every row of a block is to have written into it, from the readout products R_l u of all rows.

    raw [B, R, r] = R_l u, the anchor's row first (its numbers are not used: it sends its known-token form); anchor_code
    sqrt(r) C_x0 [B, r] in the dtype of raw. z = sqrt(r) raw / |raw| is not rounded, as it is between two operations.
    Returns g * m [B, R, a] in that dtype; row 0 is 0, so `injection_write` of all rows leaves the anchor as it is.
    With `heard` also what every row hears of itself, G_q z float32 [B, R, a] (row 0: 0), which `candidate_scores` takes.
    """
    xp = array_namespace(raw, anchor_code)
    check_injection_messages(raw, anchor_code, weights)
    z = normalize(at_least_float32(raw[:, 1:])) * raw.shape[-1] ** 0.5
    predecessor = xp.concat([xp.expand_dims(at_least_float32(anchor_code), axis=1), z[:, :-1]], axis=1)
    gated = astype(injection_gate.reference(z, predecessor, weights), raw.dtype)  # type: ignore[attr-defined]
    gated = xp.concat([xp.zeros_like(gated[:, :1]), gated], axis=1)
    if not heard:
        return gated
    own = xp.matmul(z, at_least_float32(weights.receiver_gate).T)
    return gated, xp.concat([xp.zeros_like(own[:, :1]), own], axis=1)


def check_injection_messages(raw: Array, anchor_code: Array, weights: InjectionWeights) -> None:
    """Raise `DSpineError` where shapes or dtypes do not fit together."""
    where = "injection_messages"
    if len(raw.shape) != 3 or raw.shape[1] < 2:
        raise DSpineError(f"{where}: raw must have shape [B, R, r] with at least 2 rows, got {tuple(raw.shape)}")
    code = (raw.shape[0], raw.shape[2])
    if tuple(anchor_code.shape) != code or anchor_code.dtype != raw.dtype:
        raise DSpineError(
            f"{where}: anchor_code must have shape {code} and dtype {raw.dtype}, got {tuple(anchor_code.shape)} and "
            f"{anchor_code.dtype}"
        )
    size = weights.bias.shape[0]
    for name in ("message", "receiver_gate", "predecessor_gate"):
        shape = tuple(getattr(weights, name).shape)
        if shape != (size, raw.shape[2]):
            raise DSpineError(f"{where}: weights.{name} must have shape ({size}, {raw.shape[2]}), got {shape}")


@operation
def injection_write(hidden: Array, gated: Array, write: Array, norm: Any | None = None) -> Array | tuple[Array, Array]:
    """h = u + RMS(u) W (g * m): `hidden` u [..., H], `gated` [..., a], `write` [H, a]. RMS in float32, no epsilon.

    With `norm` (a callable; kernels need its `weight` [H] and `eps`, see `RMSNorm`), the next layer's input norm is
    fused: returns (h, norm(h)), else h. The sum is float32; h and norm(h) are each rounded once to the dtype of `hidden`.
    """
    xp = array_namespace(hidden, gated)
    wide = at_least_float32(hidden)
    rms = xp.sqrt(xp.mean(wide * wide, axis=-1, keepdims=True))
    message = xp.matmul(at_least_float32(gated), at_least_float32(write).T)
    wide = wide + rms * message
    written = astype(wide, hidden.dtype)
    return written if norm is None else (written, fused_norm(norm, wide, hidden.dtype, hidden.dtype))


def inject(
    hidden: Array,
    anchor_code: Array,
    weights: InjectionWeights,
    replacement: tuple[Array, Array] | None = None,
) -> Array:
    """One layer's injection over a block.

    hidden: u [..., 1+M, H] with the anchor at row 0; anchor_code: sqrt(r) C_x0 [..., r]. Row 1 hears the anchor's
    known-token code, row t the prediction of row t-1. `replacement` (training's correct-predecessor curriculum): bool
    mask broadcasting against [..., M, r], and the codes [..., M, r] that replace what the masked rows hear.
    Returns h [..., 1+M, H].
    """
    xp = array_namespace(hidden, anchor_code)
    z = read_prediction(hidden[..., 1:, :], weights.readout)
    anchor = astype(xp.expand_dims(anchor_code, axis=-2), hidden.dtype)
    predecessor = xp.concat([anchor, z[..., :-1, :]], axis=-2)
    if replacement is not None:
        mask, codes = replacement
        predecessor = xp.where(mask, astype(codes, hidden.dtype), predecessor)
    written = injection_write(hidden[..., 1:, :], injection_gate(z, predecessor, weights), weights.write)
    return xp.concat([hidden[..., :1, :], written], axis=-2)
