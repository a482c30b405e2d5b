"""Conversations as token ids, and how they are packed into rows.

Two sources: npz shards (`tokens`, `lengths`, `prompt_lengths`, `greedy`) and SpecForge's JSONL rows (`formats.py`; with
the target's chat template, assistant turns are supervised). Order is a function of (seed, epoch) alone, so a position in
the stream is two integers and a resumed run sees the very same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspine.common.errors import DSpineError
from dspine.common.models import resolve_model
from dspine.common.tokenizer import load_tokenizer
from dspine_cuda.training.files import read_npz, write_jsonl
from dspine_cuda.training.formats import export_rows, normal_messages, read_rows, tokens_of_ids, tokens_of_text
from dspine_cuda.training.masks import NO_DOCUMENT

_SHARD_KEYS = ("tokens", "lengths", "prompt_lengths")


@dataclass(frozen=True)
class Conversation:
    """tokens int [T]; supervised bool [T]: the target wrote this token; greedy: the answer is the target's own argmax."""

    tokens: np.ndarray
    supervised: np.ndarray
    greedy: bool = False

    @property
    def prompt_length(self) -> int:
        """Tokens before the first supervised one."""
        return int(np.argmax(self.supervised)) if self.supervised.any() else len(self.tokens)


@dataclass(frozen=True)
class PackedRows:
    """Rows [B, S]: tokens int64 (0 on padding), documents int64 (NO_DOCUMENT on padding), positions int64 (restart at 0
    in every document), supervised bool. members: (conversation, tokens taken) of every document, row by row."""

    tokens: np.ndarray
    documents: np.ndarray
    positions: np.ndarray
    supervised: np.ndarray
    members: list[list[tuple[int, int]]] | None = None


