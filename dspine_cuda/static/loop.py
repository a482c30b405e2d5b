"""The decoding loop over static rounds: the same events as `common.decoding`, from reports of the device.

`GraphDecoder` belongs to a loaded pair: it keeps one arena and its graphs between requests. A request that it cannot take runs
in the eager loop; `loop` returns the reason with it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import torch

from dspine.common.decoding import DecodingLoop, DecodingParams, Round, resolve_acceptance
from dspine.common.errors import BackendError, DSpineError
from dspine.common.protocols import LengthPolicy
from dspine.common.sampling import uniforms
from dspine.common.selection.calibrated import HybridSpecPolicy, NominalPolicy
from dspine.common.selection.lengths import LengthTables
from dspine.common.selection.policies import StaticPolicy
from dspine_cuda.graphs import PLAIN, POLICY, GraphRunner, Mode, Runner
from dspine_cuda.static import drafter as static_drafter
from dspine_cuda.static.arena import STOP_IDS, Arena, ArenaShape
from dspine_cuda.static.round import RoundRules, StaticRound, read_report
from dspine_cuda.static.switch import switch_support
from dspine_cuda.static.timing import expert_blocks, seconds_of, timed_rounds
from dspine_cuda.targets.dense import DenseTarget
from dspine_cuda.targets.hybrid import HybridTarget

SMALLEST_ARENA = 2048  # tokens
GRAPHS = ("auto", "on", "off")
KEPT_RUNNERS = 4  # sets of graphs, one for each way of sampling; the oldest goes first
HEADS = (16, 256)  # sizes of `block_attention`'s kernel


def pair_refusal(target: Any, drafter: Any | None) -> str | None:
    """Why this pair has no static form; None where it has one."""
    if not isinstance(target, DenseTarget | HybridTarget):
        return f"the target runs by {target.info.adapter}: only lean decoders have a static form"
    sizes = [target.config.head_dim] + ([drafter.config.head_dim] if drafter is not None else [])
    for size in sizes:
        if not HEADS[0] <= size <= HEADS[1]:
            return f"attention heads of {size} are not supported: {HEADS[0]} to {HEADS[1]}"
    if target.info.dtype not in ("bfloat16", "float32"):
        return f"the target runs in {target.info.dtype}: bfloat16 or float32 are needed"
    if drafter is None:
        return None
    block = drafter.config.block_size
    return static_drafter.refusal(drafter) if block <= 16 else f"the drafter's block of {block} is longer than 16"


def _closed(runner: Runner) -> None:
    runner.drop()
    getattr(runner, "close", lambda: None)()


@dataclass(frozen=True)
class Plan:
    """How a request runs: `mode` of its drafted rounds, `rules` of its graphs."""

    mode: Mode
    rules: RoundRules


class GraphDecoder:
    """Static rounds for one loaded pair. `reason` says how rounds run; it is set once, at the first request or `prepare`."""

    def __init__(
        self, target: Any, drafter: Any | None, *, make_runner: Callable[[StaticRound], Runner] = GraphRunner, limit: int = 0
    ) -> None:
        """limit: committed tokens a slot may hold at most (0: the model's context). Raises DSpineError where the pair has no
        static form."""
        refused = pair_refusal(target, drafter)
        if refused is not None:
            raise DSpineError(f"graphs: {refused}; use graphs off")
        self.target, self.drafter, self._make_runner = target, drafter, make_runner
        self.limit = min(limit or target.info.context_length, target.info.context_length)
        self.reason = "not started"
        self.arena: Arena | None = None
        self._runners: dict[Any, Runner] = {}
        self._holder: weakref.ref[Any] | None = None
        self._tables: dict[int, tuple[Any, LengthTables]] = {}

    def prepare(self, tokens: int) -> None:
        """An arena for `tokens` committed tokens a slot; a smaller one is replaced, and its graphs with it."""
        if tokens > self.limit:
            raise DSpineError(
                f"context overflow: {tokens} tokens asked for, an arena holds {self.limit} at most; "
                "shorten the prompt or max_tokens"
            )
        if self.arena is not None and self.arena.shape.tokens >= tokens:
            return
        self.close()
        size = min(self.limit, max(SMALLEST_ARENA, 1 << (tokens - 1).bit_length()))
        rows = self.drafter.config.block_size if self.drafter is not None else 1
        self.arena = Arena(self.target, self.drafter, ArenaShape(size, 1, rows))

    def close(self) -> None:
        """Free arena and graphs."""
        for runner in self._runners.values():
            _closed(runner)
        self._runners.clear()
        self.arena = None
        gc.collect()  # rounds, runners and captured closures form cycles that hold device memory

    def make_round(self, rules: RoundRules) -> StaticRound:
        """A round of these rules on the current arena."""
        assert self.arena is not None
        return StaticRound(self.target, self.drafter, self.arena, rules)

    def runner_key(self, plan: Plan) -> tuple[Any, ...]:
        """What graphs depend on besides the arena."""
        return plan.rules.rule, plan.rules.sampling, plan.rules.corrected, id(plan.rules.tables)

    def runner(self, plan: Plan) -> Runner:
        """The runner of these rules on the current arena."""
        key = self.runner_key(plan)
        if key not in self._runners:
            while len(self._runners) >= KEPT_RUNNERS:
                _closed(self._runners.pop(next(iter(self._runners))))
            self._runners[key] = self._make_runner(self.make_round(plan.rules))
            self.reason = self._runners[key].reason
        return self._runners[key]

    def plan(self, params: DecodingParams, policy: LengthPolicy, drafter: Any | None) -> Plan | str:
        """How a request can run, or why it cannot."""
        if params.sampling.penalised:
            return "penalties are counted on the host"
        if params.top_logprobs is not None:
            return "log-probabilities are made on the host"
        if len(params.stop_ids) > STOP_IDS:
            return f"more than {STOP_IDS} stop tokens"
        if drafter is not None and drafter is not self.drafter:
            return "the request drafts with another drafter"
        rule = resolve_acceptance(params.acceptance, params.sampling, drafter, policy)
        sampling = replace(params.sampling, seed=0)  # uniforms lie in a table: graphs do not depend on the seed
        if drafter is None:
            return Plan(PLAIN, RoundRules("greedy" if sampling.greedy else "point-mass", sampling))
        if isinstance(policy, StaticPolicy):
            rows = drafter.config.block_size
            length = rows if policy.length is None else min(policy.length, rows)
            return Plan(length, RoundRules(rule, sampling))
        if type(policy) in (NominalPolicy, HybridSpecPolicy):
            return Plan(POLICY, RoundRules(rule, sampling, self._on_device(policy), type(policy) is HybridSpecPolicy))
        return f"length policy {policy.name!r} runs on the host"

    def _on_device(self, policy: Any) -> LengthTables:
        """A calibration's tables in float32 on the device, made once for each calibration."""
        key = id(policy.calibration)
        if key not in self._tables:
            made = policy.calibration.tables(np.float32)
            arrays = {
                name: torch.from_numpy(value).to(self.target.device) if isinstance(value, np.ndarray) else value
                for name, value in vars(made).items()
            }
            self._tables[key] = policy.calibration, LengthTables(**arrays)
        return self._tables[key][1]

    def loop(
        self, drafter: Any | None, prompt: Sequence[int], params: DecodingParams, policy: LengthPolicy
    ) -> tuple[DecodingLoop | None, str]:
        """A loop over static rounds, or None and the reason why this request runs eagerly."""
        plan = self.plan(params, policy, drafter)
        if isinstance(plan, str):
            return None, plan
        if self.busy:
            return None, "another request that has not ended holds the arena"
        made = StaticLoop(self, drafter, prompt, params, policy, plan)
        return made, self.reason

    def slots(self, count: int, tokens: int) -> Any:
        """`protocols.Rounds.slots`."""
        from dspine_cuda.serving_graphs import SlotGraphs

        made = self._make_runner if self._make_runner is not GraphRunner else None
        return SlotGraphs(self.target, self.drafter, count, tokens, made)

    # -- timings for a calibration --------------------------------------------------------------------------------------

    def time_rounds(self, prompt: Sequence[int], params: DecodingParams, lengths: Iterator[int]) -> Iterator[tuple[int, float]]:
        """`protocols.Rounds.time_rounds`: one round in flight at a time, timed on the device."""
        plan = self.plan(params, StaticPolicy(), self.drafter)
        if isinstance(plan, str):
            raise DSpineError(f"graphs: rounds of this request cannot be timed: {plan}")
        self.prepare(min(self.limit, len(prompt) + params.max_tokens))
        runner = self.runner(plan)
        for w in range(1, self.drafter.config.block_size + 1):  # type: ignore[union-attr]
            runner.prepare(w)
        loop, reason = self.loop(self.drafter, prompt, params, StaticPolicy())
        if loop is None:
            raise DSpineError(f"graphs: rounds of this request cannot be timed: {reason}")
        return timed_rounds(loop, lengths)

    def time_stage_zero(self, u: int, repetitions: int) -> list[float]:
        """`protocols.Rounds.time_stage_zero`, on idle slots: Stage 0 reads weights and cache as it does for a live one."""
        round_ = self._idle_round()
        if not getattr(round_.target, "stops_at_router", False):
            return []
        return seconds_of(lambda: round_.begin(u), round_.arena.device, repetitions)

    def time_expert(self, repetitions: int) -> float:
        """`protocols.Rounds.time_expert`: a block whose tokens share their experts against one of distinct experts."""
        round_ = self._idle_round()
        blocks = expert_blocks(round_)
        if blocks is None:
            return 0.0
        few, many = (np.median(seconds_of(run, round_.arena.device, repetitions)) for run in (blocks.few, blocks.many))
        return max(0.0, float(many - few)) / blocks.more

    def _idle_round(self) -> StaticRound:
        """A round over the arena while no request holds it."""
        if self.busy:
            raise DSpineError("graphs: another request that has not ended holds the arena")
        self.prepare(min(self.limit, SMALLEST_ARENA))
        assert self.arena is not None
        self.arena.rewind()
        return self.runner(Plan(1, RoundRules())).round  # type: ignore[attr-defined]

    @property
    def busy(self) -> bool:
        """Whether a loop that has not ended holds the arena."""
        holder = self._holder() if self._holder is not None else None
        return holder is not None and getattr(holder, "finish_reason", None) is None

    def lease(self, holder: Any, tokens: int, plan: Plan) -> tuple[Arena, Runner]:
        """The arena, emptied, and the runner, captured, for one request."""
        self.prepare(tokens)
        assert self.arena is not None
        runner = self.runner(plan)
        for each in self._runners.values():
            each.drop()
        self.arena.rewind()
        for mode in {plan.mode, PLAIN}:  # break-even may switch drafting off
            runner.prepare(mode)
        self.arena.rewind()  # warm-up wrote nothing live; the states' zeros are made sure of
        self._holder = weakref.ref(holder)
        return self.arena, runner


class StaticLoop(DecodingLoop):
    """`DecodingLoop` whose rounds are the device's: prefill is the eager one into the arena's caches, a round is one launch and
    one report."""

    def __init__(
        self, decoder: GraphDecoder, drafter: Any | None, prompt: Sequence[int], params: DecodingParams, policy: LengthPolicy,
        plan: Plan,
    ) -> None:  # fmt: skip
        self._decoder, self._plan, self._started = decoder, plan, False
        self.mode, self.depth = plan.mode, 0  # of drafted rounds; rounds in flight, 0: as many as the runner takes
        super().__init__(decoder.target, drafter, prompt, params, policy)
        self._in_flight = 0

    def _make_caches(self, capacity: int) -> tuple[Any, Any]:
        """Those of the arena. `capacity` counts a block behind the last token; the arena adds its own."""
        self.arena, self._runner = self._decoder.lease(self, len(self.prompt) + self.room, self._plan)
        return self.arena.cache, self.arena.draft_cache if self.drafter is not None else None

    def _begin(self) -> None:
        """Hand the prefilled caches to the device."""
        budget = self.room - self.stats.generated_tokens
        table = None
        if not self.params.sampling.greedy:
            count = self.room + self.arena.shape.rows
            table = uniforms(self.params.sampling.seed, self.params.request, 0, count)[None]
        self.arena.start([self.cache.length], [self.anchor], [budget], self.params.stop_ids, table)
        self._started = True

    @property
    def round_seconds(self) -> float:
        """Seconds that the newest settled round took on the device (without graphs: its steps, on the host's clock)."""
        return self._runner.seconds

    def _next_mode(self) -> Mode:
        """Of the round that is launched next."""
        return PLAIN if self.drafter is None else self.mode

    def _round(self) -> Round:
        """Start rounds as far ahead as the runner allows, and settle the oldest."""
        started = perf_counter()
        if not self._started:
            self._begin()
        while self._in_flight < (self.depth or self._runner.depth):
            self._runner.launch(self._next_mode())
            self._in_flight += 1
        report = read_report(self._runner.wait()[0])
        self._in_flight -= 1
        if not report.tokens:
            raise DSpineError("a static round emitted nothing although the request has not ended: report this")
        if not report.finite:
            self.note_non_finite()
        result = self.settle(report.drafts, report.accepted, report.tokens[-1], None)
        if len(result.events) != len(report.tokens):
            raise DSpineError(
                f"device and host disagree about a round: {len(report.tokens)} tokens and {len(result.events)}; report this"
            )
        for cache in {id(c): c for c in (self.cache, self.arena.kv, self.draft_cache) if c is not None}.values():
            cache.length += len(result.events)
        if self.drafter is None:
            self.draft_cache = None
        self.stats.verify_seconds += perf_counter() - started
        return result


def graph_rounds(target: Any, drafter: Any | None, mode: str) -> tuple[GraphDecoder | None, str]:
    """A decoder with graphs for a loaded pair, or None and the reason. mode: `auto` (where they run), `on` (an error where they
    do not: no CUDA, an adapter without static form, head sizes, dtypes), `off`."""
    if mode not in GRAPHS:
        raise DSpineError(f"graphs must be one of {', '.join(GRAPHS)}, got {mode!r}")
    if mode == "off":
        return None, "graphs are off"
    device = torch.device(target.info.device)
    why = f"no CUDA: the target is on {device}" if device.type != "cuda" else pair_refusal(target, drafter)
    if why is not None:
        if mode == "on":
            raise BackendError(f"graphs were asked for and cannot run: {why}; use graphs auto or off")
        return None, why
    return GraphDecoder(target, drafter), switch_support(device)[1]
