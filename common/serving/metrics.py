"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dspine.common.decoding import Round
from dspine.common.serving.jobs import Job

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_POSITIONS = 32  # label values are bounded: deeper drafts count as the last


class Metrics:
    """Everything that /metrics shows."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("dspine_requests", "HTTP requests", ["endpoint", "status"], registry=registry)
        self.rejected = Counter("dspine_rejected", "Requests refused with 429", registry=registry)
        self.cancelled = Counter("dspine_cancelled", "Sequences whose client went away", registry=registry)
        self.failed = Counter("dspine_failed", "Sequences that ended with an error", registry=registry)
        self.prompt_tokens = Counter("dspine_prompt_tokens", "Prompt tokens of finished sequences", registry=registry)
        self.cached_tokens = Counter("dspine_cached_tokens", "Prompt tokens taken from the prefix cache", registry=registry)
        self.generated = Counter("dspine_generated_tokens", "Tokens of answers", registry=registry)
        self.rounds = Counter("dspine_rounds", "Rounds of sequences", registry=registry)
        self.rounds_by = Counter("dspine_rounds_by", "Rounds, by graphs or eager", ["way"], registry=registry)
        self.pieces = Counter("dspine_prompt_pieces", "Pieces of prompts read, captured or eager", ["way"], registry=registry)
        self.drafted = Counter("dspine_drafted_tokens", "Drafts verified", registry=registry)
        self.accepted = Counter("dspine_accepted_tokens", "Drafts accepted", registry=registry)
        self.verified_at = Counter("dspine_drafted_at", "Drafts verified, by position", ["position"], registry=registry)
        self.accepted_at = Counter("dspine_accepted_at", "Drafts accepted, by position", ["position"], registry=registry)
        self._at: list[tuple[Counter, Counter]] = []  # of both, the counter of each position: looked up once, not every round
        self.running = Gauge("dspine_running", "Sequences running", registry=registry)
        self.waiting = Gauge("dspine_waiting", "Sequences waiting", registry=registry)
        self.prefix_bytes = Gauge("dspine_prefix_cache_bytes", "Bytes in the prefix cache", registry=registry)
        self.first_token = Histogram(
            "dspine_time_to_first_token_seconds", "Submitted to first token", buckets=_SECONDS, registry=registry
        )
        self.duration = Histogram("dspine_duration_seconds", "Submitted to finished", buckets=_SECONDS, registry=registry)

    def round(self, result: Round, way: str = "eager") -> None:
        """One round of one sequence; way: `graphs`, `eager`, or `prefill` (the token that the prompt gives)."""
        self.generated.inc(len(result.events))
        if result.events:
            self.rounds.inc()
            self.rounds_by.labels(way).inc()
        self.drafted.inc(len(result.drafts))
        self.accepted.inc(result.accepted)
        for i in range(len(result.drafts)):
            if i == len(self._at) < _POSITIONS:
                position = str(i + 1)
                self._at.append((self.verified_at.labels(position), self.accepted_at.labels(position)))
            verified, accepted = self._at[min(i, _POSITIONS - 1)]
            verified.inc()
            if i < result.accepted:
                accepted.inc()

    def finished(self, job: Job) -> None:
        """A sequence came to its end."""
        assert job.loop is not None
        self.prompt_tokens.inc(job.loop.stats.prompt_tokens)
        self.cached_tokens.inc(job.loop.stats.cached_tokens)
        self.first_token.observe(job.first_token - job.submitted)
        self.duration.observe(job.finished - job.submitted)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
