"""Products of a few rows with packed weights: the shape of a verified block on a quantised target.

Letters: R rows, K inner width, N columns, b bits, g numbers that share a scale and a bias, E experts, P picked rows.
Packing is MLX's affine form (`docs/formats.md`): a row of K values is one little-endian bit stream, value i in bits i*b ..
(i+1)*b of uint32 words; a weight is scale * value + bias of its group.
"""

from __future__ import annotations

from typing import Any

from dspine.common.arrays import arange, array_namespace, astype, at_least_float32, take_rows
from dspine.common.errors import DSpineError
from dspine.common.registry import operation

Array = Any
BITS = (2, 3, 4, 5, 6, 8)


def unpacked(words: Array, scales: Array, biases: Array, bits: int, group_size: int) -> Array:
    """words uint32 or int32 [..., K b / 32], scales and biases [..., K / g] -> weights [..., K], float32 at least."""
    xp = array_namespace(words, scales)
    width = scales.shape[-1] * group_size
    place = arange(words, width) * bits
    first, offset = place // 32, place % 32
    low = xp.take(words, first, axis=-1) >> astype(offset, words.dtype)
    upper = xp.take(words, xp.where(first + 1 < words.shape[-1], first + 1, first), axis=-1)
    shift = xp.where(offset + bits > 32, 32 - offset, xp.zeros_like(offset))
    high = xp.where(offset + bits > 32, upper << astype(shift, words.dtype), xp.zeros_like(upper))
    # a signed word shifts its sign in from above: only the lowest 32 - offset bits of `low` are its own
    own = xp.where(
        offset + bits > 32, (xp.ones_like(upper) << astype(shift, words.dtype)) - 1, xp.zeros_like(upper) + (2**bits - 1)
    )
    values = astype((low & own) | (high & (2**bits - 1)), at_least_float32(scales).dtype)
    shape = (*scales.shape, group_size)
    grouped = xp.reshape(values, shape) * xp.expand_dims(at_least_float32(scales), axis=-1)
    return xp.reshape(grouped + xp.expand_dims(at_least_float32(biases), axis=-1), (*scales.shape[:-1], width))


@operation
def quantized_rows(x: Array, words: Array, scales: Array, biases: Array, bits: int, group_size: int) -> Array:
    """x [R, K] times the transpose of packed weights [N, K] -> [R, N] in the dtype of x; sums in float32 at least.

    words uint32 [N, K b / 32] (or int32, the same bits); scales and biases [N, K / g]. Raises `DSpineError` on shapes that
    do not fit.
    """
    check_packed("quantized_rows", x, words, scales, biases, bits, group_size)
    xp = array_namespace(x, words)
    weights = unpacked(words, scales, biases, bits, group_size)
    return astype(xp.matmul(at_least_float32(x), weights.T), x.dtype)


@operation
def gathered_rows(x: Array, words: Array, scales: Array, biases: Array, picks: Array, bits: int, group_size: int) -> Array:
    """Row p of x times the transpose of the packed weights of expert picks[p]: [P, K] -> [P, N] in the dtype of x.

    x [T, K] with P a multiple of T: pick p reads row p // (P / T), so that the k picks of a token share its row. words
    uint32 (or int32) [E, N, K b / 32]; scales and biases [E, N, K / g]; picks int [P]. Raises `DSpineError` on shapes that
    do not fit.
    """
    check_packed("gathered_rows", x, words, scales, biases, bits, group_size)
    rows, count = x.shape[0], picks.shape[0]
    if len(words.shape) != 3 or len(picks.shape) != 1 or rows == 0 or count % rows:
        raise DSpineError(
            f"gathered_rows: expected words [E, N, W] and picks [P] with P a multiple of {rows} rows, got words "
            f"{tuple(words.shape)} and picks {tuple(picks.shape)}"
        )
    xp = array_namespace(x, words)
    chosen = unpacked(*(xp.take(part, picks, axis=0) for part in (words, scales, biases)), bits, group_size)
    each = take_rows(at_least_float32(x), arange(picks, count) // (count // rows))
    return astype(xp.squeeze(xp.matmul(chosen, xp.expand_dims(each, axis=-1)), axis=-1), x.dtype)


def check_packed(name: str, x: Array, words: Array, scales: Array, biases: Array, bits: int, group_size: int) -> None:
    """Raise where the parts do not belong together."""
    if bits not in BITS:
        raise DSpineError(f"{name}: bits must be one of {', '.join(map(str, BITS))}, got {bits}")
    if len(x.shape) != 2:
        raise DSpineError(f"{name}: x must be [rows, width], got {tuple(x.shape)}")
    width = x.shape[1]
    lead = tuple(words.shape[:-1])
    expected = (*lead, width * bits // 32), (*lead, width // group_size)
    got = tuple(words.shape), tuple(scales.shape)
    if width % group_size or width * bits % 32 or got != expected or tuple(biases.shape) != expected[1]:
        raise DSpineError(
            f"{name}: for width {width} at {bits} bits in groups of {group_size} expected words {expected[0]}, scales and "
            f"biases {expected[1]}, got {got[0]}, {got[1]} and {tuple(biases.shape)}"
        )
