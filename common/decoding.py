"""The round and the loop: propose, choose a length, begin, correct, finish, accept, commit.

One generator drives every kind of call. Plain decoding is the same loop with a block of one token, so a comparison
between the two compares nothing but the drafts. The host reads once a round, after acceptance (which tokens; was the draft
finite), and once more before it where the length policy reads the draft's signals or the picks of layer 0's router.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol

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
from dspine.common.configs import CONDITIONAL, PATH_SIGNALS
from dspine.common.errors import DSpineError
from dspine.common.logprobs import TokenLogprobs, token_logprobs
from dspine.common.protocols import Drafter, DraftRequest, LengthPolicy, Proposal, StageZero, Target
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
    rest of the request (0 never stops it). `request` keys the uniforms together with the seed. `top_logprobs`: events carry
    log-probabilities, with this many of the most likely tokens (None: no log-probabilities).
    """

    max_tokens: int = 256
    sampling: SamplingParams = field(default_factory=SamplingParams)
    acceptance: str = "auto"
    stop_ids: frozenset[int] = frozenset()
    request: int = 0
    prefill_chunk: int = 512
    break_even: float = 1.1
    top_logprobs: int | None = None

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
    logprobs: TokenLogprobs | None = None


class LogitsRule(Protocol):
    """Shapes the target's logits after penalties, before acceptance: a bias, a grammar. Its state follows emitted tokens."""

    needs_drafts: bool  # whether `apply` reads the drafts: one host read more a round

    def apply(self, logits: Any, drafts: Sequence[int]) -> Any:
        """logits float32 [1, w, V]; row i follows everything emitted and then drafts[:i]. Rows behind a draft that row i
        forbids are never used. `drafts` is empty unless `needs_drafts`."""
        ...

    def emitted(self, tokens: Sequence[int]) -> None:
        """These tokens have become part of the answer."""
        ...


@dataclass(frozen=True)
class Round:
    """One step of a loop: its events (none while the prompt is being read), the drafts verified, and how many stayed."""

    events: list[TokenEvent] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    accepted: int = 0


def resolve_acceptance(rule: str, sampling: SamplingParams, drafter: Drafter | None, policy: LengthPolicy) -> str:
    """`auto` -> the rule that fits; refuses combinations that are not lossless."""
    if rule == "auto":
        if sampling.greedy:
            return "greedy"
        conditional = drafter is not None and getattr(drafter.config, "method", None) in CONDITIONAL
        return "rejection" if conditional and not reads_drafts(policy, drafter) else "point-mass"
    check_rule(rule, temperature=sampling.temperature, reads_draft_tokens=reads_drafts(policy, drafter), policy=policy.name)
    return rule


