"""Published drafters by target, one line a pair: what `--draft-model auto` looks up. Nothing here touches the network.

The first line of a target is taken; the others are named beside it. Listed are files in layouts that run
(`docs/checkpoints.md`), under the names their authors give in their own lists (z-lab/dflash, deepseek-ai/DeepSpec); no line
says that the file was opened here.
"""

from __future__ import annotations

import re
from pathlib import Path

_PAIRS = """
Qwen/Qwen3-4B                        deepseek-ai/dspark_qwen3_4b_block7
Qwen/Qwen3-4B                        z-lab/Qwen3-4B-DFlash-b16
Qwen/Qwen3-8B                        deepseek-ai/dspark_qwen3_8b_block7
Qwen/Qwen3-8B                        z-lab/Qwen3-8B-DFlash-b16
Qwen/Qwen3-8B                        jiapingW/Qwen3-8b-dspine-SpecForge
Qwen/Qwen3-14B                       deepseek-ai/dspark_qwen3_14b_block7
Qwen/Qwen3.5-4B                      z-lab/Qwen3.5-4B-DFlash
Qwen/Qwen3.5-9B                      z-lab/Qwen3.5-9B-DFlash
Qwen/Qwen3.5-27B                     z-lab/Qwen3.5-27B-DFlash
Qwen/Qwen3.5-35B-A3B                 z-lab/Qwen3.5-35B-A3B-DFlash
Qwen/Qwen3.5-122B-A10B               z-lab/Qwen3.5-122B-A10B-DFlash
Qwen/Qwen3.6-27B                     z-lab/Qwen3.6-27B-DFlash
Qwen/Qwen3.6-35B-A3B                 z-lab/Qwen3.6-35B-A3B-DFlash
Qwen/Qwen3-Coder-30B-A3B-Instruct    z-lab/Qwen3-Coder-30B-A3B-DFlash
Qwen/Qwen3-Coder-Next                z-lab/Qwen3-Coder-Next-DFlash
meta-llama/Llama-3.1-8B-Instruct     z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat
openai/gpt-oss-20b                   z-lab/gpt-oss-20b-DFlash
openai/gpt-oss-120b                  z-lab/gpt-oss-120b-DFlash
"""
_CONVERTERS = ("mlx-community", "lmstudio-community")  # owners whose files are the same models in another number format
_FORMAT = re.compile(r"(?:[-_.](?:mlx|[2-8]bit|int[48]|bf16|fp8|fp16|mxfp[48]|dwq|awq|gptq|gguf|q[2-8]))+$", re.IGNORECASE)


def pairs() -> list[tuple[str, str]]:
    """(target, drafter) of every line, in order."""
    return [(target, draft) for target, draft in (line.split() for line in _PAIRS.strip().splitlines())]


def published_drafts(model: str) -> tuple[str, list[str]]:
    """(the target as the table names it, its drafters); the list is empty where none is known.

    model: a hub id, a snapshot folder of the hub's cache, or a folder that carries the model's own name. Suffixes that name
    a number format (`-4bit`, `-MLX-8bit`) do not count.
    """
    owner, name = _identity(model)
    for target in dict.fromkeys(target for target, _ in pairs()):
        its_owner, its_name = target.lower().split("/")
        if name == its_name and owner in (None, its_owner, *_CONVERTERS):
            return target, [draft for other, draft in pairs() if other == target]
    return "", []


def _identity(model: str) -> tuple[str | None, str]:
    """(owner or None for a plain folder, name without number formats), lower case."""
    folder = Path(model).expanduser()
    cached = next((part for part in reversed(folder.parts) if part.startswith("models--")), None)
    if cached is not None:
        owner, _, name = cached.removeprefix("models--").partition("--")
    elif folder.is_dir() or model.count("/") != 1:
        owner, name = "", folder.resolve().name if folder.is_dir() else ""
    else:
        owner, name = model.split("/")
    return owner.lower() or None, _FORMAT.sub("", name.lower())
