"""Text into reasoning, content, tool calls; stop strings: whatever way the text is cut (case T5)."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.common.serving.parsing import OutputParser, StopStrings, ToolCallText, held_back, parse_call

T5 = ["Write", ".", "</think>", "<tool_call>", '{"name":"f","arguments":{"x":1}}', "</tool_call>"]


def parsed(pieces, **options):
    """(reasoning, content, calls) of text that comes in these pieces."""
    parser = OutputParser(**({"reasoning": True, "thinking": False, "tools": True} | options))
    found = [piece for text in pieces for piece in parser.add(text)] + parser.flush()
    assert all(sum(map(bool, (p.reasoning, p.content, p.call))) == 1 for p in found)
    calls = [piece.call for piece in found if piece.call]
    assert parser.calls == len(calls)
    return "".join(p.reasoning for p in found), "".join(p.content for p in found), calls


def cut(text, places):
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


def test_t5_marker_and_call_in_one_block():
    wanted = ("Write.", "", [ToolCallText("f", '{"x": 1}')])
    assert parsed(["".join(T5)], thinking=True) == wanted
    assert parsed(T5, thinking=True) == wanted
    assert parsed(list("".join(T5)), thinking=True) == wanted


MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
PIECES = [*MARKERS, '{"name":"f","arguments":{}}', '{"name":1}', " ", "\n", "a<", "b", "<t"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
CUTS = st.lists(st.integers(0, 200), max_size=12)


@settings(max_examples=200, deadline=None)
@given(TEXTS, CUTS, st.booleans(), st.booleans())
def test_pieces_do_not_depend_on_the_cuts(text, places, thinking, tools):
    options = {"thinking": thinking, "tools": tools}
    whole = parsed([text], **options)
    assert parsed(cut(text, places), **options) == whole == parsed(list(text), **options)
    reasoning, content, calls = whole
    if not tools:
        assert not calls
    kept = "".join(reasoning + content).replace(" ", "").replace("\n", "")
    assert all(letter in text for letter in kept)


def test_plain_text_passes_unchanged():
    for text in ("", "hello", "  two  spaces  ", "a < b <", "<think", "x</think>y"):
        assert parsed(list(text), reasoning=False, tools=False) == ("", text, [])


NOT_TO_BE_SENT = (  # Python's parser takes them; JSON has no NaN, UTF-8 no half of a surrogate pair
    '{"name": "f", "arguments": {"x": NaN}}',
    '{"name": "f", "arguments": {"x": "\\ud800"}}',
    '{"name": "f\\udfff", "arguments": {}}',
)


def test_broken_calls_are_content():
    for body in ("{", '{"name": 3}', "[]", '{"arguments": {}}', '{"name": "f", "arguments": 3}', "[" * 5000, *NOT_TO_BE_SENT):
        text = f"<tool_call>{body}</tool_call>"
        assert parsed([text]) == ("", text, [])
    assert parsed(['ok <tool_call>{"name": "f"']) == ("", 'ok<tool_call>{"name": "f"', [])
    assert parse_call(json.dumps({"name": "f", "parameters": {"a": 1}})) == ToolCallText("f", '{"a": 1}')


def test_two_calls():
    one = '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call>'
    reasoning, content, calls = parsed(list(f"{one}\n{one}"))
    assert (reasoning, content) == ("", "") and calls == [ToolCallText("f", '{"a": "ü"}')] * 2


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), CUTS)
def test_stop_strings_cut_at_the_first(text, stops, places):
    checker, got, used = StopStrings(stops), "", 0
    for piece in cut(text, places):
        got += checker.add(piece)
        used += len(piece)
        if checker.hit:
            break
    got += checker.flush()
    found = [place for stop in stops if (place := text[:used].find(stop)) >= 0]
    if checker.hit:
        assert got == text[: min(found)]
        assert all(text[: used - 1].find(stop) < 0 or len(cut(text, places)) < len(text) for stop in stops)
    else:
        assert got == text and not [stop for stop in stops if stop in text]


def test_held_back_is_the_longest_possible_start():
    assert held_back("xab", ["abc", "bcd"]) == 2 and held_back("abc", ["abc"]) == 0 and held_back("", ["a"]) == 0
