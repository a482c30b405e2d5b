"""The torch drafter beyond the goldens: forms of checkpoints, strictness, zero initialisation, sampled drafts."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from dspine.common import registry, signals
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.protocols import DraftRequest
from dspine.common.transfer_space import transfer_basis
from dspine_cuda import ops
from dspine_cuda.drafter import load_drafter
from tests.helpers.checkpoints import change_config, change_tensors, dspine_to_dflash, two_file_form
from tests.helpers.goldens import golden_arrays, golden_folder, golden_target
from tests.torch.test_drafter_goldens import golden_model_target


def draft(folder, request=None, dtype=torch.float32, block=2):
    """Proposal for the golden inputs and the scores behind it."""
    io = golden_arrays("dspine")
    drafter = load_drafter(folder, golden_model_target("dspine", dtype))
    cache = drafter.make_cache(64)
    anchor = int(io["anchor_positions"][block])
    features = torch.from_numpy(io["features"][None, :anchor]).to(dtype)
    for start in range(0, anchor, 7):  # in pieces, as rounds deliver them
        drafter.commit(cache, features[:, start : start + 7])
    ids = torch.from_numpy(io["block_token_ids"][block, :1]).long()
    states, _ = drafter._run(cache, ids)
    return drafter.propose(cache, ids, request or DraftRequest()), states.hidden[0, 0].detach().double().numpy(), drafter


@pytest.mark.parametrize("request_", [DraftRequest(), DraftRequest(0.8, torch.full((1, 7), 0.4), signals=True)])
def test_logits_stay_narrow_where_a_kernel_widens_them(request_, tmp_path, monkeypatch):
    """In bfloat16 the product's own logits are read, without a float32 copy, and the proposal is the same to the last bit."""
    ops.register()
    folder = golden_folder("dspine", tmp_path)
    want, _, drafter = draft(folder, request_, torch.bfloat16)
    seen = []

    def reading(operation):
        def run(logits, k):
            seen.append(logits.dtype)
            return operation.reference(logits, k)

        return run

    monkeypatch.setattr(registry, "_kernels", dict(registry._kernels))
    for operation in (signals.draft_candidates, signals.draft_signals):
        registry.register_kernel(
            operation.__name__, namespace="torch", device="cpu", function=reading(operation), name="reading"
        )
    head = drafter.target.head_rows(torch.arange(drafter.config.vocab_size))
    target = SimpleNamespace(**vars(drafter.target), narrow_head=lambda hidden: hidden @ head.T)
    monkeypatch.setattr(sys.modules[__name__], "golden_model_target", lambda *args: target)
    got = draft(folder, request_, torch.bfloat16)[0]
    assert seen == [torch.bfloat16]
    for name, value in vars(want).items():
        other = getattr(got, name)
        assert (value is None and other is None) or torch.equal(value, other), name


def test_context_in_pieces_equals_context_at_once(tmp_path):
    io = golden_arrays("dspine")
    _, hidden, _ = draft(golden_folder("dspine", tmp_path))
    np.testing.assert_allclose(hidden, io["hidden"][2], atol=2e-5)


def test_two_file_form_is_the_same_drafter(tmp_path):
    proposal, hidden, _ = draft(golden_folder("dspine", tmp_path))
    other, other_hidden, drafter = draft(two_file_form(golden_folder("dspine", tmp_path)))
    np.testing.assert_array_equal(hidden, other_hidden)
    assert torch.equal(proposal.tokens, other.tokens) and drafter.config.method == "dspine"


def test_codes_from_a_stored_basis(tmp_path):
    """The shipped form: basis instead of the table; codes are made from the target's LM head."""
    folder = golden_folder("dspine", tmp_path)
    stored = load_file(folder / "model.safetensors")["transfer_codes"]
    basis = transfer_basis(golden_target("dspine")["lm_head"].astype(np.float64), 16)
    io = golden_arrays("dspine")
    signs = np.sign((io["transfer_eigenvectors"] * basis.eigenvectors).sum(axis=1))

    def swap(tensors):
        del tensors["transfer_codes"], tensors["transfer_ready"]
        tensors["transfer_eigenvectors"] = np.ascontiguousarray(basis.eigenvectors * signs[:, None], dtype=np.float32)
        tensors["transfer_eigenvalues"] = basis.eigenvalues.astype(np.float32)
        tensors["transfer_mean"] = basis.mean.astype(np.float32)

    _, _, drafter = draft(change_tensors(folder, swap))
    np.testing.assert_allclose(drafter.model.transfer_codes.numpy(), stored, atol=2e-5)


def test_zero_initialised_dspine_is_block_causal_dflash(tmp_path):
    def zero(tensors):
        for name in tensors:
            if "writes" in name or "predecessor_gate" in name or name == "injection.bias":
                tensors[name] = np.zeros_like(tensors[name])

    _, dspine, _ = draft(change_tensors(golden_folder("dspine", tmp_path), zero))
    proposal, dflash, drafter = draft(dspine_to_dflash(golden_folder("dspine", tmp_path)))
    assert drafter.config.method == "dflash" and drafter.config.is_causal is True
    np.testing.assert_allclose(dspine, dflash, atol=1e-6)
    change_config(golden_folder("dspine", tmp_path), is_causal=None)
    _, bidirectional, _ = draft(change_config(dspine_to_dflash(golden_folder("dspine", tmp_path)), is_causal=None))
    assert np.abs(bidirectional - dflash).max() > 1e-2, "without is_causal the block is bidirectional"


TENSORS = sorted(load_file(golden_folder.__globals__["GOLDENS"] / "dspine" / "model.safetensors"))


