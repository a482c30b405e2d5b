"""The endpoint as OpenAI's own client sees it."""

from __future__ import annotations

import json
import math

import httpx
import numpy as np
import pytest

pytest.importorskip("openai", reason="the openai client is not installed (dspine[dev])")

import openai

from dspine.common.serving.schema import ChatRequest
from dspine.common.serving.service import Service
from tests.serving.toys import toy_settings

USER = [{"role": "user", "content": "hello"}]


def ask(client, messages=None, **options):
    options = {"model": "toy", "temperature": 0, "max_tokens": 24} | options
    return client.chat.completions.create(messages=messages or USER, **options)


def streamed(client, messages=None, **options):
    """(text, last choice, usage, chunks)."""
    chunks = list(ask(client, messages, stream=True, **options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    last = [c.choices[0] for c in chunks if c.choices][-1]
    return text, last, chunks[-1].usage, chunks


def greedy(toy, ids, count):
    """The target's own text, token by token, without the server."""
    context = list(ids)
    for _ in range(count):
        context.append(int(np.argmax(toy.target.logits_of(context))))
    return context[len(ids) :]


def test_chat_is_the_targets_own_text(toy, client):
    answer = ask(client)
    ids = toy.engine.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert answer.choices[0].message.content == toy.engine.tokenizer.decode(greedy(toy, ids, 24))
    assert answer.object == "chat.completion" and answer.model == "toy" and answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(ids) and answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == len(ids) + 24


def test_stream_is_the_same_text(client):
    whole = ask(client)
    text, last, usage, chunks = streamed(client, stream_options={"include_usage": True})
    assert text == whole.choices[0].message.content and last.finish_reason == "length"
    assert chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1
    assert usage.completion_tokens == 24 and all(chunk.usage is None for chunk in chunks[:-1])
    assert streamed(client)[2] is None


def test_speculation_is_real_and_told(client):
    """Case V5: a short answer is drafted too; the figures add up."""
    block = ask(client, max_tokens=16).usage.model_extra["speculative"]
    assert block["drafted"] > 0 and block["accepted"] > 0 and block["rounds"] < 15
    assert sum(block["accepted_at"]) == block["accepted"] and sum(block["drafted_at"]) == block["drafted"]
    assert block["tokens_per_round"] == pytest.approx(15 / block["rounds"])
    plain = ask(client, max_tokens=16, extra_body={"draft": False})
    assert plain.usage.model_extra["speculative"]["drafted"] == 0
    assert plain.choices[0].message.content == ask(client, max_tokens=16).choices[0].message.content


def test_full_verification_is_a_requests_choice(toy, client):
    """`draft: "full"` verifies whole blocks, whatever the server's policy and company; a policy that was named with a fixed
    length is taken at its word."""
    full = ask(client, max_tokens=16, extra_body={"draft": "full"})
    assert full.usage.model_extra["speculative"]["drafted"] > 0
    assert full.choices[0].message.content == ask(client, max_tokens=16).choices[0].message.content
    body = {"model": "toy", "messages": [{"role": "user", "content": "x"}]}
    kinds = {}
    for name, draft, policy in (("auto", None, "auto"), ("full", "full", "static:3"), ("static", None, "static:3")):
        service = Service(toy.engine, toy_settings(policy=policy))
        job = service.chat(ChatRequest(**body, draft=draft), "me", lambda index: print).jobs[0]
        kinds[name] = job.pinned, job.policy.name, job.draft
    assert kinds == {"auto": (False, "full", True), "full": (True, "full", True), "static": (True, "static:3", True)}


def test_timings_add_up(client):
    usage = ask(client, max_tokens=16).usage
    times = usage.model_extra["timings"]
    assert set(times) == {"queue", "prefill", "decode", "first_token", "total"} and min(times.values()) >= 0
    assert 0 < times["prefill"] and times["queue"] + times["prefill"] <= times["first_token"] + 1e-3
    assert times["first_token"] <= times["total"] and times["decode"] <= times["total"]


def test_stop_strings_cut_inside_a_block(toy, client):
    text = ask(client).choices[0].message.content
    for cut in range(1, 14):
        stop = text[cut : cut + 3]
        at = text.find(stop)
        answer = ask(client, stop=[stop, "never there"])
        assert answer.choices[0].message.content == text[:at] and answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == at + 3
        assert streamed(client, stop=stop)[0] == text[:at]


def test_end_token_is_not_text(toy, client):
    toy.target.scripts["short"] = "ok."
    answer = ask(client, [{"role": "user", "content": "short"}])
    assert answer.choices[0].message.content == "ok." and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 4
    longer = ask(client, [{"role": "user", "content": "short"}], extra_body={"ignore_eos": True})
    assert longer.usage.completion_tokens == 24 and longer.choices[0].finish_reason == "length"


def test_choices_and_seeds(client):
    first = ask(client, n=4, temperature=1.5, seed=11)
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) > 1 and [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert [c.message.content for c in ask(client, n=4, temperature=1.5, seed=11).choices] == texts
    assert ask(client, temperature=1.5, seed=11).choices[0].message.content == texts[0]
    assert ask(client, temperature=1.5, seed=-12).choices[0].message.content != texts[0]
    chunks = list(ask(client, n=3, temperature=1.5, seed=11, stream=True))
    for i in range(3):
        parts = [c.choices[0] for c in chunks if c.choices[0].index == i]
        assert "".join(part.delta.content or "" for part in parts) == texts[i] and parts[-1].finish_reason == "length"
    assert ask(client, temperature=1.5).choices[0].message.content != ask(client, temperature=1.5).choices[0].message.content


def test_bias_and_penalties(toy, client):
    letter = toy.engine.tokenizer.encode("q")[0]
    assert ask(client, logit_bias={str(letter): 100}, max_tokens=8).choices[0].message.content == "q" * 8
    text = ask(client).choices[0].message.content
    banned = toy.engine.tokenizer.encode(text[0])[0]
    assert text[0] not in ask(client, logit_bias={str(banned): -100}).choices[0].message.content
    toy.target.scripts["again"] = "z" * 40
    messages = [{"role": "user", "content": "again"}]
    for name, value in (("presence_penalty", 2.0), ("frequency_penalty", 2.0)):
        plain = ask(client, messages, extra_body={"draft": False}, **{name: value})
        assert ask(client, messages, **{name: value}).choices[0].message.content == plain.choices[0].message.content


def test_logprobs_are_the_verifiers(toy, client):
    """Case V6: for accepted and replaced tokens alike."""
    answer = ask(client, logprobs=True, top_logprobs=2, max_tokens=12)
    entries = answer.choices[0].logprobs.content
    context = toy.engine.tokenizer.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")
    assert len(entries) == 12 and answer.usage.model_extra["speculative"]["accepted"] > 0
    for entry in entries:
        row = toy.target.logits_of(context)
        wanted = row - np.log(np.exp(row - row.max()).sum()) - row.max()
        token = toy.engine.tokenizer.encode(entry.token)[0]
        assert entry.logprob == pytest.approx(wanted[token], abs=1e-3) and bytes(entry.bytes).decode() == entry.token
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(sorted(wanted)[::-1][:2], abs=1e-3)
        context.append(token)
    chunks = streamed(client, logprobs=True, top_logprobs=2, max_tokens=12)[3]
    again = [entry for c in chunks if c.choices and c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert [entry.token for entry in again] == [entry.token for entry in entries]


def test_completions(toy, client):
    answer = client.completions.create(model="toy", prompt="abc", max_tokens=10, temperature=0, logprobs=1)
    ids = toy.engine.tokenizer.encode("abc")
    text = toy.engine.tokenizer.decode(greedy(toy, ids, 10))
    assert answer.choices[0].text == text and answer.object == "text_completion"
    scores = answer.choices[0].logprobs
    assert "".join(scores.tokens) == text and scores.text_offset == list(range(10)) and len(scores.top_logprobs[0]) == 1
    many = client.completions.create(model="toy", prompt=["abc", "xyz"], n=2, max_tokens=6, temperature=0)
    assert [c.text for c in many.choices][:2] == [text[:6]] * 2 and many.choices[2].text == many.choices[3].text != text[:6]
    assert many.usage.prompt_tokens == 6 and many.usage.completion_tokens == 24
    by_ids = client.completions.create(model="toy", prompt=ids, max_tokens=10, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in by_ids) == text


def test_reasoning_and_tools(toy, client):
    toy.target.scripts["weather"] = (
        '<think>\nI should look.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"place": "Bern"}}\n</tool_call>'
    )
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    options = {"tools": tools, "max_tokens": 120}
    message = ask(client, [{"role": "user", "content": "weather"}], **options).choices[0]
    assert message.finish_reason == "tool_calls" and message.message.content is None
    assert message.message.model_extra["reasoning_content"] == "I should look."
    call = message.message.tool_calls[0]
    assert call.function.name == "look" and json.loads(call.function.arguments) == {"place": "Bern"}
    chunks = list(ask(client, [{"role": "user", "content": "weather"}], stream=True, **options))
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    reasoning = "".join((chunk.choices[0].delta.model_extra or {}).get("reasoning_content", "") for chunk in chunks)
    assert reasoning == "I should look." and [c.function.arguments for c in calls] == [call.function.arguments]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    toy.target.scripts["thanks"] = "Sunny."
    history = [
        {"role": "user", "content": "weather"},
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sun"},
        {"role": "user", "content": [{"type": "text", "text": "than"}, {"type": "text", "text": "ks"}]},
    ]
    assert ask(client, history, tools=tools, tool_choice="none").choices[0].message.content == "Sunny."


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 1.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}], ids=str
)
def test_s4_penalties_count_what_was_emitted_only(client, penalty):
    """Refused drafts leave no trace in the counts: with drafts, whole blocks of them, the text is that of plain decoding."""
    texts = {}
    for draft in (True, "full", False):
        answer = ask(client, max_tokens=80, extra_body={"draft": draft, **penalty})
        block = answer.usage.model_extra["speculative"]
        assert (block["drafted"] > block["accepted"] > 0) is bool(draft)
        texts[draft] = answer.choices[0].message.content
    assert len(set(texts.values())) == 1 and texts[False] != ask(client, max_tokens=80).choices[0].message.content


