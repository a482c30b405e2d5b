"""The core on MLX arrays: the same numbers as NumPy in float64, and no host read while it is traced."""

from __future__ import annotations

import shutil

import mlx.core as mx
import numpy as np
import pytest

from dspine.common import arrays, registry
from dspine.common.acceptance import accept_greedy, accept_point_mass, accept_rejection
from dspine.common.arrays import top_k
from dspine.common.injection import InjectionWeights, inject
from dspine.common.sampling import SamplingParams, penalise, sample_candidates, sample_index, token_probabilities, uniforms
from dspine.common.signals import draft_signals
from dspine.common.transfer_space import known_token, transfer_basis, transfer_codes
from dspine.common.transition import path_walk, path_walk_sampled, refine, rms_norm, transition_scores
from dspine_mlx import ops
from dspine_mlx.arrays import MlxArrays, device_name

M, K, H, R, A, V = 5, 4, 24, 8, 6, 700


@pytest.fixture(autouse=True)
def _registered():
    ops.register()


@pytest.fixture(params=["eager", "compiled"])
def run(request):
    """Calls a function on MLX arrays as it is, or traced: a host read inside `mx.compile` raises."""
    if request.param == "eager":
        return lambda function, *inputs: function(*inputs)
    if device_name() == "cpu" and shutil.which("g++") is None:
        pytest.skip("mx.compile needs g++ on the CPU")
    return lambda function, *inputs: mx.compile(function)(*inputs)


def device(array: np.ndarray) -> mx.array:
    return mx.array(array.astype(np.float32) if array.dtype == np.float64 else array)


def host(array: mx.array) -> np.ndarray:
    return MlxArrays().to_host(array)[0]


def close(got, want, tolerance=2e-5):
    want = np.asarray(want)
    got = host(got)
    assert got.shape == want.shape
    if want.dtype.kind in "iub":
        np.testing.assert_array_equal(got, want)
    else:
        assert np.abs(got - want).max() <= tolerance * max(1.0, np.abs(want).max())


def weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {
        "readout": (R, H),
        "write": (H, A),
        "message": (A, R),
        "receiver_gate": (A, R),
        "predecessor_gate": (A, R),
        "bias": (A,),
    }
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def both(rng: np.random.Generator) -> tuple[InjectionWeights, InjectionWeights]:
    values = weights(rng)
    return InjectionWeights(**values), InjectionWeights(**{name: device(value) for name, value in values.items()})


def test_inject(run):
    rng = np.random.default_rng(0)
    w64, w32 = both(rng)
    hidden, code = rng.normal(size=(2, 1 + M, H)), rng.normal(size=(2, R))
    close(run(lambda h, c: inject(h, c, w32), device(hidden), device(code)), inject(hidden, code, w64))
    mask, codes = rng.random((2, 1, 1)) < 0.5, rng.normal(size=(2, M, R))
    got = run(lambda h, c, m, z: inject(h, c, w32, (m, z)), *map(device, (hidden, code, mask, codes)))
    close(got, inject(hidden, code, w64, (mask, codes)))


def test_transition_and_walks(run):
    rng = np.random.default_rng(1)
    w64, w32 = both(rng)
    hidden, codes, rows = rng.normal(size=(2, M, H)), rng.normal(size=(2, M, K, R)), rng.normal(size=(2, M, K, H))
    gain = rng.normal(size=H)
    want = transition_scores(hidden, codes, rows, w64, lambda x: rms_norm(x, gain, 1e-6))
    gain32 = device(gain)
    norm = lambda x: rms_norm(x, gain32, 1e-6)  # noqa: E731
    got = run(lambda h, c, r: transition_scores(h, c, r, w32, norm), *map(device, (hidden, codes, rows)))
    close(got, want)
    fast = transition_scores(*map(device, (hidden, codes, rows)), w32, lambda x: mx.fast.rms_norm(x, gain32, 1e-6))
    close(fast, want)
    got = run(lambda h, c: refine(h, c, w32, norm), device(hidden), device(codes[:, :, 0]))
    close(got, refine(hidden, codes[:, :, 0], w64, lambda x: rms_norm(x, gain, 1e-6)))
    candidates = rng.integers(0, V, size=(2, M, K)).astype(np.int32)
    scores = want.astype(np.float32)
    close(run(path_walk, device(scores), device(candidates)), path_walk(scores, candidates))
    u = rng.random((2, M)).astype(np.float32)
    tokens, q = run(lambda s, c, v: path_walk_sampled(s, c, v, 0.7), device(scores), device(candidates), device(u))
    want_tokens, want_q = path_walk_sampled(scores.astype(np.float64), candidates, u, 0.7)
    close(tokens, want_tokens)
    close(q, want_q)


