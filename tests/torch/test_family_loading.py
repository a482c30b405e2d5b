"""DFlash2, Domino and DSpark on torch beyond the goldens: every tensor matters, texts stay the target's, hostile files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from dspine.common.checkpoints import expected_tensors
from dspine.common.configs import load_drafter_config
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.protocols import DraftRequest
from dspine.common.sampling import SamplingParams
from dspine_cuda.drafter import load_drafter
from dspine_cuda.serving import TorchBatcher
from dspine_cuda.targets.load import load_target
from tests.helpers.checkpoints import change_config, change_tensors
from tests.helpers.drafters import KINDS, Prompted
from tests.helpers.goldens import GOLDENS, golden_arrays, golden_folder
from tests.helpers.models import greedy_reference, one_thread, save_tiny
from tests.torch.test_drafter_goldens import golden_model_target
from tests.torch.test_generation import PROMPT, drafter_of, tokens_of

CASES = ("dflash2", "domino_shift", "domino_noshift", "dspark_vanilla", "dspark_gated", "dspark_rnn")
NEW_KINDS = [kind for kind in KINDS if kind not in ("dflash", "dspine")]
TABLES = ("embed_tokens.weight", "lm_head.weight")
EVERY_TENSOR = [(case, name) for case in (*CASES, "dflash") for name in sorted(load_file(GOLDENS / case / "model.safetensors"))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny target and transformers' greedy text after PROMPT."""
    folder = tmp_path_factory.mktemp("target")
    with one_thread():
        text = greedy_reference(save_tiny(folder, "qwen3"), torch.tensor([PROMPT]), 64)
        yield load_target(folder, device="cpu", dtype="float32"), text


def outputs(folder, case):
    """What the drafter says on the golden's first round, with draws that are forced apart: corrected scores and confidence."""
    io = golden_arrays(case)
    drafter = load_drafter(folder, golden_model_target(case))
    cache = drafter.make_cache(64)
    drafter.commit(cache, torch.from_numpy(io["features"][None, :14]))
    uniforms = torch.full((1, drafter.config.num_proposals), 0.5)
    anchor = torch.tensor([int(np.ravel(io["anchors"] if "anchors" in io else io["anchor"])[0])])
    proposal = drafter.propose(cache, anchor, DraftRequest(1.0, uniforms, signals=True))
    return [proposal.q, proposal.confidence, proposal.tokens]


@pytest.mark.parametrize("case, name", EVERY_TENSOR)
def test_c5_every_tensor_matters(case, name, tmp_path):
    """Perturb one tensor: the drafts' distributions or confidences move. The target's own tables in a file do not."""
    before = outputs(golden_folder(case, tmp_path), case)

    def perturb(tensors):
        noise = np.random.default_rng(0).normal(size=tensors[name].shape).astype(np.float32)
        tensors[name] = tensors[name] + 0.5 * noise

    after = outputs(change_tensors(golden_folder(case, tmp_path), perturb), case)
    moved = max(float((a - b).abs().max()) for a, b in zip(before[:2], after[:2], strict=True))
    assert moved == 0.0 if name in TABLES else moved > 1e-4, f"{name} moves the drafts by {moved}"


@pytest.mark.parametrize("kind", NEW_KINDS)
@pytest.mark.parametrize("block", [2, 9])
def test_s3_greedy_is_transformers(pair, kind, block, tmp_path):
    target, text = pair
    drafter = drafter_of(target, tmp_path, kind, block)
    assert drafter.config.block_size == block
    assert tokens_of(target, Prompted(drafter, PROMPT, text, wrong_every=5), 48) == text[:48]
    assert tokens_of(target, drafter, 12) == text[:12]


@pytest.mark.parametrize("kind", NEW_KINDS)
@pytest.mark.parametrize("rule", ["auto", "point-mass"])
def test_sampling_runs_and_repeats(pair, kind, rule, tmp_path):
    target, _ = pair
    drafter = drafter_of(target, tmp_path, kind, 5)

    def sample(seed):
        return tokens_of(target, drafter, 16, acceptance=rule, sampling=SamplingParams(1.0, top_k=5, seed=seed))

    first = sample(1)
    assert sample(1) == first and sample(2) != first


