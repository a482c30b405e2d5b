"""Gated DeltaNet over w = 1..16 tokens at once (`algorithms` 3, equations 3 and 10), and the same on a state that first
takes the last round's factors (deferred commit: one read and one write of the state, no launch of its own).

One program holds BV rows of one head's state, transposed: S^T [Dk, BV]. Everything small (Gamma, H, Gamma o Q K^T) is
recomputed by every program. H Z = right is solved by blocked forward substitution in float32 (`_substitute`). Blocks are
always padded to 16 rows, so a token's numbers do not depend on w: w = 1 is plain decoding, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from dspine.common import gdn
from dspine.common.gdn import GdnFactors
from dspine.kernels_triton import _launch
from dspine.kernels_triton._launch import (
    INTERPRETED,
    arrive,
    contiguous,
    early,
    multiply,
    multiply_small,
    multiply_thirds,
    multiply_wide,
    narrow,
    power_of_2,
    programs_of,
    thirds,
)

ROWS = 16


@dataclass(frozen=True)
class Launch:
    """block_v: rows of the state a program holds; block: tokens of a diagonal block of H (4, 8 or 16)."""

    block_v: int = 8
    num_warps: int = 1
    block: int = 8


# Found with `benchmarks.kernels.run --sweep`. `block` is the same for all: with another one a token would be rounded
# differently in a longer block.
NARROW, WIDE = Launch(8, 1), Launch(16, 1)
FLOAT32_LAUNCH = Launch(32, 8)  # float32 inputs: multiply-adds instead of tensor cores


def choose(count: int, dtype: torch.dtype, overlap: bool = False, deferred: bool = False) -> Launch:
    """The launch parameters for `count` tokens."""
    if dtype == torch.float32:
        return FLOAT32_LAUNCH
    return WIDE if overlap and not deferred and count > 4 else NARROW


@triton.jit
def load_factors(z, k, g, first, head, key_head, dv, dk, HK, HV, DK, DV, COUNT: tl.constexpr):
    """A block's factors for one slice of a head: logs [16], writes [16, BV], keys^T [Dk, 16]; `first`: row of token 0."""
    rows = tl.arange(0, 16)
    at, inside = first + rows, rows < COUNT
    logs = tl.load(g + at * HV + head, mask=inside, other=0.0)
    of_value = inside[:, None] & (dv < DV)[None, :]
    writes = tl.load(z + (at[:, None] * HV + head) * DV + dv[None, :], mask=of_value, other=0.0)
    of_key = (dk < DK)[:, None] & inside[None, :]
    return logs, writes, tl.load(k + (at[None, :] * HK + key_head) * DK + dk[:, None], mask=of_key, other=0.0)


