"""`dspine generate` end to end on toy models: streams, report, comparison, and one line for every bad input."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest

from dspine.common.cli import generate as command
from dspine.common.tokenizer import load_tokenizer
from tests.cli.conftest import CONTEXT, PROMPT, logits_of

FIELDS = (
    "text, token_ids, rounds, mean_acceptance_length, acceptance_by_position, tokens_per_second, plain_tokens_per_second, "
    "speedup, backend, backend_reason, device, model, drafter, policy, acceptance, peak_memory_bytes"
).split(", ")


@pytest.fixture
def generate(toy, dspine):
    """`dspine generate` on the toy pair; later flags win over these."""

    def run(*arguments: str):
        chosen = {"--model": toy / "model", "--draft-model": toy / "draft", "--prompt": PROMPT, "--max-tokens": 24}
        given = [argument for argument in arguments if argument in chosen]
        defaults = [part for flag, value in chosen.items() if flag not in given for part in (flag, value)]
        return dspine("generate", *defaults, *arguments)

    return run


@pytest.fixture
def expected(toy):
    """Text and ids of plain greedy decoding, written out by hand."""
    tokenizer = load_tokenizer(toy / "model")
    context = tokenizer.encode(PROMPT)
    logits, start = logits_of(len(tokenizer.backend)), len(context)
    for _ in range(24):
        context.append(int(np.argmax(logits(context))))
    return tokenizer.decode(context[start:]), context[start:]


def test_text_goes_to_stdout_and_the_summary_to_stderr(generate, expected):
    run = generate()
    assert run.code == 0 and run.out == expected[0] + "\n"
    assert "tokens a round" in run.err and "toy" in run.err and expected[0] not in run.err


def test_json_is_exactly_one_line(generate, expected, toy):
    run = generate("--json", "--compare")
    assert run.code == 0 and run.out.count("\n") == 1 and expected[0] in run.err
    report = json.loads(run.out)
    assert set(FIELDS) <= set(report)
    assert (report["text"], report["token_ids"]) == expected
    assert report["model"] == str(toy / "model") and report["drafter"] == str(toy / "draft")
    assert report["backend"] == "toy" and "the first that can run here" in report["backend_reason"]
    assert report["acceptance"] == "greedy" and report["policy"] == "full" and report["device"] == "cpu"
    assert 0 < report["rounds"] < 23 and report["mean_acceptance_length"] == pytest.approx(23 / report["rounds"])
    assert report["same_tokens_as_plain"] is True and report["drafting"] is True
    assert report["speedup"] == pytest.approx(report["tokens_per_second"] / report["plain_tokens_per_second"])
    assert report["peak_memory_bytes"] > 2**20


def test_without_compare_plain_figures_are_null(generate):
    report = json.loads(generate("--json").out)
    assert report["plain_tokens_per_second"] is None and report["speedup"] is None


def test_compare_really_decodes_plainly(generate, monkeypatch):
    """Warm-up of both sides, then one speculative and one plain run."""
    seen, real = [], command.stream_generate

    def spy(engine, prompt, **options):
        seen.append((options["draft"], options["max_tokens"]))
        return real(engine, prompt, **options)

    monkeypatch.setattr(command, "stream_generate", spy)
    generate("--compare")
    assert seen == [(True, 8), (False, 8), (True, 24), (False, 24)]


def test_compare_prints_the_speed_up(generate):
    run = generate("--compare")
    assert run.code == 0 and "speed-up" in run.err and "the same tokens" in run.err


def test_short_answers_are_drafted_too(generate):
    """Case V5: no hidden threshold below which speculation is off."""
    report = json.loads(generate("--json", "--max-tokens", "4").out)
    assert len(report["token_ids"]) == 4 and report["accepted_tokens"] > 0


def test_no_draft_decodes_plainly(generate, expected):
    report = json.loads(generate("--json", "--no-draft").out)
    assert report["text"] == expected[0] and report["drafter"] is None and report["drafted_tokens"] == 0
    assert report["drafting"] is False and report["rounds"] == 23


def test_unknown_pair_says_so_and_decodes_plainly(generate, expected):
    run = generate("--draft-model", "auto")
    assert run.code == 0 and run.out == expected[0] + "\n"
    assert "note: no drafter is known for" in run.err.replace("\n", " ") and "plain decoding" in run.err


@pytest.mark.parametrize(("flags", "policy"), [(("--policy", "static:3"), "static:3"), (("--block-size", "4"), "static:4")])
def test_length_flags(generate, expected, flags, policy):
    report = json.loads(generate("--json", *flags).out)
    assert report["text"] == expected[0] and report["policy"] == policy
    assert max(map(int, report["verified_lengths"])) == int(policy[-1])


def test_sampling_depends_on_the_seed_only(generate):
    flags = ("--json", "--no-draft", "--temp", "1.5", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.01")
    first, again, other = (json.loads(generate(*flags, "--seed", seed).out)["token_ids"] for seed in ("3", "3", "4"))
    assert first == again != other


def test_penalties_reach_the_loop(generate, expected):
    for flag, value in (("--repetition-penalty", "1.5"), ("--presence-penalty", "2"), ("--frequency-penalty", "2")):
        report = json.loads(generate("--json", "--compare", flag, value).out)
        assert report["same_tokens_as_plain"] is True and report["token_ids"] != expected[1], flag


def test_prompt_from_standard_input(generate, expected, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    assert generate("--prompt", "-").out == expected[0] + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xc3")))
    run = generate("--prompt", "-")
    assert run.code == 2 and run.err == "error: the prompt on standard input is not valid UTF-8: byte 0xc3 at offset 2\n"


BAD = [
    (("--prompt", ""), "prompt is empty"),
    (("--prompt", " \n"), "prompt is empty"),
    (("--prompt", "x" * CONTEXT), f"prompt has {CONTEXT} tokens, but the model's context holds {CONTEXT}"),
    (("--prompt", "\udcff"), "prompt is not valid UTF-8"),
    (("--temp", "-0.1"), "temperature must be 0 (greedy) or 1e-06..100, got -0.1"),
    (("--temp", "nan"), "temperature must be"),
    (("--top-p", "0"), "top_p must be above 0, at most 1 (1 is off), got 0.0"),
    (("--top-p", "1.01"), "got 1.01"),
    (("--top-k", "-1"), "top_k must be"),
    (("--min-p", "1"), "min_p must be"),
    (("--seed", "-1"), "seed must be"),
    (("--repetition-penalty", "0"), "repetition_penalty must be"),
    (("--presence-penalty", "3"), "presence_penalty must be -2..2, got 3.0"),
    (("--max-tokens", "0"), "max_tokens must be at least 1, got 0"),
    (("--max-tokens", "-5"), "max_tokens must be at least 1, got -5"),
    (("--policy", "sometimes"), "policy must be 'full' or 'static:W'"),
    (("--policy", "static:0"), "static:W needs W of at least 1"),
    (("--block-size", "1"), "--block-size must be at least 2"),
    (("--block-size", "9"), "--block-size is at most 8 with this drafter, got 9"),
    (("--block-size", "4", "--policy", "static:3"), "drop one"),
    (("--acceptance", "rejection"), "acceptance 'rejection' needs a temperature above 0"),
    (("--acceptance", "greedy", "--temp", "1"), "acceptance 'greedy' needs temperature 0"),
    (("--compare", "--no-draft"), "--compare needs a drafter"),
    (("--compare", "--draft-model", "auto"), "--compare needs a drafter, and none is known"),
    (("--raw", "--system-prompt", "s"), "a system prompt needs the chat template, but raw was asked for"),
    (("--system-prompt", "s"), "a system prompt needs the chat template"),
    (
        ("--model", "smollm"),
        "unknown model 'smollm': expected 'smollm2', 'hybrid-tiny', a folder, or a hub id like 'owner/name'",
    ),
    (("--model", "./nowhere"), "model folder './nowhere' does not exist"),
    (("--model", ""), "--model is empty"),
    (("--draft-model", "smoldraft"), "unknown draft 'smoldraft': expected 'auto', a folder, or a hub id"),
    (("--draft-model", "/nowhere/at/all"), "draft folder '/nowhere/at/all' does not exist"),
    (("--backend", "gone"), "backend 'gone' is not available: its module needs 'gone_framework', which is not installed"),
    (("--backend", "gone"), "available here: toy; install it with: python -m pip install 'dspine[gone]'"),
    (("--backend", "cuda"), "unknown backend 'cuda': expected one of auto, gone, toy"),
]


@pytest.mark.parametrize(
    ("flags", "message"), BAD, ids=[" ".join(flags)[:40].encode("ascii", "replace").decode() for flags, _ in BAD]
)
def test_bad_input_is_one_line_and_code_2(generate, flags, message):
    run = generate(*flags)
    assert run.code == 2 and run.out == ""
    assert run.err.startswith("error: ") and run.err.count("\n") == 1 and message in run.err


def test_a_draft_that_does_not_load_is_never_skipped(generate, toy):
    run = generate("--draft-model", toy / "broken")
    assert run.code == 2 and "missing tensors: fc.weight" in run.err and run.out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate",),
        ("generate", "--prompt", "x", "--temperatur", "1"),
        ("generate", "--prompt", "x", "--max-tokens", "many"),
        ("generate", "--prompt", "x", "--dtype", "float16"),  # case Q1: never fp16
        ("generate", "--prompt", "x", "--acceptance", "sloppy"),
        ("generate", "x"),
        ("generat",),
    ],
)
def test_typos_are_usage_errors(toy, dspine, arguments):
    run = dspine(*arguments)
    assert run.code == 2 and run.out == "" and "Traceback" not in run.err and "Usage" in run.err
