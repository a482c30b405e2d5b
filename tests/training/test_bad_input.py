"""What the issue names: empty and short conversations, nothing supervised, damaged files, full disks, interruption anywhere."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dspine.common.errors import DSpineError
from dspine.common.files import write_json, write_whole
from dspine_cuda.training import loop
from dspine_cuda.training.cli import main
from dspine_cuda.training.config import parse_train_config
from dspine_cuda.training.data import load_conversations
from dspine_cuda.training.loop import Trainer, train
from tests.training.test_loop import losses, run_of
from tests.training.toys import write_shards, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return write_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture
def place(tmp_path: Path, target: Path) -> Path:
    (tmp_path / "target").symlink_to(target)
    write_shards(tmp_path / "data")
    return tmp_path


def shard(place: Path, **changes: object) -> Path:
    path = place / "data/toy_1.npz"
    np.savez(path, **dict(np.load(path)) | {name: np.asarray(value) for name, value in changes.items()})
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [-1], "tokens": []}, "lengths must be flat lists, lengths 0 or more"),
        ({"prompt_lengths": [-3] * 40}, "prompt_lengths must be a flat list"),
        ({"tokens": [[1, 2], [3, 4]]}, "tokens and lengths must be flat lists"),
        ({"lengths": 5}, "tokens and lengths must be flat lists"),
        ({"tokens": [1.5, 2.5], "lengths": [2]}, "tokens must be a flat list of whole numbers"),
        ({"tokens": [3, 4]}, r"lengths add up to \d+ tokens, the shard holds 2"),
        ({"prompt_lengths": [2] * 39}, "40 lengths, but 39 prompt_lengths and 40 marks"),
        ({"greedy": [True]}, "40 lengths, but 40 prompt_lengths and 1 marks of greedy answers"),
    ],
)
def test_shards_that_do_not_fit_together_are_named(place: Path, changes: dict, message: str) -> None:
    shard(place, **changes)
    with pytest.raises(DSpineError, match=f"toy_1.npz: .*{message}"):
        load_conversations(place / "data")


def test_damaged_bytes_never_end_in_another_error(place: Path) -> None:
    """Cut anywhere, bytes changed anywhere: read, or one line."""
    path = place / "data/toy_1.npz"
    with np.load(path) as arrays:
        np.savez_compressed(path, **dict(arrays))
    whole, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    cuts = [whole[:n] for n in (0, 1, 30, len(whole) // 2, len(whole) - 1)]
    for _ in range(60):
        changed = bytearray(whole)
        for place_of in rng.integers(0, len(whole), 3):
            changed[place_of] = int(rng.integers(256))
        cuts.append(bytes(changed))
    np.save(path.with_suffix(".npy"), np.arange(4))
    cuts.append(path.with_suffix(".npy").read_bytes())  # an array under the wrong name
    for content in cuts:
        path.write_bytes(content)
        try:
            load_conversations(path)
        except DSpineError as error:
            refused += 1
            assert "toy_1.npz" in str(error) and "\n" not in str(error)
    assert refused > 30


@pytest.mark.parametrize(
    ("lengths", "prompts"),
    [([0, 0], [0, 0]), ([1, 2], [0, 1]), ([5, 6], [5, 6]), ([60, 70], [48, 48])],
    ids=["empty", "too short", "nothing supervised", "answers behind the row's end"],
)
def test_conversations_that_teach_nothing(place: Path, lengths: list[int], prompts: list[int]) -> None:
    """Alone they are an error; among others they are left out."""
    np.savez(
        place / "data/toy_1.npz",
        tokens=np.arange(sum(lengths)) % 90,
        lengths=np.array(lengths),
        prompt_lengths=np.array(prompts),
    )
    assert Trainer(parse_train_config(run_of(place, "mixed", data={"holdout": 12}))).stream is not None
    (place / "data/toy_0.npz").unlink()
    with pytest.raises(DSpineError, match="no conversation has two supervised tokens in a row within 48 tokens"):
        Trainer(parse_train_config(run_of(place, "alone", data={"holdout": 0})))


def test_no_data_at_all(place: Path) -> None:
    np.savez(place / "data/toy_0.npz", tokens=np.zeros(0, int), lengths=np.zeros(0, int), prompt_lengths=np.zeros(0, int))
    (place / "data/toy_1.npz").unlink()
    with pytest.raises(DSpineError, match="data.holdout is 8, but there are only 0 conversations"):
        Trainer(parse_train_config(run_of(place, "run")))


@pytest.mark.parametrize("victim", ["write", "export"])
def test_a_full_disk_in_metrics_or_export_is_one_line(place: Path, monkeypatch, capsys, victim: str) -> None:
    """The command says it in one line; with room again the run ends as if nothing had been."""
    settings = run_of(place, "run", run={"checkpoint_every": 2}, schedule={"max_steps": 4, "replacement_layers": 1})
    path = place / "run.yaml"
    path.write_text(json.dumps(settings))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, victim, full)
        assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert "disk full while writing" in error and "--resume" in error and "Traceback" not in error
    assert main(["train", str(path), "--resume"]) == 0
    train(parse_train_config(run_of(place, "whole", schedule={"max_steps": 4, "replacement_layers": 1})))
    assert losses(place / "run")[-1] == losses(place / "whole")[-1]


def test_places_that_cannot_be_written_are_one_line(place: Path, tmp_path: Path) -> None:
    """A file where a folder should be, a limit of file sizes; devices are written, not replaced."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DSpineError, match="run.output_dir .*file: cannot be made a folder"):
        Trainer(parse_train_config(run_of(place, "file")))
    with pytest.raises(DSpineError, match="cannot write .*file/out.json: "):
        write_json(tmp_path / "file" / "out.json", {})
    with pytest.raises(DSpineError, match="cannot write .*: Is a directory"):
        write_json(tmp_path, {})

    def too_long(_: object) -> None:
        raise OSError(errno.EFBIG, "File too large")

    with pytest.raises(DSpineError, match="out.bin would be longer than .* raise the limit, and run it again"):
        write_whole(tmp_path / "out.bin", too_long, "run it again")
    assert not list(tmp_path.glob("*.part"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_json(pipe, [1])
    assert pipe.is_fifo() and json.loads(os.read(reader, 99)) == [1]
    os.close(reader)


@pytest.mark.parametrize("where", ["evaluate", "export", "save", "_update", "_cached_features"])
def test_an_interrupted_run_ends_with_the_same_losses(place: Path, monkeypatch, where: str) -> None:
    """Ctrl-C in the first call of each part; the resumed run is the whole one."""
    sections = {"run": {"checkpoint_every": 2, "eval_every": 2}, "schedule": {"max_steps": 5, "replacement_layers": 1}}
    settings = parse_train_config(run_of(place, "cut", **sections))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(settings)
    train(settings, resume=True)
    train(settings, resume=True)  # of a run that is over: its end is made again, not added
    train(parse_train_config(run_of(place, "whole", **sections)))
    assert losses(place / "cut") == losses(place / "whole")
    texts = [(place / name / "metrics.jsonl").read_text().splitlines() for name in ("cut", "whole")]
    lines = [[(row["kind"], row["step"]) for row in map(json.loads, text)] for text in texts]
    assert lines[0] == lines[1]
    states = [torch.load(place / f"{n}/checkpoints/step-00000005.pt", weights_only=True)["optimizer"] for n in ("cut", "whole")]
    for name, master in states[1]["masters"].items():
        torch.testing.assert_close(states[0]["masters"][name], master, rtol=0, atol=0)
    weights = [(place / name / "drafter/model.safetensors").read_bytes() for name in ("cut", "whole")]
    assert weights[0] == weights[1]


def test_what_cannot_be_evaluated_is_told_before_training(place: Path, monkeypatch) -> None:
    """And where the evaluation at the end fails after all, the drafter is there."""
    with pytest.raises(DSpineError, match="no held-out conversation has an answer longer than a block of 39 proposals"):
        Trainer(parse_train_config(run_of(place, "long", model={"block_size": 40})))
    assert not (place / "long").exists()
    schedule = {"max_steps": 2, "replacement_layers": 1}
    settings = parse_train_config(run_of(place, "run", schedule=schedule))

    def failing(*_: object, **__: object) -> None:
        raise DSpineError("no anchor fell into a held-out answer")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "simulated_acceptance", failing)
        with pytest.raises(DSpineError, match="no anchor"):
            train(settings)
    assert (place / "run/drafter/model.safetensors").is_file()
    assert train(settings, resume=True)["acceptance"]["rounds"] > 0
    assert train(parse_train_config(run_of(place, "none", schedule=schedule, data={"holdout": 0})))["acceptance"] is None


def test_the_clocks_probe_may_be_interrupted(place: Path, monkeypatch) -> None:
    monkeypatch.setattr(loop, "WARM_STEPS", 1)
    monkeypatch.setattr(loop, "TIMED_STEPS", 1)
    settings = parse_train_config(run_of(place, "run", schedule={"max_steps": 3, "max_minutes": 5.0, "replacement_layers": 1}))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_wait_for_device", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(settings)
    assert train(settings, resume=True)["steps"] == 3


@pytest.mark.parametrize("arguments", [["trian"], ["eval", "--temperatures", "0"], []])
def test_misspelt_commands_and_options_are_messages(arguments, capfd):
    assert main(arguments) == 2
    assert "Traceback" not in (told := capfd.readouterr().err) and ("Usage" in told or not arguments)
    assert main(["--help"]) == 0
