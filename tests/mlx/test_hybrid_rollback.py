"""Rollback of hybrids by compact factors: every width and every acceptance, forced rejection, short prompts, memory."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from dspine.common import registry
from dspine.common.errors import DSpineError
from dspine.common.gdn import gdn_commit, gdn_inputs, gdn_verify
from dspine_mlx.targets import hybrid
from tests.mlx.goldens import ids
from tests.mlx.hybrids import (
    FAMILIES,
    LAYERS,
    PROMPT,
    VOCAB,
    assert_same,
    contents,
    forked,
    hybrid_target,
    started,
    third_party_greedy,
    verify,
)

BLOCK = [(5 * i * i + i + 2) % VOCAB for i in range(17)]


def greedy(target, cache, prompt_logits, count, rounds):
    """`count` tokens after a prompt; `rounds` yields (w, wrong): a block of w whose drafts are right before index `wrong`."""
    text = third_party_greedy(target.model, PROMPT, count + 16)
    out, accepted = [int(mx.argmax(prompt_logits[0]))], []
    for w, wrong in rounds:
        draft = text[len(out) : len(out) + w - 1]
        draft = [*draft[:wrong], *((t + 1) % VOCAB for t in draft[wrong:])]
        verification = verify(target, cache, [out[-1], *draft])
        choice = np.array(mx.argmax(verification.logits[0], axis=-1)).tolist()
        kept = next((i for i, token in enumerate(draft) if token != choice[i]), len(draft))
        target.commit(cache, verification, kept + 1)
        cache.check_integrity()
        accepted.append(kept)
        out += [*draft[:kept], choice[kept]]
        if len(out) >= count:
            break
    return out, text[: len(out)], accepted


@pytest.mark.parametrize("kind", FAMILIES)
def test_r9_every_width_and_every_acceptance(kind):
    """Commit m of w, for all of them: the cache is that of a fresh prompt, and so is what follows."""
    target = hybrid_target(kind)
    fresh = [started(target, PROMPT + BLOCK[:m]) for m in range(17)]
    after = [np.array(target.model(mx.array([[*PROMPT, *BLOCK[:m], 9]])))[:, -1] for m in range(17)]
    for w in range(1, 17):
        pending = started(target, PROMPT)
        verification = verify(target, pending, BLOCK[:w])
        for m in range(w + 1):
            cache = forked(pending)
            target.commit(cache, verification, m)
            assert_same(cache, fresh[m])
            if m % 4 == w % 4:
                follow = verify(target, cache, [9])
                np.testing.assert_allclose(np.array(follow.logits[:, 0]), after[m], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", FAMILIES)
def test_r1_rejected_tokens_leave_no_trace(kind):
    """Two blocks that share their first m tokens leave the same bits, whatever came after; commit of 0 undoes a block."""
    target = hybrid_target(kind)
    for m in (1, 2, 3, 5):
        results = []
        for tail in ([9, 8, 7, 6], [1] * 11):
            cache = started(target, PROMPT)
            before = contents(cache)
            target.commit(cache, verify(target, cache, tail), 0)
            for got, want in zip(contents(cache), before, strict=True):
                np.testing.assert_array_equal(got, want)
            target.commit(cache, verify(target, cache, [*BLOCK[:m], *tail]), m)
            results.append(contents(cache))
        for got, want in zip(*results, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", FAMILIES)
def test_n3_64_rounds_of_forced_rejection(kind):
    """Every draft is wrong, the target's own token is taken: text and states of plain decoding, which runs the same code."""
    target = hybrid_target(kind)
    caches = [target.make_cache(96) for _ in range(2)]
    first = [target.prefill(cache, ids([PROMPT]), chunk=64).logits for cache in caches]
    out, text, accepted = greedy(target, caches[0], first[0], 65, ((2 + i % 15, 0) for i in range(64)))
    assert out == text and accepted == [0] * 64
    plain, _, _ = greedy(target, caches[1], first[1], 65, ((1, 0) for _ in range(64)))
    assert plain == text
    assert_same(caches[0], caches[1], 2e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", FAMILIES)
def test_r2_short_prompts(kind, count):
    """Prompts shorter than the convolution window: row 0 of a block is the single step, and both are mlx-lm's."""
    target = hybrid_target(kind)
    text = [*PROMPT[:count], *BLOCK]
    want = np.array(target.model(mx.array([text])))[0]
    for w in (1, 2, 3, 8, 16):
        cache = started(target, PROMPT[:count])
        verification = verify(target, cache, BLOCK[:w])
        np.testing.assert_allclose(np.array(verification.logits[0]), want[count : count + w], atol=2e-4, rtol=2e-4)
        target.commit(cache, verification, min(2, w))
        assert_same(cache, started(target, text[: count + min(2, w)]))


@pytest.mark.parametrize("kind", FAMILIES)
def test_r3_plain_rounds_in_between(kind):
    """Accepting, plain and rejecting rounds in turn, m = 1 and 2 among them, where the window mixes old and new."""
    target = hybrid_target(kind)
    cache = target.make_cache(128)
    logits = target.prefill(cache, ids([PROMPT]), chunk=64).logits
    rounds = [(6, 3), (1, 0), (4, 0), (1, 0), (3, 1), (16, 15), (2, 0), (5, 2), (1, 0), (9, 9)] * 3
    out, text, accepted = greedy(target, cache, logits, 80, rounds)
    assert out == text and len(set(accepted)) > 4
    assert_same(cache, started(target, (PROMPT + text)[: cache.length], 128), 5e-5)


def test_r10_no_drift_over_512_rounds():
    """States folded from factors, random m each round, against one prompt run of the same tokens."""
    target = hybrid_target("qwen3_5", num_hidden_layers=2)
    rng = np.random.default_rng(0)
    text, cache = [*PROMPT], started(target, PROMPT, 2600)
    errors = {}
    for i in range(1, 513):
        w = int(rng.integers(1, 9))
        m = int(rng.integers(1, w + 1))
        block = rng.integers(3, VOCAB, w).tolist()
        target.commit(cache, verify(target, cache, block), m)
        text += block[:m]
        if i in (16, 512):
            want = contents(started(target, text, 2600, chunk=512))[0]
            errors[i] = np.linalg.norm(contents(cache)[0] - want) / np.linalg.norm(want)
    assert errors[512] < 2 * errors[16] + 1e-5


# -- what a round costs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FAMILIES)
def test_m2_rollback_holds_no_memory(kind):
    """A cache has the bytes of the formula after every round, whatever was verified and dropped; factors are compact."""
    target = hybrid_target(kind)
    cache = started(target, PROMPT, 128)
    heads, key_dim, value_dim, channels = 4, 8, 16, 2 * 2 * 8 + 4 * 16
    states = len(target.gdn) * (heads * key_dim * value_dim + 3 * channels) * 4
    rows = 2 * 256 * target.decoder.layers[1].self_attn.k_proj.weight.shape[0] * 4  # K and V, 256 rows at a time
    formula = states + len(target.attention_ids) * rows
    assert cache.nbytes == formula
    for w in (16, 2, 9, 16, 1):
        verification = verify(target, cache, BLOCK[:w])
        for trace in verification.factors:
            held = [trace.factors.z, trace.factors.k, trace.factors.g, trace.inputs]
            assert sum(x.nbytes for x in held) == w * (heads * value_dim + 2 * key_dim + heads + channels) * 4
        mx.eval(verification.logits)
        target.commit(cache, verification, 1)
        assert cache.nbytes == formula
    assert len(verification.factors) == len(target.gdn)


def test_m2_active_memory_is_flat():
    """No graph and no block outlives its round: over rounds of 1 to 16 tokens, less than one layer's state comes and goes."""
    target = hybrid_target("qwen3_5_moe")
    cache = started(target, PROMPT, 128)
    held = []
    for i in range(30):
        verification = verify(target, cache, BLOCK[: 1 + i % 16])
        mx.eval(verification.logits)
        target.commit(cache, verification, 1)
        del verification
        mx.eval(cache.states, cache.windows)
        gc.collect()
        held.append(mx.get_active_memory())
    assert max(held[5:]) - min(held[5:]) < cache.states[0].nbytes


def test_m3_only_attention_layers_have_rows():
    target = hybrid_target("qwen3_next")
    cache = started(target, PROMPT)
    assert target.attention_ids == (1, 3) and len(cache.layers) == 2 and tuple(cache.gdn_ids) == (0, 2)
    assert cache.kv(3) is cache.layers[1]
    np.testing.assert_array_equal(np.array(cache.state_of(2)[1]), np.array(cache.states[1]))


def test_r5_layers_are_found_by_id():
    """Three linear layers to one of attention, and an attention layer alone at the end: no assumption about their order."""
    for interval in (4, 3):
        target = hybrid_target("qwen3_5_moe", full_attention_interval=interval, num_hidden_layers=5)
        assert target.attention_ids == tuple(i for i in range(5) if (i + 1) % interval == 0)
        cache = started(target, PROMPT)
        target.commit(cache, verify(target, cache, BLOCK[:6]), 2)
        assert_same(cache, started(target, PROMPT + BLOCK[:2]))
        cache.layers[0].trim(1)
        with pytest.raises(DSpineError, match="attention layers hold"):
            cache.check_integrity()


def count_calls(monkeypatch):
    """Calls of the core's operations, through kernels put into its registry: what Metal's own would see. After a target was
    made, which registers MLX's own."""
    counts = {"gdn_inputs": 0, "gdn_verify": 0, "gdn_commit": 0}

    def kernel(operation):
        def run(*args, **kwargs):
            counts[operation.__name__] += 1
            return operation.reference(*args, **kwargs)

        name = operation.__name__
        key = (name, "mlx", hybrid.gdn.device_name())
        monkeypatch.setitem(registry._kernels, key, registry.Kernel(*key, run, "counting"))

    monkeypatch.delenv("DSPINE_KERNELS", raising=False)
    for operation in (gdn_inputs, gdn_verify, gdn_commit):
        kernel(operation)
    return counts


def test_one_commit_and_nothing_twice(monkeypatch):
    """`begin` runs layer 0's recurrence, `finish` those of the others, `commit` one launch for all layers."""
    target = hybrid_target("qwen3_5_moe", full_attention_interval=4)
    cache = started(target, PROMPT)
    counted = count_calls(monkeypatch)
    stage = target.begin(cache, ids([BLOCK[:9]]))
    assert counted == {"gdn_inputs": 1, "gdn_verify": 1, "gdn_commit": 0}
    verification = target.finish(cache, stage, 6)
    assert counted == {"gdn_inputs": LAYERS - 1, "gdn_verify": LAYERS - 1, "gdn_commit": 0}
    target.commit(cache, verification, 3)
    assert counted == {"gdn_inputs": LAYERS - 1, "gdn_verify": LAYERS - 1, "gdn_commit": 1}
