"""`dspine serve`: flags -> settings -> the server. The web framework is imported only here, when the command runs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from dspine.common.cli.options import Acceptance, DType, Graphs, flag
from dspine.common.embedded import EMBEDDED_NAME
from dspine.common.errors import BackendError
from dspine.common.generation import load
from dspine.common.models import AUTO_DRAFT
from dspine.common.runtimes import AUTO, choose_runtime
from dspine.common.selection.policies import AUTO_POLICY, check_policy_name

if TYPE_CHECKING:
    from dspine.common.protocols import Engine
    from dspine.common.serving.settings import ServerSettings

_MODEL, _NET, _LOAD, _SPECULATE = "Model", "Network", "Load", "Speculation"
_MIB = 2**20


@dataclass(frozen=True)
class ServeOptions:
    """Everything `dspine serve` can be told."""

    model: Annotated[str, flag("`smollm2` (the embedded model), a model folder, or a hub id.", _MODEL)] = EMBEDDED_NAME
    draft_model: Annotated[str, flag("`auto` (the drafter known for the model), a folder, or a hub id.", _MODEL)] = AUTO_DRAFT
    no_draft: Annotated[bool, flag("Plain decoding, no drafter.", _MODEL, "--no-draft")] = False
    backend: Annotated[str, flag("`auto`, `mlx` or `torch`.", _MODEL)] = AUTO
    device: Annotated[str, flag("`auto`, or a device of the backend: cpu, cuda, metal.", _MODEL)] = AUTO
    dtype: Annotated[DType, flag("Number format of weights and activations.", _MODEL)] = DType[AUTO]
    graphs: Annotated[Graphs, flag("Whole rounds as CUDA graphs: where they run (auto), or an error (on).", _MODEL)] = Graphs[
        AUTO
    ]
    served_name: Annotated[str | None, flag("Model id of requests; without it the model's name.", _MODEL)] = None

    host: Annotated[str, flag("Address to listen at; loopback unless told.", _NET)] = "127.0.0.1"
    port: Annotated[int, flag("Port; 0 takes a free one.", _NET)] = 8000
    api_key: Annotated[str | None, flag("Key that requests must bring (`Authorization: Bearer KEY`).", _NET)] = None
    api_key_file: Annotated[str | None, flag("File that holds the key: not seen in process lists.", _NET)] = None
    max_body: Annotated[int, flag("Longest request body in bytes.", _NET)] = 4 * _MIB
    grace: Annotated[float, flag("Seconds that running requests get at shutdown.", _NET)] = 30.0

    max_concurrency: Annotated[int, flag("Sequences that run at once.", _LOAD)] = 8
    max_queue: Annotated[int, flag("Sequences that wait; more get 429.", _LOAD)] = 64
    max_context: Annotated[int | None, flag("Prompt and answer in tokens; without it the model's own.", _LOAD)] = None
    default_max_tokens: Annotated[int, flag("Tokens of an answer where the request names no limit.", _LOAD)] = 512
    prefill_chunk: Annotated[int, flag("Prompt tokens read between two rounds.", _LOAD)] = 512
    prefix_cache: Annotated[int, flag("Prefix cache in MiB; 0 is off.", _LOAD)] = 256
    prefix_grain: Annotated[int, flag("Prompt tokens computed together; prefixes are reused in whole grains.", _LOAD)] = 128
    loose_prefix: Annotated[
        bool, flag("Reuse answers too, not only prompts: faster turns, texts may part at near ties.", _LOAD, "--loose-prefix")
    ] = False
    no_batch: Annotated[bool, flag("Sequences take turns instead of running as one batch.", _LOAD, "--no-batch")] = False

    acceptance: Annotated[Acceptance, flag("Acceptance rule above temperature 0.", _SPECULATE)] = Acceptance[AUTO]
    policy: Annotated[str, flag("Tokens to verify a round, as in `dspine generate`.", _SPECULATE)] = AUTO_POLICY
    calibration: Annotated[str | None, flag("Calibration file; else the one beside the drafter.", _SPECULATE)] = None


def serve(options: ServeOptions) -> None:
    """Serve an OpenAI-compatible endpoint, with speculative decoding where a drafter is known."""
    check_policy_name(options.policy)
    try:
        from dspine.common.serving.server import run
        from dspine.common.serving.settings import graphs_mode
    except ModuleNotFoundError as error:
        install = "python -m pip install 'dspine[server]'"
        raise BackendError(f"`dspine serve` needs {error.name}, which is not installed: {install}") from error
    settings = build_settings(options)
    graphs = graphs_mode(str(options.graphs), options.max_concurrency, not options.no_batch)
    runtime, reason = choose_runtime(options.backend)

    def load_engine() -> Engine:
        return load(
            runtime,
            options.model,
            None if options.no_draft else options.draft_model,
            device=options.device,
            dtype=str(options.dtype),
            backend_reason=reason,
            graphs=graphs,
        )

    sys.exit(run(load_engine, settings, _show))


def build_settings(options: ServeOptions) -> ServerSettings:
    """Flags as settings. Raises DSpineError."""
    from dspine.common.serving.scheduler import SLOT_TOKENS, SchedulerSettings
    from dspine.common.serving.settings import ServerSettings

    return ServerSettings(
        names=(options.served_name or options.model,),
        host=options.host,
        port=options.port,
        api_key=_api_key(options),
        max_context=options.max_context,
        default_max_tokens=options.default_max_tokens,
        max_body_bytes=options.max_body,
        acceptance=str(options.acceptance),
        policy=options.policy,
        calibration=options.calibration,
        grace=options.grace,
        scheduler=SchedulerSettings(
            max_concurrency=options.max_concurrency,
            max_queue=options.max_queue,
            prefill_chunk=options.prefill_chunk,
            prefix_bytes=options.prefix_cache * _MIB,
            prefix_grain=options.prefix_grain,
            exact_prefixes=not options.loose_prefix,
            batch=not options.no_batch,
            slot_tokens=min(options.max_context or SLOT_TOKENS, SLOT_TOKENS),
            needs_slots=str(options.graphs) == "on",
        ),
    )


def _api_key(options: ServeOptions) -> str | None:
    if options.api_key_file is None:
        return options.api_key
    if options.api_key is not None:
        raise BackendError("--api-key and --api-key-file exclude each other: give one")
    try:
        with open(options.api_key_file, encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BackendError(f"--api-key-file {options.api_key_file!r} cannot be read: {error}") from error


def _show(address: str, summary: dict[str, Any]) -> None:
    """The start-up summary for people."""
    console = Console(stderr=True, highlight=False)
    speculation = f"{summary['method']}, block {summary['block_size']}" if summary["speculation"] else "off: no drafter"
    most = summary["cache_bytes_at_most"]
    rows = {
        "model": f"{summary['models'][0]}  ({summary['dtype']} on {summary['device']}, {summary['adapter']})",
        "backend": f"{summary['backend']}  ({summary['backend_reason']})",
        "speculation": speculation,
        "drafter": summary["drafter"] or "none",
        "policy": f"{summary['policy']}  ({summary['policy_reason']})" if summary["speculation"] else "-",
        "batching": f"{'on' if summary['batching'] else 'off'}  ({summary['batching_reason']})",
        "graphs": f"{'on' if summary['graphs'] else 'off'}  ({summary['graphs_reason']})",
        "prompts": summary["prompts"],
        "memory": "not known"
        if most is None
        else f"caches take at most {most / _MIB:.0f} MiB "
        f"({summary['max_concurrency']} sequences of {summary['context_length']} tokens, prefix cache "
        f"{summary['prefix_cache_bytes'] / _MIB:.0f} MiB)",
        "key": "asked for" if summary["api_key"] else "none",
    }
    for label, text in rows.items():
        console.print(f"{label:<12} {text}", markup=False)
    for note in summary["notes"]:
        console.print(f"note: {note}", markup=False)
    console.print(f"page {address}/   API {address}/v1", markup=False)
