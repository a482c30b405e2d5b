"""Two hops and two refined layers: one float64 reference written out row by row, the core, the trainer, the drafter; files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dspine.common.conditioning import conditioned_scores, inject_hops, refined_rows
from dspine.common.configs import load_drafter_config, parse_drafter_config
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.injection import InjectionWeights
from dspine.common.norms import RMSNorm
from dspine.common.transition import transition_scores
from dspine_cuda.drafter import DrafterModel, TorchDrafter, load_drafter
from dspine_cuda.training.config import parse_train_config
from dspine_cuda.training.forward import codes_of, inject_rows, predecessors, refine_rows
from dspine_cuda.training.loop import Trainer, train
from dspine_cuda.training.simulate import Text, simulate
from dspine_cuda.training.target import load_frozen_target
from tests.training.models import HIDDEN, features_run, toy_batch, toy_config, toy_drafter
from tests.training.test_loop import losses, run_of
from tests.training.toys import train_settings, write_shards, write_target

FORMS = [(2, 1), (1, 2), (2, 2)]


def beyond(hops: int, refined: int, seed: int = 0) -> DrafterModel:
    """The toy drafter in float64, its second hop random."""
    config = toy_config()
    dspine = dataclasses.replace(config.dspine, hops=hops, refined_layers=refined)
    torch.manual_seed(seed)
    model = DrafterModel(dataclasses.replace(config, dspine=dspine))
    model.transfer_codes = toy_drafter().transfer_codes
    if hops == 2:
        torch.nn.init.normal_(model.injection.second)
    return model.double()


def arrays(model: DrafterModel) -> dict[str, np.ndarray]:
    return {name: tensor.detach().numpy() for name, tensor in model.injection.state_dict().items()}


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x) * len(x) ** 0.5


def message(w: dict[str, np.ndarray], receiver: np.ndarray, sender: np.ndarray | None) -> np.ndarray:
    """g * m of one pair of rows; nobody there sends nothing."""
    if sender is None:
        return np.zeros(len(w["bias"]))
    gate = w["receiver_gate.weight"] @ receiver + w["predecessor_gate.weight"] @ sender + w["bias"]
    return (w["message.weight"] @ sender) / (1 + np.exp(-gate))


def by_rows(w: dict[str, np.ndarray], layer: int, u: np.ndarray, anchor: np.ndarray, known: np.ndarray | None = None) -> list:
    """(z, own message, second hop) of rows 1..M of one block, u [M, H]. known: the codes of rows' predecessors."""
    z = [unit(w[f"readouts.{layer}.weight"] @ row) for row in u]
    sent = [None, anchor, *z]  # what row t's second predecessor, predecessor, ... are: sent[t], sent[t + 1]
    scale = w.get("second", np.zeros(len(w["bias"])))
    first = [sent[t + 1] if known is None else known[t] for t in range(len(u))]
    return [(z[t], message(w, z[t], first[t]), scale * message(w, z[t], sent[t])) for t in range(len(u))]


def refined_by_hand(w: dict[str, np.ndarray], states: np.ndarray, anchor: np.ndarray, known: np.ndarray) -> np.ndarray:
    """h_L of rows 1..M given their predecessors' codes `known` [M, r]; states [M, H] or [M, 2H] (layers 1 and 0)."""
    u, rows = states[:, :HIDDEN].copy(), []
    if states.shape[1] > HIDDEN:
        before = states[:, HIDDEN:]
        plain, told = by_rows(w, 0, before, anchor), by_rows(w, 0, before, anchor, known)
        for t in range(len(u)):
            change = w["writes.0.weight"] @ (told[t][1] - plain[t][1])
            u[t] += np.sqrt(np.mean(before[t] ** 2)) * change
    for t, (_, first, second) in enumerate(by_rows(w, 1, states[:, :HIDDEN], anchor, known)):
        rows.append(u[t] + np.sqrt(np.mean(u[t] ** 2)) * (w["writes.1.weight"] @ (first + second)))
    return np.array(rows)


@pytest.mark.parametrize("hops", [1, 2])
def test_injection_equals_rows_written_out(hops: int) -> None:
    model = beyond(hops, 1)
    w, weights, second = arrays(model), model.injection.layer(1), model.injection.second
    hidden, tokens = torch.randn(2, 3, 5, HIDDEN, dtype=torch.float64), torch.randint(40, (2, 3, 4))
    anchor = codes_of(model, tokens[..., 0])
    with torch.no_grad():
        core = inject_hops(hidden, anchor, weights, None, second)
        ours = inject_rows(hidden, anchor, weights, None, second)
        lean = TorchDrafter(model, fake_target(model), {}).lean.injection.apply_(
            1, hidden.flatten(0, 1).clone(), anchor.flatten(0, 1)
        )
    torch.testing.assert_close(ours, core)
    torch.testing.assert_close(lean.view_as(core), core, rtol=1e-5, atol=1e-5)  # z is float32 in between
    for b, n in np.ndindex(2, 3):
        u = hidden[b, n].numpy()
        parts = by_rows(w, 1, u[1:], anchor[b, n].numpy())
        want = [u[0]] + [
            row + np.sqrt(np.mean(row**2)) * (w["writes.1.weight"] @ (one + two))
            for row, (_, one, two) in zip(u[1:], parts, strict=True)
        ]
        np.testing.assert_allclose(core[b, n].numpy(), want, rtol=1e-10, atol=1e-12)
    replacement = (torch.rand(2, 3, 1, 1) < 0.5, codes_of(model, tokens))
    with torch.no_grad():
        pair = [f(hidden, anchor, weights, replacement, second) for f in (inject_hops, inject_rows)]
    torch.testing.assert_close(*pair)
    assert not torch.allclose(pair[0], core)


