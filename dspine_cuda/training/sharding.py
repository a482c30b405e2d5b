"""`run.shard=fsdp`: float32 masters, gradients and optimiser state of the drafter lie in shards, one a rank (FSDP2).

The drafter is one unit: before a step's forward the ranks gather its weights in the run's dtype, after the backward pass the
gradients are summed into shards (float32), and each rank updates its own. The target and the activations are not sharded. A
checkpoint holds whole tensors, as an unsharded run's does: either resumes from the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dspine_cuda.drafter import DrafterModel
from dspine_cuda.training.config import OptimizerSection
from dspine_cuda.training.kinds import KindOutputs
from dspine_cuda.training.optimizer import MasterOptimizer
from dspine_cuda.training.step import DraftOutputs

Draft = Callable[..., DraftOutputs]


class ShardedDraft(nn.Module):
    """The forward of a whole drafter as one FSDP unit. Outputs leave as nested dictionaries: FSDP finds tensors in those."""

    def __init__(self, model: DrafterModel, draft: Draft) -> None:
        super().__init__()
        self.model, self.draft = model, draft

    def forward(self, *arguments: Any) -> dict[str, Any]:
        """`draft_outputs` of everything behind its model."""
        outputs = self.draft(self.model, *arguments)
        whole = {name: _owned(value) for name, value in vars(outputs).items() if name not in ("own", "layers")}
        return whole | {
            "layers": [_owned(layer) for layer in outputs.layers],
            "own": {n: _owned(v) for n, v in vars(outputs.own).items()},
        }


def _owned(value: Tensor | None) -> Tensor | None:
    """FSDP hooks outputs, which a view of another tensor may lose."""
    return value if value is None or value._base is None else value.clone()


def sharded_draft(model: DrafterModel, draft: Draft, device: torch.device, dtype: torch.dtype, world: int) -> Draft:
    """`draft` with the weights gathered around it, in `dtype`; afterwards the parameters of `model` are float32 shards of
    what it held."""
    codes = model.transfer_codes
    model.float()
    model.transfer_codes = codes  # frozen: whole on every rank, in the run's dtype
    unit = ShardedDraft(model, draft)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(unit, mesh=init_device_mesh(device.type, (world,)), reshard_after_forward=False, mp_policy=policy)
    assert isinstance(unit, FSDPModule)
    unit.set_gradient_divide_factor(1.0)  # losses are divided by global denominators: gradients are sums
    unit.set_force_sum_reduction_for_comms(True)  # plain sums: gloo has no scaled ones

    def run(_: DrafterModel, *arguments: Any) -> DraftOutputs:
        outputs = unit(*arguments)
        return DraftOutputs(**outputs | {"own": KindOutputs(**outputs["own"])})

    return run


class ShardedOptimizer(MasterOptimizer):
    """`MasterOptimizer` over this rank's shards; norms and blame are of the whole gradient."""

    def __init__(self, model: nn.Module, settings: OptimizerSection) -> None:
        self.shards = [parameter for _, parameter in model.named_parameters()]
        super().__init__(model, settings)

    def _own(self, parameter: Tensor) -> Tensor:
        assert isinstance(parameter, DTensor)
        return parameter.to_local()

    @property
    def unsummed(self) -> list[Tensor]:
        return []

    def _norms(self) -> Tensor:
        squares = torch.stack(torch._foreach_norm(self.gradients)).square()
        dist.all_reduce(squares)
        return squares.sqrt()

    def whole_masters(self) -> dict[str, Tensor]:
        """Name -> whole float32 master. A collective: every rank must call it."""
        return {name: self._whole(held, like) for name, held, like in zip(self.names, self.held, self.shards, strict=True)}

    @staticmethod
    def _whole(local: Tensor, like: Tensor) -> Tensor:
        assert isinstance(like, DTensor)
        placed = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return placed.full_tensor()

    def state_dict(self) -> dict[str, object]:
        """Whole tensors, as an unsharded run stores them. A collective."""
        state = {}
        for index, entry in self.adamw.state_dict()["state"].items():
            like = self.shards[index]
            state[index] = {
                name: self._whole(value, like).cpu() if value.ndim else value.cpu() for name, value in entry.items()
            }
        return {"masters": {name: master.cpu() for name, master in self.whole_masters().items()}, "adamw": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From whole tensors; each rank keeps its shard."""

        def local(whole: Tensor, like: Tensor) -> Tensor:
            assert isinstance(like, DTensor)
            return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements).to_local()

        masters = {n: local(state["masters"][n], like) for n, like in zip(self.names, self.shards, strict=True)}
        adamw = {
            index: {name: local(value, self.shards[index]) if value.ndim else value for name, value in entry.items()}
            for index, entry in state["adamw"].items()
        }
        super().load_state_dict({"masters": masters, "adamw": adamw})
