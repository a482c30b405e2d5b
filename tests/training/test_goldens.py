"""Training losses and gradients against arrays made by SpecForge's own trainer (`tests/goldens/dspine_loss`)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dspine.common.checkpoints import DraftTensors, expected_tensors
from dspine.common.configs import load_drafter_config
from dspine_cuda.drafter import DrafterModel
from dspine_cuda.training.batches import Batch, block_labels, position_weights
from dspine_cuda.training.config import LossSection, ScheduleSection
from dspine_cuda.training.losses import LossSums, combine
from dspine_cuda.training.schedules import alignment_beta, replacement_probability
from dspine_cuda.training.step import LossForward
from tests.helpers.goldens import assert_golden, golden_arrays, golden_folder, golden_target

SETTINGS = LossSection(normalization="shared", mass_threshold=0.08, chunk_rows=7)


def golden_batch(io: dict[str, np.ndarray]) -> Batch:
    tokens, documents = io["input_ids"].astype(np.int64), np.zeros(io["input_ids"].shape, dtype=np.int64)
    anchors, keep = io["anchors"].astype(np.int64), io["keep"].astype(bool)
    labels, supervised = block_labels(tokens, io["loss_mask"] > 0, documents, anchors, keep, 5)
    np.testing.assert_array_equal(supervised, io["supervised"].astype(bool))
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy()
    weights = position_weights(supervised, 7.0)
    arrays = (tokens, documents, positions, anchors, keep, labels, weights, io["replace_mask"].astype(bool))
    return Batch(*(torch.from_numpy(array) for array in arrays))


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    folder = golden_folder("dspine_loss", tmp_path_factory.mktemp("golden"))
    config = load_drafter_config(folder)
    tensors, target = DraftTensors(folder, config), golden_target("dspine_loss")
    model = DrafterModel(config)
    model.load_state_dict({name: torch.from_numpy(tensors.read(name)) for name in expected_tensors(config)})
    model.transfer_codes = torch.from_numpy(tensors.transfer_codes(lambda: target["lm_head"]))
    weights = {name: torch.from_numpy(array) for name, array in target.items()}
    holder = SimpleNamespace(embedding=weights["embed_tokens"], head_matrix=weights["lm_head"])
    forward = LossForward(model, holder, SETTINGS, attention="sdpa", compiled=False, replaced=True)
    io = golden_arrays("dspine_loss")
    batch = golden_batch(io)
    sums = forward.from_states(batch, torch.from_numpy(io["features"]), torch.from_numpy(io["target_last_hidden"]))
    return SimpleNamespace(model=model, io=io, batch=batch, sums=sums, forward=forward)


def test_sums_and_rows_match(golden) -> None:
    io, sums = golden.io, golden.sums
    for name in ("ce", "l1", "refined_ce", "refined_l1", "alignment"):
        assert_golden(getattr(sums, name).detach(), io[f"sum_{name}"], name)
    assert_golden(sums.weight, io["denominator"], "denominator")
    supervised = io["supervised"].astype(bool)  # labels of other rows are ours to choose
    names = {"ce": "row_ce", "l1": "row_l1", "refined_ce": "row_refined_ce", "refined_l1": "row_refined_l1"}
    for name, array in (names | {"candidate_mass": "candidate_mass", "covered": "covered"}).items():
        got, want = sums.rows[name].reshape(2, 5, 5).numpy(), io[array].astype(np.float32)
        assert_golden(np.where(supervised, got, 0), np.where(supervised, want, 0), array)


def test_schedules_match(golden) -> None:
    schedule = ScheduleSection(max_steps=600, beta_warmup_steps=146)
    assert replacement_probability(100, schedule) == pytest.approx(0.5)
    assert alignment_beta(100, 0.5, schedule) == pytest.approx(float(golden.io["beta"]), rel=1e-6)


def test_loss_and_gradients_match(golden) -> None:
    model, io = golden.model, golden.io
    model.zero_grad()
    totals = golden.sums.totals()
    loss = combine(golden.sums, totals, SETTINGS, float(io["beta"]))
    assert_golden(loss.detach(), io["loss"], "loss")
    loss.backward(retain_graph=True)
    named = dict(model.named_parameters())
    for key in io:
        if key.startswith("grad."):
            assert_golden(named[key.removeprefix("grad.")].grad, io[key], key)
    norms = torch.stack([named[name].grad.norm() for name in sorted(named)])
    assert_golden(norms, io["grad_norm_all"], "gradient norms")


def test_own_counts_raise_the_refined_terms(golden) -> None:
    """Shared normalisation gives 0.99 / 0.60 here, own counts 4.32 / 1.82 (`algorithms` 1)."""
    sums = SimpleNamespace(**{name: getattr(golden.sums, name).detach() for name in LossSums.NAMES})
    assert float(sums.refined_ce / sums.weight) == pytest.approx(0.99, abs=5e-3)
    assert float(sums.refined_l1 / sums.weight) == pytest.approx(0.60, abs=5e-3)
    assert float(sums.refined_ce / sums.covered) == pytest.approx(4.32, abs=5e-3)
    assert float(sums.refined_l1 / sums.heavy) == pytest.approx(1.82, abs=5e-3)
