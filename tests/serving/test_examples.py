"""The examples of README.md and docs/serving.md, as they stand there, against a running server: curl and OpenAI's client."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serving.toys import Point, ToyRuntime, running, toy_engine, toy_settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/serving.md")}
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A toy that is served as `smollm2`."""
    from dspine.common import runtimes
    from dspine.common.serving.server import Server

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtimes, "_registered", lambda: {"toy": Point(ToyRuntime())})
        engine = toy_engine(tmp_path_factory.mktemp("model"))
        with running(Server(lambda: engine, toy_settings(names=("smollm2",)))) as found:
            yield found


def test_the_client_example(url):
    pytest.importorskip("openai", reason="the openai client is not installed")
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGES["docs/serving.md"], re.S) if "OpenAI" in block)
    assert URL in code
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code.replace(URL, url), "docs/serving.md", "exec"), {})  # noqa: S102
    text, block = printed.getvalue().rstrip("\n").rsplit("\n", 1)
    assert text and "'accepted'" in block and "'rounds'" in block


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("page", PAGES)
def test_the_curl_example(url, page):
    found = re.search(r"^ *(curl .*\\\n.*)$", PAGES[page], re.M)
    assert found is not None and URL in found[1]
    arguments = shlex.split(found[1].replace("\\\n", " ").replace(URL, url))
    result = subprocess.run([*arguments, "--silent", "--show-error"], capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(result.stdout)
    assert answer["choices"][0]["message"]["content"] and answer["usage"]["speculative"]["rounds"] > 0
