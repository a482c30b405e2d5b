"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from dspine.common.errors import DSpineError


class ApiError(DSpineError):
    """An answer that is an error. `param` names the field of the request, as a path like `messages[0].content`."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.headers = message, status, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        return {"error": {"message": self.message, "type": _type_of(self.status), "param": self.param, "code": self.code}}


def _type_of(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"


def unsupported(name: str, why: str) -> ApiError:
    """A parameter that this server does not offer: named, never ignored."""
    return ApiError(f"parameter '{name}' is not supported: {why}", param=name, code="unsupported_parameter")


def from_validation(error: ValidationError) -> ApiError:
    """The first problem of a body, naming its field. The value itself is not repeated (it may be long, or a secret)."""
    found = error.errors(include_url=False, include_context=True, include_input=False)
    first = found[0]
    param = path_of(first["loc"])
    if first["type"] == "json_invalid":
        return ApiError(f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(f"unknown parameter '{param}'", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(f"missing required parameter '{param}'", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and (named := _NAMED.search(message)) and not param:
        code = "unsupported_parameter" if "not supported" in message else "invalid_value"
        return ApiError(message, param=named[1], code=code)
    return ApiError(f"invalid '{param}': {message}" if param else message, param=param or None, code="invalid_value")


def path_of(location: Sequence[str | int]) -> str:
    """('messages', 0, 'content') -> `messages[0].content`; the tags that pydantic adds for unions are left out."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in _TAGS:
            text += f".{part}" if text else part
    return text


_NAMED = re.compile(r"'([a-z_]+)'")  # checks that span fields name the first of them in quotes
_TAGS = frozenset(("str", "int", "float", "bool", "none", "dict"))