@pytest.mark.parametrize("name", [n for n in TENSORS if n != "transfer_ready"])
def test_c5_every_tensor_matters(name, tmp_path):
    """Perturb one tensor: the transition scores must move. A tensor that is loaded and not used is a silent loss."""
    io = golden_arrays("dspine")

    def scores(folder):
        drafter = load_drafter(folder, golden_model_target("dspine"))
        cache = drafter.make_cache(64)
        drafter.commit(cache, torch.from_numpy(io["features"][None]))
        anchor = torch.tensor([5])
        states, code = drafter._run(cache, anchor)
        candidates = torch.arange(20).reshape(1, 5, 4)
        with torch.inference_mode():
            return drafter.transition(states.pre_injection[:, 0, 1:], code, candidates)

    before = scores(golden_folder("dspine", tmp_path))

    def perturb(tensors):
        noise = np.random.default_rng(0).normal(size=tensors[name].shape).astype(np.float32)
        tensors[name] = tensors[name] + 0.5 * noise

    after = scores(change_tensors(golden_folder("dspine", tmp_path), perturb))
    assert (before - after).abs().max() > 1e-4, f"{name} does not matter"


def test_c5_kinds_are_not_mixed_up(tmp_path):
    folder = change_config(golden_folder("dspine", tmp_path), architectures=["DFlashDraftModel"], dspine_config=None)
    with pytest.raises(CheckpointError, match="is a DSpine drafter"):
        draft(folder)
    folder = change_config(
        golden_folder("dflash", tmp_path), architectures=["DSpineDraftModel"], dspine_config={"transfer_rank": 16}
    )
    with pytest.raises(CheckpointError, match="is a plain DFlash drafter"):
        draft(folder)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop("norm.weight"), "missing: norm.weight"),
        (lambda t: t.pop("injection.bias"), "missing: injection.bias"),
        (
            lambda t: t.update({"layers.3.mlp.up_proj.weight": t["layers.2.mlp.up_proj.weight"]}),
            "unexpected: layers.3.mlp.up_proj",
        ),
        (lambda t: t.update({"bridge.codes": t["norm.weight"]}), "unexpected: bridge.codes"),
        (lambda t: t.pop("transfer_codes"), "no transfer space"),
        (lambda t: t.update({"transfer_codes": t["transfer_codes"][:, :8].copy()}), r"transfer_codes has shape \[128, 8\]"),
        (lambda t: t.update({"fc.weight": t["fc.weight"][:, :64].copy()}), r"fc.weight has shape \[64, 64\].*\[64, 128\]"),
    ],
)
def test_strict_loading_lists_the_names(change, words, tmp_path):
    with pytest.raises(CheckpointError, match=words) as error:
        draft(change_tensors(golden_folder("dspine", tmp_path), change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 8, 400, 100_000])
def test_damaged_safetensors(keep, tmp_path):
    folder = golden_folder("dspine", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged safetensors"):
        draft(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="no safetensors file"):
        draft(folder)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"hidden_size": 32}, "its hidden size is 32, golden has 64"),
        ({"vocab_size": 256}, "its vocabulary is 256, golden has 128"),
        ({"num_target_layers": 12}, "its number of target layers is 12, golden has 8"),
        ({"dflash_config": {"mask_token_id": 127, "target_layer_ids": [2, 8]}}, r"\[8\] out of range"),
    ],
)
def test_drafter_for_another_target(changes, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        draft(golden_folder("dspine", tmp_path, **changes))


def test_q1_float16_is_refused_and_overflow_is_seen(tmp_path):
    with pytest.raises(DSpineError, match="float16"):
        draft(golden_folder("dspine", tmp_path), dtype=torch.float16)

    def overflow(tensors):
        tensors["layers.0.mlp.down_proj.weight"] = np.full_like(tensors["layers.0.mlp.down_proj.weight"], 3e38)

    proposal, _, _ = draft(change_tensors(golden_folder("dspine", tmp_path), overflow))
    assert not bool(proposal.finite.any())
    proposal, hidden, _ = draft(golden_folder("dspine", tmp_path), dtype=torch.bfloat16)
    assert bool(proposal.finite.all())
    assert np.abs(hidden - golden_arrays("dspine")["hidden"][2]).max() < 0.15


@pytest.mark.parametrize("case", ["dspine", "dflash"])
def test_sampled_drafts_carry_the_q_they_were_drawn_from(case, tmp_path):
    uniforms = torch.rand(1, 5, generator=torch.Generator().manual_seed(0))
    request = DraftRequest(temperature=0.8, uniforms=uniforms, signals=True)
    proposal, _, drafter = draft(golden_folder(case, tmp_path), request)
    assert proposal.q.shape == proposal.candidates.shape and proposal.q.shape[1] == 5
    torch.testing.assert_close(proposal.q.sum(-1), torch.ones(1, 5))
    hit = (proposal.candidates == proposal.tokens[..., None]).float()
    assert torch.equal(hit.sum(-1), torch.ones(1, 5)) and ((hit * proposal.q).sum(-1) > 0).all()
    assert proposal.confidence.shape == proposal.entropy.shape == (1, 5)
    assert ((proposal.confidence > 0) & (proposal.confidence <= 1)).all() and (proposal.entropy >= 0).all()
    cold = draft(golden_folder(case, tmp_path), DraftRequest(1e-5, uniforms))[0].tokens
    assert torch.equal(cold, draft(golden_folder(case, tmp_path))[0].tokens)


def test_cache_integrity(tmp_path):
    _, _, drafter = draft(golden_folder("dspine", tmp_path))
    cache = drafter.make_cache(10)
    with pytest.raises(DSpineError, match="capacity is 10"):
        cache.advance(11)
    assert cache.nbytes == 3 * 2 * 2 * 16 * 16 * 4
