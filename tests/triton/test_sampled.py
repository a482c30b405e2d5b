"""Acceptance and draws from logits beyond the parity table: the whole CDF, equal draws plainly and behind drafts, slices of
longer rows, rows that are not finite, residuals without mass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspine.common import acceptance
from dspine.common.errors import DSpineError
from dspine.kernels_triton import accept

T = 0.7


def softmax(logits: torch.Tensor) -> np.ndarray:
    wide = logits.double().numpy() / T
    weights = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def drawn_within(tokens: torch.Tensor, u: torch.Tensor, weights: np.ndarray, slack: float = 2e-6) -> None:
    """Every token's interval of the float64 CDF of `weights` [V] holds its uniform, up to rounding."""
    edges = np.concatenate([[0.0], np.cumsum(weights / weights.sum())])
    for token, value in zip(tokens.tolist(), u.tolist(), strict=True):
        assert weights[token] > 0
        assert edges[token] - slack <= value <= edges[token + 1] + slack, (token, value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_draws_over_the_whole_cdf(device, dtype):
    """16 uniforms, both ends included, over a vocabulary of more than two parts with its middle masked."""
    logits = torch.randn(9000, generator=torch.Generator().manual_seed(3)) * 3
    logits[3000:7000] = float("-inf")
    logits = logits.to(dtype)
    u = torch.linspace(0, 1 - 2**-23, 16)
    rows = logits.to(device).expand(16, 1, -1).contiguous()
    nothing = torch.zeros(16, 0, device=device)
    verdict = accept.accept_point_mass_logits(
        rows, nothing.int(), torch.zeros(16, dtype=torch.int32, device=device), nothing, u[:, None].to(device), T
    )
    assert not verdict.accepted.any() and verdict.next_token.dtype == torch.int64
    drawn_within(verdict.next_token.cpu(), u, softmax(logits))


def case(device: str, batch: int = 12, vocab: int = 1500, count: int = 4, kinds: int = 5):
    """Arguments of the rejection rule in which every draft is rejected at some row, and the rest of each draw."""
    generator = torch.Generator().manual_seed(8)
    logits = (torch.randn(count, vocab, generator=generator) * 2).expand(batch, -1, -1).contiguous()
    candidates = torch.stack([torch.randperm(vocab, generator=generator)[:kinds] for _ in range(count - 1)])
    best = logits[0].argmax(dim=-1)
    candidates[:, 0] = torch.where((candidates == best[:-1, None]).any(1), candidates[:, 0], best[:-1])
    q = torch.rand(count - 1, kinds, generator=generator) + 0.2
    q = q / q.sum(dim=-1, keepdim=True)
    draft = candidates[:, 1:2].T.expand(batch, -1).contiguous()
    u_accept = torch.zeros(batch, count - 1)
    for b in range(batch):
        u_accept[b, b % (count - 1)] = 0.999  # q of a random candidate is far above its p
    u_draw = torch.linspace(0, 1 - 2**-23, batch)[:, None].expand(-1, count).contiguous()
    limit = torch.full((batch,), count - 1, dtype=torch.int32)
    args = (logits, draft.int(), limit, candidates.expand(batch, -1, -1).contiguous(), q.expand(batch, -1, -1).contiguous())
    return [x.to(device) for x in (*args, u_accept, u_draw)]


def test_draws_behind_a_rejection(device):
    """Draws from max(p - q, 0) at the row of the first rejection, over its whole CDF."""
    args = case(device)
    verdict = accept.accept_rejection_logits(*args, T)
    logits, _, _, candidates, q, _, u = (x.cpu() for x in args)
    rows = torch.arange(12) % 3
    assert verdict.accepted.cpu().tolist() == rows.tolist()
    for row in range(3):
        left = softmax(logits[0, row])
        ids = candidates[0, row].numpy()
        left[ids] = np.maximum(left[ids] - q[0, row].double().numpy(), 0.0)
        mine = rows == row
        drawn_within(verdict.next_token.cpu()[mine], u[mine, 0], left)


def test_draws_behind_a_rejected_point_mass(device):
    logits, draft, limit, _, _, u_accept, u = case(device)
    verdict = accept.accept_point_mass_logits(logits, draft, limit, u_accept, u, T)
    for b, count in enumerate(verdict.accepted.tolist()):
        assert count == b % 3
        left = softmax(logits[0, count].cpu())
        left[int(draft[b, count])] = 0.0
        drawn_within(verdict.next_token[b : b + 1].cpu(), u[b, :1].cpu(), left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_drawn_the_same_plainly_and_behind_drafts(device, dtype):
    """Without a rejection nothing of the drafts is left in the draw: bit for bit that of one row alone."""
    logits, draft, limit, candidates, q, _, u = case(device, batch=3)
    logits = logits.to(dtype)
    none = torch.zeros_like(u[:, :0])
    for row, cap in ((0, 0), (3, 3)):
        held = torch.zeros_like(limit) + cap
        plain = accept.accept_point_mass_logits(logits[:, row : row + 1], draft[:, :0], limit * 0, none, u[:, row : row + 1], T)
        every = torch.zeros_like(u[:, :3])
        pointed = accept.accept_point_mass_logits(logits, draft, held, every, u, T)
        rejected = accept.accept_rejection_logits(logits, draft, held, candidates, q, every, u, T)
        for verdict in (pointed, rejected):
            assert (verdict.accepted == cap).all() and torch.equal(verdict.next_token, plain.next_token)


def test_slices_of_longer_rows(device):
    """A round hands over parts of its block, candidates and uniforms: no copies, and the same verdict as of copies."""
    logits, draft, limit, candidates, q, u_accept, u = case(device, batch=6)
    block = torch.cat([draft[:, :1] * 0 + 999, draft, draft], dim=1)
    wide = [torch.cat([x, x], dim=1) for x in (candidates, q, u_accept, u)]
    got = accept.accept_rejection_logits(
        logits, block[:, 1:4], limit, wide[0][:, :3], wide[1][:, :3], wide[2][:, :3], wide[3][:, :4], T
    )
    want = acceptance.accept_rejection_logits.reference(
        *(x.cpu() for x in (logits, draft, limit, candidates, q, u_accept, u)), T
    )
    assert got.accepted.tolist() == want.accepted.tolist() and got.next_token.tolist() == want.next_token.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")  # NumPy, interpreting
def test_rows_that_are_not_finite(device, bad):
    """Row 1 is not finite: nothing of it is accepted, and token 0 is drawn, as by the reference; rows before it stay."""
    logits, draft, limit, candidates, q, _, u = case(device, batch=2)
    logits[:, 1, 700] = bad
    zero = torch.zeros(2, 3, device=device)
    args = logits, draft, limit
    for name, given in (("point_mass", args), ("rejection", (*args, candidates, q))):
        function = getattr(accept, f"accept_{name}_logits")
        reference = getattr(acceptance, f"accept_{name}_logits").reference
        got, want = function(*given, zero, u, T), reference(*(x.cpu() for x in (*given, zero, u)), T)
        assert got.accepted.tolist() == want.accepted.tolist() == [1, 1]
        assert got.next_token.tolist() == want.next_token.tolist() == [0, 0]


def test_a_residual_without_mass(device):
    """q is p itself, all of it on the candidates: only rounding rejects, and the row is drawn from as it is."""
    logits = torch.full((1, 2, 700), float("-inf"))
    logits[:, :, [10, 600]] = 0.0
    args = (logits, torch.tensor([[600]]), torch.tensor([1]), torch.tensor([[[600, 10]]]), torch.tensor([[[0.5, 0.5]]]),
            torch.ones(1, 1), torch.full((1, 2), 0.75))  # fmt: skip
    got = accept.accept_rejection_logits(*(x.to(device) for x in args), T)
    want = acceptance.accept_rejection_logits.reference(*args, T)
    assert got.accepted.tolist() == want.accepted.tolist() == [0]
    assert got.next_token.tolist() == want.next_token.tolist() == [600]


def test_refused_arguments(device):
    logits, draft, limit, candidates, q, u_accept, u = case(device, batch=2)
    with pytest.raises(DSpineError, match="temperature must be above 0, got 0"):
        accept.accept_point_mass_logits(logits, draft, limit, u_accept, u, 0.0)
    with pytest.raises(DSpineError, match="q must have shape"):
        accept.accept_rejection_logits(logits, draft, limit, candidates, q[:, :1], u_accept, u, T)
    with pytest.raises(DSpineError, match="candidates must be int32 or int64"):
        accept.accept_rejection_logits(logits, draft, limit, candidates.float(), q, u_accept, u, T)
    assert not accept.supports_rejection_logits(logits, draft, limit, candidates.repeat(1, 1, 4), q, u_accept, u, T)
    assert not accept.supports_point_mass_logits(logits, draft, limit, u_accept, u, 0.0)
