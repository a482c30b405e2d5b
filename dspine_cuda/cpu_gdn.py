"""Gated DeltaNet's operations on CPU tensors: few, larger calls instead of the core's many small ones.

A block always runs in a frame of 16 rows, so that a token's row gets the same bits whatever tokens stand behind it: the
library's triangular solve and small products choose their order of summation by the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspine.common.gdn import MAX_TOKENS, NORM_EPS, GdnFactors, GdnInputWeights, GdnLayout, GdnTokens, check_log_decay

_FLOATS = (torch.float32, torch.bfloat16)
_FLOOR = torch.tensor(NORM_EPS**0.5)
_LOWER = torch.ones(MAX_TOKENS, MAX_TOKENS).tril()


@dataclass(frozen=True)
class PreparedInputWeights(GdnInputWeights):
    """`GdnInputWeights` with what `gdn_inputs` would make of them in every call: taps, `width` of float32 [C]; rate float32
    [Hv], -exp(A_log); bias float32 [Hv]."""

    taps: tuple[Tensor, ...] = ()
    rate: Tensor | None = None
    bias: Tensor | None = None

    @staticmethod
    def make(conv: Tensor, decay_log: Tensor, dt_bias: Tensor, conv_bias: Tensor | None = None) -> PreparedInputWeights:
        """From the weights of one layer."""
        taps, rate = conv.to(torch.float32).t().contiguous().unbind(0), -torch.exp(decay_log.to(torch.float32))
        return PreparedInputWeights(conv, decay_log, dt_bias, conv_bias, taps, rate, dt_bias.to(torch.float32))


def supports_inputs(
    projected: Tensor, window: Tensor, a: Tensor, b: Tensor, weights: GdnInputWeights, layout: GdnLayout
) -> bool:
    """Whatever fits; shapes that do not are left to the core, which names them."""
    if projected.dtype not in _FLOATS or projected.dim() != 3:
        return False
    batch, count, channels = projected.shape
    heads = (batch, count, layout.value_heads)
    width = weights.conv.shape[-1]
    return (
        channels == layout.channels
        and weights.conv.shape == (channels, width)
        and window.shape == (batch, width - 1, channels)
        and a.shape == heads
        and b.shape == heads
        and weights.decay_log.shape == weights.dt_bias.shape == (layout.value_heads,)
    )


def gdn_inputs(
    projected: Tensor, window: Tensor, a: Tensor, b: Tensor, weights: GdnInputWeights, layout: GdnLayout
) -> GdnTokens:
    """`common.gdn.gdn_inputs`."""
    if not isinstance(weights, PreparedInputWeights):
        weights = PreparedInputWeights.make(weights.conv, weights.decay_log, weights.dt_bias, weights.conv_bias)
    batch, count, _ = projected.shape
    rows = torch.cat((window.to(projected.dtype), projected), dim=1).to(torch.float32)
    taps: tuple[Tensor, ...] = weights.taps
    mixed = rows.narrow(1, 0, count) * taps[0]
    for j in range(1, len(taps)):
        mixed.addcmul_(rows.narrow(1, j, count), taps[j])
    if weights.conv_bias is not None:
        mixed.add_(weights.conv_bias.to(torch.float32))
    mixed = F.silu(mixed)
    heads, size, dtype = layout.key_heads, layout.key_dim, projected.dtype
    both, v = mixed.split_with_sizes((2 * heads * size, layout.value_heads * layout.value_dim), 2)
    both = both.view(batch, count, 2 * heads, size)
    both = both / torch.linalg.vector_norm(both, 2, -1, True).hypot_(_FLOOR)
    q, k = both.split(heads, 2)
    v = v.view(batch, count, layout.value_heads, layout.value_dim).to(dtype)
    log_decay = F.softplus(_framed(a) + weights.bias).mul_(weights.rate)
    beta = _framed(b).sigmoid()
    if log_decay.shape[1] != count:
        log_decay, beta = log_decay[:, :count], beta[:, :count]
    return GdnTokens((q * size**-0.5).to(dtype), k.to(dtype), v, log_decay, beta)


def _framed(x: Tensor) -> Tensor:
    """[B, T, H] -> float32 [B, 16 n, H], zeros behind: vectorised functions treat the tail of an array another way."""
    short = -x.shape[1] % MAX_TOKENS
    x = x.to(torch.float32)
    return F.pad(x, (0, 0, 0, short)) if short else x


def supports_verify(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, lengths: Tensor | None = None
) -> bool:
    """float32 states, q, k, v of one dtype, shapes that fit; the rest is left to the core, which names what is wrong."""
    if q.dim() != 4 or v.dim() != 4 or state.dtype != torch.float32 or not q.dtype == k.dtype == v.dtype:
        return False
    batch, count, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    heads = (batch, count, value_heads)
    return (
        1 <= count <= MAX_TOKENS
        and k.shape == q.shape
        and v.shape[:2] == q.shape[:2]
        and value_heads % key_heads == 0
        and state.shape == (batch, value_heads, value_dim, key_dim)
        and log_decay.shape == heads
        and beta.shape == heads
        and log_decay.dtype == beta.dtype == torch.float32
    )


def gdn_verify(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, GdnFactors]:
    """`common.gdn.gdn_verify`: equations 3 and 10 in a frame of 16 rows. Rows behind the block are zeros: no write, no read.

    Raises DSpineError where a live log decay is above 0 (then the decay itself was passed).
    """
    out_dtype, kept_k, count = v.dtype, k, q.shape[1]
    if lengths is not None:
        live = torch.arange(count)[None, :] < lengths[:, None]
        q, k, v = (torch.where(live[:, :, None, None], x, 0.0) for x in (q, k, v))
        log_decay, beta = (torch.where(live[:, :, None], x, 0.0) for x in (log_decay, beta))
        state = torch.where((lengths > 0)[:, None, None, None], state, 0.0)
    if float(log_decay.max()) > 0.0:  # 3 us; on an accelerator it would be a host read
        check_log_decay(log_decay)
    g = torch.cumsum(log_decay, dim=1)
    whole = g
    if count < MAX_TOKENS:
        rest = MAX_TOKENS - count
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, rest)) for x in (q, k, v))
        whole, beta = (F.pad(x, (0, 0, 0, rest)) for x in (g, beta))
    out, z = _solve_frame(q, k, v.to(torch.float32), whole, beta, state)
    if count < MAX_TOKENS:
        out, z = out[:, :count], z[:, :count]
    return out.to(out_dtype), GdnFactors(z, kept_k, g)


def _solve_frame(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """o and z, float32 [B, 16, Hv, Dv], of whole frames; g may be anything in rows behind the block."""
    batch, _, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    n, repeat = batch * key_heads, value_heads // key_heads
    both = torch.cat((k, q), dim=1).to(torch.float32).transpose(1, 2).reshape(n, 2 * MAX_TOKENS, key_dim)
    # all value heads of a key head side by side: [n, 32, repeat * Dv]
    read = torch.bmm(both, state.reshape(n, repeat * value_dim, key_dim).transpose(1, 2))
    gram = torch.bmm(both, both[:, :MAX_TOKENS].transpose(1, 2)).view(n, 1, 2, MAX_TOKENS, MAX_TOKENS)
    by_head = g.transpose(1, 2).reshape(n, repeat, MAX_TOKENS, 1)
    # rows behind the block are no later ones: differences above 0 are clamped before the exponential
    between = (by_head - by_head.transpose(2, 3)).clamp_(max=0.0).exp_().mul_(_LOWER)
    decay = by_head.exp()
    strength = beta.transpose(1, 2).reshape(n, repeat, MAX_TOKENS, 1)
    read_keys, read_queries = read.view(n, 2, MAX_TOKENS, repeat, value_dim).transpose(2, 3).unbind(1)
    keys, queries = gram.unbind(2)
    values = v.transpose(1, 2).reshape(n, repeat, MAX_TOKENS, value_dim)
    right = torch.addcmul(values, decay, read_keys, value=-1.0).mul_(strength)
    matrix = (keys * between).mul_(strength)
    z = torch.linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)
    out = torch.matmul(queries * between, z).addcmul_(decay, read_queries)
    shape = (batch, value_heads, MAX_TOKENS, value_dim)
    return out.view(shape).transpose(1, 2), z.reshape(shape).transpose(1, 2)


def supports_commit(states: Tensor, factors: GdnFactors, windows: Tensor, inputs: Tensor, m: Tensor) -> bool:
    """float32, shapes that fit."""
    z, k, g = factors.z, factors.k, factors.g
    if states.dim() != 5 or z.dim() != 5 or k.dim() != 5 or windows.dim() != 4 or not states.is_contiguous():
        return False
    layers, batch, value_heads, value_dim, key_dim = states.shape
    count = z.shape[2]
    return (
        states.dtype == z.dtype == g.dtype == torch.float32
        and z.shape == (layers, batch, count, value_heads, value_dim)
        and k.shape == (layers, batch, count, k.shape[3], key_dim)
        and k.shape[3] > 0
        and value_heads % k.shape[3] == 0
        and g.shape == (layers, batch, count, value_heads)
        and windows.shape[:2] == (layers, batch)
        and inputs.shape == (layers, batch, count, windows.shape[3])
        and 1 <= count <= MAX_TOKENS
        and m.shape == (batch,)
        and not m.dtype.is_floating_point
    )


def gdn_commit(states: Tensor, factors: GdnFactors, windows: Tensor, inputs: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """`common.gdn.gdn_commit`, IN PLACE; only the first m rows are read."""
    lengths = m.tolist()
    if len(set(lengths)) == 1:
        _commit_rows(states, factors, windows, inputs, lengths[0], slice(None))
    else:
        for b, length in enumerate(lengths):
            _commit_rows(states, factors, windows, inputs, length, slice(b, b + 1))
    return states, windows


def _commit_rows(states: Tensor, factors: GdnFactors, windows: Tensor, inputs: Tensor, m: int, which: slice) -> None:
    """Batch rows `which` after m tokens each."""
    if m == 0:
        return
    states, windows = states[:, which], windows[:, which]
    z, k, g = (x[:, which, :m] for x in (factors.z, factors.k, factors.g))
    total = g[:, :, -1:]
    written = z * (total - g).exp_().unsqueeze(-1)  # [L, B, m, Hv, Dv]
    keys = k.to(torch.float32)
    if states.shape[2] != keys.shape[3]:
        keys = keys.repeat_interleave(states.shape[2] // keys.shape[3], dim=3)
    update = torch.matmul(written.permute(0, 1, 3, 4, 2), keys.permute(0, 1, 3, 2, 4))
    states.mul_(total.exp()[:, :, 0, :, None, None]).add_(update)
    width = windows.shape[2]
    rows = inputs[:, which, max(m - width, 0) : m].to(windows.dtype)
    if m < width:
        rows = torch.cat((windows[:, :, m:], rows), dim=2)
    windows.copy_(rows)
