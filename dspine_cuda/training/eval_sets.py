"""`dspine eval`: mean acceptance length over sets of prompts, with bootstrap intervals.

Two ways to the same figure. `simulate`: the target writes all answers in one batch, then the drafter's rounds are read off
them (`simulate.py`). `generate`: the real loop, one prompt after another. Greedy figures are equal, others equal in
distribution.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.configs import CONDITIONAL
from dspine.common.errors import DSpineError
from dspine.common.files import write_whole
from dspine.common.tokenizer import Tokenizer, encode_prompt
from dspine_cuda.training.cached_generator import generator_for
from dspine_cuda.training.files import read_npz
from dspine_cuda.training.generator import Job
from dspine_cuda.training.intervals import acceptance_interval
from dspine_cuda.training.loops import cut_loop
from dspine_cuda.training.prompts import Prompt, read_prompts
from dspine_cuda.training.simulate import Rounds, Text, simulate

log = logging.getLogger("dspine.training")
SETS = ("gsm8k", "math500", "humaneval", "mbpp", "livecodebench", "mt-bench", "arena-hard-v2")
FAMILIES = {"math": ("gsm8k", "math500"), "code": ("humaneval", "mbpp", "livecodebench"), "chat": ("mt-bench", "arena-hard-v2")}
_TEXT_KEYS = ("tokens", "lengths", "starts", "numbers", "prompts", "looping", "sets", "facts")
_TURNS = 16  # numbers of texts are prompt * _TURNS + turn


@dataclass(frozen=True)
class PromptSet:
    """One file of prompts."""

    name: str
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True)
class SetText:
    """One answered turn. prompt: its index in the set; a prompt's turns are counted together."""

    set_name: str
    prompt: int
    text: Text
    looping: bool


