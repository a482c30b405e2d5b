"""The loop on toy models: greedy equality, stop tokens, limits, penalties, statistics, fall-backs that are said aloud."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from dspine.common.decoding import DecodingParams, decode
from dspine.common.errors import DSpineError
from dspine.common.sampling import SamplingParams
from dspine.common.selection.policies import StaticPolicy, parse_policy
from tests.helpers.toys import ToyDrafter, ToyTarget, markov_logits, oracle_drafter

VOCAB = 32
LOGITS = markov_logits(VOCAB, seed=3)
PROMPT = [1, 2, 3]


def greedy_text(count: int, logits_of=LOGITS) -> list[int]:
    text = list(PROMPT)
    for _ in range(count):
        text.append(int(np.argmax(logits_of(text))))
    return text[len(PROMPT) :]


def run(drafter, policy=None, prompt=PROMPT, target=None, **options):
    events = list(decode(target or ToyTarget(LOGITS, VOCAB), drafter, prompt, DecodingParams(**options), policy))
    return [e.token for e in events], events


@pytest.mark.parametrize("wrong_every", [0, 1, 3, 5])
@pytest.mark.parametrize("block", range(2, 17))
def test_greedy_equals_plain(block, wrong_every):
    drafter = oracle_drafter(LOGITS, PROMPT, block, wrong_every)
    tokens, events = run(drafter, max_tokens=256, break_even=0)
    assert tokens == greedy_text(256)
    stats = events[-1].stats
    assert stats.generated_tokens == 256 and sum(e.drafted for e in events) == stats.accepted_tokens
    if wrong_every == 0:
        assert stats.rounds == -(-255 // block)
    if wrong_every == 1:
        assert stats.accepted_tokens == 0 and stats.mean_acceptance_length == 1.0


def test_plain_loop_is_the_same_generator():
    tokens, events = run(None, max_tokens=64)
    assert tokens == greedy_text(64)
    assert events[-1].stats.plain_rounds == events[-1].stats.rounds == 63
    assert not any(e.drafted for e in events)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_static_policy_bounds_every_round(width):
    drafter = oracle_drafter(LOGITS, PROMPT, 8)
    tokens, events = run(drafter, StaticPolicy(width), max_tokens=64, break_even=0)
    assert tokens == greedy_text(64)
    assert max(events[-1].stats.verified_lengths) <= width


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 16])
def test_v5_short_outputs_still_draft(max_tokens):
    tokens, events = run(oracle_drafter(LOGITS, PROMPT, 8), max_tokens=max_tokens)
    assert tokens == greedy_text(max_tokens)
    assert events[-1].finish_reason == "length"
    assert (events[-1].stats.drafted_tokens > 0) == (max_tokens > 2)


@pytest.mark.parametrize("index", range(0, 18))
@pytest.mark.parametrize("wrong_every", [0, 4])
def test_t1_stop_token_anywhere_in_a_block(index, wrong_every):
    """EOS as first draft, in the middle, as last draft, as the target's own token: nothing after it exists anywhere."""
    text = greedy_text(40)
    eos = text[index]
    first = text.index(eos)
    target, drafter = ToyTarget(LOGITS, VOCAB), oracle_drafter(LOGITS, PROMPT, 8, wrong_every)
    caches = []
    make_cache = target.make_cache
    target.make_cache = lambda capacity: caches.append(make_cache(capacity)) or caches[-1]
    tokens, events = run(drafter, target=target, max_tokens=40, stop_ids=frozenset({eos}))
    assert tokens == text[: first + 1]
    assert [e.finish_reason for e in events[:-1]] == [None] * first and events[-1].finish_reason == "stop"
    stats = events[-1].stats
    assert stats.generated_tokens == first + 1
    assert stats.accepted_tokens == sum(e.drafted for e in events)
    assert caches[0].tokens == PROMPT + text[:first], "the cache ends before the newest token, the anchor"


def test_context_end_stops_the_loop():
    target = ToyTarget(LOGITS, VOCAB, context=20)
    tokens, events = run(oracle_drafter(LOGITS, PROMPT, 8), target=target, max_tokens=100)
    assert tokens == greedy_text(17) and events[-1].finish_reason == "length"


