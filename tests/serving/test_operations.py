"""Keys, logs, limits of settings, start-up and the end of a process; the `dspine serve` command."""

from __future__ import annotations

import json
import logging
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from dspine.common.cli import serve as command
from dspine.common.errors import BackendError, CheckpointError, DSpineError
from dspine.common.serving.http import JsonLines
from dspine.common.serving.server import Server
from tests.packaging.tree import ROOT
from tests.serving.toys import TEMPLATE, running, toy_engine, toy_settings

BODY = {"model": "toy", "messages": [{"role": "user", "content": "a secret question"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture
def start(registry, tmp_path):
    """Servers with other settings; (url, server) inside a with."""

    def build(template=TEMPLATE, **settings):
        engine = toy_engine(tmp_path / "model", template=template)
        server = Server(lambda: engine, toy_settings(**settings))
        return running(server), server

    return build


def test_api_key(start):
    context, _ = start(api_key="s3cret-key")
    with context as url:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "s3cret-key"},
            {"Authorization": "Basic s3cret-key"},
        ):
            for path in ("/v1/models", "/metrics", "/v1/nothing", "/openapi.json"):
                answer = httpx.get(url + path, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
            assert httpx.post(f"{url}/v1/chat/completions", json=BODY, headers=headers).status_code == 401
        right = {"Authorization": "Bearer s3cret-key"}
        assert httpx.post(f"{url}/v1/chat/completions", json=BODY, headers=right).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200 and httpx.get(f"{url}/").status_code == 200
        assert "s3cret" not in httpx.get(f"{url}/").text


def test_log_lines_are_json_without_texts_or_keys(start, caplog):
    caplog.set_level(logging.INFO, logger="dspine.server")
    context, _ = start(api_key="s3cret-key")
    with context as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=BODY, headers={"Authorization": "Bearer s3cret-key"})
        httpx.post(f"{url}/v1/chat/completions", json=BODY)
    lines = [JsonLines().format(record) for record in caplog.records]
    found = [json.loads(line) for line in lines if json.loads(line)["event"] == "request"]
    assert found[0]["status"] == 200 and found[0]["completion_tokens"] == 8 and found[0]["drafted"] > 0
    assert found[0]["id"] == answer.headers["x-request-id"] and found[0]["first_token_seconds"] >= 0
    assert found[1]["status"] == 401
    assert not any(word in line for line in lines for word in ("secret question", "s3cret"))
    broken = logging.makeLogRecord({"msg": "failed", "levelname": "ERROR", "exc_info": (ValueError, ValueError("x"), None)})
    assert "ValueError" in json.loads(JsonLines().format(broken))["exception"]


@pytest.mark.parametrize("head", ["Content-Length: 500", "Transfer-Encoding: chunked"])
def test_a_body_that_never_comes_is_408(start, head):
    """A client that sends slowly, or nothing more, does not keep its connection for ever."""
    context, server = start(send_timeout=0.3)
    with context as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", head, "", ""]
            connection.sendall("\r\n".join(lines).encode())
            answer = b""
            while part := connection.recv(4096):  # until the server closes
                answer += part
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in answer
        assert httpx.post(f"{url}/v1/chat/completions", json=BODY).status_code == 200
        assert server.scheduler.occupancy == (0, 0)


def test_context_limit_of_the_server(start):
    context, server = start(max_context=64)
    with context as url:
        long = BODY | {"messages": [{"role": "user", "content": "y" * 80}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=long).json()
        assert answer["error"]["code"] == "context_length_exceeded"
        assert httpx.post(f"{url}/v1/chat/completions", json=BODY | {"max_tokens": 65}).json()["error"]["param"] == "max_tokens"
        full = httpx.post(f"{url}/v1/chat/completions", json=BODY | {"max_tokens": 64}).json()
        assert full["usage"]["total_tokens"] == 64 and full["choices"][0]["finish_reason"] == "length"
        summary = server.summary()
        assert summary["cache_bytes_at_most"] == 16 * 64 * 8 + summary["prefix_cache_bytes"]  # case M3: the server's own length


def test_models_without_tools_or_template(start):
    context, _ = start(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with context as url:
        tools = [{"type": "function", "function": {"name": "f"}}]
        answer = httpx.post(f"{url}/v1/chat/completions", json=BODY | {"tools": tools}).json()
        assert answer["error"]["param"] == "tools" and answer["error"]["code"] == "unsupported_parameter"
        text = httpx.post(f"{url}/v1/chat/completions", json=BODY).json()["choices"][0]["message"]
        assert text["content"] and "reasoning_content" not in text
    context, _ = start(template="{{ raise_exception('only one message') }}")
    with context as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=BODY).json()
        assert answer["error"]["param"] == "messages" and "only one message" in answer["error"]["message"]
    context, _ = start(template="")
    with context as url:
        assert "no chat template" in httpx.post(f"{url}/v1/chat/completions", json=BODY).json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json={"model": "toy", "prompt": "abc", "max_tokens": 4}).status_code == 200


def test_full_queue_over_http(start):
    context, server = start(max_concurrency=1, max_queue=0)
    with context as url:
        server.service.engine.target.slow = 0.02
        answers = []
        body = BODY | {"max_tokens": 60}
        threads = [
            threading.Thread(target=lambda: answers.append(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted({answer.status_code for answer in answers}) == [200, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1 and refused.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_process_finishes_what_runs_and_ends_in_good_order(tmp_path, number):
    arguments = [sys.executable, "-m", "tests.serving.toy_main", str(tmp_path / "model"), "0.01"]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), process.stderr.read()
    body = BODY | {"max_tokens": 120, "stream": True}
    text = ""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        for i, line in enumerate(answer.iter_lines()):
            text = line or text
            if i == 4:
                process.send_signal(number)
    assert text == "data: [DONE]"
    assert process.wait(30) == 0
    events = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert [event["event"] for event in events if event["event"] in ("started", "stopped")] == ["started", "stopped"]
    assert events[0]["batching"] is True and events[0]["models"] == ["toy"] and events[-1]["finished_everything"] is True
    process.stdout.close()
    process.stderr.close()


def test_start_up_failure_is_the_commands_error(registry, monkeypatch):
    """Case V5: a drafter that does not load ends the start, whatever would still work."""

    def broken(*args, **options):
        raise CheckpointError("the drafter misses tensors")

    monkeypatch.setattr("dspine.common.serving.server.set_up_logging", lambda: None)  # it is this process's
    monkeypatch.setattr(command, "load", broken)
    monkeypatch.setattr(command, "choose_runtime", lambda name: (registry, "asked for"))
    with pytest.raises(CheckpointError, match="misses tensors"):
        command.serve(command.ServeOptions(port=0))


def test_command_settings(tmp_path):
    options = command.ServeOptions(model="folder", served_name="name", prefix_cache=3, no_batch=True, max_queue=7)
    settings = command.build_settings(options)
    assert settings.names == ("name",) and settings.scheduler.prefix_bytes == 3 * 2**20 and not settings.scheduler.batch
    assert settings.host == "127.0.0.1" and settings.api_key is None
    (tmp_path / "key").write_text("abc\n")
    assert command.build_settings(command.ServeOptions(api_key_file=str(tmp_path / "key"))).api_key == "abc"
    for changes, message in (
        ({"api_key": "a", "api_key_file": "b"}, "exclude each other"),
        ({"api_key_file": "/does/not/exist"}, "cannot be read"),
        ({"api_key": " "}, "--api-key"),
        ({"max_concurrency": 0}, "--max-concurrency"),
        ({"port": 70000}, "--port"),
        ({"max_context": 1}, "--max-context"),
        ({"grace": -1.0}, "--grace"),
    ):
        with pytest.raises(DSpineError, match=message):
            command.build_settings(command.ServeOptions(**changes))


def test_without_the_packages_the_command_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dspine.common.serving.server", None)
    with pytest.raises(BackendError, match=r"pip install 'dspine\[server\]'"):
        command.serve(command.ServeOptions())
