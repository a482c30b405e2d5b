"""Shards, conversations, packing, anchors and labels."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dspine.common.errors import DSpineError
from dspine_cuda.training.batches import block_labels, draw_anchors, make_batch
from dspine_cuda.training.data import (
    Conversation,
    RowStream,
    load_conversations,
    pack_epoch,
    split_holdout,
    tokenize_conversation,
)
from tests.training.toys import write_shards


def conversations_of(lengths: list[int], prompt: int = 2) -> list[Conversation]:
    return [Conversation(np.arange(n) + 100 * i, np.arange(n) >= prompt) for i, n in enumerate(lengths)]


def test_shards_round_trip_and_bad_ones_are_named(tmp_path) -> None:
    folder = write_shards(tmp_path / "data", conversations=5)
    loaded = load_conversations(folder)
    assert len(loaded) == 10 and all(c.greedy for c in loaded)
    with np.load(folder / "toy_0.npz") as shard:
        first = int(shard["lengths"][0])
        np.testing.assert_array_equal(loaded[0].tokens, shard["tokens"][:first])
        assert loaded[0].prompt_length == int(shard["prompt_lengths"][0])
    train, held = split_holdout(loaded, 3)
    assert [id(c) for c in train + held] == [id(c) for c in loaded] and len(held) == 3
    (folder / "toy_0.npz").write_bytes(b"broken")
    with pytest.raises(DSpineError, match="toy_0.npz: not a readable npz shard"):
        load_conversations(folder)
    np.savez(folder / "toy_0.npz", tokens=np.zeros(4), lengths=np.array([3]), prompt_lengths=np.array([1]))
    with pytest.raises(DSpineError, match="add up to 3 tokens, the shard holds 4"):
        load_conversations(folder)
    with pytest.raises(DSpineError, match="expected a folder"):
        load_conversations(tmp_path / "nowhere")
    with pytest.raises(DSpineError, match="only 10 conversations"):
        split_holdout(loaded, 10)


def test_packing_uses_every_conversation_once_and_wastes_little() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 700, 300)
    rows = pack_epoch(lengths, 512, 16, np.random.default_rng([0, 0]))
    assert sorted(i for row in rows for i in row) == list(range(300))
    fill = [sum(min(int(lengths[i]), 512) for i in row) for row in rows]
    assert max(fill) <= 512
    assert np.mean(fill) > 0.85 * 512
    assert rows == pack_epoch(lengths, 512, 16, np.random.default_rng([0, 0]))
    assert rows != pack_epoch(lengths, 512, 16, np.random.default_rng([0, 1]))


def test_rows_restart_positions_and_mark_documents() -> None:
    rows = RowStream(conversations_of([6, 5, 7]), 20, 4, seed=0).take(1)
    lengths = [int((rows.documents[0] == d).sum()) for d in range(3)]
    assert sorted(lengths) == [5, 6, 7]
    start = 0
    for document, length in enumerate(lengths):
        place = slice(start, start + length)
        assert (rows.documents[0, place] == document).all()
        np.testing.assert_array_equal(rows.positions[0, place], np.arange(length))
        np.testing.assert_array_equal(rows.supervised[0, place], np.arange(length) >= 2)
        np.testing.assert_array_equal(rows.tokens[0, place] % 100, np.arange(length))
        start += length
    assert (rows.documents[0, start:] == -1).all() and not rows.supervised[0, start:].any()


def test_the_stream_resumes_anywhere() -> None:
    data = conversations_of([6, 9, 7, 12, 5, 8, 11])
    whole = RowStream(data, 16, 3, seed=4)
    first, rest = whole.take(5), None
    position = whole.position
    rest = whole.take(6)
    again = RowStream(data, 16, 3, seed=4, position=position).take(6)
    np.testing.assert_array_equal(rest.tokens, again.tokens)
    assert first.tokens.shape == (5, 16)
    with pytest.raises(DSpineError, match="no conversation has two supervised tokens"):
        RowStream(conversations_of([2, 3]), 16, 3, seed=0)


def test_anchors_are_eligible_sorted_and_padded() -> None:
    rng = np.random.default_rng(0)
    supervised = rng.random((3, 30)) < 0.6
    supervised[2] = False
    documents = np.repeat([[0] * 11 + [1] * 19], 3, axis=0)
    anchors, keep = draw_anchors(supervised, documents, 8, np.random.default_rng(1))
    assert not keep[2].any()
    for row in range(2):
        kept = anchors[row][keep[row]]
        assert (np.diff(kept) > 0).all() and (anchors[row][~keep[row]] == 0).all()
        assert all(supervised[row, p] and supervised[row, p + 1] and documents[row, p] == documents[row, p + 1] for p in kept)
    everything, kept = draw_anchors(supervised, documents, 40, np.random.default_rng(1))
    eligible = supervised[0, :-1] & supervised[0, 1:] & (documents[0, :-1] == documents[0, 1:])
    np.testing.assert_array_equal(everything[0][kept[0]], np.flatnonzero(eligible))


def test_labels_stop_at_the_first_gap_document_end_and_row_end() -> None:
    tokens = np.arange(12)[None]
    documents = np.array([[0] * 7 + [1] * 5])
    supervised = np.ones((1, 12), dtype=bool)
    supervised[0, 4] = False
    anchors, keep = np.array([[1, 4, 5, 9, 0]]), np.array([[True, True, True, True, False]])
    labels, valid = block_labels(tokens, supervised, documents, anchors, keep, 4)
    want = [[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(valid[0], np.array(want, dtype=bool))
    np.testing.assert_array_equal(labels[0, 0], [2, 3, 0, 0])


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    rows = RowStream(conversations_of([30, 28]), 32, 2, seed=0).take(2)

    def build(step: int):
        return make_batch(rows, num_anchors=6, proposals=3, gamma=7.0, replacement=0.5, seed=1, step=step)

    one, same, other = build(4), build(4), build(5)
    assert bool((one.anchors == same.anchors).all()) and bool((one.replace == same.replace).all())
    assert not bool((one.anchors == other.anchors).all())
    draws = make_batch(rows, num_anchors=6, proposals=3, gamma=7.0, replacement=0.0, seed=1, step=4)
    assert not bool(draws.replace.any())
    np.testing.assert_allclose(one.weights[0, 0].numpy(), np.exp(-np.arange(3) / 7.0), rtol=1e-6)
    assert one.teacher_index[0, 0].tolist() == [int(one.anchors[0, 0]) + t for t in range(3)]


class WordTokenizer:
    """A chat template in one line; one id a character. end: what stands behind a turn."""

    def __init__(self, end="|"):
        self.end = end

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        text = "".join(f"<{m['role'][0]}>{m['content']}{self.end}" for m in messages)
        return text + ("<a>" if add_generation_prompt else "")

    def encode(self, text, add_special_tokens):
        return [ord(c) for c in text]


def test_assistant_turns_are_supervised(tmp_path) -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "ok"},
    ]
    conversation = tokenize_conversation(messages, WordTokenizer(), "x")
    text = "".join(chr(t) for t in conversation.tokens)
    assert "".join(c for c, s in zip(text, conversation.supervised, strict=True) if s) == "yo|ok|"
    opened = tokenize_conversation([{"role": "assistant", "content": "Hello"}, *messages], WordTokenizer(), "x")
    text = "".join(chr(t) for t in opened.tokens)
    assert "".join(c for c, s in zip(text, opened.supervised, strict=True) if s) == "yo|ok|"  # what answers nothing is context
    for end, supervised in (
        ("|\n", "yo|ok|"),
        ("\n", "yo\nok\n"),
        ("", "yook"),
    ):  # a line break behind an end token is the template's
        conversation = tokenize_conversation(messages, WordTokenizer(end), "x")
        marked = zip(conversation.tokens, conversation.supervised, strict=True)
        assert "".join(chr(token) for token, mark in marked if mark) == supervised
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"conversations": messages}) + "\n\n")
    assert len(load_conversations(path, WordTokenizer)) == 1
    path.write_text('{"conversations": [{"role": "user"}]}\n')
    with pytest.raises(DSpineError, match="chat.jsonl:1: expected"):
        load_conversations(path, WordTokenizer)
    path.write_text("{broken\n")
    with pytest.raises(DSpineError, match="chat.jsonl:1: not valid JSON"):
        load_conversations(path, WordTokenizer)


def test_specforge_rows_are_read_as_they_are(tmp_path) -> None:
    from dspine.common.tokenizer import load_tokenizer
    from tests.training.toys import write_tokenizer

    tokenizer = load_tokenizer(write_tokenizer(tmp_path)).backend
    path = tmp_path / "rows.jsonl"
    chat = [{"from": "human", "value": "w9 w10"}, {"from": "gpt", "value": "w11 w12"}]
    text = "<|im_start|> user w9 w10 <|im_end|> <|im_start|> assistant w11 w12 <|im_end|> "
    ids = {"input_ids": [3, 4, 9, 10, 2, 3, 5, 11, 12, 2], "loss_mask": [0] * 7 + [1] * 3}
    rows = [{"id": "a", "conversations": chat}, {"id": "b", "text": text, "is_preformatted": True}, ids]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    loaded = load_conversations(path, lambda: tokenizer)
    for conversation in loaded:
        np.testing.assert_array_equal(conversation.tokens, ids["input_ids"])
        np.testing.assert_array_equal(conversation.supervised, np.array(ids["loss_mask"], dtype=bool))
    assert len(loaded) == 3
    strict = load_tokenizer(write_tokenizer(tmp_path, template="{{ raise_exception('user must begin') }}")).backend
    bare = load_tokenizer(write_tokenizer(tmp_path, template=None)).backend
    for row, chosen, message in (
        ({"conversations": []}, tokenizer, "the conversation is empty"),
        ({"conversations": [{"role": "robot", "content": "w9"}]}, tokenizer, "message 0 has role 'robot'"),
        ({"conversations": [{"role": "user", "content": "w9"}]}, tokenizer, "no supervised token in 1 conversations"),
        ({"conversations": chat}, bare, "the target has no chat template"),
        ({"conversations": chat}, strict, "rows.jsonl:1: the target's chat template refuses the conversation: user must begin"),
        ({"conversations": [{"from": "gpt", "value": "w9"}]}, tokenizer, "no supervised token in 1 conversations"),
        ({"text": "w9 w10"}, tokenizer, "no assistant turn in the text"),
        ({"text": text}, bare, "the target has no chat template"),
        ({"input_ids": [1, 2]}, tokenizer, "input_ids need a loss_mask"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, tokenizer, "expected two equal lists"),
        ({"input_ids": ["a"], "loss_mask": [1]}, tokenizer, "must be lists of whole numbers"),
    ):
        path.write_text(json.dumps(row))
        with pytest.raises(DSpineError, match=message):
            load_conversations(path, lambda chosen=chosen: chosen)
