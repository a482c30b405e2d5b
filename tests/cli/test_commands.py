"""`dspine` itself: version, info, prepare, and commands that other packages bring."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from dspine.common.cli import main as cli
from dspine.common.errors import DSpineError
from tests.cli.conftest import Point


def test_version_and_bare_call(dspine):
    run = dspine("--version")
    assert run.code == 0 and run.out.startswith("dspine ") and run.out.count("\n") == 1
    bare = dspine()
    assert "generate" in bare.out + bare.err and "Traceback" not in bare.err


def test_info_names_runtimes_and_the_reason(toy, dspine):
    run = dspine("info")
    flat = " ".join(run.out.split())
    assert run.code == 0 and "toys run everywhere" in flat and "gone_framework" in flat
    assert "auto toy (auto: the first that can run here" in flat and "DSPINE_KERNELS" in flat


def test_info_shows_a_bad_environment_as_one_line(dspine, monkeypatch):
    monkeypatch.setenv("DSPINE_KERNELS", "fast")
    run = dspine("info")
    assert run.code == 2 and run.err == "error: DSPINE_KERNELS must be one of auto, reference, got 'fast'\n"


def test_prepare_prints_the_folder(toy, dspine):
    run = dspine("prepare", toy / "model")
    assert run.code == 0 and run.out == f"{toy / 'model'}\n"
    assert dspine("prepare", "nothing").code == 2


@pytest.fixture
def command(monkeypatch):
    """Make one lazily loaded command known as `extra`."""

    def register(loaded: object) -> None:
        monkeypatch.setattr(cli, "entry_points", lambda group: [Point("extra", loaded)])

    return register


def test_a_lazy_command_gets_its_arguments(command, dspine):
    seen = []

    def extra(name: str, times: int = 1) -> None:
        """Repeat a name."""
        seen.append(name * times)

    command(extra)
    assert dspine("extra", "ab", "--times", "2").code == 0 and seen == ["abab"]
    shown = dspine("extra", "--help")
    assert shown.code == 0 and "Repeat a name." in shown.out and "dspine extra" in shown.out
    wrong = dspine("extra", "ab", "--time", "2")
    assert wrong.code == 2 and "Traceback" not in wrong.err and seen == ["abab"]


def test_a_lazy_application_has_subcommands(command, dspine):
    app = typer.Typer()
    app.command("one")(lambda: typer.echo("first"))
    app.command("two")(lambda: typer.echo("second"))
    command(app)
    assert dspine("extra", "two").out == "second\n"


def test_help_does_not_load_lazy_commands(command, dspine):
    command(RuntimeError("loaded"))
    run = dspine("--help")
    assert run.code == 0 and "extra" in run.out


def test_errors_of_lazy_commands(command, dspine):
    def fail() -> None:
        raise DSpineError("unknown key\n'epochz'")

    command(fail)
    run = dspine("extra")
    assert run.code == 2 and run.err == "error: unknown key 'epochz'\n"
    command(ModuleNotFoundError("No module named 'torch'", name="torch"))
    run = dspine("extra")
    assert run.code == 2 and run.err.startswith(
        "error: `dspine extra` needs torch, which is not installed: python -m pip install"
    )
    command(ModuleNotFoundError("No module named 'typo'", name="typo"))
    with pytest.raises(ModuleNotFoundError):  # a bug of ours is not dressed up as bad input
        dspine("extra")


def test_console_script_in_a_process():
    """The real thing: exit code, one line, no traceback; bytes that are not UTF-8 come through argv."""
    start = [sys.executable, "-m", "dspine.common.cli.main", "generate", "--prompt"]
    run = subprocess.run([*start, "x", "--top-p", "2"], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "error: top_p must be above 0, at most 1 (1 is off), got 2.0\n"
    run = subprocess.run([*start, b"ab\xff"], capture_output=True, timeout=60)
    assert run.returncode == 2 and run.stderr.startswith(b"error: prompt is not valid UTF-8") and run.stderr.count(b"\n") == 1
