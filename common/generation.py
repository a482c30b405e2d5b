"""`load`, `stream_generate` and `generate`: the Python API that both runtimes offer with one signature.

The blocking call drains the generator; there is no second loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspine.common.decoding import DecodingLoop, DecodingParams, TokenEvent, resolve_acceptance
from dspine.common.errors import DSpineError
from dspine.common.memory import GIB, CacheOptions, device_memory, plan_on
from dspine.common.models import find_draft, resolve_model
from dspine.common.protocols import Engine, Runtime
from dspine.common.runtimes import place_of
from dspine.common.sampling import SamplingParams
from dspine.common.selection.calibration import device_class
from dspine.common.selection.choose import PolicyChoice, choose_policy
from dspine.common.selection.policies import AUTO_POLICY
from dspine.common.sessions import Progress, Session
from dspine.common.statistics import Statistics
from dspine.common.tokenizer import Detokenizer, encode_prompt, load_tokenizer, stop_token_ids

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
PLAN_TOKENS = 4096  # context length that memory is planned for where the caller names none


@dataclass(frozen=True)
class GenerationStep:
    """One token as it leaves the loop. `text` is what it adds to the printed text (empty inside a multi-token character);
    `drafted`: proposed by the drafter and accepted, else the target's own; `stats` is live."""

    text: str
    token: int
    drafted: bool
    finish_reason: str | None
    stats: Statistics


@dataclass(frozen=True)
class GenerationResult:
    """Everything after the prompt. `token_ids` includes the stop token, `text` does not show special tokens."""

    text: str
    token_ids: list[int]
    drafted: list[bool]
    finish_reason: str
    acceptance: str
    policy: str
    stats: Statistics


def load(
    runtime: Runtime,
    model: str = "smollm2",
    draft_model: str | None = "auto",
    *,
    device: str = "auto",
    dtype: str = "auto",
    backend_reason: str = "asked for",
    cache: CacheOptions | None = None,
    plan_tokens: int = PLAN_TOKENS,
    plan_chunk: int = 512,
    announce: Callable[[str], None] | None = None,
    graphs: str = "auto",
) -> Engine:
    """Load a target and its drafter on one runtime.

    model: `smollm2`, a folder, or a hub id. draft_model: `auto` (the known pair, a note where there is none), None (plain
    decoding), a folder or a hub id. A drafter that was named and does not load is an error, never a silent fallback.
    cache: how K/V are kept. Before anything is loaded, the memory of the pair with `plan_tokens` in its caches and a prompt
    read `plan_chunk` tokens at a time is handed to `announce` as a line, and refused with the numbers where it cannot fit.
    graphs: whole rounds as CUDA graphs, `auto`, `on` (an error where they cannot run) or `off`; `Engine.rounds_reason` says
    what was taken.
    """
    cache = cache or CacheOptions()
    check_cache_options(runtime, cache)
    folder = resolve_model(model)
    notes: list[str] = []
    draft_folder = None
    if draft_model is not None:
        draft_folder, reason = find_draft(draft_model, model)
        if draft_folder is None or reason.startswith("published"):
            notes.append(reason)
    planned = {"tokens": plan_tokens, "chunk": plan_chunk, "cache": cache}
    _check_memory(runtime, folder, draft_folder, device=device, dtype=dtype, announce=announce, **planned)
    options = {} if cache.plain else {"cache": cache}
    target = runtime.load_target(folder, device=device, dtype=dtype, **options)
    drafter = runtime.load_drafter(draft_folder, target) if draft_folder is not None else None
    rounds, rounds_reason = _rounds(runtime, target, drafter, graphs)
    device = target.info.device
    return Engine(
        target=target,
        drafter=drafter,
        tokenizer=load_tokenizer(folder),
        runtime=runtime.name,
        backend_reason=backend_reason,
        model=model,
        draft_model=str(draft_folder) if draft_folder is not None else None,
        notes=notes,
        rounds=rounds,
        rounds_reason=rounds_reason,
        device_class=device_class(device.partition(":")[0], runtime.accelerator(device)),
    )


def check_cache_options(runtime: Runtime, cache: CacheOptions) -> None:
    """DSpineError where this runtime cannot keep K/V that way."""
    known = getattr(runtime, "keeps_caches", ())
    for name in ("max_kv_size", "kv_bits"):
        if getattr(cache, name) is not None and name not in known:
            raise DSpineError(
                f"{name}: the {runtime.name} runtime keeps whole K/V in full precision only; drop it, or --backend mlx"
            )


def _rounds(runtime: Runtime, target: Any, drafter: Any, graphs: str) -> tuple[Any, str]:
    """What this runtime offers for rounds without the CPU, and why."""
    make = getattr(runtime, "graph_rounds", None)
    if make is not None:
        return make(target, drafter, graphs)
    if graphs == "on":
        raise DSpineError(f"graphs on: the {runtime.name} runtime has no graphs; drop it, or --backend torch on a CUDA device")
    return None, f"the {runtime.name} runtime has no graphs"


