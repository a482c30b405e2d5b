"""Rollback of hybrid targets by compact factors: cases N3, R1, R3, R9, R10, M3, and greedy text through the real loop."""

from __future__ import annotations

import pytest
import torch

from dspine.common.decoding import DecodingParams, decode
from dspine.common.gdn import GdnLayout
from dspine_cuda.runtime import RUNTIME
from dspine_cuda.targets.hybrid_config import FULL, LINEAR, parse_hybrid_config, rollback_bytes
from tests.helpers.hybrids import ForcedDrafter, save_hybrid
from tests.helpers.models import VOCAB, greedy_target, one_thread, prompt


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny products gain nothing from threads, and lose much where other work runs beside the tests."""
    with one_thread():
        yield


FAMILIES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe")


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """An attention layer stands between GDN layers: caches must be found by layer id (R5)."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        save_hybrid(folder, family)
        found[family] = RUNTIME.load_target(folder, device="cpu", dtype="float32")
    return found


@pytest.fixture(params=FAMILIES)
def target(request, targets):
    return targets[request.param]


def verify(target, cache, tokens, w=None):
    return target.finish(cache, target.begin(cache, tokens), w or tokens.shape[1])


def close(got, want, bound=1e-5):
    if want.numel():
        torch.testing.assert_close(got, want, atol=bound * max(float(want.abs().max()), 1e-3), rtol=0)


def same_cache(got, want):
    assert got.length == want.length
    close(got.states, want.states)
    close(got.windows, want.windows)
    close(got.kv.store[:, :, :, :, : got.length], want.kv.store[:, :, :, :, : want.length])


@pytest.mark.parametrize(
    ("family", "w"), [(FAMILIES[0], w) for w in range(1, 17)] + [(f, w) for f in FAMILIES[1:] for w in (2, 7)]
)
def test_r9_every_width_and_acceptance(targets, family, w):
    """After every w and every A the cache is that of a cold run, and so is what follows."""
    target = targets[family]
    text = prompt(40, seed=6)
    for m in range(1, w + 1):
        wrong = (text[:, 11 : 11 + w] + torch.arange(w).ge(m)) % VOCAB  # the first m tokens right, the rest not
        cache, cold = target.make_cache(48), target.make_cache(48)
        for c in (cache, cold):
            target.prefill(c, text[:, :11], chunk=8)
        target.commit(cache, verify(target, cache, wrong), m)
        target.prefill(cold, text[:, 11 : 11 + m], chunk=40)
        cache.check_integrity()
        same_cache(cache, cold)
        rest = text[:, 11 + m : 11 + m + 5]
        close(verify(target, cache, rest).logits, verify(target, cold, rest).logits, 1e-4)


def test_r1_two_rejected_suffixes_leave_the_same_cache(target):
    text = prompt(20, seed=7)
    for m in range(0, 8):
        caches = []
        for shift in (1, 2):
            block = (text[:, 7:15] + shift * torch.arange(8).ge(m)) % VOCAB
            cache = target.make_cache(20)
            target.prefill(cache, text[:, :7], chunk=10)
            target.commit(cache, verify(target, cache, block), m)
            caches.append(cache)
        for name in ("states", "windows"):
            assert torch.equal(getattr(caches[0], name), getattr(caches[1], name))
        stores = [c.kv.store[:, :, :, :, : c.length] for c in caches]
        assert torch.equal(*stores)


@pytest.mark.parametrize(("family", "length"), [(FAMILIES[0], 1), (FAMILIES[1], 2), (FAMILIES[0], 3), (FAMILIES[2], 7)])
def test_n3_forced_rejection_equals_plain_decoding(targets, family, length):
    """64 rounds with every draft rejected: the tokens and the state of 64 plain steps."""
    target = targets[family]
    ids = prompt(length, seed=length)
    plain = greedy_target(target, ids, 65)
    steps, cache = target.make_cache(length + 90), target.make_cache(length + 90)
    for c in (steps, cache):
        target.prefill(c, ids, chunk=64)
    generator = torch.Generator().manual_seed(0)
    anchor = plain[0]
    for i in range(64):
        w = 2 + i % 15
        drafts = torch.randint(3, VOCAB, (1, w - 1), generator=generator)
        verification = verify(target, cache, torch.cat([torch.tensor([[anchor]]), drafts], dim=1))
        target.commit(cache, verification, 1)
        target.commit(steps, verify(target, steps, torch.tensor([[anchor]])), 1)
        anchor = int(verification.logits[0, 0].argmax())
        assert anchor == plain[i + 1], f"round {i}"
    same_cache(cache, steps)
    cache.check_integrity()


