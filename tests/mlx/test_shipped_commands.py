"""`doctor`, `generate`, `cache-prompt` and `chat` with `--backend mlx` on the pairs that come with dspine, on the CPU."""

from __future__ import annotations

import io
import json
import sys

import pytest
from mlx.utils import tree_flatten

from dspine.common.cli import main as cli
from dspine.common.errors import DSpineError
from dspine.common.models import find_draft, resolve_model
from dspine_mlx.runtime import RUNTIME

PROMPT, REST, COUNT = "The list holds apples and", " pears and", 8


@pytest.fixture
def dspine(monkeypatch, capsys):
    def run(command, *arguments, lines=()):
        monkeypatch.setattr(sys, "argv", ["dspine", command, "--backend", "mlx", "--device", "cpu", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode())))
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        captured = capsys.readouterr()
        assert not leaving.value.code, captured.err
        return captured.out, captured.err

    return run


def assert_planned(planned, name):
    """Weights of both models as the plan counted them, on the CPU: experts in float32, the drafter unpacked."""
    target = RUNTIME.load_target(resolve_model(name), device="cpu")
    assert 0.99 < sum(array.nbytes for _, array in tree_flatten(target.model.parameters())) / planned["weights"] < 1.01
    drafter = RUNTIME.load_drafter(find_draft("auto", name)[0], target)
    held = [*(array for _, array in tree_flatten(drafter.model.parameters())), drafter.model.transfer_codes]
    assert sum(array.nbytes for array in held) == planned["drafter"]


@pytest.mark.parametrize("name", [pytest.param("smollm2", marks=pytest.mark.slow), "hybrid-tiny"])
def test_every_command_runs_on(name, dspine, tmp_path):
    try:
        resolve_model(name)
    except DSpineError as error:
        pytest.skip(str(error))
    model = ("--model", name)
    checked = json.loads(dspine("doctor", *model, "--json")[0])
    assert checked["problems"] == []
    assert_planned(checked["pair"]["plan"]["bytes"], name)
    options = (*model, "--raw", "--max-tokens", COUNT, "--ignore-eos", "--json")
    whole = json.loads(dspine("generate", *options, "--compare", "--prompt", PROMPT + REST)[0].splitlines()[-1])
    assert len(whole["token_ids"]) == COUNT and whole["drafter"] and whole["rounds"] < COUNT
    file = tmp_path / "prompt.safetensors"
    dspine("cache-prompt", *model, "--raw", "--prompt", PROMPT, "--prompt-cache-file", file)
    rest = json.loads(dspine("generate", *options, "--prompt", REST, "--prompt-cache-file", file)[0].splitlines()[-1])
    assert rest["token_ids"] == whole["token_ids"] and rest["cached_tokens"] > 0
    said, notes = dspine(
        "chat", *model, "--max-tokens", COUNT, lines=("Name a colour.", "/stats", "And another one.", "/stats")
    )
    kept = [line for line in (said + notes).splitlines() if "kept from before" in line]
    assert len(kept) == 2 and " 0 of them kept" in kept[0] and " 0 of them kept" not in kept[1]
