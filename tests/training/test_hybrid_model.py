"""The trainable hybrid against transformers, mlx_lm and the core's recurrence; packed documents; the tokenizer."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.gdn import gdn_recurrence
from dspine_cuda.training.hybrid_model import chunked_delta_rule, load_model, unit_lower_solve
from dspine_cuda.training.hybrid_shape import read_shape
from tests.training.hybrid_toys import SIZES, restarting, toy_hybrid, toy_tokens, write_hybrid

PREPARE = Path(__file__).parents[2] / "examples" / "train_hybrid_tiny" / "prepare.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_hybrid(tmp_path_factory.mktemp("hybrid"))[1]


@pytest.fixture(scope="module")
def reference(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3_5MoeForCausalLM"
    return model.eval()


@torch.no_grad()
def test_logits_and_layers_equal_transformers(folder, reference) -> None:
    model = load_model(folder, torch.device("cpu"), torch.float32)
    tokens = toy_tokens(2, 150)
    hidden, taps, routings = model(tokens, torch.arange(150).expand(2, -1), (0, 2))
    theirs = reference(tokens, output_hidden_states=True)
    np.testing.assert_allclose(model.logits(hidden), theirs.logits, atol=2e-4)
    for tap, layer in zip(taps, (0, 2), strict=True):
        np.testing.assert_allclose(tap, theirs.hidden_states[layer + 1], atol=2e-4)
    assert float(theirs.logits.std()) > 0.2 and len({tuple(r) for r in routings[0].chosen.sort().values.tolist()}) > 10


@torch.no_grad()
def test_logits_equal_mlx_lm(folder) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
    theirs, _ = utils.load_model(folder)
    theirs.set_dtype(mx.float32)
    tokens = toy_tokens(1, 40)
    ours = load_model(folder, torch.device("cpu"), torch.float32)
    logits = ours.logits(ours(tokens, torch.arange(40)[None])[0])
    np.testing.assert_allclose(np.array(theirs(mx.array(tokens.numpy()))), logits, atol=3e-4)


@torch.no_grad()
def test_packed_documents_never_meet() -> None:
    """Each document of a packed row gives what it gives alone; changing one leaves the others as they were."""
    model, lengths = toy_hybrid(), (3, 70, 1, 60, 30)  # starts inside chunks, several in one, a document across chunks
    row = toy_tokens(1, sum(lengths))
    packed = model(row, restarting(*lengths))[0]
    start = 0
    for length in lengths:
        alone = model(row[:, start : start + length], restarting(length))[0]
        np.testing.assert_allclose(packed[:, start : start + length], alone, atol=1e-4)
        start += length
    changed = row.clone()
    changed[:, 3:73] = 5
    again = model(changed, restarting(*lengths))[0]
    assert torch.equal(again[:, :3], packed[:, :3])
    np.testing.assert_allclose(again[:, 73:], packed[:, 73:], atol=1e-4)
    assert float((again[:, 3:73] - packed[:, 3:73]).abs().max()) > 0.1


def test_chunked_rule_equals_the_recurrence() -> None:
    """Float64, against equation 1 token by token; the last state too."""
    rng = np.random.default_rng(0)
    batch, length, heads, dk, dv = 2, 130, 2, 8, 6
    q, k = (rng.normal(size=(batch, length, heads, dk)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(batch, length, heads, dv))
    decay, beta = -rng.exponential(size=(batch, length, heads)), rng.random((batch, length, heads))
    decay[0, :, 0] = 0.0  # a head that never forgets
    tensors = [torch.from_numpy(x) for x in (q, k, v, decay, beta)]
    outputs, state = chunked_delta_rule(*tensors, torch.ones(batch, length, dtype=torch.int32))
    want, last = np.zeros_like(v), np.zeros((batch, heads, dv, dk))
    for i in range(length):
        kept = np.exp(decay[:, i])[..., None, None] * last
        z = beta[:, i][..., None] * (v[:, i] - np.einsum("bhvk,bhk->bhv", kept, k[:, i]))
        last = kept + z[..., None] * k[:, i][..., None, :]
        want[:, i] = np.einsum("bhvk,bhk->bhv", last, q[:, i])
    np.testing.assert_allclose(outputs, want, atol=1e-9)
    np.testing.assert_allclose(state.mT, last, atol=1e-9)
    assert callable(gdn_recurrence)


def test_solve_is_substitution_even_for_parallel_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    strict = torch.randn(3, 64, 64, generator=generator).tril(-1)
    strict[1] = torch.full((64, 64), 0.999).tril(-1)  # nearly parallel keys: powers of this matrix are astronomic
    right = torch.randn(3, 64, 5, generator=generator)
    exact = torch.linalg.solve_triangular(torch.eye(64).double() + strict.double(), right.double(), upper=False)
    error = (unit_lower_solve(strict, right) - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
    assert float(error[0]) < 1e-3 and float(error[1]) < 1e-5


def test_gradients_of_unchosen_experts_are_zero() -> None:
    model = toy_hybrid().requires_grad_(True)
    hidden, _, routings = model(toy_tokens(1, 3), restarting(3))
    hidden.square().sum().backward()
    chosen = set(routings[1].chosen.flatten().tolist())
    gradient = model.layers[1].mlp.experts.gate_up_proj.grad.abs().sum(dim=(1, 2))
    assert {i for i, g in enumerate(gradient.tolist()) if g > 0} == chosen and len(chosen) < SIZES["num_experts"]


def test_cards_of_other_families_are_refused(folder, tmp_path) -> None:
    card = json.loads((folder / "config.json").read_text())
    for change, message in (
        ({"model_type": "llama"}, "expected a model of type"),
        (
            {"text_config": card["text_config"] | {"layer_types": ["full_attention"] * 4}},
            "one attention layer at a fixed interval",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(card | change))
        with pytest.raises(DSpineError, match=message):
            read_shape(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(
            card
            | {
                "text_config": card["text_config"]
                | {"num_hidden_layers": 3, "layer_types": card["text_config"]["layer_types"][:3]}
            }
        )
    )
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"do not fit the family: layers\.3"):
        load_model(tmp_path, torch.device("cpu"), torch.float32)


def test_tokenizer_is_one_and_the_same_however_it_is_loaded(folder, tmp_path) -> None:
    """transformers builds its own class for this family, whatever tokenizer_config.json says; ids must not depend on it."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    spec = importlib.util.spec_from_file_location("prepare_hybrid_tiny", PREPARE)
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    text = "The quick brown fox jumps over 12 lazy dogs.\n\ndef f(x):\n    return x**2  # ümläut 你好\n" * 20
    prepare.save_tokenizer(prepare.train_tokenizer(iter([text])), tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    plain, loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), AutoTokenizer.from_pretrained(tmp_path)
    hard = "<|im_start|>user\nIt's 1234567 o'clock —  tabs\t\tand\r\n\r\n  blanks, naïve 😀<|im_end|>\n"
    for sample in (text, hard):
        ids = plain.encode(sample).ids
        assert loaded.encode(sample) == ids and plain.decode(ids, skip_special_tokens=False) == sample
    assert [plain.token_to_id(name) for name in prepare.SPECIALS] == [0, 1, 2, 3]
    assert loaded.eos_token_id == prepare.END_OF_TURN and loaded.pad_token_id == prepare.END_OF_TEXT
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    rendered = loaded.apply_chat_template(chat, tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    opened = loaded.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert rendered.startswith(opened) and opened.endswith("<|im_start|>assistant\n")
