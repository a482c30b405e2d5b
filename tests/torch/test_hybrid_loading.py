"""Hybrid checkpoints: prefixes, towers to skip, both layouts of the experts, FP8 blocks, refusals; ties of the router."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspine.common.arrays import top_k
from dspine.common.errors import CheckpointError
from dspine_cuda.runtime import RUNTIME
from dspine_cuda.targets.hybrid import HybridTarget
from dspine_cuda.targets.hybrid_config import parse_hybrid_config
from dspine_cuda.targets.hybrid_tensors import canonical
from dspine_cuda.targets.moe import pick_experts
from tests.helpers.hybrids import fused_experts, nest_config, per_expert, rename_tensors, save_hybrid
from tests.helpers.models import VOCAB, edit_config, one_thread, prompt


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tiny products gain nothing from threads, and lose much where other work runs beside the tests."""
    with one_thread():
        yield


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    """A Qwen3.5-MoE folder as `transformers` saves it, and its logits."""
    folder = tmp_path_factory.mktemp("moe")
    save_hybrid(folder, "qwen3_5_moe_text")
    return folder, logits(folder)


def logits(folder) -> torch.Tensor:
    target = RUNTIME.load_target(folder, device="cpu", dtype="float32")
    assert isinstance(target, HybridTarget)
    cache = target.make_cache(40)
    target.prefill(cache, prompt(10), chunk=16)
    return target.finish(cache, target.begin(cache, prompt(8, seed=2)), 8).logits


def same(folder, want) -> None:
    torch.testing.assert_close(logits(folder), want, atol=0, rtol=0)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_prefixes_towers_and_nested_config(moe, tmp_path, prefix):
    """The official multimodal layout: names behind a prefix, a vision tower, an MTP head, the config nested."""
    source, want = moe
    head = "language_model.lm_head.weight" if prefix == "language_model.model." else "lm_head.weight"

    def rename(name: str) -> str:
        return head if name == "lm_head.weight" else prefix + name.removeprefix("model.")

    junk = {name: torch.ones(3) for name in ("model.visual.blocks.0.w", "visual.patch", "mtp.layers.0.w", "mtp.fc.weight")}
    folder = rename_tensors(source, tmp_path / "official", rename, junk)
    nest_config(folder, "qwen3_5_moe")
    same(folder, want)
    target = RUNTIME.load_target(folder, device="cpu", dtype="float32")
    assert target.info.model_type == "qwen3_5_moe" and target.info.eos_token_ids == {2}
    assert target.info.context_length == 512


def test_fused_and_single_experts_load_equal(moe, tmp_path):
    source, want = moe
    tensors = load_file(source / "model.safetensors")
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in tensors
    fused = fused_experts(tensors, 8)
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 48, 32)
    folder = rename_tensors(source, tmp_path / "fused", lambda name: None, fused)
    same(folder, want)
    again = rename_tensors(folder, tmp_path / "single", lambda name: None, per_expert(fused))
    same(again, want)
    mixed = {n: t for n, t in tensors.items() if ".layers.1." in n} | {n: t for n, t in fused.items() if ".layers.1." not in n}
    same(rename_tensors(folder, tmp_path / "mixed", lambda name: None, mixed), want)


def test_missing_surplus_and_misshapen_tensors(moe, tmp_path):
    source, _ = moe
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    folder = rename_tensors(source, tmp_path / "a", lambda n: None if n == name else n, {"model.odd": torch.ones(1)})
    with pytest.raises(CheckpointError, match=rf"missing: {name}; unused: model.odd"):
        logits(folder)
    conv = "model.layers.0.linear_attn.conv1d.weight"
    turned = load_file(source / "model.safetensors")[conv].transpose(1, 2).contiguous()  # as mlx-lm stores it
    folder = rename_tensors(source, tmp_path / "b", lambda n: n, {conv: turned})
    with pytest.raises(CheckpointError, match=rf"{conv} is \[96, 4, 1\], config.json asks for \[96, 1, 4\]"):
        logits(folder)
    twice = {"model.language_model.norm.weight": torch.ones(32)}
    with pytest.raises(CheckpointError, match="are the same tensor twice"):
        logits(rename_tensors(source, tmp_path / "c", lambda n: n, twice))


def test_tied_heads(moe, tmp_path):
    source, _ = moe
    folder = rename_tensors(source, tmp_path / "tied", lambda n: n)
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match="ties the LM head to the embedding, but lm_head.weight differs"):
        logits(folder)
    bare = rename_tensors(source, tmp_path / "bare", lambda n: None if n == "lm_head.weight" else n)
    with pytest.raises(CheckpointError, match="missing: lm_head.weight"):
        logits(bare)
    edit_config(bare, tie_word_embeddings=True)
    want = logits(bare)
    nest_config(bare, "qwen3_5_moe")
    same(bare, want)
    card = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(card | {"tie_word_embeddings": False}))
    same(bare, want)  # two levels disagree: the file has no head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is not in the qwen3_5_moe_text decoder"),
        ({"attn_output_gate": False}, "attn_output_gate false is not in"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not in"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "rope type 'longrope' is not in"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types must list 5 of"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types must list 5 of"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is above num_experts 8"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 must be a multiple of linear_num_key_heads 2"),
        ({"num_key_value_heads": 3}, "4 heads over 3 K/V heads"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.2}}, "rotates 3 dimensions: must be even"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised weights \(gptq\) are not read"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised weights \(fp8\) without weight_block_size"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(moe, tmp_path, changes, message):
    source, _ = moe
    folder = rename_tensors(source, tmp_path / "x", lambda n: n)
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        logits(folder)


