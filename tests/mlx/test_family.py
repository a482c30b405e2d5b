"""DFlash2, Domino and DSpark on MLX beyond the goldens: every tensor matters, texts stay, parts compiled or not."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspine.common.errors import CheckpointError
from dspine.common.protocols import DraftRequest
from dspine.common.sampling import SamplingParams
from dspine_mlx.drafter import MlxDrafter, load_drafter
from tests.helpers.drafters import KINDS, Prompted
from tests.helpers.goldens import GOLDENS, golden_arrays, golden_folder
from tests.mlx.goldens import golden_model_target, ids
from tests.mlx.test_generation import PROMPT, tokens_of
from tests.mlx.toys import drafter_folder, toy_target

CASES = ("dflash2", "domino_shift", "domino_noshift", "dspark_vanilla", "dspark_gated", "dspark_rnn")
NEW_KINDS = [kind for kind in KINDS if kind not in ("dflash", "dspine")]
TABLES = ("embed_tokens.weight", "lm_head.weight")
EVERY_TENSOR = [(case, name) for case in CASES for name in sorted(load_file(GOLDENS / case / "model.safetensors"))]


@pytest.fixture(scope="module")
def pair():
    target = toy_target("llama")
    return target, tokens_of(target, None, 64)


def outputs(folder, case):
    io, drafter = golden_arrays(case), load_drafter(folder, golden_model_target(case))
    cache = drafter.make_cache(64)
    drafter.commit(cache, mx.array(io["features"][None, :14]))
    anchor = ids([int(np.ravel(io["anchors"] if "anchors" in io else io["anchor"])[0])])
    uniforms = mx.full((1, drafter.config.num_proposals), 0.5)
    proposal = drafter.propose(cache, anchor, DraftRequest(1.0, uniforms, signals=True))
    return [np.array(proposal.q), np.array(proposal.confidence)]


@pytest.mark.parametrize("case, name", EVERY_TENSOR)
def test_c5_every_tensor_matters(case, name, tmp_path):
    """Perturb one tensor: the drafts' distributions or confidences move. The target's own tables in a file do not."""
    before = outputs(golden_folder(case, tmp_path), case)
    path = golden_folder(case, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    noise = np.random.default_rng(0).normal(size=tensors[name].shape).astype(np.float32)
    save_file(tensors | {name: tensors[name] + 0.5 * noise}, path)
    after = outputs(path.parent, case)
    moved = max(float(np.abs(a - b).max()) for a, b in zip(before, after, strict=True))
    assert moved == 0.0 if name in TABLES else moved > 1e-4, f"{name} moves the drafts by {moved}"


@pytest.mark.parametrize("kind", NEW_KINDS)
def test_s3_greedy_is_the_targets_text(pair, kind, tmp_path):
    """Right and wrong drafts in every round; parts compiled, so that keys and inputs of each part are complete."""
    target, text = pair
    drafter = load_drafter(drafter_folder(tmp_path / "d", kind, 6, target.head_weight()), target)
    assert tokens_of(target, Prompted(drafter, PROMPT, text, wrong_every=4), 40) == text[:40]
    assert tokens_of(target, drafter, 12) == text[:12]


@pytest.mark.parametrize("kind", ["dflash2", "dspark-rnn"])
def test_compiled_parts_say_the_same(pair, kind, tmp_path):
    target, _ = pair
    plain = load_drafter(drafter_folder(tmp_path / "d", kind, 5, target.head_weight()), target)
    compiled = MlxDrafter(plain.model, target, plain.info, compiled=True)
    features = mx.random.normal((1, 12, plain.config.feature_size), key=mx.random.key(0))
    uniforms = mx.array([[0.2, 0.5, 0.8, 0.4]])
    for request in (DraftRequest(), DraftRequest(0.7, uniforms, signals=True)):
        said = []
        for drafter in (plain, compiled):
            cache = drafter.make_cache(32)
            drafter.commit(cache, features)
            said.append(drafter.propose(cache, ids([4]), request))
        for name in ("tokens", "candidates", "q", "confidence", "entropy"):
            one, other = (getattr(proposal, name) for proposal in said)
            if one is None:
                assert other is None
            else:
                np.testing.assert_allclose(np.array(one), np.array(other), atol=1e-5)


@pytest.mark.parametrize("kind", NEW_KINDS)
def test_sampling_runs_and_repeats(pair, kind, tmp_path):
    target, _ = pair
    drafter = load_drafter(drafter_folder(tmp_path / "d", kind, 5, target.head_weight()), target)

    def sample(seed):
        return tokens_of(target, drafter, 12, sampling=SamplingParams(1.0, top_k=5, seed=seed))

    first = sample(1)
    assert sample(1) == first and sample(2) != first


def test_mask_embedding_on_mlx(tmp_path):
    torch = pytest.importorskip("torch", reason="torch writes the file")
    folder = golden_folder("dflash", tmp_path)

    def hidden():
        drafter = load_drafter(folder, golden_model_target("dflash"))
        cache = drafter.make_cache(64)
        drafter.commit(cache, mx.array(golden_arrays("dflash")["features"][None, :14]))
        return np.array(drafter.run_block(cache, ids([3]))[0].hidden)

    plain = hidden()
    own = np.array(golden_model_target("dflash").embed(ids(127)))
    torch.save({"embedding": torch.from_numpy(own), "mask_token_id": 127}, folder / "mask_embedding.pt")
    np.testing.assert_allclose(hidden(), plain, atol=1e-6)
    torch.save({"embedding": torch.from_numpy(own + 1), "mask_token_id": 127}, folder / "mask_embedding.pt")
    assert np.abs(hidden() - plain).max() > 1e-2


def test_a_part_of_the_vocabulary(tmp_path):
    """Candidates and draws stay inside t2d; the first greedy draft is the golden's best among those."""
    folder, tokens = golden_folder("dspark_gated", tmp_path), np.arange(3, 120, 3)
    card = json.loads((folder / "config.json").read_text()) | {"draft_vocab_size": len(tokens)}
    (folder / "config.json").write_text(json.dumps(card))
    tensors = load_file(folder / "model.safetensors")
    tensors["t2d"] = np.isin(np.arange(128), tokens)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][tokens].copy()
    tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][tokens].copy()
    save_file(tensors, folder / "model.safetensors")
    drafter, io = load_drafter(folder, golden_model_target("dspark_gated")), golden_arrays("dspark_gated")
    cache = drafter.make_cache(64)
    drafter.commit(cache, mx.array(io["features"][None, :14]))
    greedy = drafter.propose(cache, ids(io["anchors"][:1]), DraftRequest(signals=True))
    struck = np.full(128, -np.inf)
    struck[tokens] = 0.0
    assert int(greedy.tokens[0, 0]) == int((io["corrected_greedy"][0, 0] + struck).argmax()) and bool(greedy.finite[0])
    sampled = drafter.propose(cache, ids(io["anchors"][:1]), DraftRequest(1.5, mx.full((1, 5), 0.7)))
    assert np.isin(np.array(greedy.tokens), tokens).all() and np.isin(np.array(sampled.tokens), tokens).all()
    assert np.array(sampled.q)[..., struck < 0].max() == 0.0


def test_a_scaled_drafter_on_a_scaled_target(tmp_path):
    folder, target = golden_folder("dflash2", tmp_path), golden_model_target("dflash2")
    assert load_drafter(folder, target)._own_scale
    plain = target.head
    target.head = lambda hidden: mx.tanh(plain(hidden) * 0.6 / 10.0) * 10.0
    assert not load_drafter(folder, target)._own_scale
    target.head = lambda hidden: plain(hidden) / 8.0
    with pytest.raises(CheckpointError, match="scales its own in another way"):
        load_drafter(folder, target)
