"""Bad arguments raise one line that says expected and got; file names and registration match the other backend's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dspine import kernels_metal, kernels_triton
from dspine.common.errors import DSpineError
from dspine.common.norms import RMSNorm
from dspine.common.parity.runner import OPERATIONS
from dspine.common.registry import registered_kernel
from dspine.common.settling import Counters
from dspine.kernels_triton import (
    _launch,
    accept,
    add_rms_norm,
    attention_inputs,
    correct_length,
    draft_signals,
    gated_rows,
    gdn_commit,
    gdn_verify,
    injection_gate,
    injection_messages,
    injection_write,
    path_walk,
    select_length,
    settle_round,
    silu_mul,
    transition_scores,
)  # fmt: skip
from tests.triton.blocks import block, stacked
from tests.triton.test_draft import weights

FILES = {path.stem for path in Path(next(iter(kernels_triton.__path__))).glob("*.py") if not path.stem.startswith("_")}


# What a decoder layer of MLX does besides Gated DeltaNet is the library's own; packed weights are MLX's layout.
TRITON_ONLY = {
    "add_rms_norm", "attention_inputs", "block_attention", "candidate_scores", "gated_rows", "gdn_keep", "gdn_round",
    "injection_messages", "linear_rows", "pick_experts", "routed_experts", "settle_round", "sigmoid_mul", "silu_mul",
    "stepping",
}  # fmt: skip
METAL_ONLY = {"gathered_rows", "quantized_rows"}


def test_both_backends_have_the_same_files():
    metal = {path.stem for path in Path(next(iter(kernels_metal.__path__))).glob("*.py") if not path.stem.startswith("_")}
    assert metal - METAL_ONLY == FILES - TRITON_ONLY


def test_every_operation_registers():
    for name in FILES:
        module = __import__(f"dspine.kernels_triton.{name}", fromlist=["register"])
        module.register()
    for name in set(OPERATIONS) - METAL_ONLY:
        kernel = registered_kernel(name, "torch", "cuda")
        assert kernel is not None and kernel.supports is not None and kernel.name == f"triton {name}"


def verify_arguments(device: str) -> dict[str, torch.Tensor]:
    return dict(zip(("q", "k", "v", "log_decay", "beta", "state"), block(device, 3), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda x: x[0]}, r"q must have shape \[B, w, Hk, Dk\], got \(3, 1, 16\)"),
        ({"v": lambda x: x.float()}, "one dtype, got"),
        ({"log_decay": lambda x: x[:, :, :1]}, "log_decay must have shape"),
        ({"q": lambda x: x.repeat(1, 6, 1, 1), "k": lambda x: x.repeat(1, 6, 1, 1), "v": lambda x: x.repeat(1, 6, 1, 1)},
         "1..16 tokens at once, got 18"),
        ({"q": lambda x: x.repeat(1, 1, 4, 1), "k": lambda x: x.repeat(1, 1, 4, 1)}, "multiple of key heads, got 2 and 4"),
        ({"state": lambda x: x.bfloat16()}, "state"),
        ({"log_decay": lambda x: x.bfloat16()}, "log_decay must be float32"),
        ({"state": lambda x: x.transpose(-1, -2)}, "state must be contiguous"),
    ],
)  # fmt: skip
def test_verify(device, change, message):
    arguments = verify_arguments(device)
    arguments |= {name: function(arguments[name]) for name, function in change.items()}
    with pytest.raises(DSpineError, match=message):
        gdn_verify.gdn_verify(*arguments.values())


def test_commit(device):
    args = block(device, 3)
    _, factors = gdn_verify.gdn_verify(*args)
    states, windows, inputs = (
        args[5].unsqueeze(0),
        torch.zeros(1, 1, 3, 4, device=device),
        torch.zeros(1, 1, 3, 4, device=device),
    )
    m, kept = torch.tensor([1], device=device), stacked(factors)
    for states_, factors_, windows_, m_, message in (
        (states[0], kept, windows, m, r"states must have shape \[L, B, Hv, Dv, Dk\]"),
        (states.transpose(-1, -2), kept, windows, m, "states must be contiguous"),
        (states, replace(kept, z=kept.z.bfloat16()), windows, m, "factors.z must be float32"),
        (states, kept, windows[..., :3], m, "inputs must have shape"),
        (
            states,
            kept,
            windows.transpose(-1, -2)[..., :3, :].transpose(-1, -2).mT.contiguous().mT[..., :4],
            m,
            "windows|inputs",
        ),
        (states, kept, windows, m.float(), "m must be an integer array"),
    ):
        with pytest.raises(DSpineError, match=message):
            gdn_commit.gdn_commit(states_, factors_, windows_, inputs, m_)


def test_drafter(device):
    w, norm = weights(device), RMSNorm(torch.ones(40, device=device), 1e-6)
    u, z, gated = torch.zeros(2, 40, device=device), torch.zeros(2, 24, device=device), torch.zeros(2, 12, device=device)
    codes, rows = torch.zeros(2, 4, 24, device=device), torch.zeros(2, 4, 40, device=device)
    for call, message in (
        (lambda: injection_gate.injection_gate(z.double(), z.double(), w), "receiver must be float32 or bfloat16, got float64"),
        (lambda: injection_gate.injection_gate(z, z[:1], w), "one shape"),
        (lambda: injection_gate.injection_gate(z[:, :20], z[:, :20], w), r"weights.message must have shape \(12, 20\)"),
        (lambda: injection_write.injection_write(u, gated[:1], w.write), "gated must have shape"),
        (lambda: injection_write.injection_write(u, gated, w.write.T.contiguous().T), "write must be contiguous"),
        (lambda: transition_scores.transition_scores(u, codes, rows[:, :3], w, norm), "candidate_rows must have shape"),
        (lambda: transition_scores.transition_scores(u, codes, rows.bfloat16(), w, norm), "candidate_rows must be float32"),
        (lambda: draft_signals.draft_signals(u, 41), "k must be 1..40"),
        (lambda: draft_signals.draft_signals(u.double(), 2), "logits must be float32 or bfloat16"),
        (lambda: path_walk.path_walk(torch.zeros(2, 4, 3, device=device), torch.zeros(2, 4, device=device).long()), "scores"),
        (
            lambda: path_walk.path_walk(torch.zeros(2, 4, 4, device=device), torch.zeros(2, 4, device=device)),
            "candidates must be",
        ),
    ):
        with pytest.raises(DSpineError, match=message):
            call()


def test_decisions(device):
    p, draft, limit = (
        torch.zeros(2, 3, 9, device=device),
        torch.zeros(2, 2, device=device).long(),
        torch.zeros(2, device=device).int(),
    )
    u = torch.zeros(2, 3, device=device)
    for call, message in (
        (lambda: accept.accept_greedy(p[0], draft, limit), r"logits must have shape \[B, w, V\]"),
        (lambda: accept.accept_greedy(p, draft[:, :1], limit), "draft must have shape"),
        (lambda: accept.accept_point_mass(p, draft, limit.float(), u[:, 1:], u), "limit must be int32 or int64"),
        (lambda: accept.accept_point_mass(p, draft, limit, u, u), "u_accept must have shape"),
    ):
        with pytest.raises(DSpineError, match=message):
            call()
    assert select_length.MOST and correct_length.MOST_EXPERTS


def test_early_launches_can_be_switched_off(monkeypatch):
    """A card of Hopper's kind, stood in for."""
    card = type("Card", (), {"is_cuda": True, "device": torch.device("cuda:0")})()
    monkeypatch.setattr(_launch, "_capability", lambda index: (9, 0))
    monkeypatch.setattr(_launch, "INTERPRETED", type("No", (), {"value": False}))
    assert _launch.overlaps(card)
    monkeypatch.setenv("DSPINE_EARLY_LAUNCH", "0")
    assert not _launch.overlaps(card)
    monkeypatch.setenv("DSPINE_EARLY_LAUNCH", "off")
    with pytest.raises(DSpineError, match="DSPINE_EARLY_LAUNCH must be 0 or 1, got 'off'"):
        _launch.overlaps(card)


