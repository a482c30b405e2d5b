"""Other people's kernels, from wheels unpacked into a folder at run time: SGLang's default verify and commit, and
fla-core's recurrence run twice (once over all tokens, once over the accepted ones). Nothing of them is kept here."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.gdn import LAYERS, SETS, SIZE, VALUE_HEADS, make_block

_RECURRENT = "sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py"
_SCATTER = "sglang/kernels/ops/mamba/mamba_state_scatter_triton.py"


def find(folder: Path | None) -> tuple[dict[str, Callable[[int], list]], list[str]]:
    """(name -> function of the length that gives the runs to time, notes on what is missing)."""
    if folder is None:
        return {}, ["other kernels: no folder of unpacked wheels given (--vendors)"]
    found: dict[str, Callable[[int], list]] = {}
    notes = []
    loaders = {
        "SGLang default": partial(_sglang, dependent_launch=True),  # its own choice on Hopper
        "SGLang, plain launches": partial(_sglang, dependent_launch=False),
        "fla-core recurrent, twice": _fla,
    }
    for name, load in loaders.items():
        try:
            found[name] = load(folder)
        except (ImportError, OSError, AttributeError) as error:
            notes.append(f"{name}: {type(error).__name__}: {error}")
    return found, notes


def _sglang(folder: Path, dependent_launch: bool) -> Callable[[int], list]:
    """Two of its modules, with stand-ins for the helpers they import (the package itself needs a whole server)."""
    answers: dict[str, dict[str, Any]] = {
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: dependent_launch},
        "sglang.srt.utils": {
            "get_device_sm": lambda: 90, "is_cuda": lambda: True, "is_gfx95_supported": lambda: False,
            "is_hip": lambda: False, "is_sm90_supported": lambda: True,
        },
        "sglang.srt.utils.common": {
            "get_device_core_count": lambda index=0: torch.cuda.get_device_properties(index).multi_processor_count
        },
        "sglang.kernels.ops.memory.ptr_table": {"make_ptr_table": None},
    }  # fmt: skip
    for name, members in answers.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            package = sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
            package.__path__ = []  # type: ignore[attr-defined]
        for member, value in members.items():
            setattr(sys.modules[name], member, value)
    update = _module(folder / _RECURRENT, "sglang_recurrent").fused_sigmoid_gating_delta_rule_update
    scatter = _module(folder / _SCATTER, "sglang_scatter").fused_mamba_state_scatter_with_mask

    def build(count: int) -> list:
        runs = []
        for seed in range(SETS):
            block = make_block(count, seed=seed)
            a = torch.randn(LAYERS, count, VALUE_HEADS, device="cuda", dtype=torch.bfloat16)
            rate, bias = torch.zeros(VALUE_HEADS, device="cuda"), torch.zeros(VALUE_HEADS, device="cuda")
            index = torch.zeros(1, dtype=torch.int32, device="cuda")
            starts = torch.tensor([0, count], dtype=torch.int32, device="cuda")
            steps = torch.tensor([count - 1], dtype=torch.int32, device="cuda")
            middle = torch.empty(LAYERS, 1, count, VALUE_HEADS, SIZE, SIZE, device="cuda")

            def run(block=block, a=a, rate=rate, bias=bias, index=index, starts=starts, steps=steps, middle=middle) -> None:
                for i in range(LAYERS):
                    update(
                        A_log=rate, dt_bias=bias, q=block.q[i], k=block.k[i], v=block.v[i], a=a[i], b=a[i],
                        initial_state_source=block.states[i], initial_state_indices=index, cu_seqlens=starts,
                        use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, is_kda=False,
                        disable_state_update=True, intermediate_states_buffer=middle[i], intermediate_state_indices=index,
                        cache_steps=count, retrieve_parent_token=None,
                    )  # fmt: skip
                scatter(block.states, middle, index, steps, index)

            runs.append(run)
        return runs

    return build


def _fla(folder: Path) -> Callable[[int], list]:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    recurrent = importlib.import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule

    def build(count: int) -> list:
        runs = []
        for seed in range(SETS):
            block = make_block(count, seed=seed)
            states = block.states.transpose(-1, -2).contiguous()

            def run(block=block, states=states) -> None:
                for _ in range(2):
                    for i in range(LAYERS):
                        recurrent(
                            block.q[i], block.k[i], block.v[i], block.log_decay[i], beta=block.beta[i], scale=1.0,
                            initial_state=states[i], output_final_state=True,
                        )  # fmt: skip

            runs.append(run)
        return runs

    return build


def _module(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"{path} is not there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
