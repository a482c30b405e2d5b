"""Group-wise n-bit storage of weights in NumPy: bit stream, scales and biases (MLX's affine form, any width of 2 to 8 bits).

Bit layout (`docs/formats.md`): a row of `n` values is one little-endian bit stream, value `i` in bits `i*bits .. (i+1)*bits`,
low bit first, padded with zero bits to whole 32-bit words. Where 32 divides `n*bits` this is what MLX packs, at every width
it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspine.common.errors import CheckpointError, DSpineError

SMALLEST_SCALE = 1e-7
WIDTHS = range(2, 9)


@dataclass(frozen=True)
class GroupForm:
    """bits a value, and values (along the last axis) that share one scale and one bias."""

    bits: int
    group_size: int

    def __post_init__(self) -> None:
        if self.bits not in WIDTHS or self.group_size < 1:
            raise CheckpointError(
                f"quantisation: expected 2 to 8 bits and groups of 1 or more, got {self.bits} bits, groups of {self.group_size}"
            )

    def words(self, count: int) -> int:
        """32-bit words of a row of `count` values."""
        return -(-count * self.bits // 32)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Float32 -> bfloat16 bit patterns (uint16), to nearest, ties to even; finite input only."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def round_bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 value, as float32."""
    return (bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)


def pack_bits(values: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned integers [..., n] below 2**bits -> uint32 words [..., ceil(n*bits/32)]."""
    if values.size and int(values.max()) >= 2**bits:
        raise DSpineError(f"cannot pack {int(values.max())} into {bits} bits")
    count = values.shape[-1]
    single = (values[..., None].astype(np.uint8) >> np.arange(bits, dtype=np.uint8)) & np.uint8(1)
    stream = single.reshape(*values.shape[:-1], count * bits)
    tail = [(0, 0)] * (values.ndim - 1) + [(0, -count * bits % 32)]
    return np.packbits(np.pad(stream, tail), axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def unpack_bits(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """uint32 words [..., W] -> the first `count` values of each row, uint32 [..., count]."""
    if words.shape[-1] * 32 < count * bits:
        raise CheckpointError(f"{words.shape[-1]} words cannot hold {count} values of {bits} bits")
    if 32 % bits == 0:
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        values = (words[..., None] >> shifts) & np.uint32(2**bits - 1)
        return values.reshape(*words.shape[:-1], -1)[..., :count]
    stream = np.unpackbits(np.ascontiguousarray(words, dtype="<u4").view(np.uint8), axis=-1, bitorder="little")
    single = stream[..., : count * bits].reshape(*words.shape[:-1], count, bits)
    return (single << np.arange(bits, dtype=np.uint8)).sum(axis=-1, dtype=np.uint32)


def quantize_affine(weight: np.ndarray, bits: int, group_size: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`weight` float32 [..., in] -> uint32 words [..., ceil(in*bits/32)], scales and biases [..., in/group] in bfloat16.

    The end of the range with the larger magnitude is met exactly, zero nearly so (MLX's choice).
    """
    form = GroupForm(bits, group_size)
    if weight.shape[-1] % group_size:
        raise DSpineError(f"cannot quantise a weight {list(weight.shape)} to {bits} bits in groups of {group_size}")
    levels = 2**bits - 1
    groups = weight.reshape(*weight.shape[:-1], -1, group_size).astype(np.float32)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    low_is_edge = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / np.float32(levels), np.float32(SMALLEST_SCALE))
    scale = np.where(low_is_edge, scale, -scale)
    edge = np.where(low_is_edge, low, high)
    steps = np.rint(edge / scale)
    scale = np.where(steps != 0, edge / np.where(steps != 0, steps, 1), scale)
    bias = np.where(steps != 0, edge, np.float32(0.0))
    scale, bias = round_bfloat16(scale), round_bfloat16(bias)
    values = np.clip(np.rint((groups - bias[..., None]) / scale[..., None]), 0, levels).astype(np.uint32)
    return pack_bits(values.reshape(weight.shape), form.bits), scale, bias


def dequantize_affine(packed: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int, group_size: int) -> np.ndarray:
    """Undo `quantize_affine`: w = scale * q + bias, float32 [..., in]; `in` is the number of scales times `group_size`."""
    form = GroupForm(bits, group_size)
    count = scales.shape[-1] * group_size
    if scales.shape != biases.shape or packed.shape != (*scales.shape[:-1], form.words(count)):
        raise CheckpointError(
            f"quantised: words {list(packed.shape)}, scales {list(scales.shape)}, biases {list(biases.shape)} do not suit "
            f"{bits} bits in groups of {group_size}"
        )
    values = unpack_bits(packed, bits, count)
    grouped = values.reshape(*scales.shape, group_size).astype(np.float32)
    return (grouped * scales[..., None] + biases[..., None]).reshape(*scales.shape[:-1], count)
