"""Losses: against autograd written plainly, split in any way (TR3), and finite where everything is zero (TR4)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dspine.common.injection import inject
from dspine.common.transfer_space import known_token
from dspine.common.transition import refine
from dspine_cuda.drafter import DrafterModel
from dspine_cuda.training.batches import Batch
from dspine_cuda.training.config import LossSection, OptimizerSection
from dspine_cuda.training.forward import codes_of, inject_rows, predecessors, refine_rows
from dspine_cuda.training.losses import (
    ChunkKernels,
    LossSums,
    chunk_slices,
    combine,
    denominators,
    loss_sums,
    top_candidates,
    vocabulary_chunk,
)
from dspine_cuda.training.optimizer import MasterOptimizer
from tests.training.models import features_run, teacher_hidden, toy_batch, toy_drafter

SETTINGS = LossSection(chunk_rows=7, mass_threshold=0.1)


def plain_loss(hidden, refined, teacher, head, labels, weights, count, settings):
    """The same loss by autograd over whole matrices, in the words of `algorithms` 1."""
    log_q, p = F.log_softmax(hidden @ head.T, dim=-1), F.softmax(teacher @ head.T, dim=-1)
    ce = -log_q.gather(1, labels[:, None])[:, 0]
    l1 = (log_q.exp() - p).abs().sum(dim=-1)
    candidates = (hidden @ head.T).topk(count, dim=-1).indices
    scores = torch.stack([head[c] @ r for c, r in zip(candidates, refined, strict=True)])
    log_r, mass = F.log_softmax(scores, dim=-1), p.gather(1, candidates)
    covered = (candidates == labels[:, None]).any(dim=1)
    heavy = mass.sum(dim=1) > settings.mass_threshold
    refined_ce = -torch.where(candidates == labels[:, None], log_r, 0.0).sum(dim=1)
    refined_l1 = (log_r.exp() - mass / mass.sum(dim=1, keepdim=True)).abs().sum(dim=1)
    alpha, w = settings.alpha, weights
    main = (w * (alpha * ce + (1 - alpha) * l1)).sum() / w.sum()
    second = alpha * (w * covered * refined_ce).sum() / (w * covered).sum()
    return main + second + (1 - alpha) * (w * heavy * refined_l1).sum() / (w * heavy).sum()


def test_chunked_gradients_equal_autograd() -> None:
    torch.manual_seed(0)
    rows, vocab, size = 29, 40, 8
    head = torch.randn(vocab, size, dtype=torch.float64)
    hidden, refined, teacher = (torch.randn(rows, size, dtype=torch.float64) for _ in range(3))
    hidden.requires_grad_(), refined.requires_grad_()
    labels, weights = torch.randint(vocab, (rows,)), torch.rand(rows, dtype=torch.float64)
    weights[3] = 0.0
    want = plain_loss(hidden, refined, teacher, head, labels, weights, 4, SETTINGS)
    expected = torch.autograd.grad(want, (hidden, refined))
    for chunk in (4, 7, 1000):
        sums = loss_sums(hidden, teacher, head, labels, weights, refined, None, SETTINGS, ChunkKernels(chunk), 4)
        loss = combine(sums, sums.totals().double(), SETTINGS, 0.0)
        torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-7)
        for got, exact in zip(torch.autograd.grad(loss, (hidden, refined)), expected, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("limit", [5, 8, 16, 1000])
def test_shared_teacher_positions_change_nothing(limit: int) -> None:
    """4 packed rows of 6 positions and 8 labels each: positions shared from chunks of 8 rows on."""
    torch.manual_seed(1)
    head, states = torch.randn(40, 8, dtype=torch.float64), torch.randn(4, 6, 8, dtype=torch.float64)
    hidden = torch.randn(32, 8, dtype=torch.float64, requires_grad=True)
    index, labels, weights = torch.randint(6, (4, 8)), torch.randint(40, (32,)), torch.rand(32, dtype=torch.float64)
    rows = states.gather(1, index[..., None].expand(-1, -1, 8)).flatten(0, 1)
    calls = []

    def counted(*arguments):
        calls.append(arguments[1].shape[0])
        return vocabulary_chunk(*arguments)

    results = []
    for teacher, places in ((rows, None), (states, index)):
        kernels = ChunkKernels(limit, counted)
        sums = loss_sums(hidden, teacher, head, labels, weights, None, None, SETTINGS, kernels, 4, places)
        results.append((*torch.autograd.grad(sums.main, hidden), sums.ce, sums.l1, sums.rows["candidate_mass"]))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert sum(calls) == 32 + (32 if limit < 8 else 24)


def test_two_stage_top_k_is_exact() -> None:
    logits = torch.randn(5, 64 * 20, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(top_candidates(logits, 4), logits.topk(4).indices)
    assert top_candidates(logits[:, :100], 4).shape == (5, 4)


@pytest.mark.parametrize(("rows", "limit"), [(1, 8), (28, 8), (29, 8), (7, 7), (30, 7), (2, 1000)])
def test_chunks_cover_every_row_once(rows: int, limit: int) -> None:
    slices = chunk_slices(rows, limit)
    assert [i for s in slices for i in range(rows)[s]] == list(range(rows))
    assert all(s.stop - s.start <= limit for s in slices)


def sums_of(main: float, weight: float) -> LossSums:
    value, zero = torch.tensor(main), torch.tensor(0.0)
    return LossSums(value, value, zero, zero, zero, zero, torch.tensor(weight), zero, zero, {})


def test_micro_batches_give_the_global_mean_not_a_mean_of_means() -> None:
    """TR3: losses [4] and [1, 1, 1] -> 1.75, not 2.5."""
    shares = [sums_of(4.0, 1.0), sums_of(3.0, 3.0)]
    totals = torch.stack([s.totals() for s in shares]).sum(dim=0)
    assert float(sum(combine(s, totals, SETTINGS, 0.0) for s in shares)) == pytest.approx(1.75)


@pytest.mark.parametrize("normalization", ["own", "shared"])
def test_no_supervised_row_is_zero_not_nan(normalization: str) -> None:
    settings = SETTINGS.model_copy(update={"normalization": normalization})
    empty = sums_of(0.0, 0.0)
    assert float(combine(empty, empty.totals(), settings, 0.5)) == 0.0
    assert torch.isfinite(denominators(empty.totals(), normalization).mean_ce)


def gradients(
    model: DrafterModel, batch: Batch, features: torch.Tensor, splits: int, settings: LossSection
) -> list[torch.Tensor]:
    model.zero_grad()
    size = batch.tokens.shape[0] // splits
    shares = [(batch.rows(i, i + size), features[i : i + size]) for i in range(0, batch.tokens.shape[0], size)]
    teacher = teacher_hidden(batch)
    from tests.training.models import make_forward

    forward = make_forward(model, settings)
    sums = [forward.from_states(b, f, teacher[i * size : (i + 1) * size]) for i, (b, f) in enumerate(shares)]
    totals = torch.stack([s.totals() for s in sums]).sum(dim=0)
    for share in sums:
        combine(share, totals, settings, 0.3).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("alignment", ["cosine", "token"])
def test_any_split_of_the_batch_gives_one_gradient(alignment: str) -> None:
    model = toy_drafter()
    batch = toy_batch(model, [3, 6, 11, 18], length=21, rows=4)
    batch.weights[0, 1:] = 0.0  # shares with very different counts
    features = torch.randn(4, 21, model.config.feature_size)
    settings = SETTINGS.model_copy(update={"alignment": alignment})
    whole = gradients(model, batch, features, 1, settings)
    for splits in (2, 4):
        for got, want in zip(gradients(model, batch, features, splits, settings), whole, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-6)


def test_training_injection_equals_the_core() -> None:
    model = toy_drafter().double()
    weights = model.injection.layer(1)
    hidden, tokens = torch.randn(2, 3, 5, 16, dtype=torch.float64), torch.randint(40, (2, 3, 4))
    anchor = codes_of(model, tokens[..., 0])
    torch.testing.assert_close(anchor, known_token(model.transfer_codes, tokens[..., 0]))
    replacement = (torch.rand(2, 3, 1, 1) < 0.5, codes_of(model, tokens))
    for change in (None, replacement):
        torch.testing.assert_close(inject_rows(hidden, anchor, weights, change), inject(hidden, anchor, weights, change))
    codes = codes_of(model, tokens)
    torch.testing.assert_close(
        refine_rows(model, hidden[:, :, 1:], codes), refine(hidden[:, :, 1:], codes, weights, model.norm)
    )


def test_zero_initialised_dspine_is_block_causal_dflash() -> None:
    dspine, dflash = toy_drafter(), toy_drafter(injected=False)
    with torch.no_grad():
        for linear in dspine.injection.writes:
            linear.weight.zero_()
    shared = {name: tensor for name, tensor in dspine.state_dict().items() if not name.startswith("injection")}
    dflash.load_state_dict(shared)
    batch = toy_batch(dspine, [4, 9, 12], length=20)
    features = torch.randn(1, 20, dspine.config.feature_size)
    settings = SETTINGS.model_copy(update={"refinement": False, "alignment": "none"})
    with torch.no_grad():
        first, second = (features_run(m, batch, features, settings).rows["ce"] for m in (dspine, dflash))
        refined = features_run(dspine, batch, features, SETTINGS)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(refined.rows["ce"], first)


def test_first_row_refined_is_the_ordinary_output() -> None:
    """Its predecessor is the anchor, which was a known token already."""
    from dspine_cuda.training.forward import block_states
    from tests.training.models import make_forward

    model = toy_drafter()
    batch = toy_batch(model, [4, 9], length=20)
    forward = make_forward(model)
    features = torch.randn(1, 20, model.config.feature_size)
    masks, rope = forward.masks(batch), forward.rope(20)
    with torch.no_grad():
        states = block_states(model, batch, features, forward.target.embedding, masks, forward.attention, rope, False)
        refined = refine_rows(model, states.pre_injection[:, :, 1:], codes_of(model, predecessors(batch)))
    torch.testing.assert_close(refined[:, :, 0], states.hidden[:, :, 1])
    assert not torch.allclose(refined[:, :, 1], states.hidden[:, :, 2])


def test_zero_embeddings_and_an_all_padding_row_stay_finite_in_bfloat16() -> None:
    """TR4: zero features and zero embeddings make every norm singular; no score of the second row counts."""
    model = toy_drafter(dtype=torch.bfloat16)
    batch = toy_batch(model, [4, 9], length=16, rows=2)
    batch.weights[1] = 0.0
    batch.keep[1] = False
    batch.anchors[1] = 0
    batch.documents[1] = -1
    from tests.training.models import make_forward

    forward = make_forward(model)
    forward.target.embedding = torch.zeros_like(forward.target.embedding)
    features = torch.zeros(2, 16, model.config.feature_size, dtype=torch.bfloat16)
    sums = forward.from_states(batch, features, teacher_hidden(batch, torch.bfloat16))
    loss = combine(sums, sums.totals(), forward.settings, 0.5)
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_non_finite_gradient_skips_the_step_and_names_the_parameter(dtype: torch.dtype) -> None:
    model = toy_drafter(dtype=dtype)
    optimizer = MasterOptimizer(model, OptimizerSection())

    def step(value: float) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        model.layers[1].self_attn.k_proj.weight.grad[0, 0] = value
        optimizer.collect()
        optimizer.step(1e-2)

    step(0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {k: v.clone() for k, v in optimizer.adamw.state[optimizer.held[0]].items()}
    step(float("nan"))
    assert int(optimizer.skipped) == 1
    assert optimizer.blamed() == ["layers.1.self_attn.k_proj.weight"]
    assert optimizer.blamed() == []
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0)
    for key, value in optimizer.adamw.state[optimizer.held[0]].items():
        torch.testing.assert_close(value, state[key], rtol=0, atol=0)
    step(0.1)
    assert any(not torch.equal(p.detach(), before[name]) for name, p in model.named_parameters())