@pytest.mark.parametrize(
    "penalty", [{"presence_penalty": 1.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {"presence_penalty": -1.0}]
)
@pytest.mark.parametrize("width", [2, 8, 16])
def test_s4_penalties_equal_plain_decoding(penalty, width):
    """Rejected drafts are never counted, accepted ones once; the plain reference is written out here."""
    text, counts, output = list(PROMPT), np.zeros(VOCAB), np.zeros(VOCAB)
    np.add.at(counts, PROMPT, 1)
    for _ in range(96):
        row = np.array(LOGITS(text))
        factor = penalty.get("repetition_penalty", 1.0)
        row = np.where(counts > 0, np.where(row > 0, row / factor, row * factor), row)
        row = row - penalty.get("presence_penalty", 0.0) * (output > 0) - penalty.get("frequency_penalty", 0.0) * output
        text.append(int(np.argmax(row)))
        counts[text[-1]] += 1
        output[text[-1]] += 1
    sampling = SamplingParams(**penalty)
    plain, _ = run(None, max_tokens=96, sampling=sampling)
    assert plain == text[len(PROMPT) :]
    for wrong_every in (0, 3):
        tokens, _ = run(oracle_drafter(LOGITS, PROMPT, width, wrong_every), max_tokens=96, sampling=sampling, break_even=0)
        assert tokens == plain


def test_q1_non_finite_draft_decodes_plainly_and_says_so(caplog):
    drafter = oracle_drafter(LOGITS, PROMPT, 8)
    drafter.finite = False
    with caplog.at_level(logging.WARNING, logger="dspine"):
        tokens, events = run(drafter, max_tokens=40)
    assert tokens == greedy_text(40)
    assert events[-1].stats.non_finite_drafts == events[-1].stats.plain_rounds - 1  # the last round had no room to draft
    assert events[-1].stats.drafted_tokens == 0
    assert len([r for r in caplog.records if "not finite" in r.message]) == 1


def test_q1_hopeless_drafter_is_switched_off(caplog):
    drafter = oracle_drafter(LOGITS, PROMPT, 8, wrong_every=1)
    with caplog.at_level(logging.WARNING, logger="dspine"):
        tokens, events = run(drafter, max_tokens=128)
    assert tokens == greedy_text(128)
    assert "below the break-even" in events[-1].stats.drafting_disabled
    assert drafter.rounds == 50
    assert any("drafting is off" in r.message for r in caplog.records)


def test_drafter_context_follows_the_target():
    drafter = oracle_drafter(LOGITS, PROMPT, 6, wrong_every=4)
    _, events = run(drafter, max_tokens=60, prefill_chunk=2)
    assert drafter.contexts[0] == len(PROMPT)
    assert drafter.contexts == sorted(set(drafter.contexts))


@pytest.mark.parametrize(
    "prompt, options, words",
    [
        ([], {}, "empty"),
        ([1] * 4096, {}, "4096 tokens"),
        (PROMPT, {"max_tokens": 0}, "max_tokens"),
        (PROMPT, {"acceptance": "rejection"}, "temperature above 0"),
        (PROMPT, {"acceptance": "greedy", "sampling": SamplingParams(temperature=1.0)}, "temperature 0"),
        (PROMPT, {"acceptance": "typical"}, "greedy, point-mass, rejection"),
    ],
)
def test_bad_requests_are_one_clear_line(prompt, options, words):
    with pytest.raises(DSpineError, match=words) as error:
        run(oracle_drafter(LOGITS, PROMPT, 4), prompt=prompt, **options)
    assert "\n" not in str(error.value)


def test_rejection_with_a_rule_that_reads_drafts_is_refused():
    policy = StaticPolicy(4, reads_draft_tokens=True)
    with pytest.raises(DSpineError, match="not lossless.*point-mass"):
        run(ToyDrafter(None, 8), policy, sampling=SamplingParams(temperature=1.0), acceptance="rejection")


@pytest.mark.parametrize("text", ["", "static", "static:", "static:0", "static:-1", "full:3", "dcut?"])
def test_unknown_policy(text):
    with pytest.raises(DSpineError, match="static:W"):
        parse_policy(text)
    assert parse_policy("static:4").name == "static:4" and parse_policy("full").name == "full"


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.0),
        ("seed", -1),
    ],
)
def test_sampling_parameters_out_of_range(field, value):
    with pytest.raises(DSpineError, match=field):
        SamplingParams(**{field: value})
