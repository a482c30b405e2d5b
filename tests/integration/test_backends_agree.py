"""One pair of folders, two runtimes, one command: the same greedy text in float32, and transformers' own."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("mlx.core", reason="mlx is not installed")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspine.common.cli.main import main
from tests.helpers.drafters import KINDS, drafter_folder
from tests.helpers.models import VOCAB, greedy_reference, save_tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(target, folder of each kind of drafter, prompt ids, transformers' greedy text)."""
    root = tmp_path_factory.mktemp("pair")
    target = root / "target"
    model = save_tiny(target, "llama")
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w2").save_pretrained(target)
    head = model.lm_head.weight.detach().numpy().astype(np.float32)
    drafters = {kind: drafter_folder(root / kind, kind, 6, head, 5) for kind in KINDS}
    prompt = [5, 9, 33, 60]
    return target, drafters, prompt, greedy_reference(model, torch.tensor([prompt]), 48)


@pytest.mark.parametrize("kind", KINDS)
def test_same_greedy_text_on_both_backends(folders, kind, capsys, monkeypatch):
    """Every kind of drafter, from files on disk; both backends propose, accept and emit the same."""
    target, drafters, prompt, text = folders
    drafter = drafters[kind]
    reports = {}
    for backend in ("torch", "mlx"):
        arguments = [
            "generate",
            "--model",
            str(target),
            "--draft-model",
            str(drafter),
            "--prompt",
            " ".join(f"w{i}" for i in prompt),
        ]
        arguments += ["--raw", "--max-tokens", "48", "--dtype", "float32", "--backend", backend, "--ignore-eos", "--json"]
        arguments += ["--device", "cpu"]
        monkeypatch.setattr("sys.argv", ["dspine", *arguments])
        with pytest.raises(SystemExit) as leaving:
            main()
        assert leaving.value.code in (0, None)
        reports[backend] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert reports["torch"]["token_ids"] == reports["mlx"]["token_ids"] == text
    assert reports["torch"]["text"] == reports["mlx"]["text"]
    assert {backend: report["backend"] for backend, report in reports.items()} == {"torch": "torch", "mlx": "mlx"}
    assert reports["torch"]["rounds"] == reports["mlx"]["rounds"]
    assert reports["torch"]["acceptance_by_position"] == reports["mlx"]["acceptance_by_position"]
