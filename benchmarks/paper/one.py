"""Train and score one variant (a child process of the runner), or make the target's answers (`--variant texts`).

Exit code 3: out of time, to be continued. Results: OUT/<variant>/result.json; on the way train.json (training is over) and
scores.json (the scores so far), so that a cut run repeats neither. A result counts only for the settings that it was made with.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from time import perf_counter
from typing import Any

from benchmarks.paper.options import Options, add_arguments, options_of
from benchmarks.paper.variants import VARIANTS, Score, Variant
from benchmarks.provenance import provenance
from dspine.common.errors import DSpineError
from dspine.common.files import write_json
from dspine_cuda.training.checkpointing import differences
from dspine_cuda.training.config import complete_fingerprint, load_train_config
from dspine_cuda.training.files import read_json

UNFINISHED = 3
DRAFT_CONTEXT, DRAFT_ROUNDS = 512, 50
BEGUN = perf_counter()


def train_settings(variant: Variant, options: Options, minutes: float | None) -> Any:
    """The trainer's config of one variant; the experiments' own `--set` comes last."""
    folder = options.out / variant.name
    overrides = [f"data.path={options.data}", f"run.output_dir={folder}", f"run.seed={options.seed}", "run.export_bits=null"]
    overrides += [f"run.device={options.device}", f"run.dtype={options.dtype}", "run.keep_checkpoints=1", "run.progress=true"]
    overrides += [*variant.overrides, *options.overrides]
    if minutes is not None:
        overrides.append(f"run.time_limit_minutes={minutes}")
    return load_train_config(options.config, overrides)


def train_variant(variant: Variant, options: Options, minutes: float | None) -> dict[str, Any] | None:
    """The trainer's summary, or None where time ran out before the last step. A training that is over is not begun again."""
    from dspine_cuda.training.loop import train

    folder = options.out / variant.name
    path = folder / "train.json"
    settings = train_settings(variant, options, minutes)
    made_with = _settled(settings.fingerprint())
    if path.is_file():
        summary = json.loads(path.read_text(encoding="utf-8"))
        changed = differences(summary.pop("fingerprint", made_with), made_with)
        if changed:
            raise DSpineError(f"{path}: trained with other settings ({'; '.join(changed)}); use another --out")
        return summary
    summary = train(settings, resume=any((folder / "checkpoints").glob("step-*.pt")))
    if summary["steps"] < summary["max_steps"]:
        return None
    write_json(path, summary | {"fingerprint": made_with})
    return summary


def load_pair(variant: Variant, options: Options, model: str) -> tuple[Any, Any]:
    """(drafter, frozen target)."""
    import torch

    from dspine.common.models import resolve_model
    from dspine_cuda.drafter import load_drafter
    from dspine_cuda.training.devices import pick_device
    from dspine_cuda.training.target import load_frozen_target

    target = load_frozen_target(resolve_model(model), pick_device(options.device), getattr(torch, options.dtype))
    return load_drafter(options.out / variant.name / "drafter", target, whole=True), target


def eval_settings(options: Options, model: str) -> Any:
    """What the target's answers depend on."""
    from dspine_cuda.training.eval_command import EvalSettings

    return EvalSettings(
        drafter=None, prompts=options.prompts, model=model, count=options.count, temperatures=options.temperatures,
        max_tokens=options.max_tokens, seed=options.seed, device=options.device, dtype=options.dtype, acceptance="rejection",
        texts=options.out / "texts", progress=False,
    )  # fmt: skip


def texts_at(options: Options, target: Any, model: str, heat: float) -> list[Any]:
    """The target's answers to the evaluation prompts, made once for all variants."""
    from dspine.common.models import resolve_model
    from dspine.common.tokenizer import load_tokenizer
    from dspine_cuda.training.eval_command import texts_of
    from dspine_cuda.training.eval_sets import read_sets

    sets = read_sets(options.prompts, options.count)
    return texts_of(eval_settings(options, model), target, load_tokenizer(resolve_model(model)), sets, heat)


def with_top_k(drafter: Any, top_k: int) -> Any:
    """The drafter reading another number of candidates."""
    dspine = dataclasses.replace(drafter.config.dspine, top_k=top_k)
    drafter.config = dataclasses.replace(drafter.config, dspine=dspine)
    return drafter


