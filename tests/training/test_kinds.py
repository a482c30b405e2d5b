"""DFlash2, Domino and DSpark in the trainer: their parts equal inference, gradients equal autograd, runs learn and load."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dspine.common.draft_heads import domino_walk, markov_walk, selector_lattice
from dspine.common.errors import DSpineError
from dspine_cuda.draft_heads import draft_parts
from dspine_cuda.drafter import load_drafter
from dspine_cuda.training.config import HeadsSection, LossSection, ScheduleSection, parse_train_config
from dspine_cuda.training.data import load_conversations
from dspine_cuda.training.initial import drafter_config
from dspine_cuda.training.kinds import (
    TrainableConv,
    confidence_loss,
    extra_head,
    joint_chunk,
    joint_loss,
    kind_outputs,
    selector_loss,
)
from dspine_cuda.training.loop import Trainer, train
from dspine_cuda.training.losses import ChunkKernels, row_losses
from dspine_cuda.training.schedules import base_share
from dspine_cuda.training.simulate import Text, _Spelled, simulate
from dspine_cuda.training.target import load_frozen_target
from tests.training.test_loop import losses, run_of, train_rows
from tests.training.test_losses import SETTINGS
from tests.training.toys import VOCAB, train_settings, write_shards, write_target

SIZES = {"conv_group_size": 8, "selector_rank": 6, "gru_hidden_dim": 10, "emb_dim": 7, "markov_rank": 9}
KINDS = {
    "dflash2": {},
    "domino": {},
    "domino_shift": {"shift_label": True},
    "dspark": {"markov_head_type": "vanilla", "confidence": False},
    "dspark_gated": {"markov_head_type": "gated"},
    "dspark_rnn": {"markov_head_type": "rnn", "confidence_with_markov": True},
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_target(tmp_path / "target")
    write_shards(tmp_path / "data")
    return tmp_path


def sections(place: Path, kind: str, **more: dict) -> dict:
    model = train_settings(place)["model"] | {"method": kind.partition("_")[0]}
    return {"model": model, "heads": SIZES | KINDS[kind], "loss": {"chunk_rows": 50, "alignment": "none"}} | more


class Embedding:
    """What `draft_parts` asks of a target."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_given_the_correct_tokens_equal_inference(place: Path, kind: str) -> None:
    trainer = Trainer(parse_train_config(run_of(place, "run", **sections(place, kind))))
    model = trainer.model
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    blocks, proposals, size = 3, 4, model.config.hidden_size
    hidden, head = torch.randn(1, blocks, proposals, size), torch.randn(VOCAB, size)
    anchor, labels = torch.randint(VOCAB, (blocks,)), torch.randint(VOCAB, (blocks, proposals))
    before = torch.cat([anchor[:, None], labels[:, :-1]], dim=1)
    table = torch.randn(VOCAB, size)
    own = kind_outputs(model, hidden, before[None], table)
    parts, base = draft_parts(model, Embedding(table)), hidden[0] @ head.T
    if kind == "dflash2":
        values, candidates = base.topk(5, dim=-1)
        lattice = selector_lattice(hidden[0], values, candidates, anchor, parts.selector)
        pair = (own.context.view(blocks, proposals, 1, -1) * model.candidate_selector.successor_codebook[candidates]).sum(-1)
        torch.testing.assert_close((values + pair)[:, 0], lattice[:, 0, 0], rtol=1e-4, atol=1e-4)
        for block in range(blocks):  # rows of the lattice whose predecessor happens to be a candidate
            for t in range(1, proposals):
                candidates[block, t - 1, 2] = before[block, t]
        lattice = selector_lattice(hidden[0], values, candidates, anchor, parts.selector)
        pair = (own.context.view(blocks, proposals, 1, -1) * model.candidate_selector.successor_codebook[candidates]).sum(-1)
        torch.testing.assert_close((values + pair)[:, 1:], lattice[:, 1:, 2], rtol=1e-4, atol=1e-4)
        return
    spelled = _Spelled(1.0, following=labels)
    if kind.startswith("domino"):
        walk = domino_walk(base, hidden[0], anchor, parts.domino, spelled)
    else:
        walk = markov_walk(base, hidden[0], anchor, parts.markov, spelled)
    ours = base + (own.latent @ extra_head(model).T).view(blocks, proposals, -1)
    torch.testing.assert_close(ours, walk.logits, rtol=1e-4, atol=1e-4)
    if parts.confidence is not None:
        from dspine.common.draft_heads import confidence_logits

        embed = parts.markov.embed if model.config.dspark.confidence_with_markov else None
        want = confidence_logits(hidden[0], anchor, labels, parts.confidence, embed)
        torch.testing.assert_close(own.confidence.view(blocks, proposals), want, rtol=1e-4, atol=1e-4)


