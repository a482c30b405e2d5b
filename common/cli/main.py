"""The `dspine` command: parsing, lazily loaded commands of other packages, and errors as one line with exit code 2.

Nothing here imports an array framework: `--help` must be quick and must work without a GPU.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer

from dspine.common.cli import bench as bench_command
from dspine.common.cli import cache_prompt as cache_prompt_command
from dspine.common.cli import calibrate as calibrate_command
from dspine.common.cli import chat as chat_command
from dspine.common.cli import convert as convert_command
from dspine.common.cli import doctor as doctor_command
from dspine.common.cli import generate as generate_command
from dspine.common.cli import info as info_command
from dspine.common.cli import parity as parity_command
from dspine.common.cli import serve as serve_command
from dspine.common.cli.options import GenerateOptions, command_from
from dspine.common.embedded import EMBEDDED_NAME
from dspine.common.errors import BackendError, DSpineError

COMMAND_GROUP = "dspine.commands"
BAD_INPUT = 2

# help lines of commands that live in packages which must not be imported for --help
_SUMMARIES = {
    "train": "Train a drafter, or make the data for it: `train data` (needs torch).",
    "eval": "Measure a drafter's acceptance over sets of prompts (needs torch).",
    "eval-draft": "Measure a drafter's acceptance on held-out text (needs torch).",
}
# what a command's package needs, and the extra that brings it
_FRAMEWORKS = {
    "torch": "train",
    "mlx": "mlx",
    "triton": "cuda",
    "sklearn": "calibrate",
    "matplotlib": "calibrate",
    "fastapi": "server",
}


def build_app() -> typer.Typer:
    """The typer application with its own commands and those of the entry-point group `dspine.commands`."""
    app = typer.Typer(
        name="dspine",
        help="Speculative decoding with DSpine drafters, on MLX and on torch.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    app.callback()(_root)
    app.command("generate")(command_from(GenerateOptions, generate_command.generate))
    app.command("calibrate")(command_from(calibrate_command.CalibrateOptions, calibrate_command.calibrate_command))
    app.command("bench")(command_from(bench_command.BenchOptions, bench_command.bench_command))
    app.command("chat")(command_from(chat_command.ChatOptions, chat_command.chat))
    app.command("cache-prompt")(command_from(cache_prompt_command.CachePromptOptions, cache_prompt_command.cache_prompt))
    app.command("prepare")(_prepare)
    app.command("convert")(convert_command.convert)
    app.command("info")(info_command.info)
    app.command("doctor")(doctor_command.doctor)
    app.command("parity")(parity_command.parity)
    app.command("serve")(command_from(serve_command.ServeOptions, serve_command.serve))
    for point in sorted(entry_points(group=COMMAND_GROUP), key=lambda point: point.name):
        _add_lazy(app, point)
    return app


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"dspine {info_command.installed_version('dspine')}\n")
        raise typer.Exit


def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


def _prepare(
    model: Annotated[str, typer.Argument(help="`smollm2` (the embedded model), a folder, or a hub id.")] = EMBEDDED_NAME,
) -> None:
    info_command.prepare(model)


_prepare.__doc__ = info_command.prepare.__doc__


def _add_lazy(app: typer.Typer, point: EntryPoint) -> None:
    """A stand-in that hands its arguments, `--help` included, to the real command, loaded only then."""
    settings: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

    @app.command(point.name, help=_SUMMARIES.get(point.name, f"From {point.module}."), context_settings=settings)
    def forward(context: typer.Context) -> None:
        try:
            command = typer.main.get_command(_as_app(point.load()))
            command(args=list(context.args), prog_name=f"dspine {point.name}")
        except ModuleNotFoundError as error:
            raise _absent_framework(point.name, error) from error


def _as_app(target: Any) -> typer.Typer:
    if isinstance(target, typer.Typer):
        return target
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(target)
    return app


def _absent_framework(command: str, error: ModuleNotFoundError) -> Exception:
    """A framework that is not installed is a BackendError; any other failed import is a bug and is shown as it is."""
    package = (error.name or "").partition(".")[0]
    if package not in _FRAMEWORKS:
        return error
    install = f"python -m pip install 'dspine[{_FRAMEWORKS[package]}]'"
    return BackendError(f"`dspine {command}` needs {package}, which is not installed: {install}")


def main() -> None:
    """Entry point of the console script."""
    try:
        build_app()()
    except DSpineError as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"error: {line}\n")
        sys.exit(BAD_INPUT)
    except BrokenPipeError:  # the reader went away (`dspine ... | head`): no traceback, and none at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
