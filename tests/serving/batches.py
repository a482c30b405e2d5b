"""Several real sequences in one batch, with drafts that are right for a known number of tokens."""

from __future__ import annotations

import numpy as np
import torch

from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.sampling import SamplingParams
from dspine.common.selection.policies import StaticPolicy
from dspine.common.serving.lengths import CostTable
from dspine.common.serving.rounds import BatchRounds
from tests.helpers.models import VOCAB


class FixedCosts(CostTable):
    """No clock: what a test asserts may not depend on the machine."""

    def observe(self, *round_):
        pass

    observe_host = observe


FREE = FixedCosts({(2, 1): 1.0, (2, 8): 1.0}, {2: 0.01})  # rows cost nothing: everything is verified
PROMPTS = [np.random.default_rng(i).integers(3, VOCAB, size=n).tolist() for i, n in enumerate((5, 17, 40, 9))]


class Primed:
    """The real drafter, whose first drafts are put right from a known text, so that rounds of every length occur."""

    def __init__(self, drafter, texts):
        self.drafter, self.texts, self.config, self.info = drafter, texts, drafter.config, drafter.info
        self.make_cache, self.commit = drafter.make_cache, drafter.commit

    def propose(self, cache, anchor, request):
        return self.mend(cache, self.drafter.propose(cache, anchor, request))

    def mend(self, cache, proposal):
        prompt, text = self.texts[id(cache)]
        start = cache.length - len(prompt) + 1
        right = text[start : start + self.config.num_proposals]
        good = (start * 7 + len(prompt)) % (self.config.num_proposals + 1)
        tokens = proposal.tokens.clone()
        tokens[0, : min(good, len(right))] = torch.tensor(right[:good], dtype=tokens.dtype)
        return type(proposal)(
            tokens, proposal.finite, *[getattr(proposal, n) for n in ("candidates", "q", "confidence", "entropy")]
        )


class PrimedBatcher:
    """Mends the drafts of every sequence of a batcher."""

    def __init__(self, batcher, primed):
        self.batcher, self.primed, self.shares_length = batcher, primed, batcher.shares_length
        self.verify, self.commit, self.commit_drafts = batcher.verify, batcher.commit, batcher.commit_drafts

    def propose(self, caches, anchors, requests):
        made = self.batcher.propose(caches, anchors, requests)
        return [self.primed.mend(cache, proposal) for cache, proposal in zip(caches, made, strict=True)]


def make_loop(target, drafter, prompt, count=24, **sampling):
    acceptance = "point-mass" if sampling else "auto"
    params = DecodingParams(max_tokens=count, sampling=SamplingParams(**sampling), acceptance=acceptance, break_even=0)
    return DecodingLoop(target, drafter, prompt, params, StaticPolicy())


def texts_alone(target, count=24):
    found = []
    for prompt in PROMPTS:
        loop = make_loop(target, None, prompt, count)
        found.append([event.token for event in loop.run()])
    return found


def primed_loops(target, drafter, texts, count=24):
    """Loops over `PROMPTS` whose drafts are mended from `texts`, and the drafter that does it."""
    primed = Primed(drafter, {})
    loops = [make_loop(target, primed, prompt, count) for prompt in PROMPTS]
    for loop, prompt, text in zip(loops, PROMPTS, texts, strict=True):
        primed.texts[id(loop.draft_cache)] = (prompt, text)
    return loops, primed


def make_rounds(engine, batcher):
    """Rounds whose lengths do not follow the clock."""
    rounds = BatchRounds(engine, batcher, FREE)
    rounds.lengths.observe_round = lambda *_: None
    return rounds


def run_batched(engine, batcher, loops, joins=(), leaves=None):
    """Rounds of all loops until they end, a last one alone by its own steps. `joins[i]` is the round in which loop i joins,
    `leaves` {i: round} those that are cancelled; sampled ones are pinned, as with a seed. Returns the sizes of the batches."""
    rounds, sizes, number = make_rounds(engine, batcher), [], 0
    joins, leaves = list(joins) or [0] * len(loops), leaves or {}

    def runs(i):
        return joins[i] <= number < leaves.get(i, 10**6) and loops[i].finish_reason is None

    while any(loop.finish_reason is None and i not in leaves for i, loop in enumerate(loops)):
        here = [loop for i, loop in enumerate(loops) if runs(i)]
        for loop in here:
            while loop.reading_prompt:
                loop.step()
        here = [loop for loop in here if loop.finish_reason is None]
        if len(here) == 1:
            here[0].step()
        elif here:
            assert all(result.events for result in rounds.run(here, [not loop.params.sampling.greedy for loop in here]))
        for loop in here:
            loop.cache.check_integrity()
            assert loop.cache.length == loop.committed
        sizes.append(len(here))
        number += 1
    return sizes
