"""A round's small operations at a real vocabulary, captured: graphs are replayed over changed inputs and held to the core's own
code on the CPU, draws to the float64 CDF."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dspine.common import acceptance, signals, stepping  # noqa: E402
from dspine.common.selection import lengths  # noqa: E402
from dspine.common.selection.lengths import RoundLengths  # noqa: E402
from dspine_cuda import ops  # noqa: E402

V, K, T = 151_936, 16, 0.8


@pytest.fixture(autouse=True, scope="module")
def _registered():
    ops.register()


def captured(function):
    """(replay, result) of a graph of `function`, which has run before."""
    with torch.inference_mode():
        for _ in range(2):
            function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = function()
    return graph.replay, result


def drawn_within(token: int, u: float, weights: np.ndarray) -> None:
    """The interval of `token` in the CDF of `weights` holds u, up to the rounding of float32 weights over a vocabulary."""
    edges = np.concatenate([[0.0], np.cumsum(weights / weights.sum())])
    assert weights[token] > 0 and edges[token] - 2e-5 <= u <= edges[token + 1] + 2e-5


def inputs(w: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(1, w, V, generator=generator) * 3).bfloat16()
    best = logits.float().topk(K // 2, dim=-1).indices[:, :-1]
    other = torch.randint(0, V, (1, w - 1, K - K // 2), generator=generator)
    candidates = torch.cat([best, other], dim=-1)
    q = torch.softmax(torch.randn(1, w - 1, K, generator=generator), dim=-1)
    q[..., 0] *= 3.0
    q /= q.sum(dim=-1, keepdim=True)
    draft = candidates[..., 0].int()
    return [logits, draft, torch.tensor([w - 1]).int(), candidates, q, torch.rand(1, w - 1, generator=generator),
            torch.rand(1, w, generator=generator)]  # fmt: skip


@pytest.mark.parametrize("rule", ["point_mass", "rejection"])
@pytest.mark.parametrize("w", [1, 2, 16])
def test_sampled_acceptance(rule, w):
    if rule == "rejection" and w == 1:
        pytest.skip("nothing was drawn")
    held = [x.cuda() for x in inputs(w, 0)]
    function = getattr(acceptance, f"accept_{rule}_logits")

    def run():
        given = held if rule == "rejection" else [*held[:3], *held[5:]]
        return function(*given, T)

    replay, verdict = captured(run)
    seen = set()
    for seed in range(24):
        new = inputs(w, seed)
        for place, x in zip(held, new, strict=True):
            place.copy_(x)
        replay()
        count = int(verdict.accepted[0])
        logits, draft, _, candidates, q, u_accept, u_draw = (x[0] for x in new)
        wide = logits.double().numpy() / T
        p = np.exp(wide - wide.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        for i in range(min(count + 1, w - 1)):
            share = float(q[i][candidates[i] == draft[i]].sum()) if rule == "rejection" else 1.0
            gap = p[i, int(draft[i])] - float(u_accept[i]) * share
            assert (gap > 0) == (i < count) or abs(gap) < 1e-6
        left = p[count].copy()
        if count < w - 1:
            ids = candidates[count].numpy() if rule == "rejection" else draft[count : count + 1].numpy()
            taken = np.zeros_like(left)
            np.add.at(taken, ids, q[count].double().numpy() if rule == "rejection" else 1.0)
            left = np.maximum(left - taken, 0.0)
        drawn_within(int(verdict.next_token[0]), float(u_draw[count]), left)
        seen.add(count)
    assert len(seen) > 1 or w == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_draws_have_the_bits_of_drafted_ones(dtype):
    """A row's token does not depend on the rows beside it, nor on the rule, where no draft was rejected."""
    logits, draft, _, candidates, q, _, u = (x.cuda() for x in inputs(16, 5))
    logits, every = logits.to(dtype), torch.zeros(1, 15, device="cuda")
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    for row in range(16):
        plain = acceptance.accept_point_mass_logits(
            logits[:, row : row + 1], draft[:, :0], zero, every[:, :0], u[:, row : row + 1], T
        )
        pointed = acceptance.accept_point_mass_logits(logits, draft, zero + row, every, u, T)
        rejected = acceptance.accept_rejection_logits(logits, draft, zero + row, candidates, q, every, u, T)
        assert int(pointed.accepted[0]) == int(rejected.accepted[0]) == row
        assert int(plain.next_token[0]) == int(pointed.next_token[0]) == int(rejected.next_token[0])