@pytest.mark.parametrize("kind", NEW_KINDS)
def test_sequences_of_a_batch_draft_as_if_alone(pair, kind, tmp_path):
    """The server's batch: three sequences of different lengths, greedy and sampled, with signals."""
    target, _ = pair
    drafter = drafter_of(target, tmp_path, kind, 5)
    batcher = TorchBatcher(target, drafter)
    features = torch.randn(1, 12, drafter.config.feature_size, generator=torch.Generator().manual_seed(0))
    caches = [drafter.make_cache(32) for _ in range(3)]
    for cache, length in zip(caches, (12, 3, 7), strict=True):
        drafter.commit(cache, features[:, :length])
    uniforms = torch.rand(3, 1, drafter.config.num_proposals, generator=torch.Generator().manual_seed(1))
    requests = [DraftRequest(signals=True), DraftRequest(0.8, uniforms[1]), DraftRequest(0.8, uniforms[2])]
    together = batcher.propose(caches, [3, 4, 5], requests)
    for i, (cache, request) in enumerate(zip(caches, requests, strict=True)):
        alone = drafter.propose(cache, torch.tensor([3 + i]), request)
        for name in ("tokens", "finite", "candidates", "q", "confidence", "entropy"):
            one, other = getattr(alone, name), getattr(together[i], name)
            assert (one is None) == (other is None), name
            if one is not None:
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [*NEW_KINDS, "dflash"])
def test_sliding_layers_and_bias(pair, kind, tmp_path):
    target, text = pair
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "attention_bias": True}
    for causal in (None, True, False):
        drafter = drafter_of(target, tmp_path, kind, 5, is_causal=causal, **types)
        assert tokens_of(target, drafter, 16) == text[:16]


