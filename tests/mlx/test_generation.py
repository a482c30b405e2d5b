"""The whole loop on MLX: greedy text equal to mlx-lm's, threads, and the public API from folders."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspine.common.decoding import DecodingParams, decode
from dspine.common.errors import CheckpointError
from dspine.common.sampling import SamplingParams
from dspine.common.selection.policies import StaticPolicy
from dspine_mlx import generate as api
from dspine_mlx.drafter import load_drafter
from dspine_mlx.targets import load_target
from tests.helpers.drafters import Prompted
from tests.mlx.toys import HIDDEN, VOCAB, drafter_folder, save_model, toy_model, toy_target

PROMPT = [3, 5, 7, 11, 13]
COUNT = 256


@pytest.fixture(scope="module")
def pair():
    """A target and mlx-lm's own greedy text after PROMPT."""
    target = toy_target("qwen3")
    text = [int(t) for t, _ in generate_step(mx.array(PROMPT), target.model, max_tokens=COUNT + 16)]
    assert len(set(text)) > 10
    return target, text


def tokens_of(target: Any, drafter: Any, count: int = COUNT, **options: Any) -> list[int]:
    params = DecodingParams(max_tokens=count, break_even=0.0, prefill_chunk=3, **options)
    return [event.token for event in decode(target, drafter, PROMPT, params)]


@pytest.mark.parametrize("method", ["dspine", "dflash"])
@pytest.mark.parametrize("block", range(2, 17))
def test_s3_greedy_is_mlx_lms(pair, method, block, tmp_path):
    """Tier 1: float32, 256 tokens, every block size, both drafters."""
    target, text = pair
    drafter = load_drafter(drafter_folder(tmp_path / "d", method, block, target.head_weight()), target)
    assert tokens_of(target, Prompted(drafter, PROMPT, text, wrong_every=5)) == text[:COUNT]


@pytest.mark.parametrize("method", ["dspine", "dflash"])
def test_random_drafts_change_nothing(pair, method, tmp_path):
    """Sliding layers and both methods, with the drafter's own (mostly wrong) drafts; and no drafter at all."""
    target, text = pair
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    drafter = load_drafter(drafter_folder(tmp_path / "d", method, 5, target.head_weight(), **types), target)
    assert tokens_of(target, drafter, 40) == text[:40]
    assert tokens_of(target, None, 40) == text[:40]


@pytest.mark.parametrize("method, rule", [("dspine", "rejection"), ("dspine", "point-mass"), ("dflash", "rejection")])
def test_sampling_runs_and_repeats(pair, method, rule, tmp_path):
    """Same seed, same tokens; another seed, other tokens; and every draw lies in the target's top 5."""
    target, _ = pair
    drafter = load_drafter(drafter_folder(tmp_path / "d", method, 5, target.head_weight()), target)

    def sample(seed: int) -> list[int]:
        return tokens_of(target, drafter, 24, acceptance=rule, sampling=SamplingParams(1.0, top_k=5, seed=seed))

    first = sample(1)
    assert sample(1) == first and sample(2) != first
    logits = target.model(mx.array([PROMPT + first]))[0, len(PROMPT) - 1 : -1]
    top = np.argsort(-np.array(logits), axis=-1)[:, :5]
    assert all(token in row for token, row in zip(first, top, strict=True))


def test_q1_non_finite_drafts_decode_plainly(pair, tmp_path, caplog):
    target, text = pair
    drafter = load_drafter(drafter_folder(tmp_path / "d", "dspine", 5, target.head_weight()), target)
    drafter.model.norm.weight = drafter.model.norm.weight * mx.array(float("inf"))
    params = DecodingParams(max_tokens=20)
    with caplog.at_level(logging.WARNING, "dspine"):
        events = list(decode(target, drafter, PROMPT, params))
    assert [event.token for event in events] == text[:20]
    assert events[-1].stats.non_finite_drafts > 5 and not any(event.drafted for event in events)
    assert len(caplog.records) == 1 and "not finite" in caplog.text


# -- V1: threads -----------------------------------------------------------------------------------------------------------


