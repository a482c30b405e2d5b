"""`dspine train` and `dspine eval-draft`; also `python -m dspine_cuda.training.cli train ...` from a source tree."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from dspine.common.errors import DSpineError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train and measure drafters.")


@app.command("train")
def train_command(
    config: Annotated[Path, typer.Argument(help="YAML file with sections model, data, loss, schedule, optimizer, run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, over the file.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in run.output_dir.")] = False,
) -> None:
    """Train a DSpine or DFlash drafter; the last line of output is one JSON object."""
    from dspine_cuda.training.config import load_train_config

    settings = load_train_config(config, overrides or [])
    from dspine_cuda.training.loop import train

    typer.echo(json.dumps(train(settings, resume)))


@app.command("eval")
def eval_command(
    drafter: Annotated[Path, typer.Argument(help="Drafter folder.")],
    data: Annotated[Path, typer.Option("--data", help="npz shards, one npz file or conversations JSONL.")],
    model: Annotated[str, typer.Option("--model", help="Target: name, hub id or folder.")] = "smollm2",
    holdout: Annotated[int, typer.Option("--holdout", min=1, help="The last conversations of the data.")] = 500,
    conversations: Annotated[int, typer.Option("--conversations", min=1)] = 256,
    stride: Annotated[int, typer.Option("--stride", min=1, help="An anchor every so many positions.")] = 24,
    exact: Annotated[bool, typer.Option("--exact", help="Every position, then rounds as generation takes them.")] = False,
    independent: Annotated[bool, typer.Option("--independent", help="The backbone's argmax instead of the walk.")] = False,
    device: Annotated[str, typer.Option("--device")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """Greedy acceptance of a drafter on held-out greedy answers, by the inference code; prints one JSON line."""
    from dspine_cuda.training.evaluate import evaluate_folder

    result = evaluate_folder(
        drafter,
        data,
        model,
        holdout=holdout,
        count=conversations,
        stride=stride,
        exact=exact,
        independent=independent,
        device=device,
        dtype=dtype,
    )
    typer.echo(json.dumps(result))


def main(arguments: list[str] | None = None) -> int:
    """Run; bad input is one line on stderr and exit code 2."""
    try:
        app(arguments, standalone_mode=False)
    except DSpineError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except typer.Exit as leaving:
        return leaving.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