def reads_drafts(policy: LengthPolicy, drafter: Drafter | None) -> bool:
    """Whether the length depends on the drawn tokens: by the router's picks, or by signals that this drafter reads off its
    drawn path."""
    on_path = drafter is not None and getattr(drafter.config, "method", None) in PATH_SIGNALS
    return policy.reads_draft_tokens or (policy.needs_signals and on_path)


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
    the newest emitted token and not yet processed.

    `step` does the next piece of work; a batched driver uses the parts of a round instead: `round_limit`, `draft_request`,
    `judge`, `settle`. rules: see `LogitsRule`. watch: called with every emitted token in order, before anything is
    committed; true ends the text at that token (stop strings), so nothing behind it is counted or cached.
    """

    reader = "eager"  # what reads the prompt: rows that were made in another way may differ in their last bits
    awaiting = False  # whether the next step waits for what the device is doing already

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        prompt: Sequence[int],
        params: DecodingParams,
        policy: LengthPolicy,
        *,
        rules: Sequence[LogitsRule] = (),
        watch: Callable[[int], bool] | None = None,
    ) -> None:
        context = target.info.context_length
        if not len(prompt):
            raise DSpineError("the prompt is empty: at least one token is needed")
        if len(prompt) >= context:
            raise DSpineError(
                f"the prompt has {len(prompt)} tokens, the context of {target.info.name} holds {context}: shorten it"
            )
        self.target, self.drafter, self.policy, self.params = target, drafter, policy, params
        self.rules, self.watch = tuple(rules), watch
        self.prompt = np.asarray(prompt, dtype=np.int32)
        self.rule = resolve_acceptance(params.acceptance, params.sampling, drafter, policy)
        self.room = min(params.max_tokens, context - len(prompt))
        self.stats = Statistics(prompt_tokens=len(prompt))
        block = drafter.config.block_size if drafter is not None else 1
        capacity = len(prompt) + self.room + block
        self.cache, self.draft_cache = self._make_caches(capacity)
        self.anchor = 0
        self.output: list[int] = []  # every emitted token, the anchor included
        self.finish_reason: str | None = None
        self._read = 0  # prompt tokens in the caches
        self._queued: tuple[int, Proposal | None] | None = None  # the draft after so many generated tokens, asked for early
        self._ahead: tuple[Any, Any] | None = None  # a plain round begun early: its verification, and its token on the device
        self._recent: deque[int] = deque(maxlen=BREAK_EVEN_ROUNDS)
        self._counts = self._output_counts = None
        if params.sampling.penalised:
            self._counts = np.bincount(self.prompt, minlength=target.info.vocab_size).astype(np.float32)[None]
            self._output_counts = np.zeros_like(self._counts)

    def _make_caches(self, capacity: int) -> tuple[Any, Any]:
        """The target's cache and the drafter's (None without one), for `capacity` tokens."""
        draft_cache = self.drafter.make_cache(capacity) if self.drafter is not None else None
        return self.target.make_cache(capacity), draft_cache

    def run(self) -> Iterator[TokenEvent]:
        """The one loop: prefill, then rounds until something ends it."""
        try:
            while self.finish_reason is None:
                yield from self.step(ahead=True).events
        finally:
            self.drop_ahead()

    def step(self, ahead: bool = False) -> Round:
        """The next chunk of the prompt, or the next round. ahead: plain rounds may begin the one after them; whoever stops
        between two steps then calls `drop_ahead` before using the caches."""
        started = perf_counter()
        if self.reading_prompt:
            result = self._prefill()
            self.stats.prefill_seconds += perf_counter() - started
        elif ahead and self._looks_ahead():
            result = self._plain_round()
            self.stats.decode_seconds += perf_counter() - started
        else:
            self.drop_ahead()
            result = self._round()
            self.stats.decode_seconds += perf_counter() - started
        self._draft_ahead()
        return result

    def _draft_ahead(self) -> None:
        """Ask for the next draft before this round's text is shown, where the drafter computes in the background."""
        if self.finish_reason is None and not self.reading_prompt and getattr(self.drafter, "queues_ahead", False):
            self._queued = (self.stats.generated_tokens, self._propose(self._anchor_array(), self.round_limit()))

    def _anchor_array(self) -> Any:
        return self.target.arrays.to_device(np.array([self.anchor], dtype=np.int32))

    @property
    def reading_prompt(self) -> bool:
        """Whether the next step is a chunk of the prompt."""
        return self._read < len(self.prompt)

    @property
    def committed(self) -> int:
        """Tokens in the caches."""
        return self._read + max(self.stats.generated_tokens - 1, 0)

    def reuse(self, count: int) -> None:
        """The caller has filled both caches with the first `count` prompt tokens (a prefix cache); one must be left to read."""
        if not 0 <= count < len(self.prompt) or self._read:
            raise DSpineError(f"reuse of {count} tokens: expected less than the prompt's {len(self.prompt)}, before it is read")
        self._read = self.stats.cached_tokens = count

    def settle(self, drafts: list[int], accepted: int, next_token: int, logits: Any) -> Round:
        """A verdict becomes events: cut at `max_tokens`, stop ids and `watch`; counts and rules follow what is left.

        logits float32 [1, w, V] of the block, as the target gave them. The caller commits len(events) tokens to both caches.
        """
        emitted = [*drafts[:accepted], next_token][: self.room - self.stats.generated_tokens]
        stop = next((i for i, token in enumerate(emitted) if self._ends(token)), None)
        if stop is not None:
            emitted = emitted[: stop + 1]
        accepted = min(accepted, len(emitted))
        self._count(emitted)
        for rule in self.rules:
            rule.emitted(emitted)
        if self.stats.generated_tokens:
            self.stats.add_round(len(drafts), accepted, len(emitted))
        else:
            self.stats.generated_tokens = 1  # the prefill's token belongs to no round
        full = "length" if self.stats.generated_tokens >= self.room else None
        self.finish_reason = "stop" if stop is not None else full
        self.anchor = emitted[-1]
        self.output += emitted
        found: list[TokenLogprobs | None] = [None] * len(emitted)
        if self.params.top_logprobs is not None:
            found = [*token_logprobs(self.target.arrays, logits[:, : len(emitted)], emitted, self.params.top_logprobs)]
        last = len(emitted) - 1
        events = [
            TokenEvent(token, i < accepted, self.finish_reason if i == last else None, self.stats, found[i])
            for i, token in enumerate(emitted)
        ]
        if drafts:
            self._watch_break_even(len(emitted))
        return Round(events, drafts, accepted)

    def _ends(self, token: int) -> bool:
        watched = self.watch is not None and self.watch(token)
        return watched or token in self.params.stop_ids

    def _prefill(self) -> Round:
        """One chunk of the prompt through the target; features are projected at once and not kept. The last one settles the
        first token."""
        chunk = self.params.prefill_chunk
        part = self.prompt[None, self._read : self._read + chunk]
        result = self.target.prefill(self.cache, self.target.arrays.to_device(part), chunk=chunk)
        if self.drafter is not None:
            self.drafter.commit(self.draft_cache, result.features)
        self._read += part.shape[1]
        if self.reading_prompt:
            return Round()
        xp = array_namespace(result.logits)
        logits = xp.expand_dims(result.logits, axis=1)
        verdict = self.judge(logits, self.target.arrays.to_device(np.zeros((1, 1), dtype=np.int32)), None)
        return self.settle([], 0, int(self.target.arrays.to_host(verdict.next_token)[0][0]), logits)

    def round_limit(self) -> int:
        """Input tokens that this round may verify at most, the anchor included."""
        generated = self.stats.generated_tokens
        return min(self.room - generated, self.target.info.context_length - (len(self.prompt) + generated - 1))

    def _round(self) -> Round:
        """One round of this sequence alone."""
        limit = self.round_limit()
        started = perf_counter()
        anchor = self._anchor_array()
        queued, self._queued = self._queued, None
        ready = queued is not None and queued[0] == self.stats.generated_tokens and self.drafter is not None
        proposal = queued[1] if ready else self._propose(anchor, limit)  # type: ignore[index]
        drafted = perf_counter()
        tokens, accepted, next_token, verification = self._verify(anchor, proposal, limit)
        drafter = self.drafter  # `settle` may switch drafting off
        result = self.settle(tokens, accepted, next_token, verification.logits)
        self.target.commit(self.cache, verification, len(result.events))
        verified = perf_counter()
        if drafter is not None:
            drafter.commit(self.draft_cache, verification.features[:, : len(result.events)])
        if self.drafter is None:
            self.draft_cache = None
        self.stats.draft_seconds += drafted - started + perf_counter() - verified
        self.stats.verify_seconds += verified - drafted
        return result

    def _looks_ahead(self) -> bool:
        """Whether the next plain round can be queued before this one's token is read: nothing that the host counts shapes the
        logits. Only for targets that compute in the background and can be read in the middle (`Target.start`)."""
        shaped = bool(self.rules) or self._counts is not None
        return self.drafter is None and not shaped and hasattr(self.target, "start")

    def _plain_round(self) -> Round:
        """A block of one token. The next one is queued before the host waits for this one's token, and dropped if that is the
        last: a token a round is committed whatever it is, so nothing else depends on the read."""
        started = perf_counter()
        ready, self._ahead = self._ahead, None
        verification, token = ready or self._start_plain(self._anchor_array(), 0)
        self.target.commit(self.cache, verification, 1)
        if self.round_limit() > 1:
            self._ahead = self._start_plain(token, 1)
        result = self.settle([], 0, int(self.target.arrays.to_host(token)[0][0]), verification.logits)
        if self.finish_reason is not None:
            self.drop_ahead()
        self.stats.verify_seconds += perf_counter() - started
        return result

    def _start_plain(self, anchor: Any, ahead: int) -> tuple[Any, Any]:
        """(verification, the token after it int32 [1]) of a block of one token int32 [1], both on their way; `ahead` tokens
        are not counted yet."""
        verification = self.target.finish(self.cache, self.target.begin(self.cache, anchor[:, None]), 1)
        token = astype(self.judge(verification.logits, anchor[:, None], None, ahead).next_token, anchor.dtype)
        self.target.start(verification, token)  # type: ignore[attr-defined]
        return verification, token

    def drop_ahead(self) -> None:
        """Forget a round that was begun early: the caches then hold what `committed` says."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self.target.commit(self.cache, ahead[0], 0)

    def draft_request(self) -> DraftRequest:
        """How the next draft of this sequence is to be made."""
        temperature = self.params.sampling.temperature if self.rule == "rejection" else 0.0
        draws = self._uniforms(self.drafter.config.num_proposals)[DRAFT] if temperature > 0 else None  # type: ignore[union-attr]
        return DraftRequest(temperature, draws, self.policy.needs_signals)

    def _propose(self, anchor: Any, limit: int) -> Proposal | None:
        """A block of drafts, or None where this round decodes plainly."""
        if self.drafter is None or limit < 2:
            return None
        return self.drafter.propose(self.draft_cache, anchor, self.draft_request())

    def note_non_finite(self) -> None:
        """A draft was not finite: count it, and say so once."""
        self.stats.non_finite_drafts += 1
        if self.stats.non_finite_drafts == 1:
            logger.warning(
                "draft logits are not finite (an activation overflowed; is this float16?): such rounds decode plainly"
            )

    def _verify(self, anchor: Any, proposal: Proposal | None, limit: int) -> tuple[list[int], int, int, Any]:
        """Target over [anchor, drafts...]; returns (drafts verified, accepted, the target's token, verification)."""
        to_host = self.target.arrays.to_host
        stage, length, proposal = self._stage(anchor, proposal, limit)
        verification = self.target.finish(self.cache, stage, length)
        block = stage.tokens[:, :length]
        verdict = self.judge(verification.logits, block, proposal)
        reads = [block, verdict.accepted, verdict.next_token]
        if proposal is None:
            tokens, accepted, next_token = to_host(*reads)
        else:
            tokens, accepted, next_token, finite = to_host(*reads, proposal.finite)
            if not finite.all():  # `judge` accepted nothing, so the target's own token is a plain round's
                self.note_non_finite()
                return [], 0, int(next_token[0]), verification
        return [int(t) for t in tokens[0, 1:]], int(accepted[0]), int(next_token[0]), verification

    def _stage(self, anchor: Any, proposal: Proposal | None, limit: int) -> tuple[StageZero, int, Proposal | None]:
        """`begin`, and the length: (what it left, tokens to verify, the proposal; None where this round decodes plainly).

        Signals and router picks are read together where layer 0 has a router: it then runs over the whole block first.
        """
        block = anchor[:, None]
        if proposal is None:
            return self.target.begin(self.cache, block), 1, None
        xp, to_host = array_namespace(anchor), self.target.arrays.to_host
        drafts = astype(proposal.tokens, anchor.dtype)
        drafts = xp.where(proposal.finite[:, None], drafts, xp.zeros_like(drafts))  # an id that exists, whatever NaN drew
        longest = min(limit, 1 + drafts.shape[1])
        block = xp.concat([block, drafts[:, : longest - 1]], axis=1)
        stage, picks = None, None
        if self.policy.needs_signals and proposal.confidence is not None and proposal.entropy is not None:
            reads = [proposal.finite, proposal.confidence, proposal.entropy]
            if getattr(self.target, "stops_at_router", False):
                stage = self.target.begin(self.cache, block)
                reads.append(stage.router_picks)
            finite, confidence, entropy, *rest = to_host(*reads)
            if not finite.all():
                self.note_non_finite()
                return stage or self.target.begin(self.cache, block[:, :1]), 1, None
            proposal = replace(proposal, confidence=confidence, entropy=entropy)
            picks = rest[0] if rest else None
        nominal = self.policy.nominal(proposal, longest)
        upper = self.policy.stage_zero_length(nominal, longest)
        stage = stage or self.target.begin(self.cache, block[:, :upper])
        seen = stage
        if upper > nominal and stage.router_picks is not None:
            picks = to_host(stage.router_picks)[0] if picks is None else picks
            seen = replace(stage, router_picks=picks[:, :upper])
        return stage, self.policy.correct(seen, nominal, min(limit, upper)), proposal

    def judge(self, logits: Any, block: Any, proposal: Proposal | None, ahead: int = 0) -> Verdict:
        """Acceptance of the drafts block[:, 1:] under this request's rule; `ahead` tokens before them are not counted yet."""
        sampling, draft = self.params.sampling, block[:, 1:]
        if self._counts is not None:
            counts, output = (self.target.arrays.to_device(c) for c in (self._counts, self._output_counts))
            logits = penalise(logits, block, counts, output, sampling)
        if self.rules:
            read = draft.shape[1] > 0 and any(rule.needs_drafts for rule in self.rules)
            tokens = self.target.arrays.to_host(draft)[0][0].tolist() if read else []
            for rule in self.rules:
                logits = rule.apply(logits, tokens)
        limit = self.target.arrays.to_device(np.array([draft.shape[1]], dtype=np.int32))
        if proposal is not None:
            limit = limit * astype(proposal.finite, limit.dtype)  # nothing of a draft that is not finite
        if self.rule == "greedy":
            return accept_greedy(logits, draft, limit)
        p = token_probabilities(logits, sampling)
        lanes = self._uniforms(logits.shape[1], ahead)
        if draft.shape[1] == 0:
            return Verdict(limit, sample_index(p[:, 0], lanes[DRAW][:, 0]))
        accept, draw = lanes[ACCEPT][:, :-1], lanes[DRAW]
        if self.rule == "point-mass":
            return accept_point_mass(p, draft, limit, accept, draw)
        count = draft.shape[1]
        if proposal.candidates is None:  # type: ignore[union-attr]
            return accept_rejection_dense(p, draft, limit, proposal.q[:, :count], accept, draw)  # type: ignore[union-attr]
        return accept_rejection(p, draft, limit, proposal.candidates[:, :count], proposal.q[:, :count], accept, draw)  # type: ignore[union-attr]

    def _uniforms(self, count: int, ahead: int = 0) -> list[Any]:
        """Three lanes [1, count] for `count` output positions, `ahead` behind the next one."""
        rows = uniforms(self.params.sampling.seed, self.params.request, self.stats.generated_tokens + ahead, count)
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
            self.drafter = None