def test_defaults_of_official_cards():
    """A card without layer_types or rope_parameters: three GDN layers, one of attention; a quarter of a head rotated."""
    card = {
        "model_type": "qwen3_5", "text_config": {
            "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 9,
            "max_position_embeddings": 10, "intermediate_size": 5, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
            "linear_key_head_dim": 4, "linear_value_head_dim": 4, "tie_word_embeddings": True, "eos_token_id": 7,
        },
    }  # fmt: skip
    config = parse_hybrid_config(card, "card")
    assert config.attention_layers == (3, 7) and config.head_dim == 256 and config.rotary_dim == 64
    assert config.tied is True and config.moe is None and config.moe_layers == ()


def test_fp8_blocks_are_multiplied_out(moe, tmp_path):
    """The official FP8 layout: float8 weights with a scale a block, for some tensors."""
    source, _ = moe
    tensors = load_file(source / "model.safetensors")
    block, exact, stored = (16, 12), dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("q_proj.weight", "in_proj_qkv.weight", "up_proj.weight", "down_proj.weight", "out_proj.weight")):
            continue
        rows, columns = tensor.shape
        scale = torch.rand(-(-rows // block[0]), -(-columns // block[1])) * 0.01 + 0.001
        wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
        stored[name] = (tensor / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[name + "_scale_inv"] = scale
        exact[name] = stored[name].to(torch.float32) * wide
    folders = [rename_tensors(source, tmp_path / name, lambda n: None, t) for name, t in (("a", exact), ("b", stored))]
    edit_config(folders[1], quantization_config={"quant_method": "fp8", "weight_block_size": list(block)})
    same(folders[1], logits(folders[0]))
    del stored["model.layers.0.linear_attn.out_proj.weight_scale_inv"]
    save_file(stored, folders[1] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="out_proj.weight_scale_inv is missing"):
        logits(folders[1])
    edit_config(folders[1], "quantization_config")
    with pytest.raises(CheckpointError, match="unused: .*_scale_inv"):
        logits(folders[1])


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("model.language_model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.visual.blocks.0.attn.qkv.weight", None),
        ("mtp.norm.weight", None),
        ("something.else", "something.else"),
    ],
)
def test_names(name, known):
    assert canonical(name) == known


def test_picks_of_equal_probabilities_are_the_lowest_ids():
    """The same set for a row alone and among others, whatever order a partial sort would find ties in."""
    generator = torch.Generator().manual_seed(0)
    for experts, k in ((8, 3), (32, 4), (256, 8), (512, 10)):
        inverted = torch.arange(experts - 1, -1, -1)
        rows = torch.softmax(
            torch.randint(0, 3, (64, experts), generator=generator).float(), dim=-1
        )  # three values: ties all over
        picks = pick_experts(rows, k, inverted)
        assert torch.equal(picks, torch.sort(rows, dim=-1, descending=True, stable=True).indices[:, :k])
        assert torch.equal(picks, top_k(rows, k)[1])
        for i in range(0, 64, 7):
            assert torch.equal(pick_experts(rows[i : i + 1], k, inverted)[0], picks[i])
    zeros = torch.zeros(2, 32)
    zeros[1, 3:] = -0.0
    assert pick_experts(zeros, 4, torch.arange(31, -1, -1)).tolist() == [[0, 1, 2, 3]] * 2


def test_ties_in_the_model(moe, tmp_path):
    """Router rows made equal in pairs: every row picks the same set alone as in a block, the lower id of a pair first."""
    source, _ = moe
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensor[1::2] = tensor[0::2]
    folder = rename_tensors(source, tmp_path / "ties", lambda n: None, tensors)
    target = RUNTIME.load_target(folder, device="cpu", dtype="float32")
    target.record_routing = True
    cache = target.make_cache(40)
    target.prefill(cache, prompt(5), chunk=8)
    ids = prompt(16, seed=3)
    block = target.finish(cache, target.begin(cache, ids), 16).router_picks
    for i in range(16):
        alone = target.finish(cache, target.begin(cache, ids[:, i : i + 1]), 1) if i == 0 else None
        stage = target.begin(cache, ids[:, : i + 1])
        assert torch.equal(stage.router_picks, block[:, : i + 1, 0])
        assert alone is None or torch.equal(alone.router_picks, block[:, :1])
    assert bool((block[..., 0] % 2 == 0).all()) and bool((block[..., 1] == block[..., 0] + 1).all())
    assert bool((block[..., 2] % 2 == 0).all()) and int(block.max()) < VOCAB
