"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
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


def from_validation(error: ValidationError, names: Iterable[str] = ()) -> ApiError:
    """The problem of a body that tells most, naming its field; `names`: the fields there are. Values are not repeated, but for
    numbers (they may be long, or a secret)."""
    found = error.errors(include_url=False, include_context=True)
    first = found[0]
    unknown = [(each, meant) for each in found if (meant := _meant(each, names))]
    if unknown:  # a misspelt name explains a missing one, not the other way round
        param = str(unknown[0][0]["loc"][0])
        message = f"unknown parameter '{param}': did you mean '{unknown[0][1]}'?"
        return ApiError(message, param=param, code="unknown_parameter")
    param = path_of(first["loc"])
    if first["type"] == "json_invalid":
        return ApiError(f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(f"unknown parameter '{param}'", param=param, code="unknown_parameter")
    if first["type"] == "missing":
        return ApiError(f"missing required parameter '{param}'", param=param, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and (named := _NAMED.search(message)) and not param:
        code = "unsupported_parameter" if "not supported" in message else "invalid_value"
        return ApiError(message, param=named[1], code=code)
    message = _expectation([each for each in found if path_of(each["loc"]) == param]) or message
    where = f"invalid '{param}'" if param else "invalid body"
    return ApiError(f"{where}: {message}", param=param or None, code="invalid_value")


def _meant(found: Any, names: Iterable[str]) -> str | None:
    """The field that an unknown one was probably meant to be."""
    if found["type"] != "extra_forbidden" or len(found["loc"]) != 1:
        return None
    return next(iter(get_close_matches(str(found["loc"][0])[:64], list(names), 1, 0.75)), None)


def _expectation(found: Sequence[Any]) -> str | None:
    """All alternatives of one field in a sentence: expected, got."""
    first = found[0]
    kinds = [kind for each in found if (kind := _KINDS.get(each["type"]) or each.get("ctx", {}).get("expected"))]
    if kinds:
        other = "another string" if "'" in "".join(kinds) and isinstance(first["input"], str) else ""
        return f"expected {' or '.join(dict.fromkeys(kinds))}, got {other or _kind_of(first['input'])}"
    if not first["msg"].startswith("Input should be "):
        return None
    wanted = first["msg"].removeprefix("Input should be ")
    return f"expected {'' if wanted.startswith('a ') else 'a value '}{wanted}, got {_kind_of(first['input'])}"


def _kind_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, int | float):
        return str(value) if abs(value) < 1e15 else "a number beyond all limits"
    return {str: "a string", list: "an array", dict: "an object"}.get(type(value), "something else")


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
_KINDS = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
