"""Flags of the command line: declared once as fields of frozen objects, from which the parser is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import typer

from dspine.common.acceptance import RULES
from dspine.common.decoding import DecodingParams
from dspine.common.embedded import EMBEDDED_NAME
from dspine.common.memory import CacheOptions
from dspine.common.models import AUTO_DRAFT
from dspine.common.runtimes import AUTO
from dspine.common.sampling import SamplingParams
from dspine.common.selection.policies import AUTO_POLICY

_SAMPLING, _DECODING = SamplingParams(), DecodingParams()

Acceptance = StrEnum("Acceptance", [(rule, rule) for rule in (AUTO, *RULES)])
Graphs = StrEnum("Graphs", [(name, name) for name in (AUTO, "on", "off")])
DType = StrEnum("DType", [(name, name) for name in (AUTO, "bfloat16", "float32")])

_MODEL, _SAMPLE, _SPECULATE, _OUTPUT = "Model", "Sampling", "Speculation", "Output"
_CACHE, _PLAIN = "Caches", CacheOptions()


def flag(help_text: str, panel: str, *names: str) -> Any:
    """A typer option in a panel of the help page; `names` where it has more than the field's own."""
    return typer.Option(*names, help=help_text, rich_help_panel=panel)


@dataclass(frozen=True)
class GenerateOptions:
    """Everything `dspine generate` can be told. Names follow `mlx_lm.generate` where it has them."""

    prompt: Annotated[str, flag("The prompt; `-` reads standard input.", _MODEL, "--prompt", "-p")]
    model: Annotated[str, flag("`smollm2` (the embedded model), a model folder, or a hub id.", _MODEL)] = EMBEDDED_NAME
    draft_model: Annotated[str, flag("`auto` (the drafter known for the model), a folder, or a hub id.", _MODEL)] = AUTO_DRAFT
    system_prompt: Annotated[str | None, flag("System prompt; without it the template's own default.", _MODEL)] = None
    raw: Annotated[bool, flag("Give the prompt to the model as it is.", _MODEL, "--raw", "--no-chat-template")] = False
    backend: Annotated[str, flag("`auto`, `mlx` or `torch`.", _MODEL)] = AUTO
    device: Annotated[str, flag("`auto`, or a device of the backend: cpu, cuda, metal.", _MODEL)] = AUTO
    dtype: Annotated[DType, flag("Number format of weights and activations.", _MODEL)] = DType[AUTO]
    graphs: Annotated[Graphs, flag("Whole rounds as CUDA graphs.", _MODEL)] = Graphs[AUTO]

    max_kv_size: Annotated[int | None, flag("Keep K/V of the first 4 and the newest tokens, so many in all.", _CACHE)] = None
    kv_bits: Annotated[int | None, flag("Keep K/V at 4 or 8 bits.", _CACHE)] = None
    kv_group_size: Annotated[int, flag("Numbers that share a scale in K/V of few bits.", _CACHE)] = _PLAIN.kv_group_size
    prefill_step_size: Annotated[int, flag("Prompt tokens to read at a time.", _CACHE)] = _DECODING.prefill_chunk
    prompt_cache_file: Annotated[
        str | None, flag("Go on from a prompt that `dspine cache-prompt` has read.", _CACHE, "--prompt-cache-file")
    ] = None

    max_tokens: Annotated[int, flag("Tokens to generate at most.", _SAMPLE, "--max-tokens", "-m")] = _DECODING.max_tokens
    ignore_eos: Annotated[bool, flag("Do not stop at the model's stop tokens.", _SAMPLE, "--ignore-eos")] = False
    temp: Annotated[float, flag("Temperature; 0 is greedy.", _SAMPLE)] = _SAMPLING.temperature
    top_p: Annotated[float, flag("Smallest set of tokens with this mass; 1 is off.", _SAMPLE)] = _SAMPLING.top_p
    top_k: Annotated[int, flag("The most likely tokens only; 0 is off.", _SAMPLE)] = _SAMPLING.top_k
    min_p: Annotated[float, flag("Tokens this likely relative to the best; 0 is off.", _SAMPLE)] = _SAMPLING.min_p
    seed: Annotated[int, flag("Seed of all draws.", _SAMPLE)] = _SAMPLING.seed
    repetition_penalty: Annotated[float, flag("On prompt and output; 1 is off.", _SAMPLE)] = _SAMPLING.repetition_penalty
    presence_penalty: Annotated[float, flag("On the output, once a token; 0 is off.", _SAMPLE)] = _SAMPLING.presence_penalty
    frequency_penalty: Annotated[float, flag("On the output, each time; 0 is off.", _SAMPLE)] = _SAMPLING.frequency_penalty

    no_draft: Annotated[bool, flag("Plain decoding, no drafter.", _SPECULATE, "--no-draft")] = False
    acceptance: Annotated[Acceptance, flag("Acceptance rule; all are lossless.", _SPECULATE)] = Acceptance[AUTO]
    policy: Annotated[
        str,
        flag(
            "Tokens to verify a round: `auto`, `full`, `static:W`; with a calibration: `dcut`, `evict`, `dspark`, `nominal`, "
            "`hybridspec`.",
            _SPECULATE,
        ),
    ] = AUTO_POLICY
    calibration: Annotated[str | None, flag("Calibration file; else the one beside the drafter.", _SPECULATE)] = None
    block_size: Annotated[int | None, flag("Short for `--policy static:N`, anchor included.", _SPECULATE)] = None
    compare: Annotated[bool, flag("Decode plainly too and print the speed-up.", _OUTPUT, "--compare")] = False
    json: Annotated[bool, flag("One JSON line on standard output; text goes to stderr.", _OUTPUT, "--json")] = False


def command_from(options_type: type, run: Callable[[Any], None]) -> Callable[..., None]:
    """A function for typer whose parameters are the fields of `options_type`; it calls `run` with the frozen object."""
    hints = get_type_hints(options_type, include_extras=True)
    parameters = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if item.default is MISSING else item.default,
            annotation=hints[item.name],
        )
        for item in fields(options_type)
    ]

    def command(**values: Any) -> None:
        run(options_type(**values))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = run.__doc__
    return command