def load_conversations(path: Path | str, tokenizer: Callable[[], Any] | None = None) -> list[Conversation]:
    """Every conversation under `path`: a folder of npz shards (in name order), one shard, or one JSONL file.

    `tokenizer` makes the target's Hugging Face tokenizer; it is called for JSONL rows that are not token ids yet.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if not files:
            raise DSpineError(f"data.path {path}: no npz shards there; expected *.npz or one conversations .jsonl file")
    elif path.suffix in (".npz", ".jsonl") and path.is_file():
        files = [path]
    else:
        raise DSpineError(f"data.path {path}: expected a folder of npz shards, an .npz or a .jsonl file")
    if files[0].suffix == ".jsonl":
        return _read_jsonl(files[0], tokenizer)
    return [conversation for file in files for conversation in _read_shard(file)]


def _read_shard(path: Path) -> list[Conversation]:
    arrays = read_npz(path)
    missing = [name for name in _SHARD_KEYS if name not in arrays]
    if missing:
        raise DSpineError(f"{path}: shard lacks {', '.join(missing)}; expected {', '.join(_SHARD_KEYS)} and greedy")
    tokens, lengths, prompts = (arrays[name] for name in _SHARD_KEYS)
    if tokens.ndim != 1 or lengths.ndim != 1 or (lengths < 0).any():
        raise DSpineError(f"{path}: tokens and lengths must be flat lists, lengths 0 or more")
    if int(lengths.sum()) != len(tokens):
        raise DSpineError(f"{path}: lengths add up to {int(lengths.sum())} tokens, the shard holds {len(tokens)}")
    for name in _SHARD_KEYS:
        if arrays[name].ndim != 1 or not np.issubdtype(arrays[name].dtype, np.integer) or (arrays[name] < 0).any():
            raise DSpineError(f"{path}: {name} must be a flat list of whole numbers, 0 or more")
    greedy = arrays.get("greedy", np.zeros(len(lengths), dtype=bool))
    if len(prompts) != len(lengths) or greedy.shape != lengths.shape:
        raise DSpineError(
            f"{path}: {len(lengths)} lengths, but {len(prompts)} prompt_lengths and {greedy.size} marks of greedy answers"
        )
    ends = np.cumsum(lengths)
    return [
        Conversation(tokens[end - length : end], np.arange(length) >= prompt, bool(is_greedy))
        for end, length, prompt, is_greedy in zip(ends, lengths, prompts, greedy, strict=True)
    ]


def _read_jsonl(path: Path, tokenizer: Callable[[], Any] | None) -> list[Conversation]:
    """`tokenizer` is made at the first row that needs one."""
    conversations, made = [], None
    for where, row in read_rows(path):
        if "input_ids" not in row and made is None:
            if tokenizer is None:
                raise DSpineError(f"{where}: a conversation needs the target's tokenizer")
            made = tokenizer()
        conversations.append(_conversation_of(row, made, where))
    if not conversations:
        raise DSpineError(f"{path}: no conversations in the file")
    if not any(conversation.supervised.any() for conversation in conversations):
        raise DSpineError(f"{path}: no supervised token in {len(conversations)} conversations (no assistant turn)")
    return conversations


def _conversation_of(row: dict[str, Any], tokenizer: Any, where: str) -> Conversation:
    greedy = bool(row.get("greedy", False))
    if "input_ids" in row:
        return Conversation(*tokens_of_ids(row, where), greedy)
    if "text" in row:
        return Conversation(*tokens_of_text(row["text"], tokenizer, where), greedy)
    messages = normal_messages(row.get("conversations", row.get("messages")), where)
    return tokenize_conversation(messages, tokenizer, where, greedy)


def tokenize_conversation(messages: list[dict[str, str]], tokenizer: Any, where: str, greedy: bool = False) -> Conversation:
    """Chat template over the whole conversation; every assistant turn (its end token included) is supervised, but for one that
    nothing comes before: the target is never asked to open a conversation."""
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", True):
        raise DSpineError(f"{where}: the target has no chat template; give input_ids with loss_mask instead")

    def render(count: int, prompt: bool) -> str:
        try:
            return tokenizer.apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt)
        except (TemplateError, ValueError) as error:
            raise DSpineError(f"{where}: the target's chat template refuses the conversation: {error}") from error

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    ids = encode(render(len(messages), False))
    supervised = np.zeros(len(ids), dtype=bool)
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index == 0:
            continue
        before, after = encode(render(index, True)), encode(_turn_end(render(index + 1, False), message["content"]))
        if ids[: len(before)] != before or ids[: len(after)] != after:
            raise DSpineError(
                f"{where}: the chat template does not render turn {index + 1} as a prefix; split the conversation there"
            )
        supervised[len(before) : len(after)] = True
    return Conversation(np.asarray(ids), supervised, greedy)


def _turn_end(text: str, content: str) -> str:
    """`text` up to the end token of its last turn: a template's line break behind that is never generated. Where nothing else
    ends the turn, the line break does."""
    cut = text.rstrip("\n")
    return text if content.strip() and cut.endswith(content.strip()) else cut


def export_specforge(source: Path, output: Path, model: str, as_text: bool) -> int:
    """Write conversations in SpecForge's form (`formats.export_rows`); returns the number of rows."""
    folder = resolve_model(model)
    conversations = load_conversations(source, lambda: load_tokenizer(folder).backend)
    decode = None
    if as_text:
        backend = load_tokenizer(folder).backend
        decode = lambda ids: backend.decode(ids, clean_up_tokenization_spaces=False)  # noqa: E731
    write_jsonl(output, export_rows(conversations, decode))
    return len(conversations)


def split_holdout(conversations: list[Conversation], holdout: int) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held out): the last `holdout` conversations are never trained on."""
    if holdout >= len(conversations):
        raise DSpineError(f"data.holdout is {holdout}, but there are only {len(conversations)} conversations")
    cut = len(conversations) - holdout
    return conversations[:cut], conversations[cut:]


def load_split(
    paths: Sequence[Path | str], holdout: int, tokenizer: Callable[[], Any] | None = None
) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held out) of one path or several. Held out are the last `holdout` conversations of the FIRST path: data that
    is added behind it leaves them what they were, and its own answers to held-out prompts are left out."""
    first, *others = (load_conversations(path, tokenizer) for path in paths)
    train, held = split_holdout(first, holdout)
    barred = {_prompt_key(conversation) for conversation in held}
    return train + [c for more in others for c in more if _prompt_key(c) not in barred], held


