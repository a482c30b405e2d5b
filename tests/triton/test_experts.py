"""A router's choice, the experts with everything that comes in the same launches, and products of a few rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dspine.common import experts, linear_rows
from dspine.common.errors import DSpineError
from dspine.common.experts import SharedExpert
from dspine.kernels_triton import _launch
from dspine.kernels_triton import gated_rows as gated_kernel
from dspine.kernels_triton import linear_rows as linear_kernel
from dspine.kernels_triton import pick_experts as pick_kernel
from dspine.kernels_triton import routed_experts as routed_kernel
from dspine.kernels_triton import silu_mul as silu_kernel
from tests.triton.blocks import error

DTYPES = (torch.bfloat16, torch.float32)


def drawn(device, *shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "k", "normalised"), [(256, 8, True), (256, 8, False), (37, 4, True), (1, 1, True), (8, 8, True)]
)
def test_picks(device, dtype, count, k, normalised):
    """Rows of a wider product, as the router's lie; picks, order and weights against float64."""
    entry = 3 * drawn(device, 5, count + 9, dtype=dtype)
    logits = entry[:, :count]
    picks, weights = pick_kernel.pick_experts(logits, k, normalised)
    probabilities = torch.softmax(logits.double().cpu(), dim=-1)
    order = torch.argsort(-probabilities, dim=-1, stable=True)[:, :k]
    want = probabilities.gather(1, order)
    want = want / want.sum(dim=-1, keepdim=True) if normalised else want
    assert picks.dtype == torch.int64 and torch.equal(picks.cpu(), order)
    assert weights.dtype == torch.float32 and error(weights, want) <= (3e-3 if dtype == torch.bfloat16 else 1e-6)
    rounded = weights.to(dtype).to(torch.float32)
    assert torch.equal(weights, rounded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_take_the_lower_expert_alone_and_in_a_block(device, dtype):
    """MoE ties: equal logits everywhere, in groups, and at both ends; one row and sixteen give the same picks and weights."""
    rows = torch.zeros(16, 40)
    rows[1, ::3] = 1.0
    rows[2, [39, 0, 17]] = 2.0
    rows[3] = -1e30
    rows[4:] = drawn("cpu", 12, 40).round()
    logits = rows.to(dtype).to(device)
    picks, weights = pick_kernel.pick_experts(logits, 4, True)
    want, amounts = experts.pick_experts.reference(logits.cpu(), 4, True)
    assert torch.equal(picks.cpu(), want) and error(weights, amounts.double()) <= 3e-3
    assert picks[0].tolist() == [0, 1, 2, 3] and picks[1].tolist() == [0, 3, 6, 9] and picks[2].tolist() == [0, 17, 39, 1]
    for row in range(16):
        alone = pick_kernel.pick_experts(logits[row : row + 1], 4, True)
        assert torch.equal(alone[0][0], picks[row]) and torch.equal(alone[1][0], weights[row])


def test_picks_of_bad_logits_are_experts(device):
    """NaN of either sign, one and all: whatever is picked can be read."""
    logits = drawn(device, 4, 37)
    logits[0], logits[1] = float("nan"), -torch.tensor(float("nan"))
    logits[2, 5] = float("nan")
    picks, _ = pick_kernel.pick_experts(logits, 8, True)
    assert ((picks >= 0) & (picks < 37)).all()
    assert all(len(set(row)) == 8 for row in picks.tolist())


def mixture(device, tokens, dtype, k=3, count=8, size=96, inner=48, width=40):
    """x, picks, weights, gate_up, down, shared, residual, norm."""
    picks = torch.stack([torch.randperm(count, generator=torch.Generator().manual_seed(i))[:k] for i in range(tokens)])
    entry = drawn(device, tokens, 7 + 2 * width, seed=1, dtype=dtype)
    shared = SharedExpert(
        entry[:, 3:4], entry[:, 5 : 5 + 2 * width], drawn(device, size, width, seed=2, dtype=dtype) / width**0.5
    )
    weights = torch.rand(tokens, k, generator=torch.Generator().manual_seed(3)).to(device)
    norm = SimpleNamespace(weight=1 + 0.3 * drawn(device, size, seed=4), eps=1e-6)
    return (
        drawn(device, tokens, size, seed=5, dtype=dtype), picks.to(device), weights,
        drawn(device, count, 2 * inner, size, seed=6, dtype=dtype) / size**0.5,
        drawn(device, count, size, inner, seed=7, dtype=dtype) / inner**0.5, shared,
        drawn(device, tokens, size, seed=8, dtype=dtype), norm,
    )  # fmt: skip


def in_float64(x, picks, weights, gate_up, down, shared, residual, norm):
    """The mixture token by token, by plain products; (sum, norm of the sum)."""
    x, weights, gate_up, down, residual = (t.double().cpu() for t in (x, weights, gate_up, down, residual))
    rows = []
    for n in range(x.shape[0]):
        total = residual[n].clone()
        for j, e in enumerate(picks[n].tolist()):
            gate, up = (gate_up[e] @ x[n]).chunk(2)
            total += weights[n, j] * (down[e] @ (F.silu(gate) * up))
        if shared is not None:
            gate, up = shared.gate_up[n].double().cpu().chunk(2)
            total += shared.amount[n].double().cpu().sigmoid() * (shared.down.double().cpu() @ (F.silu(gate) * up))
        rows.append(total)
    out = torch.stack(rows)
    return out, F.rms_norm(out, (out.shape[1],), norm.weight.double().cpu(), norm.eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("has_shared", [True, False])
def test_mixture(device, dtype, tokens, has_shared):
    x, picks, weights, gate_up, down, shared, residual, norm = mixture(device, tokens, dtype)
    shared = shared if has_shared else None
    out, normed = routed_kernel.routed_experts(x, picks, weights, gate_up, down, shared, residual, norm)
    want, want_normed = in_float64(x, picks, weights, gate_up, down, shared, residual, norm)
    bound = 3e-3 if dtype == torch.bfloat16 else 1e-6
    assert error(out, want) <= bound and error(normed, want_normed) <= 2 * bound
    plain = routed_kernel.routed_experts(x, picks, weights, gate_up, down)
    assert error(plain, in_float64(x, picks, weights, gate_up, down, None, 0 * residual, norm)[0]) <= bound
    core = experts.routed_experts.reference(x, picks, weights, gate_up, down, shared, residual, norm)
    assert error(core[0], want) <= bound and error(core[1], want_normed) <= 2 * bound


def test_a_token_of_a_mixture_does_not_depend_on_the_others(device):
    args = mixture(device, 16, torch.bfloat16)
    x, picks, weights, gate_up, down, shared, residual, norm = args
    both = routed_kernel.routed_experts(*args)
    for count in (1, 3, 8):
        part = SharedExpert(shared.amount[:count], shared.gate_up[:count], shared.down)
        got = routed_kernel.routed_experts(
            x[:count], picks[:count], weights[:count], gate_up, down, part, residual[:count], norm
        )
        assert torch.equal(got[0], both[0][:count]) and torch.equal(got[1], both[1][:count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "size"), [(1, 64, 256), (16, 37, 300), (5, 130, 33), (19, 48, 64)])
def test_products_of_a_few_rows(device, dtype, rows, columns, size):
    x, weight = drawn(device, rows, size, dtype=dtype), drawn(device, columns, size, seed=1, dtype=dtype)
    got = linear_kernel.linear_rows(x, weight)
    want = x.double().cpu() @ weight.double().cpu().T
    assert got.shape == (rows, columns) and error(got, want) <= (3e-3 if dtype == torch.bfloat16 else 1e-6)
    assert error(linear_rows.linear_rows.reference(x, weight), want) <= (3e-3 if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(linear_kernel.linear_rows(x[:1], weight), got[:1])  # the same bits alone


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "inner", "size"), [(1, 64, 256), (16, 37, 300), (19, 130, 33)])
def test_gate_and_up_in_one_launch(device, dtype, rows, inner, size):
    """The bits of the two launches that it stands for, a row alone and in a block."""
    x, weight = drawn(device, rows, size, dtype=dtype), drawn(device, 2 * inner, size, seed=1, dtype=dtype) / size**0.5
    got = gated_kernel.gated_rows(x, weight)
    both = linear_kernel.linear_rows(x, weight).contiguous()
    assert torch.equal(got, silu_kernel.silu_mul(both)) and got.shape == (rows, inner)
    gate, up = (x.double().cpu() @ weight.double().cpu().T).chunk(2, dim=-1)
    assert error(got, F.silu(gate) * up) <= (5e-3 if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(gated_kernel.gated_rows(x[:1], weight), got[:1])


SPLIT = linear_kernel.Launch(32, 32, 4, 3, 64, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "size"), [(16, 100, 256), (19, 37, 300), (3, 64, 33)])
def test_split_products(device, dtype, rows, columns, size):
    """Programs that share a column: right, the same again and alone, counters back at zero; also where some of them have no
    inputs left."""
    x, weight = drawn(device, rows, size, dtype=dtype), drawn(device, columns, size, seed=1, dtype=dtype)

    def run(count):
        out = torch.full((count, -(-columns // 16) * 16), float("nan"), dtype=dtype, device=device)[:, :columns]
        linear_kernel.launch(x[:count], weight, out, SPLIT)
        return out

    both = run(rows)
    assert error(both, x.double().cpu() @ weight.double().cpu().T) <= (3e-3 if dtype == torch.bfloat16 else 1e-6)
    for _ in range(3):
        assert torch.equal(run(rows), both)
    assert torch.equal(run(1), both[:1])
    tiles = -(-columns // 32)
    assert not _launch.counters(weight, tiles * -(-rows // 16)).any() and not _launch.counters(weight, tiles).any()


def test_counters_are_apart():
    first, second = torch.zeros(4), torch.zeros(4)
    one, two = _launch.counters(first, 3), _launch.counters(second, 3)
    assert one.data_ptr() != two.data_ptr() and _launch.counters(first, 3) is one and one.numel() == 3
    one.fill_(1)
    assert not two.any() and not _launch.counters(first, 4).any()
    one.zero_()
    assert _launch.counters(first, 2 * _launch.COUNTERS).numel() == 2 * _launch.COUNTERS


def test_products_take_parameters_from_the_environment(device, monkeypatch):
    monkeypatch.setenv("DSPINE_KERNELS_TRY", "linear_rows.64x128=32,64,8,3,128,2; experts_ahead=1")
    assert linear_kernel.choose(64, 128, torch.bfloat16).split == 2
    assert linear_kernel.choose(64, 256, torch.bfloat16).split == 1 == linear_kernel.choose(64, 128, torch.float32).split
    x, weight = drawn(device, 3, 128, dtype=torch.bfloat16), drawn(device, 64, 128, seed=1, dtype=torch.bfloat16)
    assert error(linear_kernel.linear_rows(x, weight), x.double().cpu() @ weight.double().cpu().T) <= 3e-3
    for value, message in (
        ("linear_rows.64x128=32,64", "expected, got '32,64'"), ("linear_rows.64x128=32,64,4,3,0,3", "powers of two"),
        ("expert_ahead=1", "knows attention, .* got 'expert_ahead'"),
        ("linear_rows", "name=value pairs between blanks, got 'linear_rows'"),
    ):  # fmt: skip
        monkeypatch.setenv("DSPINE_KERNELS_TRY", value)
        with pytest.raises(DSpineError, match=message):
            linear_kernel.choose(64, 128, torch.bfloat16)
    monkeypatch.setenv("DSPINE_KERNELS_TRY", "attention_ahead=yes")
    with pytest.raises(DSpineError, match="attention_ahead must be 0 or 1, got 'yes'"):
        _launch.variant("attention_ahead", True)


@pytest.mark.parametrize("launch", [linear_kernel.Launch(16, 64, 2, 3, 0), linear_kernel.Launch(64, 128, 8, 4, 4096)])
def test_launch_choices_of_products(device, launch):
    x, weight = drawn(device, 3, 192, dtype=torch.bfloat16), drawn(device, 100, 192, seed=1, dtype=torch.bfloat16)
    out = torch.empty(3, 112, dtype=torch.bfloat16, device=device)[:, :100]
    linear_kernel.launch(x, weight, out, launch)
    assert error(out, x.double().cpu() @ weight.double().cpu().T) <= 3e-3


def test_bad_arguments(device):
    x, picks, weights, gate_up, down, shared, residual, norm = mixture(device, 2, torch.float32)
    for call, message in (
        (lambda: pick_kernel.pick_experts(x[0], 2, True), r"logits must have shape \[N, E\]"),
        (lambda: pick_kernel.pick_experts(x, 97, True), "k must be 1..96, got 97"),
        (lambda: linear_kernel.linear_rows(x, gate_up[0, :, :5]), "must share K"),
        (lambda: linear_kernel.linear_rows(x, gate_up[0].bfloat16()), "dtype of x"),
        (lambda: linear_kernel.linear_rows(x[:, :48], down[0].T.contiguous().T), "weight must be contiguous"),
        (
            lambda: routed_kernel.routed_experts(x, picks, weights, gate_up, down, shared, residual[:1]),
            "residual must have shape",
        ),
        (lambda: routed_kernel.routed_experts(x, picks, weights, gate_up.bfloat16(), down), "gate_up must have the dtype"),
        (lambda: routed_kernel.routed_experts(x, picks.float(), weights, gate_up, down), "picks must be integers"),
        (
            lambda: routed_kernel.routed_experts(
                x, picks, weights, gate_up, down, SharedExpert(shared.amount, shared.gate_up[:, :-2], shared.down)
            ),
            "shared.gate_up must have shape",
        ),
    ):
        with pytest.raises(DSpineError, match=message):
            call()
