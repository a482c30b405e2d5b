"""Text in, token ids out, and back: stop tokens, chat prompts, and pieces of text as tokens arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine.common.errors import CheckpointError, DSpineError

_BROKEN = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face tokenizer with the model's stop tokens."""

    backend: Any  # transformers.PreTrainedTokenizerBase
    folder: Path
    stop_ids: frozenset[int]
    special_ids: frozenset[int] = frozenset()  # tokens that `decode` leaves out

    @property
    def has_chat_template(self) -> bool:
        return bool(self.backend.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        # its warning about long texts ("indexing errors") is not ours: what exceeds the context is refused with the numbers
        return self.backend.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; spaces are left as they are."""
        return self.backend.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def is_byte_token(self, token: int) -> bool:
        """Whether this is one of the `<0xE2>` tokens, which become characters only as a run."""
        return _BYTE_TOKEN.fullmatch(self.backend.convert_ids_to_tokens(token) or "") is not None


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder (local files only). CheckpointError where there is none that can be read."""
    from transformers import AutoTokenizer  # here: importing this module must cost nothing

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise CheckpointError(f"{folder} holds no tokenizer: expected tokenizer.json, tokenizer_config.json or tokenizer.model")
    try:
        backend = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the tokenizer in {folder} cannot be read: {_first_line(error)}") from error
    own = _id_set(backend.eos_token_id, "the tokenizer's eos_token_id")
    special = frozenset(token for token, added in backend.added_tokens_decoder.items() if added.special)
    return Tokenizer(backend, folder, frozenset(own | eos_ids_of_folder(folder)), special)


def eos_ids_of_folder(folder: Path) -> frozenset[int]:
    """Union of the eos ids of config.json and generation_config.json; each an int, a list, or absent."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.is_file():
            found |= _id_set(_read_json(path).get("eos_token_id"), f"eos_token_id in {path}")
    return frozenset(found)


def stop_token_ids(tokenizer: Tokenizer, model_eos: int | Iterable[int] | None = None) -> frozenset[int]:
    """Every id that ends a generation: the tokenizer's, config.json's, generation_config.json's and `model_eos`.

    A model may end its turn with one of them and its text with another, so none replaces the others.
    """
    return tokenizer.stop_ids | _id_set(model_eos, "the model's eos_token_ids")


def _id_set(value: Any, where: str) -> set[int]:
    if value is None:
        return set()
    ids = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    for item in ids:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise CheckpointError(f"{where} must be a token id or a list of them, got {value!r}")
    return set(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(f"{path} is not valid JSON: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | Sequence[dict[str, Any]],
    *,
    limit: int,
    system_prompt: str | None = None,
    raw: bool = False,
) -> list[int]:
    """Token ids of a prompt: text, chat messages, or ids as they are. `limit`: the model's context length in tokens.

    Text becomes the user turn of the chat template; with `raw`, or where the model has no template, it goes in as it is.
    A template writes its own special tokens; raw text gets those that the tokenizer adds by default. DSpineError if the
    prompt is empty, not valid UTF-8, or leaves no room for an answer.
    """
    if isinstance(prompt, str):
        ids = _encode_text(tokenizer, prompt, system_prompt, raw)
    elif prompt and all(isinstance(message, dict) for message in prompt):
        if raw:
            raise DSpineError("raw takes a text prompt: chat messages need the chat template")
        ids = tokenizer.encode(render_chat(tokenizer, _with_system([*prompt], system_prompt)))
    else:
        ids = _check_ids(tokenizer, prompt, system_prompt)
    if not ids:
        raise DSpineError(f"prompt is empty: it holds no token of the model in {tokenizer.folder}")
    if len(ids) >= limit:
        raise DSpineError(f"prompt has {len(ids)} tokens, but the model's context holds {limit}, answer included: shorten it")
    return ids


def _encode_text(tokenizer: Tokenizer, prompt: str, system_prompt: str | None, raw: bool) -> list[int]:
    check_prompt(prompt)
    if not raw and tokenizer.has_chat_template:
        return tokenizer.encode(render_chat(tokenizer, _with_system([{"role": "user", "content": prompt}], system_prompt)))
    if system_prompt is not None:
        why = "raw was asked for" if raw else f"the model in {tokenizer.folder} has none"
        raise DSpineError(f"a system prompt needs the chat template, but {why}: put the text into the prompt")
    return tokenizer.encode(prompt, add_special_tokens=True)


def _check_ids(tokenizer: Tokenizer, ids: Sequence[Any], system_prompt: str | None) -> list[int]:
    """Token ids handed in as they are."""
    if system_prompt is not None:
        raise DSpineError("a system prompt goes with a text prompt, not with token ids")
    vocabulary = len(tokenizer.backend)
    for position, token in enumerate(ids):
        if isinstance(token, bool) or not hasattr(token, "__index__") or not 0 <= int(token) < vocabulary:
            raise DSpineError(f"prompt position {position}: expected a token id below {vocabulary}, got {token!r}")
    return [int(token) for token in ids]


def _with_system(messages: list[dict[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    if system_prompt is None:
        return messages
    if messages[0].get("role") == "system":
        raise DSpineError("two system prompts: one in the messages, one beside them; give one")
    return [{"role": "system", "content": system_prompt}, *messages]


def render_chat(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], *, open_end: bool = False) -> str:
    """The text of chat messages, ending where the answer begins; with `open_end`, inside the last message."""
    from jinja2 import TemplateError

    if not tokenizer.has_chat_template:
        raise DSpineError(f"chat messages need a chat template, and the model in {tokenizer.folder} has none")
    for position, message in enumerate(messages):
        if not isinstance(message.get("content"), str):  # images and the like: never dropped in silence
            kind = type(message.get("content")).__name__
            raise DSpineError(f"message {position}: only text content is supported, got {kind}")
        _check_text(message["content"], f"message {position}")
    try:
        return tokenizer.backend.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=not open_end, continue_final_message=open_end
        )
    except (TemplateError, ValueError) as error:
        raise DSpineError(f"the chat template in {tokenizer.folder} refused the prompt: {_first_line(error)}") from error


def decode_utf8(data: bytes, where: str) -> str:
    """Bytes from outside as text; DSpineError naming the first byte that is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DSpineError(f"{where} is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}") from error


def check_prompt(prompt: str) -> None:
    """What can be said of a text prompt without its model: DSpineError if it is empty or not valid UTF-8."""
    _check_text(prompt, "prompt")
    if not prompt.strip():
        raise DSpineError("prompt is empty: give some text (on the command line, `--prompt -` reads standard input)")


def _check_text(text: str, where: str) -> None:
    """Refuse lone surrogates: the shell hands over bytes that are not UTF-8 that way."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DSpineError(f"{where} is not valid UTF-8 (character {error.start} is {text[error.start]!r})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Detokenizer:
    """Text of tokens that come one at a time; the pieces joined are the decoding of the whole.

    A piece is held back while it may still change: while it ends in bytes that are not a character yet, or in a byte token
    (`<0xE2>`), whose whole run is decoded at once. Invariant: tokens before `_read` are emitted; `_context <= _read` marks
    tokens decoded again as left context, because decoders treat the first token of a text specially (they drop its space).
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = 0
        self._read = 0

    def add(self, token: int) -> str:
        """The text that became certain with this token; often empty."""
        self._tokens.append(token)
        if token in self._tokenizer.special_ids or self._tokenizer.is_byte_token(token):
            return ""  # a special token adds nothing, and the byte run before it may go on after it
        return self._emit(final=False)

    def flush(self) -> str:
        """What was held back. Bytes that never became a character come out as U+FFFD, as in a full decoding."""
        return self._emit(final=True)

    def _emit(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._tokens[self._context : self._read])
        text = self._tokenizer.decode(self._tokens[self._context :])
        if len(text) <= len(before) or (text.endswith(_BROKEN) and not final):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return text[len(before) :]
