"""A Gated DeltaNet layer's step over fixed memory: everything between its two products, and what a round leaves behind.

Letters as in `gdn`: L layers, B batch, w tokens of the block, n >= w rows that a round's memory has room for, Hk and Hv heads
of Dk and Dv, C channels of the convolution. A layer's projection holds, behind one another: C channels, z [Hv Dv], b [Hv],
a [Hv].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import arange, array_namespace, astype, at_least_float32, sigmoid
from dspine.common.errors import DSpineError
from dspine.common.gdn import (
    GdnFactors,
    GdnInputWeights,
    GdnLayout,
    _window_after,
    gdn_inputs,
    gdn_verify_deferred,
)
from dspine.common.norms import rms_norm
from dspine.common.registry import operation

Array = Any


@dataclass(frozen=True)
class GdnKept:
    """What a block leaves until its commit: factors and the inputs of the convolution [B, w, C]; with room for later blocks
    [B, n, ...], over layers [L, B, n, ...]."""

    factors: GdnFactors
    inputs: Array


@dataclass(frozen=True)
class GdnLayerWeights:
    """One layer between its products: what makes the recurrence's inputs, and the gated norm (`weight` [Dv], `eps`)."""

    inputs: GdnInputWeights
    norm: Any
    layout: GdnLayout

    @property
    def sections(self) -> tuple[int, int, int, int]:
        """Columns of the projection: convolution, z, b, a."""
        values = self.layout.value_heads
        return self.layout.channels, values * self.layout.value_dim, values, values


@operation
def gdn_round(
    projected: Array, window: Array, state: Array, past: GdnFactors, past_m: Array, room: GdnKept, weights: GdnLayerWeights,
    live: Array | None = None,
) -> tuple[Array, GdnKept, Array]:  # fmt: skip
    """norm(gated delta rule(conv(qkv), a, b)) * silu(z) of w = 1..16 tokens, on the state after `past_m` tokens of `past`.

    projected [B, w, C + Hv Dv + 2 Hv]; window [B, width-1, C]; state float32 [B, Hv, Dv, Dk], past, past_m int [B] and live
    int [B] as in `gdn_verify_deferred`; room: memory of [B, n, ...] for what the block leaves. Returns (rows [B, w, Hv Dv] in
    the dtype of `projected`, what the block leaves, state): a kernel writes into `room` and `state` and returns the first w
    rows of the one and the other; the core's own code returns new arrays. `past` must not lie in `room`. The recurrence's
    output is rounded to the dtype of `projected`, norm and gate are float32 at least. Raises `DSpineError` on shapes.
    """
    check_round(projected, room, weights)
    xp = array_namespace(projected)
    ends = [sum(weights.sections[: i + 1]) for i in range(4)]
    inputs, z, b, a = (projected[..., end - size : end] for end, size in zip(ends, weights.sections, strict=True))
    tokens = gdn_inputs(inputs, window, a, b, weights.inputs, weights.layout)
    mixed, factors, state = gdn_verify_deferred(
        tokens.q, tokens.k, tokens.v, tokens.log_decay, tokens.beta, state, past, past_m, live
    )
    gate = at_least_float32(xp.reshape(z, mixed.shape))
    normed = rms_norm(at_least_float32(mixed), at_least_float32(weights.norm.weight), weights.norm.eps)
    rows = astype(normed * (gate * sigmoid(gate)), projected.dtype)
    return xp.reshape(rows, (*projected.shape[:2], -1)), GdnKept(factors, inputs), state


@operation
def gdn_keep(windows: Array, past: GdnFactors, fresh: GdnKept, m: Array) -> tuple[Array, GdnFactors]:
    """After a round, for ALL layers: windows behind its first m tokens, and their factors over those of the round before.

    windows [L, B, width-1, C]; past and fresh [L, B, n, ...] of one n, of which the first m int [B] rows of fresh are read (0:
    nothing changes). Rows m and later of the returned factors may hold anything. Returns (windows, past): a kernel may
    write in place and return its arguments. Raises `DSpineError` on shapes that do not fit.
    """
    check_keep(windows, past, fresh, m)
    xp = array_namespace(windows, m)
    rows = xp.reshape(arange(windows, past.g.shape[2]), (1, 1, -1, 1)) < xp.reshape(m, (1, -1, 1, 1))
    wide = xp.expand_dims(rows, axis=-1)
    factors = fresh.factors
    kept = GdnFactors(
        xp.where(wide, factors.z, past.z), xp.where(wide, astype(factors.k, past.k.dtype), past.k),
        xp.where(rows, factors.g, past.g),
    )  # fmt: skip
    return _window_after(windows, fresh.inputs, m), kept


def check_round(projected: Array, room: GdnKept, weights: GdnLayerWeights) -> None:
    """Raise `DSpineError` where projection or room do not fit the layer; the rest is checked by the operations inside."""
    layout, size = weights.layout, sum(weights.sections)
    if len(projected.shape) != 3 or projected.shape[2] != size:
        raise DSpineError(f"gdn_round: projected must have shape [B, w, {size}], got {tuple(projected.shape)}")
    batch, count = projected.shape[:2]
    rows = room.inputs.shape[1] if len(room.inputs.shape) == 3 else 0
    if rows < count:
        raise DSpineError(f"gdn_round: room for {rows} rows, but the block has {count}")
    for name, x, shape in (
        ("room.inputs", room.inputs, (layout.channels,)),
        ("room.factors.z", room.factors.z, (layout.value_heads, layout.value_dim)),
        ("room.factors.k", room.factors.k, (layout.key_heads, layout.key_dim)),
        ("room.factors.g", room.factors.g, (layout.value_heads,)),
        ("norm.weight", weights.norm.weight, None),
    ):
        expected = (layout.value_dim,) if shape is None else (batch, rows, *shape)
        if tuple(x.shape) != expected:
            raise DSpineError(f"gdn_round: {name} must have shape {expected}, got {tuple(x.shape)}")


def check_keep(windows: Array, past: GdnFactors, fresh: GdnKept, m: Array) -> None:
    """Raise `DSpineError` where shapes or dtypes do not fit together."""
    if len(windows.shape) != 4:
        raise DSpineError(f"gdn_keep: windows must have shape [L, B, width-1, C], got {tuple(windows.shape)}")
    layers, batch, _, channels = windows.shape
    if len(past.g.shape) != 4:
        raise DSpineError(f"gdn_keep: past.g must have shape [L, B, n, Hv], got {tuple(past.g.shape)}")
    rows = past.g.shape[2]
    pairs = [("fresh.inputs", fresh.inputs, (layers, batch, rows, channels)), ("m", m, (batch,))]
    for name in ("z", "k", "g"):
        old = getattr(past, name)
        pairs += [(f"past.{name}", old, (layers, batch, rows, *old.shape[3:]))]
        pairs += [(f"fresh.factors.{name}", getattr(fresh.factors, name), tuple(old.shape))]
    for name, x, shape in pairs:
        if tuple(x.shape) != shape:
            raise DSpineError(f"gdn_keep: {name} must have shape {shape}, got {tuple(x.shape)}")
    if "int" not in str(m.dtype):
        raise DSpineError(f"gdn_keep: m must be an integer array, got {m.dtype}")
