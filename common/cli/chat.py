"""`dspine chat`: a conversation in the terminal, on either backend.

Ctrl-C stops the answer between two rounds, so that the caches stay whole and the next message goes on from there; on an
empty line it says how to leave. Text goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import MISSING, dataclass, field, fields, make_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dspine.common.cli.generate import (
    Request,
    build_engine,
    build_request,
    memory_line,
    peak_memory_bytes,
    peak_on_device,
    with_policy,
)
from dspine.common.cli.options import GenerateOptions, flag
from dspine.common.errors import DSpineError
from dspine.common.generation import GenerationStep, stream_generate
from dspine.common.prompt_files import CachedPrompt, read_prompt_cache
from dspine.common.protocols import Engine
from dspine.common.sessions import Session, Transcript, open_session
from dspine.common.statistics import Statistics
from dspine.common.tokenizer import check_prompt, decode_utf8

Mark = StrEnum("Mark", [(name, name) for name in ("off", "dim", "colour")])
_CODES = {"dim": "\x1b[2m", "colour": "\x1b[36m"}
_RESET = "\x1b[0m"
_NOT_FOR_CHAT = ("prompt", "raw", "compare", "json")
_HELP = """/reset   forget the conversation
/stats   what was generated so far, and how
/help    this list
/exit    leave (Ctrl-D does, too)
Ctrl-C stops an answer. A message may start with a space where it begins with a slash."""


def _chat_options() -> type:
    """The flags of `dspine generate` that make sense in a conversation, and what a chat adds."""
    hints = get_type_hints(GenerateOptions, include_extras=True)
    shared = [
        (item.name, hints[item.name], field(default=item.default))
        for item in fields(GenerateOptions)
        if item.name not in _NOT_FOR_CHAT and item.default is not MISSING
    ]
    mark = Annotated[Mark, flag("How to show tokens that the drafter proposed: off, dim or colour.", "Output")]
    return make_dataclass("ChatOptions", [*shared, ("mark", mark, field(default=Mark.off))], frozen=True)


ChatOptions = _chat_options()


@dataclass
class Totals:
    """Sums over all answers."""

    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    rounds: int = 0
    in_rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, stats: Statistics) -> None:
        """One answer, stopped or not."""
        self.answers += 1
        self.prompt_tokens += stats.prompt_tokens
        self.cached_tokens += getattr(stats, "cached_tokens", 0)
        self.tokens += stats.generated_tokens
        self.rounds += stats.rounds
        self.in_rounds += max(stats.generated_tokens - 1, 0)
        self.drafted += stats.drafted_tokens
        self.accepted += stats.accepted_tokens
        self.seconds += stats.decode_seconds
        self.prefill_seconds += stats.prefill_seconds
        if stats.drafting_disabled:
            self.notes.append(f"answer {self.answers} went on without drafts: {stats.drafting_disabled}")


class PromptStopped(Exception):
    """Ctrl-C while a prompt was being read, between two of its pieces."""


class Chat:
    """History and totals of one conversation. `write` takes pieces of the answer."""

    def __init__(
        self,
        engine: Engine,
        request: Request,
        *,
        mark: str = "off",
        write: Callable[[str], Any] | None = None,
        cached: CachedPrompt | None = None,
    ) -> None:
        if not engine.tokenizer.has_chat_template:
            raise DSpineError(f"{engine.model} has no chat template: dspine chat needs one; try dspine generate --raw")
        self.engine, self.mark = engine, mark
        self.write = write or sys.stdout.write
        self.options = {**request.options, "raw": False, "system_prompt": None}
        self.totals = Totals()
        self.cached = cached
        self._system = request.options.get("system_prompt") if cached is None else cached.system_prompt
        self.session = Session(None)
        self.reset()

    def reset(self) -> None:
        """Forget the conversation; the totals stay. A prompt cache is used up by the first conversation: its text stays."""
        fresh = self.cached is not None and self.totals.answers == 0
        self.session = self.cached.session if fresh else open_session(self.engine)  # type: ignore[union-attr]
        self.transcript = self.cached.transcript(self.engine) if fresh else Transcript(self.engine.tokenizer)  # type: ignore[union-attr]
        self._opening = self.cached.prompt if self.cached is not None else ""
        self.messages: list[dict[str, str]] = []
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})

    def answer(self, text: str, stop: Callable[[], bool] = lambda: False) -> str:
        """Send one message, write the answer as it comes, and keep both. `stop` is asked after every round.

        A message that the model cannot take (too long, not text) is not kept: DSpineError, and the chat goes on. Nor is one
        that was stopped before all of the prompt was read: PromptStopped.
        """
        check_prompt(text)
        messages = [*self.messages, {"role": "user", "content": self._opening + text}]
        pieces: list[str] = []
        tokens: list[int] = []
        last = None
        with closing(self._steps(messages, stop)) as steps:
            for step in steps:
                self._show(step)
                pieces.append(step.text)
                tokens.append(step.token)
                last = step.stats
                if stop() and len(tokens) == step.stats.generated_tokens:  # all of its round: what the caches hold
                    break
        if last is not None:
            self.totals.add(last)
        reply = "".join(pieces)
        self.transcript.answered(tokens)
        self.messages, self._opening = [*messages, {"role": "assistant", "content": reply}], ""
        return reply

    def _steps(self, messages: list[dict[str, str]], stop: Callable[[], bool]) -> Iterator[GenerationStep]:
        ids, shown = self.transcript.prompt(messages), self.options.get("progress")

        def progress(done: int, total: int) -> None:
            if shown is not None:
                shown(done, total)
            if done < total and stop():
                raise PromptStopped

        options = {**self.options, "progress": progress, "session": self.session}
        return stream_generate(self.engine, ids, **options)  # type: ignore[return-value]

    def _show(self, step: GenerationStep) -> None:
        if not step.text:
            return
        code = _CODES.get(self.mark) if step.drafted else None
        self.write(f"{code}{step.text}{_RESET}" if code else step.text)
        sys.stdout.flush()


def chat(options: Any) -> None:
    """Talk with a model; /help lists the commands."""
    shared = {item.name: getattr(options, item.name) for item in fields(options) if item.name != "mark"}
    generate_options = GenerateOptions(prompt="chat", **shared)
    request = build_request(generate_options)
    notes = Console(stderr=True, highlight=False)
    engine = build_engine(generate_options, announce=lambda line: notes.print(line, style="dim", markup=False))
    request = with_policy(request, engine, generate_options)
    cached = None
    if options.prompt_cache_file is not None:
        cached = read_prompt_cache(engine, Path(options.prompt_cache_file), system_prompt=options.system_prompt)
        if cached.raw:
            raise DSpineError(f"{options.prompt_cache_file} holds raw text: a chat needs one made without --raw")
    for note in engine.notes:
        notes.print(f"note: {note}", markup=False)
    talk = Chat(engine, request, mark=str(options.mark), cached=cached)
    notes.print(f"{engine.model} on {engine.runtime}; /help lists the commands", style="dim")
    run(talk, notes)


def run(talk: Chat, notes: Console) -> None:
    """Read, answer, repeat, until the input ends or /exit."""
    while True:
        try:
            line = _read()
        except EOFError:
            notes.print("")
            return
        except KeyboardInterrupt:
            notes.print("\n/exit or Ctrl-D leaves")
            continue
        except DSpineError as error:
            notes.print(f"error: {error}", style="red", markup=False)
            continue
        if not line.strip():
            continue
        if line.startswith("/"):
            if not _command(talk, line.strip(), notes):
                return
            continue
        try:
            with interruptible() as stopped:
                talk.answer(line, stopped)
                sys.stdout.write("\n")
                sys.stdout.flush()
                if stopped():
                    notes.print("stopped", style="dim")
        except PromptStopped:
            notes.print("\nstopped while the prompt was read; this message is not kept", style="dim")
        except KeyboardInterrupt:  # the second one, in the middle of a round
            notes.print("\nstopped; this answer is not kept", style="dim")
        except DSpineError as error:
            notes.print(f"error: {error}", style="red", markup=False)


def _read() -> str:
    """One line: from the terminal with editing and history where Python has them, else from standard input (UTF-8)."""
    if sys.stdin.isatty():
        try:
            import readline  # noqa: F401 - its import gives `input` editing and history
        except ImportError:
            pass
        return input(">>> ")
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return decode_utf8(line, "the message").rstrip("\r\n")


def _command(talk: Chat, line: str, notes: Console) -> bool:
    """Carry out a command; False leaves the chat."""
    name = line.split()[0]
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        talk.reset()
        notes.print("the conversation starts anew", style="dim")
    elif name == "/stats":
        notes.print(stats_table(talk))
    elif name == "/help":
        notes.print(_HELP, markup=False)
    else:
        notes.print(f"unknown command {name}; /help lists them", markup=False)
    return True


def stats_table(talk: Chat) -> Table:
    """The totals for people."""
    totals, engine = talk.totals, talk.engine
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = [
        ("model", f"{engine.model}  ({engine.target.info.dtype} on {engine.target.info.device})"),
        ("drafter", engine.draft_model or "none: plain decoding"),
        ("messages", f"{len(talk.messages)} in this conversation, {totals.answers} answers in all"),
        (
            "prompt",
            f"{totals.prompt_tokens} tokens, {totals.cached_tokens} of them kept from before; {totals.prefill_seconds:.2f} s",
        ),
        ("answers", f"{totals.tokens} tokens in {totals.rounds} rounds"),
    ]
    if totals.rounds:
        rows.append(
            (
                "acceptance",
                f"{totals.in_rounds / totals.rounds:.2f} tokens a round; {totals.accepted} of {totals.drafted} drafts",
            )
        )
    if totals.seconds > 0:
        rows.append(("speed", f"{totals.in_rounds / totals.seconds:.1f} tokens/s"))
    rows.append(("memory", memory_line(engine.runtime, peak_memory_bytes(), peak_on_device(engine))))
    for label, text in [*rows, *(("note", note) for note in totals.notes)]:
        table.add_row(f"[dim]{label}[/dim]", escape(text))
    return table


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C only sets a flag (the returned function reads it); the second raises as usual."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, before)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread: nobody sends Ctrl-C here
        yield lambda: False
        return
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