def test_r3_plain_rounds_between_speculative_ones(target):
    text = prompt(60, seed=9)
    cache, plain = target.make_cache(64), target.make_cache(64)
    for c in (cache, plain):
        target.prefill(c, text[:, :5], chunk=64)
    at = 5
    for w, m in ((6, 4), (1, 1), (4, 1), (1, 1), (2, 2), (1, 1), (16, 2), (1, 1), (3, 3), (16, 16)):
        block = (text[:, at : at + w] + torch.arange(w).ge(m)) % VOCAB
        verification = verify(target, cache, block)
        target.commit(cache, verification, m)
        for i in range(m):
            step = verify(target, plain, text[:, at + i : at + i + 1])
            target.commit(plain, step, 1)
            close(verification.logits[:, i : i + 1], step.logits, 1e-4)
        at += m
        same_cache(cache, plain)


def test_r10_no_drift_over_many_rounds(targets):
    """Rounds of random acceptance against single steps: what is apart at the end was apart at the start."""
    target = targets["qwen3_5_text"]
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(3, VOCAB, (1, 600), generator=generator)
    cache, cold = target.make_cache(600), target.make_cache(600)
    at, apart = 0, {}
    for round_ in range(1, 97):
        w = int(torch.randint(2, 9, (1,), generator=generator))
        m = int(torch.randint(1, w + 1, (1,), generator=generator))
        block = (text[:, at : at + w] + torch.arange(w).ge(m)) % VOCAB
        target.commit(cache, verify(target, cache, block), m)
        at += m
        if round_ in (12, 96):
            target.prefill(cold, text[:, cold.length : at], chunk=1)
            apart[round_] = float((cache.states - cold.states).norm() / cold.states.norm())
    assert apart[96] < max(2 * apart[12], 2e-6)


LOOPS = [(FAMILIES[0], w, 1 + w % 3) for w in range(2, 17)] + [(f, w, w) for f in FAMILIES[1:] for w in (2, 5)]


@pytest.mark.parametrize(("family", "w", "length"), LOOPS)
def test_greedy_through_the_loop_equals_plain(targets, family, w, length):
    """Rounds of every acceptance length after short prompts, a Stage 0 of one token more than is verified, plain rounds at
    the end."""
    target, ids = targets[family], prompt(length, seed=20 + length)
    first = ids[0].tolist()
    target.bind_features([0])
    plain = greedy_target(target, ids, 32)
    for wrong in (lambda i: True, lambda i: False, lambda i: i % 3 == 0, lambda i: i % 7 == 5):
        drafter = ForcedDrafter(first, plain, w, wrong)
        params = DecodingParams(max_tokens=32, break_even=0.0, prefill_chunk=3)
        tokens = [event.token for event in decode(target, drafter, first, params, OneMore())]
        assert tokens == plain and drafter.rounds > 1


class OneMore:
    """Nominal lengths walk through 2..limit; Stage 0 covers one more where it may; corrected up or down in turn."""

    name, needs_signals, reads_draft_tokens = "one-more", False, True

    def __init__(self) -> None:
        self.round = 0

    def nominal(self, proposal, limit):
        self.round += 1
        return 2 + self.round % (limit - 1) if limit > 1 else 1

    def stage_zero_length(self, nominal, limit):
        return min(nominal + 1, limit)

    def correct(self, stage, nominal, limit):
        return min(nominal + self.round % 2, limit)


def test_m3_bytes_for_rollback():
    """Qwen3.6-35B-A3B: 30 GDN layers, 32 value heads of 128 x 128; 0.94 GB a request as states after 16 tokens."""
    card = {
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 65536,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }  # fmt: skip
    config = parse_hybrid_config(card, "card")
    assert (len(config.gdn_layers), len(config.attention_layers)) == (30, 10)
    assert config.gdn == GdnLayout(16, 32, 128, 128) and config.kinds[:4] == (LINEAR, LINEAR, LINEAR, FULL)
    compact, states = rollback_bytes(config, 16)
    inputs = 30 * 16 * 8192 * 2
    assert states - inputs == 16 * 30 * 32 * 128 * 128 * 4 == 1_006_632_960  # 0.94 GiB
    assert compact == 30 * 16 * (32 * 129 * 4 + 16 * 128 * 2 + 8192 * 2) == 17_756_160
    assert states / compact > 56


def test_bytes_really_held(target):
    cache = target.make_cache(64)
    layers = len(target.config.attention_layers)
    assert cache.kv.store.shape[0] == layers  # K/V for the attention layers only
    target.prefill(cache, prompt(9), chunk=9)
    before = cache.nbytes
    for w in (1, 7, 16):
        verification = verify(target, cache, prompt(w))
        held = verification.factors.nbytes if verification.factors is not None else 0
        assert held == rollback_bytes(target.config, w, itemsize=4)[0]
        assert cache.nbytes == before
