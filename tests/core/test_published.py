"""The table behind `--draft-model auto`: names it knows, names it must not take, what is said when nothing can be fetched."""

from __future__ import annotations

import re

import pytest

from dspine.common import models
from dspine.common.errors import DSpineError
from dspine.common.published import pairs, published_drafts

EIGHT = ["deepseek-ai/dspark_qwen3_8b_block7", "z-lab/Qwen3-8B-DFlash-b16", "jiapingW/Qwen3-8b-dspine-SpecForge"]


def test_every_line_is_a_pair_of_hub_ids():
    assert len(pairs()) == len(set(pairs())) > 10
    for target, draft in pairs():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", target) and re.fullmatch(r"[\w.-]+/[\w.-]+", draft)
        name = target.split("/")[1].lower().replace("-instruct", "").replace("-", "").replace("llama", "llama")
        assert name.split("b")[0].replace(".", "") in draft.lower().replace("-", "").replace("_", "").replace(".", "")


@pytest.mark.parametrize(
    "model",
    ["Qwen/Qwen3-8B", "qwen/qwen3-8b", "mlx-community/Qwen3-8B-4bit", "mlx-community/Qwen3-8B-bf16",
     "lmstudio-community/Qwen3-8B-MLX-8bit", "Qwen/Qwen3-8B-FP8",
     "/cache/hub/models--Qwen--Qwen3-8B/snapshots/0123abcd"],
)  # fmt: skip
def test_names_that_mean_qwen3_8b(model):
    assert published_drafts(model) == ("Qwen/Qwen3-8B", EIGHT)


def test_a_folder_that_carries_the_models_name(tmp_path):
    folder = tmp_path / "Qwen3-8B-MLX-4bit"
    folder.mkdir()
    assert published_drafts(str(folder))[1] == EIGHT


@pytest.mark.parametrize(
    "model",
    ["Qwen/Qwen3-8B-Base", "someone/Qwen3-8B", "Qwen3-8B", "Qwen/Qwen3-80B", "Qwen/Qwen3-8B-abliterated", "a/b/c", "",
     "smollm2", "/cache/hub/models--someone--Qwen3-8B/snapshots/0"],
)  # fmt: skip
def test_names_that_mean_something_else(model):
    assert published_drafts(model) == ("", [])


def test_auto_says_which_it_took(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_download", lambda repo, role: tmp_path / repo.replace("/", "--"))
    folder, reason = models.find_draft("auto", "Qwen/Qwen3-8B")
    assert folder == tmp_path / "deepseek-ai--dspark_qwen3_8b_block7"
    assert reason.startswith("published for Qwen/Qwen3-8B: deepseek-ai/dspark_qwen3_8b_block7; also published: z-lab/")


def test_auto_decodes_plainly_where_nothing_can_be_fetched(monkeypatch):
    def offline(repo, role):
        raise DSpineError(f"{role} {repo!r} is no folder here and could not be fetched from the hub (offline)")

    monkeypatch.setattr(models, "_download", offline)
    folder, reason = models.find_draft("auto", "Qwen/Qwen3.5-4B")
    assert folder is None and "offline" in reason and "decoding plainly without z-lab/Qwen3.5-4B-DFlash" in reason
    with pytest.raises(DSpineError, match="offline"):
        models.find_draft("z-lab/Qwen3.5-4B-DFlash", "Qwen/Qwen3.5-4B")
