"""A Gated DeltaNet layer between its products, and what a round leaves, beyond the parity table: rows of a wider memory, one
path for every length, round after round without a copy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dspine.common import gdn_rounds
from dspine.common.errors import DSpineError
from dspine.common.gdn import GdnFactors, GdnInputWeights, GdnLayout
from dspine.common.gdn_rounds import GdnKept, GdnLayerWeights
from dspine.kernels_triton import gdn_keep as keep_kernel
from dspine.kernels_triton import gdn_round as round_kernel
from tests.triton.blocks import error

LAYOUT, ROOM = GdnLayout(1, 2, 16, 24), 6
SIZE = LAYOUT.channels + 2 * 24 + 2 * 2


def drawn(device, *shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def layer(device, dtype):
    inputs = GdnInputWeights(
        drawn(device, LAYOUT.channels, 4, seed=1, dtype=dtype), drawn(device, 2, seed=2).abs(), drawn(device, 2, seed=3)
    )
    norm = SimpleNamespace(weight=1 + 0.3 * drawn(device, 24, seed=4), eps=1e-6)
    return GdnLayerWeights(inputs, norm, LAYOUT)


def memory(device, dtype, batch=1, layers=()):
    """Room for ROOM rows, holding 7."""

    def full(*shape, kind=torch.float32):
        return torch.full((*layers, batch, ROOM, *shape), 7.0, dtype=kind, device=device)

    return GdnKept(GdnFactors(full(2, 24), full(1, 16, kind=dtype), full(2)), full(LAYOUT.channels, kind=dtype))


def doubled(x):
    """Every tensor of a tree in float64 on the CPU."""
    if isinstance(x, torch.Tensor):
        return x.double().cpu() if x.is_floating_point() else x.cpu()
    if isinstance(x, SimpleNamespace):
        return SimpleNamespace(weight=doubled(x.weight), eps=x.eps)
    return replace(x, **{name: doubled(value) for name, value in vars(x).items() if value is not None and name != "layout"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounds_need_no_copies(device, dtype):
    """Four rounds over the same memory, the projection a part of wider rows: outputs and states against float64, nothing
    written behind the block."""
    weights, batch = layer(device, dtype), 2
    state, window = drawn(device, batch, 2, 24, 16, seed=5), drawn(device, 1, batch, 3, LAYOUT.channels, seed=6, dtype=dtype)
    past, room = memory(device, dtype, batch, (1,)).factors, memory(device, dtype, batch, (1,))
    one = GdnKept(GdnFactors(*(getattr(room.factors, n)[0] for n in "zkg")), room.inputs[0])
    held = GdnFactors(*(getattr(past, n)[0] for n in "zkg"))
    m = torch.zeros(batch, dtype=torch.int32, device=device)
    wide_state, wide_window, wide_past = state.double().cpu(), window.double().cpu(), doubled(past)
    for turn, (count, kept) in enumerate(((4, (4, 1)), (1, (1, 0)), (5, (2, 5)), (3, (3, 3)))):
        projected = drawn(device, batch, count, SIZE + 12, seed=7 + turn, dtype=dtype)[..., :SIZE]
        rows, left, returned = round_kernel.gdn_round(projected, window[0], state, held, m, one, weights)
        assert returned is state and left.inputs.data_ptr() == one.inputs.data_ptr() and left.inputs.shape[1] == count
        assert bool((room.factors.z[:, :, count:] == 7).all()) if turn == 0 else True
        want, wide, wide_state = gdn_rounds.gdn_round.reference(
            doubled(projected), wide_window[0], wide_state, GdnFactors(wide_past.z[0], wide_past.k[0], wide_past.g[0]), m.cpu(),
            doubled(one), doubled(weights),
        )  # fmt: skip
        bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
        assert error(rows, want) <= bound and error(state, wide_state) <= bound
        m = torch.tensor(kept, dtype=torch.int32, device=device)
        same = keep_kernel.gdn_keep(window, past, room, m)
        assert same[0] is window and same[1] is past
        for name in ("z", "k", "g"):
            getattr(wide_past, name)[0, :, :count] = getattr(wide.factors, name)
        joined = torch.cat((wide_window[0], wide.inputs), dim=1)
        wide_window[0] = torch.stack([joined[b, n : n + 3] for b, n in enumerate(kept)])
        assert error(window, wide_window) <= (3e-3 if dtype == torch.bfloat16 else 1e-6)


def test_a_token_does_not_depend_on_the_length_of_its_block(device):
    weights, dtype = layer(device, torch.bfloat16), torch.bfloat16
    projected, window = drawn(device, 1, 5, SIZE, dtype=dtype), drawn(device, 1, 3, LAYOUT.channels, seed=6, dtype=dtype)
    past, none = memory(device, dtype).factors, torch.zeros(1, dtype=torch.int32, device=device)
    start = drawn(device, 1, 2, 24, 16, seed=5)
    whole, left, _ = round_kernel.gdn_round(projected, window, start.clone(), past, none, memory(device, dtype), weights)
    for count in (1, 2, 4):
        part = projected[:, :count]
        rows, kept, _ = round_kernel.gdn_round(part, window, start.clone(), past, none, memory(device, dtype), weights)
        assert torch.equal(rows, whole[:, :count]) and torch.equal(kept.factors.z, left.factors.z[:, :count])


def test_bad_arguments(device):
    weights, dtype = layer(device, torch.float32), torch.float32
    projected, window = drawn(device, 1, 3, SIZE), drawn(device, 1, 3, LAYOUT.channels)
    room, past, m = memory(device, dtype), memory(device, dtype).factors, torch.zeros(1, dtype=torch.int32, device=device)
    state = drawn(device, 1, 2, 24, 16)
    layers = memory(device, dtype, 1, (1,))
    for call, message in (
        (
            lambda: round_kernel.gdn_round(projected[..., 1:], window, state, past, m, room, weights),
            "projected must have shape",
        ),
        (lambda: round_kernel.gdn_round(projected.repeat(1, 3, 1), window, state, past, m, room, weights), "room for 6 rows"),
        (lambda: round_kernel.gdn_round(projected, window, state.mT, past, m, room, weights), "state"),
        (lambda: round_kernel.gdn_round(projected, window, state, past, m.float(), room, weights), "m must be an integer"),
        (lambda: round_kernel.gdn_round(projected.bfloat16(), window, state, past, m, room, weights), "room.inputs must be"),
        (lambda: keep_kernel.gdn_keep(window, past, layers, m), "windows must have shape"),
        (lambda: keep_kernel.gdn_keep(window[None], past, layers, m), "must have shape"),
        (lambda: keep_kernel.gdn_keep(window[None], layers.factors, layers, m), "must not lie in the memory"),
        (
            lambda: keep_kernel.gdn_keep(window[None], memory(device, dtype, 1, (1,)).factors, layers, m.float()),
            "integer array",
        ),
    ):
        with pytest.raises(DSpineError, match=message):
            call()
