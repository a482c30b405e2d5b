"""What `dspine eval` does, from arguments to its result."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.errors import DSpineError
from dspine.common.models import resolve_draft, resolve_model
from dspine.common.tokenizer import load_tokenizer
from dspine_cuda.training.devices import pick_device
from dspine_cuda.training.eval_sets import (
    PromptSet,
    SetText,
    load_texts,
    read_sets,
    resolved_rule,
    save_texts,
    score_texts,
    summary,
    write_texts,
)
from dspine_cuda.training.loops import cut_loop
from dspine_cuda.training.progress import progress_bar
from dspine_cuda.training.simulate import RULES, Rounds

METHODS = ("simulate", "generate")


@dataclass(frozen=True)
class EvalSettings:
    """drafter: a folder, or None for the model's known pair; texts: where the target's answers are kept between calls."""

    drafter: str | None
    prompts: tuple[Path, ...]
    model: str = "smollm2"
    count: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256
    method: str = "simulate"
    acceptance: str = "auto"
    seed: int = 0
    device: str = "auto"
    dtype: str = "bfloat16"
    batch: int | None = None
    texts: Path | None = None
    progress: bool = True

    def check(self) -> None:
        """DSpineError for what cannot be."""
        if self.method not in METHODS:
            raise DSpineError(f"--method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.acceptance not in ("auto", *RULES):
            raise DSpineError(f"--acceptance must be auto or one of {', '.join(RULES)}, got {self.acceptance!r}")
        if self.dtype not in ("bfloat16", "float32"):
            raise DSpineError(f"--dtype must be bfloat16 or float32, got {self.dtype!r}")
        if not self.temperatures or any(not 0 <= heat <= 10 for heat in self.temperatures):
            raise DSpineError("--temperature must be 0..10 (0 is greedy)")
        if not self.prompts:
            raise DSpineError("no prompts: give a folder with the seven sets, or files, with --prompts")


def evaluate(settings: EvalSettings) -> dict[str, Any]:
    """Acceptance over all sets and temperatures; plain JSON values."""
    settings.check()
    sets = read_sets(settings.prompts, settings.count)
    run = _simulated if settings.method == "simulate" else _generated
    result = run(settings, sets)
    facts = {
        "drafter": settings.drafter, "model": settings.model, "method": settings.method, "max_tokens": settings.max_tokens,
        "prompts_a_set": settings.count, "seed": settings.seed, "dtype": settings.dtype,
    }  # fmt: skip
    return facts | result


def _folder(settings: EvalSettings) -> Path:
    folder = resolve_draft(settings.drafter or "auto", settings.model)
    if folder is None:
        raise DSpineError(f"no drafter is known for {settings.model}: name one")
    return folder


def _simulated(settings: EvalSettings, sets: list[PromptSet]) -> dict[str, Any]:
    import torch

    from dspine_cuda.drafter import load_drafter
    from dspine_cuda.training.target import load_frozen_target

    folder = resolve_model(settings.model)
    target = load_frozen_target(folder, pick_device(settings.device), getattr(torch, settings.dtype))
    tokenizer = load_tokenizer(folder)
    drafter = load_drafter(_folder(settings), target, whole=True)
    blocks = {}
    with progress_bar(len(settings.temperatures), settings.progress, "temperatures") as advance:
        for done, heat in enumerate(settings.temperatures):
            texts = texts_of(settings, target, tokenizer, sets, heat)
            advance(done, f"T = {heat:g}: {len(texts)} answers")
            blocks[f"{heat:g}"] = score_texts(
                drafter, target, texts, temperature=heat, acceptance=settings.acceptance, seed=settings.seed
            )
    return {"method_of_drafter": drafter.config.method, "acceptance": resolved_rule(drafter, settings.acceptance),
            "temperatures": blocks}  # fmt: skip


def _digest(sets: list[PromptSet]) -> str:
    """Of what is asked, so that answers to other prompts under the same file name are not taken for these."""
    asked = [[[p.system, *p.turns] for p in s.prompts] for s in sets]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def texts_of(settings: EvalSettings, target: Any, tokenizer: Any, sets: list[PromptSet], heat: float) -> list[SetText]:
    """The target's answers at one temperature: from `settings.texts` if they are there, else made (and kept there)."""
    facts = {
        "model": settings.model, "temperature": heat, "max_tokens": settings.max_tokens, "count": settings.count,
        "seed": settings.seed, "dtype": settings.dtype, "sets": [s.name for s in sets],
        "prompts": _digest(sets),
    }  # fmt: skip
    path = None if settings.texts is None else settings.texts / f"texts_{heat:g}.npz"
    if path is not None and path.is_file():
        return load_texts(path, facts)
    texts = write_texts(
        target, tokenizer, sets, temperature=heat, max_tokens=settings.max_tokens, seed=settings.seed, batch=settings.batch
    )
    if path is not None:
        save_texts(path, texts, facts)
    return texts


def _generated(settings: EvalSettings, sets: list[PromptSet]) -> dict[str, Any]:
    """One prompt after another through the real loop of the torch runtime."""
    from dspine.common.generation import load
    from dspine.common.runtimes import choose_runtime

    runtime, reason = choose_runtime("torch")
    engine = load(
        runtime, settings.model, str(_folder(settings)), device=settings.device, dtype=settings.dtype, backend_reason=reason
    )
    assert engine.drafter is not None
    rule = resolved_rule(engine.drafter, settings.acceptance)
    items = [(s.name, number, prompt) for s in sets for number, prompt in enumerate(s.prompts)]
    total = len(items) * len(settings.temperatures)
    blocks, done = {}, 0
    with progress_bar(total, settings.progress, "prompts", every_call=False) as advance:
        for heat in settings.temperatures:
            rows = []
            for index, (name, number, prompt) in enumerate(items):
                rows += [(name, number, *turn) for turn in _turns(engine, prompt, settings, heat, rule, index)]
                done += 1
                advance(done, name)
            blocks[f"{heat:g}"] = summary(rows, engine.drafter.config.num_proposals)
    return {"method_of_drafter": engine.drafter.config.method, "acceptance": rule, "temperatures": blocks}


def _turns(engine: Any, prompt: Any, settings: EvalSettings, heat: float, rule: str, index: int) -> list[tuple[Rounds, bool]]:
    from dspine.common.generation import generate

    answers: list[str] = []
    turns = []
    for _ in prompt.turns:
        source = prompt.messages(answers) if engine.tokenizer.has_chat_template else prompt.turns[len(answers)]
        result = generate(
            engine, source, max_tokens=settings.max_tokens, temperature=heat, seed=settings.seed + index, policy="full",
            acceptance=rule if heat > 0 else "greedy", break_even=0.0,
        )  # fmt: skip
        answers.append(result.text)
        turns.append((_rounds_of(result), cut_loop(np.array(result.token_ids)) is not None))
    return turns


def _rounds_of(result: Any) -> Rounds:
    """Accepted drafts of every round: `drafted` marks them; a round ends at a token of the target's own, or the end."""
    accepted, run = [], 0
    for drafted in result.drafted[1:]:
        if drafted:
            run += 1
            continue
        accepted.append(run)
        run = 0
    if run:
        accepted.append(run)
    return Rounds(np.array(accepted, dtype=np.int64), len(result.token_ids) - 1)
