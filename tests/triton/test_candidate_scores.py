"""Scores straight from the tables, and what a layer's messages leave for them: bits of a row, slices, idle slots, choices."""

from __future__ import annotations

import pytest
import torch

from dspine.common import injection, transition
from dspine.common.errors import DSpineError
from dspine.common.injection import InjectionWeights
from dspine.common.norms import RMSNorm
from dspine.kernels_triton import _choices, candidate_scores, injection_messages, transition_scores

HIDDEN, RANK, SIZE, VOCABULARY, K = 80, 512, 24, 50, 5


def numbers(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * scale


def weights(device: str, dtype: torch.dtype) -> InjectionWeights:
    gates = [numbers(SIZE, RANK, scale=RANK**-0.5, seed=seed) for seed in range(3)]
    made = (numbers(RANK, HIDDEN, scale=HIDDEN**-0.5), numbers(HIDDEN, SIZE, scale=0.3), *gates, numbers(SIZE))
    return InjectionWeights(*(array.to(device, dtype) for array in made))


def block(device: str, dtype: torch.dtype, batch: int = 2, rows: int = 6):
    """(arguments of candidate_scores without weights and norm, readout products of all rows), consistent with each other."""
    w = weights(device, dtype)
    hidden = numbers(batch, rows + 1, HIDDEN).to(device, dtype)
    raw = (hidden.float() @ w.readout.float().T).to(dtype)
    code = numbers(batch, RANK).to(device, dtype)
    codes = torch.nn.functional.normalize(numbers(VOCABULARY, RANK), dim=-1).to(device, dtype)
    ids = torch.randint(0, VOCABULARY, (batch, rows, K), generator=torch.Generator().manual_seed(3)).to(device)
    _, heard = injection_messages.injection_messages(raw, code, w, True)
    return [hidden[:, 1:], heard[:, 1:], code, ids, codes, numbers(VOCABULARY, HIDDEN).to(device, dtype)], raw


def norm(device: str, dtype: torch.dtype) -> RMSNorm:
    return RMSNorm((1 + numbers(HIDDEN, scale=0.1)).to(device, dtype), 1e-6)


DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_are_its_own(device, dtype):
    """A block alone, fewer rows, other candidates behind it: the same bits. Blocks are slices here and whole there."""
    args, _ = block(device, dtype)
    w, scale = weights(device, dtype), norm(device, dtype)
    whole = candidate_scores.candidate_scores(*args, w, scale)
    alone = [x[1:].contiguous() for x in args[:4]]
    assert torch.equal(candidate_scores.candidate_scores(*alone, *args[4:], w, scale), whole[1:])
    fewer = [x[:, :3] if x.dim() == 3 else x for x in args[:4]]
    assert torch.equal(candidate_scores.candidate_scores(*fewer, *args[4:], w, scale), whole[:, :3])
    changed = [x.clone() for x in args[:4]]
    changed[3][:, 4:] = 7
    assert torch.equal(candidate_scores.candidate_scores(*changed, *args[4:], w, scale)[:, :4], whole[:, :4])


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
def test_the_same_scores_as_from_gathered_rows(device, dtype, bound):
    """Two ways to one answer: z and its half of the gate are found anew by `transition_scores`."""
    args, _ = block(device, dtype)
    hidden, _, code, ids, codes, head = args
    w, scale = weights(device, dtype), norm(device, dtype)
    first = code[:, None, None].expand(-1, 1, K, -1)
    known = (codes[ids[:, :-1]].float() * RANK**0.5).to(dtype)
    want = transition_scores.transition_scores(hidden, torch.cat([first, known], 1), head[ids], w, scale)
    got = candidate_scores.candidate_scores(*args, w, scale)
    assert float((got - want).norm() / want.norm()) < bound


def test_candidates_of_an_idle_slot_may_be_anything(device):
    args, _ = block(device, torch.float32)
    w, scale = weights(device, torch.float32), norm(device, torch.float32)
    want = candidate_scores.candidate_scores(*args, w, scale)
    args[3] = args[3].clone()
    args[3][1] = torch.tensor([2**40, -(2**40), VOCABULARY, -1, 2**31 - 1], device=device)
    assert torch.equal(candidate_scores.candidate_scores(*args, w, scale)[0], want[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_and_what_is_heard(device, dtype):
    """`heard` changes no message (only whether a product and a sum are rounded once or twice); the anchor hears nothing; a
    block's bits do not depend on the blocks beside it."""
    args, raw = block(device, dtype)
    w, code = weights(device, dtype), args[2]
    gated, heard = injection_messages.injection_messages(raw, code, w, True)
    alone = injection_messages.injection_messages(raw, code, w).float()
    assert float((alone - gated.float()).abs().max()) <= (1e-6 if dtype == torch.float32 else 8e-3) * float(alone.abs().max())
    assert not heard[:, 0].any() and float(gated[:, 0].abs().max()) < 1e-37  # the interpreter rounds 0 up
    one, own = injection_messages.injection_messages(raw[1:], code[1:], w, True)
    assert torch.equal(one[0], gated[1]) and torch.equal(own[0], heard[1])
    wide = [x.float().cpu() for x in (raw, code)]
    want, want_heard = injection.injection_messages.reference(*wide, weights("cpu", dtype), True)
    bound = 1e-5 if dtype == torch.float32 else 8e-3
    assert float((gated.float().cpu() - want).norm() / want.norm()) < bound
    assert float((heard.cpu() - want_heard).norm() / want_heard.norm()) < bound


@pytest.mark.parametrize(
    "text",
    [
        "injection_messages=16,32,2,3,4,1;injection_write=16,64,2,3,4;transition_gate=16,16,64,4,3,1;transition_part=64,16,32,4,3,1",
        "injection_messages=16,64,4,2,1,0;transition_gate=128,16,128,8,3,0;transition_part=32,128,64,8,3,0",
        "injection_messages=32,64,4,3,3,0",
    ],
)
def test_choices_of_launches(device, monkeypatch, text):
    """Other tiles, splits and places: the same answer up to the order of sums; the core in float64 is the judge."""
    args, raw = block(device, torch.bfloat16)
    w, scale = weights(device, torch.bfloat16), norm(device, torch.bfloat16)
    exact = [x.double().cpu() if x.is_floating_point() else x.cpu() for x in args]
    wide = InjectionWeights(*(x.double().cpu() for x in vars(w).values()))
    want = transition.candidate_scores.reference(*exact, wide, RMSNorm(scale.weight.double().cpu(), scale.eps))
    monkeypatch.setenv("DSPINE_KERNELS_TRY", text)
    for module in (injection_messages, transition_scores):  # the interpreter would take all columns at once
        monkeypatch.setattr(module, "programs_of", lambda size, wanted: wanted)
    got = candidate_scores.candidate_scores(*args, w, scale).cpu()
    assert float((got - want).norm() / want.norm()) < 2e-3
    gated = injection_messages.injection_messages(raw, args[2], w)
    monkeypatch.undo()
    usual = injection_messages.injection_messages(raw, args[2], w).float()
    assert float((gated.float() - usual).norm() / usual.norm()) < 2e-3


def test_bad_choices(monkeypatch):
    now = transition_scores.Gate()
    assert _choices.read("transition_gate", _choices.written(now), now) == now
    for text, message in (
        ("64,16", "pairs,columns,step,num_warps,stages,late expected"),
        ("64,16,128,4,x,0", "expected, got '64,16,128,4,x,0'"),
        ("48,16,128,4,4,0", "pairs must be a power of two, got 48"),
    ):
        monkeypatch.setenv("DSPINE_KERNELS_TRY", f"transition_gate={text}")
        with pytest.raises(DSpineError, match=message):
            transition_scores.gate_choice(torch.bfloat16)


def test_arguments(device):
    args, _ = block(device, torch.float32)
    w, scale = weights(device, torch.float32), norm(device, torch.float32)
    names = ("hidden", "heard", "anchor_code", "candidates", "codes", "head")
    for name, change, message in (
        ("hidden", lambda x: x[0], r"hidden must have shape \[B, M, H\]"),
        ("heard", lambda x: x[:, 1:], r"heard must have shape \(2, 6, 24\), got \(2, 5, 24\)"),
        ("heard", lambda x: x.bfloat16(), "heard must be float32, got bfloat16"),
        ("anchor_code", lambda x: x[:1], r"anchor_code must have shape \(2, 512\)"),
        ("candidates", lambda x: x.float(), "candidates must be int32 or int64"),
        ("candidates", lambda x: x[:, 1:], r"candidates must have shape \(2, 6, 5\)"),
        ("codes", lambda x: x.bfloat16(), "codes must be float32"),
        ("head", lambda x: x[:, 1:], r"head must have shape \(50, 80\), got \(50, 79\)"),
        ("head", lambda x: x.T.contiguous().T, "head must be contiguous"),
    ):
        given = dict(zip(names, args, strict=True))
        given[name] = change(given[name])
        with pytest.raises(DSpineError, match=message):
            candidate_scores.candidate_scores(*given.values(), w, scale)
    empty = [x[:0] for x in args[:4]]
    assert candidate_scores.candidate_scores(*empty, *args[4:], w, scale).shape == (0, 6, K, K)
    assert candidate_scores.supports(*args, w, scale) and not candidate_scores.supports(*args[:5], args[5].T, w, scale)
