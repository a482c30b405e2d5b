"""Rotary position tables (half-split, full head): default, linear and YaRN, from the drafter's own card.

YaRN: Peng et al. 2023, "NTK-by-parts" interpolation with the attention factor folded into cos and sin, as Hugging Face
and mlx-lm apply it (the factor scales the rotated q and k).
"""

from __future__ import annotations

import math

import numpy as np

from dspine.common.configs import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies float64 [head_dim / 2] (radians a position) and the factor on cos and sin."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = rope.theta**-exponents
    if rope.kind == "linear":
        return frequencies / rope.factor, 1.0
    if rope.kind != "yarn":
        return frequencies, 1.0
    low, high = _correction_range(rope, head_dim)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float64) - low) / max(high - low, 0.001), 0.0, 1.0)
    return frequencies / rope.factor * ramp + frequencies * (1.0 - ramp), _attention_factor(rope)


def _correction_range(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """Dimensions between which the frequencies pass from untouched to interpolated."""

    def dimension(rotations: float) -> float:
        period = (rope.original_max_position or 1) / (rotations * 2 * math.pi)
        return head_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, head_dim - 1)


def _attention_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def rope_tables(rope: RopeConfig, head_dim: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, float32 [length, head_dim]: both halves hold the same angles; angles are made in float64."""
    frequencies, factor = rope_frequencies(rope, head_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * frequencies
    angles = np.concatenate([angles, angles], axis=-1)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)
