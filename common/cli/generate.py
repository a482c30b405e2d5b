"""`dspine generate`: options -> checked request -> loaded engine -> streamed text -> report. One function a step."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dspine.common.acceptance import check_rule
from dspine.common.cli.options import GenerateOptions
from dspine.common.decoding import DecodingParams, resolve_acceptance
from dspine.common.embedded import EMBEDDED_NAME, is_prepared
from dspine.common.errors import DSpineError
from dspine.common.generation import PLAN_TOKENS, GenerationStep, load, stream_generate
from dspine.common.memory import CacheOptions
from dspine.common.prompt_files import check_reading, read_prompt_cache
from dspine.common.protocols import Engine
from dspine.common.runtimes import AUTO, choose_runtime, load_runtime
from dspine.common.sampling import SamplingParams
from dspine.common.selection.choose import choose_policy
from dspine.common.selection.policies import AUTO_POLICY, StaticPolicy, check_policy_name
from dspine.common.sessions import Progress
from dspine.common.statistics import Statistics
from dspine.common.tokenizer import check_prompt, decode_utf8

_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Request:
    """A checked request: what goes to `stream_generate`, and the objects it was checked with. The policy is a name until
    `with_policy` has seen the loaded pair."""

    prompt: str | list[int]
    options: dict[str, Any]
    sampling: SamplingParams
    policy: Any
    policy_reason: str = ""


@dataclass(frozen=True)
class Run:
    """One finished generation."""

    text: str
    token_ids: list[int]
    finish_reason: str | None
    stats: Statistics


def generate(options: GenerateOptions) -> None:
    """Generate text from a prompt, with speculative decoding where a drafter is known."""
    request = build_request(options)
    notes = Console(stderr=True, highlight=False)
    planned = max(PLAN_TOKENS, len(request.prompt) // 2)
    engine = build_engine(options, plan_tokens=planned, announce=lambda line: notes.print(line, style="dim", markup=False))
    request = with_policy(request, engine, options)
    request = from_prompt_cache(request, engine, options)
    for note in engine.notes:
        notes.print(f"note: {note}", markup=False)
    stream = sys.stderr if options.json else sys.stdout
    if options.compare:
        _warm_up(engine, request)
    run = run_request(engine, request, draft=True, write=stream.write)
    stream.write("\n")
    stream.flush()
    plain = run_request(engine, request, draft=False) if options.compare else None
    report = build_report(options, engine, request, run, plain)
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        notes.print(summary_table(report, run.stats))


def build_request(options: GenerateOptions) -> Request:
    """Check everything that needs no model. Raises DSpineError."""
    sampling = SamplingParams(
        temperature=options.temp,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
    )
    DecodingParams(max_tokens=options.max_tokens, sampling=sampling, prefill_chunk=options.prefill_step_size)
    cache_options(options)
    policy = _policy(options)
    reads = check_policy_name(policy)
    if options.acceptance != AUTO:
        check_rule(options.acceptance, temperature=sampling.temperature, reads_draft_tokens=reads, policy=options.policy)
    if options.compare and options.no_draft:
        raise DSpineError("--compare needs a drafter to compare with plain decoding, and --no-draft takes it away: drop one")
    if options.compare and options.prompt_cache_file is not None:
        raise DSpineError("--compare reads the prompt twice, and a prompt cache is used up by the first: drop one")
    names = ("max_tokens", "top_p", "top_k", "min_p", "seed", "system_prompt", "raw", "ignore_eos")
    passed = {name: getattr(options, name) for name in (*names, *_PENALTIES)}
    passed |= {"temperature": options.temp, "acceptance": str(options.acceptance), "prefill_chunk": options.prefill_step_size}
    passed["progress"] = prompt_progress(options.prefill_step_size)
    prompt = read_prompt(options.prompt)
    check_prompt(prompt)
    return Request(prompt, passed, sampling, policy)


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def with_policy(request: Request, engine: Engine, options: GenerateOptions) -> Request:
    """The request with the policy that this pair gets, and why. Raises DSpineError where a named one cannot be had."""
    calibration = options.calibration
    if calibration is not None and engine.drafter is None:
        raise DSpineError("--calibration belongs to a pair, and this run drafts nothing: drop it, or name a --draft-model")
    chosen = choose_policy(
        request.policy,
        engine,
        calibration=calibration,
        acceptance=str(options.acceptance),
        draft=engine.drafter is not None,
    )
    passed = {**request.options, "policy": chosen.policy}
    return replace(request, options=passed, policy=chosen.policy, policy_reason=chosen.reason)


def from_prompt_cache(request: Request, engine: Engine, options: GenerateOptions) -> Request:
    """The request going on from `--prompt-cache-file`, where one was named."""
    if options.prompt_cache_file is None:
        return request
    file = Path(options.prompt_cache_file)
    cached = read_prompt_cache(engine, file, system_prompt=options.system_prompt, raw=options.raw)
    ids = cached.continued(engine, request.prompt)  # type: ignore[arg-type]
    passed = {**request.options, "system_prompt": None, "raw": False, "session": cached.session}
    return replace(request, prompt=ids, options=passed)


def prompt_progress(chunk: int) -> Progress | None:
    """Shows on a terminal how far a prompt of several chunks has been read."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        if total > chunk:
            sys.stderr.write("\r\x1b[K" if done == total else f"\r\x1b[Kreading the prompt: {done} of {total} tokens")
            sys.stderr.flush()

    return show


