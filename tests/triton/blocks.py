"""Random inputs of the gated DeltaNet kernels, and errors against the token recurrence in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspine.common import gdn
from dspine.common.gdn import GdnFactors


def block(
    device: str, count: int, *, batch: int = 1, heads: tuple[int, int] = (1, 2), size: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.bfloat16, parallel: bool = False, seed: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    """q, k, v, log_decay, beta, state."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k = (normal(batch, count, heads[0], size[0]) for _ in range(2))
    if parallel:  # case N1: the same token again and again
        k = k[:, :1].expand_as(k)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    v = normal(batch, count, heads[1], size[1])
    gates = (batch, count, heads[1])
    log_decay, beta = -0.3 * torch.rand(gates, generator=generator), torch.rand(gates, generator=generator)
    if parallel:
        log_decay, beta = torch.full(gates, 0.999).log(), 0.5 + 0.499 * beta
    state = normal(batch, heads[1], size[1], size[0])
    q, k, v = ((x * s).to(dtype) for x, s in ((q, size[0] ** -0.5), (k, 1.0), (v, 1.0)))
    return tuple(x.to(device).contiguous() for x in (q, k, v, log_decay, beta, state))


def recurrence(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """`gdn_recurrence` of the same numbers, in float64 on the CPU."""
    return gdn.gdn_recurrence(*(x.double().cpu() for x in args))


def error(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius error."""
    return float((got.double().cpu() - want).norm() / want.norm())


def stacked(*layers: GdnFactors) -> GdnFactors:
    return GdnFactors(*(torch.stack([getattr(layer, name) for layer in layers]) for name in ("z", "k", "g")))


def commit(states: Tensor, factors: GdnFactors, m: Any, module: Any) -> Tensor:
    """`gdn_commit` with windows of no interest: states [L, B, ...], m a list."""
    layers, batch = states.shape[:2]
    windows = torch.zeros(layers, batch, 3, 1, device=states.device)
    inputs = torch.zeros(layers, batch, factors.z.shape[2], 1, device=states.device)
    return module.gdn_commit(states, factors, windows, inputs, torch.tensor(m, dtype=torch.int32, device=states.device))[0]
