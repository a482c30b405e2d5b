"""Structured output across a block (case S6): legal text whatever is drafted, and a matcher that follows emitted tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("openai", reason="the openai client is not installed (dspine[dev])")
pytest.importorskip("llguidance", reason="llguidance is not installed (dspine[server])")

import openai

from dspine.common.serving.prompts import Prompts
from dspine.common.serving.rules import Grammars
from dspine.common.serving.schema import ChatRequest
from tests.helpers.toys import NumpyArrays
from tests.serving.toys import make_tokenizer

DIGIT = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
         "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "digit", "schema": DIGIT}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": DIGIT}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "additionalProperties": False}}},
]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    prompts = Prompts(tokenizer, 512)
    return tokenizer, Grammars(prompts, len(tokenizer.backend), tokenizer.stop_ids)


def rule_of(parts, thinking=False, may_think=False):
    tokenizer, grammars = parts
    request = ChatRequest.model_validate(
        {"model": "toy", "messages": [{"role": "user", "content": "x"}], "response_format": FORMAT}
    )
    return grammars.rule(grammars.wanted(request), NumpyArrays(), thinking=thinking, may_think=may_think)


def allowed(logits):
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in logits[0]]


def test_s6_block_past_the_end(parts):
    """`{"a": 7}`, a line feed, the end token and junk: legal to the brace, then only the end."""
    tokenizer, _ = parts
    vocab, end = len(tokenizer.backend), tokenizer.encode("<|im_end|>")[0]
    rule = rule_of(parts)
    anchor, *drafts = [*tokenizer.encode('{"a": 7}'), *tokenizer.encode("\n"), end, *tokenizer.encode("junk")]
    rule.emitted([anchor])
    for _ in range(2):  # looking does not change the state
        rows = allowed(rule.apply(np.zeros((1, len(drafts) + 1, vocab)), drafts))
        legal = next(i for i, draft in enumerate(drafts) if draft not in rows[i])
        assert legal == len('{"a": 7}') - 1 and rows[legal] == {end}
        digits = {tokenizer.encode(str(i))[0] for i in range(10)}
        assert digits <= rows[5] and not rows[0] & digits
    rule.emitted([*drafts[:legal], end])
    assert allowed(rule.apply(np.zeros((1, 1, vocab)), []))[0] == {end}


def test_illegal_draft_is_refused_at_its_place(parts):
    tokenizer, _ = parts
    rule, vocab = rule_of(parts), len(tokenizer.backend)
    rule.emitted(tokenizer.encode("{"))
    drafts = tokenizer.encode('"b": 7}')
    rows = allowed(rule.apply(np.zeros((1, len(drafts) + 1, vocab)), drafts))
    assert drafts[0] in rows[0] and drafts[1] not in rows[1] and tokenizer.encode("a")[0] in rows[1]


def test_thinking_ends_inside_a_block(parts):
    """`</think>` at position 1 switches the grammar on for position 2."""
    tokenizer, _ = parts
    vocab, brace = len(tokenizer.backend), tokenizer.encode("{")[0]
    drafts = [tokenizer.encode("x")[0], tokenizer.encode("</think>")[0], tokenizer.encode("x")[0]]
    rule = rule_of(parts, thinking=True)
    rows = allowed(rule.apply(np.zeros((1, 4, vocab)), drafts))
    assert len(rows[0]) == len(rows[1]) == vocab and brace in rows[2] and drafts[2] not in rows[2]
    rule.emitted(drafts[:2])
    assert allowed(rule.apply(np.zeros((1, 1, vocab)), []))[0] == rows[2]
    opening = rule_of(parts, may_think=True)
    think = tokenizer.encode("<think>")[0]
    assert {think, brace} <= allowed(opening.apply(np.zeros((1, 1, vocab)), []))[0]
    opening.emitted([think])
    assert len(allowed(opening.apply(np.zeros((1, 1, vocab)), []))[0]) == vocab


def ask(client, content, **options):
    options = {"model": "toy", "temperature": 0, "max_tokens": 120} | options
    return client.chat.completions.create(messages=[{"role": "user", "content": content}], **options)


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_answers_follow_the_schema(toy, client, temperature):
    """The model would say otherwise, and its drafter drafts what it would say."""
    toy.target.scripts["legal"] = '{"a": 7}\nand more'
    toy.target.scripts["illegal"] = '{"b": "seven"}'
    for content in ("legal", "illegal", "noise"):
        answer = ask(client, content, response_format=FORMAT, temperature=temperature, seed=3)
        value = json.loads(answer.choices[0].message.content)
        assert set(value) == {"a"} and 0 <= value["a"] <= 9 and answer.choices[0].finish_reason == "stop"
    plain = ask(client, "illegal", response_format=FORMAT, extra_body={"draft": False})
    assert plain.choices[0].message.content == ask(client, "illegal", response_format=FORMAT).choices[0].message.content
    any_object = ask(client, "noise", response_format={"type": "json_object"}, max_tokens=200, logit_bias=_close(toy))
    assert isinstance(json.loads(any_object.choices[0].message.content), dict)


def _close(toy):
    """Push towards closing brackets and quotes, so that noise ends."""
    return {str(toy.engine.tokenizer.encode(text)[0]): 60 for text in ("}", '"')}


def test_forced_tools(toy, client):
    toy.target.scripts["call"] = "I would rather talk."
    choice = ask(client, "call", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "f"}}).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.name == "f"
    assert set(json.loads(choice.message.tool_calls[0].function.arguments)) == {"a"}
    choice = ask(client, "call", tools=TOOLS, tool_choice="required").choices[0]
    assert choice.message.tool_calls[0].function.name in ("f", "g")


def test_reasoning_before_a_schema(toy, client):
    toy.target.scripts["think first"] = '<think>\nfree text\n</think>{"a": 3} tail'
    message = ask(client, "think first", response_format=FORMAT).choices[0].message
    assert message.model_extra["reasoning_content"] == "free text" and json.loads(message.content) == {"a": 3}


def test_schemas_that_cannot_be_compiled(client):
    bad = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}},
    }
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, "x", response_format=bad)
    assert error.value.body["param"] == "response_format"
