"""Quantised matrices of a drafter left packed: `nn.QuantizedLinear` in the place of `nn.Linear`."""

from __future__ import annotations

from mlx import nn

from dspine.common.checkpoints import DraftTensors, expected_tensors
from dspine.common.quantization import GroupForm

_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
_PLAIN = ("injection.", "confidence_head.")  # the core reads these weights as arrays, or they are tiny


def pack_linears(model: nn.Module, tensors: DraftTensors) -> dict[str, GroupForm]:
    """Replace every linear map whose matrix is stored in a form that MLX multiplies with; returns name -> form of those.
    All others are to be read dequantised."""
    forms = {}
    for name in expected_tensors(tensors.config):
        form = tensors.form(name)
        known = form is not None and form.bits in _BITS and form.group_size in _GROUPS and not name.startswith(_PLAIN)
        if known and name.endswith(".weight"):
            forms[name] = form

    def chosen(path: str, module: nn.Module) -> bool | dict[str, int]:
        form = forms.get(f"{path}.weight")
        if form is None or not isinstance(module, nn.Linear | nn.Embedding):
            return False
        return {"bits": form.bits, "group_size": form.group_size}

    nn.quantize(model, class_predicate=chosen)
    modules = dict(model.named_modules())
    return {name: form for name, form in forms.items() if "scales" in modules.get(name.removesuffix(".weight"), {})}