def in_thread(work: Callable[[], Any]) -> Any:
    """Run on a fresh thread; hand over its result or its exception."""
    box: dict[str, Any] = {}

    def body() -> None:
        try:
            box["result"] = work()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            box["error"] = error

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(120)
    assert not thread.is_alive(), "the worker hangs"
    if "error" in box:
        raise box["error"]
    return box["result"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Loaded from folders on the main thread. YaRN keeps lazily made tables outside the parameters (mlx-lm 1256)."""
    folder = tmp_path_factory.mktemp("v1")
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    model, config = toy_model("llama", rope_scaling=yarn, max_position_embeddings=2048)
    target = load_target(save_model(folder / "target", model, config))
    head = target.head_weight()
    drafter = load_drafter(drafter_folder(folder / "drafter", "dspine", 5, head, rope_scaling=yarn), target)
    return target, drafter


def test_v1_worker_threads_then_main(loaded):
    target, drafter = loaded
    first = in_thread(lambda: tokens_of(target, drafter, 40))
    second = in_thread(lambda: tokens_of(target, drafter, 40))
    assert first == second == tokens_of(target, drafter, 40)
    assert first == [int(t) for t, _ in generate_step(mx.array(PROMPT), target.model, max_tokens=40)]


def test_v1_bfloat16_pair_on_a_worker(tmp_path):
    """Loaded on the main thread, every cast included, and first used by a worker."""
    folder = tmp_path / "target"
    target = load_target(save_model(folder, *toy_model("qwen3")), dtype="bfloat16")
    drafter = load_drafter(drafter_folder(tmp_path / "drafter", "dspine", 5, target.head_weight()), target)
    assert len(in_thread(lambda: tokens_of(target, drafter, 12))) == 12


def test_v1_two_threads_at_once(loaded):
    target, drafter = loaded
    want = tokens_of(target, drafter, 30)
    results: list[Any] = [None, None]

    def work(slot: int) -> None:
        results[slot] = tokens_of(target, drafter, 30)

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [want, want]


def test_v1_one_generator_over_many_threads(loaded):
    """A server may ask for each next token from another thread of its pool."""
    target, drafter = loaded
    events = decode(target, drafter, PROMPT, DecodingParams(max_tokens=24, break_even=0.0))
    got = [in_thread(lambda: next(events)).token for _ in range(24)]
    assert got == tokens_of(target, drafter, 24)


def test_v1_1200_tokens_on_a_worker(loaded):
    target, drafter = loaded
    params = DecodingParams(max_tokens=1200)
    events = in_thread(lambda: list(decode(target, drafter, PROMPT, params)))
    assert len(events) == 1200 and events[-1].finish_reason == "length"


# -- the public API ----------------------------------------------------------------------------------------------------------


def save_tokenizer(folder: Path) -> None:
    """One word a token: w0 .. w95."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", unk_token="w0").save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("api")
    model, config = toy_model("llama", seed=1)
    target = save_model(base / "target", model, config)
    save_tokenizer(target)
    return target, drafter_folder(base / "drafter", "dspine", 6, np.array(model.lm_head.weight)), model


def test_load_and_generate(folders):
    target, drafter, model = folders
    engine = api.load(str(target), str(drafter))
    assert (engine.runtime, engine.drafter.info["method"]) == ("mlx", "dspine")
    want = [int(t) for t, _ in generate_step(mx.array(PROMPT), model, max_tokens=40)]
    result = api.generate(engine, PROMPT, max_tokens=40, ignore_eos=True)
    assert result.token_ids == want and result.finish_reason == "length" and result.acceptance == "greedy"
    steps = list(api.stream_generate(engine, "w3 w5 w7 w11 w13", max_tokens=40, ignore_eos=True, raw=True))
    assert [step.token for step in steps] == want
    assert "".join(step.text for step in steps).split() == result.text.split()
    assert api.generate(engine, PROMPT, max_tokens=40, ignore_eos=True, draft=False).token_ids == want


def test_plain_engine_and_wrong_drafter(folders, tmp_path):
    target, _, _ = folders
    engine = api.load(str(target), None)
    assert engine.drafter is None and engine.draft_model is None
    head = np.random.default_rng(0).normal(size=(VOCAB, HIDDEN))
    other = drafter_folder(tmp_path / "other", "dspine", 6, head, num_target_layers=9)
    with pytest.raises(CheckpointError, match="made for another target"):
        api.load(str(target), str(other))


def test_static_policy_on_mlx(pair, tmp_path):
    target, text = pair
    drafter = load_drafter(drafter_folder(tmp_path / "d", "dspine", 8, target.head_weight()), target)
    params = DecodingParams(max_tokens=40, break_even=0.0)
    events = list(decode(target, Prompted(drafter, PROMPT, text, 7), PROMPT, params, StaticPolicy(4)))
    assert [event.token for event in events] == text[:40]
    assert max(events[-1].stats.verified_lengths) == 4
