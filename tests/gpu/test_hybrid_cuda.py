"""Hybrid targets on CUDA: the CPU's logits, rollback and routing in every family; no host read in a round; grouped experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from dspine.common.decoding import DecodingParams, decode
from dspine_cuda.runtime import RUNTIME
from dspine_cuda.targets import moe as moe_module
from tests.gpu.test_cuda import assert_same_or_tie
from tests.helpers.hybrids import FAMILIES, ForcedDrafter, save_hybrid
from tests.helpers.models import VOCAB, greedy_target, prompt


@contextmanager
def no_host_read() -> Iterator[None]:
    """Any synchronising call raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """The same float32 folder on the CPU and on CUDA."""
    folder = tmp_path_factory.mktemp(request.param)
    save_hybrid(folder, request.param)
    return [RUNTIME.load_target(folder, device=device, dtype="float32") for device in ("cpu", "cuda")]


def close(got: torch.Tensor, want: torch.Tensor, bound: float = 2e-4) -> None:
    if want.numel():
        assert float((got.cpu() - want).norm() / want.norm()) < bound


def test_blocks_and_commits_equal_the_cpu(pair):
    text = prompt(90, seed=3)
    for target in pair:
        target.bind_features([1, 4])
    caches = [target.make_cache(100) for target in pair]
    first = [t.prefill(c, text[:, :37].to(t.device), chunk=20) for t, c in zip(pair, caches, strict=True)]
    close(first[1].logits, first[0].logits)
    close(first[1].features, first[0].features)
    at = 37
    for w, m in ((1, 1), (16, 3), (5, 5), (2, 1), (16, 16), (7, 0), (1, 1)):
        block = (text[:, at : at + w] + torch.arange(w).ge(m)) % VOCAB
        made = []
        for target, cache in zip(pair, caches, strict=True):
            verification = target.finish(cache, target.begin(cache, block.to(target.device)), w)
            target.commit(cache, verification, m)
            cache.check_integrity()
            made.append(verification)
        close(made[1].logits[:, :m], made[0].logits[:, :m])
        close(made[1].features[:, :m], made[0].features[:, :m])
        at += m
        close(caches[1].states, caches[0].states)
        close(caches[1].windows, caches[0].windows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_reads_nothing_on_the_host(family, dtype, tmp_path):
    save_hybrid(tmp_path, family)
    target = RUNTIME.load_target(tmp_path, device="cuda", dtype=dtype)
    target.bind_features([0, 2])
    target.record_routing = True
    cache = target.make_cache(64)
    target.prefill(cache, prompt(9).cuda(), chunk=9)
    block = prompt(16, seed=5).cuda()
    for guarded in (False, True):  # kernels compile and load in the first pass
        for u, w in ((1, 1), (3, 2), (16, 15), (16, 16)):

            def round_(u: int = u, w: int = w) -> None:
                verification = target.finish(cache, target.begin(cache, block[:, :u]), w)
                target.commit(cache, verification, 1)

            if guarded:
                with no_host_read():
                    round_()
            else:
                round_()
    torch.cuda.synchronize()
    cache.check_integrity()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "qwen3_5_text"])
def test_grouped_gathered_and_looped_experts_agree(family, tmp_path, monkeypatch):
    """bfloat16: the grouped product (where this GPU has it) against gathered weights and the loop of long prefills."""
    save_hybrid(tmp_path, family)
    target = RUNTIME.load_target(tmp_path, device="cuda", dtype="bfloat16")
    mlp = next(layer.mlp for layer in target.layers if isinstance(layer.mlp, moe_module.SparseMlp))
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)
    with torch.inference_mode():
        routed = mlp.route(x)
        results = [mlp.run(x, routed).float()]
        monkeypatch.setattr(moe_module, "can_group", lambda weight: False)
        results.append(mlp.run(x, routed).float())
        monkeypatch.setattr(moe_module, "_GATHERED", 4 * mlp.gate_up[0].numel())  # several pieces
        results.append(mlp.run(x, routed).float())
        monkeypatch.setattr(moe_module, "_LOOPED", 1)
        results.append(mlp.run(x, routed).float())
    for other in results[1:]:
        assert float((other - results[0]).norm() / results[0].norm()) < 1e-2


def test_greedy_through_the_loop(pair):
    _, target = pair
    ids = prompt(5, seed=8)
    first = ids[0].tolist()
    target.bind_features([0])
    plain = greedy_target(Moved(target), ids, 64)
    for w in (2, 5, 16):
        drafter = ForcedDrafter(first, plain, w, lambda i: i % 4 == 1)
        params = DecodingParams(max_tokens=64, break_even=0.0, prefill_chunk=3)
        assert_same_or_tie(target, [e.token for e in decode(target, drafter, first, params)], plain, first)


class Moved:
    """A target on CUDA that takes tokens from the host."""

    def __init__(self, target) -> None:
        self.target, self.make_cache, self.finish, self.commit = target, target.make_cache, target.finish, target.commit

    def prefill(self, cache, tokens, *, chunk):
        return self.target.prefill(cache, tokens.to(self.target.device), chunk=chunk)

    def begin(self, cache, tokens):
        return self.target.begin(cache, tokens.to(self.target.device))