def draft_milliseconds(drafter: Any, batch: int = 1, rounds: int = DRAFT_ROUNDS) -> float:
    """Median time of one draft behind a context of DRAFT_CONTEXT tokens; the first fifth of the rounds does not count."""
    import statistics

    import torch

    from dspine.common.protocols import DraftRequest
    from dspine_cuda.draft_cache import DraftCache

    weights, config = drafter.model.fc.weight, drafter.config
    cache = DraftCache(config, DRAFT_CONTEXT + config.block_size, weights.dtype, weights.device, batch=batch)
    cache.write_all(0, torch.randn_like(cache._store[..., :DRAFT_CONTEXT, :]))
    cache.length = DRAFT_CONTEXT
    anchor, times = torch.full((batch,), 5, device=weights.device), []
    for _ in range(rounds):
        started = perf_counter()
        drafter.propose(cache, anchor, DraftRequest()).tokens.cpu()  # waits for the device
        times.append(1000 * (perf_counter() - started))
    return statistics.median(times[rounds // 5 :])


def score_variant(variant: Variant, options: Options, model: str, minutes: float | None) -> dict[str, Any] | None:
    """Acceptance of every wanted score at every temperature, and what a draft costs; None where time ran out."""
    from dspine_cuda.training.eval_sets import score_texts

    path = options.out / variant.name / "scores.json"
    scores: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    missing = missing_scores(variant, options, scores)
    if not missing:
        return scores
    drafter, target = load_pair(variant, options, model)
    trained = drafter.config
    for score in missing:
        if minutes is not None and perf_counter() - BEGUN > 60 * minutes:
            return None
        drafter.config = trained
        reader = drafter if score.top_k is None else with_top_k(drafter, score.top_k)
        scores[score.name] = _score(reader, target, score, options, model, score_texts)
        write_json(path, scores)
    return scores


def _score(drafter: Any, target: Any, score: Score, options: Options, model: str, score_texts: Any) -> dict[str, Any]:
    blocks = {}
    for heat in options.temperatures:
        if heat == 0 and score.draft_heat is not None:
            continue
        own = None if score.draft_heat is None else score.draft_heat * heat
        blocks[f"{heat:g}"] = score_texts(
            drafter, target, texts_at(options, target, model, heat), temperature=heat, acceptance="rejection",
            seed=options.seed, independent=score.independent, draft_temperature=own,
        )  # fmt: skip
    return {
        "temperatures": blocks,
        "draft_ms": draft_milliseconds(drafter),
        "draft_ms_batch_32": draft_milliseconds(drafter, 32),
    }


def run_variant(variant: Variant, options: Options, minutes: float | None) -> int:
    """Train (or go on), score, write the result, drop the checkpoints. minutes: of this process, imports included."""
    folder = options.out / variant.name
    left = None if minutes is None else max(0.01, minutes - (perf_counter() - BEGUN) / 60)
    summary = train_variant(variant, options, left)
    if summary is None:
        return UNFINISHED
    settings = train_settings(variant, options, None)
    scores = score_variant(variant, options, settings.model.target, minutes)
    if scores is None:
        return UNFINISHED
    config = settings.model_dump(mode="json", exclude={"run"})
    config["schedule"]["max_steps"] = summary["max_steps"]
    result = {
        "variant": variant.name, "note": variant.note, "config": config,
        "train": {k: v for k, v in summary.items() if k != "drafter"}, "seed": options.seed, "evaluation": options.evaluation,
        "scores": scores, "provenance": provenance(),
    }  # fmt: skip
    if variant.name in options.probed:
        from benchmarks.paper.probe import probe_variant

        result["probes"] = probe_variant(variant.name, options)
    result["seconds_here"] = perf_counter() - BEGUN
    write_json(folder / "result.json", result)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return 0


def make_texts(options: Options) -> int:
    """Only the target's answers."""
    import torch

    from dspine.common.models import resolve_model
    from dspine_cuda.training.devices import pick_device
    from dspine_cuda.training.target import load_frozen_target

    model = train_settings(VARIANTS["full"], options, None).model.target
    target = load_frozen_target(resolve_model(model), pick_device(options.device), getattr(torch, options.dtype))
    for heat in options.temperatures:
        texts_at(options, target, model, heat)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--variant", required=True, choices=["texts", *VARIANTS])
    parser.add_argument("--probe", action="store_true", help="fit the probes of experiment d too")
    parser.add_argument("--time-limit", type=float, help="minutes")
    args = parser.parse_args(arguments)
    options = dataclasses.replace(options_of(args), probed=(args.variant,) if args.probe else ())
    try:
        if args.variant == "texts":
            return make_texts(options)
        return run_variant(VARIANTS[args.variant], options, args.time_limit)
    except DSpineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def read_results(options: Options) -> dict[str, Any]:
    """Finished variants by name: OUT/results.json, and every OUT/<variant>/result.json over it."""
    results: dict[str, Any] = {}
    if options.results.is_file():
        results = read_json(options.results)
    for path in sorted(options.out.glob("*/result.json")):
        results[path.parent.name] = read_json(path)
    return results


def is_finished(name: str, options: Options, results: dict[str, Any] | None = None) -> bool:
    """Whether the variant's result holds every wanted score at every temperature (and the probes, where asked for)."""
    result = (read_results(options) if results is None else results).get(name)
    if result is None or (name in options.probed and "probes" not in result):
        return False
    return not missing_scores(VARIANTS[name], options, result["scores"])


def missing_scores(variant: Variant, options: Options, scores: dict[str, Any]) -> list[Score]:
    """Wanted scores that are not there, or not at every temperature."""
    return [
        score
        for score in variant.wanted(options.few_scores)
        if score.name not in scores
        or any(
            f"{heat:g}" not in scores[score.name]["temperatures"]
            for heat in options.temperatures
            if heat > 0 or score.draft_heat is None
        )
    ]


def check_comparable(name: str, result: dict[str, Any], options: Options) -> None:
    """DSpineError where a finished variant was trained or scored with other settings than this call's."""
    stored = {**result["config"], "seed": result["seed"]}
    wanted = train_settings(VARIANTS[name], options, None).fingerprint()
    changed = differences(_settled(complete_fingerprint(stored)), _settled(wanted))
    there = result.get("evaluation", {})
    changed += [f"{k}: {there[k]!r} there, {v!r} now" for k, v in options.evaluation.items() if k in there and there[k] != v]
    if changed:
        raise DSpineError(
            f"{options.out / name}: made with other settings ({'; '.join(changed)}), so it cannot stand beside what this call "
            f"trains; use another --out, or the old settings"
        )


def _settled(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Without what moves no figure: places, caches and the size of chunks."""
    plain = json.loads(json.dumps(fingerprint))
    for section, names in (
        ("data", ("path", "cache_dir", "features")),
        ("loss", ("chunk_rows",)),
        ("schedule", ("max_minutes",)),
    ):
        for key in names:
            plain[section].pop(key, None)
    return plain


if __name__ == "__main__":
    sys.exit(main())
