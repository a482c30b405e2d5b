"""Messages and tools -> token ids through the model's chat template; what the template does with thinking and tools."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dspine.common.errors import DSpineError
from dspine.common.serving.errors import ApiError, unsupported
from dspine.common.serving.schema import ChatRequest, CompletionRequest, Message
from dspine.common.tokenizer import Tokenizer

THINK, END_THINK, TOOL, END_TOOL = "<think>", "</think>", "<tool_call>", "</tool_call>"
MARKERS = (THINK, END_THINK, TOOL, END_TOOL)
_PROBE_TOOL = {"type": "function", "function": {"name": "dspine_probe", "description": "", "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the state that the text leaves the model in: `thinking` inside an open <think>, `may_think` where the
    model may open one itself."""

    ids: list[int]
    thinking: bool = False
    may_think: bool = False


class Prompts:
    """Makes prompts for one model; thread-safe (it only reads the tokenizer)."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self.tokenizer, self.context = tokenizer, context
        backend = tokenizer.backend
        self.marker_ids: dict[int, str] = {}  # markers that are one token
        for marker in MARKERS:
            token = backend.convert_tokens_to_ids(marker)
            if isinstance(token, int) and token != backend.unk_token_id and backend.convert_ids_to_tokens(token) == marker:
                self.marker_ids[token] = marker
        template = backend.chat_template
        self._template = template if isinstance(template, str) else json.dumps(template or "")
        self.thinks = THINK in self._template or END_THINK in self._template
        self.takes_tools = tokenizer.has_chat_template and self._reads_tools()

    def _reads_tools(self) -> bool:
        """Whether the template shows tools to the model: one that ignores them would drop them in silence."""
        messages = [{"role": "user", "content": "hello"}]
        try:
            return "dspine_probe" in self._render(messages, tools=[_PROBE_TOOL])
        except DSpineError:
            return False

    def chat(self, request: ChatRequest) -> Prompt:
        """The prompt of a chat request. Raises ApiError naming the field."""
        if not self.tokenizer.has_chat_template:
            raise ApiError("this model has no chat template: use /v1/completions", param="messages")
        messages = [_message(message, index) for index, message in enumerate(request.messages)]
        tools = None
        if request.tools and request.tool_choice != "none":
            if not self.takes_tools:
                raise unsupported("tools", "the chat template of this model does not show tools to it")
            tools = [tool.model_dump(exclude_none=True) for tool in request.tools]
        extra = dict(request.chat_template_kwargs or {})
        reserved = {"messages", "tools", "add_generation_prompt", "tokenize"} & set(extra)
        if reserved:
            raise ApiError(f"'chat_template_kwargs' may not set {', '.join(sorted(reserved))}", param="chat_template_kwargs")
        text = self._render(messages, tools=tools, **extra)
        ids = self._checked(self.tokenizer.encode(text), "messages")
        return Prompt(ids, *self._thinking(text))

    def _thinking(self, text: str) -> tuple[bool, bool]:
        """Whether the prompt ends inside <think>, and whether the model may still open one."""
        if not self.thinks:
            return False, False
        opened, closed = text.rfind(THINK), text.rfind(END_THINK)
        if opened > closed and not text[opened + len(THINK) :].strip():
            return True, False
        just_closed = closed >= 0 and not text[closed + len(END_THINK) :].strip()
        return False, not just_closed

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.backend.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **{k: v for k, v in options.items() if v is not None}
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            line = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise ApiError(f"the model's chat template refused the messages: {line}", param="messages") from error

    def completion(self, prompt: str | list[int], index: int, request: CompletionRequest) -> Prompt:
        """One prompt of a completion request."""
        many = len(request.prompts) > 1
        param = f"prompt[{index}]" if many else "prompt"
        if isinstance(prompt, str):
            _check_text(prompt, param)
            return Prompt(self._checked(self.tokenizer.encode(prompt, add_special_tokens=True), param))
        vocabulary = len(self.tokenizer.backend)
        wrong = next((token for token in prompt if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise ApiError(f"'{param}' holds token id {wrong}, the vocabulary has {vocabulary}", param=param)
        return Prompt(self._checked(list(prompt), param))

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise ApiError(f"'{param}' is empty: it holds no token of the model", param=param)
        if len(ids) >= self.context:
            raise ApiError(
                f"'{param}' has {len(ids)} tokens, the model's context holds {self.context}, answer included",
                param=param,
                code="context_length_exceeded",
            )
        return ids


def _check_text(text: str, param: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ApiError(f"'{param}' is not valid Unicode (character {error.start})", param=param) from error


def _message(message: Message, index: int) -> dict[str, Any]:
    """A message as templates read it: text content, `developer` as `system`, arguments of calls as objects."""
    where = f"messages[{index}]"
    result: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    result["content"] = _content(message, where)
    if message.name is not None:
        result["name"] = message.name
    if message.role == "tool":
        if message.tool_call_id is None:
            raise ApiError(f"'{where}.tool_call_id' is missing: a tool message answers a call", param=f"{where}.tool_call_id")
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls is not None:
        if message.role != "assistant":
            raise ApiError(f"'{where}.tool_calls' belongs to assistant messages", param=f"{where}.tool_calls")
        result["tool_calls"] = [
            _call(call.function.name, call.function.arguments, call.id, f"{where}.tool_calls[{number}]")
            for number, call in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        result["reasoning_content"] = reasoning
    return result


def _call(name: str, arguments: str, call_id: str | None, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(f"'{where}.function.arguments' is not JSON", param=f"{where}.function.arguments") from error
    call = {"type": "function", "function": {"name": name, "arguments": parsed}}
    return call if call_id is None else {"id": call_id, **call}


def _content(message: Message, where: str) -> str:
    """Text of a message; parts that are not text are refused by name (case V5), never dropped."""
    content = message.content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise ApiError(f"'{where}.content' is missing", param=f"{where}.content")
    if isinstance(content, str):
        _check_text(content, f"{where}.content")
        return content
    texts = []
    for number, part in enumerate(content):
        param = f"{where}.content[{number}]"
        if part.get("type") != "text":
            kind = str(part.get("type"))[:32]
            raise ApiError(
                f"'{param}' is of type '{kind}': this model reads text only", param=param, code="unsupported_content"
            )
        text = part.get("text")
        if not isinstance(text, str) or set(part) - {"type", "text"}:
            raise ApiError(f"'{param}' must be an object with 'type' and 'text'", param=param)
        _check_text(text, param)
        texts.append(text)
    return "".join(texts)
