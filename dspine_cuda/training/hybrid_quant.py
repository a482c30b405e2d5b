"""Which tensors of a hybrid are stored in how many bits, and training that feels it (straight-through rounding)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dspine.common.errors import DSpineError
from dspine.common.quantization import SMALLEST_SCALE, GroupForm

_CENTRED = ("layernorm.weight", "q_norm.weight", "k_norm.weight")
_WHOLE = ("conv1d.weight", "mlp.gate.weight", "shared_expert_gate.weight", "in_proj_a.weight", "in_proj_b.weight")


def storage_forms(
    shapes: Mapping[str, tuple[int, ...]], *, experts: int, projections: int, embedding: int
) -> dict[str, GroupForm]:
    """Name -> form of every tensor that is quantised. Small tensors, norms and routers stay whole."""
    forms = {}
    for name, shape in shapes.items():
        if len(shape) < 2 or name.endswith(_WHOLE):
            continue
        bits = experts if ".experts." in name else embedding if "embed_tokens" in name else projections
        forms[name] = GroupForm(bits, group_of(name, shape[-1]))
    return forms


def group_of(name: str, count: int) -> int:
    """The group size along an axis of `count`: its largest divisor up to 128 (a scale and a bias cost 32 bits)."""
    fitting = [size for size in range(16, 129) if count % size == 0]
    if not fitting:
        raise DSpineError(f"{name}: no group of 16 to 128 values divides {count}")
    return max(fitting)


def as_stored(name: str, master: Tensor, forms: Mapping[str, GroupForm]) -> Tensor:
    """The value that a reader of the stored model gets for `master`, float32 up to a final rounding to bfloat16."""
    if name in forms:
        return rounded(master, forms[name])
    return rounded_norm(master) if name.endswith(_CENTRED) or name == "norm.weight" else master


def rounded_norm(weight: Tensor) -> Tensor:
    """A norm weight around zero, moved so that bfloat16 holds 1 + weight too: some readers add the 1 in bfloat16 (mlx_lm), some
    in float32 (transformers), and both must get one model."""
    return (1.0 + weight.bfloat16().float()).bfloat16().float() - 1.0


@torch.no_grad()
def rounded(weight: Tensor, form: GroupForm) -> Tensor:
    """What a reader makes of the stored `weight` [..., in], float32: `quantize_affine`, undone."""
    levels = 2**form.bits - 1
    groups = weight.float().unflatten(-1, (-1, form.group_size))
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    low_is_edge = low.abs() > high.abs()
    scale = ((high - low) / levels).clamp(min=SMALLEST_SCALE)
    scale = torch.where(low_is_edge, scale, -scale)
    edge = torch.where(low_is_edge, low, high)
    steps = (edge / scale).round()
    used = steps != 0
    scale = torch.where(used, edge / torch.where(used, steps, 1.0), scale).bfloat16().float()
    bias = torch.where(used, edge, 0.0).bfloat16().float()
    values = ((groups - bias[..., None]) / scale[..., None]).round().clamp(0, levels)
    return (values * scale[..., None] + bias[..., None]).flatten(-2)
