"""The command line on a toy runtime: a random two-token language model and a drafter that knows most of its text."""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Raw

from dspine.common import runtimes
from dspine.common.cli import main as cli
from dspine.common.errors import CheckpointError
from dspine.common.protocols import Availability
from dspine.common.tokenizer import encode_prompt, load_tokenizer
from tests.helpers.toys import ToyDrafter, ToyTarget, oracle_drafter

PROMPT, CONTEXT = "ab cd", 64


@lru_cache(maxsize=4096)
def _row(previous: int, last: int, vocab: int) -> np.ndarray:
    row = np.random.default_rng((previous, last)).normal(size=vocab) * 3
    row[:2] = -30.0  # the special tokens never win by chance
    return row


def logits_of(vocab: int):
    return lambda context: _row(context[-2] if len(context) > 1 else 0, context[-1], vocab)


class ToyRuntime:
    """What an entry point of `dspine.runtimes` loads. A draft folder called `broken` cannot be loaded."""

    name = "toy"

    def availability(self) -> Availability:
        return Availability(True, "toys run everywhere", ("cpu",), "nothing to install")

    def accelerator(self, device: str) -> str:
        return ""

    def parity_backends(self) -> list:
        return []

    def load_target(self, folder: Path, *, device: str, dtype: str) -> ToyTarget:
        vocab = len(load_tokenizer(folder).backend)
        return ToyTarget(logits_of(vocab), vocab, context=CONTEXT)

    def load_drafter(self, folder: Path, target: ToyTarget) -> ToyDrafter:
        if folder.name == "broken":
            raise CheckpointError(f"{folder}: missing tensors: fc.weight")
        ids = encode_prompt(load_tokenizer(folder.parent / "model"), PROMPT, limit=CONTEXT)
        return oracle_drafter(target.logits_of, ids, 8, wrong_every=5)


class Point:
    """An entry point as `importlib.metadata` has it."""

    def __init__(self, name: str, loaded: object):
        self.name, self.loaded, self.module = name, loaded, "toys"

    def load(self) -> object:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Path:
    """A folder with `model`, `draft` and `broken`; the only runtimes are `toy` and `gone`, which lacks its framework."""
    points = {
        "toy": Point("toy", ToyRuntime()),
        "gone": Point("gone", ModuleNotFoundError("No module named 'gone_framework'", name="gone_framework")),
    }
    monkeypatch.setattr(runtimes, "_registered", lambda: points)
    raw = Raw(models.BPE({w: i for i, w in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    for name in ("model", "draft", "broken"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    raw.save(str(tmp_path / "model" / "tokenizer.json"))
    card = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(card))
    return tmp_path


@pytest.fixture
def dspine(monkeypatch, capsys):
    """Run the console script's function: `dspine("generate", ...)` -> code, out, err."""

    def run(*arguments: str) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["dspine", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return run
