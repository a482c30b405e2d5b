"""AdamW over float32 master weights; the model computes with copies in its own dtype.

A step whose gradient is not finite changes nothing: the fused optimiser gets `found_inf` on the device, the way torch's
own GradScaler hands it over, so nobody waits for the GPU. Which parameters were to blame is kept on the device too, and
read when metrics are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspine_cuda.training.config import OptimizerSection


class MasterOptimizer:
    """Invariant: after `step`, every parameter of the model equals its master, rounded."""

    def __init__(self, model: nn.Module, settings: OptimizerSection) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = [parameter for _, parameter in model.named_parameters()]
        self.separate = self.parameters[0].dtype != torch.float32
        own = [self._own(parameter) for parameter in self.parameters]
        self.masters = [p.detach().float().clone() if self.separate else p for p in own]
        self.gradients = [torch.zeros_like(m, dtype=torch.float32, requires_grad=False) for m in self.masters]
        self.clip_norm = settings.clip_norm
        device = self.masters[0].device
        self._rate = torch.tensor(0.0, device=device)
        self.adamw = torch.optim.AdamW(
            [m.detach() for m in self.masters],
            lr=self._rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.held = self.adamw.param_groups[0]["params"]
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._blamed = torch.zeros(len(self.masters), dtype=torch.bool, device=device)

    def _own(self, parameter: Tensor) -> Tensor:
        """The part of a parameter or gradient that this rank updates: all of it."""
        return parameter

    @property
    def unsummed(self) -> list[Tensor]:
        """Gradients that the ranks have yet to add up."""
        return self.gradients

    def _norms(self) -> Tensor:
        """Norm of every parameter's gradient."""
        return torch.stack(torch._foreach_norm(self.gradients))

    def collect(self) -> None:
        """Add the model's gradients to the float32 ones and clear them (after every micro-batch)."""
        present = [(g, self._own(p.grad)) for g, p in zip(self.gradients, self.parameters, strict=True) if p.grad is not None]
        if present:
            torch._foreach_add_([g for g, _ in present], [grad.float() for _, grad in present])
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, rate: float) -> Tensor:
        """Clip, update unless a gradient is not finite, refresh the model's copies. Returns the norm before clipping."""
        norms = self._norms()
        norm = norms.square().sum().sqrt()
        finite = torch.isfinite(norm)
        self._blamed |= ~torch.isfinite(norms)
        self.skipped += (~finite).long()
        scale = torch.where(finite, (self.clip_norm / (norm + 1e-6)).clamp(max=1.0), 1.0)
        torch._foreach_mul_(self.gradients, scale)
        for held, gradient in zip(self.held, self.gradients, strict=True):
            held.grad = gradient
        self._rate.fill_(rate)
        self.adamw.grad_scale, self.adamw.found_inf = None, (~finite).float()
        self.adamw.step()
        torch._foreach_zero_(self.gradients)
        if self.separate:
            torch._foreach_copy_(self.parameters, self.held)
        return norm

    def blamed(self) -> list[str]:
        """Names of parameters whose gradient was not finite since the last call (reads the device)."""
        flags = self._blamed.tolist()
        self._blamed.zero_()
        return [name for name, bad in zip(self.names, flags, strict=True) if bad]

    def named_masters(self) -> dict[str, Tensor]:
        """Checkpoint name -> float32 master."""
        return dict(zip(self.names, self.held, strict=True))

    def whole_masters(self) -> dict[str, Tensor]:
        """Name -> whole float32 master; every rank calls it."""
        return self.named_masters()

    def state_dict(self) -> dict[str, object]:
        """Everything `load_state_dict` needs, exact."""
        return {
            "masters": {n: m.detach().cpu() for n, m in self.named_masters().items()},
            "adamw": self.adamw.state_dict()["state"],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, object]) -> None:
        for name, master in self.named_masters().items():
            master.copy_(state["masters"][name])  # type: ignore[index]
        groups = self.adamw.state_dict()["param_groups"]
        self.adamw.load_state_dict({"state": state["adamw"], "param_groups": groups})
        self._rate = self.adamw.param_groups[0]["lr"]
        if self.separate:
            torch._foreach_copy_(self.parameters, self.held)
