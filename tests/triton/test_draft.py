"""Drafter and decision kernels beyond the parity table: edges, slices of larger arrays, the core's own dispatch."""

from __future__ import annotations

import pytest
import torch

from dspine.common import acceptance, arrays, injection, signals, transition
from dspine.common.injection import InjectionWeights
from dspine.common.norms import RMSNorm
from dspine.kernels_triton import accept, draft_signals, injection_gate, injection_write, path_walk, transition_scores
from dspine_cuda import ops


def weights(device: str, hidden: int = 40, rank: int = 24, size: int = 12) -> InjectionWeights:
    generator = torch.Generator().manual_seed(1)
    shapes = ((rank, hidden), (hidden, size), (size, rank), (size, rank), (size, rank), (size,))
    return InjectionWeights(*(torch.randn(shape, generator=generator).to(device) for shape in shapes))


def moved(device: str, *arrays: torch.Tensor) -> list[torch.Tensor]:
    """The arguments of a kernel; the core's answer is computed on the CPU (deterministic mode forbids its CUDA sums)."""
    return [array.to(device) for array in arrays]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=2e-5, atol=2e-5)


def test_rows_of_a_larger_array(device):
    """`inject` hands over rows 1.. of a block: not contiguous with more than one row of the batch."""
    block, codes = torch.randn(3, 5, 40), torch.randn(3, 5, 24)
    on_block, on_codes = moved(device, block, codes)
    gated = injection_gate.injection_gate(on_codes[:, 1:], on_codes[:, :-1], weights(device))
    want = injection.injection_gate.reference(codes[:, 1:], codes[:, :-1], weights("cpu"))
    close(gated, want)
    scale = torch.randn(40)
    norm, on_norm = RMSNorm(scale, 1e-6), RMSNorm(scale.to(device), 1e-6)
    got = injection_write.injection_write(on_block[:, 1:], want.to(device), weights(device).write, on_norm)
    expected = injection.injection_write.reference(block[:, 1:], want, weights("cpu").write, norm)
    for one, other in zip(got, expected, strict=True):
        close(one, other)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("k", [1, 3])
def test_shortest_walks(device, count, k):
    args = torch.randn(2, count, k, k), torch.randint(0, 99, (2, count, k))
    assert torch.equal(path_walk.path_walk(*moved(device, *args)).cpu(), transition.path_walk.reference(*args))
    args = (*args, torch.full((2, count), 0.5))
    tokens, q = path_walk.path_walk_sampled(*moved(device, *args), 0.5)
    want, want_q = transition.path_walk_sampled.reference(*args, 0.5)
    assert torch.equal(tokens.cpu(), want)
    close(q, want_q)


def test_walks_of_a_drafter_without_rows(device):
    """M = 0 and B = 0: empty answers, no launch."""
    assert path_walk.path_walk(
        torch.empty(2, 0, 4, 4, device=device), torch.empty(2, 0, 4, dtype=torch.int64, device=device)
    ).shape == (2, 0)
    empty = torch.empty(0, 3, 40, device=device)
    codes, rows = torch.empty(0, 3, 4, 24, device=device), torch.empty(0, 3, 4, 40, device=device)
    norm = RMSNorm(torch.ones(40, device=device), 1e-6)
    assert transition_scores.transition_scores(empty, codes, rows, weights(device), norm).shape == (0, 3, 4, 4)


