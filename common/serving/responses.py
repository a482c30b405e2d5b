"""Updates of jobs -> OpenAI's objects, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from dspine.common.serving.jobs import Job, TokenPiece, Update
from dspine.common.serving.parsing import OutputParser, Piece
from dspine.common.serving.service import Plan
from dspine.common.statistics import Statistics
from dspine.common.tokenizer import Tokenizer


class TokenTexts:
    """Single tokens as text and bytes, for log-probabilities and events."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """Special tokens are shown by their name: they are entries like any other."""
        if token in self._tokenizer.special_ids:
            return self._tokenizer.backend.convert_ids_to_tokens(token) or ""
        return self._tokenizer.decode([token])

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """One entry of chat log-probabilities; `bytes` is null for a part of a character."""
        text = self.text(token)
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode("utf-8", "replace"))}


class Choice:
    """One answer as it grows. `add` returns the delta of an update."""

    def __init__(self, index: int, parser: OutputParser, texts: TokenTexts, stop_ids: frozenset[int]) -> None:
        self.index, self._parser, self._texts, self._stop_ids = index, parser, texts, stop_ids
        self.content, self.reasoning = "", ""
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[TokenPiece] = []
        self.finish_reason: str | None = None
        self.stats = Statistics()

    def add(self, update: Update) -> tuple[dict[str, Any], list[TokenPiece]]:
        """(delta of a chat chunk, tokens with log-probabilities)."""
        pieces: list[Piece] = []
        for token in update.pieces:
            pieces += self._parser.add(token.text)
        if update.finish_reason is not None:
            pieces += [*self._parser.add(update.tail), *self._parser.flush()]
            called = self.calls or any(piece.call for piece in pieces)
            self.finish_reason = "tool_calls" if called and update.finish_reason == "stop" else update.finish_reason
        if update.stats is not None:
            self.stats = update.stats
        delta = self._delta(pieces)
        scored = [t for t in update.pieces if t.logprobs is not None and t.token not in self._stop_ids]
        self.logprobs += scored
        return delta, scored

    def _delta(self, pieces: list[Piece]) -> dict[str, Any]:
        content = "".join(piece.content for piece in pieces)
        reasoning = "".join(piece.reasoning for piece in pieces)
        calls = []
        for piece in pieces:
            if piece.call is not None:
                function = {"name": piece.call.name, "arguments": piece.call.arguments}
                call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
                calls.append({"index": len(self.calls), **call})
                self.calls.append(call)
        self.content, self.reasoning = self.content + content, self.reasoning + reasoning
        delta: dict[str, Any] = {}
        if content:
            delta["content"] = content
        if reasoning:
            delta["reasoning_content"] = reasoning
        if calls:
            delta["tool_calls"] = calls
        return delta

    def chat_logprobs(self, tokens: Sequence[TokenPiece]) -> dict[str, Any]:
        """`logprobs` of a chat choice."""
        entries = []
        for piece in tokens:
            assert piece.logprobs is not None
            top = [self._texts.entry(token, value) for token, value in piece.logprobs.top]
            entries.append({**self._texts.entry(piece.token, piece.logprobs.logprob), "top_logprobs": top})
        return {"content": entries, "refusal": None}

    def completion_logprobs(self, tokens: Sequence[TokenPiece], offset: int) -> dict[str, Any]:
        """`logprobs` of a completion choice; `offset`: characters of the answer before these tokens."""
        offsets, place = [], offset
        for piece in tokens:
            offsets.append(place)
            place += len(piece.text)
        return {
            "tokens": [self._texts.text(piece.token) for piece in tokens],
            "token_logprobs": [piece.logprobs.logprob for piece in tokens],  # type: ignore[union-attr]
            "top_logprobs": [
                {self._texts.text(token): value for token, value in piece.logprobs.top}  # type: ignore[union-attr]
                for piece in tokens
            ],
            "text_offset": offsets,
        }


class Answer:
    """The objects of one request. kind: `chat` or `completion`."""

    def __init__(self, kind: str, model: str, plan: Plan, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self.kind, self.plan = kind, plan
        texts = TokenTexts(tokenizer)
        self._texts = texts
        self.choices = [Choice(i, parser, texts, stop_ids) for i, parser in enumerate(plan.parsers)]
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._scores = plan.jobs[0].params.top_logprobs is not None
        self._opened: set[int] = set()

    def whole(self) -> dict[str, Any]:
        """The object of an answer that is not streamed."""
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        return {
            **self._head,
            "object": name,
            "choices": [self._choice(choice) for choice in self.choices],
            "usage": self.usage(),
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        result: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish_reason, "logprobs": None}
        if self.kind == "completion":
            result["text"] = choice.content
            if self._scores:
                result["logprobs"] = choice.completion_logprobs(choice.logprobs, 0)
            return result
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = choice.calls
            message["content"] = choice.content or None
        if self._scores:
            result["logprobs"] = choice.chat_logprobs(choice.logprobs)
        return {**result, "message": message}

    def chunks(self, index: int, update: Update, *, events: bool, usage: bool) -> list[dict[str, Any]]:
        """Chunks that an update makes (often one). `events`: with the fate of every draft; `usage`: null in every chunk."""
        choice = self.choices[index]
        offset = len(choice.content)
        delta, scored = choice.add(update)
        result: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason, "logprobs": None}
        if self.kind == "chat":
            if index not in self._opened:
                delta = {"role": "assistant", "content": "", **delta}
            result["delta"] = delta
        else:
            result["text"] = delta.get("content", "")
        self._opened.add(index)
        if self._scores and scored:
            chat = self.kind == "chat"
            result["logprobs"] = choice.chat_logprobs(scored) if chat else choice.completion_logprobs(scored, offset)
        if not (delta or scored or events or choice.finish_reason):
            return []
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        chunk = {**self._head, "object": name, "choices": [result]}
        if usage:
            chunk["usage"] = None
        if events:
            chunk["speculative"] = self._events(update)
        return [chunk]

    def _events(self, update: Update) -> dict[str, Any]:
        """What the round did, for people to see."""
        return {
            "tokens": [{"text": piece.text, "kind": piece.kind} for piece in update.pieces],
            "tail": update.tail,
            "refused": [self._texts.text(token) for token in update.refused],
            "drafted": update.drafted,
            "accepted": update.accepted,
            "seconds": round(update.seconds, 6),
        }

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk before [DONE], where the client asked for it."""
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return {**self._head, "object": name, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens, and what speculation did. A prompt with several answers counts once; cached is what all of them reused."""
        groups: dict[int, list[Statistics]] = {}
        for group, choice in zip(self.plan.groups, self.choices, strict=True):
            groups.setdefault(group, []).append(choice.stats)
        prompt = sum(stats[0].prompt_tokens for stats in groups.values())
        cached = sum(min(s.cached_tokens for s in stats) for stats in groups.values())
        generated = sum(choice.stats.generated_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
            "speculative": speculative([choice.stats for choice in self.choices]) | self._rounds_by(),
            "timings": timings(self.plan.jobs),
        }

    def _rounds_by(self) -> dict[str, str]:
        """How rounds ran, where they could run in more than one way: an eager fallback is never silent."""
        found = dict.fromkeys(job.rounds_by for job in self.plan.jobs if job.rounds_by)
        return {"rounds_by": "; ".join(found)} if found else {}


def timings(jobs: Sequence[Job]) -> dict[str, float]:
    """The `timings` block of the usage, in seconds on the server: of several answers the longest waits, the sum of the work."""
    stats = [job.loop.stats for job in jobs if job.loop is not None]
    ended = [job for job in jobs if job.finished]
    return {
        "queue": round(max((job.started - job.submitted for job in jobs if job.started), default=0.0), 6),
        "prefill": round(sum(s.prefill_seconds for s in stats), 6),
        "decode": round(sum(s.decode_seconds for s in stats), 6),
        "first_token": round(max((job.first_token - job.submitted for job in jobs if job.first_token), default=0.0), 6),
        "total": round(max((job.finished - job.submitted for job in ended), default=0.0), 6),
    }


def speculative(stats: Sequence[Statistics]) -> dict[str, Any]:
    """The `speculative` block of the usage: sums over the answers."""
    depth = max((len(s.proposed_at) for s in stats), default=0)
    drafted_at = [sum(s.proposed_at[i] for s in stats if i < len(s.proposed_at)) for i in range(depth)]
    accepted_at = [sum(s.accepted_at[i] for s in stats if i < len(s.accepted_at)) for i in range(depth)]
    rounds = sum(s.rounds for s in stats)
    emitted = sum(s.generated_tokens - 1 for s in stats if s.generated_tokens)
    disabled = [s.drafting_disabled for s in stats if s.drafting_disabled]
    return {
        "drafted": sum(s.drafted_tokens for s in stats),
        "accepted": sum(s.accepted_tokens for s in stats),
        "rounds": rounds,
        "plain_rounds": sum(s.plain_rounds for s in stats),
        "tokens_per_round": emitted / rounds if rounds else 0.0,
        "drafted_at": drafted_at,
        "accepted_at": accepted_at,
        "acceptance_by_position": [a / d if d else 0.0 for a, d in zip(accepted_at, drafted_at, strict=True)],
        "drafting_disabled": disabled[0] if disabled else None,
    }