def fake_target(model: DrafterModel):
    from types import SimpleNamespace

    head = torch.randn(48, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return SimpleNamespace(
        embed=lambda ids: head[ids], head=lambda h: h @ head.T, head_rows=lambda ids: head[ids], info=SimpleNamespace()
    )


def in_numpy(weights: InjectionWeights) -> InjectionWeights:
    return InjectionWeights(*(getattr(weights, f.name).detach().numpy() for f in dataclasses.fields(weights)))


@pytest.mark.parametrize(("hops", "refined"), FORMS)
def test_the_rounds_block_equals_the_modules(hops: int, refined: int) -> None:
    """Fused weights, injection in place: final states and everything refinement reads."""
    model = beyond(hops, refined).float()
    drafter = TorchDrafter(model, fake_target(model), {})
    embeddings, code = torch.randn(2, 5, HIDDEN), codes_of(model, torch.tensor([3, 9]))

    def attend(index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    cos, sin = (table[:, :5] for table in model.rope(5))
    with torch.no_grad():
        want = model.forward_block(embeddings[:, None], cos, sin, attend, code[:, None])
        hidden, states = drafter.lean.block(embeddings.clone(), *drafter.tables(0, 5), attend, code)
    torch.testing.assert_close(hidden, want.hidden[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states, want.pre_injection[:, 0], rtol=1e-4, atol=1e-5)
    assert states.shape[-1] == refined * HIDDEN


@pytest.mark.parametrize(("hops", "refined"), FORMS)
def test_refinement_equals_rows_written_out(hops: int, refined: int) -> None:
    model = beyond(hops, refined)
    w = arrays(model)
    states = torch.randn(2, 4, refined * HIDDEN, dtype=torch.float64)
    anchor = codes_of(model, torch.randint(40, (2,)))
    candidates = torch.randint(40, (2, 4, 3))
    codes = torch.cat([anchor[:, None, None].expand(-1, 1, 3, -1), codes_of(model, candidates[:, :-1])], dim=1)
    layers, second = [model.injection.layer(i) for i in (1, 0)], model.injection.second
    earlier = layers[1] if refined == 2 else None
    with torch.no_grad():
        rows = refined_rows(states, anchor, codes, layers[0], second, earlier)
        drafter = TorchDrafter(model, fake_target(model), {})
        scores = drafter.transition(states, anchor, candidates)
        trained = refine_rows(model, states.unsqueeze(1), codes[:, None, :, 1])[:, 0]
        normed = model.norm(rows)
    for b, k in np.ndindex(2, 3):
        want = refined_by_hand(w, states[b].numpy(), anchor[b].numpy(), codes[b, :, k].numpy())
        np.testing.assert_allclose(rows[b, :, k].numpy(), want, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(trained, normed[:, :, 1])
    head_rows = drafter.target.head_rows(candidates)
    torch.testing.assert_close(scores, normed @ head_rows.transpose(-1, -2))
    norm = RMSNorm(model.norm.weight.detach().numpy(), model.norm.eps)
    spare = (None if second is None else second.detach().numpy(), None if earlier is None else in_numpy(earlier))
    inputs = (x.numpy() for x in (states, anchor, codes, head_rows))
    again = conditioned_scores(*inputs, in_numpy(layers[0]), norm, *spare)
    np.testing.assert_allclose(again, scores.detach().numpy(), rtol=1e-9)


def test_without_second_hop_and_second_layer_it_is_the_ordinary_refinement() -> None:
    """s = 0, and no write in the layer before: the scores are `transition_scores`'."""
    model = beyond(2, 2)
    with torch.no_grad():
        model.injection.second.zero_()
        model.injection.writes[0].weight.zero_()
        states, anchor = torch.randn(1, 4, 2 * HIDDEN, dtype=torch.float64), codes_of(model, torch.tensor([7]))
        codes, rows = torch.randn(1, 4, 3, 6, dtype=torch.float64), torch.randn(1, 4, 3, HIDDEN, dtype=torch.float64)
        weights, norm = model.injection.layer(1), model.norm
        plain = transition_scores.reference(states[..., :HIDDEN], codes, rows, weights, norm)
        got = conditioned_scores(states, anchor, codes, rows, weights, norm, model.injection.second, model.injection.layer(0))
    torch.testing.assert_close(got, plain)


@pytest.mark.parametrize(("hops", "refined"), FORMS)
def test_gradients_equal_finite_differences(hops: int, refined: int) -> None:
    """The refined and the ordinary output of a whole block, in every tensor of the injection."""
    model = beyond(hops, refined)
    batch, features = toy_batch(model, [4, 9], length=16), torch.randn(1, 16, model.config.feature_size, dtype=torch.float64)
    settings = None

    def value() -> torch.Tensor:
        sums = features_run(model, batch, features, settings)
        return sums.main + sums.refined_ce + sums.refined_l1 + sums.alignment

    model.zero_grad()
    value().backward()
    for name, parameter in model.injection.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        flat, index = parameter.data.view(-1), int(parameter.grad.abs().argmax())
        kept, step = float(flat[index]), 1e-6
        ends = []
        for sign in (1, -1):
            flat[index] = kept + sign * step
            with torch.no_grad():
                ends.append(float(value()))
        flat[index] = kept
        got, want = float(parameter.grad.view(-1)[index]), (ends[0] - ends[1]) / (2 * step)
        assert got == pytest.approx(want, rel=1e-4, abs=1e-7), name
    assert predecessors(batch).shape == batch.labels.shape


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("beyond")
    write_target(place / "target")
    write_shards(place / "data")
    return place


@pytest.mark.parametrize(("hops", "refined"), FORMS)
def test_trained_exported_loaded_and_scored(place: Path, hops: int, refined: int) -> None:
    name = f"run{hops}{refined}"
    model = train_settings(place)["model"] | {"hops": hops, "refined_layers": refined}
    sections = {"optimizer": {"learning_rate": 2e-2}, "schedule": {"max_steps": 12, "replacement_layers": 1}}
    trainer = Trainer(parse_train_config(run_of(place, name, model=model, **sections)))
    trainer.run()
    card = json.loads((place / name / "drafter/config.json").read_text())["dspine_config"]
    assert {k: v for k, v in card.items() if k in ("hops", "refined_layers")} == {
        k: 2 for k, v in (("hops", hops), ("refined_layers", refined)) if v == 2
    }
    target = load_frozen_target(place / "target", torch.device("cpu"), torch.float32)
    drafter = load_drafter(place / name / "drafter", target)
    assert drafter.config.dspine == load_drafter_config(place / name / "drafter").dspine
    if hops == 2:
        assert float(drafter.model.injection.second.abs().max()) > 1e-3
    texts = [Text(c.tokens.astype(np.int64), c.prompt_length, i) for i, c in enumerate(trainer.held_out[:3])]
    for heat in (0.0, 1.0):  # the trainer's packed forward against the inference code, anchor by anchor
        pair = [simulate(drafter, target, texts, temperature=heat, seed=1, packed=packed) for packed in (True, False)]
        assert [r.accepted.tolist() for r in pair[0]] == [r.accepted.tolist() for r in pair[1]]


def test_an_ordinary_drafter_goes_on_with_two_hops(place: Path) -> None:
    """The second hop starts at nothing: the first loss is the ordinary drafter's own."""
    ordinary = train_settings(place)["model"]
    train(parse_train_config(run_of(place, "plain", run={"stop_after": 3})))
    card = json.loads((place / "plain/drafter/config.json").read_text())["dspine_config"]
    assert "hops" not in card and "refined_layers" not in card
    start = {"start_from": str(place / "plain/drafter")}
    for name, change in (("one", {}), ("two", {"hops": 2})):
        train(parse_train_config(run_of(place, name, model=ordinary | start | change, run={"stop_after": 2})))
    assert losses(place / "two")[0] == losses(place / "one")[0]
    with pytest.raises(DSpineError, match="a drafter of two hops cannot go on as one of one"):
        Trainer(parse_train_config(run_of(place, "back", model=ordinary | {"start_from": str(place / "two/drafter")})))


def test_what_cannot_be_is_refused(place: Path) -> None:
    for model, message in (
        ({"hops": 3}, "model.hops"),
        ({"hops": 2, "method": "dflash"}, "hops and refined_layers need method dspine with injection"),
        ({"refined_layers": 2, "num_layers": 1}, "refined_layers is 2, but there is one layer"),
    ):
        with pytest.raises(DSpineError, match=message):
            parse_train_config(run_of(place, "bad", model=train_settings(place)["model"] | model))
    train(parse_train_config(run_of(place, "card", run={"stop_after": 1})))
    card = json.loads((place / "card/drafter/config.json").read_text())
    for change in ({"hops": 0}, {"hops": 3}, {"refined_layers": 3}):
        with pytest.raises(CheckpointError, match="hops and refined_layers must be 1 or 2"):
            parse_drafter_config(card | {"dspine_config": card["dspine_config"] | change})
    with pytest.raises(CheckpointError, match="injection.second"):  # the card asks for a tensor that is not there
        (place / "card/drafter/config.json").write_text(
            json.dumps(card | {"dspine_config": card["dspine_config"] | {"hops": 2}})
        )
        load_drafter(place / "card/drafter", load_frozen_target(place / "target", torch.device("cpu"), torch.float32))
