"""Bodies of requests: strict types, known names only, limits on every list. Nothing here needs the model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

MAX_STOPS, MAX_STOP_LENGTH = 4, 256
MAX_CHOICES = 16
MAX_TOP_LOGPROBS, MAX_COMPLETION_LOGPROBS = 20, 5
MAX_BIASES = 1024
MAX_MESSAGES, MAX_TOOLS, MAX_PROMPTS = 4096, 128, 16
_SEEDS = 2**63

# parameters of OpenAI's API that this server does not offer: null and the listed values mean nothing and pass
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "functions": (),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_cache_key": (),
    "reasoning_effort": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": (),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": (),
}


class Strict(BaseModel):
    """No coercion and no unknown names."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Strict):
    """`include_usage`: one more chunk with the usage, before [DONE]."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class FunctionCall(Strict):
    """A call that the model made earlier: `arguments` is JSON text."""

    name: str = Field(min_length=1, max_length=256)
    arguments: str


class ToolCall(Strict):
    """One entry of an assistant message's `tool_calls`."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Strict):
    """One message; `content` is checked in `prompts`, which can name the part."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)


class FunctionSpec(Strict):
    """A tool's name and JSON schema."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSpec


class ToolChoiceName(Strict):
    """The function of a named `tool_choice`."""

    name: str


class ToolChoice(Strict):
    """`tool_choice` naming one function."""

    type: Literal["function"]
    function: ToolChoiceName


class JsonSchema(Strict):
    """The `json_schema` of a `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(Strict):
    """Free text, any JSON object, or JSON after a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_needed(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("type 'json_schema' needs a field 'json_schema', and the other types have none")
        return self


class Common(Strict):
    """What chat and completions share. `draft`, `top_k` and the like are ours, after the names that others use."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = Field(default=None, ge=-_SEEDS, lt=_SEEDS)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_BIASES)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(default=None, max_length=512)
    metadata: dict[str, str] | None = None

    top_k: int | None = Field(default=None, ge=0, le=1_000_000)
    min_p: float | None = Field(default=None, ge=0, lt=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10, allow_inf_nan=False)
    ignore_eos: bool | None = None
    draft: bool | Literal["full"] | None = Field(
        default=None, description="false: this request decodes plainly; full: every draft is verified, whatever the policy"
    )
    speculative_events: bool | None = Field(default=None, description="chunks tell drafted, accepted and corrected tokens")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, neutral in _NEUTRAL.items():
            if name in data and data[name] is not None and data[name] not in neutral:
                raise ValueError(f"parameter '{name}' is not supported by this server")
        return {name: value for name, value in data.items() if name not in _NEUTRAL}

    @field_validator("stop", mode="after")
    @classmethod
    def _few_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        texts = [value] if isinstance(value, str) else value or []
        if len(texts) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, got {len(texts)}")
        if any(not text or len(text) > MAX_STOP_LENGTH for text in texts):
            raise ValueError(f"stop strings have 1 to {MAX_STOP_LENGTH} characters")
        return value

    @field_validator("logit_bias", mode="after")
    @classmethod
    def _token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key, bias in (value or {}).items():
            if not (key.isascii() and key.isdecimal() and len(key) < 10):
                raise ValueError(f"keys are token ids, got {key[:32]!r}")
            if not -100 <= bias <= 100:
                raise ValueError("values are between -100 and 100")
        return value

    @model_validator(mode="after")
    def _options_of_streams(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("'stream_options' needs 'stream': true")
        if self.speculative_events and not self.stream:
            raise ValueError("'speculative_events' needs 'stream': true")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])


class ChatRequest(Common):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: list[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, max_length=16)

    @model_validator(mode="after")
    def _belong_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("'top_logprobs' needs 'logprobs': true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("'max_tokens' and 'max_completion_tokens' are the same: give one")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise ValueError("'tools' names one function twice")
        if self.tool_choice not in (None, "none") and not names:
            raise ValueError("'tool_choice' needs 'tools'")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError("'tool_choice' names a function that 'tools' does not have")
        return self

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(Common):
    """Body of POST /v1/completions. `prompt`: text, token ids, or a list of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_COMPLETION_LOGPROBS)

    @field_validator("prompt", mode="after")
    @classmethod
    def _some_prompts(cls, value: Any) -> Any:
        if not value:
            raise ValueError("the prompt is empty")
        if isinstance(value, list) and not isinstance(value[0], int) and len(value) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts in one request, got {len(value)}")
        return value

    @property
    def prompts(self) -> list[str | list[int]]:
        value = self.prompt
        return [value] if isinstance(value, str) or isinstance(value[0], int) else list(value)  # type: ignore[list-item]

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def top(self) -> int | None:
        return self.logprobs
