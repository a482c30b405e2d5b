"""Training data for one's own target, without a data set: prompts (from files, or written by the target), its own answers.

Everything is a function of the settings: prompts come in numbered rounds, answers in numbered shards, each file whole or
absent. An interrupted run goes on with the same command and keeps what is finished.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.errors import DSpineError
from dspine.common.files import write_json
from dspine.common.models import resolve_model
from dspine.common.tokenizer import encode_prompt, load_tokenizer
from dspine_cuda.training.cached_generator import CachedGenerator, generator_for
from dspine_cuda.training.data import load_conversations
from dspine_cuda.training.files import json_lines, read_json, write_jsonl, write_shard
from dspine_cuda.training.generator import Answer, BatchGenerator, Job
from dspine_cuda.training.progress import Advance, progress_bar
from dspine_cuda.training.prompts import Distinct, Prompt, read_prompts, usable_prompt, user_turn

ROUND = 4096  # prompts asked of the target at a time
MAX_ROUNDS_FACTOR = 4  # rounds allowed per round wanted, before a target that repeats itself is given up
ANSWER_BASE = 1 << 40  # answers draw from other uniforms than prompts


@dataclass(frozen=True)
class RecipeSettings:
    """What the data is made of; `prompts` and `exclude` are files."""

    model: str
    prompts: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()  # evaluation prompts, which must not be trained on
    self_prompts: int = 0
    prompt_temperatures: tuple[float, ...] = (0.8, 1.0)
    opened_share: float = 0.0  # of the target's own prompts: those that begin with the first words of a file's prompt
    greedy_share: float = 0.6
    temperature: float = 0.8
    max_prompt_tokens: int = 320
    max_tokens: int = 448
    shard_size: int = 4096
    seed: int = 0

    def check(self) -> None:
        """DSpineError for values that make no sense."""
        if not self.prompts and self.self_prompts < 1:
            raise DSpineError("no prompts: give a file with --prompts, or let the target write some with --self-prompts N")
        if self.opened_share and not (self.prompts and self.self_prompts):
            raise DSpineError(
                "--opened-share takes first words from the prompts of --prompts for those of --self-prompts: give both"
            )
        heats = self.prompt_temperatures
        rules = (
            ("--self-prompts", self.self_prompts >= 0, "0 or more"),
            ("--opened-share", 0 <= self.opened_share <= 1, "0..1"),
            ("--greedy-share", 0 <= self.greedy_share <= 1, "0..1"),
            ("--temperature", 0 < self.temperature <= 10, "above 0, at most 10"),
            ("--prompt-temperature", bool(heats) and all(0 < heat <= 10 for heat in heats), "above 0, at most 10"),
            ("--max-prompt-tokens", self.max_prompt_tokens >= 8, "8 or more"),
            ("--max-tokens", self.max_tokens >= 2, "2 or more"),
            ("--shard-size", self.shard_size >= 1, "1 or more"),
            ("--seed", 0 <= self.seed < 2**63, "0..2^63-1"),
        )
        for name, fine, expected in rules:
            if not fine:
                raise DSpineError(f"{name} must be {expected}")


class Recipe:
    """One output folder: `recipe.json`, `prompts/round_*.jsonl`, `prompts.json` (their digest), `data_*.npz`, `report.json`."""

    def __init__(
        self,
        settings: RecipeSettings,
        output: Path,
        *,
        device: str = "auto",
        dtype: str = "bfloat16",
        batch: int | None = None,
        progress: bool = True,
    ) -> None:
        settings.check()
        self.settings, self.output, self.batch, self.progress = settings, output, batch, progress
        self.device, self.dtype = device, dtype
        self._is_claimed()
        self.folder = resolve_model(settings.model)
        self.tokenizer = load_tokenizer(self.folder)
        self._generators: dict[tuple[int, frozenset[int]], BatchGenerator | CachedGenerator] = {}
        self._target: Any = None

    def _is_claimed(self) -> bool:
        """Whether the folder is this recipe's. DSpineError where it is another's: that would mix into its files."""
        path, wanted = self.output / "recipe.json", json.loads(json.dumps(asdict(self.settings)))
        if path.is_file():
            stored = json.loads(json.dumps(asdict(RecipeSettings("")))) | read_json(path)  # settings newer than the folder
            changed = [f"{k}: {stored.get(k)!r} there, {v!r} now" for k, v in wanted.items() if stored.get(k) != v]
            if changed:
                raise DSpineError(f"{self.output} was begun with other settings ({'; '.join(changed)}); use another folder")
            return True
        if self.output.exists() and not self.output.is_dir():
            raise DSpineError(f"{self.output} is no folder: choose a folder for the shards")
        if any(self.output.glob("*.npz")):
            raise DSpineError(f"{self.output} holds npz files but no recipe.json: choose an empty folder")
        return False

    def _claim_folder(self) -> None:
        """Before the first file, and after all that bad settings can fail at: they can then be put right in the same folder."""
        if not self._is_claimed():
            self._check_context(self.settings.max_prompt_tokens + self.settings.max_tokens)
            write_json(self.output / "recipe.json", asdict(self.settings))

    def _claim_prompts(self, prompts: list[str]) -> None:
        """Shards answer numbered prompts: prompt files that changed since the first call would give others those numbers."""
        path = self.output / "prompts.json"
        digest = hashlib.sha256("\0".join(prompts).encode()).hexdigest()
        wanted = {"count": len(prompts), "sha256": digest}
        if not path.is_file():
            write_json(path, wanted)
        elif read_json(path) != wanted:
            raise DSpineError(
                f"{self.output}: the prompts are not those that it was begun with (a file of --prompts or --exclude has "
                f"changed): put the files back, or use another folder"
            )

    def run(self) -> dict[str, Any]:
        """Prompts, then answers; returns (and stores) what was made."""
        started = time.perf_counter()
        prompts = self.collect_prompts()
        encoded, dropped = self._encode(prompts)
        if not encoded:
            limit = self.settings.max_prompt_tokens
            raise DSpineError(f"no prompt is left: all {dropped} are longer than --max-prompt-tokens {limit}")
        self._claim_folder()
        self._claim_prompts(prompts)
        made = self.answer(encoded)
        seconds = time.perf_counter() - started
        conversations = load_conversations(self.output)
        report = {
            "conversations": len(conversations),
            "tokens": sum(len(c.tokens) for c in conversations),
            "answer_tokens": sum(int(c.supervised.sum()) for c in conversations),
            "greedy": sum(c.greedy for c in conversations),
            "prompts": len(encoded),
            "prompts_too_long": dropped,
            "made_now": made,
            "seconds_now": round(seconds, 1),
            "tokens_per_second_now": round(made["answer_tokens"] / max(seconds, 1e-9), 1),
        }
        write_json(self.output / "report.json", report)
        return report

    # -- prompts ------------------------------------------------------------------------------------------------------

    def collect_prompts(self) -> list[str]:
        """Distinct prompts of the files, then of the target, shuffled."""
        settings = self.settings
        excluded = [turn for path in settings.exclude for prompt in read_prompts(path) for turn in prompt.turns]
        distinct = Distinct(excluded)
        given = [prompt.turns[0] for path in settings.prompts for prompt in read_prompts(path)]
        kept = [text for text in given if distinct.add(text)]
        if not kept and not settings.self_prompts:
            why = "are, or share text with, those of --exclude" if excluded else "are without a word"
            raise DSpineError(f"no prompt is left: all {len(given)} of --prompts {why}")
        own: list[str] = []
        rounds = -(-settings.self_prompts // ROUND)
        for number in range(MAX_ROUNDS_FACTOR * rounds):
            if len(own) >= settings.self_prompts:
                break
            own += [text for text in self._round(number, len(own), kept) if usable_prompt(text) and distinct.add(text)]
        if len(own) < settings.self_prompts:
            raise DSpineError(
                f"the target wrote only {len(own)} distinct prompts in {MAX_ROUNDS_FACTOR * rounds} rounds of "
                f"{self._round_size()}; ask for fewer (--self-prompts) or raise --prompt-temperature, either in another folder"
            )
        prompts = kept + own[: settings.self_prompts]
        order = np.random.default_rng([settings.seed, 0]).permutation(len(prompts))
        return [prompts[i] for i in order]

    def _round_size(self) -> int:
        """Texts asked of the target in one round: twice what is wanted, as many are unusable, within bounds."""
        return min(ROUND, max(64, 2 * self.settings.self_prompts))

    def _round(self, number: int, before: int, examples: list[str]) -> list[str]:
        """Texts of one round of user turns, from its file or made now. before: prompts that earlier rounds gave; examples: the
        files' prompts, whose first words open `opened_share` of the turns."""
        path = self.output / "prompts" / f"round_{number:05d}.jsonl"
        if not path.is_file():
            settings, turn = self.settings, user_turn(self.tokenizer)
            heats, room = settings.prompt_temperatures, settings.max_prompt_tokens - turn.overhead
            if room < 1:
                raise DSpineError(f"--max-prompt-tokens must be above the chat template's own {turn.overhead} tokens")
            self._claim_folder()
            count = self._round_size()
            opened = self._first_words(number, count, examples, room // 2)
            jobs = (
                Job(number * ROUND + i, np.concatenate([turn.opening, words]), room - len(words), heats[i % len(heats)])
                for i, words in enumerate(opened)
            )
            generator = self._generator(len(turn.opening) + room, self.tokenizer.stop_ids | turn.ends)
            answers, kept = [], f"{before} of {settings.self_prompts} prompts from earlier rounds"
            with progress_bar(count, self.progress, f"round {number + 1}: texts", every_call=False) as advance:
                for answer in generator.run(jobs):
                    answers.append(answer)
                    advance(len(answers), kept)
            answers.sort(key=lambda a: a.job.number)
            texts = [
                np.concatenate([opened[a.job.number - number * ROUND], a.tokens[:-1]]) for a in answers if a.reason == "stop"
            ]
            write_jsonl(path, [self.tokenizer.decode(text.tolist()).strip() for text in texts])
        try:
            return [json.loads(line) for line in json_lines(path.read_text(encoding="utf-8")) if line]
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DSpineError(f"{path}: damaged ({error}); delete it to have it made again") from error

    def _first_words(self, number: int, count: int, examples: list[str], limit: int) -> list[np.ndarray]:
        """How each of a round's turns begins, int64 [n]: empty, or 3 words to half of an example, at most `limit` tokens."""
        rng = np.random.default_rng([self.settings.seed, 2, number])
        starts = [np.zeros(0, dtype=np.int64)] * count
        for i in np.flatnonzero(rng.random(count) < self.settings.opened_share):
            text = examples[rng.integers(len(examples))]
            ends = [match.end() for match in re.finditer(r"\S+", text)]
            if len(ends) >= 6:
                words = self.tokenizer.encode(text[: ends[rng.integers(2, len(ends) // 2)]])
                starts[i] = np.array(words if len(words) <= limit else words[:limit], dtype=np.int64)
        return starts

    def _encode(self, prompts: list[str]) -> tuple[list[np.ndarray], int]:
        """Token ids as `dspine generate` would make them; prompts over the limit are counted, not cut."""
        limit, encoded = self.settings.max_prompt_tokens, []
        for prompt in prompts:
            messages = Prompt("", (prompt,)).messages()
            source: Any = messages if self.tokenizer.has_chat_template else prompt
            ids = encode_prompt(self.tokenizer, source, limit=1 << 30)
            if len(ids) <= limit:
                encoded.append(np.array(ids))
        return encoded, len(prompts) - len(encoded)

    # -- answers ------------------------------------------------------------------------------------------------------

    def answer(self, encoded: list[np.ndarray]) -> dict[str, int]:
        """Write every missing shard; returns how many answers and tokens were made now."""
        settings = self.settings
        greedy = np.random.default_rng([settings.seed, 1]).random(len(encoded)) < settings.greedy_share
        shards = -(-len(encoded) // settings.shard_size)
        missing = [number for number in range(shards) if not self._shard(number).is_file()]
        made = {"conversations": 0, "answer_tokens": 0, "too_short": 0}
        if not missing:
            return made
        generator = self._generator(settings.max_prompt_tokens + settings.max_tokens, self.tokenizer.stop_ids)
        jobs = self._jobs(missing, encoded, greedy)
        members = {n: len(encoded[n * settings.shard_size : (n + 1) * settings.shard_size]) for n in missing}
        with progress_bar(sum(members.values()), self.progress, "answers", every_call=False) as advance:
            self._collect(generator.run(jobs), members, greedy, made, advance)
        return made

    def _jobs(self, shards: list[int], encoded: list[np.ndarray], greedy: np.ndarray) -> Iterator[Job]:
        settings = self.settings
        for shard in shards:
            for number in range(shard * settings.shard_size, min((shard + 1) * settings.shard_size, len(encoded))):
                heat = 0.0 if greedy[number] else settings.temperature
                yield Job(ANSWER_BASE + number, encoded[number], settings.max_tokens, heat)

    def _collect(
        self, answers: Iterator[Answer], members: dict[int, int], greedy: np.ndarray, made: dict[str, int], advance: Advance
    ) -> None:
        """Gather answers by shard; write each as soon as it is complete."""
        size, started, done = self.settings.shard_size, time.perf_counter(), 0
        held: dict[int, dict[int, Answer]] = {shard: {} for shard in members}
        for answer in answers:
            number = answer.job.number - ANSWER_BASE
            shard = number // size
            held[shard][number] = answer
            done += 1
            made["answer_tokens"] += len(answer.tokens)
            advance(done, f"{made['answer_tokens'] / (time.perf_counter() - started):.0f} tokens/s")
            if len(held[shard]) == members[shard]:
                whole = held.pop(shard)
                rows = [(whole[n], bool(greedy[n])) for n in sorted(whole)]
                kept = [(np.concatenate([a.job.tokens, a.tokens]), len(a.job.tokens), g) for a, g in rows if len(a.tokens) > 1]
                write_shard(self._shard(shard), kept, self._vocab_size())
                made["conversations"] += len(kept)
                made["too_short"] += len(rows) - len(kept)

    def _shard(self, number: int) -> Path:
        return self.output / f"data_{number:05d}.npz"

    # -- the target ---------------------------------------------------------------------------------------------------

    def _load(self) -> Any:
        if self._target is None:
            import torch

            from dspine_cuda.training.devices import pick_device
            from dspine_cuda.training.target import load_frozen_target

            if self.dtype not in ("bfloat16", "float32"):
                raise DSpineError(f"--dtype must be bfloat16 or float32, got {self.dtype!r}")
            self._target = load_frozen_target(self.folder, pick_device(self.device), getattr(torch, self.dtype))
        return self._target

    def _vocab_size(self) -> int:
        return self._load().info.vocab_size

    def _check_context(self, capacity: int) -> None:
        context = self._load().info.context_length
        if capacity > context:
            raise DSpineError(
                f"--max-prompt-tokens and --max-tokens ask for sequences of {capacity} tokens, but the target's context holds "
                f"{context}: lower them"
            )

    def _generator(self, capacity: int, stops: frozenset[int]) -> BatchGenerator | CachedGenerator:
        """One at a time: each holds a cache of the size of the device."""
        self._check_context(capacity)
        key = (capacity, stops)
        if key not in self._generators:
            self._generators.clear()
            self._generators[key] = generator_for(
                self._load(), capacity=capacity, batch=self.batch, stop_ids=stops, seed=self.settings.seed
            )
        return self._generators[key]
