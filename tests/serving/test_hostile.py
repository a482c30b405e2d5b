"""Bad input: a 4xx in OpenAI's shape that names the field, before any device work, and nothing else disturbed."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

GOOD = {"model": "toy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
IMAGE = [{"type": "text", "text": "what is this"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

CASES = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": "8"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": 4}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e999}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"seed": 2**70}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"stop": ["x"] * 1000}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": "y" * 100_000}, "stop"),
    ({"stop": 3}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
    ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[1]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": "long " * 2000}]}, "messages"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}}, "response_format"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"functions": []}, "functions"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"store": True}, "store"),
    ({"colour": "red"}, "colour"),
    ({"speculative_events": True}, "speculative_events"),
]


def post(toy, body, path="/v1/chat/completions", **options):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | options.pop("headers", {})
    return httpx.post(toy.url + path, content=content, headers=headers, timeout=30, **options)


def check_error(response, status, param=None):
    error = response.json()["error"]
    assert response.status_code == status, response.text
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == param, error
    assert "Traceback" not in response.text and "/work" not in response.text and "site-packages" not in response.text
    assert len(response.text) < 1000
    return error


@pytest.mark.parametrize(("change", "param"), CASES, ids=lambda value: str(value)[:40])
def test_field_is_named_before_device_work(toy, change, param):
    before = toy.target.forwards
    check_error(post(toy, GOOD | change), 400, param)
    assert toy.target.forwards == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_token": 5}, "unknown parameter 'max_token': did you mean 'max_tokens'?"),
        ({"temprature": 0.1}, "unknown parameter 'temprature': did you mean 'temperature'?"),
        ({"colour": "red"}, "unknown parameter 'colour'"),
        ({"temperature": "0.2"}, "invalid 'temperature': expected a number, got a string"),
        ({"stream": 1}, "invalid 'stream': expected true or false, got 1"),
        ({"stop": {}}, "invalid 'stop': expected a string or an array, got an object"),
        ({"n": 1.5}, "invalid 'n': expected an integer, got 1.5"),
        ({"n": 0}, "invalid 'n': expected a value greater than or equal to 1, got 0"),
        ({"temperature": 1e999}, "invalid 'temperature': expected a finite number, got a number beyond all limits"),
        ({"draft": "secret"}, "invalid 'draft': expected true or false or 'full', got another string"),
        ({"response_format": "json"}, "invalid 'response_format': expected an object, got a string"),
        ({"messages": None}, "invalid 'messages': expected an array, got null"),
    ],
    ids=str,
)
def test_messages_say_expected_and_got(toy, change, message):
    assert check_error(post(toy, GOOD | change), 400, next(iter(change)))["message"] == message


def test_a_misspelt_name_explains_a_missing_one(toy):
    body = {"model": "toy", "mesages": GOOD["messages"]}
    error = check_error(post(toy, body), 400, "mesages")
    assert error["message"] == "unknown parameter 'mesages': did you mean 'messages'?"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [999999]}, "prompt"),
        ({"prompt": ["a", "b" * 5000]}, "prompt[1]"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": "z"}, "suffix"),
        ({"prompt": "a", "logprobs": 6}, "logprobs"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({}, "prompt"),
    ],
    ids=str,
)
def test_completions_name_the_field(toy, body, param):
    check_error(post(toy, {"model": "toy", "max_tokens": 4} | body, "/v1/completions"), 400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b'{"model": "\xc3\x28"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{} {}",
        b"NaN",
    ],
    ids=lambda body: repr(body[:12]),
)
def test_bodies_that_are_no_request(toy, body):
    check_error(post(toy, body), 400)


def test_lone_surrogates(toy):
    body = json.dumps(GOOD).replace("hello", "\\ud800")
    assert post(toy, body.encode()).status_code == 400


def test_neutral_values_pass(toy):
    neutral = {"functions": None, "service_tier": "auto", "store": False, "modalities": ["text"], "user": "me", "metadata": {}}
    assert post(toy, GOOD | neutral | {"n": None, "stop": None, "tools": None, "logit_bias": None}).status_code == 200


def test_bodies_too_long(toy):
    check_error(post(toy, b'{"model": "' + b"x" * 10_000_000 + b'"}'), 413)

    def endless():
        for _ in range(2000):
            yield b" " * 8192

    try:
        response = httpx.post(f"{toy.url}/v1/completions", content=endless(), headers={"content-type": "application/json"})
        assert response.status_code == 413
    except httpx.WriteError:
        pass  # the server answered and closed while this was still writing
    assert post(toy, GOOD).status_code == 200


def test_paths_methods_and_content_types(toy):
    everything = "there are /v1/chat/completions, /v1/completions, /v1/models"
    assert everything in check_error(httpx.get(f"{toy.url}/v1/nothing"), 404)["message"]
    for wrong, meant in (
        ("/chat/completions", "/v1/chat/completions"),  # a base URL without /v1, and with it twice
        ("/v1/v1/completions", "/v1/completions"),
        ("/models/", "/v1/models"),
    ):
        error = check_error(post(toy, GOOD, wrong), 404)
        assert error["message"] == f"no such path '{wrong}': did you mean {meant}?" and error["code"] == "not_found"
    assert "takes POST" in check_error(httpx.get(f"{toy.url}/v1/chat/completions"), 405)["message"]
    assert httpx.head(f"{toy.url}/health").status_code == 200  # what monitors ask
    check_error(post(toy, GOOD, headers={"content-type": "text/plain"}), 415)
    check_error(httpx.get(f"{toy.url}/v1/models/other"), 404, "model")
    check_error(post(toy, GOOD | {"model": "x" * 5000}), 404, "model")


def test_failure_on_the_device_is_no_200(toy):
    """Case V5: the client hears that it failed, not why; the next request is fine."""
    toy.target.break_on = "explode"
    for stream in (False, True):
        error = check_error(post(toy, GOOD | {"messages": [{"role": "user", "content": "explode"}], "stream": stream}), 500)
        assert "secret" not in error["message"]
    toy.target.break_on = None
    assert post(toy, GOOD).status_code == 200
    assert toy.server.scheduler.occupancy == (0, 0)


def raw_request(toy, body):
    host, _, port = toy.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    data = json.dumps(body).encode()
    head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return connection, "\r\n".join([*head, "", ""]).encode(), data


def settled(toy):
    """Wait until nothing runs; true if that came to be."""
    for _ in range(400):
        if toy.server.scheduler.occupancy == (0, 0):
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("stage", ["head", "half body", "sent", "first chunk"])
def test_disconnects(toy, stage):
    """Case V3 over sockets: the slot comes back and the next answer is right."""
    wanted = post(toy, GOOD).json()["choices"][0]["message"]["content"]
    connection, head, data = raw_request(toy, GOOD | {"stream": True, "max_tokens": 400})
    if stage == "head":
        connection.sendall(head)
    elif stage == "half body":
        connection.sendall(head + data[:20])
    else:
        connection.sendall(head + data)
        if stage == "first chunk":
            assert b"200 OK" in connection.recv(4096)
    time.sleep(0.05)
    connection.close()
    assert settled(toy)
    assert post(toy, GOOD).json()["choices"][0]["message"]["content"] == wanted


def test_slow_reader_does_not_hold_others_up(toy):
    connection, head, data = raw_request(toy, GOOD | {"stream": True, "max_tokens": 400, "speculative_events": True})
    connection.sendall(head + data)  # and never read
    started = time.perf_counter()
    assert post(toy, GOOD).status_code == 200
    assert time.perf_counter() - started < 20
    connection.close()
    assert settled(toy)
