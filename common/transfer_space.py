"""The unified transfer space: where a prediction of any layer and a known token meet (`algorithms` 1, article "统一转移空间").

    E'_v = E_v / |E_v|;  mu = mean E'_v;  G = sum_v (E'_v - mu)(E'_v - mu)^T = P diag(lambda) P^T
    C_v  = normalize( diag(lambda_r)^(-1/2) P_r^T (E'_v - mu) )

Codes and readouts must share one basis: order and signs of eigenvectors are arbitrary, so a checkpoint stores either its
codes or the basis they come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dspine.common.arrays import array_namespace, astype, at_least_float32, take_rows
from dspine.common.errors import DSpineError

Array = Any
ROWS_PER_CHUNK = 16_384  # bounds memory: a vocabulary of 250,000 x 5,120 in float64 would take 10 GB at once


@dataclass(frozen=True)
class TransferBasis:
    """eigenvectors [r, H] (rows, ascending eigenvalue), eigenvalues [r], mean [H] of the normalised LM-head rows."""

    eigenvectors: Array
    eigenvalues: Array
    mean: Array


def _chunks(count: int) -> list[slice]:
    return [slice(start, min(start + ROWS_PER_CHUNK, count)) for start in range(0, count, ROWS_PER_CHUNK)]


def normalize(x: Array) -> Array:
    """x / |x| over the last axis (zero stays zero), in at least float32."""
    xp = array_namespace(x)
    x = at_least_float32(x)
    norm = xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True))
    return x / xp.where(norm > 0, norm, xp.ones_like(norm))


def transfer_basis(lm_head: Array, rank: int) -> TransferBasis:
    """Top `rank` eigenpairs of the centred Gram matrix of the normalised rows of `lm_head` [V, H], in its own dtype."""
    xp = array_namespace(lm_head)
    vocab, hidden = lm_head.shape
    if not 1 <= rank <= min(hidden, vocab - 1):
        raise DSpineError(f"transfer_rank must be 1..{min(hidden, vocab - 1)} for an LM head {vocab} x {hidden}, got {rank}")
    mean = sum(xp.sum(normalize(lm_head[rows]), axis=0) for rows in _chunks(vocab)) / vocab
    gram = None
    for rows in _chunks(vocab):
        centred = normalize(lm_head[rows]) - mean
        part = xp.matmul(centred.T, centred)
        gram = part if gram is None else gram + part
    values, vectors = xp.linalg.eigh(gram)
    return TransferBasis(vectors[:, hidden - rank :].T, values[hidden - rank :], mean)


def transfer_codes(lm_head: Array, basis: TransferBasis) -> Array:
    """C [V, r], rows of unit norm: every token's place in the transfer space."""
    xp = array_namespace(lm_head)
    whitening = basis.eigenvectors.T / xp.sqrt(basis.eigenvalues)
    parts = [normalize(xp.matmul(normalize(lm_head[rows]) - basis.mean, whitening)) for rows in _chunks(lm_head.shape[0])]
    return xp.concat(parts, axis=0)


def known_token(codes: Array, tokens: Array) -> Array:
    """sqrt(r) C_x of known tokens: `codes` [V, r], `tokens` int [...] -> [..., r]."""
    return take_rows(codes, tokens) * codes.shape[-1] ** 0.5


def read_prediction(hidden: Array, readout: Array) -> Array:
    """z = f_l(u) = sqrt(r) normalize(R_l u): `hidden` [..., H], `readout` [r, H] -> [..., r] in the dtype of `hidden`.

    Normalised in at least float32, then cast back.
    """
    xp = array_namespace(hidden, readout)
    z = normalize(xp.matmul(hidden, readout.T)) * readout.shape[0] ** 0.5
    return astype(z, hidden.dtype)
