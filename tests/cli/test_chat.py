"""`dspine chat` on toy models: history, commands, marks, Ctrl-C, and errors that leave the chat usable."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
from contextlib import contextmanager

import pytest

from dspine.common.cli import chat as command
from dspine.common.cli.generate import build_engine, build_request, with_policy
from dspine.common.cli.options import GenerateOptions
from dspine.common.errors import DSpineError
from dspine.common.generation import generate
from tests.cli.conftest import PROMPT

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"


@pytest.fixture
def model(toy):
    """The toy model with a chat template."""
    path = toy / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return toy


@pytest.fixture
def say(model, dspine, monkeypatch):
    """Run `dspine chat` on lines of standard input."""

    def run(*lines: str | bytes, flags: tuple[str, ...] = ()):
        data = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        folders = ("--model", model / "model", "--draft-model", model / "draft")
        return dspine("chat", *folders, "--max-tokens", "6", *flags)

    return run


@pytest.fixture
def talk(model):
    """A `Chat` in hand, and the list of pieces it wrote."""
    options = GenerateOptions(prompt="chat", model=str(model / "model"), draft_model=str(model / "draft"), max_tokens=6)
    request = build_request(options)
    engine = build_engine(options)
    written: list[str] = []
    return command.Chat(engine, with_policy(request, engine, options), write=written.append), written


def test_a_conversation_keeps_its_history(talk):
    chat, written = talk
    first = chat.answer("ab")
    second = chat.answer("cd")
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": first}, {"role": "user", "content": "cd"}]
    assert second == generate(chat.engine, messages, max_tokens=6).text
    assert "".join(written) == first + second and chat.messages[-1]["content"] == second
    assert chat.totals.answers == 2 and chat.totals.tokens == 12
    chat.reset()
    assert chat.answer("ab") == first and len(chat.messages) == 2


def test_the_command(say):
    run = say("ab", "/stats", "/help", "/nonsense", "/reset", "ab", "/exit", "never")
    assert run.code == 0
    one, two = run.out.splitlines()
    assert one == two
    assert "2 in this conversation, 1 answers in all" in run.err and "tokens a round" in run.err
    assert "unknown command /nonsense" in run.err and "starts anew" in run.err and "/reset   forget" in run.err
    assert say().code == 0  # nothing but the end of the input


def test_marks_wrap_accepted_tokens_only(say, model):
    path = model / "model" / "tokenizer_config.json"  # the drafter of `toy` knows what follows PROMPT as it is
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{{ messages[-1].content }}"}))
    plain = say(PROMPT).out
    dim = say(PROMPT, flags=("--mark", "dim")).out
    assert "\x1b[2m" in dim and re.sub("\x1b\\[[0-9]*m", "", dim) == plain and "\x1b" not in plain
    assert "\x1b[36m" in say(PROMPT, flags=("--mark", "colour")).out
    assert "\x1b" not in say(PROMPT, flags=("--mark", "dim", "--no-draft")).out


def test_errors_leave_the_chat_usable(say):
    run = say("x" * 70, b"\xff\xfe", "ab")
    good = say("ab")
    assert run.code == 0 and run.out == good.out
    assert "context holds 64" in run.err and "the message is not valid UTF-8" in run.err


def test_ctrl_c_stops_the_answer_and_keeps_the_rest(talk):
    chat, written = talk
    before = signal.getsignal(signal.SIGINT)
    chat.write = lambda piece: (written.append(piece), signal.raise_signal(signal.SIGINT) if len(written) == 2 else None)
    with command.interruptible() as stopped:
        reply = chat.answer("ab", stopped)
        assert stopped()
    assert signal.getsignal(signal.SIGINT) is before
    assert 0 < len(reply) < 6 and chat.messages[-1] == {"role": "assistant", "content": reply}
    chat.write = written.append
    assert len(chat.answer("cd")) > 0


def test_ctrl_c_stops_the_reading_of_a_long_prompt(talk):
    """Between two pieces of it; the message is not kept, what was read of it is at the disposal of the next one."""
    chat, written = talk
    first = chat.answer("ab")
    chat.options["prefill_chunk"] = 8
    pieces: list[tuple[int, int]] = []
    chat.options["progress"] = lambda done, total: pieces.append((done, total))
    with pytest.raises(command.PromptStopped):
        chat.answer("x" * 30, stop=lambda: len(pieces) == 2)
    assert len(pieces) == 2 and pieces[-1][0] < pieces[-1][1]
    assert "".join(written) == first and len(chat.messages) == 2 and chat.totals.answers == 1
    chat.options["progress"] = None
    second = chat.answer("cd")
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": first}, {"role": "user", "content": "cd"}]
    assert second == generate(chat.engine, messages, max_tokens=6).text


def test_the_chat_goes_on_after_a_prompt_that_was_stopped(say, monkeypatch):
    real, turns = command.interruptible, iter([True, False])

    @contextmanager
    def once():
        with real():
            stop = next(turns)
            yield lambda: stop

    monkeypatch.setattr(command, "interruptible", once)
    run = say("x" * 30, "ab", flags=("--prefill-step-size", "8"))
    monkeypatch.setattr(command, "interruptible", real)
    assert run.code == 0 and run.out == say("ab").out
    assert "stopped while the prompt was read; this message is not kept" in run.err


@pytest.fixture
def listening():
    """Ctrl-C raises, as at a terminal: a process that a shell put into the background starts with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_ctrl_c_raises(talk, listening):
    with pytest.raises(KeyboardInterrupt), command.interruptible() as stopped:
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_on_an_empty_line_says_how_to_leave(model, dspine, monkeypatch, capsys):
    moves = iter([KeyboardInterrupt, EOFError])
    monkeypatch.setattr(command, "_read", lambda: (_ for _ in ()).throw(next(moves)))
    run = dspine("chat", "--model", model / "model", "--draft-model", model / "draft")
    assert run.code == 0 and "/exit or Ctrl-D leaves" in run.err


def test_a_model_without_a_template_is_refused(toy, dspine):
    run = dspine("chat", "--model", toy / "model", "--draft-model", toy / "draft")
    assert run.code == 2 and "no chat template" in run.err


def test_an_empty_message_is_refused(talk):
    with pytest.raises(DSpineError, match="prompt is empty"):
        talk[0].answer("   ")


def test_runtimes_without_caches_of_their_own_say_so(model, dspine):
    """A runtime that keeps whole K/V only, and no prompt files, refuses at start-up; nothing is ignored."""
    for command_name, flags, message in (
        ("generate", ("--prompt", "ab", "--kv-bits", "8"), "kv_bits: the toy runtime keeps whole K/V in full precision only"),
        ("chat", ("--max-kv-size", "32"), "max_kv_size: the toy runtime keeps whole K/V"),
        ("cache-prompt", ("--prompt", "ab", "--prompt-cache-file", model / "f"), "the toy runtime keeps no prompt cache files"),
        ("generate", ("--prompt", "ab", "--prompt-cache-file", model / "f"), "the toy runtime keeps no prompt cache files"),
    ):
        run = dspine(command_name, "--model", model / "model", "--draft-model", model / "draft", *flags)
        assert run.code == 2 and message in run.err and "Traceback" not in run.err
