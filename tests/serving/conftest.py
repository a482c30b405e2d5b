"""A toy server over real sockets, shared by the tests of one module; skipped with a reason without the server's packages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed (dspine[server])")
pytest.importorskip("uvicorn", reason="uvicorn is not installed (dspine[server])")
pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (dspine[server])")

from dspine.common import runtimes
from dspine.common.serving.server import Server
from tests.serving.toys import Point, ToyRuntime, running, toy_engine, toy_settings


@pytest.fixture(scope="module")
def registry():
    """The only runtime is `toy`."""
    patch = pytest.MonkeyPatch()
    runtime = ToyRuntime()
    patch.setattr(runtimes, "_registered", lambda: {"toy": Point(runtime)})
    yield runtime
    patch.undo()


@pytest.fixture(scope="module")
def toy(registry, tmp_path_factory):
    """url, engine and server of one toy server."""
    engine = toy_engine(tmp_path_factory.mktemp("model"))
    server = Server(lambda: engine, toy_settings())
    with running(server) as url:
        yield SimpleNamespace(url=url, engine=engine, server=server, target=engine.target, runtime=registry)


@pytest.fixture(scope="module")
def client(toy):
    """The official client."""
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    with openai.OpenAI(base_url=f"{toy.url}/v1", api_key="unused", max_retries=0, timeout=30) as client:
        yield client
