"""Names into folders, and which runtime `auto` takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dspine.common import models, runtimes
from dspine.common.errors import BackendError, CheckpointError, DSpineError
from dspine.common.protocols import Availability
from tests.cli.conftest import Point


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_folder_is_taken_as_it_is(folder, monkeypatch):
    assert models.resolve_model(str(folder)) == folder
    assert models.find_draft(str(folder), "smollm2") == (folder, "named by --draft-model")
    monkeypatch.setenv("HOME", str(folder.parent))
    assert models.resolve_model(f"~/{folder.name}") == folder


def test_folders_that_are_no_models(tmp_path):
    with pytest.raises(CheckpointError, match="holds no config.json"):
        models.resolve_model(str(tmp_path))
    (tmp_path / "weights.gguf").write_text("")
    with pytest.raises(CheckpointError, match="is a file: expected 'smollm2', 'hybrid-tiny', a folder, or a hub id"):
        models.resolve_model(str(tmp_path / "weights.gguf"))


def test_hub_ids(folder, monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    asked = []

    def fetch(repo: str, allow_patterns: list[str]) -> str:
        asked.append((repo, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert models.resolve_model("owner/name") == folder
    assert asked[0][0] == "owner/name" and "*.safetensors" in asked[0][1] and "*.bin" not in asked[0][1]
    for error in (LocalEntryNotFoundError("no network\nsecond line"), HFValidationError("bad id"), ConnectionError("offline")):

        def fail(repo: str, allow_patterns: list[str], error: Exception = error) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(DSpineError, match=r"draft 'owner/name' is no folder here and could not be fetched") as raised:
            models.resolve_draft("owner/name", "smollm2")
        assert "\n" not in str(raised.value)


def test_shipped_pair(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "checkpoints_folder", lambda: tmp_path)
    with pytest.raises(CheckpointError, match="the drafter shipped for 'smollm2' is missing at .*--no-draft"):
        models.resolve_draft("auto", "smollm2")
    shipped = tmp_path / "smollm2-135m-dspine-b16"
    shipped.mkdir()
    (shipped / "config.json").write_text("{}")
    assert models.resolve_draft("auto", "smollm2") == shipped
    assert models.resolve_draft("auto", "owner/other") is None
    assert "no drafter is known for 'owner/other'" in models.find_draft("auto", "owner/other")[1]


def test_prepared_folder_counts_as_the_embedded_model(tmp_path, monkeypatch):
    prepared = tmp_path / "models" / "prepared"
    prepared.mkdir(parents=True)
    monkeypatch.setattr(models, "embedded_folder", lambda: prepared)
    assert models._same_model("smollm2", str(prepared)) and not models._same_model("smollm2", str(tmp_path))


def test_shipped_checkpoints_are_found_in_the_source_tree():
    assert models.checkpoints_folder().parts[-2:] == ("examples", "checkpoints")


# Runtimes


class Fake:
    def __init__(self, name: str, state: Availability):
        self.name, self._state = name, state

    def availability(self) -> Availability:
        return self._state


METAL = Availability(True, "MLX on metal", ("metal", "cpu"))
MLX_CPU = Availability(True, "MLX on the CPU", ("cpu",))
TORCH = Availability(True, "torch on cuda", ("cuda", "cpu"))
ABSENT = Availability(False, "not installed: x", install="pip install x")


@pytest.mark.parametrize(
    ("apple", "mlx", "torch", "chosen", "why"),
    [
        (True, METAL, TORCH, "mlx", "auto: Apple GPU; MLX on metal"),
        (True, MLX_CPU, TORCH, "torch", "auto: no Apple GPU with MLX"),
        (True, ABSENT, TORCH, "torch", "auto: no Apple GPU with MLX"),
        (True, METAL, ABSENT, "mlx", "auto: Apple GPU"),
        (False, MLX_CPU, TORCH, "torch", "auto: no Apple GPU with MLX"),
        (False, MLX_CPU, ABSENT, "mlx", "torch is not available: not installed: x"),
        (False, ABSENT, TORCH, "torch", "torch on cuda"),
    ],
)
def test_auto(monkeypatch, apple, mlx, torch, chosen, why):
    points = {"mlx": Point("mlx", Fake("mlx", mlx)), "torch": Point("torch", Fake("torch", torch))}
    monkeypatch.setattr(runtimes, "_registered", lambda: points)
    monkeypatch.setattr(runtimes, "on_apple_silicon", lambda: apple)
    runtime, reason = runtimes.choose_runtime()
    assert runtime.name == chosen and why in reason and "\n" not in reason


def test_nothing_fits(monkeypatch):
    monkeypatch.setattr(runtimes, "_registered", lambda: {"mlx": Point("mlx", Fake("mlx", ABSENT))})
    with pytest.raises(BackendError, match=r"no runtime can run here: mlx: not installed: x \(install: pip install x\)"):
        runtimes.choose_runtime()
    monkeypatch.setattr(runtimes, "_registered", dict)
    with pytest.raises(BackendError, match="none is registered, reinstall dspine"):
        runtimes.choose_runtime()


def test_a_third_party_runtime_is_found(monkeypatch):
    point = SimpleNamespace(name="other", load=lambda: Fake("other", TORCH))
    monkeypatch.setattr(runtimes, "_registered", lambda: {"other": point})
    assert runtimes.choose_runtime()[0].name == "other" and runtimes.choose_runtime("other")[1] == "asked for; torch on cuda"


def test_both_runtimes_are_registered():
    assert {"mlx", "torch"} <= set(runtimes.runtime_names())