@pytest.mark.parametrize(("size", "k"), [(5000, 16), (5000, 17), (4095, 3)])
def test_candidates_of_a_vocabulary(device, size, k):
    """`top_k` on CUDA: the kernel of the signals, or keys; of equal values the lower id first, values as they are."""
    draft_signals.register()
    x = torch.randint(-40, 40, (3, size), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    x[1, 4000:] = float("-inf")
    values, ids = ops.top_k_cuda(x.to(device), k)
    want, places = arrays.top_k.reference(x, k)
    assert values.dtype == torch.bfloat16 and torch.equal(values.cpu(), want) and torch.equal(ids.cpu(), places)


def test_signals_where_parts_of_the_vocabulary_are_masked(device):
    """A whole slice of -inf, and values that tie across slices: the lower ids come first."""
    logits = torch.randn(2, 9001)
    logits[0, :8500] = float("-inf")
    logits[1] = 0.0
    got, want = draft_signals.draft_signals(logits.to(device), 8), signals.draft_signals.reference(logits, 8)
    assert torch.equal(got.ids.cpu(), want.ids.cpu().to(torch.int64))
    assert torch.equal(got.values.cpu(), want.values.cpu())
    close(got.confidence, want.confidence)
    close(got.entropy, want.entropy)
    assert got.ids[1].tolist() == list(range(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy, interpreting
def test_rows_that_are_not_finite(device, dtype):
    """NaN, either infinity, in any part of the vocabulary: seen, in its own row only; ids stay in the vocabulary."""
    logits = torch.randn(6, 9001).to(dtype)
    for row, (place, value) in enumerate(((0, "nan"), (8999, "inf"), (5000, "-inf"), (9000, "nan"))):
        logits[row + 1, place] = float(value)
    for k in (1, 16):
        got, want = draft_signals.draft_candidates(logits.to(device), k), signals.draft_candidates.reference(logits, k)
        assert got.finite.dtype == torch.bool and got.finite.tolist() == [True, False, False, False, False, True]
        assert want.finite.tolist() == got.finite.tolist()
        assert ((got.ids >= 0) & (got.ids < 9001)).all()
        good = [0, 5]
        assert torch.equal(got.ids.cpu()[good], want.ids[good]) and torch.equal(got.values.cpu()[good], want.values[good])
    assert torch.equal(draft_signals.draft_signals(logits.to(device), 3).finite, got.finite)


@pytest.mark.parametrize("size", [700, 20_000])  # one part, and three, which four lanes hold
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning")  # NumPy, interpreting
def test_what_a_target_without_numbers_emits(device, size):
    """All of some rows NaN: a token of the vocabulary all the same, which can be looked up; other rows do not mind."""
    logits = torch.randn(3, 3, size)
    best = logits[:2].argmax(dim=-1)
    logits[2], logits[1, 1] = float("nan"), -torch.tensor(float("nan"))
    draft = torch.cat([best[:, :2], best[:1, :2]]).int()
    got = accept.accept_greedy(*moved(device, logits, draft, torch.tensor([2, 2, 2])))
    assert got.accepted[0] == 2 and got.next_token[0] == best[0, 2] and 1 <= got.accepted[1] <= 2
    assert ((got.next_token >= 0) & (got.next_token < size)).all()


@pytest.mark.parametrize("k", [3, 12, 17])
@pytest.mark.filterwarnings("ignore:All-NaN:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_walks_over_scores_that_are_not_numbers(device, k):
    """Tokens are candidates of their own position: nothing behind the last one is read."""
    scores, candidates = torch.full((2, 4, k, k), float("nan")), torch.arange(2 * 4 * k).view(2, 4, k)
    drawn = path_walk.path_walk_sampled(*moved(device, scores, candidates, torch.full((2, 4), 0.9)), 0.7)[0]
    for tokens in (path_walk.path_walk(*moved(device, scores, candidates)), drawn):
        assert (tokens.cpu() // k).flatten().tolist() == list(range(8))


def test_point_mass_without_any_other_mass(device):
    """The whole row is the rejected draft (only rounding rejects it): it is drawn again, as in the core."""
    p = torch.zeros(1, 2, 700)
    p[:, :, 600] = 1.0
    args = p, torch.tensor([[600]]), torch.tensor([1]), torch.ones(1, 1), torch.full((1, 2), 0.3)
    got, want = accept.accept_point_mass(*moved(device, *args)), acceptance.accept_point_mass.reference(*args)
    assert got.accepted.tolist() == want.accepted.tolist() == [0]
    assert got.next_token.tolist() == want.next_token.tolist() == [600]