@triton.jit
def exact_exp(x):
    """e^x to the last bit or so. The fast form is a few bits off to one side, and a state multiplies that up round by round."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def fold(state, logs, writes, keys, m):
    """S^T [Dk, BV] after m tokens: e^{g_m} S + sum_{j <= m} e^{g_m - g_j} z_j k_j^T (equation 7); later rows never matter."""
    rows = tl.arange(0, 16)
    kept = rows < m
    total = tl.sum(tl.where(rows == m - 1, logs, 0.0), 0)
    weight = tl.where(kept, exact_exp(tl.where(kept, total - logs, 0.0)), 0.0)
    writes = tl.where(kept[:, None], writes, 0.0) * weight[:, None]
    return exact_exp(total) * state + multiply_wide(tl.where(kept[None, :], keys, 0.0), writes)


@triton.jit
def _diagonal_inverse(matrix, row, col, W: tl.constexpr, BLOCK: tl.constexpr):
    """Inverses of the diagonal blocks of I + matrix, by substitution: strictly lower matrix [16, 16], zero from row W on."""
    inside = tl.where(row // BLOCK == col // BLOCK, matrix, 0.0)
    inverse = tl.where(row == col, 1.0, 0.0)
    for j in tl.static_range(min(BLOCK, W) - 1):
        # column j and row j of every diagonal block at once: their supports do not meet
        column = tl.sum(tl.where(col % BLOCK == j, inside, 0.0), 1)
        solved = tl.sum(tl.where(row % BLOCK == j, inverse, 0.0), 0)
        inverse -= tl.where(row // BLOCK == col // BLOCK, column[:, None] * solved[None, :], 0.0)
    return inverse


@triton.jit
def _below(matrix, row, col, SIZE: tl.constexpr):
    """The blocks left of the diagonal in every pair of diagonal blocks of SIZE rows, else 0."""
    return tl.where((row // (2 * SIZE) == col // (2 * SIZE)) & (row // SIZE > col // SIZE), matrix, 0.0)


@triton.jit
def _substitute(matrix, right, rows, W: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    """Solve (I + matrix) x = right by blocks: matrix [16, 16] strictly lower, right [16, BV], both zero from row W on.

    With D the inverse of the diagonal blocks and C what lies below them in a pair of blocks, the pair's solution is
    (I - E) D r, E = D C: E^2 = 0. The same again with pairs of pairs. So the right side never waits for an inverse of the
    whole: one product for D, one for each doubling.
    """
    row, col = rows[:, None], rows[None, :]
    diagonal = _diagonal_inverse(matrix, row, col, W, BLOCK)
    solved = multiply_small(diagonal, right, SPLIT)
    if BLOCK == 4 and W > 4:
        pairs = multiply_small(diagonal, _below(matrix, row, col, 4), SPLIT)
        if W > 8:
            halves = multiply_small(diagonal, _below(matrix, row, col, 8), SPLIT)
            halves -= multiply_small(pairs, halves, SPLIT)
        solved -= multiply_small(pairs, solved, SPLIT)
        if W > 8:
            solved -= multiply_small(halves, solved, SPLIT)
    elif BLOCK == 8 and W > 8:
        halves = multiply_small(diagonal, _below(matrix, row, col, 8), SPLIT)
        solved -= multiply_small(halves, solved, SPLIT)
    return solved


@triton.jit
def _gdn_verify_kernel(
    q, k, v, log_decay, beta, state, out, z, g, lengths, past_z, past_k, past_g, past_m, kept_rows,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr,
    W: tl.constexpr, PAST: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)  # batch x value head
    batch, head = pair // HV, pair % HV
    key_head = head // (HV // HK)
    dv = tl.program_id(0) * BV + tl.arange(0, BV)
    dk = tl.arange(0, DK_PAD)
    place = state + pair.to(tl.int64) * (DV * DK) + dv[None, :] * DK + dk[:, None]
    FULL: tl.constexpr = DV % BV == 0 and DK == DK_PAD
    inside = (dk < DK)[:, None] & (dv < DV)[None, :]
    if FULL:
        held = tl.load(place)
    else:
        held = tl.load(place, mask=inside, other=0.0)
    if PAST > 0:  # the last round's: they came from earlier launches, like the state
        m = tl.minimum(tl.load(past_m + batch).to(tl.int32), PAST)
        past = load_factors(past_z, past_k, past_g, batch * PAST, head, key_head, dv, dk, HK, HV, DK, DV, PAST)
        held = fold(held, past[0], past[1], past[2], m)
        tl.store(place, held, mask=inside & (m > 0))
    high, middle, low = thirds(held, SPLIT)
    # When the next kernel may start: as soon as this one's own preparation is done; after a fold, which is longer, when the
    # kernel in front is done too, or several of them would share the memory's bandwidth
    if OVERLAP and PAST == 0:
        gdc_launch_dependents()
    if OVERLAP:  # everything below may come from the kernel before this
        gdc_wait()
    if OVERLAP and PAST > 0:
        gdc_launch_dependents()
    count = W
    if HAS_LENGTHS:
        count = tl.minimum(tl.load(lengths + batch).to(tl.int32), W)
    rows = tl.arange(0, 16)
    live = rows < count
    token = batch * W + rows
    kept_token = batch * kept_rows + rows  # of k, z and g, which may stand in a longer frame
    at = (token[:, None] * HK + key_head) * DK + dk[None, :]
    of_key = live[:, None] & (dk < DK)[None, :]
    keys = tl.load(k + (kept_token[:, None] * HK + key_head) * DK + dk[None, :], mask=of_key, other=0.0)
    queries = tl.load(q + at, mask=of_key, other=0.0)
    logs = tl.load(log_decay + token * HV + head, mask=live, other=0.0)
    strength = tl.load(beta + token * HV + head, mask=live, other=0.0)
    of_value = (token[:, None] * HV + head) * DV + dv[None, :]
    values = tl.load(v + of_value, mask=live[:, None] & (dv < DV)[None, :], other=0.0)
    keys, queries = arrive(keys), arrive(queries)
    logs = tl.cumsum(logs, 0)

    row, col = rows[:, None], rows[None, :]
    lower = row >= col
    between = tl.where(lower, exact_exp(tl.where(lower, logs[:, None] - logs[None, :], 0.0)), 0.0)
    matrix = tl.where(row > col, strength[:, None] * between * multiply(keys, tl.trans(keys)), 0.0)
    reads = between * multiply(queries, tl.trans(keys))
    from_keys = multiply_thirds(keys, high, middle, low, SPLIT)
    from_queries = multiply_thirds(queries, high, middle, low, SPLIT)
    if HAS_LENGTHS:  # an unused slot may hold anything
        from_keys = tl.where(count > 0, from_keys, 0.0)
        from_queries = tl.where(count > 0, from_queries, 0.0)
    decay = exact_exp(logs)[:, None]
    right = strength[:, None] * (values.to(tl.float32) - decay * from_keys)
    writes = _substitute(matrix, right, rows, W, BLOCK, SPLIT)
    result = decay * from_queries + multiply_small(reads, writes, SPLIT)
    kept = (rows < W)[:, None] & (dv < DV)[None, :]  # padded rows are written too: as zeros
    tl.store(z + (kept_token[:, None] * HV + head) * DV + dv[None, :], writes, mask=kept)
    tl.store(out + of_value, narrow(result, out.dtype.element_ty), mask=kept)
    tl.store(g + kept_token * HV + head, logs, mask=(rows < W) & (tl.program_id(0) == 0))


def supports(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, *_: object, **__: object) -> bool:
    """float32 state, inputs of one dtype out of bfloat16 and float32, key heads of at most 256."""
    same = q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float32)
    return same and state.dtype == torch.float32 and q.dim() == 4 and q.shape[-1] <= 256


def launch(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, out: Tensor, z: Tensor, g: Tensor,
    lengths: Tensor | None = None, pending: GdnFactors | None = None, pending_m: Tensor | None = None,
    parameters: Launch | None = None, overlap: bool = False, kept_rows: int | None = None,
) -> None:  # fmt: skip
    """Launch into given outputs: out [B, w, Hv, Dv], z float32 [B, w, Hv, Dv], g float32 [B, w, Hv]; all contiguous.
    `kept_rows` n: k, z and g are [B, n, ...] instead, of which the first w rows are read and written.

    `overlap` (programmatic dependent launch): the state is fetched before the previous kernel has ended, so that kernel
    must not be one that writes this state. Nothing is checked here: see `gdn_verify`.
    """
    batch, count, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    chosen = parameters or choose(count, q.dtype, overlap, pending is not None)
    block_v = chosen.block_v if parameters else programs_of(value_dim, chosen.block_v)
    past = (z, k, g, z) if pending is None else (pending.z, pending.k, pending.g, pending_m)
    _gdn_verify_kernel[(triton.cdiv(value_dim, block_v), batch * value_heads)](
        q, k, v, log_decay, beta, state, out, z, g, z if lengths is None else lengths, *past,
        count if kept_rows is None else kept_rows,
        HK=key_heads, HV=value_heads, DK=key_dim, DV=value_dim, DK_PAD=power_of_2(key_dim, 16),
        W=count, PAST=0 if pending is None else pending.z.shape[1], BV=block_v, BLOCK=chosen.block,
        SPLIT=q.dtype != torch.float32, HAS_LENGTHS=lengths is not None,
        num_warps=chosen.num_warps, **early(overlap),
    )  # fmt: skip


def _prepared(where: str, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> tuple:
    """Checked arguments, contiguous, with room for the results."""
    gdn._check_block(q, k, v, log_decay, beta, state)
    contiguous(where, state=state)
    inputs = [x.contiguous() for x in (q, k, v, log_decay, beta)]
    z = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    g = torch.empty(v.shape[:3], dtype=torch.float32, device=v.device)
    return inputs, torch.empty(v.shape, dtype=v.dtype, device=v.device), z, g


def gdn_verify(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, GdnFactors]:
    """`common.gdn.gdn_verify`: the same arguments, results and errors; the state must be contiguous."""
    inputs, out, z, g = _prepared("gdn_verify", q, k, v, log_decay, beta, state)
    launch(*inputs, state, out, z, g, lengths)
    return out, GdnFactors(z, k, g)


def gdn_verify_deferred(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor,
    pending: GdnFactors, pending_m: Tensor, lengths: Tensor | None = None,
) -> tuple[Tensor, GdnFactors, Tensor]:  # fmt: skip
    """`common.gdn.gdn_verify_deferred`: the state is written in place and returned."""
    gdn._check_commit(state.unsqueeze(0), GdnFactors(*(x.unsqueeze(0) for x in (pending.z, pending.k, pending.g))), pending_m)
    inputs, out, z, g = _prepared("gdn_verify_deferred", q, k, v, log_decay, beta, state)
    last = GdnFactors(pending.z.contiguous(), pending.k.contiguous(), pending.g.contiguous())
    launch(*inputs, state, out, z, g, lengths, last, pending_m)
    return out, GdnFactors(z, k, g), state


def register() -> None:
    """Tell the core about `gdn_verify` and `gdn_verify_deferred` on CUDA."""
    _launch.register(gdn_verify, supports)
    _launch.register(gdn_verify_deferred, supports)
