"""`dspine train`, `eval` and `eval-draft`; also `python -m dspine_cuda.training.cli train ...` from a source tree."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dspine.common.errors import DSpineError


class _RunByDefault(TyperGroup):
    """`train CONFIG ...` is `train run CONFIG ...`: only the other subcommands must be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


INTERRUPTED = 130  # 128 + SIGINT, as shells count


@contextmanager
def _interruptible(how: str) -> Iterator[None]:
    """Ctrl-C is one line that says `how` to go on, and exit code 130."""
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo(f"\ninterrupted: {how}", err=True)  # begins below a progress bar
        raise typer.Exit(INTERRUPTED) from error


_PLAIN = {"add_completion": False, "no_args_is_help": True, "pretty_exceptions_enable": False}
app = typer.Typer(**_PLAIN, help="Train and measure drafters.")
train_app = typer.Typer(
    **_PLAIN,
    cls=_RunByDefault,
    help="Train a drafter: `train CONFIG \\[section.key=value ...]`. Make its data first: `train data FOLDER`.",
)
app.add_typer(train_app, name="train")


@train_app.command("run")
def train_command(
    config: Annotated[Path, typer.Argument(help="YAML file with sections model, data, loss, schedule, optimizer, run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, over the file.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint in run.output_dir.")] = False,
) -> None:
    """Train a drafter; the last line of output is one JSON object."""
    from dspine_cuda.training.config import load_train_config

    settings = load_train_config(config, overrides or [])
    with _interruptible(
        f"the same command with --resume goes on from the newest checkpoint in {settings.run.output_dir} (where there is none "
        f"yet, it begins again)"
    ):
        from dspine_cuda.training.loop import train

        result = train(settings, resume)
    typer.echo(json.dumps(result))


