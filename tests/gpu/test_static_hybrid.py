"""The static step of a hybrid on CUDA in bfloat16: a token's bits and its experts are those of a block of any length, and the
step is a fixed number of launches."""

from __future__ import annotations

import pytest
import torch

from dspine_cuda.runtime import RUNTIME
from dspine_cuda.static.arena import Arena, ArenaShape
from dspine_cuda.static.hybrid import StaticHybrid
from tests.helpers.hybrids import save_hybrid
from tests.helpers.models import prompt

PAST, ROWS = 11, 16
SPARSE = ("qwen3_5_moe_text", "qwen3_moe", "qwen3_next")


@pytest.fixture(scope="module", params=SPARSE)
def target(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_hybrid(folder, request.param)
    found = RUNTIME.load_target(folder, device="cuda", dtype="bfloat16")
    found.bind_features([0, 2, 4])
    return found


def started(target):
    arena = Arena(target, None, ArenaShape(64, 1, ROWS))
    target.prefill(arena.cache, prompt(PAST, seed=6).cuda(), chunk=8)
    arena.start([PAST], [5], [40], frozenset(), None)
    return arena, StaticHybrid(target, arena)


@torch.inference_mode()
def test_a_token_does_not_depend_on_its_block(target):
    """Taps and layer 0's experts of every length are the first rows of the longest block's, bit for bit; so are the factors
    that the commit reads."""
    tokens = prompt(ROWS, seed=9).cuda()
    whole, picks, kept = None, None, None
    for w in (ROWS, 1, 2, 7):
        arena, static = started(target)
        live = torch.full((1,), w, dtype=torch.int32, device="cuda")
        stage = static.begin(tokens[:, :w], live)
        output = static.finish(stage, w, live)
        factors = None if arena.fresh is None else arena.fresh.factors.z[:, :, :w].clone()
        if whole is None:
            whole, picks, kept = output.features, stage.picks, factors
        assert torch.equal(output.features, whole[:, :w])
        assert stage.picks is None or torch.equal(stage.picks, picks[:, :w])
        assert factors is None or torch.equal(factors, kept[:, :, :w])


@torch.inference_mode()
def test_launches_of_a_step(target):
    """11 launches a layer with Gated DeltaNet and experts, 12 with attention; what surrounds the layers stays below 12."""
    arena, static = started(target)
    tokens = prompt(4, seed=9).cuda()
    live = torch.full((1,), 4, dtype=torch.int32, device="cuda")

    def step() -> None:
        static.finish(static.begin(tokens, live), 4, live)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    launches = sum(e.count for e in found.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA)
    attention = sum(kind == "full_attention" for kind in target.config.kinds)
    dense = sum(not sparse for sparse in target.config.sparse)
    assert launches <= 11 * len(target.layers) + attention + 2 * dense + 12
