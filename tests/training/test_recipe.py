"""`dspine train data`: prompts and answers, the same after any interruption; what is wrong is one clear line."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import numpy as np
import pytest

from dspine.common.errors import DSpineError
from dspine_cuda.training import files
from dspine_cuda.training.cli import main
from dspine_cuda.training.data import load_conversations
from dspine_cuda.training.formats import read_rows
from dspine_cuda.training.loops import cut_loop
from dspine_cuda.training.prompts import Distinct, read_prompts, user_turn
from dspine_cuda.training.recipe import Recipe, RecipeSettings
from tests.training.toys import VOCAB, write_target, write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tokenizer(write_target(tmp_path_factory.mktemp("target")))


def prompt_file(path: Path, count: int = 20, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    texts = [" ".join(f"w{i}" for i in rng.integers(7, VOCAB, 6)) for _ in range(count)]
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in texts))
    return path


def settings_of(model: Path, tmp_path: Path, /, **changes) -> RecipeSettings:
    facts = {
        "model": str(model), "prompts": (str(prompt_file(tmp_path / "prompts.jsonl")),), "self_prompts": 6, "shard_size": 8,
        "max_prompt_tokens": 24, "max_tokens": 20, "seed": 3,
    }  # fmt: skip
    return RecipeSettings(**(facts | changes))


def recipe(model: Path, tmp_path: Path, name: str, /, **changes) -> Recipe:
    return Recipe(
        settings_of(model, tmp_path, **changes), tmp_path / name, device="cpu", dtype="float32", batch=32, progress=False
    )


def contents(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    return {path.name: dict(np.load(path)) for path in sorted(folder.glob("*.npz"))}


def test_an_interrupted_run_ends_with_the_same_shards(model: Path, tmp_path: Path, monkeypatch) -> None:
    report = recipe(model, tmp_path, "whole").run()
    whole = contents(tmp_path / "whole")
    assert len(whole) == 4 and report["prompts"] == 26 and report["conversations"] >= 20
    conversations = load_conversations(tmp_path / "whole")
    assert all(c.supervised[c.prompt_length :].all() and c.tokens[0] == 3 for c in conversations)
    assert 0 < sum(c.greedy for c in conversations) < len(conversations)
    written = []

    def interrupted(path, rows, vocab):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(files.write_shard(path, rows, vocab))

    with monkeypatch.context() as patch:
        patch.setattr("dspine_cuda.training.recipe.write_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            recipe(model, tmp_path, "cut").run()
    assert len(contents(tmp_path / "cut")) == 2
    resumed = recipe(model, tmp_path, "cut").run()
    assert 0 < resumed["made_now"]["conversations"] < resumed["conversations"] == report["conversations"]
    for name, arrays in contents(tmp_path / "cut").items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, whole[name][key])
    assert recipe(model, tmp_path, "cut").run()["made_now"]["conversations"] == 0
    with pytest.raises(DSpineError, match=r"begun with other settings \(seed: 3 there, 4 now\)"):
        recipe(model, tmp_path, "cut", seed=4)
    changed = recipe(model, tmp_path, "cut")
    prompt_file(tmp_path / "prompts.jsonl", seed=8)  # the same path, other prompts: their numbers belong to others
    with pytest.raises(DSpineError, match="cut: the prompts are not those that it was begun with"):
        changed.run()


def test_the_target_writes_its_own_prompts(model: Path, tmp_path: Path) -> None:
    made = recipe(model, tmp_path, "own", prompts=(), self_prompts=5)
    prompts = made.collect_prompts()
    assert len(prompts) == len(set(prompts)) == 5
    assert all(len(text.split()) >= 3 and "<|im" not in text for text in prompts)
    turn = user_turn(made.tokenizer)
    assert turn.opening.tolist() == [3, 4] and turn.ends == {2}
    assert prompts == recipe(model, tmp_path, "again", prompts=(), self_prompts=5).collect_prompts()


def test_prompts_opened_with_the_first_words_of_a_file(model: Path, tmp_path: Path) -> None:
    """Every opened turn begins as an example does, no longer than half of it; the others begin as the target likes."""
    made = recipe(model, tmp_path, "opened", self_prompts=5, opened_share=1.0)
    examples = [p.turns[0] for p in read_prompts(tmp_path / "prompts.jsonl")]
    starts = made._first_words(0, 200, examples, 8)
    texts = [made.tokenizer.decode(start.tolist()).strip() for start in starts]
    assert {len(text.split()) for text in texts} == {3} and len(set(texts)) > 5  # examples have six words
    assert all(any(example.startswith(text) for example in examples) for text in texts)
    assert all(len(start) <= 2 for start in made._first_words(0, 50, examples, 2))
    assert not any(map(len, recipe(model, tmp_path, "none", self_prompts=5)._first_words(0, 50, examples, 8)))
    prompts = made.collect_prompts()
    own = [text for text in prompts if text not in examples]
    assert len(own) == 5 and all(any(text.startswith(start) for start in set(texts)) for text in own)
    assert recipe(model, tmp_path, "opened", self_prompts=5, opened_share=1.0).collect_prompts() == prompts
    with pytest.raises(DSpineError, match="--opened-share takes first words"):
        recipe(model, tmp_path, "bad", self_prompts=0, opened_share=0.5)
    with pytest.raises(DSpineError, match=r"--opened-share must be 0..1"):
        recipe(model, tmp_path, "bad2", opened_share=1.5)


def test_a_folder_of_an_older_version_goes_on(model: Path, tmp_path: Path) -> None:
    recipe(model, tmp_path, "old", self_prompts=0).run()
    path = tmp_path / "old" / "recipe.json"
    stored = json.loads(path.read_text())
    assert stored.pop("opened_share") == 0.0
    path.write_text(json.dumps(stored))
    recipe(model, tmp_path, "old", self_prompts=0)
    with pytest.raises(DSpineError, match=r"opened_share: 0.0 there, 0.5 now"):
        recipe(model, tmp_path, "old", opened_share=0.5)


def test_a_full_disk_is_one_line_and_leaves_no_half_file(model: Path, tmp_path: Path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("numpy.savez_compressed", full)
        with pytest.raises(DSpineError, match="disk full while writing .*data_00000.npz .*run the same command again"):
            recipe(model, tmp_path, "full", self_prompts=0).run()
    assert not list((tmp_path / "full").glob("*.npz*"))
    assert recipe(model, tmp_path, "full", self_prompts=0).run()["conversations"] > 10


def test_bad_input_is_named(model: Path, tmp_path: Path) -> None:
    bare = write_tokenizer(write_target(tmp_path / "bare"), template=None)
    with pytest.raises(DSpineError, match="no chat template, so it cannot write prompts itself: give a file of prompts"):
        recipe(bare, tmp_path, "a").run()
    assert recipe(bare, tmp_path, "b", self_prompts=0).run()["conversations"] > 10  # prompts go in as they are
    with pytest.raises(DSpineError, match="no prompts: give a file with --prompts"):
        recipe(model, tmp_path, "c", prompts=(), self_prompts=0)
    with pytest.raises(DSpineError, match="no prompt is left: all 20 are longer than --max-prompt-tokens 8"):
        recipe(model, tmp_path, "d", self_prompts=0, max_prompt_tokens=8).run()
    with pytest.raises(DSpineError, match=r"--greedy-share must be 0..1"):
        recipe(model, tmp_path, "e", greedy_share=1.5)
    (tmp_path / "f").mkdir()
    np.savez(tmp_path / "f" / "other.npz", tokens=np.zeros(1))
    with pytest.raises(DSpineError, match="holds npz files but no recipe.json"):
        recipe(model, tmp_path, "f")
    path = tmp_path / "bad.jsonl"
    for text, message in (
        ('{"messages": []}', "bad.jsonl:1: no user turn with text"),
        ('{"messages": [{"role": "user"}]}', "message 0 has no text content, but NoneType"),
        ("[1]", "expected a string, or an object"),
        ("{", "bad.jsonl:1: not valid JSON"),
        ("", "no prompts in the file"),
    ):
        path.write_text(text)
        with pytest.raises(DSpineError, match=message):
            read_prompts(path)


def test_mistakes_put_right_need_no_other_folder(model: Path, tmp_path: Path) -> None:
    """A folder is claimed when all that settings can fail at is known good, and before anything else is written there."""
    bare = write_tokenizer(write_target(tmp_path / "bare"), template=None)
    bad, folder = tmp_path / "bad.jsonl", tmp_path / "out"
    bad.write_text("{")
    for changes, message in (
        ({"model": str(tmp_path / "absent")}, "absent"),
        ({"model": str(bare)}, "no chat template"),
        ({"prompts": (str(tmp_path / "none.jsonl"),)}, "cannot read the prompts"),
        ({"exclude": (str(bad),)}, "not valid JSON"),
        ({"max_prompt_tokens": 8, "self_prompts": 0}, "longer than --max-prompt-tokens"),
        ({"max_tokens": 300}, "lower them"),
        ({"max_tokens": 300, "self_prompts": 0}, "lower them"),
    ):
        with pytest.raises(DSpineError, match=message):
            recipe(model, tmp_path, "out", **changes).run()
        assert not folder.exists(), changes
    made, seen = recipe(model, tmp_path, "out"), []
    generate = made._generator

    def watched(*arguments):
        seen.append(sorted(path.name for path in folder.iterdir()))
        return generate(*arguments)

    made._generator = watched
    assert made.run()["conversations"] > 10
    assert "recipe.json" in seen[-1] and "prompts.json" in seen[-1]
    (tmp_path / "file").touch()
    with pytest.raises(DSpineError, match="file is no folder"):
        recipe(model, tmp_path, "file")


def test_why_no_prompt_is_left(model: Path, tmp_path: Path) -> None:
    same = (str(prompt_file(tmp_path / "prompts.jsonl")),)
    with pytest.raises(DSpineError, match="no prompt is left: all 20 of --prompts are, or share text with, those of --exclude"):
        recipe(model, tmp_path, "a", self_prompts=0, exclude=same).run()
    (tmp_path / "marks.txt").write_text("?\n!\n")
    with pytest.raises(DSpineError, match="no prompt is left: all 2 of --prompts are without a word"):
        recipe(model, tmp_path, "b", self_prompts=0, prompts=(str(tmp_path / "marks.txt"),)).run()


@pytest.mark.parametrize(("wanted", "size"), [(3, 64), (50, 100)])
def test_a_target_that_repeats_itself_is_given_up(model: Path, tmp_path: Path, monkeypatch, wanted: int, size: int) -> None:
    made = recipe(model, tmp_path, "own", prompts=(), self_prompts=wanted)
    monkeypatch.setattr(made, "_round", lambda *_: ["always the same words"])
    told = rf"only 1 distinct prompts in 4 rounds of {size}; .* or raise --prompt-temperature, either in another folder"
    with pytest.raises(DSpineError, match=told):
        made.run()


def test_progress_within_a_round_and_over_the_answers(model: Path, tmp_path: Path, capsys) -> None:
    made = recipe(model, tmp_path, "shown")
    made.progress = True
    made.run()
    lines = capsys.readouterr().err.splitlines()
    assert any("round 1: texts 64/64  0 of 6 prompts" in line for line in lines)
    assert any(line.startswith("answers 26/26") and "tokens/s" in line for line in lines) and len(lines) < 130


def test_an_interruption_within_a_round_of_prompts(model: Path, tmp_path: Path, monkeypatch) -> None:
    whole = recipe(model, tmp_path, "whole", prompts=()).collect_prompts()
    cut = recipe(model, tmp_path, "cut", prompts=())
    with monkeypatch.context() as patch:
        patch.setattr("dspine_cuda.training.recipe.write_jsonl", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            cut.run()
    assert not list((tmp_path / "cut").glob("**/round*")) and recipe(model, tmp_path, "cut", prompts=()).run()["prompts"] == 6
    assert recipe(model, tmp_path, "cut", prompts=()).collect_prompts() == whole


def test_evaluation_prompts_are_left_out_and_loops_cut(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, tmp_path, self_prompts=0)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
    made = recipe(model, tmp_path, "out", self_prompts=0, exclude=(str(tmp_path / "eval.jsonl"),), max_tokens=120)
    prompts = made.collect_prompts()
    barred = {row["messages"][0]["content"] for row in rows[:5]}
    assert len(prompts) == 15 and barred.isdisjoint(prompts) and settings.exclude == ()
    made.run()
    answers = [c.tokens[c.prompt_length :] for c in load_conversations(tmp_path / "out")]
    assert all((end := cut_loop(answer)) is None or end >= len(answer) for answer in answers)


@pytest.mark.parametrize("name", ["recipe.json", "prompts/round_00000.jsonl", "data_00000.npz"])
def test_a_damaged_file_of_a_run_is_named(model: Path, tmp_path: Path, name: str) -> None:
    recipe(model, tmp_path, "run").run()
    path = tmp_path / "run" / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DSpineError, match=f"{Path(name).name}.*delete it"):
        recipe(model, tmp_path, "run").run()
    path.unlink()
    assert recipe(model, tmp_path, "run").run()["conversations"] >= 20 if name != "recipe.json" else True


def test_prompt_shapes_and_copies(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    rows = [
        "one",
        {"prompt": "two"},
        {"turns": ["three", "more"], "id": "t"},
        {"conversations": [{"from": "system", "value": "be kind"}, {"from": "human", "value": "four"}]},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    prompts = read_prompts(path)
    assert [p.turns[0] for p in prompts] == ["one", "two", "three", "four"]
    assert prompts[2].messages(["a"])[-1] == {"role": "user", "content": "more"} and prompts[3].system == "be kind"
    assert len(read_prompts(path, 2)) == 2
    (tmp_path / "plain.txt").write_text("one\n\ntwo\n")
    assert [p.turns for p in read_prompts(tmp_path / "plain.txt")] == [("one",), ("two",)]
    evaluation = " ".join(f"e{i}" for i in range(20))
    distinct = Distinct([evaluation, "What is it?"])
    long = " ".join(f"a{i}" for i in range(20))
    assert distinct.add(long) and not distinct.add(long.upper() + " !")
    assert not distinct.add("please " + long) and distinct.add(" ".join(f"b{i}" for i in range(20)))
    assert not distinct.add("Answer this: " + " ".join(f"e{i}" for i in range(3, 17))) and not distinct.add("what is IT")


def test_line_separators_inside_a_string_end_no_row(tmp_path: Path) -> None:
    """U+2028, U+0085 and form feeds may stand in a JSON string as they are; only a newline ends a row."""
    text = "one\u2028two\u0085three\x1cfour"
    rows = [{"prompt": text}, {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "w7"}]}]
    path = files.write_jsonl(tmp_path / "odd.jsonl", rows)
    assert [p.turns for p in read_prompts(path)] == [(text,), (text,)]
    assert [row for _, row in read_rows(path)] == rows
    (tmp_path / "odd.jsonl").write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert len(read_prompts(path)) == 2


def test_the_command(model: Path, tmp_path: Path, capsys) -> None:
    arguments = [
        "train",
        "data",
        str(tmp_path / "out"),
        "--model",
        str(model),
        "--prompts",
        str(prompt_file(tmp_path / "p.jsonl")),
    ]
    arguments += ["--max-tokens", "8", "--max-prompt-tokens", "24", "--device", "cpu", "--dtype", "float32", "--no-progress"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["conversations"] > 10
    export = ["train", "export-data", str(tmp_path / "out"), str(tmp_path / "rows.jsonl"), "--model", str(model)]
    assert main(export) == 0
    same = load_conversations(tmp_path / "rows.jsonl")
    for ours, theirs in zip(load_conversations(tmp_path / "out"), same, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.supervised, theirs.supervised)
    assert main([*arguments, "--max-tokens", "300"]) == 2
    assert "begun with other settings (max_tokens: 8 there, 300 now)" in capsys.readouterr().err
    arguments[2] = str(tmp_path / "long")
    assert main([*arguments, "--max-tokens", "300"]) == 2
    assert "sequences of 324 tokens, but the target's context holds 256: lower them" in capsys.readouterr().err
    assert main(["train", "data", str(tmp_path / "x"), "--model", str(model)]) == 2
    assert "no prompts: give a file" in capsys.readouterr().err