@train_app.command("data")
def data_command(
    output: Annotated[Path, typer.Argument(help="Folder for the shards; the same command again goes on where it stopped.")],
    model: Annotated[str, typer.Option("--model", help="Target: name, hub id or folder.")] = "smollm2",
    prompts: Annotated[
        list[Path] | None, typer.Option("--prompts", help="Prompt file (JSONL, JSON, text); repeatable.")
    ] = None,
    exclude: Annotated[
        list[Path] | None, typer.Option("--exclude", help="Evaluation prompts that must not be trained on; repeatable.")
    ] = None,
    self_prompts: Annotated[int, typer.Option("--self-prompts", help="Prompts that the target writes itself.")] = 0,
    prompt_temperature: Annotated[list[float] | None, typer.Option("--prompt-temperature", help="Default: 0.8, 1.0.")] = None,
    opened_share: Annotated[
        float, typer.Option("--opened-share", help="Share of those that begin with the first words of a prompt of --prompts.")
    ] = 0.0,
    greedy_share: Annotated[float, typer.Option("--greedy-share", help="Share of answers at temperature 0.")] = 0.6,
    temperature: Annotated[float, typer.Option("--temperature", help="Of the other answers.")] = 0.8,
    max_prompt_tokens: Annotated[int, typer.Option("--max-prompt-tokens", help="With the chat template.")] = 320,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Of an answer.")] = 448,
    shard_size: Annotated[int, typer.Option("--shard-size", help="Conversations a shard.")] = 4096,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Sequences at a time; default: what fits.")] = None,
    device: Annotated[str, typer.Option("--device")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")] = "bfloat16",
    progress: Annotated[bool, typer.Option("--progress/--no-progress")] = True,
) -> None:
    """Make training data for a target without a data set: its prompts, its answers; npz shards for `data.path`."""
    from dspine_cuda.training.recipe import Recipe, RecipeSettings

    settings = RecipeSettings(
        model=model,
        prompts=tuple(str(path) for path in prompts or ()),
        exclude=tuple(str(path) for path in exclude or ()),
        self_prompts=self_prompts,
        prompt_temperatures=tuple(prompt_temperature or RecipeSettings.prompt_temperatures),
        opened_share=opened_share,
        greedy_share=greedy_share,
        temperature=temperature,
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        shard_size=shard_size,
        seed=seed,
    )
    with _interruptible(f"the same command goes on; finished files in {output} are kept"):
        report = Recipe(settings, output, device=device, dtype=dtype, batch=batch, progress=progress).run()
    typer.echo(json.dumps(report))


@train_app.command("export-data")
def export_data_command(
    data: Annotated[Path, typer.Argument(help="npz shards, one npz file or a JSONL file.")],
    output: Annotated[Path, typer.Argument(help="JSONL file to write.")],
    model: Annotated[str, typer.Option("--model", help="Target: name, hub id or folder.")] = "smollm2",
    text: Annotated[bool, typer.Option("--text", help="Preformatted texts instead of input_ids and loss_mask.")] = False,
) -> None:
    """Write training data in SpecForge's form: pre-tokenised rows, or preformatted texts."""
    from dspine_cuda.training.data import export_specforge

    with _interruptible(f"{output} was not written; the same command begins again"):
        rows = export_specforge(data, output, model, text)
    typer.echo(json.dumps({"rows": rows, "file": str(output)}))


@app.command("eval-draft")
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

    with _interruptible("nothing was kept; the same command begins again"):
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


@app.command("eval")
def eval_sets_command(
    drafter: Annotated[str | None, typer.Argument(help="Drafter folder; default: the one shipped for the model.")] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option("--prompts", help="Folder with the seven sets, or a prompt file; repeatable.")
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Target: name, hub id or folder.")] = "smollm2",
    count: Annotated[int, typer.Option("--count", min=1, help="Prompts a set.")] = 64,
    temperature: Annotated[list[float] | None, typer.Option("--temperature", help="Repeatable; default: 0 and 1.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Of an answer.")] = 256,
    method: Annotated[str, typer.Option("--method", help="simulate (prompts at once) or generate (the loop).")] = "simulate",
    acceptance: Annotated[str, typer.Option("--acceptance", help="auto, rejection or point-mass (temperature > 0).")] = "auto",
    texts: Annotated[Path | None, typer.Option("--texts", help="Folder that keeps the target's answers.")] = None,
    output: Annotated[Path | None, typer.Option("--json", help="Write the result there, too.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    batch: Annotated[int | None, typer.Option("--batch", min=1)] = None,
    device: Annotated[str, typer.Option("--device")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")] = "bfloat16",
    progress: Annotated[bool, typer.Option("--progress/--no-progress")] = True,
) -> None:
    """Mean acceptance length over sets of prompts with 95 % bootstrap intervals: a table on stderr, JSON on stdout."""
    from dspine.common.files import check_place, write_json
    from dspine_cuda.training.eval_command import EvalSettings, evaluate
    from dspine_cuda.training.eval_sets import table_text

    settings = EvalSettings(
        drafter=drafter,
        prompts=tuple(prompts or ()),
        model=model,
        count=count,
        temperatures=tuple(temperature or (0.0, 1.0)),
        max_tokens=max_tokens,
        method=method,
        acceptance=acceptance,
        seed=seed,
        device=device,
        dtype=dtype,
        batch=batch,
        texts=texts,
        progress=progress,
    )
    settings.check()
    if output is not None:
        check_place("--json", output)
    kept = "a --texts folder would keep finished answers" if texts is None else f"finished answers in {texts} are kept"
    with _interruptible(f"the same command begins again ({kept})"):
        result = evaluate(settings)
    typer.echo(table_text(result), err=True)
    try:
        if output is not None:
            write_json(output, result)
    finally:  # a disk that has filled up meanwhile costs the file, not the result
        typer.echo(json.dumps(result))


def main(arguments: list[str] | None = None) -> int:
    """Run; bad input and a misspelt option are a message on stderr and exit code 2, never a traceback."""
    try:
        app(arguments)
    except DSpineError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
