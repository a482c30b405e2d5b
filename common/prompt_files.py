"""Prompt caches: a prompt that was read once and goes on later, in mlx_lm's manner: the new prompt continues the old text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine.common.checkpoints import read_header
from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.protocols import Engine
from dspine.common.runtimes import load_runtime
from dspine.common.selection.policies import StaticPolicy
from dspine.common.sessions import Progress, Session, Transcript, open_session
from dspine.common.tokenizer import check_prompt, render_chat


@dataclass(frozen=True)
class CachedPrompt:
    """A prompt in its caches. `text`: what the tokens stand for; `prompt`, `system_prompt`, `raw`: as they were given."""

    session: Session
    tokens: list[int]
    text: str
    prompt: str
    system_prompt: str | None
    raw: bool

    def messages(self, prompt: str) -> list[dict[str, Any]]:
        """The chat so far, with `prompt` going on from the cached text."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt is not None else []
        return [*system, {"role": "user", "content": self.prompt + prompt}]

    def continued(self, engine: Engine, prompt: str) -> list[int]:
        """Token ids of the cached text and `prompt`. DSpineError where the chat template changes what was cached."""
        check_prompt(prompt)
        if self.raw:
            return [*self.tokens, *engine.tokenizer.encode(prompt)]
        transcript = self.transcript(engine)
        ids = transcript.prompt(self.messages(prompt))
        if ids[: len(self.tokens)] != self.tokens:
            raise DSpineError(
                "the chat template writes the cached prompt differently once it goes on: make the cache with --raw"
            )
        return ids

    def transcript(self, engine: Engine) -> Transcript:
        """The cached text, to be gone on from."""
        return Transcript(engine.tokenizer, self.tokens, self.text)


def write_prompt_cache(
    engine: Engine,
    path: Path,
    prompt: str,
    *,
    system_prompt: str | None = None,
    raw: bool = False,
    chunk: int = 512,
    progress: Progress | None = None,
) -> tuple[int, int]:
    """Read a prompt and save its caches; returns (tokens, bytes of the file). DSpineError where the runtime keeps none."""
    save = check_writing(load_runtime(engine.runtime)[0], path, prompt, system_prompt=system_prompt, raw=raw)
    text = prompt
    if not raw:
        system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
        text = render_chat(engine.tokenizer, [*system, {"role": "user", "content": prompt}], open_end=True)
    ids = engine.tokenizer.encode(text, add_special_tokens=raw)
    session = open_session(engine)
    params = DecodingParams(max_tokens=1, prefill_chunk=chunk)
    loop = DecodingLoop(engine.target, engine.drafter, ids, params, StaticPolicy())
    for _ in session.run(loop, progress):
        pass
    about = {"text": text, "prompt": prompt, "system_prompt": system_prompt, "raw": raw}
    return len(ids), save(path, engine.target, engine.drafter, session, about)


def check_writing(runtime: Any, path: Path, prompt: str, *, system_prompt: str | None, raw: bool) -> Any:
    """What needs no model, to be asked before one is loaded; returns the runtime's own writer. Raises DSpineError."""
    check_prompt(prompt)
    save = _ability(runtime, "save_prompt_cache")
    if raw and system_prompt is not None:
        raise DSpineError("a system prompt needs the chat template, but raw was asked for: put the text into the prompt")
    if not path.parent.is_dir():
        raise DSpineError(f"folder {path.parent} does not exist: make it first, or name another --prompt-cache-file")
    if path.is_dir():
        raise DSpineError(f"{path} is a folder: name a file in it as --prompt-cache-file")
    return save


def check_reading(runtime: Any, path: Path) -> int:
    """What needs no model: a runtime that reads such files, and a file. Returns the tokens that its header tells of, for memory
    plans; 0 where it tells of none: `read_prompt_cache` says what is wrong. Raises DSpineError."""
    _ability(runtime, "load_prompt_cache")
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise DSpineError(f"prompt cache {path} {what}: make one with dspine cache-prompt")
    try:
        entry = read_header(path).get("tokens")
    except CheckpointError:
        return 0
    return entry.shape[0] if entry is not None and len(entry.shape) == 1 else 0


def read_prompt_cache(engine: Engine, path: Path, *, system_prompt: str | None = None, raw: bool = False) -> CachedPrompt:
    """A saved prompt, for this very pair. DSpineError for a file of another model, or one that goes with other flags."""
    read = _ability(load_runtime(engine.runtime)[0], "load_prompt_cache")
    tokens, cache, draft_cache, about = read(path, engine.target, engine.drafter)
    if raw and not about["raw"]:
        raise DSpineError(f"{path} holds a chat prompt, and --raw was asked for: drop --raw")
    if system_prompt is not None and system_prompt != about["system_prompt"]:
        raise DSpineError(f"{path} was made with another system prompt: drop --system-prompt, or make the cache again")
    session = open_session(engine)
    session.tokens, session.cache, session.draft_cache = tokens, cache, draft_cache
    listed = [int(token) for token in tokens]
    return CachedPrompt(session, listed, about["text"], about["prompt"], about["system_prompt"], about["raw"])


def _ability(runtime: Any, name: str) -> Any:
    found = getattr(runtime, name, None)
    if found is None:
        raise DSpineError(f"the {runtime.name} runtime keeps no prompt cache files: use --backend mlx")
    return found