def test_known_tokens(run):
    rng = np.random.default_rng(2)
    codes, tokens = rng.normal(size=(V, R)), rng.integers(0, V, size=(2, M, K)).astype(np.int32)
    table = device(codes)
    close(run(lambda t: known_token(table, t), device(tokens)), known_token(codes, tokens))


def test_transfer_space_on_mlx():
    """Codes from the same basis; the basis itself through its Gram matrix (signs are arbitrary)."""
    head = np.random.default_rng(3).normal(size=(60, 12))
    basis = transfer_basis(head, 5)
    on_device = type(basis)(device(basis.eigenvectors), device(basis.eigenvalues), device(basis.mean))
    codes = transfer_codes(head, basis)
    close(transfer_codes(device(head), on_device), codes, 1e-4)


@pytest.mark.parametrize(
    "temperature, k, top_p, min_p", [(0.7, 0, 1.0, 0.0), (1.0, 7, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (0.9, 50, 0.9, 0.05)]
)
def test_token_probabilities(run, temperature, k, top_p, min_p):
    logits = np.random.default_rng(4).normal(size=(2, M, V)) * 3
    params = SamplingParams(temperature, k, top_p, min_p)
    close(
        run(lambda x: token_probabilities(x, params), device(logits)),
        token_probabilities(logits.astype(np.float32).astype(np.float64), params),
    )


def test_acceptance_rules(run):
    """Tokens and counts equal those of NumPy on the very same float32 numbers, over many draws."""
    rng = np.random.default_rng(5)
    batch, limit = 64, np.full(64, M, dtype=np.int32)
    limit[::7] = 1
    logits = rng.normal(size=(batch, M + 1, 12)).astype(np.float32)
    p = token_probabilities(logits, SamplingParams(0.8))
    draft = np.argmax(logits[:, :-1], axis=-1).astype(np.int32)
    draft[::3, 2] = (draft[::3, 2] + 1) % 12
    u, v = rng.random((batch, M)).astype(np.float32), rng.random((batch, M + 1)).astype(np.float32)
    candidates = np.stack([draft, (draft + 1) % 12, (draft + 5) % 12], axis=-1).astype(np.int32)
    q = rng.dirichlet([2, 1, 1], size=(batch, M)).astype(np.float32)
    cases = (
        (accept_greedy, (logits, draft, limit)),
        (accept_point_mass, (p, draft, limit, u, v)),
        (accept_rejection, (p, draft, limit, candidates, q, u, v)),
    )
    for rule, inputs in cases:
        want = rule(*inputs)

        def call(*arrays, rule=rule):
            verdict = rule(*arrays)
            return verdict.accepted, verdict.next_token

        accepted, token = run(call, *map(device, inputs))
        close(accepted, want.accepted)
        close(token, want.next_token)
        assert len(set(want.accepted)) > 2


def test_accept_without_drafts(run):
    """A plain step: w = 1, no drafts."""
    logits = np.random.default_rng(6).normal(size=(3, 1, V)).astype(np.float32)
    draft, limit = np.zeros((3, 0), dtype=np.int32), np.zeros(3, dtype=np.int32)
    token = run(lambda x, d, n: accept_greedy(x, d, n).next_token, *map(device, (logits, draft, limit)))
    close(token, accept_greedy(logits, draft, limit).next_token)


def test_sample_index_and_penalties(run):
    rng = np.random.default_rng(7)
    p = rng.dirichlet(np.full(V, 0.05), size=500).astype(np.float32)
    u = uniforms(1, 2, 0, 500)[:, 0]
    picks = host(run(sample_index, device(p), device(u)))
    np.testing.assert_array_equal(picks, sample_index(p, u))
    assert (p[np.arange(500), picks] > 0).all()
    logits, block = rng.normal(size=(1, 3, V)), rng.integers(0, V, size=(1, 3)).astype(np.int32)
    counts = rng.integers(0, 2, size=(1, V)).astype(np.float32)
    params = SamplingParams(1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    got = run(lambda x, b, c: penalise(x, b, c, c, params), *map(device, (logits, block, counts)))
    close(got, penalise(logits, block, counts, counts, params))


# -- the MLX versions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, k", [(4096, 16), (4097, 1), (5000, 16), (32_001, 16), (151_936, 16), (20_000, 50)])
def test_top_k_equals_the_reference(run, size, k):
    assert ops._top_k_pays(mx.zeros(size), k)
    x = np.random.default_rng(size).normal(size=(3, size)).astype(np.float32)
    values, ids = run(lambda a: ops.top_k(a, k), device(x))
    want_values, want_ids = top_k(x, k)
    close(ids, want_ids)
    close(values, want_values, 0.0)


def test_top_k_of_ties_takes_lower_ids(run):
    """Few distinct values, so that ties straddle blocks and the k-th place; also rows of one value and of -inf."""
    x = np.random.default_rng(9).integers(0, 3, size=(4, 6000)).astype(np.float32)
    x[1] = 1.0
    x[2] = float("-inf")
    x[2, 5500] = 0.0
    x[3] = float("-inf")
    values, ids = run(lambda a: ops.top_k(a, 16), device(x))
    want_values, want_ids = top_k(x, 16)
    close(ids, want_ids)
    np.testing.assert_array_equal(host(values), want_values)
    low = run(lambda a: ops.top_k(a, 16), device(x).astype(mx.bfloat16))[1]
    close(low, want_ids)


def test_a_host_read_inside_a_trace_raises():
    """What the `compiled` cases above rely on."""
    with pytest.raises((ValueError, RuntimeError)):
        mx.compile(lambda x: x * x.sum().item())(mx.ones(3))


def test_top_k_is_registered_where_it_pays(monkeypatch):
    kernel = registry.find_kernel("top_k", mx.zeros(4096))
    assert kernel is not None and kernel.name == "mlx-two-level" and kernel.device == device_name()
    assert not kernel.supports(mx.zeros(100), 16)
    assert not kernel.supports(mx.zeros(4096, dtype=mx.int32), 16)
    small = np.random.default_rng(10).normal(size=(2, 100)).astype(np.float32)
    close(arrays.top_k(device(small), 16)[1], top_k(small, 16)[1])
    monkeypatch.setenv("DSPINE_KERNELS", "reference")
    assert registry.find_kernel("top_k", mx.zeros(4096)) is None


def test_draft_signals_and_independent_draws(run):
    logits = np.random.default_rng(11).normal(size=(1, M, V)).astype(np.float32) * 4

    def signals(x):
        found = draft_signals(x, 1)
        return found.confidence, found.entropy

    confidence, entropy = run(signals, device(logits))
    p = token_probabilities(logits.astype(np.float64), SamplingParams(1.0))
    close(confidence, p.max(-1))
    close(entropy, -(p * np.log(p)).sum(-1))
    u = np.random.default_rng(12).random((1, M)).astype(np.float32)

    def draws(x, v):
        values, ids = top_k(x, 16)
        return sample_candidates(values, ids, v, 0.5)[0], ids, sample_candidates(values, ids, v, 0.5)[1]

    tokens, candidates, q = run(draws, device(logits), device(u))
    tokens, candidates, q = map(host, (tokens, candidates, q))
    np.testing.assert_array_equal(candidates, top_k(logits, 16)[1])
    want = np.take_along_axis(p**2, candidates, axis=-1)
    np.testing.assert_allclose(q, want / want.sum(-1, keepdims=True), atol=2e-5)
    running = q.cumsum(-1)
    for i in range(M):
        index = int(np.nonzero(running[0, i] > u[0, i])[0][0])
        assert tokens[0, i] == candidates[0, i, index]


def test_arrays_between_host_and_device():
    between = MlxArrays()
    for array in (np.arange(4, dtype=np.int32), np.ones((2, 3), np.float32), np.array([True, False])):
        back = between.to_host(between.to_device(array))[0]
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)
    x = mx.ones(2, dtype=mx.bfloat16)
    assert between.to_device(x) is x
    wide, other = between.to_host(x, mx.array([1, 2]))
    assert wide.dtype == np.float32 and other.tolist() == [1, 2]