def test_the_convolution_equals_inference(place: Path) -> None:
    from dspine_cuda.draft_heads import GroupedConv

    config = drafter_config(
        parse_train_config(run_of(place, "run", **sections(place, "dflash2"))), load_frozen_target(
            place / "target", torch.device("cpu"), torch.float32
        ).shape,
    )  # fmt: skip
    torch.manual_seed(0)
    ours, theirs = TrainableConv(config), GroupedConv(config)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 5, config.hidden_size)
    for got, want in zip(ours.prepare(x), theirs.prepare(x), strict=True):
        torch.testing.assert_close(got, want)
    kernel = ours.prepare(x)[1]
    torch.testing.assert_close(ours.finish(x, kernel), theirs.finish(x, kernel))


def test_gradients_of_the_corrected_output_equal_autograd() -> None:
    torch.manual_seed(0)
    rows, vocab, size, inner = 23, 40, 8, 5
    head, teacher = torch.randn(vocab, size, dtype=torch.float64), torch.randn(rows, size, dtype=torch.float64)
    trained = [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((rows, size), (rows, inner), (vocab, inner))]
    labels, weights = torch.randint(vocab, (rows,)), torch.rand(rows, dtype=torch.float64)
    hidden, latent, extra = trained
    logits = hidden @ head.T + latent @ extra.T
    log_q, p = F.log_softmax(logits, dim=-1), F.softmax(teacher @ head.T, dim=-1)
    ce, l1 = -log_q.gather(1, labels[:, None])[:, 0], (log_q.exp() - p).abs().sum(dim=-1)
    want = (weights * (0.1 * ce + 0.9 * l1)).sum()
    for chunk in (5, 1000):
        kernels = ChunkKernels(chunk, joint=joint_chunk)
        got, row_ce, row_l1 = joint_loss(hidden, latent, extra, teacher, None, head, labels, weights, 0.1, kernels)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close((row_ce, row_l1), (ce, l1))
        for ours, theirs in zip(
            torch.autograd.grad(got, trained), torch.autograd.grad(want, trained, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert row_losses(logits, teacher @ head.T, None, labels, 0.1).slope.shape == (rows, vocab)


def test_selector_and_confidence_losses() -> None:
    torch.manual_seed(1)
    rows, vocab, rank = 9, 30, 4
    head, hidden = torch.randn(vocab, 6), torch.randn(rows, 6, requires_grad=True)
    context, successor = torch.randn(rows, rank, requires_grad=True), torch.randn(vocab, rank, requires_grad=True)
    candidates = (hidden @ head.T).topk(5, dim=-1).indices
    labels, weights = candidates[:, 1].clone(), torch.rand(rows)
    labels[4] = [i for i in range(vocab) if i not in candidates[4]][0]
    total, count = selector_loss(context, successor, hidden, head, candidates, labels, weights, ChunkKernels(4))
    scores = torch.stack(
        [(head[c] @ h.detach()) + successor[c] @ a for c, h, a in zip(candidates, hidden, context, strict=True)]
    )
    ce = F.cross_entropy(scores, torch.ones(rows, dtype=torch.int64), reduction="none")
    inside = torch.arange(rows) != 4
    torch.testing.assert_close(total, (weights * ce)[inside].sum())
    torch.testing.assert_close(count, weights[inside].sum())
    total.backward()
    assert hidden.grad is None and bool(context.grad.any()) and not context.grad[4].any()
    logits, l1 = torch.zeros(3, requires_grad=True), torch.tensor([0.0, 2.0, 1.0], requires_grad=True)
    value, over = confidence_loss(logits, l1, torch.ones(3))
    value.backward()
    torch.testing.assert_close(logits.grad, torch.tensor([-0.5, 0.5, 0.0]))  # wanted 1, 0 and a half
    assert l1.grad is None and float(over) == 3.0


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_learns_and_loads(place: Path, kind: str) -> None:
    more = {"optimizer": {"learning_rate": 1e-2}, "loss": {"chunk_rows": 50, "alignment": "none", "alpha": 1.0}}
    summary = train(parse_train_config(run_of(place, "run", **sections(place, kind, **more))))
    rows = train_rows(place / "run")
    assert np.mean([r["ce"] for r in rows[-5:]]) < 0.75 * np.mean([r["ce"] for r in rows[:5]])
    assert (rows[-1]["head"] > 0) == (kind in ("dflash2", "dspark_gated", "dspark_rnn"))
    target = load_frozen_target(place / "target", torch.device("cpu"), torch.float32)
    drafter = load_drafter(Path(summary["drafter"]), target)
    assert drafter.config.method == kind.partition("_")[0] and drafter.config.block_size == 5
    assert drafter.config.first_row == (0 if kind in ("domino_shift",) or kind.startswith("dspark") else 1)
    assert summary["acceptance"]["tau"] >= 1.0 and summary["acceptance"]["rounds"] > 20
    texts = [Text(c.tokens.astype(np.int64), c.prompt_length, i) for i, c in enumerate(load_conversations(place / "data")[:8])]
    for heat in (0.0, 0.7):  # the trainer's forward and the inference code draft the same
        packed, plain = (simulate(drafter, target, texts, temperature=heat, packed=way) for way in (True, False))
        assert [r.accepted.tolist() for r in packed] == [r.accepted.tolist() for r in plain]
    card = json.loads((Path(summary["drafter"]) / "config.json").read_text())
    assert card["block_size"] == (4 if kind.startswith("dspark") else 5)


def test_a_markov_head_finds_what_the_backbone_cannot(place: Path) -> None:
    """Answers follow a table of successors: nearly all of it is in the token before."""
    taus = {}
    for kind in ("dspark", "dflash"):
        more = {"optimizer": {"learning_rate": 1e-2}, "schedule": {"max_steps": 90}, "run": {"log_every": 90}}
        settings = sections(place, "dspark", loss={"chunk_rows": 500, "alignment": "none", "alpha": 1.0}, **more)
        settings["model"] = settings["model"] | {"method": kind}
        taus[kind] = train(parse_train_config(run_of(place, kind, **settings)))["acceptance"]["tau"]
    assert taus["dspark"] > taus["dflash"] + 0.3


def test_a_kind_resumes_and_splits_to_the_same_losses(place: Path) -> None:
    results = []
    for name, more in (("whole", {}), ("split", {"optimizer": {"learning_rate": 3e-3, "micro_batches": 2}})):
        train(parse_train_config(run_of(place, name, **sections(place, "dspark_rnn", run={"stop_after": 3}, **more))))
        results.append(losses(place / name))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4)


def test_dominos_base_share_and_bad_sizes(place: Path) -> None:
    schedule = ScheduleSection(max_steps=10)
    assert [base_share(step, 0.5, schedule) for step in (0, 1, 5, 9)] == pytest.approx([1.0, 0.8, 0.0, 0.0])
    bad = sections(place, "dflash2", heads=SIZES | {"conv_group_size": 7})
    with pytest.raises(DSpineError, match="heads.conv_group_size 7 does not divide the hidden size 32"):
        Trainer(parse_train_config(run_of(place, "run", **bad)))
    with pytest.raises(DSpineError, match="need a DSpine model with injection"):
        parse_train_config(run_of(place, "run", **sections(place, "domino", loss={"refinement": True})))
    assert HeadsSection().markov_head_type == "vanilla" and LossSection().head_weight == SETTINGS.head_weight == 1.0
