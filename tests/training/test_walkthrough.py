"""The commands of `examples/train_your_own_drafter/README.md` as they stand there, on toy targets of two families."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from dspine.common.errors import DSpineError
from dspine_cuda.training.cli import main
from tests.training.test_recipe import prompt_file
from tests.training.toys import CARD, VOCAB, write_target, write_tokenizer

ROOT = Path(__file__).parents[2]
README = ROOT / "examples/train_your_own_drafter/README.md"
SMALL = [
    "model.num_layers=2", "model.transfer_rank=12", "model.message_size=8", f"model.mask_token_id={VOCAB - 1}",
    "schedule.max_steps=3", "run.device=cpu",
]  # fmt: skip


def commands(title: str) -> list[list[str]]:
    """The arguments behind `dspine` of every command in the first block under a heading that begins with `title`."""
    section = README.read_text(encoding="utf-8").partition(f"\n## {title}")[2].partition("\n## ")[0]
    block = re.search(r"```\n(.*?)```", section, re.S)
    assert block is not None, title
    lines = block[1].replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("dspine ")]


def for_toy(arguments: list[str], model: Path) -> list[str]:
    """The same call for the toy: its folder, sizes that fit it, the CPU."""
    config = "examples/train_your_own_drafter/drafter.yaml"
    arguments = [str(ROOT / config) if argument == config else argument for argument in arguments]
    if arguments[:2] == ["train", "data"] or arguments[0] == "eval":
        return [*arguments, "--model", str(model), "--device", "cpu", "--no-progress"]
    return [*arguments, f"model.target={model}", *SMALL]


def family(folder: Path, name: str) -> Path:
    if name == "llama":
        return write_tokenizer(write_target(folder))
    transformers = pytest.importorskip("transformers")
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    config = transformers.Qwen3Config(head_dim=8, max_position_embeddings=256, eos_token_id=2, **{k: CARD[k] for k in keys})
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return write_tokenizer(folder)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_the_commands_to_try_it_on_a_cpu(tmp_path: Path, monkeypatch, capsys, name: str) -> None:
    model = family(tmp_path / "model", name)
    monkeypatch.chdir(tmp_path)
    prompt_file(tmp_path / "prompts.jsonl", 14)
    steps = commands("Smaller, to try the way on a CPU")
    assert [step[0] for step in steps] == ["train", "train", "eval"]
    results = []
    for step in steps:
        assert main(for_toy(step, model)) == 0, capsys.readouterr().err
        results.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    made, trained, measured = results
    assert made["conversations"] == 14 and trained["steps"] == 3
    assert Path(trained["drafter"]) == Path("runs/try/run/drafter") and set(measured["temperatures"]) == {"0", "1"}
    assert measured["temperatures"]["0"]["sets"]["prompts"]["prompts"] == 4
    if name == "llama":  # and it is a drafter that generation takes
        from dspine.common.generation import generate, load
        from dspine.common.runtimes import choose_runtime

        runtime, reason = choose_runtime("torch")
        engine = load(runtime, str(model), trained["drafter"], device="cpu", dtype="float32", backend_reason=reason)
        plain = load(runtime, str(model), None, device="cpu", dtype="float32", backend_reason=reason)
        answers = [generate(e, [{"role": "user", "content": "w9 w10"}], max_tokens=12).token_ids for e in (engine, plain)]
        assert answers[0] == answers[1]


def test_every_option_that_the_walk_through_names_exists() -> None:
    """Settings in the text are settings of the trainer; options in commands are options of the commands."""
    from dspine_cuda.training.config import TrainConfig, load_train_config

    text = README.read_text(encoding="utf-8")
    for section, key in set(re.findall(r"`?\b(model|data|loss|schedule|optimizer|run)\.([a-z_]+)\b", text)):
        assert key in TrainConfig.model_fields[section].annotation.model_fields, f"{section}.{key}"
    settings = load_train_config(README.parent / "drafter.yaml", ["data.path=x", "run.output_dir=y"])
    assert settings.model.num_layers == 5 and settings.data.holdout == 500
    with pytest.raises(DSpineError, match="data.path is missing"):
        load_train_config(README.parent / "drafter.yaml", ["run.output_dir=y"])