def layer_inputs(device):
    """Arguments of `attention_inputs`: 4 query heads, 2 key heads of 16 over a cache of 20 rows."""

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    cache = torch.zeros(1, 2, 20, 16, device=device)
    table = torch.ones(20, 16, device=device)
    norm = RMSNorm(torch.ones(6, 16, device=device), 1e-6)
    return {
        "projected": torch.zeros(1, 3, 8, 16, device=device), "cos": table, "sin": table.clone(), "lengths": ints(2),
        "live": ints(3), "keys": cache, "values": cache.clone(), "heads": 4, "norm": norm,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projected": lambda x: x[0]}, r"projected must have shape \[B, w, S, D\], got \(3, 8, 16\)"),
        ({"projected": lambda x: x[:, :, :7]}, "4 query heads and 2 key heads need 8 sections of projected, got 7"),
        ({"keys": lambda x: x[..., :8]}, r"keys must have shape \[1, Hk, C, 16\]"),
        ({"values": lambda x: x[:, :1]}, "values must have the shape of keys"),
        ({"keys": lambda x: x[:, :, :3], "values": lambda x: x[:, :, :3]}, "3 rows and a scrap row do not fit"),
        ({"sin": lambda x: x[:, :8]}, r"cos and sin must have one shape \[P, R\]"),
        ({"cos": lambda x: x[:, :5], "sin": lambda x: x[:, :5]}, r"even number of dimensions, 2..16, got 5"),
        ({"lengths": lambda x: x.float()}, r"lengths must be an integer array of shape \(1,\)"),
        ({"live": lambda x: x.repeat(2)}, r"live must be an integer array of shape \(1,\)"),
        ({"cos": lambda x: x.bfloat16()}, "cos must have the dtype of projected"),
        ({"norm": lambda x: RMSNorm(x.weight[:4], x.eps)}, r"norm.weight must have shape \(6, 16\), got \(4, 16\)"),
        ({"keys": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}, "keys must be contiguous"),
    ],
)  # fmt: skip
def test_attention_inputs(device, change, message):
    arguments = layer_inputs(device)
    arguments |= {name: function(arguments[name]) for name, function in change.items()}
    with pytest.raises(DSpineError, match=message):
        attention_inputs.attention_inputs(*arguments.values())


