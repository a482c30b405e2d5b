"""The round and the loop: propose, choose a length, begin, correct, finish, accept, commit.

One generator drives every kind of call. Plain decoding is the same loop with a block of one token, so a comparison
between the two compares nothing but the drafts. The host reads twice a round: after the draft (is it finite; its signals,
where the length policy reads them) and after acceptance (which tokens); a third time only where the router of layer 0 may
add a token.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import numpy as np

from dspine.common.acceptance import (
    Verdict,
    accept_greedy,
    accept_point_mass,
    accept_rejection,
    accept_rejection_dense,
    check_rule,
)
from dspine.common.arrays import array_namespace, astype
from dspine.common.configs import CONDITIONAL
from dspine.common.errors import DSpineError
from dspine.common.protocols import Drafter, DraftRequest, LengthPolicy, Proposal, Target
from dspine.common.sampling import ACCEPT, DRAFT, DRAW, SamplingParams, penalise, sample_index, token_probabilities, uniforms
from dspine.common.selection.policies import StaticPolicy
from dspine.common.statistics import Statistics

logger = logging.getLogger("dspine")
BREAK_EVEN_ROUNDS = 50


@dataclass(frozen=True)
class DecodingParams:
    """What one request asks for.

    acceptance: `auto` is `greedy` at temperature 0, else `rejection` for drafters whose draws are conditional
    and `point-mass` for the others. `break_even`: tokens a round below which, over 50 rounds, drafting stops for the
    rest of the request (0 never stops it). `request` keys the uniforms together with the seed.
    """

    max_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    acceptance: str = "auto"
    stop_ids: frozenset[int] = frozenset()
    request: int = 0
    prefill_chunk: int = 512
    break_even: float = 1.1

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise DSpineError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.prefill_chunk < 1:
            raise DSpineError(f"prefill_chunk must be at least 1, got {self.prefill_chunk}")


@dataclass(frozen=True)
class TokenEvent:
    """One emitted token. `finish_reason` is `stop` or `length` on the last one, else None; `stats` is live."""

    token: int
    drafted: bool
    finish_reason: str | None
    stats: Statistics


def resolve_acceptance(rule: str, sampling: SamplingParams, drafter: Drafter | None, policy: LengthPolicy) -> str:
    """`auto` -> the rule that fits; refuses combinations that are not lossless."""
    if rule == "auto":
        if sampling.greedy:
            return "greedy"
        conditional = drafter is not None and getattr(drafter.config, "method", None) in CONDITIONAL
        return "rejection" if conditional and not policy.reads_draft_tokens else "point-mass"
    check_rule(rule, temperature=sampling.temperature, reads_draft_tokens=policy.reads_draft_tokens, policy=policy.name)
    return rule


def decode(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    params: DecodingParams,
    policy: LengthPolicy | None = None,
) -> Iterator[TokenEvent]:
    """Tokens after `prompt`, one event each; stops at a stop token (emitted), `max_tokens`, or the end of the context."""
    loop = DecodingLoop(target, drafter, prompt, params, policy or StaticPolicy())
    return loop.run()


class DecodingLoop:
    """State of one sequence. Invariant: `target` and `drafter` caches hold prompt + output without the anchor, which is
    the newest emitted token and not yet processed."""

    def __init__(
        self, target: Target, drafter: Drafter | None, prompt: Sequence[int], params: DecodingParams, policy: LengthPolicy
    ) -> None:
        context = target.info.context_length
        if not len(prompt):
            raise DSpineError("the prompt is empty: at least one token is needed")
        if len(prompt) >= context:
            raise DSpineError(
                f"the prompt has {len(prompt)} tokens, the context of {target.info.name} holds {context}: shorten it"
            )
        self.target, self.drafter, self.policy, self.params = target, drafter, policy, params
        self.prompt = np.asarray(prompt, dtype=np.int32)
        self.rule = resolve_acceptance(params.acceptance, params.sampling, drafter, policy)
        self.room = min(params.max_tokens, context - len(prompt))
        self.stats = Statistics(prompt_tokens=len(prompt))
        block = drafter.config.block_size if drafter is not None else 1
        capacity = len(prompt) + self.room + block
        self.cache = target.make_cache(capacity)
        self.draft_cache = drafter.make_cache(capacity) if drafter is not None else None
        self.anchor = 0
        self._recent: deque[int] = deque(maxlen=BREAK_EVEN_ROUNDS)
        self._counts = self._output_counts = None
        if params.sampling.penalised:
            self._counts = np.bincount(self.prompt, minlength=target.info.vocab_size).astype(np.float32)[None]
            self._output_counts = np.zeros_like(self._counts)

    def run(self) -> Iterator[TokenEvent]:
        """The one loop: prefill, then rounds until something ends it."""
        started = perf_counter()
        first = self._prefill()
        self.stats.prefill_seconds = perf_counter() - started
        self.stats.generated_tokens = 1
        yield from self._events([first], 0)
        while not self._finish_reason(self.anchor):
            started = perf_counter()
            emitted, accepted = self._round()
            self.stats.decode_seconds += perf_counter() - started
            yield from self._events(emitted, accepted)

    def _events(self, emitted: list[int], accepted: int) -> Iterator[TokenEvent]:
        self.anchor = emitted[-1]
        last = len(emitted) - 1
        for i, token in enumerate(emitted):
            yield TokenEvent(token, i < accepted, self._finish_reason(token) if i == last else None, self.stats)

    def _finish_reason(self, token: int) -> str | None:
        if token in self.params.stop_ids:
            return "stop"
        return "length" if self.stats.generated_tokens >= self.room else None

    def _prefill(self) -> int:
        """Chunks of the prompt through the target; features are projected at once and not kept. Returns the first token."""
        logits = None
        for start in range(0, len(self.prompt), self.params.prefill_chunk):
            part = self.prompt[None, start : start + self.params.prefill_chunk]
            result = self.target.prefill(self.cache, self.target.arrays.to_device(part), chunk=self.params.prefill_chunk)
            logits = result.logits
            if self.drafter is not None:
                self.drafter.commit(self.draft_cache, result.features)
        xp = array_namespace(logits)
        block = self.target.arrays.to_device(np.zeros((1, 1), dtype=np.int32))
        verdict = self._judge(xp.expand_dims(logits, axis=1), block, None)
        token = int(self.target.arrays.to_host(verdict.next_token)[0][0])
        self._count([token])
        return token

    def _round(self) -> tuple[list[int], int]:
        """One round; returns the emitted tokens and how many of them were drafts."""
        committed = len(self.prompt) + self.stats.generated_tokens - 1
        limit = min(self.room - self.stats.generated_tokens, self.target.info.context_length - committed)
        started = perf_counter()
        anchor = self.target.arrays.to_device(np.array([self.anchor], dtype=np.int32))
        proposal = self._propose(anchor, limit)
        drafted = perf_counter()
        tokens, accepted, next_token, verification = self._verify(anchor, proposal, limit)
        emitted = [*tokens[:accepted], next_token][: self.room - self.stats.generated_tokens]
        stop = next((i for i, token in enumerate(emitted) if token in self.params.stop_ids), len(emitted) - 1)
        emitted = emitted[: stop + 1]
        accepted = min(accepted, len(emitted))
        self.target.commit(self.cache, verification, len(emitted))
        self._count(emitted)
        verified = perf_counter()
        if self.drafter is not None:
            self.drafter.commit(self.draft_cache, verification.features[:, : len(emitted)])
        self.stats.draft_seconds += drafted - started + perf_counter() - verified
        self.stats.verify_seconds += verified - drafted
        self.stats.add_round(len(tokens), accepted, len(emitted))
        if tokens:
            self._watch_break_even(len(emitted))
        return emitted, accepted

    def _propose(self, anchor: Any, limit: int) -> Proposal | None:
        """A block of drafts, or None where this round decodes plainly."""
        if self.drafter is None or limit < 2:
            return None
        temperature = self.params.sampling.temperature if self.rule == "rejection" else 0.0
        draws = None
        if temperature > 0:
            draws = self._uniforms(self.drafter.config.num_proposals)[DRAFT]
        proposal = self.drafter.propose(self.draft_cache, anchor, DraftRequest(temperature, draws, self.policy.needs_signals))
        if self.policy.needs_signals and proposal.confidence is not None and proposal.entropy is not None:
            finite, confidence, entropy = self.target.arrays.to_host(proposal.finite, proposal.confidence, proposal.entropy)
            proposal = replace(proposal, confidence=confidence, entropy=entropy)
        else:
            (finite,) = self.target.arrays.to_host(proposal.finite)
        if bool(finite.all()):
            return proposal
        self.stats.non_finite_drafts += 1
        if self.stats.non_finite_drafts == 1:
            logger.warning(
                "draft logits are not finite (an activation overflowed; is this float16?): such rounds decode plainly"
            )
        return None

    def _verify(self, anchor: Any, proposal: Proposal | None, limit: int) -> tuple[list[int], int, int, Any]:
        """Target over [anchor, drafts...]; returns (drafts verified, accepted, the target's token, verification)."""
        block = anchor[:, None]
        nominal = upper = 1
        if proposal is not None:
            xp = array_namespace(anchor)
            longest = min(limit, 1 + proposal.tokens.shape[1])
            nominal = self.policy.nominal(proposal, longest)
            upper = self.policy.stage_zero_length(nominal, longest)
            block = xp.concat([block, astype(proposal.tokens[:, : upper - 1], anchor.dtype)], axis=1)
        stage = self.target.begin(self.cache, block)
        length = nominal
        if proposal is not None:
            seen = stage
            if upper > nominal and stage.router_picks is not None:
                seen = replace(stage, router_picks=self.target.arrays.to_host(stage.router_picks)[0])
            length = self.policy.correct(seen, nominal, min(limit, upper))
        verification = self.target.finish(self.cache, stage, length)
        block = block[:, :length]
        verdict = self._judge(verification.logits, block, proposal)
        host = self.target.arrays.to_host(block, verdict.accepted, verdict.next_token)
        return [int(t) for t in host[0][0, 1:]], int(host[1][0]), int(host[2][0]), verification

    def _judge(self, logits: Any, block: Any, proposal: Proposal | None) -> Verdict:
        """Acceptance of the drafts block[:, 1:] under this request's rule."""
        sampling, draft = self.params.sampling, block[:, 1:]
        if self._counts is not None:
            counts, output = (self.target.arrays.to_device(c) for c in (self._counts, self._output_counts))
            logits = penalise(logits, block, counts, output, sampling)
        limit = self.target.arrays.to_device(np.array([draft.shape[1]], dtype=np.int32))
        if self.rule == "greedy":
            return accept_greedy(logits, draft, limit)
        p = token_probabilities(logits, sampling)
        lanes = self._uniforms(logits.shape[1])
        if draft.shape[1] == 0:
            return Verdict(limit, sample_index(p[:, 0], lanes[DRAW][:, 0]))
        accept, draw = lanes[ACCEPT][:, :-1], lanes[DRAW]
        if self.rule == "point-mass":
            return accept_point_mass(p, draft, limit, accept, draw)
        count = draft.shape[1]
        if proposal.candidates is None:  # type: ignore[union-attr]
            return accept_rejection_dense(p, draft, limit, proposal.q[:, :count], accept, draw)  # type: ignore[union-attr]
        return accept_rejection(p, draft, limit, proposal.candidates[:, :count], proposal.q[:, :count], accept, draw)  # type: ignore[union-attr]

    def _uniforms(self, count: int) -> list[Any]:
        """Three lanes [1, count] for the next `count` output positions."""
        rows = uniforms(self.params.sampling.seed, self.params.request, self.stats.generated_tokens, count)
        return [self.target.arrays.to_device(np.ascontiguousarray(rows[None, :, lane])) for lane in range(3)]

    def _count(self, tokens: list[int]) -> None:
        """Penalties count emitted tokens only."""
        if self._counts is not None:
            np.add.at(self._counts[0], tokens, 1.0)
            np.add.at(self._output_counts[0], tokens, 1.0)  # type: ignore[index]

    def _watch_break_even(self, emitted: int) -> None:
        self._recent.append(emitted)
        mean = sum(self._recent) / len(self._recent)
        if len(self._recent) == BREAK_EVEN_ROUNDS and mean < self.params.break_even:
            reason = (
                f"{mean:.2f} tokens a round over {BREAK_EVEN_ROUNDS} rounds, below the break-even of {self.params.break_even}"
            )
            self.stats.drafting_disabled = reason
            logger.warning("drafting is off for the rest of this request: %s", reason)
            self.drafter = self.draft_cache = None
