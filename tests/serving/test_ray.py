"""Two replicas under Ray Serve on one machine: the same answers, streams, errors, and sessions that keep their replica."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.packaging.tree import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason='ray is not installed: pip install "ray[serve]"'),
]


def test_two_replicas(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "tests.serving.ray_main", str(tmp_path / "model")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))  # Ray writes there too
    assert all(len(set(texts)) == 1 and len(texts[0]) == 12 for texts in found["texts"])
    assert "".join(found["stream"]) == found["whole"] and len(found["stream"]) > 1
    assert found["status"] == [400, 200] and found["replicas"] >= 2
    for cached in found["cached"]:  # from its second request on a session finds its prefix: it kept its replica
        assert cached[0] == 0 and all(count > 0 for count in cached[1:]), found["cached"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"replica": "2"}, "unknown argument replica: there are model, "),
        ({"replicas": "2", "max_replicas": "3"}, "give one kind"),
    ],
)
def test_arguments_are_not_ignored(args, message):
    """`serve run app:build replica=2`: a misspelt name is told. In a process of its own: importing Ray warns."""
    code = f"from examples.ray_serve.app import build; build({args!r})"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1 and "DSpineError: " in last and message in last, run.stderr[-2000:]
