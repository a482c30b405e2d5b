"""Rules on the logits of a request: logit bias, and grammars over a whole block of drafts (case S6)."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspine.common.arrays import array_namespace, astype
from dspine.common.protocols import ArrayOps
from dspine.common.serving.errors import ApiError, unsupported
from dspine.common.serving.prompts import END_THINK, END_TOOL, THINK, TOOL, Prompts
from dspine.common.serving.schema import ChatRequest, ResponseFormat, Tool, ToolChoice

LIBRARY = "llguidance"
WHITESPACE = r"(\n[ \t]{0,16}| ?)"  # bounded: small models otherwise fill a whole answer with spaces


class LogitBias:
    """Adds a fixed vector to every row."""

    needs_drafts = False

    def __init__(self, arrays: ArrayOps, vocab: int, biases: dict[int, float]) -> None:
        vector = np.zeros(vocab, dtype=np.float32)
        vector[list(biases)] = list(biases.values())
        self._vector = arrays.to_device(vector)

    def apply(self, logits: Any, drafts: Sequence[int]) -> Any:
        """logits [1, w, V] plus the bias [V]."""
        return logits + astype(self._vector, logits.dtype)

    def emitted(self, tokens: Sequence[int]) -> None:
        """A bias has no state."""


@dataclass(frozen=True)
class ThinkTokens:
    """Token ids of the thinking markers; None where they are not single tokens."""

    start: int | None = None
    end: int | None = None


class GrammarRule:
    """Masks every row of a block to what the grammar allows there.

    Row i follows drafts[:i]: the matcher walks over the drafts that are legal and is rolled back, so its state is always
    that of the emitted tokens. A draft that is not legal has a masked logit, is refused at its own position, and the rows
    behind it are not used. `thinking`: the grammar sleeps until `</think>`; `may_think`: the answer may open with `<think>`.
    """

    needs_drafts = True

    def __init__(
        self,
        matcher: Any,
        arrays: ArrayOps,
        vocab: int,
        think: ThinkTokens,
        *,
        thinking: bool,
        may_think: bool,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._matcher, self._arrays, self._vocab, self._think, self._stop_ids = matcher, arrays, vocab, think, stop_ids
        self._asleep = thinking and think.end is not None
        self._may_think = may_think and think.start is not None and think.end is not None

    def apply(self, logits: Any, drafts: Sequence[int]) -> Any:
        """logits [1, w, V] -> with minus infinity where the grammar forbids."""
        masks = np.ones((1, logits.shape[1], self._vocab), dtype=bool)
        asleep, may_think, walked = self._asleep, self._may_think, 0
        for row in range(logits.shape[1]):
            if not asleep:
                masks[0, row] = self._allowed()
                if may_think:
                    masks[0, row, self._think.start] = True
            if row == len(drafts):
                break
            draft = drafts[row]
            if not masks[0, row, draft]:
                break  # refused here; the rows behind stay open and unused
            if asleep:
                asleep = draft != self._think.end
            elif may_think and draft == self._think.start:
                asleep = True
            else:
                if not self._consume(draft):
                    break
                walked += 1
            may_think = False
        if walked:
            self._matcher.rollback(walked)
        xp = array_namespace(logits)
        return xp.where(self._arrays.to_device(masks), logits, xp.full_like(logits, float("-inf")))

    def _allowed(self) -> np.ndarray:
        """bool [V]. A finished grammar allows the end tokens only (that is what the library's mask says)."""
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(packed, bitorder="little")[: self._vocab].astype(bool)
        if allowed.shape[0] < self._vocab:
            allowed = np.concatenate([allowed, np.zeros(self._vocab - allowed.shape[0], dtype=bool)])
        if not allowed.any():
            raise ApiError("the grammar allows no token of the model here", status=500, code="grammar_dead_end")
        return allowed

    def _consume(self, token: int) -> bool:
        """Step over one token; false where the matcher has come to its end (an end token after a complete answer)."""
        return not self._matcher.is_stopped() and self._matcher.try_consume_tokens([token]) == 1

    def emitted(self, tokens: Sequence[int]) -> None:
        """Follow the answer."""
        for token in tokens:
            if self._asleep:
                self._asleep = token != self._think.end
            elif self._may_think and token == self._think.start:
                self._asleep = True
            elif not self._matcher.is_stopped() and not self._consume(token) and token not in self._stop_ids:
                raise ApiError("the grammar lost track of the answer", status=500, code="grammar_lost")
            self._may_think = False


class Grammars:
    """Compiles grammars for one tokenizer; the library is loaded with the first one."""

    def __init__(self, prompts: Prompts, vocab: int, stop_ids: frozenset[int]) -> None:
        self._prompts, self._vocab, self._stop_ids = prompts, vocab, sorted(stop_ids)
        self._tokenizer: Any = None
        ids = {marker: token for token, marker in prompts.marker_ids.items()}
        self.think = ThinkTokens(ids.get(THINK), ids.get(END_THINK))

    @staticmethod
    def available() -> bool:
        """Whether the grammar library is installed."""
        return importlib.util.find_spec(LIBRARY) is not None

    def wanted(self, request: ChatRequest) -> str | None:
        """The grammar that a request asks for, checked, or None. Raises ApiError naming the field."""
        forced, shape = self._forced_tools(request), request.response_format
        shaped = shape is not None and shape.type != "text"
        if not shaped and forced is None:
            return None
        if shaped and forced is not None:
            raise ApiError("'response_format' and a forced 'tool_choice' exclude each other", param="response_format")
        param = "response_format" if shaped else "tool_choice"
        if not self.available():
            raise unsupported(param, f"it needs {LIBRARY}, which is not installed: pip install 'dspine[server]'")
        grammar = _format_grammar(shape) if shaped else self._tool_grammar(forced or [])  # type: ignore[arg-type]
        self._check(grammar, param)
        return grammar

    @staticmethod
    def _forced_tools(request: ChatRequest) -> list[Tool] | None:
        if isinstance(request.tool_choice, ToolChoice):
            return [tool for tool in request.tools or () if tool.function.name == request.tool_choice.function.name]
        return list(request.tools or ()) if request.tool_choice == "required" else None

    def _tool_grammar(self, tools: list[Tool]) -> str:
        """One call of one of the tools, in the form that `parsing.parse_call` reads."""
        from llguidance import LLMatcher

        options = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "arguments": tool.function.parameters or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        shape = options[0] if len(options) == 1 else {"anyOf": options}
        schema = json.dumps({**shape, "x-guidance": {"whitespace_pattern": WHITESPACE}})
        return LLMatcher.grammar_from_lark(
            f'start: {self._marker(TOOL)} "\\n" call "\\n" {self._marker(END_TOOL)}\ncall: %json {schema}\n'
        )

    def _marker(self, marker: str) -> str:
        """A marker in a grammar: its token where it is one (the library knows such tokens by id only), else its text."""
        token = next((token for token, text in self._prompts.marker_ids.items() if text == marker), None)
        return json.dumps(marker) if token is None else f"<[{token}]>"

    def _check(self, grammar: str, param: str) -> None:
        from llguidance import LLMatcher

        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._library_tokenizer())
        if failed:
            text = " ".join(" ".join(messages).split())[:300]
            raise ApiError(f"'{param}' cannot be compiled to a grammar: {text}", param=param, code="invalid_schema")

    def _library_tokenizer(self) -> Any:
        if self._tokenizer is None:
            from llguidance.hf import from_tokenizer

            backend = self._prompts.tokenizer.backend
            size = max(len(backend), self._vocab)
            self._tokenizer = from_tokenizer(backend, n_vocab=size, eos_token=self._stop_ids or None)
        return self._tokenizer

    def rule(self, grammar: str, arrays: ArrayOps, *, thinking: bool, may_think: bool) -> GrammarRule:
        """A fresh matcher for one answer."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._library_tokenizer(), grammar)
        if matcher.is_error():
            raise ApiError(f"the grammar cannot be used: {matcher.get_error()[:300]}", param="response_format")
        stop_ids = frozenset(self._stop_ids)
        return GrammarRule(matcher, arrays, self._vocab, self.think, thinking=thinking, may_think=may_think, stop_ids=stop_ids)


def _format_grammar(shape: ResponseFormat) -> str:
    from llguidance import LLMatcher

    schema: Any = {"type": "object"} if shape.json_schema is None else shape.json_schema.schema_
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": WHITESPACE})
    except ValueError as error:
        raise ApiError(f"'response_format' cannot be compiled: {str(error)[:300]}", param="response_format") from error