def _policy(options: GenerateOptions) -> Any:
    if options.block_size is None:
        return options.policy
    if options.policy not in (AUTO_POLICY, StaticPolicy().name):
        raise DSpineError(f"--block-size is short for --policy static:N, and --policy {options.policy} was given too: drop one")
    if options.block_size < 2:
        raise DSpineError(
            f"--block-size must be at least 2 (the anchor and one draft), got {options.block_size}; or --no-draft"
        )
    return StaticPolicy(options.block_size)


def read_prompt(prompt: str) -> str:
    """The prompt itself, or standard input for `-`."""
    return decode_utf8(sys.stdin.buffer.read(), "the prompt on standard input") if prompt == "-" else prompt


def cache_options(options: GenerateOptions) -> CacheOptions:
    """How K/V are to be kept. Raises DSpineError."""
    return CacheOptions(options.max_kv_size, options.kv_bits, options.kv_group_size)


def build_engine(
    options: GenerateOptions, *, plan_tokens: int = PLAN_TOKENS, announce: Callable[[str], None] | None = None
) -> Engine:
    """Choose the runtime and load the pair. Memory is planned for `plan_tokens`, a prompt cache file's tokens and the answer.
    Raises DSpineError."""
    runtime, reason = choose_runtime(options.backend)
    if options.prompt_cache_file is not None:
        plan_tokens += check_reading(runtime, Path(options.prompt_cache_file))
    with preparing(options.model):
        engine = load(
            runtime,
            options.model,
            None if options.no_draft else options.draft_model,
            device=options.device,
            dtype=str(options.dtype),
            backend_reason=reason,
            cache=cache_options(options),
            plan_tokens=options.max_tokens + plan_tokens,
            plan_chunk=options.prefill_step_size,
            announce=announce,
            graphs=str(options.graphs),
        )
    if options.compare and engine.drafter is None:
        raise DSpineError(f"--compare needs a drafter, and none is known for {options.model!r}: name one with --draft-model")
    trained = engine.drafter.config.block_size if engine.drafter is not None else None
    if options.block_size is not None and trained is not None and options.block_size > trained:
        raise DSpineError(f"--block-size is at most {trained} with this drafter, got {options.block_size}")
    return engine


@contextmanager
def preparing(model: str) -> Iterator[None]:
    """Say on stderr what takes its time: loading, and on the first run the embedded model's conversion."""
    first = model == EMBEDDED_NAME and not is_prepared()
    with Console(stderr=True).status("preparing the embedded model (once) ..." if first else "loading ..."):
        yield


def _warm_up(engine: Engine, request: Request) -> None:
    """First calls set up thread pools and buffers: keep that out of both sides of a comparison."""
    few = request.options | {"max_tokens": min(_WARM_UP_TOKENS, request.options["max_tokens"])}
    for draft in (True, False):
        for _ in stream_generate(engine, request.prompt, **few, draft=draft):
            pass


def run_request(engine: Engine, request: Request, *, draft: bool, write: Callable[[str], Any] | None = None) -> Run:
    """Generate once, handing each piece of text to `write` as it comes."""
    steps: list[GenerationStep] = []
    for step in stream_generate(engine, request.prompt, **request.options, draft=draft):
        steps.append(step)
        if write is not None and step.text:
            write(step.text)
            _flush(write)
    last = steps[-1]
    return Run("".join(step.text for step in steps), [step.token for step in steps], last.finish_reason, last.stats)


def _flush(write: Callable[[str], Any]) -> None:
    stream = getattr(write, "__self__", None)
    if stream is not None and hasattr(stream, "flush"):
        stream.flush()


