"""The loop in pieces: steps, rules on the logits, text that ends inside a block, log-probabilities, reused prefixes."""

from __future__ import annotations

import numpy as np
import pytest

from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.errors import DSpineError
from dspine.common.sampling import SamplingParams
from dspine.common.selection.policies import StaticPolicy
from tests.helpers.toys import ToyTarget, markov_logits, oracle_drafter

VOCAB, PROMPT = 23, [3, 1, 4, 1, 5]


def make_loop(max_tokens=24, wrong_every=4, block=6, rules=(), watch=None, draft=True, **params):
    logits_of = markov_logits(VOCAB, seed=3)
    target = ToyTarget(logits_of, VOCAB)
    drafter = oracle_drafter(logits_of, PROMPT, block, wrong_every) if draft else None
    params = DecodingParams(max_tokens=max_tokens, **params)
    return DecodingLoop(target, drafter, PROMPT, params, StaticPolicy(), rules=rules, watch=watch)


def tokens_of(loop):
    return [event.token for event in loop.run()]


def test_steps_are_the_run():
    whole = tokens_of(make_loop())
    loop, pieces, chunks = make_loop(prefill_chunk=2), [], 0
    while loop.finish_reason is None:
        was_reading = loop.reading_prompt
        result = loop.step()
        chunks += was_reading
        pieces += [event.token for event in result.events]
        assert len(loop.cache.tokens) == loop.committed
        assert result.accepted <= len(result.drafts)
    assert pieces == whole and chunks == 3 and loop.finish_reason == "length"


class Ban:
    """A rule that forbids some tokens."""

    needs_drafts = True

    def __init__(self, banned):
        self.banned, self.heard, self.seen_drafts = banned, [], []

    def apply(self, logits, drafts):
        assert logits.shape[1] == len(drafts) + 1
        self.seen_drafts.append(list(drafts))
        logits = logits.copy()
        logits[..., self.banned] = -np.inf
        return logits

    def emitted(self, tokens):
        self.heard += tokens


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.9, seed=5)])
def test_rule_holds_for_drafts_and_replacements(sampling):
    banned = tokens_of(make_loop())[:1]
    rule, plain_rule = Ban(banned), Ban(banned)
    acceptance = "greedy" if sampling.greedy else "point-mass"
    tokens = tokens_of(make_loop(rules=[rule], sampling=sampling, acceptance=acceptance))
    assert not set(tokens) & set(banned) and rule.heard == tokens and any(rule.seen_drafts)
    plain = tokens_of(make_loop(rules=[plain_rule], sampling=sampling, draft=False))
    assert not sampling.greedy or plain == tokens  # greedy text does not depend on the drafter


def test_watch_ends_inside_a_block():
    whole = tokens_of(make_loop(wrong_every=0))
    for end in range(len(whole)):
        seen = []

        def watch(token, seen=seen, end=end):
            seen.append(token)
            return len(seen) == end + 1

        loop = make_loop(wrong_every=0, watch=watch)
        assert tokens_of(loop) == whole[: end + 1] == seen
        assert loop.finish_reason == "stop" and loop.stats.generated_tokens == end + 1
        assert loop.cache.tokens == PROMPT + whole[:end]  # nothing behind the end is cached
        assert loop.stats.accepted_tokens <= end


@pytest.mark.parametrize("wrong_every", [0, 2, 3])
def test_logprobs_are_the_targets_own(wrong_every):
    loop = make_loop(wrong_every=wrong_every, top_logprobs=3, sampling=SamplingParams(frequency_penalty=1.0))
    context, kinds = list(PROMPT), set()
    for event in loop.run():
        row = loop.target.logits_of(context)
        wanted = row - np.log(np.exp(row).sum())
        assert event.logprobs.logprob == pytest.approx(wanted[event.token], abs=1e-9)
        best = np.argsort(-wanted)[:3]
        assert [token for token, _ in event.logprobs.top] == best.tolist()
        assert [p for _, p in event.logprobs.top] == pytest.approx(wanted[best].tolist(), abs=1e-9)
        context.append(event.token)
        kinds.add(event.drafted)
    assert False in kinds and (True in kinds or wrong_every)


def test_reuse_skips_what_is_cached():
    whole = tokens_of(make_loop())
    loop = make_loop()
    loop.cache.tokens += PROMPT[:3]
    loop.draft_cache["length"] = 3
    loop.reuse(3)
    assert tokens_of(loop) == whole and loop.stats.cached_tokens == 3
    with pytest.raises(DSpineError, match="reuse of 5 tokens"):
        make_loop().reuse(5)
