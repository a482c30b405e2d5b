"""Batched generation with cached state against the whole forward; loops; shards; the routing report."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspine.common.errors import DSpineError
from dspine_cuda.training.data import Conversation, load_conversations
from dspine_cuda.training.hybrid_generate import (
    DecodeState,
    GenerationPlan,
    cut_loop,
    decode_step,
    generate,
    generate_shards,
    plan_batches,
    prefill,
)
from dspine_cuda.training.hybrid_model import HybridModel
from dspine_cuda.training.hybrid_report import held_out_pass, novelty, novelty_correlation
from tests.training.hybrid_toys import naive_novelty, restarting, toy_hybrid, toy_tokens


@torch.no_grad()
def plain_greedy(model: HybridModel, prompt: np.ndarray, count: int) -> list[int]:
    tokens = torch.from_numpy(prompt)[None]
    for _ in range(count):
        logits = model.logits(model(tokens, restarting(tokens.shape[1]))[0][:, -1])
        tokens = torch.cat([tokens, logits.argmax(dim=-1)[:, None]], dim=1)
        if int(tokens[0, -1]) == model.shape.eos_token_id:
            break
    return tokens[0, len(prompt) :].tolist()


def prompts_of(*lengths: int) -> list[np.ndarray]:
    return [toy_tokens(1, length, seed=length)[0].numpy() for length in lengths]


def test_batched_greedy_equals_the_whole_forward() -> None:
    """Prompts of 1, 2 and 3 tokens, of one chunk and beyond, side by side in one batch."""
    model, prompts = toy_hybrid(), prompts_of(1, 2, 3, 40, 64, 90)
    answers = generate(model, prompts, [0.0] * len(prompts), 24, seed=0)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tolist() == plain_greedy(model, prompt, 24)


@torch.no_grad()
def test_steps_from_any_prompt_give_the_whole_forward_s_logits() -> None:
    """Random tokens are fed, so that states and windows go through everything."""
    model, prompts, fed = toy_hybrid(), prompts_of(1, 2, 3, 40, 64, 90), toy_tokens(6, 20, seed=8)
    lengths = torch.tensor([len(p) for p in prompts])
    padded = torch.full((6, 90), 5)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.from_numpy(prompt)
    state = DecodeState(model, 6, 110)
    logits = [prefill(model, state, padded, lengths)]
    logits += [decode_step(model, state, fed[:, step], 90 + step + 1) for step in range(20)]
    for row, prompt in enumerate(prompts):
        whole = torch.cat([torch.from_numpy(prompt), fed[row]])[None]
        want = model.logits(model(whole, restarting(whole.shape[1]))[0])[0, len(prompt) - 1 :]
        np.testing.assert_allclose(torch.stack([step[row] for step in logits]), want, atol=3e-4)


def test_sampling_follows_the_model_s_distribution() -> None:
    model, prompt = toy_hybrid(), prompts_of(5)[0]
    draws = np.array([a[0] for a in generate(model, [prompt] * 4000, [1.0] * 4000, 1, seed=1)])
    with torch.no_grad():
        p = model.logits(model(torch.from_numpy(prompt)[None], restarting(5))[0][0, -1]).softmax(dim=-1).double().numpy()
    counts = np.bincount(draws, minlength=len(p))
    rare = p * 4000 < 20  # counted together
    assert 0 < rare.sum() < len(p) - 10
    observed, expected = np.append(counts[~rare], counts[rare].sum()), 4000 * np.append(p[~rare], p[rare].sum())
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_an_answer_ends_with_the_end_token(monkeypatch) -> None:
    model = toy_hybrid()
    favourite = plain_greedy(model, prompts_of(7)[0], 3)[2]
    object.__setattr__(model.shape, "eos_token_id", favourite)
    answer = generate(model, prompts_of(7), [0.0], 24, seed=0)[0].tolist()
    assert answer[-1] == favourite and answer.count(favourite) == 1 and len(answer) <= 3


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (list(range(50)), 50),
        ([1, 2, 3, *range(10, 30), *range(10, 30), *range(10, 30), 5], 43),
        ([1, 2, 3, *range(10, 30), *range(10, 30), *range(10, 29), 5], 63),  # the third copy is not whole
        ([9, *[4] * 30], 17),
        ([9, *[4] * 16, 7], 18),
        ([*[4, 5] * 12], 16),
        ([], 0),
    ],
)
def test_loops_are_cut(answer: list[int], kept: int) -> None:
    assert len(cut_loop(np.array(answer, dtype=np.int64))) == kept


def test_batches_leave_out_repeats_and_keep_held_out_prompts_apart() -> None:
    prompts = prompts_of(*range(4, 24)) + prompts_of(6, 7, 30)
    plan = GenerationPlan(batch=6, max_prompt=20, holdout=3, sampled=0.5)
    batches = list(plan_batches(prompts, plan))
    chosen = [index for indices, _ in batches for index in indices]
    assert batches[0] == ([20, 21], [0.0, 0.0])  # 22 is too long
    assert sorted(chosen) == [i for i in range(17) if len(prompts[i]) not in (6, 7)] + [20, 21]
    heats = [t for _, warm in batches[1:] for t in warm]
    assert 0.0 in heats and set(heats) <= {0.0, 0.7, 1.0} and len(set(heats)) > 1


def test_shards_are_what_the_trainer_reads(tmp_path) -> None:
    model, prompts = toy_hybrid(), prompts_of(*range(5, 45))
    plan = GenerationPlan(batch=16, max_new=24, max_prompt=40, holdout=6, shard_tokens=400)
    summary = generate_shards(model, prompts, tmp_path, plan)
    found = load_conversations(tmp_path)
    assert len(summary["shards"]) > 1 and len(found) == summary["conversations"] + summary["held_out"]
    assert sum(len(c.tokens) for c in found) == summary["tokens"]
    last = found[-summary["held_out"] :]
    assert all(c.greedy for c in last) and not all(c.greedy for c in found)
    held_out = {tuple(p.tolist()) for p in prompts[-6:]}
    assert {tuple(c.tokens[: c.prompt_length].tolist()) for c in last} <= held_out
    assert not held_out & {tuple(c.tokens[: c.prompt_length].tolist()) for c in found[: -len(last)]}
    greedy = next(c for c in found if c.greedy)
    answer = greedy.tokens[greedy.prompt_length :].tolist()
    assert answer == plain_greedy(model, greedy.tokens[: greedy.prompt_length].astype(np.int64), len(answer))
    with pytest.raises(DSpineError, match="raise minutes or the holdout"):
        generate_shards(model, prompts, tmp_path, GenerationPlan(minutes=1e-9, holdout=6))


def test_report_counts_what_sets_count() -> None:
    model = toy_hybrid()
    conversations = [Conversation(p, np.arange(len(p)) >= 4) for p in prompts_of(40, 23, 71)]
    perplexity, picks, owners = held_out_pass(model, conversations, batch=2)
    assert picks.shape == (40 + 23 + 71 - 12, 4, 2) and np.bincount(owners).tolist() == [36, 19, 67]
    new = novelty(picks, owners, 8)
    want = [naive_novelty(picks[owners == o][s : s + 16]) for o, n in ((0, 36), (1, 19), (2, 67)) for s in range(0, n - 15, 16)]
    np.testing.assert_array_equal(new, np.stack(want))
    with torch.no_grad():
        losses = []
        for c in conversations:
            tokens = torch.from_numpy(c.tokens)[None]
            logp = model.logits(model(tokens, restarting(len(c.tokens)))[0])[0, :-1].log_softmax(dim=-1)
            losses.append(-logp.gather(1, tokens[0, 1:, None])[:, 0].numpy())
    assert perplexity["all"] == pytest.approx(np.exp(np.concatenate(losses).mean()), rel=1e-4)
    assert perplexity["answers"] == pytest.approx(np.exp(np.concatenate([row[3:] for row in losses]).mean()), rel=1e-4)


def test_correlation_removes_position_means() -> None:
    rng = np.random.default_rng(0)
    falling = np.arange(16, 0, -1)[None, :, None] * 10
    noise = rng.integers(0, 5, (500, 16, 3))
    assert abs(novelty_correlation(falling + noise)["correlation"]) < 0.05
    linked = falling + noise
    linked[..., 2] = 2 * linked[..., 0] - linked[..., 1] + falling[..., 0]
    result = novelty_correlation(linked)
    assert result["correlation"] == pytest.approx(1.0) and result["slope"] == pytest.approx(2.0)
