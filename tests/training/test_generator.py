"""Batched generation: every slot equals decoding it alone by the plain forward, whatever its neighbours are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspine.common.errors import DSpineError
from dspine.common.sampling import DRAW, uniforms
from dspine_cuda.training.generator import BatchGenerator, Job
from dspine_cuda.training.loops import TAIL, cut_loop, looping_tails
from dspine_cuda.training.masks import document_mask
from dspine_cuda.training.target import FrozenTarget, load_frozen_target
from tests.training.toys import VOCAB, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> FrozenTarget:
    folder = write_target(tmp_path_factory.mktemp("target"))
    return load_frozen_target(folder, torch.device("cpu"), torch.float32)


def plain_text(target: FrozenTarget, job: Job, stops: set[int], seed: int) -> list[int]:
    """One sequence, the whole forward again for every token."""
    ids = [int(t) for t in job.tokens]
    draws = uniforms(seed, job.number, 0, 200)[:, DRAW]
    for _ in range(job.limit):
        tokens = torch.tensor([ids])
        mask = document_mask(torch.zeros_like(tokens))
        _, last = target.features(tokens, torch.arange(len(ids))[None], mask, (0,))
        logits = target.head(last[0, -1]).double().numpy()
        if job.temperature == 0:
            token = int(logits.argmax())
        else:
            p = np.exp((logits - logits.max()) / job.temperature)
            token = int(np.searchsorted(np.cumsum(p / p.sum()), draws[len(ids)], side="right"))
        ids.append(token)
        if token in stops:
            break
    return ids[len(job.tokens) :]


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_every_slot_equals_plain_decoding(target: FrozenTarget, batch: int) -> None:
    rng = np.random.default_rng(0)
    stops = {2, 7, 11, 30}
    jobs = [Job(i, rng.integers(3, VOCAB, int(rng.integers(1, 9))), int(rng.integers(1, 40)), 0.9 * (i % 2)) for i in range(11)]
    generator = BatchGenerator(target, capacity=50, batch=batch, stop_ids=stops, seed=5, cut_loops=False)
    answers = {answer.job.number: answer for answer in generator.run(iter(jobs))}
    assert sorted(answers) == list(range(11))
    reasons = set()
    for job in jobs:
        want = plain_text(target, job, stops, 5)
        assert answers[job.number].tokens.tolist() == want
        assert answers[job.number].reason == ("stop" if want[-1] in stops else "length")
        reasons.add(answers[job.number].reason)
    assert reasons == {"stop", "length"}
    again = list(generator.run(jobs[:2]))  # a used generator starts afresh
    assert [a.tokens.tolist() for a in sorted(again, key=lambda a: a.job.number)] == [
        answers[i].tokens.tolist() for i in (0, 1)
    ]


def test_loops_are_cut(target: FrozenTarget) -> None:
    text = np.arange(30)
    assert cut_loop(text) is None
    loop = np.concatenate([text, np.tile([40, 41, 42, 43, 44, 45, 46, 47, 48, 49], 3)])
    assert cut_loop(loop) == 30 + 20 and cut_loop(loop[:-1]) is None
    assert cut_loop(np.concatenate([text, np.full(30, 9)])) == 46  # dashes: 16 stay
    assert cut_loop(np.concatenate([text, np.full(20, 50), text])) is None
    tails = np.stack([np.concatenate([np.full(TAIL - 60, 7), part]) for part in (loop, np.arange(60))])
    assert looping_tails(tails, np.array([60, 60])).tolist() == [True, False]
    assert looping_tails(tails, np.array([15, 60])).tolist() == [False, False]  # the prompt may loop
    jobs = [Job(i, np.array([3 + i, 5]), 180) for i in range(4)]  # greedy and random weights: it loops
    free = {a.job.number: a for a in BatchGenerator(target, capacity=200, batch=2, stop_ids=[], cut_loops=False).run(jobs)}
    cut = {a.job.number: a for a in BatchGenerator(target, capacity=200, batch=2, stop_ids=[]).run(jobs)}
    assert any(a.reason == "loop" for a in cut.values())
    for number, answer in cut.items():
        whole = free[number].tokens
        assert answer.tokens.tolist() == whole[: len(answer.tokens)].tolist()
        assert len(answer.tokens) == (cut_loop(whole) or len(whole))


def test_what_does_not_fit_is_refused(target: FrozenTarget) -> None:
    with pytest.raises(DSpineError, match="sequences of 999 tokens asked for, the target's context holds 256"):
        BatchGenerator(target, capacity=999, batch=1, stop_ids=[])
    generator = BatchGenerator(target, capacity=8, batch=1, stop_ids=[])
    for job in (Job(3, np.arange(8), 1), Job(3, np.zeros(0, dtype=np.int64), 1), Job(3, np.arange(2), 0)):
        with pytest.raises(DSpineError, match="job 3: a prompt of"):
            list(generator.run([job]))
