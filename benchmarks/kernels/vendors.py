"""Other people's kernels, from wheels unpacked into a folder at run time: SGLang's default verify and commit, its ReplaySSM
verify with a compact ring of 16 that is folded into the state every round, and fla-core's recurrence run twice (once over
all tokens, once over the accepted ones). Nothing of them is kept here."""

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
_REPLAY = "sglang/kernels/ops/attention/linear/gdn_replayssm_spec_decode.py"
RING = 16


def find(folder: Path | None) -> tuple[dict[str, Callable[[int], list]], list[str]]:
    """(name -> function of the length that gives the runs to time, notes on what is missing)."""
    if folder is None:
        return {}, ["other kernels: no folder of unpacked wheels given (--vendors)"]
    found: dict[str, Callable[[int], list]] = {}
    notes = []
    loaders = {
        "SGLang default": partial(_sglang, dependent_launch=True),  # its own choice on Hopper
        "SGLang, plain launches": partial(_sglang, dependent_launch=False),
        "SGLang ReplaySSM": partial(_replay, block_v=64, num_warps=1),  # its defaults
        "SGLang ReplaySSM, (32, 4)": partial(_replay, block_v=32, num_warps=4),  # better at batch 1
        "fla-core recurrent, twice": _fla,
    }
    for name, load in loaders.items():
        try:
            found[name] = load(folder)
        except (ImportError, OSError, AttributeError) as error:
            notes.append(f"{name}: {type(error).__name__}: {error}")
    return found, notes


def _stand_ins(dependent_launch: bool = True) -> None:
    """Modules with the helpers that SGLang's kernels import: the package itself needs a whole server."""
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
        "sglang.kernels.ops.attention.fla.utils": {"is_tf32_supported": True},
    }  # fmt: skip
    for name, members in answers.items():
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            package = sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
            package.__path__ = []  # type: ignore[attr-defined]
        for member, value in members.items():
            setattr(sys.modules[name], member, value)


def _sglang(folder: Path, dependent_launch: bool) -> Callable[[int], list]:
    """Its default: every token's state is written, then the accepted one is copied."""
    _stand_ins(dependent_launch)
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


def _replay(folder: Path, block_v: int, num_warps: int) -> Callable[[int], list]:
    """A round of ReplaySSM in its compact form: verify, advance the ring, fold it into the state."""
    _stand_ins()
    module = _module(folder / _REPLAY, "sglang_replayssm")

    def build(count: int) -> list:
        return [partial(_replay_round, module, count, block_v, num_warps, **_replay_memory(count, i)) for i in range(SETS)]

    return build


def _replay_memory(count: int, seed: int) -> dict[str, Any]:
    """One slot of everything; slot 0 is its null block, so that all live in slot 1."""
    block = make_block(count, seed=seed)
    heads, device = block.q.shape[3], "cuda"
    ring = {"dtype": torch.bfloat16, "device": device}
    values, keys = (LAYERS, 2, VALUE_HEADS, RING, SIZE), (LAYERS, 2, heads, RING, SIZE)
    return {
        "block": block, "states": block.states.expand(LAYERS, 2, VALUE_HEADS, SIZE, SIZE).contiguous(),
        "a": torch.randn(LAYERS, count, VALUE_HEADS, **ring),
        "rates": torch.zeros(2, VALUE_HEADS, device=device),
        "caches": (torch.zeros(values, **ring), torch.zeros(keys, **ring), torch.zeros(values[:-1], device=device)),
        "rests": (torch.zeros(values, **ring), torch.zeros(keys, **ring)),
        "index": torch.ones(1, dtype=torch.int32, device=device),
        "starts": torch.tensor([0, count], dtype=torch.int32, device=device),
        "cursors": [torch.zeros(2, dtype=kind, device=device) for kind in (torch.int32, torch.int32, torch.int8)],
    }  # fmt: skip


def _replay_round(
    module: Any, count: int, block_v: int, num_warps: int, block: Any, states: Any, a: Any, rates: Any, caches: Any, rests: Any,
    index: Any, starts: Any, cursors: Any,
) -> None:  # fmt: skip
    d, k, g = caches
    written, base, flush = cursors
    for i in range(LAYERS):
        module.gdn_replayssm_spec_decode(
            block.q[i, 0], block.k[i, 0], block.v[i, 0], a[i], a[i], rates[0], rates[1], states[i], d[i], k[i], g[i],
            rests[0][i], rests[1][i], None, block.out[i, 0], starts, index, index, written, base, flush, RING, count,
            block_v=block_v, num_warps=num_warps, launch_mode="verify",
        )  # fmt: skip
    module.commit_gdn_replayssm_spec(written, base, flush, block.m, index, RING, count, fold_every_commit=True)
    module.commit_gdn_replayssm_circular(
        checkpoint_state=states, d_cache=d, k_cache=k, g_cache=g, d_residual_cache=rests[0], k_residual_cache=rests[1],
        state_batch_indices=index, replay_indices=index, write_pos=written, cache_base=base, is_flush=flush,
        accept_lens=block.m,
    )  # fmt: skip


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
