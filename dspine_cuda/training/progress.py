"""Progress on standard error: a bar where someone watches, plain lines elsewhere, nothing where it is switched off."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINES = 20  # plain lines over a whole run, about

Advance = Callable[[int, str], None]


@contextmanager
def progress_bar(total: int, show: bool, name: str = "step", every_call: bool = True) -> Iterator[Advance]:
    """Yields advance(done, text). every_call: print a plain line at each call; else about LINES in all."""
    if not show:
        yield lambda done, text: None
        return
    if not sys.stderr.isatty():
        last = [-1]

        def line(done: int, text: str) -> None:
            part = done * LINES // max(total, 1)
            if every_call or part > last[0]:
                last[0] = part
                sys.stderr.write(f"{name} {done}/{total}  {text}\n")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)