def read_sets(paths: Sequence[Path], count: int) -> list[PromptSet]:
    """Prompt files, or one folder with the seven sets (`SETS`); the first `count` prompts of each."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        missing = [name for name in SETS if not (path / f"{name}.jsonl").is_file()]
        if missing:
            raise DSpineError(f"{path}: no {', '.join(f'{name}.jsonl' for name in missing)}; name the files you have instead")
        files += [path / f"{name}.jsonl" for name in SETS]
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        raise DSpineError(f"two prompt files have one name: {', '.join(names)}")
    return [PromptSet(file.stem, tuple(read_prompts(file, count))) for file in files]


def write_texts(
    target: Any,
    tokenizer: Tokenizer,
    sets: Sequence[PromptSet],
    *,
    temperature: float,
    max_tokens: int,
    seed: int,
    batch: int | None = None,
) -> list[SetText]:
    """The target's answers to every turn, all prompts at once, turn after turn; prompts that leave no room are left out
    (counted in a warning). DSpineError for a set that is left without any."""
    items = [(s.name, index, prompt) for s in sets for index, prompt in enumerate(s.prompts)]
    answers: list[list[str]] = [[] for _ in items]
    texts: list[SetText] = []
    alive = list(range(len(items)))
    for turn in range(max(len(prompt.turns) for _, _, prompt in items)):
        encoded = {i: _encode(tokenizer, items[i][2], answers[i]) for i in alive if turn < len(items[i][2].turns)}
        limit = target.info.context_length - max_tokens
        fitting = {i: ids for i, ids in encoded.items() if len(ids) <= limit}
        if len(fitting) < len(encoded):
            log.warning("%d prompts leave no room for %d tokens and are left out", len(encoded) - len(fitting), max_tokens)
        if not fitting:
            break
        longest = max(len(ids) for ids in fitting.values())
        generator = generator_for(
            target,
            capacity=longest + max_tokens,
            batch=batch,
            most=len(fitting),
            stop_ids=tokenizer.stop_ids,
            seed=seed,
            cut_loops=False,
        )
        jobs = [
            Job(i * _TURNS + turn, ids, max_tokens, temperature) for i, ids in sorted(fitting.items(), key=lambda x: len(x[1]))
        ]
        for answer in generator.run(jobs):
            i, ids = answer.job.number // _TURNS, answer.job.tokens
            body = answer.tokens[:-1] if answer.reason == "stop" else answer.tokens
            answers[i].append(tokenizer.decode(body.tolist()))
            text = Text(np.concatenate([ids, answer.tokens]), len(ids), answer.job.number)
            texts.append(SetText(items[i][0], items[i][1], text, cut_loop(answer.tokens) is not None))
        alive = list(fitting)
        del generator
    for prompts in sets:
        if all(text.set_name != prompts.name for text in texts):
            raise DSpineError(
                f"set {prompts.name}: none of its {len(prompts.prompts)} prompts leaves room for --max-tokens {max_tokens} in "
                f"the target's context of {target.info.context_length}"
            )
    return sorted(texts, key=lambda t: t.text.number)


def _encode(tokenizer: Tokenizer, prompt: Prompt, answers: list[str]) -> np.ndarray:
    if tokenizer.has_chat_template:
        return np.array(encode_prompt(tokenizer, prompt.messages(answers), limit=1 << 30))
    return np.array(encode_prompt(tokenizer, prompt.turns[len(answers)], limit=1 << 30))


def save_texts(path: Path, texts: Sequence[SetText], facts: dict[str, Any]) -> Path:
    """Texts as one npz file, with what they were made of."""
    arrays = {
        "tokens": np.concatenate([t.text.tokens for t in texts]).astype(np.uint32),
        "lengths": np.array([len(t.text.tokens) for t in texts]),
        "starts": np.array([t.text.start for t in texts]),
        "numbers": np.array([t.text.number for t in texts]),
        "prompts": np.array([t.prompt for t in texts]),
        "looping": np.array([t.looping for t in texts]),
        "sets": np.array([t.set_name for t in texts]),
        "facts": np.array(json.dumps(facts, sort_keys=True)),
    }
    return write_whole(path, lambda file: np.savez_compressed(file, **arrays))


def load_texts(path: Path, facts: dict[str, Any]) -> list[SetText]:
    """Texts as `save_texts` wrote them; DSpineError where they were made of something else."""
    arrays = read_npz(path, "file of texts")
    missing = [name for name in _TEXT_KEYS if name not in arrays]
    if missing:
        raise DSpineError(f"{path}: not a file of texts (it lacks {', '.join(missing)}); delete it to have it made again")
    stored, ends = json.loads(str(arrays["facts"])), np.cumsum(arrays["lengths"])
    wanted = json.loads(json.dumps(facts, sort_keys=True))
    stored.setdefault("prompts", wanted.get("prompts"))  # files of older versions do not say
    changed = [f"{k}: {stored.get(k)!r} there, {v!r} now" for k, v in wanted.items() if stored.get(k) != v]
    if changed:
        raise DSpineError(f"{path}: texts made with other settings ({'; '.join(changed)}); name another file")
    columns = (arrays[k] for k in ("lengths", "starts", "numbers", "prompts", "looping", "sets"))
    tokens = arrays["tokens"].astype(np.int64)
    return [
        SetText(str(name), int(prompt), Text(tokens[end - length : end], int(start), int(number)), bool(loop))
        for end, (length, start, number, prompt, loop, name) in zip(ends, zip(*columns, strict=True), strict=True)
    ]


def score_texts(
    drafter: Any,
    target: Any,
    texts: Sequence[SetText],
    *,
    temperature: float,
    acceptance: str,
    seed: int,
    independent: bool = False,
    draft_temperature: float | None = None,
) -> dict[str, Any]:
    """Rounds of all texts by simulation -> what `summary` makes of them."""
    rounds = simulate(
        drafter,
        target,
        [t.text for t in texts],
        temperature=temperature,
        rule=resolved_rule(drafter, acceptance),
        seed=seed,
        independent=independent,
        draft_temperature=draft_temperature,
    )
    rows = [(t.set_name, t.prompt, r, t.looping) for t, r in zip(texts, rounds, strict=True)]
    return summary(rows, drafter.config.num_proposals)


def resolved_rule(drafter: Any, acceptance: str) -> str:
    """`auto` as in generation: rejection for drafters whose draws are conditional, point-mass for the others."""
    if acceptance != "auto":
        return acceptance
    return "rejection" if drafter.config.method in CONDITIONAL else "point-mass"


def summary(rows: Sequence[tuple[str, int, Rounds, bool]], proposals: int) -> dict[str, Any]:
    """(set, prompt, rounds, looping) of every text -> per set: tau with its interval, by_position, counts of every prompt;
    `mean`: over sets, unweighted. Texts of a single token have no round and are left out."""
    sets: dict[str, Any] = {}
    for name in dict.fromkeys(row[0] for row in rows):
        counts: dict[int, list[int]] = {}
        reached, total, loops, texts = np.zeros(proposals), 0, 0, 0
        for _, prompt, rounds, looping in (row for row in rows if row[0] == name and len(row[2].accepted)):
            entry = counts.setdefault(prompt, [0, 0])
            entry[0] += rounds.emitted
            entry[1] += len(rounds.accepted)
            reached += (rounds.accepted[:, None] > np.arange(proposals)).sum(axis=0)
            total, loops, texts = total + len(rounds.accepted), loops + looping, texts + 1
        if not counts:
            raise DSpineError(f"set {name}: no answer is longer than one token")
        table = [counts[prompt] for prompt in sorted(counts)]
        tau, low, high = acceptance_interval([np.array(table)])
        sets[name] = {
            "tau": tau, "low": low, "high": high, "prompts": len(table), "rounds": total, "looping": loops / texts,
            "by_position": (reached / total).tolist(), "prompt_ids": sorted(counts), "counts": table,
        }  # fmt: skip
    tau, low, high = acceptance_interval([np.array(entry["counts"]) for entry in sets.values()])
    return {"mean": {"tau": tau, "low": low, "high": high}, "sets": sets}


def table_text(result: dict[str, Any]) -> str:
    """The result as a plain table: one row a set, one column a temperature."""
    heats = list(result["temperatures"])
    names = list(next(iter(result["temperatures"].values()))["sets"])
    width = max(len(name) for name in [*names, "mean"]) + 2
    lines = ["set".ljust(width) + "".join(f"T = {heat}".ljust(26) for heat in heats)]
    for name in [*names, "mean"]:
        cells = []
        for heat in heats:
            block = result["temperatures"][heat]
            entry = block["mean"] if name == "mean" else block["sets"][name]
            cells.append(f"{entry['tau']:.2f}  [{entry['low']:.2f}, {entry['high']:.2f}]".ljust(26))
        lines.append(name.ljust(width) + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)