def build_report(options: GenerateOptions, engine: Engine, request: Request, run: Run, plain: Run | None) -> dict[str, Any]:
    """The fields of `--json`. Plain figures are None without --compare; nothing is estimated."""
    drafter, info, stats = engine.drafter, engine.target.info, run.stats
    plain_rate = plain.stats.tokens_per_second if plain is not None else None
    rule = resolve_acceptance(str(options.acceptance), request.sampling, drafter, request.policy)
    return {
        "text": run.text,
        "token_ids": run.token_ids,
        "finish_reason": run.finish_reason,
        **stats.as_dict(),
        "plain_tokens_per_second": plain_rate,
        "speedup": stats.tokens_per_second / plain_rate if plain_rate else None,
        "same_tokens_as_plain": run.token_ids == plain.token_ids if plain is not None else None,
        "backend": engine.runtime,
        "backend_reason": engine.backend_reason,
        "rounds_reason": engine.rounds_reason,
        "device": info.device,
        "dtype": info.dtype,
        "adapter": info.adapter,
        "model": engine.model,
        "drafter": engine.draft_model,
        "drafting": drafter is not None and stats.drafting_disabled is None,
        "policy": request.policy.name if drafter is not None else None,
        "policy_reason": request.policy_reason if drafter is not None else None,
        "acceptance": rule if drafter is not None else None,
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_device_memory_bytes": peak_on_device(engine),
        "notes": engine.notes,
    }


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far (host memory). Linux counts in KiB, macOS in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_on_device(engine: Engine) -> int | None:
    """What the runtime's own allocator held at most, in bytes; None where it does not say."""
    ask = getattr(load_runtime(engine.runtime)[0], "peak_memory", None)
    return ask() if ask is not None else None


def memory_line(engine_name: str, process: int, device: int | None) -> str:
    """Both peaks for people."""
    held = f"; {device / 2**20:.0f} MiB held by {engine_name}" if device is not None else ""
    return f"{process / 2**20:.0f} MiB at the peak{held}"


def summary_table(report: dict[str, Any], stats: Statistics) -> Table:
    """The figures for people."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = [
        ("model", f"{report['model']}  ({report['dtype']} on {report['device']}, {report['adapter']})"),
        ("backend", f"{report['backend']}  ({report['backend_reason']})"),
        ("drafter", _drafter_line(report)),
        ("tokens", f"{stats.generated_tokens} after a prompt of {_prompt(stats)}, {stats.rounds} rounds"),
        ("speed", f"{stats.tokens_per_second:.1f} tokens/s after the prompt ({stats.prefill_seconds:.2f} s)"),
    ]
    if report["policy"] is not None:
        rows.insert(3, ("policy", _policy_line(report)))
    if stats.drafted_tokens:
        by_position = " ".join(f"{share:.2f}" for share in stats.acceptance_by_position)
        rows.insert(-1, ("acceptance", f"{stats.mean_acceptance_length:.2f} tokens a round; by position {by_position}"))
    if report["plain_tokens_per_second"] is not None:
        same = "the same tokens" if report["same_tokens_as_plain"] else "other tokens, see `Lossless` in the README"
        speedup = f"{report['speedup']:.2f}x" if report["speedup"] else "-"
        rows.append(("plain", f"{report['plain_tokens_per_second']:.1f} tokens/s, {same}; speed-up {speedup}"))
    rows.append(("memory", memory_line(report["backend"], report["peak_memory_bytes"], report["peak_device_memory_bytes"])))
    if stats.non_finite_drafts:
        rows.append(("warning", f"{stats.non_finite_drafts} drafts were not finite; those rounds decoded plainly"))
    for label, text in rows:
        table.add_row(f"[dim]{label}[/dim]", escape(text))
    return table


def _prompt(stats: Statistics) -> str:
    return f"{stats.prompt_tokens} ({stats.cached_tokens} cached)" if stats.cached_tokens else str(stats.prompt_tokens)


def _drafter_line(report: dict[str, Any]) -> str:
    if report["drafter"] is None:
        return "none: plain decoding"
    state = f", switched off: {report['drafting_disabled']}" if report["drafting_disabled"] else ""
    return f"{report['drafter']}  (acceptance {report['acceptance']}{state})"


def _policy_line(report: dict[str, Any]) -> str:
    return f"{report['policy']}  ({report['policy_reason']}; {report['mean_verified_length']:.1f} tokens verified a round)"