def data_facts(train: Sequence[Conversation], held_out: Sequence[Conversation]) -> dict[str, Any]:
    """What a run's order of rows depends on, wherever the files lie and in whatever form."""
    digest = hashlib.blake2b(digest_size=8)
    for conversation in (*train, *held_out):
        digest.update(np.asarray(conversation.tokens, dtype=np.int64).tobytes())
        digest.update(np.asarray(conversation.supervised, dtype=bool).tobytes())
    return {"conversations": len(train), "held_out": len(held_out), "digest": digest.hexdigest()}


def _prompt_key(conversation: Conversation) -> bytes:
    return np.asarray(conversation.tokens[: conversation.prompt_length], dtype=np.int64).tobytes()


def pack_epoch(lengths: np.ndarray, sequence_length: int, open_rows: int, rng: np.random.Generator) -> list[list[int]]:
    """Conversations (by index, shuffled) packed into rows: each goes to the fullest open row with room; when none has
    room and `open_rows` are open, the fullest is closed. Longer conversations count as `sequence_length` (cut later)."""
    rows: list[list[int]] = []
    open_: list[tuple[int, list[int]]] = []  # (free tokens, members)
    for index in rng.permutation(len(lengths)):
        need = min(int(lengths[index]), sequence_length)
        fitting = [slot for slot, (free, _) in enumerate(open_) if free >= need]
        if fitting:
            slot = min(fitting, key=lambda s: open_[s][0])
            free, members = open_[slot]
            members.append(int(index))
            open_[slot] = (free - need, members)
            continue
        if len(open_) == open_rows:
            rows.append(open_.pop(min(range(len(open_)), key=lambda s: open_[s][0]))[1])
        open_.append((sequence_length - need, [int(index)]))
    return rows + [members for _, members in open_]


class RowStream:
    """Endless packed rows. `position` = (epoch, next row) is all of its state."""

    def __init__(
        self,
        conversations: list[Conversation],
        sequence_length: int,
        open_rows: int,
        seed: int,
        position: tuple[int, int] = (0, 0),
    ) -> None:
        usable = [c for c in conversations if _trainable(c, sequence_length)]
        if not usable:
            raise DSpineError(f"no conversation has two supervised tokens in a row within {sequence_length} tokens")
        self.conversations, self.sequence_length = usable, sequence_length
        self._open_rows, self._seed = open_rows, seed
        self._lengths = np.array([len(c.tokens) for c in usable])
        self.position = position
        self._epoch, self._rows = -1, []  # type: tuple[int, list[list[int]]]

    def take(self, count: int) -> PackedRows:
        """The next `count` rows."""
        return pack_rows(self.conversations, [next(self._members()) for _ in range(count)], self.sequence_length)

    def _members(self) -> Iterator[list[int]]:
        while True:
            epoch, row = self.position
            if epoch != self._epoch:
                rng = np.random.default_rng([self._seed, epoch])
                self._epoch = epoch
                self._rows = pack_epoch(self._lengths, self.sequence_length, self._open_rows, rng)
            if row < len(self._rows):
                self.position = (epoch, row + 1)
                yield self._rows[row]
            else:
                self.position = (epoch + 1, 0)


def pack_rows(conversations: Sequence[Conversation], rows: list[list[int]], sequence_length: int) -> PackedRows:
    """Conversations by index, row by row -> arrays; what does not fit into a row is cut."""
    shape = (len(rows), sequence_length)
    tokens, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    documents, supervised = np.full(shape, NO_DOCUMENT, dtype=np.int64), np.zeros(shape, dtype=bool)
    members: list[list[tuple[int, int]]] = []
    for r, row in enumerate(rows):
        start = 0
        members.append([])
        for document, index in enumerate(row):
            conversation = conversations[index]
            count = min(len(conversation.tokens), sequence_length - start)
            place = slice(start, start + count)
            tokens[r, place] = conversation.tokens[:count]
            documents[r, place] = document
            positions[r, place] = np.arange(count)
            supervised[r, place] = conversation.supervised[:count]
            members[r].append((index, count))
            start += count
    return PackedRows(tokens, documents, positions, supervised, members)


def _trainable(conversation: Conversation, sequence_length: int) -> bool:
    mask = conversation.supervised[:sequence_length]
    return bool((mask[:-1] & mask[1:]).any())
