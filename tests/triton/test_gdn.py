"""GDN kernels beyond the parity table: one path for every length, launch parameters, writing in place, rollback."""

from __future__ import annotations

import pytest
import torch

from dspine.common.gdn import GdnFactors
from dspine.kernels_triton import gdn_commit, gdn_verify
from dspine.kernels_triton.gdn_verify import Launch
from tests.triton.blocks import block, commit, error, recurrence, stacked

DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("count", range(2, 17))
def test_parallel_keys_at_every_length(device, count):
    """Case N1: a power series loses everything here."""
    args = block(device, count, size=(32, 16), parallel=True)
    out, factors = gdn_verify.gdn_verify(*args)
    want, z, _, _ = recurrence(args)
    assert error(factors.z, z) <= 1e-5
    assert error(out, want) <= 3e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_the_length_of_its_block(device, dtype):
    """Case N3: plain decoding (w = 1) and every verify round give a token the same bits."""
    args = block(device, 16, size=(32, 16), dtype=dtype)
    out, factors = gdn_verify.gdn_verify(*args)
    for count in (1, 2, 3, 4, 5, 8, 9):
        part = [x[:, :count].contiguous() for x in args[:5]]
        short, kept = gdn_verify.gdn_verify(*part, args[5])
        assert torch.equal(short, out[:, :count])
        assert torch.equal(kept.z, factors.z[:, :count])
        assert torch.equal(kept.g, factors.g[:, :count])


@pytest.mark.parametrize("launch", [Launch(8, 1, 8), Launch(16, 2, 8), Launch(32, 4, 8), Launch(8, 1, 4), Launch(16, 1, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_launch_choice(device, launch, dtype):
    """Slices of the state that do and do not divide it, blocks of H merged once, twice and not at all."""
    args = block(device, 13, size=(20, 40), dtype=dtype)
    out, z, g = torch.empty_like(args[2]), torch.empty(args[2].shape, device=device), torch.empty(args[4].shape, device=device)
    gdn_verify.launch(*args, out, z, g, parameters=launch)
    want, want_z, _, last = recurrence(args)
    assert error(z, want_z) <= (2e-6 if dtype == torch.float32 else 1e-5)
    assert error(out, want) <= (2e-6 if dtype == torch.float32 else 2e-3)
    states = args[5].unsqueeze(0).clone()
    windows, inputs = torch.randn(1, 1, 3, 5, device=device), torch.randn(1, 1, 13, 5, device=device)
    m = torch.tensor([13], device=device)
    moved = inputs[:, :, 10:].clone()
    parameters = gdn_commit.Launch(launch.block_v, launch.num_warps, channels=4)
    gdn_commit.launch(states, stacked(GdnFactors(z, args[1], g)), windows, inputs, m, parameters)
    assert error(states[0], last) <= 1e-5
    assert torch.equal(windows, moved)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_windows_move_in_place(device, m):
    """Rows m..m+2 of the joined window and inputs, whether they overlap the old window or not."""
    args = block(device, 4)
    _, factors = gdn_verify.gdn_verify(*args)
    windows, inputs = torch.randn(1, 1, 3, 7, device=device), torch.randn(1, 1, 4, 7, device=device)
    want = torch.cat([windows, inputs], dim=2)[:, :, m : m + 3].clone()
    states = args[5].unsqueeze(0).clone()
    got = gdn_commit.gdn_commit(states, stacked(factors), windows, inputs, torch.tensor([m], device=device))
    assert got[0] is states and got[1] is windows
    assert torch.equal(windows, want)
    assert error(states[0], recurrence(args)[2][:, m - 1]) <= 1e-5


def test_slots_without_tokens_stay_as_they_are(device):
    """Case R8: three live rows in a batch of four; the fourth holds NaN before and after."""
    args = block(device, 5, batch=4)
    args[5][2] = float("nan")
    args[0][2] = float("nan")
    lengths = torch.tensor([5, 3, 0, 1], dtype=torch.int32, device=device)
    out, factors = gdn_verify.gdn_verify(*args, lengths)
    assert torch.isfinite(out).all() and torch.isfinite(factors.z).all()
    alone = [x[[0, 1, 3]].contiguous() for x in args]
    want, kept = gdn_verify.gdn_verify(*alone, lengths[[0, 1, 3]])
    assert torch.equal(out[[0, 1, 3]], want) and torch.equal(factors.z[[0, 1, 3]], kept.z)
    states = commit(args[5].unsqueeze(0).clone(), stacked(factors), [5, 2, 0, 1], gdn_commit)[0]
    assert states[2].isnan().all()
    assert torch.equal(states[[0, 1, 3]], commit(alone[5].unsqueeze(0).clone(), stacked(kept), [5, 2, 1], gdn_commit)[0])


def test_forced_rejection_is_plain_decoding(device):
    """Case N3: verify four tokens and keep one, against one token at a time: the same bits after 12 rounds."""
    state = block(device, 4)[5]
    ahead, plain = state.clone(), state.clone()
    for turn in range(12):
        args = block(device, 4, seed=turn)[:5]
        first = [x[:, :1].contiguous() for x in args]
        out, factors = gdn_verify.gdn_verify(*args, ahead)
        one, kept = gdn_verify.gdn_verify(*first, plain)
        assert torch.equal(out[:, :1], one)
        commit(ahead.unsqueeze(0), stacked(factors), [1], gdn_commit)
        commit(plain.unsqueeze(0), stacked(kept), [1], gdn_commit)
        assert torch.equal(ahead, plain)


def test_a_deferred_commit_is_a_commit(device):
    """The state after it, and the next round's outputs, are those of commit and then verify."""
    first, second = block(device, 6, batch=3), block(device, 3, batch=3, seed=1)
    _, factors = gdn_verify.gdn_verify(*first)
    m = torch.tensor([6, 0, 2], dtype=torch.int32, device=device)
    state = first[5].clone()
    out, later, returned = gdn_verify.gdn_verify_deferred(*second[:5], state, factors, m)
    assert returned is state
    want = commit(first[5].unsqueeze(0).clone(), stacked(factors), [6, 0, 2], gdn_commit)[0]
    assert error(state, want.double().cpu()) <= 1e-6
    assert torch.equal(state[1], first[5][1])
    direct, kept = gdn_verify.gdn_verify(*second[:5], state.clone())
    assert torch.equal(direct, out) and torch.equal(kept.z, later.z)


@pytest.mark.parametrize("key_dim", [64, 128, 256])
@pytest.mark.parametrize("value_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_sizes(device, key_dim, value_dim, dtype):
    """Case M5: what a launch asks of shared memory must exist at every head size."""
    args = block(device, 16, heads=(1, 1), size=(key_dim, value_dim), dtype=dtype)
    out, factors = gdn_verify.gdn_verify(*args)
    want, _, _, last = recurrence(args)
    assert error(out, want) <= (2e-6 if dtype == torch.float32 else 2e-3)
    states = commit(args[5].unsqueeze(0).clone(), stacked(factors), [16], gdn_commit)
    assert error(states[0], last) <= (2e-6 if dtype == torch.float32 else 1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="programmatic dependent launch needs a CUDA device")
def test_an_overlapped_launch_changes_nothing(device):
    args = block(device, 8, heads=(4, 8), size=(128, 128))
    want, factors = gdn_verify.gdn_verify(*args)
    out, z, g = torch.empty_like(want), torch.empty_like(factors.z), torch.empty_like(factors.g)
    for _ in range(20):
        gdn_verify.launch(*args, out, z, g, overlap=True)
    assert torch.equal(out, want) and torch.equal(z, factors.z)
