"""`dspine cache-prompt`: read a long prompt once and save what it left, for `--prompt-cache-file` of generate and chat."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from rich.console import Console

from dspine.common.cli.generate import build_engine, prompt_progress, read_prompt
from dspine.common.cli.options import GenerateOptions, flag
from dspine.common.prompt_files import check_writing, write_prompt_cache
from dspine.common.runtimes import choose_runtime

_TAKEN = (
    "model", "draft_model", "no_draft", "system_prompt", "raw", "backend", "device", "dtype", "max_kv_size", "kv_bits",
    "kv_group_size", "prefill_step_size", "json",
)  # fmt: skip


def _options() -> type:
    """The flags of `dspine generate` that matter when a prompt is read, and the file."""
    hints = get_type_hints(GenerateOptions, include_extras=True)
    by_name = {item.name: item for item in fields(GenerateOptions)}
    file = Annotated[Path, flag("Where to save the caches (safetensors).", "Caches", "--prompt-cache-file")]
    shared = [(name, hints[name], field(default=by_name[name].default)) for name in _TAKEN]
    assert all(by_name[name].default is not MISSING for name in _TAKEN)
    return make_dataclass(
        "CachePromptOptions", [("prompt", hints["prompt"]), ("prompt_cache_file", file), *shared], frozen=True
    )


CachePromptOptions = _options()


def cache_prompt(options: Any) -> None:
    """Read a prompt and save its caches; a later prompt goes on from its text."""
    shared = {name: getattr(options, name) for name in _TAKEN}
    prompt = read_prompt(options.prompt)
    file, text = options.prompt_cache_file, {"system_prompt": options.system_prompt, "raw": options.raw}
    check_writing(choose_runtime(options.backend)[0], file, prompt, **text)  # before a model is loaded for nothing
    notes = Console(stderr=True, highlight=False)
    engine = build_engine(
        GenerateOptions(prompt="cache", **shared),
        plan_tokens=max(len(prompt) // 2, 1),
        announce=lambda line: notes.print(line, style="dim", markup=False),
    )
    tokens, size = write_prompt_cache(
        engine,
        file,
        prompt,
        **text,
        chunk=options.prefill_step_size,
        progress=prompt_progress(options.prefill_step_size),
    )
    notes.print(f"{tokens} tokens, {size / 2**20:.1f} MiB: {file}", markup=False)
    if options.json:
        report = {"file": str(file), "tokens": tokens, "bytes": size, "drafter": engine.draft_model}
        sys.stdout.write(json.dumps(report) + "\n")
