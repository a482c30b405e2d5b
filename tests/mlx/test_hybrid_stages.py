"""Stage 0 and Stage 1: split and unsplit give the same bits, nothing beyond w matters, ties of the router are settled."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from dspine.common.gdn import GdnFactors
from dspine_mlx.targets import wrap_model
from dspine_mlx.targets.moe import Routing, route
from tests.mlx.goldens import ids
from tests.mlx.hybrids import EXPERTS, MOE, PICKS, PROMPT, VOCAB, contents, hybrid_model, hybrid_target, started

BLOCK = [(5 * i * i + i + 2) % VOCAB for i in range(16)]


def outcome(target, cache, stage, w, m):
    """Everything that a round leaves: logits, features, routing, and the committed cache."""
    verification = target.finish(cache, stage, w)
    parts = [np.array(x) for x in (verification.logits, verification.features, verification.router_picks)]
    target.commit(cache, verification, m)
    return [*parts, *contents(cache)]


@pytest.fixture(scope="module", params=MOE)
def target(request):
    made = hybrid_target(request.param)
    made.bind_features([0, 3])
    made.record_routing = True
    return made


def test_split_equals_unsplit_bit_for_bit(target):
    """Layer 0 stopped at its router and resumed, against the same layers run through without a stop."""
    for w in (1, 2, 7, 16):
        cache = started(target, PROMPT)
        hidden = target._start(ids([BLOCK[:w]]), cache)
        traces, picks = {}, []
        unsplit, taps = target._layers(hidden, target._verifier(cache, hidden, traces), None, picks)
        want = [np.array(target.head(unsplit)), np.array(taps), np.array(mx.stack(picks, axis=2))]
        cache = started(target, PROMPT)
        got = outcome(target, cache, target.begin(cache, ids([BLOCK[:w]])), w, 1)
        for left, right in zip(got, want, strict=False):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("u, w", [(16, 1), (16, 9), (9, 8), (5, 2), (3, 3), (2, 1)])
def test_a_longer_stage_zero_changes_no_bit(target, u, w):
    """Stage 0 over u tokens and Stage 1 over w: the round of w tokens alone."""
    caches = [started(target, PROMPT) for _ in range(2)]
    long, short = (target.begin(cache, ids([BLOCK[:count]])) for cache, count in zip(caches, (u, w), strict=True))
    assert long.router_picks.shape == (1, u, PICKS)
    np.testing.assert_array_equal(np.array(long.router_picks)[:, :w], np.array(short.router_picks))
    m = max(1, w - 1)
    for got, want in zip(outcome(target, caches[0], long, w, m), outcome(target, caches[1], short, w, m), strict=True):
        np.testing.assert_array_equal(got, want)


def poisoned(stage, cache, w):
    """The stage with NaN in everything it keeps beyond the first w tokens, and other tokens and experts there."""

    def spoil(x, axis=1):
        live = mx.arange(x.shape[axis]) < w
        live = mx.reshape(live, [-1 if i == axis else 1 for i in range(x.ndim)])
        return mx.where(live, x, mx.array(float("nan") if mx.issubdtype(x.dtype, mx.floating) else 0, dtype=x.dtype))

    kept = stage.resume
    routing = Routing(spoil(kept.routing.picks), spoil(kept.routing.scores))
    trace = kept.trace
    if trace is not None:
        factors = GdnFactors(*(spoil(x) for x in (trace.factors.z, trace.factors.k, trace.factors.g)))
        trace = replace(trace, factors=factors, inputs=spoil(trace.inputs))
    else:
        rows = cache.kv(0)
        past = mx.arange(rows.keys.shape[2])[:, None] < cache.length + w
        rows.keys, rows.values = (mx.where(past, x, float("nan")) for x in (rows.keys, rows.values))
    kept = replace(kept, residual=spoil(kept.residual), normed=spoil(kept.normed), routing=routing, trace=trace)
    return replace(stage, tokens=spoil(stage.tokens), resume=kept, router_picks=spoil(stage.router_picks))


@pytest.mark.parametrize("u, w", [(16, 1), (16, 15), (7, 3)])
def test_nothing_beyond_w_matters(target, u, w):
    caches = [started(target, PROMPT) for _ in range(2)]
    stages = [target.begin(cache, ids([BLOCK[:u]])) for cache in caches]
    stages[1] = poisoned(stages[1], caches[1], w)
    for got, want in zip(outcome(target, caches[1], stages[1], w, w), outcome(target, caches[0], stages[0], w, w), strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(got).all()


def test_begin_leaves_the_cache_alone(target):
    """A stage that is never finished costs nothing: the next round is as if it had not been."""
    caches = [started(target, PROMPT) for _ in range(2)]
    before = contents(caches[1])
    target.begin(caches[1], ids([[9] * 16]))
    for got, want in zip(contents(caches[1]), before, strict=True):
        np.testing.assert_array_equal(got, want)
    got, want = (outcome(target, cache, target.begin(cache, ids([BLOCK[:4]])), 4, 2) for cache in (caches[1], caches[0]))
    for left, right in zip(got, want, strict=True):
        np.testing.assert_array_equal(left, right)


def test_first_tokens_of_a_cache(target):
    """A block on an empty cache is the start of a prompt."""
    cache = target.make_cache(32)
    got = outcome(target, cache, target.begin(cache, ids([BLOCK[:6]])), 5, 5)[0]
    np.testing.assert_allclose(got, np.array(target.model(mx.array([BLOCK[:5]]))), atol=2e-4, rtol=2e-4)


# -- ties --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts, picks", [(EXPERTS, PICKS), (32, 5)])
@pytest.mark.parametrize("bits", [None, 8])
def test_moe_ties_pick_the_lowest_ids(bits, experts, picks):
    """All logits equal: experts 0..k-1, in one row and in sixteen. Equal in pairs: the lower of each pair first."""
    model, _ = hybrid_model("qwen3_5_moe", bits=bits, num_experts=experts, num_experts_per_tok=picks)
    x = mx.random.normal((1, 16, 64), key=mx.random.key(0))
    block = model.model.layers[0].mlp
    parts = [name for name in ("weight", "scales", "biases") if name in block.gate]
    original = {name: block.gate[name] for name in parts}
    half = experts // 2
    for source in ([0] * experts, [(half - 1 - e) % half for e in range(experts)]):
        for name in parts:
            block.gate[name] = original[name][mx.array(source)]
        logits = np.array(block.gate(x))[0]
        for w in range(1, 17):
            routing = route(block, x[:, :w])
            want = np.stack([sorted(range(experts), key=lambda e, row=row: (-row[e], e))[:picks] for row in logits[:w]])
            np.testing.assert_array_equal(np.array(routing.picks)[0], want)
            np.testing.assert_array_equal(np.array(routing.scores), np.array(route(block, x).scores)[:, :w])
        if source[1] == 0:
            assert (want == np.arange(picks)).all()
        else:
            assert (want[:, 1] == want[:, 0] + half).all()


@pytest.mark.parametrize("kind", MOE)
def test_tied_routers_decode_alike(kind):
    """A model whose routers tie everywhere: one row a step and sixteen in a block read the same experts."""
    model, config = hybrid_model(kind)
    for layer in model.model.layers:
        layer.mlp.gate.weight = mx.broadcast_to(layer.mlp.gate.weight[:1], layer.mlp.gate.weight.shape)
    target = wrap_model_tied(model, config)
    target.record_routing = True
    plain, rows = started(target, PROMPT), []
    for token in BLOCK:
        verification = target.finish(plain, target.begin(plain, ids([[token]])), 1)
        target.commit(plain, verification, 1)
        rows.append([np.array(verification.logits[0, 0]), np.array(verification.router_picks[0, 0])])
    cache = started(target, PROMPT)
    verification = target.finish(cache, target.begin(cache, ids([BLOCK])), 16)
    np.testing.assert_allclose(np.array(verification.logits[0]), np.stack([row[0] for row in rows]), atol=2e-4, rtol=2e-4)
    np.testing.assert_array_equal(np.array(verification.router_picks[0]), np.stack([row[1] for row in rows]))
    assert (np.array(verification.router_picks) == np.arange(PICKS)).all()


def wrap_model_tied(model, config):
    """mlx-lm breaks ties its own way, so such a model cannot pass the check at load: it is tied afterwards."""
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    untied, _ = hybrid_model(config["model_type"])
    for layer, other in zip(model.model.layers, untied.model.layers, strict=True):
        layer.mlp.gate.weight = other.mlp.gate.weight
    target = wrap_model(model, config, name="tied")
    for layer, weight in zip(model.model.layers, gates, strict=True):
        layer.mlp.gate.weight = weight
    return target