def test_between_products(device):
    x, norm = torch.zeros(2, 8, device=device), RMSNorm(torch.ones(8, device=device), 1e-6)
    w = weights(device)
    raw, codes = torch.zeros(1, 3, 24, device=device), torch.zeros(1, 24, device=device)
    for call, message in (
        (
            lambda: add_rms_norm.add_rms_norm(x, x[:1], norm),
            r"y must have shape \(2, 8\) and dtype torch.float32, got \(1, 8\)",
        ),
        (lambda: add_rms_norm.add_rms_norm(x, x.bfloat16(), norm), "got .* and torch.bfloat16"),
        (lambda: add_rms_norm.add_rms_norm(x[:, :7], None, norm), r"norm.weight must have shape \(7,\), got \(8,\)"),
        (lambda: gated_rows.gated_rows(x, x[:1]), r"weight must have shape \[2I, K\], got \(1, "),
        (lambda: silu_mul.silu_mul(x[:, :7]), r"gate_up must have shape \[..., 2I\], got \(2, 7\)"),
        (lambda: injection_messages.injection_messages(raw[:, :1], codes, w), r"at least 2 rows, got \(1, 1, 24\)"),
        (lambda: injection_messages.injection_messages(raw, codes[:, :20], w), r"anchor_code must have shape \(1, 24\)"),
        (lambda: injection_messages.injection_messages(raw[..., :20], codes[:, :20], w), r"weights.message must have shape"),
    ):
        with pytest.raises(DSpineError, match=message):
            call()


def test_end_of_a_round(device):
    def ints(*shape):
        return torch.zeros(shape, dtype=torch.int32, device=device)

    counters, block, report, stops = Counters(ints(2), ints(2), ints(2), ints(2)), ints(2, 4), ints(2, 12), ints(16)
    good = [ints(2), ints(2), block, ints(2), counters, stops, report, 3]
    for place, value, message in (
        (7, 5, r"block must have shape \[B, W\] with W >= w = 5 >= 1, got \(2, 4\)"),
        (0, ints(3), r"accepted must have shape \(2,\), got \(3,\)"),
        (6, ints(2, 11), r"report must have shape \(2, 12\), got \(2, 11\)"),
        (2, block.long(), "block must be int32"),
        (4, replace(counters, anchor=ints(2).long()), "anchor must be int32"),
        (6, ints(12, 2).T, "report must be contiguous"),
    ):
        with pytest.raises(DSpineError, match=message):
            settle_round.settle_round(*good[:place], value, *good[place + 1 :])
