"""From a name on the command line to a folder on disk: targets and drafters.

A name is the embedded model (`smollm2`), a model shipped with dspine (`hybrid-tiny`), a folder, or a hub id (`owner/name`).
Nothing is guessed: a name that fits none of these is an error that says what was tried. Models kept in the stored form
(`common.stored`) are expanded once into the user's cache.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from dspine.common.embedded import EMBEDDED_NAME, embedded_folder, prepare_embedded
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.published import published_drafts
from dspine.common.stored import expanded_folder, is_stored, prepare_stored

AUTO_DRAFT = "auto"
_CHECKPOINTS = "dspine.checkpoints"  # package-dir maps examples/checkpoints to this name
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken", "mask_embedding.pt")


@dataclass(frozen=True)
class ShippedPair:
    """A target by its name, and the folder of its drafter under examples/checkpoints."""

    model: str
    draft: str


SHIPPED_PAIRS = (
    ShippedPair(model=EMBEDDED_NAME, draft="smollm2-135m-dspine-b16"),
    ShippedPair(model="hybrid-tiny", draft="hybrid-tiny-dspine-b16"),
)


def resolve_model(name: str) -> Path:
    """Folder of a target model, with its config.json. Prepares the embedded or a stored model, downloads a hub id; DSpineError
    else."""
    if name == EMBEDDED_NAME:
        return prepare_embedded()
    if any(name == pair.model for pair in SHIPPED_PAIRS):
        return prepare_stored(_shipped_model(name))
    folder = _resolve_named(name, "model")
    return prepare_stored(folder) if is_stored(folder) else folder


def _shipped_model(name: str) -> Path:
    folder = checkpoints_folder() / name
    if not is_stored(folder):
        raise CheckpointError(f"the model {name!r} shipped with dspine is missing at {folder}: reinstall dspine")
    return folder


def resolve_draft(name: str, model: str) -> Path | None:
    """Folder of a drafter. `auto` is the drafter shipped for `model`, or None where none is known (see `find_draft`)."""
    return find_draft(name, model)[0]


def find_draft(name: str, model: str) -> tuple[Path | None, str]:
    """`resolve_draft` with one line that says where the drafter comes from, or why there is none."""
    if name != AUTO_DRAFT:
        return _resolve_named(name, "draft"), "named by --draft-model"
    pair = next((pair for pair in SHIPPED_PAIRS if _same_model(pair.model, model)), None)
    if pair is None:
        return _published(model)
    folder = checkpoints_folder() / pair.draft
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"the drafter shipped for {pair.model!r} is missing at {folder}: reinstall dspine, "
            "name another with --draft-model, or decode plainly with --no-draft"
        )
    return folder, f"shipped with dspine for {pair.model!r}"


def _published(model: str) -> tuple[Path | None, str]:
    """The first drafter that `common.published` lists; where it cannot be fetched, plain decoding, and the reason."""
    target, drafts = published_drafts(model)
    if not drafts:
        return None, f"no drafter is known for {model!r}: decoding plainly; name one with --draft-model"
    others = f"; also published: {', '.join(drafts[1:])}" if drafts[1:] else ""
    try:
        return _download(drafts[0], "draft"), f"published for {target}: {drafts[0]}{others}"
    except DSpineError as error:
        return None, f"{error}; decoding plainly without {drafts[0]}, published for {target}{others}"


def checkpoints_folder() -> Path:
    """Where the shipped drafters lie: examples/checkpoints of a source tree, or its copy inside an installed wheel."""
    spec = importlib.util.find_spec(_CHECKPOINTS)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not folders:
        raise CheckpointError(f"the data package {_CHECKPOINTS} is not installed: reinstall dspine")
    return Path(folders[0])


def _same_model(shipped: str, model: str) -> bool:
    """Whether `model` names the shipped pair's target: by its name, or by a folder that name stands for."""
    if model == shipped:
        return True
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return False
    if shipped == EMBEDDED_NAME:
        return folder.resolve().name == _embedded_folder_name()
    stored = checkpoints_folder() / shipped
    return is_stored(stored) and folder.resolve() in (stored.resolve(), expanded_folder(stored).resolve())


def _embedded_folder_name() -> str | None:
    try:
        return embedded_folder().name
    except DSpineError:  # the wheel is absent, so no folder can be its model
        return None


def _resolve_named(name: str, role: str) -> Path:
    """A folder with a config.json, else a hub id. `role` (model, draft) is for the messages."""
    flag = "--model" if role == "model" else "--draft-model"
    if not name.strip():
        raise DSpineError(f"{flag} is empty: expected {_expected(role)}")
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{role} folder {folder} holds no config.json: expected a Hugging Face model folder")
        return folder
    if folder.exists():
        raise CheckpointError(f"{flag} {name!r} is a file: expected {_expected(role)}")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DSpineError(f"{role} folder {name!r} does not exist")
    if "/" not in name:
        raise DSpineError(f"unknown {role} {name!r}: expected {_expected(role)}")
    return _download(name, role)


def _expected(role: str) -> str:
    names = [pair.model for pair in SHIPPED_PAIRS] if role == "model" else [AUTO_DRAFT]
    return f"{', '.join(map(repr, names))}, a folder, or a hub id like 'owner/name'"


def _download(repo: str, role: str) -> Path:
    """Snapshot of a hub repository in huggingface_hub's own cache; used as it is when already there and offline."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(snapshot_download(repo, allow_patterns=list(_HUB_FILES)))
    except (OSError, HFValidationError) as error:  # hub errors are OSErrors: not found, gated, offline, disk full
        cause = " ".join(str(error).split("\n")[0].split())
        raise DSpineError(f"{role} {repo!r} is no folder here and could not be fetched from the hub ({cause})") from error
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"hub repository {repo!r} holds no config.json: expected a Hugging Face model")
    return folder
