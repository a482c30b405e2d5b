"""`generate`, `chat`, `cache-prompt` and `doctor` with `--backend mlx`, on folders."""

from __future__ import annotations

import io
import json
import re
import sys
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspine.common import memory
from dspine.common.cli import main as cli
from dspine.common.cli.chat import Chat
from dspine.common.cli.generate import build_engine, build_request, with_policy
from dspine.common.cli.options import GenerateOptions
from dspine.common.generation import generate
from tests.helpers.drafters import Prompted
from tests.mlx.toys import VOCAB, drafter_folder, save_model, toy_model

TEMPLATE = (
    "{% for m in messages %}{{ (' w90 ' if m.role == 'user' else ' w91 ') + m.content }}{% endfor %}"
    "{% if add_generation_prompt %} w91 {% endif %}"
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target of one word a token, and its drafter."""
    base = tmp_path_factory.mktemp("commands")
    model, config = toy_model("qwen3", seed=1, head_dim=64)
    target = save_model(base / "target", model, config)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", unk_token="w0")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(target)
    return target, drafter_folder(base / "drafter", "dspine", 5, np.array(model.lm_head.weight))


@pytest.fixture
def dspine(folders, monkeypatch, capsys):
    def run(command, *arguments, lines=()):
        pair = ["--model", folders[0], "--draft-model", folders[1], "--backend", "mlx"]
        monkeypatch.setattr(sys, "argv", ["dspine", command, *map(str, [*pair, *arguments])])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode())))
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return run


def report(run):
    assert run.code == 0, run.err
    return json.loads(run.out.splitlines()[-1])


LENGTH = ("--max-tokens", "12", "--ignore-eos")


@pytest.mark.parametrize("raw", [("--raw",), ()])
def test_a_cached_prompt_goes_on(dspine, tmp_path, raw):
    file = tmp_path / "prompt.safetensors"
    made = report(dspine("cache-prompt", *raw, "--json", "--prompt", "w5 w6 w7 w8", "--prompt-cache-file", file))
    assert made["tokens"] == (4 if raw else 5) and made["bytes"] == file.stat().st_size
    whole = report(dspine("generate", *raw, *LENGTH, "--json", "--prompt", "w5 w6 w7 w8 w9 w10"))
    for _ in range(2):
        rest = report(dspine("generate", *raw, *LENGTH, "--json", "--prompt", " w9 w10", "--prompt-cache-file", file))
        assert rest["token_ids"] == whole["token_ids"] and rest["cached_tokens"] == made["tokens"]
        assert whole["cached_tokens"] == 0 and rest["prompt_tokens"] == whole["prompt_tokens"]


def test_a_chat_goes_on_from_its_caches_and_from_a_file(dspine, tmp_path):
    file = tmp_path / "prompt.safetensors"
    assert dspine("cache-prompt", "--prompt", "w5 w6 w7 w8", "--prompt-cache-file", file).code == 0
    plain = dspine("chat", *LENGTH, lines=["w5 w6 w7 w8 w9", "w20", "/stats"])
    cached = dspine("chat", *LENGTH, "--prompt-cache-file", file, lines=[" w9", "w20", "/stats"])
    assert plain.code == cached.code == 0 and len(plain.out.split()) == 24
    assert cached.out == plain.out
    kept = [int(re.search(r"(\d+) of them kept", run.err)[1]) for run in (plain, cached)]
    assert kept[0] > 0 and kept[1] == kept[0] + 5, kept


def test_a_stopped_answer_is_gone_on_from(folders):
    """Ctrl-C in the middle of a round's tokens: what is shown is what the caches hold, so the next message reuses all of it."""
    options = GenerateOptions(
        prompt="chat", model=str(folders[0]), draft_model=str(folders[1]), backend="mlx", max_tokens=40, ignore_eos=True
    )
    request, engine = build_request(options), build_engine(options)
    ids = [90, 5, 6, 7, 91]
    text = generate(engine, ids, draft=False, max_tokens=60, ignore_eos=True).token_ids
    engine.drafter = Prompted(engine.drafter, ids, text, wrong_every=9)  # rounds of several tokens
    shown: list[str] = []
    chat = Chat(engine, with_policy(request, engine, options), write=shown.append)
    reply = chat.answer("w5 w6 w7", stop=lambda: len(shown) > 7)
    assert 8 < len(reply.split()) < 40 and reply.split() == [f"w{token}" for token in text[: len(reply.split())]]
    held = len(chat.session.tokens)
    chat.answer("w20", stop=lambda: True)
    assert chat.totals.cached_tokens == held == len(ids) + len(reply.split()) - 1


def test_flags_that_do_not_go_together(dspine, tmp_path):
    file = tmp_path / "raw.safetensors"
    assert dspine("cache-prompt", "--raw", "--prompt", "w5 w6", "--prompt-cache-file", file).code == 0
    with_file = ("--prompt", "w9", "--prompt-cache-file", file)
    cases = [
        (("chat", "--prompt-cache-file", file), "holds raw text"),
        (("generate", *with_file, "--compare"), "--compare reads the prompt twice"),
        (("generate", *with_file, "--kv-bits", "8"), "was made with other settings: kv_bits None there, 8 here"),
        (("generate", *with_file, "--system-prompt", "x"), "another system prompt"),
        (("generate", "--prompt", "w9", "--prompt-cache-file", tmp_path / "no"), "does not exist"),
        (("generate", "--prompt", "w9", "--kv-bits", "5"), "kv_bits must be 4 or 8, got 5"),
        (
            ("generate", "--prompt", "w9", "--kv-bits", "8", "--kv-group-size", "128"),
            "multiple of kv_group_size 128, they have 64",
        ),
        (("generate", "--prompt", "w9", "--max-kv-size", "3"), "at least 8 tokens, got 3"),
        (("cache-prompt", "--prompt", "w9", "--prompt-cache-file", tmp_path / "none" / "x"), "does not exist: make it first"),
        (("generate", "--prompt", "w9", "--prefill-step-size", "0"), "prefill_chunk must be at least 1, got 0"),
    ]
    for arguments, message in cases:
        run = dspine(*arguments)
        assert run.code == 2 and message in run.err.splitlines()[-1] and "Traceback" not in run.err, (arguments, run.err)
    chat = tmp_path / "chat.safetensors"
    assert dspine("cache-prompt", "--prompt", "w5 w6", "--prompt-cache-file", chat).code == 0
    run = dspine("generate", "--prompt", "w9", "--prompt-cache-file", chat, "--raw")
    assert run.code == 2 and "holds a chat prompt" in run.err


def test_prompt_files_are_asked_about_before_a_model_is_loaded(dspine, tmp_path):
    """No memory plan, so no loading: the message is all there is."""
    for arguments, message in (
        (("generate", "--prompt", "w9", "--prompt-cache-file", tmp_path / "absent"), "does not exist: make one with"),
        (("chat", "--prompt-cache-file", tmp_path), "is no file: make one with"),
        (("cache-prompt", "--prompt", "w9", "--prompt-cache-file", tmp_path), "is a folder: name a file in it"),
        (("cache-prompt", "--prompt", "w9", "--prompt-cache-file", tmp_path / "no" / "x"), "does not exist: make it first"),
        (("cache-prompt", "--prompt", " ", "--prompt-cache-file", tmp_path / "x"), "prompt is empty"),
        (
            ("generate", "--prompt", "w9", "--compare", "--prompt-cache-file", tmp_path / "x"),
            "--compare reads the prompt twice",
        ),
    ):
        run = dspine(*arguments)
        assert run.code == 2 and message in run.err and run.err.count("\n") == 1, run.err


def test_quantised_and_limited_caches_run(dspine):
    eight = report(dspine("generate", *LENGTH, "--json", "--prompt", "w5 w6 w7", "--kv-bits", "8"))
    assert len(eight["token_ids"]) == 12
    limited = ("--prompt", " ".join(f"w{i}" for i in range(3, 40)), "--max-kv-size", "16", "--prefill-step-size", "8")
    assert len(report(dspine("generate", *LENGTH, "--json", *limited))["token_ids"]) == 12


def test_the_plan_comes_before_loading_and_can_refuse(dspine, monkeypatch):
    run = dspine("generate", *LENGTH, "--prompt", "w5")
    assert run.code == 0 and "memory: weights" in run.err.splitlines()[0]
    monkeypatch.setattr(memory, "host_memory", lambda: memory.DeviceMemory(1000, 1000, "a toy machine"))
    run = dspine("generate", *LENGTH, "--prompt", "w5")
    flat = " ".join(run.err.split())
    assert run.code == 2 and "does not fit: weights" in flat and "0.00 GiB are usable (a toy machine)" in flat


def test_the_peak_of_mlx_is_reported(dspine):
    """The process's size is not what Metal holds."""
    found = report(dspine("generate", *LENGTH, "--json", "--prompt", "w5 w6"))
    assert 0 < found["peak_device_memory_bytes"] <= mx.get_peak_memory() and found["peak_memory_bytes"] > 0
    for run in (dspine("generate", *LENGTH, "--prompt", "w5 w6"), dspine("chat", *LENGTH, lines=["w5", "/stats"])):
        assert re.search(r"MiB at the peak; \d+ MiB held by mlx", " ".join(run.err.split()))


def test_the_plan_counts_a_prompt_cache(dspine, tmp_path):
    file = tmp_path / "prompt.safetensors"
    assert dspine("cache-prompt", "--raw", "--prompt", "w5 w6 w7 w8", "--prompt-cache-file", file).code == 0
    planned = [
        int(re.search(r"GiB for (\d+) tokens", " ".join(dspine("generate", *LENGTH, "--prompt", "w9", *flags).err.split()))[1])
        for flags in ((), ("--prompt-cache-file", file))
    ]
    assert planned[1] == planned[0] + 4
    damaged = tmp_path / "damaged"
    for content in (b"", b"\xff" * 40, b"\x02\0\0\0\0\0\0\0{}"):
        damaged.write_bytes(content)
        run = dspine("generate", "--prompt", "w9", "--prompt-cache-file", damaged)
        assert run.code == 2 and "is no prompt cache" in run.err and "Traceback" not in run.err


def test_doctor_on_this_pair(dspine):
    run = dspine("doctor", "--json")
    found = json.loads(run.out)
    assert run.code == 0 and found["pair"]["matches"] and found["pair"]["fits"], found["problems"]
    rows = {row["operation"]: row for row in found["kernels"]}
    assert rows["gdn_verify"]["mlx-ops"] in ("fallback", "native") and "metal" in found["kernel_notes"]
    assert "small-row products" in found["kernel_notes"]