def _make_loop(
    engine: Engine, drafter: Any, ids: Sequence[int], params: DecodingParams, policy: Any, kept: bool
) -> DecodingLoop:
    """Static rounds where the engine has them and they fit this request, else the eager loop. kept: a session keeps the caches,
    and those of static rounds serve the next request."""
    if engine.rounds is not None:
        found, reason = (None, "a session keeps the caches") if kept else engine.rounds.loop(drafter, ids, params, policy)
        engine.rounds_reason = reason
        if found is not None:
            return found
    return DecodingLoop(engine.target, drafter, ids, params, policy)


def _check_memory(
    runtime: Runtime,
    folder: Path,
    draft_folder: Path | None,
    *,
    device: str,
    dtype: str,
    tokens: int,
    chunk: int,
    cache: CacheOptions,
    announce: Callable[[str], None] | None,
) -> None:
    """Refuse a pair that does not fit the device; runtimes that cannot tell their memory are not checked."""
    if not hasattr(runtime, "device_memory"):
        return
    name = place_of(runtime, device)
    plan = plan_on(runtime, name, folder, draft_folder, tokens=tokens, dtype=dtype, options=cache, chunk=chunk)
    memory = device_memory(runtime, name)
    if announce is not None:
        announce(f"memory: {plan.line()}; {memory.usable / GIB:.2f} GiB usable on {name} ({memory.source})")
    plan.check(memory, f"{folder.name} on {name}")


def stream_generate(
    engine: Engine,
    prompt: Prompt,
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    system_prompt: str | None = None,
    raw: bool = False,
    ignore_eos: bool = False,
    acceptance: str = "auto",
    policy: Any = AUTO_POLICY,
    calibration: str | Path | None = None,
    draft: bool = True,
    request: int = 0,
    prefill_chunk: int = 512,
    break_even: float = 1.1,
    session: Session | None = None,
    progress: Progress | None = None,
) -> Iterator[GenerationStep]:
    """Yield one step per token. Everything is checked before the first token is asked for.

    prompt: text (wrapped in the chat template, with `system_prompt`, unless `raw`), chat messages, or token ids.
    `draft=False` decodes this request plainly. Sampling parameters: `SamplingParams`; acceptance: `decoding`. policy: a name
    (`selection.policies`), an object, or `auto` (`selection.choose`); calibration: a file other than the drafter's own.
    session: caches of the request before, and where those of this one go. progress: called with (prompt tokens read, all).
    """
    sampling = SamplingParams(
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed
    )  # fmt: skip
    ids = encode_prompt(engine.tokenizer, prompt, system_prompt=system_prompt, raw=raw, limit=engine.target.info.context_length)
    stop_ids = frozenset() if ignore_eos else stop_token_ids(engine.tokenizer, engine.target.info.eos_token_ids)
    params = DecodingParams(max_tokens, sampling, acceptance, stop_ids, request, prefill_chunk, break_even)
    drafter = engine.drafter if draft else None
    chosen = choose_policy(policy, engine, calibration=calibration, acceptance=acceptance, draft=draft)
    loop = _make_loop(engine, drafter, ids, params, chosen.policy, session is not None)
    events = (session or Session(None)).run(loop, progress)
    return _with_text(events, Detokenizer(engine.tokenizer))


def _with_text(events: Iterator[TokenEvent], detokenizer: Detokenizer) -> Iterator[GenerationStep]:
    with closing(events):  # type: ignore[type-var]
        for event in events:
            text = detokenizer.add(event.token)
            if event.finish_reason is not None:
                text += detokenizer.flush()
            yield GenerationStep(text, event.token, event.drafted, event.finish_reason, event.stats)


def policy_for(engine: Engine, options: dict[str, Any]) -> PolicyChoice:
    """The length policy that `stream_generate` takes for these options, and why."""
    picked = {name: options[name] for name in ("calibration", "acceptance", "draft") if name in options}
    return choose_policy(options.get("policy", AUTO_POLICY), engine, **picked)


def generate(engine: Engine, prompt: Prompt, **options: Any) -> GenerationResult:
    """Drain `stream_generate` (same options) and return everything at once."""
    options = {**options, "policy": policy_for(engine, options).policy}
    steps = list(stream_generate(engine, prompt, **options))
    if not steps or steps[-1].finish_reason is None:
        raise DSpineError("generation ended without a finish reason")
    sampling = SamplingParams(temperature=options.get("temperature", 0.0))
    policy = options["policy"]
    drafter = engine.drafter if options.get("draft", True) else None
    return GenerationResult(
        text="".join(step.text for step in steps),
        token_ids=[step.token for step in steps],
        drafted=[step.drafted for step in steps],
        finish_reason=steps[-1].finish_reason,
        acceptance=resolve_acceptance(options.get("acceptance", "auto"), sampling, drafter, policy),
        policy=policy.name,
        stats=steps[-1].stats,
    )
