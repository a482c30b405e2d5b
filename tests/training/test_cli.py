"""`dspine train`, `eval` and `eval-draft` as commands: help as written, results that are not lost, Ctrl-C in one line."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest
import yaml

from dspine.common.errors import DSpineError
from dspine_cuda.training.cli import main
from tests.training.toys import train_settings

RESULT = {"temperatures": {}}


def test_help_shows_how_settings_are_overridden(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    for arguments in (["train", "--help"], ["--help"]):
        assert main(arguments) == 0
        shown = " ".join(re.sub(r"[^\x20-\x7e]", " ", capsys.readouterr().out).split())
        assert "`train CONFIG [section.key=value ...]`" in shown


@pytest.fixture
def evaluated(monkeypatch) -> list[object]:
    """`dspine eval` without its work; the settings that it was called with."""
    calls: list[object] = []
    monkeypatch.setattr("dspine_cuda.training.eval_command.evaluate", lambda settings: calls.append(settings) or RESULT)
    monkeypatch.setattr("dspine_cuda.training.eval_sets.table_text", lambda _: "table")
    return calls


def test_a_place_for_the_result_is_checked_before_the_work(tmp_path: Path, capsys, evaluated) -> None:
    (tmp_path / "file").write_text("kept")
    for place, message in (
        (tmp_path, "is a folder: name a file"),
        (tmp_path / "file" / "out.json", "--json: cannot write"),
        (tmp_path / ("a" * 300), "--json: cannot write"),
    ):
        assert main(["eval", "--prompts", "p.jsonl", "--json", str(place)]) == 2
        assert message in capsys.readouterr().err and not evaluated
    assert (tmp_path / "file").read_text() == "kept"
    for place in (tmp_path / "new" / "out.json", tmp_path / "file"):
        assert main(["eval", "--prompts", "p.jsonl", "--json", str(place)]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(place.read_text()) == RESULT
    assert main(["eval", "--prompts", "p.jsonl", "--json", "/dev/null"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new"]
    assert main(["eval", "--json", str(tmp_path / "none" / "out.json")]) == 2
    assert not (tmp_path / "none").exists()  # bad settings make no folder


def test_a_result_that_cannot_be_written_is_printed(tmp_path: Path, capsys, monkeypatch, evaluated) -> None:
    def full(*_: object) -> None:
        raise DSpineError("disk full") from OSError(errno.ENOSPC, "")

    monkeypatch.setattr("dspine.common.files.write_json", full)
    assert main(["eval", "--prompts", "p.jsonl", "--json", str(tmp_path / "out.json")]) == 2
    out = capsys.readouterr()
    assert json.loads(out.out) == RESULT and "disk full" in out.err


@pytest.mark.parametrize(
    ("arguments", "work", "told"),
    [
        (["train", "run.yaml"], "loop.train", "the same command with --resume goes on from the newest checkpoint in {run}"),
        (["train", "data", "out", "--self-prompts", "3"], "recipe.Recipe", "the same command goes on; finished files in out"),
        (
            ["train", "export-data", "in", "rows"],
            "data.export_specforge",
            "rows was not written; the same command begins again",
        ),
        (["eval-draft", "drafter", "--data", "in"], "evaluate.evaluate_folder", "the same command begins again"),
        (["eval", "--prompts", "p"], "eval_command.evaluate", "begins again (a --texts folder would keep finished answers)"),
        (["eval", "--prompts", "p", "--texts", "t"], "eval_command.evaluate", "(finished answers in t are kept)"),
    ],
)
def test_ctrl_c_says_how_to_go_on(tmp_path: Path, capsys, monkeypatch, arguments: list[str], work: str, told: str) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    settings = train_settings(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"dspine_cuda.training.{work}", interrupted)
    assert main(arguments) == 130
    out = capsys.readouterr()
    line = out.err.strip()
    assert out.out == "" and line.startswith("interrupted: ") and "\n" not in line
    assert told.format(run=settings["run"]["output_dir"]) in line
