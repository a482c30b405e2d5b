"""A round's small steps beyond the parity table: ids outside a table, slices, idle slots, what is refused."""

from __future__ import annotations

import pytest
import torch

from dspine.common import attention, stepping
from dspine.common.errors import DSpineError
from dspine.common.selection.lengths import RoundLengths
from dspine.kernels_triton import attention_inputs
from dspine.kernels_triton import stepping as kernels


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ints(device: str, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_rows_of_slices_and_of_ids_outside(device):
    """A block's first columns are taken where they lie; an id that no row has gives zeros, and reads nothing else."""
    table = numbers(11, 70).to(device)
    block = torch.arange(10, device=device).reshape(2, 5)
    for ids in (block[:, :3], block[:, 1:2], block.T, block[0], block[None]):
        assert torch.equal(kernels.table_rows(table, ids), table[ids])
    assert kernels.table_rows(table, block[:, :0]).shape == (2, 0, 70)
    got = kernels.table_rows(table, torch.tensor([[3, 11], [-1, 2**40]], device=device))
    assert torch.equal(got[0, 0], table[3]) and not got[0, 1].any() and not got[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_anchor_outside_is_the_nearest_row(device, dtype):
    """What a broken target emits may be anything: it reads a row of the table, and of the codes, and spoils no other slot."""
    table, codes, fill = (x.to(device, dtype) for x in (numbers(11, 70), numbers(11, 9), numbers(70)))
    wild, near = (torch.tensor(x, device=device) for x in ([4, 2**40, -7, 11], [4, 10, 0, 10]))
    block, code = kernels.enter_block(table, wild, fill, 3, codes, 1.5)
    assert torch.equal(block[:, 0], (table[near].float() * 1.5).to(dtype)) and (block[:, 1:] == fill).all()
    assert torch.equal(code, (codes[near].float() * 3).to(dtype))
    block, code = kernels.enter_block(table, near[:1], fill, 1, None)
    assert code is None and torch.equal(block[0, 0], table[4])


def test_steps_of_idle_slots(device):
    """Budgets of 0, limits of 0, drafts that are not finite: nothing is live, nothing is accepted, one row is verified."""
    remaining, limits, finite = (
        ints(device, 0, 9, 9, 3),
        ints(device, 5, 0, 4, 9),
        torch.tensor([1, 1, 0, 1], device=device) > 0,
    )
    live, limit = kernels.round_limits(remaining, finite, 6, limits)
    assert live.tolist() == [0, 0, 4, 3] and limit.tolist() == [0, 0, 0, 2]
    room = RoundLengths(*(ints(device, 7, 7, 7, 7) for _ in range(3)), torch.zeros(4, 5, device=device))
    found = ints(device, 6, 4, 6, 5)
    bounded = kernels.bound_lengths(found, found + 1, torch.ones(4, 5, device=device), finite, remaining, room, 6, True)
    assert bounded.nominal.tolist() == [6, 4, 6, 5]
    assert bounded.upper.tolist() == [1, 5, 1, 3] and bounded.chosen.tolist() == [1, 4, 1, 3]


def refusals(device: str) -> list:
    table, fill, codes = (x.to(device) for x in (numbers(11, 70), numbers(70), numbers(11, 9)))
    anchor, flags, block = (
        ints(device, 1, 2),
        torch.ones(2, dtype=torch.bool, device=device),
        ints(device, *range(8)).view(2, 4),
    )
    tokens, uniforms = block[:, 1:].contiguous(), numbers(2, 5, 3).to(device)
    room = RoundLengths(*(anchor.clone() for _ in range(3)), torch.zeros(2, 3, device=device))
    survival, far = torch.ones(2, 3, device=device), torch.zeros(2, 2, device=device)
    return [
        (lambda: kernels.table_rows(table[0], anchor), r"table must have shape \[V, d\]"),
        (lambda: kernels.table_rows(table, anchor.float()), "ids must be int32 or int64, got float32"),
        (lambda: kernels.table_rows(table.T, anchor), "table must be contiguous"),
        (lambda: kernels.enter_block(table, anchor[None], fill, 3, codes), r"anchor must have shape \[B\]"),
        (lambda: kernels.enter_block(table, anchor, fill, 0, codes), "rows be 1 or more"),
        (lambda: kernels.enter_block(table, anchor, fill[1:], 3, codes), r"fill must have shape \(70,\)"),
        (lambda: kernels.enter_block(table, anchor, fill.bfloat16(), 3, codes), "fill must be float32"),
        (lambda: kernels.round_uniforms(uniforms[..., :2], anchor, 3), r"table must have shape \[B, P, 3\]"),
        (lambda: kernels.round_uniforms(uniforms, anchor[:1], 3), r"generated \[B\]"),
        (lambda: kernels.round_uniforms(uniforms.double(), anchor, 3), "table must be float32"),
        (lambda: kernels.round_limits(anchor, flags[:1], 3), "one shape"),
        (lambda: kernels.round_limits(anchor, flags, 0), "w be 1 or more"),
        (lambda: kernels.round_limits(anchor.long(), flags, 3), "remaining must be int32"),
        (lambda: kernels.place_drafts(block, flags, anchor, block, flags), "M below W"),
        (lambda: kernels.place_drafts(tokens, flags[:1], anchor, block, flags), "finite must be of 2 sequences"),
        (lambda: kernels.place_drafts(tokens, flags, anchor, block.T.contiguous().T, flags), "block must be contiguous"),
        (lambda: kernels.place_drafts(tokens.float(), flags, anchor, block, flags), "tokens must be int32 or int64"),
        (
            lambda: kernels.bound_lengths(anchor, anchor[:1], survival, flags, anchor, room, 4, True),
            "stage_zero must have shape",
        ),
        (
            lambda: kernels.bound_lengths(
                anchor, anchor, survival, flags, anchor, RoundLengths(anchor, anchor, anchor, far), 4, True
            ),
            r"room.survival must have shape \[B, 3 or more\]",
        ),
    ]


def test_what_is_refused(device):
    for call, message in refusals(device):
        with pytest.raises(DSpineError, match=message):
            call()


def context(device: str) -> list:
    """Arguments of `context_inputs`: B = 2, w = 3, L = 2, Hk = 2, D = 16, C = 12."""
    store, tables = numbers(2, 2, 2, 2, 12, 16), (numbers(12, 16), numbers(12, 16))
    given = [numbers(2, 3, 2, 4, 16), *tables, torch.tensor([4, 0]), torch.tensor([2, 0]), store, numbers(2, 2, 16)]
    return [(x.int() if x.dtype == torch.int64 else x).to(device) for x in given]


def test_context_of_an_idle_slot(device):
    """A slot of which nothing counts keeps every row but its scrap row; a live one gets the rows that count, of every layer."""
    given = context(device)
    before = given[5].clone()
    want = attention.context_inputs.reference(*(x.cpu() for x in given), 1e-6)
    store = attention_inputs.context_inputs(*given, 1e-6)
    assert store.data_ptr() == given[5].data_ptr()
    assert torch.equal(store[:, :, 1, :, :-1], before[:, :, 1, :, :-1])
    assert torch.equal(store[:, :, 0, :, 6:-1], before[:, :, 0, :, 6:-1])
    assert not torch.equal(store[:, :, 0, :, 4:6], before[:, :, 0, :, 4:6])
    torch.testing.assert_close(store[..., :-1, :].cpu(), want[..., :-1, :], rtol=2e-5, atol=2e-5)


def test_contexts_that_are_refused(device):
    names = ("projected", "cos", "sin", "lengths", "live", "store", "weight")
    for name, change, message in (
        ("projected", lambda x: x[:, :, :1], r"projected must have shape \[B, w, L, 2 Hk, D\]"),
        ("projected", lambda x: x[0], r"projected must have shape \[B, w, L, 2 Hk, D\]"),
        ("store", lambda x: x[0], r"store \[L, 2, B, Hk, C, D\]"),
        ("store", lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2), "keys must be contiguous"),
        ("weight", lambda x: x[:, :1], r"weight must have shape \(2, 2, 16\)"),
        ("lengths", lambda x: x[:1], "lengths"),
    ):
        given = dict(zip(names, context(device), strict=True))
        given[name] = change(given[name])
        with pytest.raises(DSpineError, match=message):
            attention_inputs.context_inputs(*given.values(), 1e-6)


def test_the_cores_own_checks_are_the_same():
    """Without a kernel nothing else is let through."""
    anchor = torch.tensor([1, 2], dtype=torch.int32)
    for call in (
        lambda: stepping.table_rows.reference(numbers(11), anchor),
        lambda: stepping.round_limits.reference(anchor, anchor[:1], 3),
        lambda: stepping.round_uniforms.reference(numbers(2, 5, 2), anchor, 3),
    ):
        with pytest.raises(DSpineError, match="must have"):
            call()
