"""Transfer space, injection and transition cache against the equations, written out with loops in float64."""

from __future__ import annotations

import numpy as np
import pytest

from dspine.common.errors import DSpineError
from dspine.common.injection import InjectionWeights, inject
from dspine.common.transfer_space import known_token, read_prediction, transfer_basis, transfer_codes
from dspine.common.transition import path_walk, path_walk_sampled, refine, rms_norm, transition_scores
from tests.helpers.goldens import assert_golden, golden_arrays, golden_target

RNG = np.random.default_rng(0)
H, R, A, K, M, V = 12, 5, 4, 3, 6, 40


def unit(x):
    return x / np.sqrt((x * x).sum())


def weights():
    rng = np.random.default_rng(1)
    shapes = {
        "readout": (R, H),
        "write": (H, A),
        "message": (A, R),
        "receiver_gate": (A, R),
        "predecessor_gate": (A, R),
        "bias": (A,),
    }
    return InjectionWeights(**{name: rng.normal(size=shape) for name, shape in shapes.items()})


def write_row(u, z, predecessor, w):
    gate = 1 / (1 + np.exp(-(w.receiver_gate @ z + w.predecessor_gate @ predecessor + w.bias)))
    return u + np.sqrt((u * u).mean()) * (w.write @ (gate * (w.message @ predecessor)))


def test_codes_follow_the_definition():
    head = RNG.normal(size=(V, H))
    basis = transfer_basis(head, R)
    rows = np.stack([unit(row) for row in head])
    mean = rows.mean(axis=0)
    gram = sum(np.outer(row - mean, row - mean) for row in rows)
    values, vectors = np.linalg.eigh(gram)
    np.testing.assert_allclose(basis.eigenvalues, values[-R:], rtol=1e-12)
    codes = transfer_codes(head, basis)
    for v in range(V):
        want = unit(np.diag(values[-R:] ** -0.5) @ vectors[:, -R:].T @ (rows[v] - mean))
        np.testing.assert_allclose(np.abs(codes[v]), np.abs(want), atol=1e-12)  # signs of eigenvectors are arbitrary
    np.testing.assert_allclose((codes**2).sum(axis=1), 1.0, rtol=1e-12)


def test_golden_transfer_space():
    io, head = golden_arrays("dspine"), golden_target("dspine")["lm_head"].astype(np.float64)
    basis = transfer_basis(head, 16)
    assert_golden(basis.eigenvalues, io["transfer_eigenvalues"], "eigenvalues")
    assert_golden(basis.mean, io["transfer_mean"], "mean")
    codes = transfer_codes(head, basis)
    assert_golden(codes @ codes.T, io["transfer_gram"], "Gram matrix of the codes")


def test_chunks_change_nothing(monkeypatch):
    head = RNG.normal(size=(V, H))
    whole = transfer_basis(head, R)
    codes = transfer_codes(head, whole)
    monkeypatch.setattr("dspine.common.transfer_space.ROWS_PER_CHUNK", 7)
    np.testing.assert_allclose(transfer_basis(head, R).eigenvalues, whole.eigenvalues, rtol=1e-12)
    np.testing.assert_allclose(transfer_codes(head, whole), codes, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rank", [0, H + 1, -1])
def test_rank_out_of_range(rank):
    with pytest.raises(DSpineError, match="transfer_rank"):
        transfer_basis(RNG.normal(size=(V, H)), rank)


def test_hostile_rows_stay_finite():
    """A zero row (an unused padded token) and identical rows must not make NaN."""
    head = RNG.normal(size=(V, H))
    head[3] = 0
    head[4:9] = head[4]
    codes = transfer_codes(head, transfer_basis(head, R))
    assert np.isfinite(codes).all()
    z = read_prediction(np.zeros((2, H)), weights().readout)
    assert (z == 0).all()


@pytest.mark.parametrize("replaced", [False, True])
def test_injection_equations(replaced):
    w, u = weights(), RNG.normal(size=(2, M + 1, H))
    anchor, truth = RNG.normal(size=(2, R)), RNG.normal(size=(2, M, R))
    mask = np.array([True, False])[:, None, None] if replaced else None
    got = inject(u, anchor, w, None if mask is None else (mask, truth))
    for b in range(2):
        z = [np.sqrt(R) * unit(w.readout @ u[b, t]) for t in range(M + 1)]
        np.testing.assert_array_equal(got[b, 0], u[b, 0], err_msg="the anchor is never written to")
        for t in range(1, M + 1):
            predecessor = anchor[b] if t == 1 else z[t - 1]
            if replaced and b == 0:
                predecessor = truth[b, t - 1]
            np.testing.assert_allclose(got[b, t], write_row(u[b, t], z[t], predecessor, w), atol=1e-12)


def test_transition_cache_equals_one_refinement_per_pair():
    w, u = weights(), RNG.normal(size=(M, H))
    codes, head = RNG.normal(size=(V, R)), RNG.normal(size=(V, H))
    candidates = np.stack([RNG.permutation(V)[:K] for _ in range(M)])
    norm_weight = RNG.normal(size=H)

    def norm(x):
        return rms_norm(x, norm_weight, 1e-6)

    predecessors = known_token(codes, np.concatenate([np.full((1, K), 7), candidates[:-1]]))
    scores = transition_scores(u, predecessors, head[candidates], w, norm)
    for t in range(M):
        z = np.sqrt(R) * unit(w.readout @ u[t])
        for i in range(K):
            s = 7 if t == 0 else candidates[t - 1, i]
            h = write_row(u[t], z, np.sqrt(R) * codes[s], w)
            final = norm_weight * h / np.sqrt((h * h).mean() + 1e-6)
            np.testing.assert_allclose(refine(u[t], np.sqrt(R) * codes[s], w, norm), final, atol=1e-12)
            for j in range(K):
                assert scores[t, i, j] == pytest.approx(head[candidates[t, j]] @ final, abs=1e-10)


def test_walk_looks_up_what_a_loop_would():
    scores, candidates = RNG.normal(size=(50, M, K, K)), RNG.integers(0, V, size=(50, M, K))
    tokens = path_walk(scores, candidates)
    sampled, q = path_walk_sampled(scores, candidates, RNG.random((50, M)), 0.7)
    for b in range(50):
        i = 0
        for t in range(M):
            i = int(np.argmax(scores[b, t, i]))
            assert tokens[b, t] == candidates[b, t, i]
    np.testing.assert_allclose(q.sum(axis=-1), 1.0)
    assert all(sampled[b, t] in candidates[b, t] for b in range(50) for t in range(M))
    cold, _ = path_walk_sampled(scores, candidates, RNG.random((50, M)), 1e-6)
    np.testing.assert_array_equal(cold, tokens, err_msg="temperature to zero is the greedy walk")
