"""From a checked body to jobs: everything that can be refused is refused here, before any device work."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dspine.common.decoding import DecodingParams, LogitsRule, resolve_acceptance
from dspine.common.protocols import Engine
from dspine.common.sampling import SamplingParams
from dspine.common.selection.calibrated import uncorrected
from dspine.common.selection.choose import PolicyChoice, choose_policy
from dspine.common.selection.policies import AUTO_POLICY, StaticPolicy
from dspine.common.serving.errors import ApiError, unsupported
from dspine.common.serving.jobs import Job, TextStream, Update
from dspine.common.serving.parsing import OutputParser
from dspine.common.serving.prompts import Prompt, Prompts
from dspine.common.serving.rules import Grammars, LogitBias
from dspine.common.serving.schema import ChatRequest, CompletionRequest
from dspine.common.serving.settings import ServerSettings
from dspine.common.tokenizer import stop_token_ids

_SEED_MASK = 2**63 - 1
SinkMaker = Callable[[int], Callable[[Update], None]]


@dataclass(frozen=True)
class Plan:
    """Jobs of one request, in order of their choices; `groups[i]` is the prompt that job i answers."""

    jobs: list[Job]
    parsers: list[OutputParser]
    groups: list[int]


class Service:
    """Everything about the loaded pair that requests are checked against. Thread-safe: reads only."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine, self.settings = engine, settings
        info = engine.target.info
        self.context = min(info.context_length, settings.max_context or info.context_length)
        self.stop_ids = stop_token_ids(engine.tokenizer, info.eos_token_ids)
        self.prompts = Prompts(engine.tokenizer, self.context)
        self.grammars = Grammars(self.prompts, info.vocab_size, self.stop_ids)
        self.planner = ThreadPoolExecutor(1, thread_name_prefix="dspine-plan")  # one: tokenizers are not made for more
        drafts = engine.drafter is not None
        self.policy: PolicyChoice = choose_policy(
            settings.policy, engine, calibration=settings.calibration, acceptance=settings.acceptance, draft=drafts
        )
        self._fixed = settings.policy != AUTO_POLICY and isinstance(self.policy.policy, StaticPolicy)  # taken at its word

    def facts(self) -> dict[str, Any]:
        """What runs here, and whether it really speculates (case V5)."""
        info, drafter = self.engine.target.info, self.engine.drafter
        return {
            "backend": self.engine.runtime,
            "backend_reason": self.engine.backend_reason,
            "device": info.device,
            "dtype": info.dtype,
            "adapter": info.adapter,
            "context_length": self.context,
            "speculation": drafter is not None,
            "drafter": None if self.engine.draft_model is None else Path(self.engine.draft_model).name,
            "method": getattr(drafter.config, "method", None) if drafter is not None else None,
            "block_size": drafter.config.block_size if drafter is not None else None,
            "policy": self.policy.policy.name if drafter is not None else None,
            "policy_reason": self.policy.reason if drafter is not None else None,
            "acceptance": self.settings.acceptance if drafter is not None else None,
            "notes": list(self.engine.notes),
        }

    def check_model(self, name: str) -> None:
        """ApiError 404 for a model that is not served here."""
        if name not in self.settings.names:
            there = ", ".join(repr(known) for known in self.settings.names)
            raise ApiError(
                f"model {name[:128]!r} is not served here: {there}", status=404, param="model", code="model_not_found"
            )

    def chat(self, request: ChatRequest, client: str, sinks: SinkMaker) -> Plan:
        """Jobs of a chat request."""
        self.check_model(request.model)
        params = self._params(request)
        if request.parallel_tool_calls is False and request.tools and request.tool_choice in (None, "auto"):
            raise unsupported("parallel_tool_calls", "a free answer may hold several calls; force one with 'tool_choice'")
        grammar = self.grammars.wanted(request)
        biases = self._biases(request)
        prompt = self.prompts.chat(request)
        rules = partial(self._rules, biases, grammar, prompt)
        tools = bool(request.tools) and request.tool_choice != "none"
        count = request.n or 1
        jobs = [self._job(request, prompt, params, index, client, sinks(index), rules) for index in range(count)]
        parsers = [OutputParser(reasoning=self.prompts.thinks, thinking=prompt.thinking, tools=tools) for _ in jobs]
        return Plan(jobs, parsers, [0] * count)

    def completion(self, request: CompletionRequest, client: str, sinks: SinkMaker) -> Plan:
        """Jobs of a completion request: n for each prompt."""
        self.check_model(request.model)
        params, biases = self._params(request), self._biases(request)
        prompts = [self.prompts.completion(prompt, i, request) for i, prompt in enumerate(request.prompts)]
        count = request.n or 1
        if len(prompts) * count > self.settings.scheduler.max_queue + self.settings.scheduler.max_concurrency:
            raise ApiError(f"{len(prompts)} prompts times n = {count} is more than this server queues", param="prompt")
        jobs, groups = [], []
        for group, prompt in enumerate(prompts):
            rules = partial(self._rules, biases, None, prompt)
            for choice in range(count):
                index = len(jobs)
                jobs.append(self._job(request, prompt, params, choice, client, sinks(index), rules))
                groups.append(group)
        return Plan(jobs, [OutputParser(reasoning=False, thinking=False, tools=False) for _ in jobs], groups)

    def _params(self, request: ChatRequest | CompletionRequest) -> DecodingParams:
        name, limit = request.token_limit
        if limit is not None and limit > self.context:
            raise ApiError(f"'{name}' is at most {self.context} here, got {limit}", param=name, code="invalid_value")
        seed = int.from_bytes(os.urandom(8), "little") if request.seed is None else request.seed
        temperature = 1.0 if request.temperature is None else request.temperature
        sampling = SamplingParams(
            temperature=temperature,
            top_k=request.top_k or 0,
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p or 0.0,
            repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            seed=seed & _SEED_MASK,
        )
        acceptance = self.settings.acceptance
        if sampling.greedy and acceptance != "auto":
            acceptance = "greedy"
        elif not sampling.greedy and acceptance == "greedy":
            acceptance = "auto"
        resolve_acceptance(acceptance, sampling, self.engine.drafter, self.policy.policy)
        return DecodingParams(
            max_tokens=limit or self.settings.default_max_tokens,
            sampling=sampling,
            acceptance=acceptance,
            stop_ids=frozenset() if request.ignore_eos else self.stop_ids,
            prefill_chunk=self.settings.scheduler.chunk,
            top_logprobs=request.top,
        )

    def _job(
        self,
        request: ChatRequest | CompletionRequest,
        prompt: Prompt,
        params: DecodingParams,
        choice: int,
        client: str,
        sink: Callable[[Update], None],
        rules: Callable[[], list[LogitsRule]],
    ) -> Job:
        """`choice` numbers the answers to one prompt: it keys the random draws, so they differ and can be repeated."""
        room = self.context - len(prompt.ids)
        values = {**vars(params), "request": choice, "max_tokens": min(params.max_tokens, room)}
        repeatable = request.seed is not None and not params.sampling.greedy
        policy = uncorrected(self.policy.policy) if repeatable else self.policy.policy  # a batch has no Stage 0
        if request.draft == "full":
            policy = StaticPolicy()
        return Job(
            prompt=prompt.ids,
            params=DecodingParams(**values),
            policy=policy,
            text=TextStream(self.engine.tokenizer, request.stops, self.prompts.marker_ids),
            sink=sink,
            client=client if request.user is None else f"{client}/{request.user}",
            draft=request.draft is not False,
            pinned=repeatable or request.draft == "full" or self._fixed,
            make_rules=rules,
        )

    def _biases(self, request: ChatRequest | CompletionRequest) -> dict[int, float]:
        biases = {int(key): value for key, value in (request.logit_bias or {}).items()}
        vocab = self.engine.target.info.vocab_size
        wrong = next((token for token in biases if token >= vocab), None)
        if wrong is not None:
            raise ApiError(f"'logit_bias' names token {wrong}, the vocabulary has {vocab}", param="logit_bias")
        return biases

    def _rules(self, biases: dict[int, float], grammar: str | None, prompt: Prompt) -> list[LogitsRule]:
        """Made on the worker's thread, fresh for every answer."""
        arrays, vocab = self.engine.target.arrays, self.engine.target.info.vocab_size
        rules: list[LogitsRule] = []
        if biases:
            rules.append(LogitBias(arrays, vocab, biases))
        if grammar is not None:
            rules.append(self.grammars.rule(grammar, arrays, thinking=prompt.thinking, may_think=prompt.may_think))
        return rules