def test_events_for_the_page(client):
    _, _, _, chunks = streamed(client, extra_body={"speculative_events": True})
    events = [chunk.model_extra["speculative"] for chunk in chunks]
    kinds = [token["kind"] for event in events for token in event["tokens"]]
    assert len(kinds) == 24 and {"accepted", "corrected"} <= set(kinds)
    for event in events:
        assert len(event["refused"]) <= event["drafted"] - event["accepted"]
        assert sum(token["kind"] == "accepted" for token in event["tokens"]) == event["accepted"]


def test_models_health_and_metrics(toy, client):
    model = client.models.list().data[0]
    facts = model.model_extra["dspine"]
    assert model.id == "toy" and facts["speculation"] is True and facts["drafter"] == "draft"  # the name, not the path
    assert client.models.retrieve("toy").id == "toy"
    health = httpx.get(f"{toy.url}/health").json()
    assert health["status"] == "ok" and health["waiting"] == 0 and health["speculation"] is True
    ask(client)
    text = httpx.get(f"{toy.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["dspine_drafted_tokens_total"]) > float(values["dspine_accepted_tokens_total"]) > 0
    assert float(values['dspine_accepted_at_total{position="1"}']) > 0
    assert float(values["dspine_time_to_first_token_seconds_count"]) > 0 and math.isfinite(float(values["dspine_running"]))


def test_prefix_is_reused_and_told(client):
    messages = [{"role": "user", "content": "a question with enough tokens to be kept"}]
    cold = ask(client, messages)
    warm = ask(client, messages)
    assert warm.choices[0].message.content == cold.choices[0].message.content
    assert cold.usage.prompt_tokens_details.cached_tokens < warm.usage.prompt_tokens_details.cached_tokens
    assert warm.usage.prompt_tokens_details.cached_tokens == (warm.usage.prompt_tokens - 1) // 8 * 8  # whole grains
    assert warm.usage.model_extra["speculative"] == cold.usage.model_extra["speculative"]  # the drafter's part is there too


def test_unknown_model_is_404(client):
    with pytest.raises(openai.NotFoundError) as error:
        ask(client, model="gpt-5")
    assert error.value.body["param"] == "model" and error.value.body["code"] == "model_not_found"
