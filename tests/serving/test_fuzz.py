"""The schema fuzzed with schemathesis: no body makes the server fail, every error has OpenAI's shape, and it goes on."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from dspine.common.serving.server import Server
from tests.serving.toys import running, toy_engine, toy_settings

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (dspine[fuzz])")

GOOD = {"model": "toy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
QUICK = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def small(registry, tmp_path_factory):
    """A server whose answers are short whatever is asked for."""
    engine = toy_engine(tmp_path_factory.mktemp("model"))
    server = Server(lambda: engine, toy_settings(max_context=48, default_max_tokens=4))
    with running(server) as url:
        yield url


def operations(url):
    schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json").json())
    return [result.ok() for result in schema.get_all_operations()]


def check(response, allowed):
    assert response.status_code in allowed, response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_bodies(small, path, mode):
    operation = next(found for found in operations(small) if found.path == path)
    strategy = operation.as_strategy(generation_mode=getattr(schemathesis.GenerationMode, mode))
    wanted = httpx.post(f"{small}/v1/chat/completions", json=GOOD).json()["choices"]
    statuses = set()

    with httpx.Client(timeout=60) as client:

        @QUICK
        @given(strategy)
        def run(case):
            body = case.body
            if isinstance(body, dict) and mode == "POSITIVE":
                body = body | {"model": "toy"}  # past the first check
            try:
                content = json.dumps(body, default=str).encode()
            except (TypeError, ValueError):
                content = b"{"
            response = client.post(small + path, content=content, headers={"content-type": "application/json"})
            check(response, (200, 400, 404))
            statuses.add(response.status_code)

        run()
    assert 400 in statuses
    assert httpx.post(f"{small}/v1/chat/completions", json=GOOD).json()["choices"] == wanted


def test_schema_is_served_and_names_every_route(small):
    found = {(operation.method.upper(), operation.path) for operation in operations(small)}
    assert {("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/health")} <= found