@pytest.mark.parametrize("k", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_candidates_and_the_finite_check(dtype, k):
    logits = torch.zeros(1, 15, V, dtype=dtype, device="cuda")
    replay, found = captured(lambda: signals.draft_candidates(logits, k))
    for seed, bad in enumerate((None, "nan", "inf", "-inf")):
        new = (torch.randn(1, 15, V, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)
        if bad is not None:
            new[0, seed, 1000 * seed] = float(bad)
        logits.copy_(new)
        replay()
        finite = [bad is None or row != seed for row in range(15)]
        assert found.finite[0].tolist() == finite
        want = signals.draft_candidates.reference(new, k)
        rows = torch.tensor(finite)
        assert torch.equal(found.ids.cpu()[0, rows], want.ids[0, rows])
        assert torch.equal(found.values.cpu()[0, rows], want.values[0, rows])


def test_steps_of_a_round():
    """One graph of all of them, replayed over changed counters: the core's own answers."""
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(999, 4096, generator=generator).bfloat16()
    fill, codes = torch.randn(4096, generator=generator).bfloat16(), torch.randn(999, 256, generator=generator).bfloat16()
    uniforms = torch.rand(2, 60, 3, generator=generator)
    arrays = dict(
        anchor=torch.zeros(2).int(), tokens=torch.zeros(2, 15).long(), finite=torch.ones(2).bool(),
        block=torch.zeros(2, 16).int(), flags=torch.zeros(2).bool(), remaining=torch.full((2,), 20).int(),
        generated=torch.ones(2).int(), length=torch.full((2,), 3).int(), survival=torch.rand(2, 15, generator=generator),
    )  # fmt: skip

    def steps(x, tables, room, reference=False):
        def call(operation):
            return operation.reference if reference else operation

        block, flags = call(stepping.place_drafts)(x["tokens"], x["finite"], x["anchor"], x["block"], x["flags"])
        bounded = call(lengths.bound_lengths)(
            x["length"], x["length"] + 1, x["survival"], flags, x["remaining"], room, 16, True
        )
        live, limit = call(stepping.round_limits)(x["remaining"], flags, 9)
        entry, code = call(stepping.enter_block)(tables[0], x["anchor"], tables[1], 16, tables[2])
        rows = call(stepping.table_rows)(tables[0], block[:, :9])
        return [block, flags, *vars(bounded).values(), live, limit, entry, code, rows,
                call(stepping.round_uniforms)(tables[3], x["generated"], 9)]  # fmt: skip

    def room(device):
        ints = (torch.zeros(2, dtype=torch.int32, device=device) for _ in range(3))
        return RoundLengths(*ints, torch.zeros(2, 15, device=device))

    held = {name: x.cuda() for name, x in arrays.items()}
    tables, there = [x.cuda() for x in (table, fill, codes, uniforms)], room("cuda")
    replay, found = captured(lambda: steps(held, tables, there))
    for seed in range(8):
        generator.manual_seed(seed)
        new = dict(
            arrays, anchor=torch.randint(0, 999, (2,), generator=generator).int(),
            tokens=torch.randint(0, 999, (2, 15), generator=generator), finite=torch.tensor([True, seed % 2 == 0]),
            remaining=torch.randint(0, 20, (2,), generator=generator).int(),
            generated=torch.randint(1, 70, (2,), generator=generator).int(),
            length=torch.randint(2, 17, (2,), generator=generator).int(),
        )  # fmt: skip
        for name, x in new.items():
            held[name].copy_(x)
        replay()
        for got, want in zip(found, steps(new, (table, fill, codes, uniforms), room("cpu"), True), strict=True):
            assert torch.equal(got.cpu(), want)