def test_training_forward_equals_the_inference_path(pair, tmp_path):
    """`forward_block` (two blocks a sequence at once) against the packed path, with convolutions."""
    target, _ = pair
    drafter = drafter_of(target, tmp_path, "dflash2", 5)
    model, rows = drafter.model, drafter.config.query_rows
    blocks = torch.randn(1, 2, rows, 48, generator=torch.Generator().manual_seed(0))
    cos, sin = model.rope(2 * rows)
    lean_cos, lean_sin = drafter.tables(0, rows)

    def attend(heads):
        def own_block(index, q, k, v):
            parts = [t.unflatten(2, (-1, rows)) for t in (q, k, v)]
            return (
                torch.nn.functional.scaled_dot_product_attention(
                    *[p.transpose(1, 2).flatten(0, 1) for p in parts], enable_gqa=True
                )
                .unflatten(0, (1, -1))
                .transpose(1, 2)
                .flatten(2, 3)
            )

        return own_block

    with torch.inference_mode():
        packed = model.forward_block(blocks, cos[:, :rows].repeat(1, 2, 1), sin[:, :rows].repeat(1, 2, 1), attend(4))
        for n in range(2):
            hidden, _ = drafter.lean.block(blocks[:, n].clone(), lean_cos, lean_sin, attend(4), None)
            torch.testing.assert_close(packed.hidden[:, n], hidden, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_runs_and_float16_is_refused(case, tmp_path):
    folder = golden_folder(case, tmp_path)
    with pytest.raises(DSpineError, match="float16"):
        load_drafter(folder, golden_model_target(case, torch.float16))
    io, drafter = golden_arrays(case), load_drafter(folder, golden_model_target(case, torch.bfloat16))
    cache = drafter.make_cache(64)
    drafter.commit(cache, torch.from_numpy(io["features"][None, :14]).bfloat16())
    proposal = drafter.propose(cache, torch.tensor([3]), DraftRequest(0.7, torch.full((1, 5), 0.4), signals=True))
    assert bool(proposal.finite.all()) and proposal.q.dtype == torch.float32

    def overflow(tensors):
        tensors["layers.0.mlp.down_proj.weight"] = np.full_like(tensors["layers.0.mlp.down_proj.weight"], 3e38)

    drafter = load_drafter(change_tensors(folder, overflow), golden_model_target(case))
    drafter.commit(cache := drafter.make_cache(64), torch.from_numpy(io["features"][None, :14]))
    assert not bool(drafter.propose(cache, torch.tensor([3]), DraftRequest()).finite.any())


# -- mask_embedding.pt ----------------------------------------------------------------------------------------------------


def hidden_after(folder):
    io = golden_arrays("dflash")
    drafter = load_drafter(folder, golden_model_target("dflash"))
    cache = drafter.make_cache(64)
    drafter.commit(cache, torch.from_numpy(io["features"][None, :14]))
    return drafter._run(cache, torch.tensor([3]))[0].hidden[0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_mask_embedding_replaces_the_row(dtype, tmp_path):
    folder = golden_folder("dflash", tmp_path)
    plain = hidden_after(folder)
    own = golden_model_target("dflash").embed(torch.tensor(127))
    torch.save({"embedding": own, "mask_token_id": 127}, folder / "mask_embedding.pt")
    torch.testing.assert_close(hidden_after(folder), plain)
    row = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.save({"embedding": row, "mask_token_id": torch.tensor(127)}, folder / "mask_embedding.pt")
    trained = hidden_after(folder)
    assert (trained - plain).abs().max() > 1e-2
    drafter = load_drafter(folder, golden_model_target("dflash"))
    torch.testing.assert_close(drafter._mask_embedding, row[0].float())


class Evil:
    def __reduce__(self):
        return (print, ("code of a checkpoint was run",))


@pytest.mark.parametrize(
    "saved, words",
    [
        ({"embedding": torch.zeros(64), "mask_token_id": 126}, "trained for mask token 126"),
        ({"embedding": torch.zeros(63), "mask_token_id": 127}, r"shape \[63\]"),
        ({"embedding": torch.full((64,), torch.nan), "mask_token_id": 127}, "expected finite"),
        ({"embedding": torch.zeros(5, 64), "mask_token_id": 127, "per_position": True}, "one mask embedding a position"),
        ({"embedding": torch.zeros(64)}, "not a mask embedding"),
        ({"embedding": Evil(), "mask_token_id": 127}, "print is not allowed"),
        ([1, 2], "not a mask embedding"),
    ],
)
def test_bad_mask_embeddings(saved, words, tmp_path, capsys):
    folder = golden_folder("dflash", tmp_path)
    torch.save(saved, folder / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match=words):
        hidden_after(folder)
    assert "code of a checkpoint" not in capsys.readouterr().out


@pytest.mark.parametrize("data", [b"", b"not a zip", b"\x80\x04cos\nsystem\n."])
def test_damaged_mask_embeddings(data, tmp_path):
    folder = golden_folder("dflash", tmp_path)
    (folder / "mask_embedding.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="not a mask embedding"):
        hidden_after(folder)


# -- scales ---------------------------------------------------------------------------------------------------------------


def test_a_scaled_drafter_on_a_scaled_target(tmp_path):
    """The target's own multiplier and softcap are applied once where they are the drafter's; another scale is refused."""
    folder = golden_folder("dflash2", tmp_path)
    target = golden_model_target("dflash2")
    assert load_drafter(folder, target)._own_scale
    plain = target.head
    target.head = lambda hidden: torch.tanh(plain(hidden) * 0.6 / 10.0) * 10.0
    drafter = load_drafter(folder, target)
    io = golden_arrays("dflash2")
    drafter.commit(cache := drafter.make_cache(64), torch.from_numpy(io["features"][None, :14]))
    tokens = drafter.propose(cache, torch.from_numpy(io["anchors"][:1]).long(), DraftRequest()).tokens
    assert not drafter._own_scale and tokens[0].tolist() == io["greedy_path"][0].tolist()
    target.head = lambda hidden: plain(hidden) / 8.0
    with pytest.raises(CheckpointError, match="scales its own in another way"):
        load_drafter(folder, target)


def test_input_embedding_scale(tmp_path):
    folder = golden_folder("dflash", tmp_path)
    plain = hidden_after(folder)
    nested = json.loads((folder / "config.json").read_text())["dflash_config"]
    change_config(folder, dflash_config=nested | {"input_embedding_scale": 2.0})
    doubled = hidden_after(folder)
    assert (doubled - plain).abs().max() > 1e-3
    target = golden_model_target("dflash")
    target.info = target.info.__class__(**{**target.info.__dict__, "model_type": "gemma3"})
    with pytest.raises(CheckpointError, match="meant for raw embeddings"):
        load_drafter(folder, target)


@pytest.mark.parametrize("case", CASES)
def test_files_hold_what_the_card_asks_for(case, tmp_path):
    """The golden files are the authors' own: their names are exactly the expected ones, plus copies of the target's."""
    config = load_drafter_config(golden_folder(case, tmp_path))
    names = set(load_file(GOLDENS / case / "model.safetensors"))
    assert names - set(TABLES) == set(expected_tensors(config))


@pytest.mark.parametrize("keep", [0, 5, 9, 700, 100_000])
def test_truncated_files(keep, tmp_path):
    folder = golden_folder("dspark_rnn", tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged safetensors"):
        load_drafter(folder, golden_model_target("dspark_rnn"))
