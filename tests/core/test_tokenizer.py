"""Stop tokens (case T2), prompts, and the incremental detokenizer on byte-level and on byte-fallback tokenizers."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Raw

from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.tokenizer import (
    Detokenizer,
    Tokenizer,
    decode_utf8,
    encode_prompt,
    eos_ids_of_folder,
    load_tokenizer,
    stop_token_ids,
)

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def byte_level() -> Raw:
    """All bytes, a few merges (one of them half a character), two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    first, second = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("é")[0][0]
    merges = [("a", "b"), (first, second), ("Ġ", "a"), ("a", first)]
    words = ["<s>", "</s>", *alphabet, *("".join(merge) for merge in merges)]
    raw = Raw(models.BPE({word: index for index, word in enumerate(words)}, merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return raw


def byte_fallback() -> Raw:
    """Llama 2's kind: `▁` for a space, dropped at the start of a text, and `<0xE2>` tokens for unknown characters."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "a", "b", "▁b", "ab", "é"]
    raw = Raw(models.BPE({word: index for index, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return raw


def save(raw: Raw, folder: Path, *, template: str | None = TEMPLATE, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    raw.save(str(folder / "tokenizer.json"))
    card = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "clean_up_tokenization_spaces": True} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(card))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(save(byte_level(), tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def any_tokenizer(request, tmp_path_factory) -> Tokenizer:
    return load_tokenizer(save(request.param(), tmp_path_factory.mktemp(request.param.__name__)))


# Stop tokens


def write(folder: Path, **files: object) -> Path:
    for name, eos in files.items():
        (folder / f"{name}.json").write_text(json.dumps({} if eos is None else {"eos_token_id": eos}))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer_eos", "expected"),
    [
        (62, [62, 61], 63, {61, 62, 63}),
        ([7], 8, [9, 7], {7, 8, 9}),
        (None, None, 5, {5}),
        (4, None, None, {4}),
        (None, None, None, set()),
    ],
)
def test_stop_ids_are_a_union(tmp_path, config, generation, tokenizer_eos, expected):
    folder = write(tmp_path, config=config, generation_config=generation)
    bare = Tokenizer(None, folder, eos_ids_of_folder(folder))
    assert stop_token_ids(bare, tokenizer_eos) == expected


def test_stop_ids_of_a_loaded_folder(tmp_path):
    folder = write(save(byte_level(), tmp_path / "model"), config=62, generation_config=[62, 61])
    assert load_tokenizer(folder).stop_ids == {1, 61, 62}
    assert stop_token_ids(load_tokenizer(folder), frozenset({99})) == {1, 61, 62, 99}


@pytest.mark.parametrize("bad", ["2", [2, "3"], -1, 1.5, True, [None], {"id": 2}])
def test_bad_eos_ids_are_refused(tmp_path, bad):
    with pytest.raises(CheckpointError, match=r"eos_token_id in .*generation_config.json must be a token id or a list"):
        eos_ids_of_folder(write(tmp_path, generation_config=bad))


def test_damaged_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"eos_token_id": \xff')
    with pytest.raises(CheckpointError, match="config.json is not valid JSON"):
        eos_ids_of_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, got list"):
        eos_ids_of_folder(tmp_path)


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    save(byte_level(), tmp_path / "bad")
    (tmp_path / "bad" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path / "bad")


# Prompts


def text_of(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.backend.decode(ids, clean_up_tokenization_spaces=False)


def test_chat_template_is_used_where_there_is_one(tokenizer, tmp_path):
    ids = encode_prompt(tokenizer, "ab é", limit=100)
    assert text_of(tokenizer, ids) == "<s>user:ab é</s><s>assistant:" and ids[0] == 0
    ids = encode_prompt(tokenizer, "ab", limit=100, system_prompt="be brief")
    assert text_of(tokenizer, ids) == "<s>system:be brief</s><s>user:ab</s><s>assistant:"
    assert text_of(tokenizer, encode_prompt(tokenizer, " ab ", limit=100, raw=True)) == " ab "
    plain = load_tokenizer(save(byte_level(), tmp_path / "plain", template=None))
    assert text_of(plain, encode_prompt(plain, "ab", limit=100)) == "ab"


def test_messages_and_ids_are_prompts_too(tokenizer):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    ids = encode_prompt(tokenizer, turns, limit=100)
    assert text_of(tokenizer, ids) == "<s>user:a</s><s>assistant:b</s><s>user:c</s><s>assistant:"
    assert encode_prompt(tokenizer, turns[:1], limit=100, system_prompt="s") == encode_prompt(
        tokenizer, [{"role": "system", "content": "s"}, turns[0]], limit=100
    )
    assert encode_prompt(tokenizer, ids, limit=100) == ids


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        (" \n\t", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ("bad \udcff byte", {}, "prompt is not valid UTF-8"),
        ("a", {"system_prompt": "\ud800"}, "message 0 is not valid UTF-8"),
        ("a" * 40, {"limit": 20}, r"prompt has \d+ tokens, but the model's context holds 20"),
        ("a", {"raw": True, "system_prompt": "s"}, "raw was asked for"),
        ([1, 2, 9999], {}, r"prompt position 2: expected a token id below \d+, got 9999"),
        ([1, -1], {}, "position 1.*got -1"),
        ([1.5], {}, "position 0.*got 1.5"),
        ([1], {"system_prompt": "s"}, "not with token ids"),
        (IMAGE, {}, "message 0: only text content is supported, got list"),
        ([{"role": "user"}], {}, "only text content is supported, got NoneType"),
        ([{"role": "tool", "content": "x"}], {}, "chat template in .* refused the prompt: no tools"),
        ([{"role": "system", "content": "x"}], {"system_prompt": "y"}, "two system prompts"),
        ([{"role": "user", "content": "x"}], {"raw": True}, "raw takes a text prompt"),
    ],
)
def test_bad_prompts_are_one_clear_line(tokenizer, prompt, options, message):
    with pytest.raises(DSpineError, match=message) as error:
        encode_prompt(tokenizer, prompt, **{"limit": 100, **options})
    assert "\n" not in str(error.value)


def test_prompt_limit_is_exact(tokenizer):
    assert len(encode_prompt(tokenizer, "a" * 9, limit=10, raw=True)) == 9
    with pytest.raises(DSpineError, match="prompt has 10 tokens"):
        encode_prompt(tokenizer, "a" * 10, limit=10, raw=True)


def test_model_without_template_refuses_what_it_cannot_carry(tmp_path):
    plain = load_tokenizer(save(byte_level(), tmp_path / "plain", template=None))
    with pytest.raises(DSpineError, match="a system prompt needs the chat template, but the model in .* has none"):
        encode_prompt(plain, "a", limit=10, system_prompt="s")
    with pytest.raises(DSpineError, match="chat messages need a chat template"):
        encode_prompt(plain, [{"role": "user", "content": "a"}], limit=10)


def test_bytes_from_outside():
    assert decode_utf8("é\n".encode(), "x") == "é\n"
    with pytest.raises(DSpineError, match="the prompt is not valid UTF-8: byte 0xff at offset 2"):
        decode_utf8(b"ab\xff", "the prompt")


# Detokenizer


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.add(token) for token in ids] + [detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_join_to_the_full_text(any_tokenizer, data):
    """Any ids at all: broken characters, special tokens, byte runs."""
    ids = data.draw(st.lists(st.integers(0, len(any_tokenizer.backend) - 1), max_size=25))
    assert "".join(pieces_of(any_tokenizer, ids)) == any_tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_valid_text_never_shows_a_broken_character(tokenizer, text):
    pieces = pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text.replace("<s>", "").replace("</s>", "")
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_a_split_character_is_held_back(tokenizer):
    ids = tokenizer.encode("a€b")
    assert pieces_of(tokenizer, ids) == ["a", "", "", "€", "b", ""]
    assert pieces_of(tokenizer, ids[:3]) == ["a", "", "", "\ufffd"]


def test_spaces_of_a_byte_fallback_tokenizer(tmp_path):
    tokenizer = load_tokenizer(save(byte_fallback(), tmp_path / "model"))
    ids = tokenizer.backend.convert_tokens_to_ids(["▁a", "▁b", "<0xC3>", "<0xA9>", "▁", "▁a", "</s>"])
    assert tokenizer.decode(ids) == "a bé  a"
    assert pieces_of(tokenizer, ids) == ["a", " b", "", "", "é ", " a", "", ""]


def test_spaces_before_punctuation_stay(tokenizer):
    """Some cards ask for `clean_up_tokenization_spaces`, which would change text that has been printed already."""
    ids = tokenizer.encode("a , b .")
    assert tokenizer.decode(ids) == "a , b ." == "".join(pieces_of(tokenizer, ids))


def test_long_texts_bring_no_warning_of_another_library(tokenizer, monkeypatch):
    """It speaks of indexing errors; a text that exceeds the context is refused by `encode_prompt`, with the numbers."""
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append
    monkeypatch.setattr(tokenizer.backend, "model_max_length", 4)
    logging.getLogger("transformers").addHandler(handler)
    try:
        assert len(tokenizer.encode("a b c d e f g")) > 4 and said == []
    finally:
        logging.getLogger("transformers").removeHandler(handler)
